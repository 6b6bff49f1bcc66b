"""Small asyncio tools that the standard library lacks: deadlines that can pause, clean-up that runs to its end."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager, nullcontext, suppress
from contextvars import ContextVar
from types import TracebackType
from typing import Any, TypeVar

T = TypeVar("T")

logger = logging.getLogger(__name__)


class deadline:  # noqa: N801 - used as a function is, like `asyncio.timeout`
    """Bound what happens inside, as `asyncio.timeout` does, with a clock that `off_the_clock` can stop."""

    __slots__ = ("_over", "_token", "scope")

    def __init__(self, seconds: float | None) -> None:
        self.scope = asyncio.timeout(seconds)
        self._over = False

    @property
    def has_ended(self) -> bool:
        """Whether there is nothing to stop any more: tasks that were begun inside may go on afterwards."""
        return self._over or self.scope.expired()

    async def __aenter__(self) -> asyncio.Timeout:
        await self.scope.__aenter__()
        self._token = _clocks.set((*_clocks.get(), self))
        return self.scope

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _clocks.reset(self._token)
        self._over = True
        await self.scope.__aexit__(kind, error, trace)


_clocks: ContextVar[tuple[deadline, ...]] = ContextVar("clocks", default=())


@asynccontextmanager
async def off_the_clock() -> AsyncIterator[None]:
    """Stop the clocks of all deadlines around this, for waiting in a queue of our own.

    When thousands of rollouts end at once, they wait for each other. That is no failure of the gateway that they wait
    to talk to, and must not look like one.
    """
    loop = asyncio.get_running_loop()
    left = [(clock, clock.scope.when()) for clock in _clocks.get() if not clock.has_ended]
    stopped = [(clock, when - loop.time()) for clock, when in left if when is not None]
    for clock, _ in stopped:
        clock.scope.reschedule(None)
    try:
        yield
    finally:
        for clock, seconds in stopped:
            if not clock.has_ended:
                clock.scope.reschedule(loop.time() + seconds)


@asynccontextmanager
async def queued(places: asyncio.Semaphore) -> AsyncIterator[None]:
    """Hold one of ``places``; waiting for it is `off_the_clock`."""
    async with off_the_clock() if places.locked() else nullcontext():
        await places.acquire()
    try:
        yield
    finally:
        places.release()


class Turnstile:
    """Lets ``per_turn`` callers through in each turn of the event loop, and the others in the turns after it, in order.

    Hundreds who all go on at once, because one answer was about all of them, would hold up everybody else for as long
    as their next steps take together. This limits the length of a turn, not how many are under way.
    """

    def __init__(self, per_turn: int) -> None:
        self._per_turn = self._left = per_turn
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._armed = False

    async def __call__(self) -> None:
        """Go through, in this turn if there is room in it."""
        loop = asyncio.get_running_loop()
        if self._left and not self._waiting:
            self._left -= 1
            self._arm(loop)
            return
        turn = loop.create_future()
        self._waiting.append(turn)
        self._arm(loop)
        await turn

    def _arm(self, loop: asyncio.AbstractEventLoop) -> None:
        if not self._armed:
            self._armed = True
            loop.call_soon(self._next_turn, loop)

    def _next_turn(self, loop: asyncio.AbstractEventLoop) -> None:
        self._armed, self._left = False, self._per_turn
        while self._waiting and self._left:
            turn = self._waiting.popleft()
            if not turn.done():  # else its caller was cancelled
                turn.set_result(None)
                self._left -= 1
        if self._left < self._per_turn:
            self._arm(loop)


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
            if not task.cancelled():  # by us, also when ``work`` ended in the same turn of the loop
                cancelled = error
        except Exception:  # noqa: BLE001
            break  # raised below, from the task itself
    if cancelled is not None:
        if not task.cancelled():
            task.exception()  # retrieved: the cancellation goes first, and whoever shields logs its own failures
        raise cancelled
    return task.result()


async def too_late_to_cancel(work: Coroutine[Any, Any, T]) -> T:
    """Return what ``work`` returns, or raise what it raises, also if this task is cancelled meanwhile.

    The end of the loop, which cancels all tasks, ends ``work`` too.
    """
    task = asyncio.ensure_future(work)
    with suppress(asyncio.CancelledError):
        return await uninterrupted(task, timeout=None)
    return task.result()


async def _bounded(work: Awaitable[T], timeout: float | None) -> T:
    async with deadline(timeout):
        return await work


async def first_of(*works: Awaitable[T], timeout: float) -> T | None:
    """Return what the first of ``works`` to end returns and cancel the others; None after ``timeout`` seconds.

    Raises what the first one raised; of several that end in the same turn of the loop, the one that is named first.
    """
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            if task in done:
                return task.result()
        return None
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def in_own_thread(function: Callable[[], T], *, name: str) -> T:
    """Call ``function`` in a new thread of that ``name``; those of `asyncio.to_thread` may all be in hooks that block.

    What it returns or raises is dropped if this is cancelled, or if the loop has ended, before it is known.
    """
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[T] = loop.create_future()

    def settle(set_: Callable[[Any], None], value: object) -> None:
        if not outcome.done():
            set_(value)

    def run() -> None:
        try:
            told: tuple[Callable[[Any], None], object] = outcome.set_result, function()
        except BaseException as error:  # noqa: BLE001 - raised where it is awaited
            told = outcome.set_exception, error
        with suppress(RuntimeError):  # the loop is closed: nobody waits
            loop.call_soon_threadsafe(settle, *told)

    threading.Thread(target=run, name=name, daemon=True).start()
    return await outcome


def run_until_done(loop: asyncio.AbstractEventLoop, future: asyncio.Future[T]) -> T:
    """Run ``loop`` until ``future`` is done, and return what it returns.

    A task in which somebody's code wants to end the process fails with that: asyncio would end the loop as well, and
    with it whatever else runs there. Nor does anybody else's `stop` end it.
    """
    ended = False

    def end(_: asyncio.Future[T]) -> None:
        nonlocal ended
        ended = True
        loop.stop()

    future.add_done_callback(end)
    while not ended:
        try:
            loop.run_forever()
        except (SystemExit, KeyboardInterrupt):
            logger.exception("a task wanted to end the process", extra={"stage": "loop"})
    return future.result()
