"""Submits rollouts and collects their results, while the test breaks things."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from producer import Producer, RolloutRequest, RolloutResult
from producer.settings import ProducerSettings


def request(**fields: Any) -> RolloutRequest:
    return RolloutRequest.parse({"model": "stand-in", "prompt": "hi", **fields})


def requests(count: int, **fields: Any) -> list[RolloutRequest]:
    return [request(example_id=n, **fields) for n in range(count)]


def results_of(
    url: str, wanted: list[RolloutRequest], meanwhile: Callable[[], object] = lambda: None, timeout: float = 60
) -> list[RolloutResult]:
    """Submit ``wanted``, do ``meanwhile`` in a thread, and return the results in the order of completion."""

    async def scenario() -> list[RolloutResult]:
        async with Producer(ProducerSettings(redis_url=url)) as producer, asyncio.timeout(timeout):
            batch = await producer.submit_many(wanted)
            breaking = asyncio.create_task(asyncio.to_thread(meanwhile))
            results = [result async for result in batch]
            await breaking
            return results

    return asyncio.run(scenario())
