"""The child processes of the embedded stack: how they are watched, ended, and given ports."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

HOST = "127.0.0.1"
#: Below the range from which Linux takes the local ports of outgoing connections (32768 and up): what is free here
#: stays free until a child listens on it.
PORTS = range(20000, 32000)
LOG_TAIL_BYTES = 4000


class StackError(RuntimeError):
    """A part of the stack cannot be had, did not become ready, or has died; the message holds its last words."""


@dataclass
class Child:
    """One process of the stack: what it is called, where it logs, and how to tell that it is ready."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path
    is_ready: Callable[[], bool]
    #: Starts it again, in its place; None for one that others depend on.
    restart: Callable[[], None] | None = None
    ready: bool = False

    def check(self) -> None:
        """Raise `StackError` when the process has ended."""
        if self.ending:
            raise StackError(f"the {self.name} ended with {self.ending}. Its last words:\n{self.last_words()}")

    @property
    def ending(self) -> str | None:
        """How the process ended, None while it runs."""
        code = self.process.poll()
        return None if code is None else _ending(code)

    def last_words(self) -> str:
        """Return the end of what the process has logged."""
        with self.log.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - LOG_TAIL_BYTES))
            return file.read().decode(errors="replace").strip() or "(it printed nothing)"


def end_children(children: Sequence[Child], grace: float) -> None:
    """End ``children`` together: SIGTERM, then SIGQUIT, with ``grace`` seconds for each, then SIGKILL.

    They are Celery's two ways to stop a worker: the first waits for what it runs, the second cancels that.
    """
    for number in (signal.SIGTERM, signal.SIGQUIT):
        for child in children:
            if child.process.poll() is None:
                child.process.send_signal(number)
        end = time.monotonic() + grace
        for child in children:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.process.wait(max(0.0, end - time.monotonic()))
    for child in children:
        child.process.kill()
        child.process.wait()


@functools.cache
def _ports_in_turn() -> Iterator[int]:
    return itertools.cycle(random.SystemRandom().sample(PORTS, len(PORTS)))  # another order in each process


def free_port() -> int:
    """Return a port of `PORTS` on which nothing listens, and another one at the next call."""
    while True:
        port = next(_ports_in_turn())
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((HOST, port))
            return port


def _ending(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
