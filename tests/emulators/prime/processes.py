"""Starts real processes cheaply and tells when they have ended."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

#: Marks everything that belongs to one sandbox; the value is the sandbox's id.
SANDBOX_VARIABLE = "EMULATED_SANDBOX"


@dataclass(eq=False)
class Child:
    """A process that leads a session of its own."""

    process: subprocess.Popen[bytes]
    exit_code: int | None = None
    _callbacks: list[Callable[[int], None]] = field(default_factory=list)

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def alive(self) -> bool:
        return self.exit_code is None

    def on_exit(self, callback: Callable[[int], None]) -> None:
        """Call ``callback`` with the exit code, 128 + n after signal n as a shell counts."""
        if self.exit_code is None:
            self._callbacks.append(callback)
        else:
            callback(self.exit_code)

    def kill(self) -> None:
        """SIGKILL the whole group. Nothing happens after its leader has been waited for: the id may be another's."""
        if self.alive:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)

    def ended(self) -> None:
        code = self.process.wait()
        self.exit_code = code if code >= 0 else 128 - code
        for callback in self._callbacks:
            callback(self.exit_code)
        self._callbacks.clear()


def start(
    argv: Sequence[str],
    *,
    env: Mapping[str, str],
    cwd: Path,
    stdout: int | IO[bytes] = subprocess.PIPE,
    stderr: int | IO[bytes] = subprocess.PIPE,
) -> Child:
    """Start ``argv`` in a session of its own; raises OSError. Without preexec_fn this is a vfork."""
    process = subprocess.Popen(
        argv, env=env, cwd=cwd, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, start_new_session=True
    )
    child = Child(process)
    _watch(child)
    return child


def _watch(child: Child) -> None:
    loop = asyncio.get_running_loop()
    if not hasattr(os, "pidfd_open"):  # macOS
        thread = threading.Thread(target=_wait, args=(child, loop), daemon=True)
        thread.start()
        return
    descriptor = os.pidfd_open(child.pid)

    def ended() -> None:
        loop.remove_reader(descriptor)
        os.close(descriptor)
        child.ended()

    loop.add_reader(descriptor, ended)


def _wait(child: Child, loop: asyncio.AbstractEventLoop) -> None:
    # waitid without reaping: the group may be killed by its leader's id for as long as nobody has waited for it.
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    with suppress(RuntimeError):  # the loop is closed
        loop.call_soon_threadsafe(child.ended)
