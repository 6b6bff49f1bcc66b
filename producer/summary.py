"""What a run of a batch amounted to: counted as results come, shown as a table or as one JSON object."""

from __future__ import annotations

import math
import time
from array import array
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table

from producer.contract import Phase, RolloutResult, StopCondition

TOTAL = "total"


@dataclass
class Seen:
    """How often something came, and the first text that came with it."""

    count: int = 0
    first: str = ""

    def add(self, text: str) -> None:
        """Count one more."""
        self.first = self.first or text
        self.count += 1

    def as_dict(self) -> dict[str, Any]:
        """Return the count and the first text."""
        return {"count": self.count, "first": self.first}


@dataclass
class Summary:
    """The running totals of one run.

    ``kept`` rollouts were in the file of results before it, and ``kept_failed`` of those did not complete.
    """

    batch_id: str = ""
    kept: int = 0
    kept_failed: int = 0
    interrupted: bool = False
    seconds: float = 0.0
    stop_conditions: Counter[str] = field(default_factory=Counter)
    rewards: array[float] = field(default_factory=lambda: array("d"))
    turns: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    latency: dict[str, array[float]] = field(default_factory=dict)
    errors: dict[str, Seen] = field(default_factory=dict)
    warnings: Seen = field(default_factory=Seen)
    _began: float = field(default_factory=time.monotonic)

    def add(self, result: RolloutResult) -> None:
        """Count one result."""
        self.stop_conditions[result.stop_condition.value] += 1
        if result.reward is not None:
            self.rewards.append(result.reward)
        self.turns += len(result.trajectory)
        for step in result.trajectory:
            tokens = step.get("tokens") or {}
            self.prompt_tokens += len(tokens.get("prompt_ids") or ())
            self.completion_tokens += len(tokens.get("completion_ids") or ())
        for phase, seconds in result.durations.items():
            self.latency.setdefault(phase, array("d")).append(seconds)
        if result.timing.total_ms:
            self.latency.setdefault(TOTAL, array("d")).append(result.timing.total_ms / 1000)
        if result.error and result.stop_condition is not StopCondition.CANCELLED:
            last_words = (result.error.detail or "").strip().splitlines()[-1:]
            self.errors.setdefault(result.error.kind.value, Seen()).add("\n".join([result.error.message, *last_words]))
        for warning in result.warnings:
            self.warnings.add(warning)
        self.seconds = time.monotonic() - self._began

    @property
    def rollouts(self) -> int:
        """All results of this run."""
        return self.stop_conditions.total()

    @property
    def completed(self) -> int:
        """Rollouts that ran to their end."""
        return self.stop_conditions[StopCondition.COMPLETED.value]

    @property
    def cancelled(self) -> int:
        """Rollouts that were cancelled."""
        return self.stop_conditions[StopCondition.CANCELLED.value]

    @property
    def failed(self) -> int:
        """Rollouts that ended with an error, or whose agent ran out of time."""
        return self.rollouts - self.completed - self.cancelled

    @property
    def exit_code(self) -> int:
        """Exit status: 0 when all completed, kept ones too, 1 when some did not, 130 when it was interrupted."""
        if self.interrupted:
            return 130
        return 0 if self.completed == self.rollouts and not self.kept_failed else 1

    @property
    def last_line(self) -> str:
        """The run in one line."""
        cancelled = f", {self.cancelled} cancelled" if self.cancelled else ""
        return f"{self.rollouts} rollouts: {self.completed} completed, {self.failed} failed{cancelled}"

    def as_dict(self) -> dict[str, Any]:
        """Return everything as plain data; times are in seconds."""
        return {
            "batch_id": self.batch_id,
            "rollouts": self.rollouts,
            "completed": self.completed,
            "failed": self.failed,
            "cancelled": self.cancelled,
            "kept": self.kept,
            "kept_failed": self.kept_failed,
            "interrupted": self.interrupted,
            "seconds": round(self.seconds, 3),
            "stop_conditions": dict(self.stop_conditions),
            "reward": {"mean": _mean(self.rewards), "count": len(self.rewards)},
            "turns": {"total": self.turns, "mean": self.turns / self.rollouts if self.rollouts else None},
            "tokens": {"prompt": self.prompt_tokens, "completion": self.completion_tokens},
            "latency": {name: self._percentiles(name) for name in self._phases()},
            "errors": {kind: seen.as_dict() for kind, seen in self.errors.items()},
            "warnings": self.warnings.as_dict(),
        }

    def show(self, console: Console) -> None:
        """Print the final table, and last the run in one line."""
        table = Table(show_header=False, title="rollouts", title_justify="left")
        for name, value in self._rows():
            table.add_row(name, value)
        console.print(table)
        self._show_latency(console)
        self._show_errors(console)
        console.print(self.last_line, highlight=False, soft_wrap=True)

    def _rows(self) -> list[tuple[str, str]]:
        mean = _mean(self.rewards)
        count = max(1, self.rollouts)
        rows = [(stop, str(number)) for stop, number in sorted(self.stop_conditions.items())]
        if self.kept:
            failed = f" ({self.kept_failed} failed)" if self.kept_failed else ""
            rows.append(("kept from before", f"{self.kept}{failed}"))
        rows.append(("mean reward", "-" if mean is None else f"{mean:.4g} (of {len(self.rewards)})"))
        rows.append(("turns", f"{self.turns} ({self.turns / count:.1f} a rollout)"))
        rows.append(("tokens", f"{self.prompt_tokens} prompt, {self.completion_tokens} completion"))
        rows.append(("time", f"{self.seconds:.1f} s"))
        return rows

    def _show_latency(self, console: Console) -> None:
        if not self.latency:
            return
        table = Table("phase", "p50 (s)", "p95 (s)", title="latency", title_justify="left")
        for name in self._phases():
            numbers = self._percentiles(name)
            table.add_row(name, f"{numbers['p50']:.3f}", f"{numbers['p95']:.3f}")
        console.print(table)

    def _show_errors(self, console: Console) -> None:
        if not self.errors and not self.warnings.count:
            return
        table = Table("errors and warnings", "count", "the first one", title_justify="left")
        for kind, seen in [*sorted(self.errors.items()), ("warnings", self.warnings)]:
            if seen.count:
                table.add_row(kind, str(seen.count), seen.first)
        console.print(table, markup=False)

    def _phases(self) -> list[str]:
        known = [*(phase.value for phase in Phase), TOTAL]
        return [n for n in known if n in self.latency] + sorted(set(self.latency) - set(known))

    def _percentiles(self, name: str) -> dict[str, float]:
        ordered = sorted(self.latency[name])
        return {"p50": _rank(ordered, 0.50), "p95": _rank(ordered, 0.95)}


def _mean(values: array[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _rank(ordered: list[float], share: float) -> float:
    """Nearest rank: always a time that was really measured."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]
