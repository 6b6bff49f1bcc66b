"""A small watchdog process: when its holder is gone, it kills what the holder started and removes its directories.

No handler runs on SIGKILL or when the machine is short of memory, so what a killed process leaves behind can only be
cleared by another process. The holder keeps the write end of a pipe; its end, however it comes, closes the pipe. What
belongs to the holder carries a marker variable in its environment, which survives ``fork``, ``setsid`` and ``exec``.

The program is this same file, run without site-packages: ``python -I -S reaper.py TOKEN DIRECTORY...``. So it may
import nothing but the standard library. A process that leaves its parents *and* clears its environment gets away.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import secrets
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

#: Marker of everything that must end with its holder; the value is the token of the holder's reaper.
REAP_VARIABLE = "ROLLOUTS_REAP"
#: Marker of everything that belongs to one local sandbox; the value is the sandbox's id.
SANDBOX_VARIABLE = "ROLLOUTS_SANDBOX"

#: Seconds that the reaper goes on killing: a process that has not ended by then waits inside the kernel.
KILL_LIMIT = 10.0
#: Seconds that `Reaper.close` waits for all of it, removal of the directories included.
CLOSE_LIMIT = 20.0
#: How often one look at the process table goes back for processes that appeared during it.
SCAN_ROUNDS = 20

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Process:
    """One line of the process table: ``value`` is what the process's own environment gives the marker variable."""

    pid: int
    parent: int
    value: str | None


def carriers(variable: str) -> dict[str, set[int]]:
    """Return the ids of the living processes that carry ``variable``, by its value; raises OSError when it cannot look.

    A process that has no such variable of its own, because it was started with a cleared environment, counts with its
    parent for as long as the parent lives. Other users' processes are not seen.
    """
    table = {process.pid: process for process in _processes(variable)}
    found: dict[str, set[int]] = {}
    for pid in table:
        value = _value_by_descent(table, pid)
        if value is not None:
            found.setdefault(value, set()).add(pid)
    return found


def kill_carriers(variable: str, value: str, limit: float = KILL_LIMIT) -> bool:
    """SIGKILL every process that carries ``variable=value`` until none is left; False if some are after ``limit`` s."""
    end = time.monotonic() + limit
    while True:
        with suppress(OSError):  # where it could not look, the next look tells
            pids = carriers(variable).get(value, set()) - {os.getpid()}
            if not pids:
                return True
            kill_each(pids)
        if time.monotonic() > end:
            return False
        time.sleep(0.005)


def kill_each(pids: Iterable[int]) -> None:
    """SIGKILL each of ``pids``; those that ended meanwhile, or belong to somebody else, are passed over."""
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def remove_tree(directory: str | Path) -> bool:
    """Remove ``directory`` and all in it, read-only and deeply nested folders included; returns whether it is gone."""
    with suppress(RecursionError):  # before Python 3.13, rmtree calls itself for every level
        shutil.rmtree(directory, ignore_errors=True)
    if os.path.lexists(directory):
        _take_apart(str(directory))
    return not os.path.lexists(directory)


@dataclass
class Reaper:
    """The holder's side: a running watchdog, which acts when this process ends or calls `close`.

    A child that is forked without exec (``multiprocessing`` with ``fork``) holds the pipe too, and delays the watchdog
    until it has ended; children started by `subprocess` do not.
    """

    token: str
    _process: subprocess.Popen[bytes] = field(repr=False)

    @classmethod
    def start(cls, directories: Sequence[str | Path] = ()) -> Self:
        """Start a watchdog that will remove ``directories``; raises OSError when no process can be started."""
        token = secrets.token_hex(12)
        command = [sys.executable, "-I", "-S", str(Path(__file__).resolve()), token]
        command += [str(Path(directory).absolute()) for directory in directories]
        process = subprocess.Popen(  # noqa: S603 - our own interpreter and our own file
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            # Markers of its own: the reaper of a process that is itself marked must outlive it to do its work.
            env={REAP_VARIABLE: "reaper", SANDBOX_VARIABLE: "reaper"},
            start_new_session=True,
        )
        return cls(token, process)

    @property
    def pid(self) -> int:
        """The process id of the watchdog."""
        return self._process.pid

    def environment(self) -> dict[str, str]:
        """Return the variable that every process must be given that shall end with this one."""
        return {REAP_VARIABLE: self.token}

    def close(self) -> None:
        """Kill what carries the marker, remove the directories, end the watchdog. Blocks; may be called again."""
        if self._process.stdin:
            self._process.stdin.close()
        try:
            self._process.wait(CLOSE_LIMIT)
        except subprocess.TimeoutExpired:
            logger.warning(
                "The reaper is still at work after %s s; it goes on alone.", CLOSE_LIMIT, extra={"stage": "reap"}
            )


def _processes(variable: str) -> Iterator[Process]:
    return _processes_of_proc(variable) if sys.platform == "linux" else _processes_of_ps(variable)


def _processes_of_proc(variable: str) -> Iterator[Process]:
    """Read /proc, and once more what has appeared there meanwhile: a parent that was met too late left its child so."""
    marker = f"{variable}=".encode()
    seen: set[str] = set()
    for _ in range(SCAN_ROUNDS):
        appeared = [name for name in os.listdir("/proc") if name.isdigit() and name not in seen]
        if not appeared:
            return
        seen.update(appeared)
        for name in appeared:
            process = _process_of_proc(name, marker)
            if process:
                yield process


def _process_of_proc(name: str, marker: bytes) -> Process | None:
    """Return the process ``name``, or None if it has ended or is another user's."""
    try:
        with open(f"/proc/{name}/stat", "rb") as file:
            state, parent = file.read().rpartition(b")")[2].split(None, 2)[:2]
        if state in {b"Z", b"X"}:
            return None
        environment = _environment_of(name, kernel_thread=parent == b"2")
    except OSError as error:
        if error.errno in {errno.EMFILE, errno.ENFILE}:  # no descriptor is left, which says nothing about the process
            raise
        return None
    return Process(int(name), int(parent), _value_in(environment, marker))


def _environment_of(name: str, *, kernel_thread: bool) -> bytes:
    """Read a process's environment; it has none for a moment in the middle of ``exec``, so an empty one is doubted."""
    for attempt in range(3):
        with open(f"/proc/{name}/environ", "rb") as file:
            environment = file.read()
        if environment or kernel_thread:
            return environment
        time.sleep(0.001 * attempt)
    return b""


def _value_in(environment: bytes, marker: bytes) -> str | None:
    if marker not in environment:
        return None
    for entry in environment.split(b"\0"):
        if entry.startswith(marker):
            return entry[len(marker) :].decode(errors="replace")
    return None


def _processes_of_ps(variable: str) -> Iterator[Process]:
    """Ask macOS's ``ps``, where there is no /proc; it hides the environment of the system's own programs."""
    command = ["/bin/ps", "-A", "-E", "-ww", "-o", "pid=,ppid=,stat=,command="]
    listing = subprocess.run(command, capture_output=True, check=False, text=True, errors="replace")  # noqa: S603
    return _parse_ps(listing.stdout, variable)


def _parse_ps(listing: str, variable: str) -> Iterator[Process]:
    marker = re.compile(rf"\s{re.escape(variable)}=(\S+)")
    for line in listing.splitlines():
        pid, parent, state, *command = line.split(None, 3)
        if not state.startswith("Z"):
            match = marker.search(command[0]) if command else None
            yield Process(int(pid), int(parent), match.group(1) if match else None)


def _value_by_descent(table: dict[int, Process], pid: int) -> str | None:
    """Return the marker of ``pid`` or of its nearest marked ancestor."""
    seen = set()
    process = table.get(pid)
    while process and process.pid not in seen:  # rows are read one after the other, so they might form a circle
        if process.value is not None:
            return process.value
        seen.add(process.pid)
        process = table.get(process.parent)
    return None


def _take_apart(top: str) -> None:
    """Remove ``top`` without recursion, and without following links out of it.

    Every folder is first moved up into ``top``: so no path gets too long for the system, however deep the tree is.
    """
    if os.path.islink(top):
        return
    folders = [top]
    while folders:
        folder = folders.pop()
        with suppress(OSError):
            os.chmod(folder, stat.S_IRWXU)
            with os.scandir(folder) as entries:
                found = list(entries)
            folders += [moved for entry in found if (moved := _detach(entry, top))]
            if folder != top:
                os.rmdir(folder)
    with suppress(OSError):
        os.rmdir(top)


def _detach(entry: os.DirEntry[str], top: str) -> str | None:
    """Delete a file, or move a folder into ``top`` and return its new path."""
    with suppress(OSError):
        if not entry.is_dir(follow_symlinks=False):
            os.unlink(entry.path)
            return None
        os.chmod(entry.path, stat.S_IRWXU)  # only a folder that may be written to can be moved
        moved = os.path.join(top, secrets.token_hex(12))
        os.rename(entry.path, moved)
        return moved
    return None


def main(token: str, directories: Sequence[str]) -> None:
    """Be the watchdog: wait for the end of the holder, then clear up."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    while os.read(0, 4096):
        pass
    kill_carriers(REAP_VARIABLE, token)
    for directory in directories:
        remove_tree(directory)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
