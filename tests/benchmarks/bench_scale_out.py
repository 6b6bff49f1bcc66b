"""Rollouts that wait, on one worker process and on two: how much faster two are, and what is lost as they come and go.

The agents nap, as those do that wait for a model; each worker runs `SLOTS` at one time, so slots are what is short.
Both fleets run side by side and take turns, several times. Then one fleet is given a second worker while rollouts run,
and its first worker is told to end: each rollout must be delivered once.
"""

from __future__ import annotations

import asyncio
import signal
import statistics
import time
from collections import Counter
from collections.abc import AsyncIterator

import orjson
import redis
from harness import finish, null_fleet, null_requests, report

from producer import Producer, broker
from producer.settings import ProducerSettings
from workers.local import LocalStack

SLOTS, NAP = 40, 1.0
COUNT, ROUNDS = 960, 3  # so many that the start and the end of a batch, when slots are free, do not count


async def results_of(stack: LocalStack, count: int) -> AsyncIterator[str]:
    """Submit naps and yield the id of each result as it comes; all must have completed."""
    async with Producer(ProducerSettings(redis_url=stack.redis_url)) as producer, asyncio.timeout(120):
        batch = await producer.submit_many(null_requests(count, f"nap {NAP}"), max_in_flight=count)
        async for result in batch:
            assert result.completed, result.error
            yield result.rollout_id


async def rate_of(stack: LocalStack, count: int = COUNT) -> float:
    """Return the rollouts a second from submission to the last result."""
    began = time.perf_counter()
    delivered = [rollout_id async for rollout_id in results_of(stack, count)]
    assert len(set(delivered)) == len(delivered) == count
    return count / (time.perf_counter() - began)


async def come_and_go(stack: LocalStack) -> Counter[str]:
    """Add a worker while rollouts run, then have the first one drain; returns how often each result came."""
    delivered: Counter[str] = Counter()
    ending: asyncio.Task[int] | None = None
    async for rollout_id in results_of(stack, COUNT):
        delivered[rollout_id] += 1
        if len(delivered) == COUNT // 6:
            await asyncio.to_thread(stack._start_workers)
        if len(delivered) == COUNT // 2:
            ending = asyncio.create_task(asyncio.to_thread(drain_one, stack))
    assert ending is not None
    assert await ending == 0, "it ends with status 0"
    return delivered


def drain_one(stack: LocalStack) -> int:
    """Tell the worker that was started first to end, and wait for it."""
    child = next(child for child in stack._children if child.name == "worker1")
    child.process.send_signal(signal.SIGTERM)
    return child.process.wait(60)


def workers_of(stack: LocalStack) -> int:
    """Return how many workers report that they run."""
    with redis.Redis.from_url(stack.redis_url) as client:
        reports = (client.get(broker.worker_key(name.decode())) for name in client.zrange(broker.WORKERS, 0, -1))
        return sum(orjson.loads(told)["state"] == "running" for told in reports if told)


def main() -> None:
    """Run both in turn, then let workers come and go."""
    with null_fleet(SLOTS, workers=1) as one, null_fleet(SLOTS, workers=2) as two:
        assert (workers_of(one), workers_of(two)) == (1, 2)
        for stack in (one, two):
            asyncio.run(rate_of(stack, 2 * SLOTS))  # warm up
        rates = [(asyncio.run(rate_of(one)), asyncio.run(rate_of(two))) for _ in range(ROUNDS)]
        delivered = asyncio.run(come_and_go(one))
    ratios = [with_two / with_one for with_one, with_two in rates]
    report(
        "scale_out",
        required={"ratio": (">=", 1.85), "come_and_go.lost": ("==", 0), "come_and_go.duplicates": ("==", 0)},
        slots_per_worker=SLOTS,
        nap_seconds=NAP,
        one_worker_per_second=statistics.median(rate for rate, _ in rates),
        two_workers_per_second=statistics.median(rate for _, rate in rates),
        ratio=statistics.median(ratios),
        ratio_min=min(ratios),
        ratio_max=max(ratios),
        come_and_go={
            "submitted": COUNT,
            "lost": COUNT - len(delivered),
            "duplicates": sum(times - 1 for times in delivered.values()),
        },
    )


if __name__ == "__main__":
    main()
    finish()
