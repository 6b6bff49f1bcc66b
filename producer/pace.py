"""How fast a batch may submit: rollouts per minute, and how many at once when its window grows or opens."""

from __future__ import annotations

import math
import time
from collections.abc import Callable


class Pace:
    """A token bucket: ``per_minute`` rollouts in the long run, and at most ``burst`` at once.

    Without ``burst`` a second's worth is sent at once; without ``per_minute`` as many as ``burst`` each second, which
    keeps a window that grows by thousands from starting them all in one moment. Without either there is no limit.
    """

    def __init__(
        self,
        per_minute: float | None = None,
        burst: int | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if (per_minute is not None and not per_minute > 0) or (burst is not None and burst < 1):
            raise ValueError(f"per_minute is {per_minute} and burst is {burst}; both must be above 0")
        self._clock = clock
        self._burst = float(burst or max(1, (per_minute or math.inf) / 60))
        self._per_second = per_minute / 60 if per_minute else self._burst
        self._tokens = self._burst
        self._at = clock()

    def free(self, most: int) -> int:
        """Return how many may be submitted now, at most ``most``."""
        now = self._clock()
        if math.isinf(self._burst):
            return most
        self._tokens = min(self._burst, self._tokens + (now - self._at) * self._per_second)
        self._at = now
        return max(0, min(most, int(self._tokens + 1e-9)))

    def spend(self, count: int) -> None:
        """Note that ``count`` were submitted; of what goes only together it may be more than was free."""
        self._tokens -= count

    @property
    def delay(self) -> float:
        """Seconds until one may be submitted."""
        return 0.0 if math.isinf(self._burst) else max(0.0, (1 - self._tokens) / self._per_second)
