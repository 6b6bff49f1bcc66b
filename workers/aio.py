"""Two small asyncio tools that the standard library lacks."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")


async def uninterrupted(work: Awaitable[T], timeout: float | None) -> T:
    """Await ``work`` to its end even if this task is cancelled meanwhile; the cancellation is raised afterwards.

    Raises `TimeoutError` when ``work`` takes longer than ``timeout`` seconds: clean-up must not hang either.
    """
    task = asyncio.ensure_future(_bounded(work, timeout))
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            if not task.done():
                cancelled = error
        except Exception:  # noqa: BLE001
            break  # raised below, from the task itself
    if cancelled is not None:
        if not task.cancelled():
            task.exception()  # retrieved: the cancellation goes first, and whoever shields logs its own failures
        raise cancelled
    return task.result()


async def _bounded(work: Awaitable[T], timeout: float | None) -> T:
    async with asyncio.timeout(timeout):
        return await work


async def first_of(*works: Awaitable[object], timeout: float) -> bool:
    """Wait until one of ``works`` ends, then cancel the others; False when ``timeout`` seconds pass first.

    Raises what the first one raised.
    """
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
        return bool(done)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
