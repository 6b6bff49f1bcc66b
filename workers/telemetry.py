"""What a process tells about itself: log lines with structured fields, for people in a terminal, else JSON.

A line that is written while an attempt runs carries its ``rollout_id``, ``attempt``, ``worker`` and ``stage``, whoever
writes it: `about_attempt` marks the attempt's coroutine, and with it what it awaits and the threads of its hooks.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from enum import StrEnum
from typing import Protocol

import orjson

from workers.recent import RecentLines

#: Fields that a log record of a rollout carries beside its ``rollout_id``, in the order in which they are shown.
FIELDS = ("attempt", "worker", "stage")


class LogFormat(StrEnum):
    """How log lines are written: ``auto`` is for people where standard error is a terminal, else JSON."""

    AUTO = "auto"
    HUMAN = "human"
    JSON = "json"


class Attempt(Protocol):
    """What a line tells of the attempt in which it is written: `workers.state.Rollout`."""

    attempt: int
    worker: str

    @property
    def rollout_id(self) -> str:
        """The rollout's id."""
        ...

    @property
    def stage(self) -> str:
        """Where the attempt stands."""
        ...

    def redacted(self, text: str) -> str:
        """Return ``text`` without the attempt's secrets."""
        ...


class _Place:
    """Where a context is, until the attempt has ended: what it left running must neither name nor keep it."""

    def __init__(self, attempt: Attempt) -> None:
        self.attempt: Attempt | None = attempt


_here: ContextVar[_Place | None] = ContextVar("attempt_here", default=None)

#: Loggers of what all rollouts share: an attempt may have started it, but its lines are not about that attempt.
_SHARED = ("workers.tunnels", "workers.sandboxes.polls", "workers.throttle", "workers.breaker", "prime_tunnel")


@contextmanager
def about_attempt(attempt: Attempt) -> Iterator[None]:
    """Have the lines that are written inside carry the attempt's fields."""
    place = _Place(attempt)
    token = _here.set(place)
    try:
        yield
    finally:
        place.attempt = None
        _here.reset(token)


class _Fields(logging.Filter):
    """Fills in the fields of the attempt in which a line is written, where it is about no other."""

    def filter(self, record: logging.LogRecord) -> bool:
        place = _here.get()
        here = place.attempt if place else None
        if here is None:
            return True
        fields = record.__dict__
        if "rollout_id" not in fields:
            if record.name.startswith(_SHARED):
                return True
            # Of a library or a hook, which know nothing of the attempt, nor what of it must not be shown.
            try:
                record.msg, record.args = here.redacted(record.getMessage()), None
            except Exception:  # noqa: BLE001 - the formatter meets it again, and `logging` tells of it
                return True
        elif fields["rollout_id"] != here.rollout_id:
            return True
        own = {"rollout_id": here.rollout_id, "attempt": here.attempt, "worker": here.worker, "stage": here.stage}
        fields.update((name, value) for name, value in own.items() if fields.get(name) is None)
        return True


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


class _Json(logging.Formatter):
    """One JSON object a line: ``time`` (RFC 3339, UTC), ``level``, ``logger``, ``message``, and the fields it has."""

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, object] = {"time": f"{stamp}.{int(record.msecs):03}Z", "level": record.levelname}
        line |= {"logger": record.name, "message": record.getMessage()}
        for name in ("rollout_id", *FIELDS):
            if (value := getattr(record, name, None)) is not None:
                line[name] = value
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return orjson.dumps(line, default=str, option=orjson.OPT_NON_STR_KEYS).decode()


_recent = RecentLines(0)


def recent_lines() -> RecentLines:
    """Return what this process keeps of its latest lines about rollouts; nothing before logging is configured."""
    return _recent


def configure_logging(
    level: int | str = logging.INFO, form: LogFormat = LogFormat.AUTO, *, recent: int | None = None
) -> None:
    """Send every logger's lines to standard error in one form; Celery's and uvicorn's too.

    ``recent`` lines about rollouts are kept in memory as well, for `recent_lines`.
    """
    global _recent  # noqa: PLW0603 - logging is the process's own as well
    human = sys.stderr.isatty() if form is LogFormat.AUTO else form is LogFormat.HUMAN
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Human() if human else _Json())
    handlers: list[logging.Handler] = [handler]
    if recent is not None:
        _recent = RecentLines(recent)
        handlers.append(_recent)
    for each in handlers:
        each.addFilter(_Fields())
    # Not shown, so not worth looking up for every line (the logging HOWTO's "Optimization").
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    logging._srcfile = None
    logging.captureWarnings(True)
    root = logging.getLogger()
    root.handlers[:] = handlers
    root.setLevel(level)
    for noisy in ("httpx", "httpcore", "celery.worker.strategy", "celery.app.trace"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


def say(message: str, _file: object = None) -> None:
    """Write a line in the form of the others at once, as in a signal's handler: past the stream that it may interrupt.

    It stands in for ``celery.apps.worker.safe_say``, which writes plain text between the lines.
    """
    record = logging.LogRecord("celery.apps.worker", logging.INFO, "", 0, message, None, None)
    os.write(2, f"{logging.getLogger().handlers[0].format(record)}\n".encode())
