"""The thread that keeps a blocking SDK off the worker's loop."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from workers.tunnels.sdk_thread import SdkThread


def test_what_blocks_there_does_not_block_here() -> None:
    release = threading.Event()

    async def blocks() -> str:
        release.wait()
        return "done"

    async def story() -> str:
        thread = SdkThread("test")
        work = asyncio.create_task(thread.run(blocks, timeout=30))
        for _ in range(10):
            await asyncio.sleep(0.001)
        assert not work.done()
        release.set()
        try:
            return await work
        finally:
            await thread.aclose()

    assert asyncio.run(story()) == "done"


def test_a_call_that_takes_too_long_is_cancelled_there_and_not_waited_for() -> None:
    ended = threading.Event()

    async def slow() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    async def story() -> None:
        thread = SdkThread("test")
        with pytest.raises(TimeoutError):
            await thread.run(slow, timeout=0.01)
        assert await asyncio.to_thread(ended.wait, 30)
        await thread.aclose()

    asyncio.run(story())


def test_an_exception_comes_out_as_it_is() -> None:
    def fails() -> None:
        raise KeyError("x")

    async def story() -> None:
        thread = SdkThread("test")
        with pytest.raises(KeyError):
            await thread.blocking(fails, timeout=30)

    asyncio.run(story())


def test_closing_cancels_what_runs_and_leaves_a_hanging_thread_behind() -> None:
    release, began, cancelled = threading.Event(), threading.Event(), threading.Event()

    async def waits() -> None:
        began.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    async def story() -> float:
        thread = SdkThread("test")
        work = asyncio.create_task(thread.run(waits, timeout=60))
        assert await asyncio.to_thread(began.wait, 30)
        with pytest.raises(TimeoutError):
            await thread.blocking(release.wait, timeout=0.01)
        closing = time.monotonic()
        await thread.aclose()
        await thread.aclose()
        with pytest.raises(RuntimeError, match="closed"):  # no cancellation: nobody cancelled who waits for it
            await work
        return time.monotonic() - closing

    assert asyncio.run(story()) < 20, "it hangs for ever"
    assert cancelled.is_set()
    release.set()
