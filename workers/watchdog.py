"""What ends an attempt that comes to nothing: an agent that makes no model call, and the hard limit of it all.

Whether an agent makes model calls is known to the gateway alone, which must not be asked by every rollout all the time.
So a watch asks at the moment at which the limit could be reached at the earliest: once for each limit's length while
the agent works.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from workers.attempt import log
from workers.errors import AgentStalledError, GatewayError, RolloutLimitError
from workers.gateway.protocol import Progress
from workers.state import Rollout

#: Seconds that a gateway may take to tell how far a rollout has come; the question is asked again later.
QUESTION_TIMEOUT = 30.0
#: Part of the limit after which a question that was not answered is asked again.
AGAIN_AFTER = 0.25


@dataclass(frozen=True)
class Limits:
    """Bounds in seconds for requests that set none of their own (`producer.contract.Deadlines`); None is no bound."""

    idle: float | None = None
    rollout: float | None = None

    def idle_of(self, rollout: Rollout) -> float | None:
        """Return for how long this rollout's agent may make no model call."""
        return rollout.request.deadlines.idle or self.idle

    def attempt_of(self, rollout: Rollout) -> float | None:
        """Return how long this attempt may take, without its clean-up."""
        return rollout.request.deadlines.rollout or self.rollout


class IdleWatch:
    """Follows when an agent last gave a sign of life; knows no clock but `time.monotonic` values that it is given."""

    def __init__(self, limit: float, started: float) -> None:
        self.limit = limit
        self.heard = started  #: when the last call had ended, as far as is known
        self._calls = 0

    def left(self, now: float) -> float:
        """Return in how many seconds the limit can be reached at the earliest."""
        return self.heard + self.limit - now

    def take(self, progress: Progress, now: float) -> None:
        """Learn from an answer that came at ``now``."""
        calls = progress.turns + progress.failed_calls
        if progress.in_flight:
            self.heard = now
        elif progress.idle_seconds is not None:
            self.heard = max(self.heard, now - progress.idle_seconds)
        elif calls != self._calls:  # the gateway does not tell when: at some time since the last answer
            self.heard = now
        self._calls = calls


async def stalled(
    rollout: Rollout,
    limit: float,
    ask: Callable[[], Awaitable[Progress]],
    confirm: Callable[[float, float], Awaitable[None]],
) -> None:
    """Watch the agent of ``rollout`` and raise `AgentStalledError` when it made no model call for ``limit`` seconds.

    ``ask`` asks the gateway; one that does not answer says nothing about the agent. ``confirm`` raises instead what
    kept the agent from calling in that time: its tunnel. Never returns.
    """
    watch = IdleWatch(limit, rollout.agent_started_at)
    while True:
        await asyncio.sleep(max(0.0, watch.left(time.monotonic())))
        progress = await _answer(rollout, ask)
        now = time.monotonic()
        if progress is None:
            await asyncio.sleep(limit * AGAIN_AFTER)
            continue
        watch.take(progress, now)
        if watch.left(now) > 0:
            continue
        await confirm(watch.heard, now)
        raise AgentStalledError(
            f"the agent made no model call for {now - watch.heard:.1f} s, after {progress.turns} turns and "
            f"{progress.failed_calls} failed calls; its limit is {limit:g} s (deadlines.idle)"
        )


async def _answer(rollout: Rollout, ask: Callable[[], Awaitable[Progress]]) -> Progress | None:
    try:
        async with asyncio.timeout(QUESTION_TIMEOUT):
            return await ask()
    except (GatewayError, TimeoutError) as error:
        said = str(error) or "no answer"
        log(rollout, "idle_watch", "the gateway does not tell, asking again: %s", said, level=logging.WARNING)
        return None


@asynccontextmanager
async def hard_limit(rollout: Rollout, seconds: float | None) -> AsyncIterator[None]:
    """Bound the attempt inside, waiting in queues of our own included; raises `RolloutLimitError`."""
    try:
        # Not `workers.aio.deadline`, whose clock stops where an attempt waits for others: this one does not.
        async with asyncio.timeout(seconds) as scope:
            yield
    except TimeoutError:
        if not scope.expired():
            raise
        raise RolloutLimitError(
            f"the attempt took longer than its hard limit of {seconds:g} s (deadlines.rollout)", phase=rollout.phase
        ) from None
