#!/bin/sh
echo "Hello, harbor!" > /app/hello.txt
