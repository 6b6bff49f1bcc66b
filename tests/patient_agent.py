"""An agent for tests: one model call, then it waits until it is released, then more calls; it retries failed calls.

    python patient_agent.py DIRECTORY [CALLS [PATIENCE]]

CALLS is how many calls follow the release (1), PATIENCE for how many seconds a failed call is tried again (60).
"""

import http.client
import json
import os
import sys
import time
from urllib.parse import urlsplit

DIRECTORY = sys.argv[1]
CALLS = int(sys.argv[2]) if len(sys.argv) > 2 else 1
PATIENCE = float(sys.argv[3]) if len(sys.argv) > 3 else 60.0
BASE = urlsplit(os.environ["OPENAI_BASE_URL"])
MESSAGES = [{"role": "user", "content": "go"}]


def call() -> None:
    body = json.dumps({"model": os.environ["OPENAI_MODEL"], "messages": MESSAGES, "max_tokens": 8})
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    connection = http.client.HTTPConnection(BASE.hostname or "", BASE.port, timeout=30)
    try:
        connection.request("POST", BASE.path + "/chat/completions", body, headers)
        response = connection.getresponse()
        text = response.read()
    finally:
        connection.close()
    if response.status != 200:
        raise OSError(f"HTTP {response.status}: {text[:200]!r}")
    answer = json.loads(text)["choices"][0]["message"]
    MESSAGES.extend([{"role": "assistant", "content": answer.get("content") or ""}, {"role": "user", "content": "on"}])


def patiently() -> None:
    end = time.monotonic() + PATIENCE
    while True:
        try:
            return call()
        except (OSError, http.client.HTTPException) as error:
            if time.monotonic() > end:
                sys.exit(f"gave up: {error}")
            time.sleep(0.1)


patiently()
with open(DIRECTORY + "/started", "a") as started:
    started.write(os.environ["OPENAI_BASE_URL"] + "\n")
os.read(os.open(DIRECTORY + "/wait", os.O_RDONLY), 1)  # unbuffered: the rest is for others
for _ in range(CALLS):
    patiently()
