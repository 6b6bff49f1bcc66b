"""A thread with an event loop of its own, for episodes.

A reward function of a user's that blocks stalls the other episodes of its worker, as it does in verifiers' own server,
but neither the worker's leases nor its other rollouts.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Coroutine
from contextlib import suppress
from functools import partial
from typing import Any, Generic, TypeVar

from workers.aio import in_own_thread, run_until_done, uninterrupted

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: Seconds that what runs there has to end when the worker does.
_STOP_LIMIT = 8.0


class LoopThread:
    """Runs coroutines of another loop on a loop of its own, which begins with the first of them."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopped: asyncio.Future[None] | None = None  # of that loop
        self._thread: threading.Thread | None = None

    async def run(self, work: Coroutine[Any, Any, T], grace: float) -> T:
        """Run ``work`` there and return what it returns; a cancellation is passed on, and has ``grace`` seconds."""
        loop = self._loop or self._begin()
        call = _Call(work)
        ended = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(call.run(), loop))
        try:
            return (await asyncio.shield(ended)).result()
        except asyncio.CancelledError:
            if not ended.done():
                loop.call_soon_threadsafe(call.cancel)
                with suppress(TimeoutError):
                    await uninterrupted(asyncio.shield(ended), grace)
                if not ended.done():
                    logger.warning("%s: an episode that was cancelled goes on after %g s", self._name, grace)
            raise

    async def aclose(self) -> None:
        """Cancel what still runs there, and end the thread."""
        if self._thread is None or self._loop is None or self._stopped is None:
            return
        self._loop.call_soon_threadsafe(self._stopped.set_result, None)
        await in_own_thread(partial(self._thread.join, _STOP_LIMIT), name=f"{self._name}-end")

    def _begin(self) -> asyncio.AbstractEventLoop:
        self._loop = loop = asyncio.new_event_loop()
        self._stopped = loop.create_future()
        serving = loop, self._stopped, self._name
        self._thread = threading.Thread(target=_serve, args=serving, name=self._name, daemon=True)
        self._thread.start()
        return loop


def _serve(loop: asyncio.AbstractEventLoop, stopped: asyncio.Future[None], name: str) -> None:
    asyncio.set_event_loop(loop)
    try:
        run_until_done(loop, stopped)
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        loop.run_until_complete(asyncio.wait_for(_ended(left), _STOP_LIMIT))
    except Exception:
        logger.exception("the loop of %s did not end in order", name)
    finally:
        loop.close()


class _Call(Generic[T]):
    def __init__(self, work: Coroutine[Any, Any, T]) -> None:
        self._work = work
        self._task: asyncio.Task[T] | None = None
        self._cancelled = False

    async def run(self) -> asyncio.Task[T]:
        """Return the task, ended; a cancelled task is no cancellation of this one."""
        self._task = asyncio.ensure_future(self._work)
        if self._cancelled:  # it came before this was begun
            self._task.cancel()
        await asyncio.wait({self._task})
        return self._task

    def cancel(self) -> None:
        self._cancelled = True
        if self._task is not None:
            self._task.cancel()


async def _ended(tasks: set[asyncio.Task[Any]]) -> None:
    await asyncio.gather(*tasks, return_exceptions=True)
