"""A consumer that is killed again and again while it writes what it is given into a file, and started again each time.

One process imports what a consumer needs, and forks each consumer: what is killed is a real one, and what it costs to
start Python ten times is not paid.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from support import wait_until

BATCH = "big"
CONSUMER = """
import asyncio, os, sys
from producer import Producer, ProducerSettings

async def main(url, path, count):
    async with Producer(ProducerSettings(redis_url=url)) as producer:
        results = producer.results("big", consumer="trainer", count=count)
        with open(path, "r+b", buffering=0) as out:
            lines = out.read().split(b"\\n")
            out.seek(-len(lines[-1]), 2)  # half a line, if any
            out.truncate()
            last = lines[-2].decode() if len(lines) > 1 else None
            async for result in results:
                if not (results.redelivered and result.rollout_id == last):
                    out.write(result.rollout_id.encode() + b"\\n")

for _ in sys.stdin:
    if pid := os.fork():
        print(pid, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
    else:
        asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
        os._exit(0)
"""


def consume_killed(url: str, out: Path, count: int, kills: int, seed: int, more: Callable[[int], None]) -> None:
    """Consume ``count`` results of the batch `BATCH` into ``out``, with so many kills in between.

    ``more(round)`` ends some rollouts before each start, so that no consumer but the last can come to the end.
    """
    chance = random.Random(seed)
    out.touch()
    command = [sys.executable, "-c", CONSUMER, url, str(out), str(count)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) as starter:
        assert starter.stdin
        assert starter.stdout
        for round_ in range(kills + 1):
            before = out.stat().st_size
            more(round_)
            starter.stdin.write("start\n")
            pid = int(starter.stdout.readline())
            if round_ < kills:
                wait_until(lambda before=before: out.stat().st_size > before, timeout=30)
                time.sleep(chance.random() / 200)  # any moment will do, as long as it differs
                os.kill(pid, signal.SIGKILL)
            assert int(starter.stdout.readline()) == (-signal.SIGKILL if round_ < kills else 0)
        starter.stdin.close()


def share(round_: int, kills: int, count: int) -> slice:
    """Return which of ``count`` rollouts are to end before this round."""
    return slice(round_ * count // (kills + 1), (round_ + 1) * count // (kills + 1))
