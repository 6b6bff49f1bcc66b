"""What the fleet says about itself: log lines with structured fields."""

from __future__ import annotations

import logging
import sys

#: Fields that a log record of a rollout carries, in the order in which they are shown.
FIELDS = ("rollout_id", "attempt", "worker")


class _Human(logging.Formatter):
    """One line for a person: time, level, sentence, then the structured fields."""

    default_msec_format = "%s.%03d"

    def format(self, record: logging.LogRecord) -> str:
        line = super().format(record)
        fields = " ".join(f"{name}={value}" for name in FIELDS if (value := getattr(record, name, None)) is not None)
        return f"{line}  [{fields}]" if fields else line


def configure_logging(level: int | str = logging.INFO) -> None:
    """Send every logger's lines to standard error in one form; Celery's and uvicorn's too."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Human("%(asctime)s %(levelname)-7s %(name)s  %(message)s"))
    # Not shown, so not worth looking up for every line (the logging HOWTO's "Optimization").
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    logging._srcfile = None
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    for noisy in ("httpx", "httpcore", "celery.worker.strategy", "celery.app.trace"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
