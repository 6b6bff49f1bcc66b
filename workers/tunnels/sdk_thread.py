"""A thread with an event loop of its own, for an SDK that blocks its loop now and then.

The tunnel SDK waits for its process on the event loop (5 s for one that ignores SIGTERM), starts processes there, and
keeps HTTP connections that belong to one loop. On the worker's loop each of those would hold up every rollout.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class SdkThread:
    """Runs coroutines on its own loop for callers on another one. It starts with the first call.

    It is a daemon thread, and so are those of `blocking`: what hangs in them must not keep the process from exiting.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    async def run(self, work: Callable[[], Coroutine[Any, Any, T]], *, timeout: float) -> T:
        """Run ``work()`` there; raises `TimeoutError` after ``timeout`` seconds, `RuntimeError` if this is closed.

        Its time is measured here. Lateness and cancellation are passed on without waiting for what ``work`` does then:
        it may block its loop.
        """
        async with asyncio.timeout(timeout):
            try:
                return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work(), self._running()))
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if task is not None and task.cancelling():
                    raise
                raise RuntimeError(f"the thread {self._name} was closed meanwhile") from None

    async def blocking(self, call: Callable[[], T], *, timeout: float) -> T:
        """Call ``call()`` in its own thread; raises `TimeoutError` after ``timeout`` seconds, and lets it go on."""
        async with asyncio.timeout(timeout):
            return await asyncio.wrap_future(in_daemon_thread(call, self._name))

    def _running(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=_serve, args=(self._loop,), name=self._name, daemon=True)
            self._thread.start()
        return self._loop

    async def aclose(self) -> None:
        """End the loop and its thread; what still runs there is cancelled. A thread that hangs is left behind."""
        loop, thread, self._loop, self._thread = self._loop, self._thread, None, None
        if loop is not None and thread is not None:
            loop.call_soon_threadsafe(loop.stop)
            await self.blocking(lambda: thread.join(2.0), timeout=3.0)


def in_daemon_thread(call: Callable[[], T], name: str) -> Future[T]:
    """Call ``call()`` in a daemon thread, and return the future of its outcome."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()  # nobody can cancel a thread

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # noqa: BLE001 - raised by whoever awaits the future
            future.set_exception(error)

    threading.Thread(target=run, name=f"{name}-call", daemon=True).start()
    return future


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        loop.close()
