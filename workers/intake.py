"""How many rollouts this worker process may hold, by all who have a say in it."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Intake:
    """Tells the pool's ``cap`` the lowest: what the circuit breaker allows, and nothing while one of ``stops`` holds.

    From any thread. Whoever changes what one of them answers calls `look` afterwards.
    """

    def __init__(self, cap: Callable[[int | None], object], *stops: Callable[[], bool]) -> None:
        self._cap = cap
        self._stops = stops
        self._allowed: int | None = None
        # Around asking and telling: of two at once, the one that asked first must not be the one that tells last.
        self._lock = threading.Lock()

    def allow(self, jobs: int | None) -> None:
        """Let at most so many be held; None for as many as there are slots."""
        with self._lock:
            self._allowed = jobs
        self.look()

    def look(self) -> None:
        """Ask again, and tell the pool."""
        with self._lock:
            self._cap(0 if any(stop() for stop in self._stops) else self._allowed)
