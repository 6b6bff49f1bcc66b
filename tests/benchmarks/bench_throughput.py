"""Null rollouts a second through the whole path, against a bare asyncio program that makes the same gateway calls.

The bare program has no Celery, no Redis and no records: it registers, fetches the trajectory and unregisters, with the
same client and as many at once. Both use the same gateway process; they run in turn, several times.
"""

from __future__ import annotations

import asyncio
import statistics
import time

from harness import null_fleet, null_requests, report

from producer import Producer
from producer.settings import ProducerSettings
from workers.gateway.client import HttpGateway
from workers.gateway.protocol import Registration
from workers.local import LocalStack

COUNT = 1500
ROUNDS = 5
AT_ONCE = 100


async def bare(stack: LocalStack, prefix: str) -> float:
    """Return the rollouts a second of the gateway calls alone."""
    gateway = HttpGateway(control_key=stack.control_key)
    free = asyncio.Semaphore(AT_ONCE)

    async def one(number: int) -> None:
        async with (
            free,
            gateway.registered(stack.gateway_url, f"{prefix}-{number}", Registration(model="null"), api_key="key"),
        ):
            await gateway.fetch_trajectory(stack.gateway_url, f"{prefix}-{number}")

    began = time.perf_counter()
    await asyncio.gather(*(one(n) for n in range(COUNT)))
    rate = COUNT / (time.perf_counter() - began)
    await gateway.aclose()
    return rate


async def whole(stack: LocalStack) -> float:
    """Return the rollouts a second from submission to the last delivered result."""
    async with Producer(ProducerSettings(redis_url=stack.redis_url)) as producer:
        began = time.perf_counter()
        batch = await producer.submit_many(null_requests(COUNT), max_in_flight=COUNT)
        results = [result async for result in batch]
        rate = COUNT / (time.perf_counter() - began)
    assert len({r.rollout_id for r in results}) == COUNT
    assert all(r.completed for r in results), next(r.error for r in results if not r.completed)
    return rate


def main() -> None:
    """Alternate the two."""
    with null_fleet(concurrency=AT_ONCE) as stack:
        asyncio.run(whole(stack))  # warm up
        asyncio.run(bare(stack, "warm"))
        rates = [(asyncio.run(whole(stack)), asyncio.run(bare(stack, f"b{n}"))) for n in range(ROUNDS)]
    ratios = [ours / theirs for ours, theirs in rates]
    report(
        "throughput",
        whole_path_per_second=statistics.median(r[0] for r in rates),
        bare_per_second=statistics.median(r[1] for r in rates),
        ratio=statistics.median(ratios),
        ratio_min=min(ratios),
        ratio_max=max(ratios),
        required_ratio=0.5,
    )


if __name__ == "__main__":
    main()
