"""Notices from another thread that the event loop is blocked, and by what: while it is, nothing on it can tell.

A hook that is a coroutine and computes, sleeps or reads a file runs on the loop that all rollouts of the process share.
It costs nobody a lease, but every other rollout waits for it, so it is named: in the log while it blocks, and in the
metrics. The name comes from the frames of the loop's thread, where the call of a hook stands with its rollout.
"""

from __future__ import annotations

import logging
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

from workers.hooks import call_hook, derive
from workers.rollout import run_rollout
from workers.state import Rollout

logger = logging.getLogger(__name__)

#: Seconds without a move of the loop from which on it counts as blocked. It moves ten times a second.
WARN_AFTER = 1.0
#: Innermost frames that are shown.
_FRAMES_SHOWN = 4
#: Names of hooks in the metrics beyond which all others are one: they come from the environments of users.
_MOST_NAMES = 100
OTHER = "other"


@dataclass(frozen=True)
class Culprit:
    """What the loop's thread was found doing: ``hook`` is ``Class.method``, or `OTHER` where it was in none."""

    hook: str = OTHER
    rollout_id: str = ""
    attempt: int = 0
    where: str = "(unknown)"
    worker: str = ""

    def __str__(self) -> str:
        rollout = f" of rollout {self.rollout_id}" if self.rollout_id else ""
        return f"{'no hook' if self.hook == OTHER else self.hook}{rollout}"


@dataclass
class Episodes:
    """How often one hook has blocked the loop, and for how many seconds in all."""

    count: int = 0
    seconds: float = 0.0


class LoopWatch:
    """Looks at one event loop; `look` is called a few times a second, from one thread that is not the loop's.

    ``progress()`` returns when the loop last moved (`time.monotonic`), ``thread()`` the id of its thread. What it has
    found may be read from any thread.
    """

    def __init__(
        self, progress: Callable[[], float], thread: Callable[[], int | None], *, warn_after: float = WARN_AFTER
    ) -> None:
        self._progress = progress
        self._thread = thread
        self._warn_after = warn_after
        self._suspected: float | None = None  # where the loop stood when it was late at the last look
        self._blocked: tuple[float, Culprit] | None = None
        self._seen_until = 0.0  # of the episode: when it was last seen
        self.episodes: dict[str, Episodes] = {}
        self._last: tuple[float, float, Culprit] | None = None  # the latest one: seen when, seconds, by whom

    def behind(self) -> float:
        """Return for how many seconds the loop has not moved."""
        return max(0.0, time.monotonic() - self._progress())

    def look(self) -> None:
        """Note whether the loop is blocked; name what blocks it once for each time, and again when it is over."""
        progress = self._progress()
        behind = time.monotonic() - progress
        if self._blocked is not None and self._blocked[0] != progress:
            self._ended(*self._blocked)
        if behind <= self._warn_after:
            self._suspected = None
        elif self._suspected != progress:
            # Not yet believed: a process that was stopped finds its loop late too, until that has moved once.
            self._suspected = progress
        elif self._blocked is None:
            self._began(progress, behind)
        else:
            self._count(self._blocked[1], behind)

    def _began(self, progress: float, behind: float) -> None:
        culprit = self._culprit()
        self._blocked, self._seen_until = (progress, culprit), 0.0
        self._episodes_of(culprit).count += 1
        self._count(culprit, behind)
        logger.error("event loop blocked for %.1f s by %s:\n%s", behind, culprit, culprit.where, extra=_about(culprit))

    def _count(self, culprit: Culprit, behind: float) -> None:
        """Count the seconds as they come: a loop that never moves again would else count for nothing."""
        self._episodes_of(culprit).seconds += behind - self._seen_until
        self._seen_until = behind
        self._last = time.monotonic(), behind, culprit

    def _ended(self, progress: float, culprit: Culprit) -> None:
        self._blocked = None
        logger.warning(
            "event loop moves again; %s blocked it for %.1f s or more", culprit, self._seen_until, extra=_about(culprit)
        )

    def _episodes_of(self, culprit: Culprit) -> Episodes:
        name = culprit.hook if culprit.hook in self.episodes or len(self.episodes) < _MOST_NAMES else OTHER
        return self.episodes.setdefault(name, Episodes())

    def _culprit(self) -> Culprit:
        frame = sys._current_frames().get(self._thread() or -1)
        if frame is None:
            return Culprit()
        where = "".join(traceback.format_stack(frame)[-_FRAMES_SHOWN:])
        calls = [_read(outer) for outer in _outwards(frame) if outer.f_code in _CALLS]
        hook = next((hook for hook, _ in calls if hook), OTHER)
        rollout = next((rollout for _, rollout in calls if rollout), None)
        if rollout is None:
            return Culprit(hook, where=where)
        return Culprit(hook, rollout.request.rollout_id, rollout.attempt, where, rollout.worker)

    def report(self) -> dict[str, Any]:
        """Return ``{count, seconds, last}`` of all that has blocked the loop so far.

        ``last`` is None or ``{hook, rollout_id, seconds, ago}`` of the latest one, seen ``ago`` seconds before.
        """
        known = list(self.episodes.values())
        count, total = sum(one.count for one in known), sum(one.seconds for one in known)
        last: dict[str, Any] | None = None
        if self._last is not None:
            at, seconds, culprit = self._last
            ago = time.monotonic() - at
            last = {"hook": culprit.hook, "rollout_id": culprit.rollout_id}
            last |= {"seconds": round(seconds, 1), "ago": round(ago, 1)}
        return {"count": count, "seconds": round(total, 1), "last": last}


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _read(frame: FrameType) -> tuple[str, Rollout | None]:
    """Return the hook that a frame of one of `_CALLS` calls, "" for none, and its rollout."""
    found = frame.f_locals
    rollout = found.get("rollout")
    hook = f"{type(found['environment']).__name__}.{found['name']}" if "name" in found else ""
    return hook, rollout if isinstance(rollout, Rollout) else None


def _about(culprit: Culprit) -> dict[str, Any]:
    if not culprit.rollout_id:
        return {"stage": "loop_blocked"}
    rollout = {"rollout_id": culprit.rollout_id, "attempt": culprit.attempt, "worker": culprit.worker}
    return {**rollout, "stage": "loop_blocked"}


#: The functions whose frames are read, with locals of these names: ``environment`` and ``name``, ``rollout``.
_CALLS: frozenset[CodeType] = frozenset(function.__code__ for function in (call_hook, derive, run_rollout))
