#!/bin/sh
expected=$(wc -w < /tests/poem.txt)
if [ "$(cat /app/count.txt)" -eq "$expected" ]; then reward=1.0; else reward=0.0; fi
echo "$reward" > /logs/verifier/reward.txt
