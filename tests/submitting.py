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
    url: str, wanted: list[RolloutRequest], meanwhile: Callable[[], object] = lambda: None, timeout: float = 100
) -> list[RolloutResult]:
    """Submit ``wanted``, do ``meanwhile`` in a thread, and return the results in the order of completion.

    What fails in ``meanwhile`` is raised at once: without it, the results may never come.
    """
    results: list[RolloutResult] = []

    async def collect() -> None:
        async with Producer(ProducerSettings(redis_url=url)) as producer:
            async for result in await producer.submit_many(wanted):
                results.append(result)

    async def scenario() -> None:
        tasks = {asyncio.create_task(collect()), asyncio.create_task(asyncio.to_thread(meanwhile))}
        ended, _ = await asyncio.wait(tasks, timeout=timeout, return_when=asyncio.FIRST_EXCEPTION)
        for task in ended:
            task.result()
        assert len(ended) == len(tasks), f"{len(results)} of {len(wanted)} results after {timeout} s"

    asyncio.run(scenario())
    return results
