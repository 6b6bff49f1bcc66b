"""Progress of a batch on stderr: a bar in a terminal, an occasional line elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, SpinnerColumn, TextColumn
from rich.progress import Progress as RichProgress

from producer.batch import Counts

_BAR_SECONDS = 0.25
_LINE_SECONDS = 10.0


class Progress(Protocol):
    """Shows how far a batch is; ``interval`` is how often it wants to be told, in seconds."""

    interval: float

    def show(self, counts: Counts) -> None:
        """Show these counts."""


@contextmanager
def plain_or_rich(total: int | None) -> Iterator[Progress]:
    """Return the kind of progress that fits stderr."""
    if sys.stderr.isatty():
        with _Bar.running(total) as bar:
            yield bar
    else:
        yield _Lines(total)


class _Bar:
    interval = _BAR_SECONDS

    def __init__(self, progress: RichProgress, total: int | None) -> None:
        self._progress = progress
        self._total = total
        self._began = time.monotonic()
        self._task = progress.add_task("rollouts", total=total, words="")

    @classmethod
    @contextmanager
    def running(cls, total: int | None) -> Iterator[_Bar]:
        console = Console(stderr=True)
        columns = (SpinnerColumn(), BarColumn(), TextColumn("{task.fields[words]}", markup=False))
        with RichProgress(*columns, console=console, refresh_per_second=4) as progress:
            yield cls(progress, total)

    def show(self, counts: Counts) -> None:
        words = describe(counts, self._total, time.monotonic() - self._began)
        self._progress.update(self._task, completed=counts.done, words=words)


class _Lines:
    interval = _LINE_SECONDS

    def __init__(self, total: int | None) -> None:
        self._total = total
        self._began = time.monotonic()
        self._last: Counts | None = None

    def show(self, counts: Counts) -> None:
        if counts != self._last:
            self._last = counts
            print(describe(counts, self._total, time.monotonic() - self._began), file=sys.stderr, flush=True)


def describe(counts: Counts, total: int | None, seconds: float) -> str:
    """Return the counts as one line: done, failed, in flight, rate and, when it can be told, the time left."""
    rate = counts.done / seconds if seconds > 0 else 0.0
    of = "" if total is None else f"/{total}"
    words = f"{counts.done}{of} done, {counts.failed} failed, {counts.in_flight} in flight, {rate:.1f}/s"
    if total is None or not rate or counts.done >= total:
        return words
    left = int((total - counts.done) / rate)
    return f"{words}, ETA {left // 3600}:{left // 60 % 60:02}:{left % 60:02}"
