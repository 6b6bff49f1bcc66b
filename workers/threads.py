"""The threads of a worker process, and how work passes between them: event loop, tracers, Celery's main thread."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import AbstractAsyncContextManager, AsyncExitStack, contextmanager
from queue import Empty, SimpleQueue
from typing import Any

import uvloop
from celery.worker.state import maybe_shutdown
from vine import promise

from workers.aio import run_until_done
from workers.garbage import collect_garbage

logger = logging.getLogger(__name__)


class LoopLag:
    """How late an event loop wakes, in seconds, over a sliding window of one minute.

    ``progress`` is when it last woke, in `time.monotonic` seconds: while the loop hangs, only that tells.
    """

    def __init__(self, interval: float = 0.1, window: float = 60.0) -> None:
        self._interval = interval
        self._samples: deque[float] = deque(maxlen=int(window / interval))
        self.last = 0.0
        self.progress = time.monotonic()

    async def watch(self) -> None:
        """Measure until cancelled."""
        while True:
            due = time.monotonic() + self._interval
            await asyncio.sleep(self._interval)
            self.progress = time.monotonic()
            self.last = max(0.0, self.progress - due)
            self._samples.append(self.last)

    @property
    def max(self) -> float:
        """The greatest lag of the window."""
        return self.percentile(100)

    def percentile(self, percent: float) -> float:
        """Return the lag that ``percent`` of the window's samples do not exceed; 0 before the first sample."""
        samples = sorted(tuple(self._samples))
        return samples[min(len(samples) - 1, int(len(samples) * percent / 100))] if samples else 0.0

    def summary(self) -> dict[str, float]:
        """Return last, p50, p99 and max."""
        return {"last": self.last, "p50": self.percentile(50), "p99": self.percentile(99), "max": self.max}


@contextmanager
def signal_handled(number: signal.Signals, handle: Callable[[], object]) -> Iterator[None]:
    """Call ``handle()`` when the signal comes, instead of what else would; does nothing outside of the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(number, lambda *_: handle())
    try:
        yield
    finally:
        signal.signal(number, before)


def leave_within(seconds: float, status: int) -> None:
    """Have the process end with ``status`` after ``seconds``, should its threads keep it until then.

    The interpreter waits for the threads of executors, and one of these may be in a hook that never returns.
    """

    def leave() -> None:
        time.sleep(seconds)
        logger.warning("Threads that hang are left behind: %s", ", ".join(_other_threads()))
        logging.shutdown()
        os._exit(status)

    threading.Thread(target=leave, name="leave", daemon=True).start()


def _other_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if not thread.daemon]


class LoopThread:
    """An event loop in a thread of its own, inside a lifespan that it enters and exits in one task."""

    def __init__(
        self,
        lifespan: Callable[[], AbstractAsyncContextManager[None]],
        on_lost: Callable[[], None],
        exit_grace: float,
    ) -> None:
        self._lifespan = lifespan
        self._on_lost = on_lost
        self._exit_grace = exit_grace
        self._loop: asyncio.AbstractEventLoop | None = None
        self._main_task: asyncio.Task[None] | None = None
        self._stop = asyncio.Event()
        self._stopping = False
        self._exited = threading.Event()
        self.lag = LoopLag()
        # Daemon threads, here and below: what hangs in them must not keep a process from exiting.
        self.thread = threading.Thread(target=self._run, name="event-loop", daemon=True)
        self._ready: Future[None] = Future()

    def start(self) -> None:
        """Run the loop and enter the lifespan; raises what entering raised, or what ends the worker meanwhile."""
        self.thread.start()
        try:
            while not wait([self._ready], timeout=0.1).done:
                maybe_shutdown()
        except BaseException:
            self.stop()
            raise
        self._ready.result()

    def call(self, function: Callable[..., object], *args: Any) -> None:
        """Have the loop call ``function``, unless it has ended. From any thread and from signal handlers."""
        if self._loop is None:
            return
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:
            if not self._loop.is_closed():
                raise

    def stop(self) -> None:
        """Exit the lifespan and end the loop, in bounded time; doing it again is fine."""
        self._stopping = True
        if self.thread.ident is None:
            return
        self.call(self._end)
        self._exited.wait(self._exit_grace + 1.0)
        # What is left now are coroutines that outlived their own grace: the loop cancels them, and waits for them.
        self.thread.join(1.0)
        if self.thread.is_alive():
            logger.error("The event loop did not end and is left behind")

    def _end(self) -> None:
        self._stop.set()
        if not self._ready.done() and self._main_task is not None:
            self._main_task.cancel()

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                try:
                    loop = runner.get_loop()
                    run_until_done(loop, loop.create_task(self._main()))
                finally:
                    self._exited.set()
        except BaseException as error:
            if not self._ready.done():
                self._ready.set_exception(error)  # raised by `start`
                return
            logger.critical("The event loop ended with an error", exc_info=error)
        if not self._stopping:
            self._on_lost()

    async def _main(self) -> None:
        self._main_task = asyncio.current_task()
        self._loop = asyncio.get_running_loop()
        # Before the lifespan: a loop that moves while that waits for Redis must not look hung.
        watches = [asyncio.create_task(self.lag.watch()), asyncio.create_task(collect_garbage())]
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self._lifespan())
            self._ready.set_result(None)
            await self._stop.wait()
            async with asyncio.timeout(self._exit_grace):
                await stack.aclose()
        for watch in watches:
            watch.cancel()


class Tracers:
    """A few threads for Celery's tracers, which wait for the result backend most of the time.

    Plainer than an executor: nobody waits for a future here, and thousands of jobs a second would each make one.
    """

    def __init__(self) -> None:
        self._work: SimpleQueue[tuple[Callable[..., object], tuple[Any, ...]] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []

    def start(self, count: int) -> None:
        """Start ``count`` threads."""
        for number in range(count):
            thread = threading.Thread(target=self._run, name=f"tracer-{number}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def submit(self, function: Callable[..., object], *args: Any) -> None:
        """Have one of the threads call ``function``."""
        self._work.put((function, args))

    def stop(self) -> None:
        """End the threads once they have done what was submitted; one that hangs is left behind."""
        for _ in self._threads:
            self._work.put(None)
        self._threads.clear()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            function, args = work
            try:
                function(*args)
            except Exception:
                logger.exception("%r failed on a tracer's thread", function)
            # An idle thread must not keep the last job alive.
            del work, function, args


class Mailbox:
    """Calls Celery's callbacks one after the other, in the order of posting, on the thread of Celery's event loop.

    With a transport that has no event loop (``hub`` is None) they are called on the tracers' threads.
    """

    def __init__(self, submit: Callable[[Callable[[], None]], None]) -> None:
        self.hub: Any = None
        self._submit = submit
        self._letters: SimpleQueue[tuple[str, Callable[..., object], tuple[Any, ...]]] = SimpleQueue()
        self._reader = threading.Lock()
        # One for all letters: the event loop keeps a set, so it reads once for all that came since its last turn.
        self._read = promise(self.read)

    def post(self, task_id: str, callback: Callable[..., object], *args: object) -> None:
        """Have ``callback`` called; what it raises is logged with the ``task_id``."""
        self._letters.put((task_id, callback, args))
        if self.hub is not None:
            self.hub.call_soon(self._read)
        else:
            self._submit(self.read)

    def wake(self) -> None:
        """Have `serve` look around."""
        self.post("", _nothing)

    def read(self, timeout: float = 0.0) -> None:
        """Call what was posted; waits up to ``timeout`` seconds for the first letter."""
        with self._reader:
            while True:
                try:
                    task_id, callback, args = self._letters.get(timeout > 0, timeout or None)
                except Empty:
                    return
                timeout = 0.0
                try:
                    callback(*args)
                except Exception:
                    logger.exception("Task %s: Celery's %r failed", task_id, callback)

    def serve(self, timeout: float) -> None:
        """Do for ``timeout`` seconds what Celery's event loop does for us, on its thread while that waits in a stop.

        Callbacks acknowledge by ``hub.call_soon``. The loop itself must not turn any more, it would take messages; what
        it was told to call soon is run as `Hub.close` does, only not hours later.
        """
        self.read(timeout)
        if self.hub is None:
            return
        while ready := self.hub._pop_ready():
            for call in ready:
                try:
                    call()
                except Exception:
                    logger.exception("%r failed while the worker stops", call)


def _nothing() -> None:
    """Be called."""
