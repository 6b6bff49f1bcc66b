"""Tells what grows from what only goes up and down: the judge of the soak."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import linear_regression, median

#: What is measured of a process, and what of Redis. A measure is named ``PART MEASURE``.
RSS, FDS, THREADS, KEYS, MEMORY = "rss_mb", "fds", "threads", "keys", "used_memory_mb"
#: The greatest growth, in percent, and the growth that is none whatever its percentage: rollouts that run at the moment
#: of a sample hold file descriptors; pools of connections and threads keep what once was needed at one time.
LIMITS = {RSS: (5.0, 0.0), FDS: (5.0, 8.0), THREADS: (5.0, 2.0), KEYS: (5.0, 0.0), MEMORY: (5.0, 0.5)}


@dataclass(frozen=True)
class Sample:
    """What was measured ``at`` so many seconds after the start."""

    at: float
    values: Mapping[str, float]


@dataclass(frozen=True)
class Growth:
    """How much a measure grew from the first sample to the last, by the line that fits best."""

    measure: str
    middle: float
    absolute: float
    percent: float

    @property
    def is_flat(self) -> bool:
        """Whether this is within the measure's `LIMITS`. What shrinks is flat."""
        percent, absolute = LIMITS[self.measure.split()[-1]]
        return self.percent < percent or self.absolute <= absolute


def growth(measure: str, samples: Sequence[Sample]) -> Growth:
    """Fit a line by least squares to a measure of which there are at least two samples."""
    times = [sample.at for sample in samples]
    values = [sample.values[measure] for sample in samples]
    slope, intercept = linear_regression(times, values)
    began, ended = (intercept + slope * at for at in (times[0], times[-1]))
    return Growth(measure, median(values), ended - began, 100 * (ended - began) / began if began > 0 else 0.0)


def judged(samples: Sequence[Sample], warm_up: float) -> list[Growth]:
    """Return the growth of every measure after the first ``warm_up`` seconds."""
    counted = [sample for sample in samples if sample.at >= warm_up]
    if len(counted) < 6:
        raise ValueError(f"{len(counted)} samples after the warm-up tell nothing")
    return [growth(measure, counted) for measure in counted[0].values]
