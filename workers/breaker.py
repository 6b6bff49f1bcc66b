"""The circuit breaker: when the gateway, the tunnels or the sandboxes fail time after time, a worker takes nothing new.

    CLOSED ──N failures of one kind in a row──▶ OPEN ──after a pause──▶ PROBING ──the probe gets through──▶ CLOSED
                                                 ▲                         │
                                                 └──it fails: twice as long┘

Without it a worker whose gateway is down would claim and fail one rollout after another, the faster the worse it is,
until the queue's attempts are spent. What runs goes on meanwhile.

Only what uses the failing system itself can be the probe: not an episode that its environment runs alone, and not what
runs with a gateway that its request chose, where the gateway or the tunnel to it is what fails. Such run beside it.
"""

from __future__ import annotations

import asyncio
import logging
import random
import threading
import time
from collections.abc import Callable
from enum import StrEnum
from typing import Any

from producer.contract import ErrorInfo, ErrorKind, Phase
from workers.state import Rollout

logger = logging.getLogger(__name__)

#: The phase in which an attempt meets each of the systems first, and the one whose beginning proves that it works.
MET_IN = {ErrorKind.GATEWAY: Phase.REGISTER, ErrorKind.TUNNEL: Phase.TUNNEL, ErrorKind.SANDBOX: Phase.SANDBOX}
PROVEN_BY = {Phase.TUNNEL: ErrorKind.GATEWAY, Phase.SANDBOX: ErrorKind.TUNNEL, Phase.SETUP: ErrorKind.SANDBOX}
#: Part of a pause that is random, so that a fleet does not probe in step.
JITTER = 0.25
#: Characters of an error that are told of it.
_WORDS_LIMIT = 300


class State(StrEnum):
    """Where the breaker stands."""

    CLOSED = "closed"
    OPEN = "open"
    PROBING = "probing"


def is_infrastructure(error: ErrorInfo) -> bool:
    """Whether one of the three systems failed an attempt before its agent began, in a way that may pass."""
    passes = error.retryable or error.account
    return passes and error.phase is not None and MET_IN.get(error.kind) is error.phase


def is_ours(rollout: Rollout, error: ErrorInfo) -> bool:
    """Whether it is one of its worker's own systems that failed an attempt so."""
    return is_infrastructure(error) and error.kind in rollout.meets


class Breaker:
    """Counts failures of one worker's systems, and limits how many rollouts it takes; lives on its event loop.

    It opens after ``failures`` in a row of one kind, or at the first refusal of the account, for ``pause`` seconds,
    doubled after each failed probe up to ``longest``. ``limit(None)`` lets the worker take as many as it has slots,
    ``limit(n)`` lets it hold n; ``running`` says how many it holds.
    """

    def __init__(
        self,
        *,
        failures: int,
        pause: float,
        longest: float,
        limit: Callable[[int | None], object],
        running: Callable[[], int],
    ) -> None:
        self.state = State.CLOSED
        self.kind: ErrorKind | None = None  #: what it is open for
        self.opened = 0  #: how often it has opened
        self._failures = failures
        self._first = self._pause = pause
        self._longest = longest
        self._limit = limit
        self._running = running
        self._in_a_row = dict.fromkeys(MET_IN, 0)
        self._opened = dict.fromkeys(MET_IN, 0)
        self._last: dict[ErrorKind, tuple[float, str]] = {}  # when each failed last (Unix seconds), and its words
        self._since = 0.0  # when it opened last, in `time.monotonic` seconds
        self._until = 0.0
        self._cap: int | None = None
        self._probed = 0.0  # when the probe began, in `time.monotonic` seconds
        self._beside: set[float] = set()  # when those were claimed that run beside the probe
        self._lock = threading.Lock()  # of the state and the limit: `released` comes from other threads

    def watch(self, rollout: Rollout, claimed_at: float) -> None:
        """Learn from how far an attempt comes, while it runs: its agent may take hours.

        ``claimed_at`` is when it was claimed (`time.monotonic`). One that cannot be the probe makes place for another.
        """
        rollout.on_phase = self._entered  # bound to nothing of the rollout: a cycle would keep its turns in memory
        with self._lock:
            if self.state is State.PROBING and self.kind not in rollout.meets and claimed_at >= self._probed:
                self._beside.add(claimed_at)
                self._set_limit((self._cap or 0) + 1)

    def record(self, rollout: Rollout, error: ErrorInfo) -> None:
        """Learn from the error with which an attempt has ended."""
        if is_ours(rollout, error):
            self._failed(error)

    def released(self, claimed_at: float) -> None:
        """Learn that a rollout is about to be held no more that was claimed at this time (`time.monotonic`).

        From any thread. The place of what is not the probe is not for another: one probe is let in, however many of the
        old ones, and of those beside it, end meanwhile.
        """
        with self._lock:
            beside = claimed_at in self._beside
            self._beside.discard(claimed_at)
            if self.state is State.PROBING and self._cap is not None and (beside or claimed_at < self._probed):
                self._set_limit(max(1, self._cap - 1))

    def _set_limit(self, cap: int | None) -> None:
        self._cap = cap
        self._limit(cap)

    def _entered(self, rollout: Rollout, phase: Phase) -> None:
        kind = PROVEN_BY.get(phase)
        if kind and kind in rollout.meets:
            self._worked(kind, rollout)

    def report(self) -> dict[str, Any]:
        """Return ``{state, kind, seconds, systems}``; ``seconds`` are those until the next probe, 0 where none is due.

        ``systems`` has for each of the three ``{state, failures, opened, last_error, last_error_at}``: failures in a
        row, how often it has opened for it, and when it failed last (Unix seconds). From any thread.
        """
        left = self._until - time.monotonic() if self.state is State.OPEN else 0.0
        return {
            "state": self.state,
            "kind": self.kind,
            "seconds": round(max(0.0, left), 1),
            "systems": {kind.value: self._report_of(kind) for kind in MET_IN},
        }

    def _report_of(self, kind: ErrorKind) -> dict[str, Any]:
        at, words = self._last.get(kind, (None, None))
        return {
            "state": self.state if kind is self.kind else State.CLOSED,
            "failures": self._in_a_row[kind],
            "opened": self._opened[kind],
            "last_error": words,
            "last_error_at": at,
        }

    def _failed(self, error: ErrorInfo) -> None:
        self._in_a_row[error.kind] += 1
        self._last[error.kind] = (time.time(), error.message[:_WORDS_LIMIT])
        if self.state is State.PROBING and error.kind is self.kind:
            self._pause = min(2 * self._pause, self._longest)
            self._open(error)
        elif self.state is State.CLOSED and (error.account or self._in_a_row[error.kind] >= self._failures):
            self._open(error)

    def _worked(self, kind: ErrorKind, rollout: Rollout) -> None:
        self._in_a_row[kind] = 0
        # One that began before it opened proves nothing about now.
        if self.kind is kind and self.state is State.PROBING and rollout.began >= self._since:
            logger.warning("%s works again: taking rollouts", kind, extra={"stage": "breaker"})
            with self._lock:
                self.state, self.kind, self._pause = State.CLOSED, None, self._first
                self._set_limit(None)

    def _open(self, error: ErrorInfo) -> None:
        pause = self._pause * random.uniform(1 - JITTER, 1 + JITTER)  # noqa: S311 - spreads load, guards nothing
        with self._lock:
            self.state, self.kind, self.opened = State.OPEN, error.kind, self.opened + 1
            self._set_limit(0)
        self._opened[error.kind] += 1
        self._since = time.monotonic()
        self._until = self._since + pause
        logger.error("taking no rollouts for %.0f s, after: %s", pause, error, extra={"stage": "breaker"})
        asyncio.get_running_loop().call_later(pause, self._probe)

    def _probe(self) -> None:
        logger.warning("%s: trying one rollout", self.kind, extra={"stage": "breaker"})
        with self._lock:
            self.state, self._probed = State.PROBING, time.monotonic()
            self._beside.clear()  # those of the last probe are old ones now
            self._set_limit(self._running() + 1)
