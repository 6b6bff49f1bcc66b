"""The tests' agent: it makes model calls, and tries those that fail again for PATIENCE seconds.

python patient_agent.py wait DIRECTORY CALLS PATIENCE    one call, then it waits for its release, then CALLS more
python patient_agent.py spread CALLS SECONDS PATIENCE    CALLS calls over SECONDS
python patient_agent.py stubborn SECONDS                 ignores SIGTERM, leaves children in other sessions behind
"""

import http.client
import json
import os
import signal
import sys
import time
from urllib.parse import urlsplit

MESSAGES = [{"role": "user", "content": "go"}]


def call() -> None:
    base = urlsplit(os.environ["OPENAI_BASE_URL"])
    body = json.dumps({"model": os.environ["OPENAI_MODEL"], "messages": MESSAGES, "max_tokens": 8})
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    connection = http.client.HTTPConnection(base.hostname or "", base.port, timeout=30)
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


def patiently(patience: float) -> None:
    end = time.monotonic() + patience
    while True:
        try:
            return call()
        except (OSError, http.client.HTTPException) as error:
            if time.monotonic() > end:
                sys.exit(f"gave up: {error}")
            time.sleep(0.1)


def wait(directory: str, calls: int, patience: float) -> None:
    patiently(patience)
    with open(directory + "/started", "a") as started:
        started.write(os.environ["OPENAI_BASE_URL"] + "\n")
    os.read(os.open(directory + "/wait", os.O_RDONLY), 1)  # unbuffered: the rest is for others
    for _ in range(calls):
        patiently(patience)


def spread(calls: int, seconds: float, patience: float) -> None:
    for _ in range(calls):
        patiently(patience)
        time.sleep(seconds / calls)


def stubborn(seconds: float) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    for _ in range(2):
        if os.fork() == 0:
            os.setsid()
            time.sleep(300)
            os._exit(0)
    time.sleep(seconds)
    os._exit(0)


match sys.argv[1:]:
    case ["wait", directory, calls, patience]:
        wait(directory, int(calls), float(patience))
    case ["spread", calls, seconds, patience]:
        spread(int(calls), float(seconds), float(patience))
    case ["stubborn", seconds]:
        stubborn(float(seconds))
    case _:
        sys.exit(__doc__)
