"""What a worker process has logged lately of each rollout, in memory: ``rollouts logs ID`` asks all workers for it.

Logs belong to whatever collects a worker's standard error. But who looks after one rollout at night does not want to
know on which pod it ran, and Redis is no place for logs of thousands of rollouts.
"""

from __future__ import annotations

import logging
from collections import deque
from typing import Any


class RecentLines(logging.Handler):
    """Keeps the last ``most`` lines that carry a ``rollout_id``: about half a kilobyte of memory each."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._lines: deque[tuple[str, dict[str, Any]]] = deque(maxlen=most)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a line."""
        rollout_id = getattr(record, "rollout_id", None)
        if not rollout_id:
            return
        try:
            line: dict[str, Any] = {"time": record.created, "level": record.levelname, "message": record.getMessage()}
            line |= {name: getattr(record, name, None) for name in ("stage", "attempt", "worker")}
            self._lines.append((rollout_id, line))
        except Exception:  # noqa: BLE001 - as logging itself: a line that cannot be written ends nothing
            self.handleError(record)

    def of(self, rollout_id: str) -> list[dict[str, Any]]:
        """Return a rollout's lines, the oldest first, each ``{time, level, message, stage, attempt, worker}``."""
        return [line for its, line in list(self._lines) if its == rollout_id]
