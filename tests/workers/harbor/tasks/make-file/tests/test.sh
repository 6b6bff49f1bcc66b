#!/bin/sh
if [ "$(cat /app/hello.txt)" = "Hello, harbor!" ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
