"""What the fleet says about itself: log lines with structured fields."""

from __future__ import annotations

import logging
import sys
import time

#: Fields that a log record of a rollout carries beside its ``rollout_id``, in the order in which they are shown.
FIELDS = ("attempt", "worker")


class _Human(logging.Formatter):
    """One line for a person: time, level, sentence, then the structured fields.

    Written out, as every rollout logs ten lines: `logging`'s own way costs twice as much.
    """

    _second = -1
    _stamp = ""

    def format(self, record: logging.LogRecord) -> str:
        second = int(record.created)
        if second != self._second:
            self._stamp, self._second = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(second)), second
        line = f"{self._stamp}.{int(record.msecs):03} {record.levelname:<7} {record.name}  {record.getMessage()}"
        if rollout_id := getattr(record, "rollout_id", None):
            rest = "".join(f" {name}={value}" for name in FIELDS if (value := getattr(record, name, None)) is not None)
            line = f"{line}  [rollout_id={rollout_id}{rest}]"
        if record.exc_info:
            line = f"{line}\n{self.formatException(record.exc_info)}"
        return line


def configure_logging(level: int | str = logging.INFO) -> None:
    """Send every logger's lines to standard error in one form; Celery's and uvicorn's too."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Human())
    # Not shown, so not worth looking up for every line (the logging HOWTO's "Optimization").
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    logging._srcfile = None
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    for noisy in ("httpx", "httpcore", "celery.worker.strategy", "celery.app.trace"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
