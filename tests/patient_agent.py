"""The tests' agent: it makes model calls, and tries those that fail again for PATIENCE seconds.

python patient_agent.py wait DIRECTORY CALLS PATIENCE    one call, then it waits for its release, then CALLS more
python patient_agent.py spread CALLS SECONDS PATIENCE    CALLS calls over SECONDS
python patient_agent.py stubborn SECONDS                 ignores SIGTERM, leaves children in other sessions behind
"""

import json
import os
import signal
import socket
import sys
import time

MESSAGES = [{"role": "user", "content": "go"}]


def call() -> None:
    """Make one call by hand: hundreds of these agents run at once, and `http.client` takes long to import."""
    host, _, path = os.environ["OPENAI_BASE_URL"].removeprefix("http://").partition("/")
    name, _, port = host.partition(":")
    body = json.dumps({"model": os.environ["OPENAI_MODEL"], "messages": MESSAGES, "max_tokens": 8})
    head = f"POST /{path}/chat/completions HTTP/1.0\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    head += f"Authorization: Bearer {os.environ['OPENAI_API_KEY']}\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection((name, int(port or 80)), timeout=30) as connection:
        connection.sendall((head + body).encode())
        answered = b"".join(iter(lambda: connection.recv(65536), b""))
    status, _, text = answered.partition(b"\r\n\r\n")
    if b" 200 " not in status.partition(b"\r\n")[0]:
        raise OSError(f"{status[:100]!r}: {text[:200]!r}")
    answer = json.loads(text)["choices"][0]["message"]
    MESSAGES.extend([{"role": "assistant", "content": answer.get("content") or ""}, {"role": "user", "content": "on"}])


def patiently(patience: float) -> None:
    end = time.monotonic() + patience
    while True:
        try:
            return call()
        except (OSError, ValueError) as error:
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
