"""How late an event loop wakes, sampled in the same way on both sides. Standard library only: both sides import it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable

INTERVAL = 0.005  #: seconds between two samples of a loop that is not late


async def tick(record: Callable[[float, float], object], interval: float = INTERVAL) -> None:
    """Tell ``record`` when the loop woke (`time.monotonic`) and by how many seconds late, until cancelled."""
    while True:
        due = time.monotonic() + interval
        await asyncio.sleep(interval)
        woke = time.monotonic()
        record(woke, max(0.0, woke - due))


def summary(lags: Iterable[float]) -> dict[str, float | int]:
    """Return p50, p99 and the greatest of ``lags`` in milliseconds, how many there are, and ``due_p99``.

    That one is of all ticks that were due. A loop that stands still for 400 ms gives one sample where 80 were due, so
    plain percentiles hardly see it ("coordinated omission", after Gil Tene); here each of the 80 counts with the lag
    that it would have seen: 400 ms, 395 ms, 390 ms, ...
    """
    samples = sorted(lags)
    due = sorted(lag - missed * INTERVAL for lag in samples for missed in range(int(lag / INTERVAL) + 1))
    return {
        "samples": len(samples),
        "p50": _percentile(samples, 50),
        "p99": _percentile(samples, 99),
        "max": _percentile(samples, 100),
        "due_p99": _percentile(due, 99),
    }


def _percentile(ordered: list[float], percent: float) -> float:
    at = min(len(ordered) - 1, int(len(ordered) * percent / 100))
    return round(ordered[at] * 1000, 2) if ordered else 0.0
