"""A batch of 5,000 whose consumer is killed (SIGKILL) ten times: its file has each exactly once, or this fails.

``bench_killed_consumer.py SEED`` repeats a run's moments of killing.
"""

from __future__ import annotations

import asyncio
import random
import sys
import tempfile
import time
from pathlib import Path

import redis
from harness import finish, report
from killed_consumer import BATCH, consume_killed, share
from support import RedisServer

from producer import Producer, ProducerSettings, RolloutRequest, RolloutResult, StopCondition, broker

COUNT, KILLS = 5_000, 10


async def submit(url: str, requests: list[RolloutRequest]) -> None:
    async with Producer(ProducerSettings(redis_url=url)) as producer:
        await producer.connection.submit(requests)


class Ending:
    """Ends rollouts by the scripts with which workers do, without running them."""

    def __init__(self, url: str) -> None:
        self._client = redis.Redis.from_url(url)
        names = ("claim", "commit")
        self._claim, self._commit = (self._client.register_script(broker.script("workers", name)) for name in names)

    def end(self, requests: list[RolloutRequest]) -> None:
        ttl = int(broker.RESULT_TTL.total_seconds())
        for request in requests:
            rollout_id, job = request.rollout_id, broker.job_key(request.rollout_id)
            result = RolloutResult.for_request(request, StopCondition.COMPLETED)
            data = broker.encode_result({"status": "SUCCESS", "result": result, "task_id": rollout_id})
            self._claim(keys=[job], args=[rollout_id, "w", 60_000, ttl, "", "", ""])
            keys = [job, broker.stream_key(BATCH), broker.result_key(rollout_id), broker.LEDGER]
            self._commit(keys=keys, args=[rollout_id, 1, "completed", ttl, data, "owned"])


def main(directory: Path, seed: int) -> None:
    """Submit, kill and count."""
    server = RedisServer(directory)
    server.start()
    requests = [RolloutRequest(model="null", rollout_id=f"r-{n}", batch_id=BATCH, example_id=n) for n in range(COUNT)]
    asyncio.run(submit(server.url, requests))
    ending, out, began = Ending(server.url), directory / "out.txt", time.perf_counter()
    consume_killed(server.url, out, COUNT, KILLS, seed, lambda n: ending.end(requests[share(n, KILLS, COUNT)]))
    seconds = time.perf_counter() - began
    server.stop()
    lines = out.read_text().splitlines()
    missing, repeated = COUNT - len(set(lines)), len(lines) - len(set(lines))
    numbers = {"rollouts": COUNT, "kills": KILLS, "missing": missing, "repeated": repeated, "seconds": seconds}
    report("killed_consumer", {"missing": ("==", 0), "repeated": ("==", 0)}, **numbers, seed=seed)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as given:
        main(Path(given), int(sys.argv[1]) if len(sys.argv) > 1 else random.randrange(2**32))
    finish()
