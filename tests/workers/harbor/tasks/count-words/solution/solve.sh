#!/bin/sh
wc -w < /app/text/poem.txt | tr -d ' ' > /app/count.txt
