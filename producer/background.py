"""An event loop in a thread of its own, and iterating over what comes from it without ``await``."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator
from concurrent.futures import Future
from typing import Any, TypeVar

from producer.connection import end

T = TypeVar("T")


class BackgroundLoop:
    """An event loop in a daemon thread; usable from any thread, also from inside another running loop."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._stopping = False
        self._beginning = threading.Lock()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rollouts-producer", daemon=True)
        self._thread.start()

    def begin(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run ``work`` there, and return what it will end with; raises RuntimeError once it stops."""
        with self._beginning:
            if self._stopping:  # nothing would end it, and whoever waits for it would wait for ever
                work.close()
                raise RuntimeError("the producer is closed")
            return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run ``work`` there to its end."""
        future = self.begin(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # a Ctrl-C in the caller's thread ends the work too
            raise

    def stop(self) -> None:
        """End what still runs there, and the thread."""
        with self._beginning:
            self._stopping = True
            ending = asyncio.run_coroutine_threadsafe(self._end_tasks(), self._loop)
        ending.result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    @staticmethod
    async def _end_tasks() -> None:
        await end(*(task for task in asyncio.all_tasks() if task is not asyncio.current_task()))
        await asyncio.get_running_loop().shutdown_default_executor()


class Following(Iterator[T]):
    """Iterates over ``source``, which lives on ``loop``, as a plain iterator; threads may share it.

    A Ctrl-C ends the waiting and not what is waited for: the next call returns it. An error does not end the iterator
    either, where its source has more.
    """

    def __init__(self, loop: BackgroundLoop, source: AsyncIterator[T]) -> None:
        self._loop = loop
        self._source = source
        self._next: Future[T | None] | None = None
        self._one_at_a_time = threading.Lock()

    def __next__(self) -> T:
        with self._one_at_a_time:
            if self._next is None:
                self._next = self._loop.begin(self._following())
            found = self._awaited(self._next)
            self._next = None
        if found is None:
            raise StopIteration
        return found

    def _awaited(self, coming: Future[T | None]) -> T | None:
        try:
            return coming.result()
        except BaseException as error:
            if coming.cancelled() or (coming.done() and coming.exception() is error):  # it is not ours
                self._next = None
            raise

    async def _following(self) -> T | None:
        return await anext(self._source, None)
