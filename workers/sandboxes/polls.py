"""Looks at many things together: whoever waits for one of them shares requests with all others who do.

Knows nothing of what it looks at. What to do next is decided in plain methods that never wait; one task for each
request then does the asking.
"""

from __future__ import annotations

import asyncio
import copy
import logging
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from workers.errors import RolloutError

logger = logging.getLogger(__name__)

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

#: Seconds for which a look that is due waits for others.
WINDOW = 0.025
#: Part of its interval by which a look may come early to share the request of another.
EARLINESS = 0.25
#: Seconds between two looks after a failed one: doubled with each further failure, up to the second number.
BACKOFF, BACKOFF_MAX = 0.5, 10.0


@dataclass(frozen=True)
class Ended(Generic[V]):
    """It has ended, with this value."""

    value: V


@dataclass(frozen=True)
class Failed:
    """It will not end any more: whoever waits for it gets this error."""

    error: Exception


@dataclass(frozen=True)
class Unclear:
    """This look at it failed. It is looked at again, and gets this error only when that goes on for too long."""

    error: Exception


#: What one look found; None: it goes on.
Answer = Ended[V] | Failed | Unclear | None
#: Asks about some keys at once. A key that is missing in the answer, and all keys when it raises, are `Unclear`; the
#: error's ``retry_after`` (seconds), if it has one, is obeyed. It must end by itself: it has no deadline here.
Ask = Callable[[Sequence[K]], Awaitable[Mapping[K, Answer[V]]]]


@dataclass(eq=False, slots=True)
class _Watch(Generic[V]):
    future: asyncio.Future[V]
    began: float
    due: float
    waiters: int = 0
    asked: bool = False
    failures: int = 0
    failing_since: float = 0.0


class Poller(Generic[K, V]):
    """Waits for many keys, asking about up to ``batch`` of them in one request. Belongs to one event loop.

    A key is looked at ``first`` seconds after its wait began, then whenever it has become older by ``share``, but at
    most every ``longest`` seconds. One that is unclear for ``patience`` seconds and ``min_failures`` looks fails.
    """

    def __init__(
        self,
        ask: Ask[K, V],
        *,
        first: float = 0.25,
        share: float = 0.1,
        longest: float = 5.0,
        batch: int = 100,
        patience: float = 60.0,
        min_failures: int = 5,
    ) -> None:
        self._ask = ask
        self._first = min(first, longest)
        self._share = share
        self._longest = longest
        self._batch = batch
        self._patience = patience
        self._min_failures = min_failures
        self._watched: dict[K, _Watch[V]] = {}
        self._requests: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_due = 0.0
        self._closed: Exception | None = None

    async def wait(self, key: K) -> V:
        """Return the value with which ``key`` ended; raises what was found to be wrong with it."""
        if self._closed:
            raise self._closed
        watch = self._watch(key)
        watch.waiters += 1
        try:
            return await asyncio.shield(watch.future)
        except Exception as error:  # noqa: BLE001 - raised again
            # A copy: what one look found may be the end of a hundred waits, and each adds its own to it.
            raise (error.again() if isinstance(error, RolloutError) else copy.copy(error)) from error.__cause__
        finally:
            watch.waiters -= 1
            if not watch.waiters and not watch.future.done():
                watch.future.cancel()
                del self._watched[key]

    def drop(self, matches: Callable[[K], bool], error: Exception) -> None:
        """Look no more at the keys that match; whoever waits for one gets ``error``."""
        for key in [key for key in self._watched if matches(key)]:
            self._watched.pop(key).future.set_exception(error)

    async def aclose(self, error: Exception) -> None:
        """Stop; whoever still waits, or begins to, gets ``error``."""
        self._closed = error
        self.drop(lambda _: True, error)
        if self._timer:
            self._timer.cancel()
        for request in self._requests:
            request.cancel()
        await asyncio.gather(*self._requests, return_exceptions=True)

    # -- deciding ------------------------------------------------------------------------------------------------------

    def _watch(self, key: K) -> _Watch[V]:
        watch = self._watched.get(key)
        if watch is None:
            loop = asyncio.get_running_loop()
            now = loop.time()
            watch = self._watched[key] = _Watch(loop.create_future(), began=now, due=now + self._first)
            self._arm(watch.due)
        return watch

    def _arm(self, due: float) -> None:
        """See to it that the timer goes off for a look that is due then."""
        if self._timer is not None:
            if self._timer_due <= due:
                return
            self._timer.cancel()
        self._timer_due = due
        self._timer = asyncio.get_running_loop().call_at(due + WINDOW, self._fire)

    def _fire(self) -> None:
        self._timer = None
        loop = asyncio.get_running_loop()
        keys = self._take_due(loop.time())
        for start in range(0, len(keys), self._batch):
            request = loop.create_task(self._request(keys[start : start + self._batch]))
            self._requests.add(request)
            request.add_done_callback(self._requests.discard)
        self._arm_for_next()

    def _take_due(self, now: float) -> list[K]:
        taken = []
        for key, watch in self._watched.items():
            early = 0.0 if watch.failures else EARLINESS * self._interval(watch, now)
            if not watch.asked and watch.due <= now + early:
                watch.asked = True
                taken.append(key)
        return taken

    def _interval(self, watch: _Watch[V], now: float) -> float:
        return max(self._first, min(self._longest, (now - watch.began) * self._share))

    def _arm_for_next(self) -> None:
        due = min((watch.due for watch in self._watched.values() if not watch.asked), default=None)
        if due is not None:
            self._arm(due)

    def _apply(self, keys: Sequence[K], answers: Mapping[K, Answer[V]]) -> None:
        now = asyncio.get_running_loop().time()
        missing: Answer[V] = Unclear(LookupError("the platform's answer left it out"))
        for key in keys:
            # It may have been dropped meanwhile, and even be watched anew: then this look is as good for that.
            if watch := self._watched.get(key):
                watch.asked = False
                self._apply_one(key, watch, answers.get(key, missing), now)
        self._arm_for_next()

    def _apply_one(self, key: K, watch: _Watch[V], answer: Answer[V], now: float) -> None:
        match answer:
            case None:
                watch.failures = 0
                watch.due = now + self._interval(watch, now)
            case Ended(value):
                del self._watched[key]
                watch.future.set_result(value)
            case Failed(error):
                del self._watched[key]
                watch.future.set_exception(error)
            case Unclear(error):
                watch.failing_since = watch.failing_since if watch.failures else now
                watch.failures += 1
                if watch.failures >= self._min_failures and now - watch.failing_since >= self._patience:
                    del self._watched[key]
                    watch.future.set_exception(error)
                else:
                    delay = min(BACKOFF * 2 ** (watch.failures - 1), BACKOFF_MAX)
                    watch.due = now + max(delay, getattr(error, "retry_after", 0.0))

    # -- asking --------------------------------------------------------------------------------------------------------

    async def _request(self, keys: Sequence[K]) -> None:
        answers: Mapping[K, Answer[V]]
        try:
            answers = await self._ask(keys)
        except Exception as error:  # noqa: BLE001 - whatever it is, nobody's rollout is lost for one look
            logger.warning(
                "A look at %d together failed, and is repeated: %r", len(keys), error, extra={"stage": "poll"}
            )
            answers = {key: Unclear(error) for key in keys}
        self._apply(keys, answers)
