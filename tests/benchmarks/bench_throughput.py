"""Null rollouts a second through the whole path, against bare asyncio programs that make the same gateway calls.

The bare programs have no Celery, no Redis and no records: they register, fetch the trajectory and unregister, with
`httpx.AsyncClient` as anybody would write it, in the pool size at which it was fastest here, and with the worker's own
client, which is several times as fast. The gateway process is the same; the three run in turn, several times.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable

import httpx
from harness import finish, null_fleet, null_requests, report

from producer import Producer
from producer.settings import ProducerSettings
from workers.gateway.client import HttpGateway
from workers.gateway.protocol import Registration
from workers.local import LocalStack

COUNT = 1500
ROUNDS = 5
AT_ONCE = 100
HTTPX_CONNECTIONS = 8  #: with 32 it makes a third of the calls, with 100 a tenth


async def bare(stack: LocalStack, prefix: str) -> float:
    """Return the rollouts a second of the gateway calls alone, by httpx."""
    free = asyncio.Semaphore(AT_ONCE)
    headers = {"authorization": f"Bearer {stack.control_key}"}
    limits = httpx.Limits(max_connections=HTTPX_CONNECTIONS)
    async with httpx.AsyncClient(base_url=stack.gateway_url, headers=headers, limits=limits, timeout=60) as client:

        async def one(number: int) -> None:
            base = f"/v1/rollouts/{prefix}-{number}"
            async with free:
                registration = {"model": "null", "sampling_params": {}, "max_turns": -1, "max_seq_len": None}
                (await client.post(f"{base}/register", json=registration)).raise_for_status()
                (await client.get(f"{base}/trajectory")).raise_for_status().json()
                (await client.post(f"{base}/unregister")).raise_for_status()

        return await rate_of(one)


async def bare_with_our_client(stack: LocalStack, prefix: str) -> float:
    """Return the rollouts a second of the gateway calls alone, by the worker's own client."""
    gateway = HttpGateway(control_key=stack.control_key)
    free = asyncio.Semaphore(AT_ONCE)

    async def one(number: int) -> None:
        async with (
            free,
            gateway.registered(stack.gateway_url, f"{prefix}-{number}", Registration(model="null"), api_key="key"),
        ):
            await gateway.fetch_trajectory(stack.gateway_url, f"{prefix}-{number}")

    rate = await rate_of(one)
    await gateway.aclose()
    return rate


async def rate_of(one: Callable[[int], Awaitable[None]]) -> float:
    began = time.perf_counter()
    await asyncio.gather(*(one(n) for n in range(COUNT)))
    return COUNT / (time.perf_counter() - began)


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
    """Run them in turn."""
    with null_fleet(concurrency=AT_ONCE) as stack:
        asyncio.run(whole(stack))  # warm up
        asyncio.run(bare(stack, "warm"))
        rates = [
            (
                asyncio.run(whole(stack)),
                asyncio.run(bare(stack, f"httpx{n}")),
                asyncio.run(bare_with_our_client(stack, f"ours{n}")),
            )
            for n in range(ROUNDS)
        ]
    ratios = [whole_path / by_httpx for whole_path, by_httpx, _ in rates]
    report(
        "throughput",
        required={"ratio": (">=", 0.5)},
        whole_path_per_second=statistics.median(r[0] for r in rates),
        bare_per_second=statistics.median(r[1] for r in rates),
        bare_with_our_client_per_second=statistics.median(r[2] for r in rates),
        ratio=statistics.median(ratios),
        ratio_min=min(ratios),
        ratio_max=max(ratios),
        ratio_to_our_client=statistics.median(whole_path / by_ours for whole_path, _, by_ours in rates),
    )


if __name__ == "__main__":
    main()
    finish()
