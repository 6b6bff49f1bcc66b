"""What a report counts: one pass over the results, in which no trajectory is kept."""

from __future__ import annotations

import math
import random
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from producer.contract import Phase
from producer.files.read import Brief
from producer.summary import TOTAL

#: Rollouts that the page's list holds; more would make it slow to open.
MAX_ROWS = 20_000
#: Unix seconds of the year 5138: what is later was no time.
_LATEST = 1e11


@dataclass
class Failure:
    """One class of failures: how many, and the first one's message."""

    count: int = 0
    first: str = ""


@dataclass
class Sample:
    """Some of many numbers, each with the same chance, and the same ones each time (reservoir sampling)."""

    limit: int
    numbers: list[int] = field(default_factory=list)
    seen: int = 0
    _random: random.Random = field(default_factory=lambda: random.Random(0))  # noqa: S311 - nothing secret

    def add(self, number: int) -> None:
        """Offer a number."""
        self.seen += 1
        if len(self.numbers) < self.limit:
            self.numbers.append(number)
        elif self.limit and (place := self._random.randrange(self.seen)) < self.limit:
            self.numbers[place] = number


@dataclass
class Stats:
    """The totals of all results, and which of them have their trajectory in the page: at most ``trajectories``."""

    trajectories: int
    count: int = 0
    stops: Counter[str] = field(default_factory=Counter)
    rewards: array[float] = field(default_factory=lambda: array("d"))
    turns: array[int] = field(default_factory=lambda: array("q"))
    prompt_tokens: array[int] = field(default_factory=lambda: array("q"))
    completion_tokens: array[int] = field(default_factory=lambda: array("q"))
    latency: dict[str, array[float]] = field(default_factory=dict)
    starts: array[float] = field(default_factory=lambda: array("d"))
    ends: array[float] = field(default_factory=lambda: array("d"))
    failures: dict[str, Failure] = field(default_factory=dict)
    warnings: Counter[str] = field(default_factory=Counter)
    rows: list[Brief] = field(default_factory=list)
    _failed: Sample = field(init=False)
    _others: Sample = field(init=False)

    def __post_init__(self) -> None:
        self._failed, self._others = Sample(self.trajectories), Sample(self.trajectories)

    @classmethod
    def of(cls, briefs: Iterable[Brief], trajectories: int) -> Stats:
        """Count all of them."""
        stats = cls(trajectories)
        for brief in briefs:
            stats.add(brief)
        return stats

    def add(self, brief: Brief) -> None:
        """Count one result."""
        self.count += 1
        self.stops[brief.stop_condition.value] += 1
        if brief.reward is not None and math.isfinite(brief.reward):
            self.rewards.append(brief.reward)
        self.turns.append(brief.turns)
        self.prompt_tokens.append(brief.prompt_tokens)
        self.completion_tokens.append(brief.completion_tokens)
        for phase, seconds in brief.durations.items():
            self._took(phase, seconds)
        self._took(TOTAL, brief.seconds)
        if 0 < brief.started < _LATEST and 0 < brief.seconds < _LATEST:
            self.starts.append(brief.started)
            self.ends.append(brief.started + brief.seconds)
        if brief.error_kind:
            named = f"{brief.error_kind}: {brief.error_type}" if brief.error_type else brief.error_kind
            failure = self.failures.setdefault(named, Failure())
            failure.count += 1
            failure.first = failure.first or brief.error_message
        self.warnings.update(warning[:200] for warning in brief.warnings[:20])
        (self._failed if brief.failed else self._others).add(brief.number)
        if len(self.rows) < MAX_ROWS:
            self.rows.append(brief)

    def chosen(self) -> set[int]:
        """Return the numbers of the results whose trajectories are shown: failures are half of them, if there are."""
        failed, others = self._failed.numbers, self._others.numbers
        half = min(len(failed), max(self.trajectories // 2, self.trajectories - len(others)))
        return {*failed[:half], *others[: self.trajectories - half]}

    @property
    def phases(self) -> list[str]:
        """The phases that took time, in their order, and the total."""
        known = [phase.value for phase in Phase]
        other = sorted(self.latency.keys() - {*known, TOTAL})
        return [name for name in (*known, *other, TOTAL) if name in self.latency]

    def _took(self, phase: str, seconds: float) -> None:
        if math.isfinite(seconds) and seconds > 0:
            self.latency.setdefault(phase, array("d")).append(seconds)


def mean(values: Sequence[float]) -> float | None:
    """Return the mean, or None of nothing."""
    return math.fsum(values) / len(values) if values else None


def percentile(ordered: Sequence[float], share: float) -> float:
    """Return the nearest rank of sorted values: one that is really among them."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]
