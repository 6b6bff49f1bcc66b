"""An agent for the chaos suite: model calls with pauses between them; it retries calls that fail.

python agent.py CALLS SECONDS [PATIENCE]        makes CALLS calls over SECONDS, retrying each for PATIENCE (30)
python agent.py stubborn SECONDS                ignores SIGTERM, and leaves children behind in other sessions
"""

import http.client
import json
import os
import signal
import sys
import time
from urllib.parse import urlsplit

SECONDS = float(sys.argv[2])
PATIENCE = float(sys.argv[3]) if len(sys.argv) > 3 else 30.0
MESSAGES = [{"role": "user", "content": "go"}]


def call() -> None:
    base = urlsplit(os.environ["OPENAI_BASE_URL"])
    body = json.dumps({"model": os.environ["OPENAI_MODEL"], "messages": MESSAGES, "max_tokens": 8})
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    connection = http.client.HTTPConnection(base.hostname or "", base.port, timeout=10)
    try:
        connection.request("POST", base.path + "/chat/completions", body, headers)
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


def stubborn() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    for _ in range(2):
        if os.fork() == 0:
            os.setsid()
            time.sleep(300)
            os._exit(0)
    time.sleep(SECONDS)
    os._exit(0)


if sys.argv[1] == "stubborn":
    stubborn()
for _ in range(int(sys.argv[1])):
    patiently()
    time.sleep(SECONDS / int(sys.argv[1]))
