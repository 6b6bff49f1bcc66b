"""Processes for local sandboxes: start them without stopping the event loop, await their end, read their output's ends.

Starting goes through `subprocess.Popen` on a thread: it uses ``vfork``, while uvloop's own subprocesses ``fork`` on the
loop. Measured on 2 cores in a process of 300 MB: 4 ms for start and wait against 24 ms, and 100 starts at once held the
loop up for 3 ms against 2.4 s. The end is awaited through a pidfd on the loop, where there is one.
"""

from __future__ import annotations

import asyncio
import codecs
import errno
import os
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from producer.contract import Resources
from workers.reaper import carriers, kill_each
from workers.sandboxes.base import CommandResult

Callback = Callable[[], None]
GIGABYTE = 1024**3
#: What is read where an agent put a link, a pipe or a folder in the place of its output.
REPLACED = "[output file was replaced]"

#: Longest seconds between two looks for a process that was killed and does not end.
LONGEST_PAUSE = 1.0

#: Sets the limits and becomes the user's shell, so that the process list shows the user's command and nothing else.
#: POSIX counts ``ulimit -f`` in 512 bytes, shells count ``-d`` in 1,024. No limit is raised above an inherited one.
_LAUNCHER = '{ ulimit -c 0; ulimit -f "$2"; ulimit -d "$3"; } 2>/dev/null; exec "$0" -c "$1"'


def shell_line(command: str, resources: Resources) -> list[str]:
    """Return the argument vector that runs ``command`` in bash, or in sh where there is no bash, under limits.

    Per process: files up to ``disk_gb``, no core dumps, private writable memory up to ``memory_gb``. That is
    RLIMIT_DATA, not RLIMIT_AS: node, Go and Java reserve far more address space than they use.
    """
    shell = "/bin/bash" if os.path.exists("/bin/bash") else "/bin/sh"
    blocks, kilobytes = resources.disk_gb * GIGABYTE // 512, resources.memory_gb * GIGABYTE // 1024
    return ["/bin/sh", "-c", _LAUNCHER, shell, command, str(int(blocks)), str(int(kilobytes))]


@dataclass(frozen=True)
class OutputFiles:
    """Where a process's stdout and stderr go: files, for a pipe's content would have to be held in memory."""

    stdout: Path
    stderr: Path

    def read(self, exit_code: int, limit: int) -> CommandResult:
        """Return both, each cut to about ``limit`` bytes; reads no more than that, however long they are."""
        return CommandResult(exit_code, read_ends(self.stdout, limit), read_ends(self.stderr, limit))

    def remove(self) -> None:
        """Delete the files; a process that still writes to them goes on unnoticed."""
        self.stdout.unlink(missing_ok=True)
        self.stderr.unlink(missing_ok=True)


def read_ends(path: Path, limit: int) -> str:
    """Return the text of ``path``, or its first and last ``limit // 2`` bytes with the cut marked.

    What is no ordinary file any more reads as `REPLACED`: a pipe would block the thread, a link show others' files.
    """
    descriptor = _open_ordinary(path)
    if descriptor is None:
        return REPLACED
    with open(descriptor, "rb") as file:
        size = os.fstat(descriptor).st_size
        if size <= limit:
            return file.read(limit).decode(errors="replace")
        half = limit // 2
        head = file.read(half)
        file.seek(size - half)
        tail = file.read(half)
    # Neither end may begin or stop inside a character: its bytes would show as replacement characters.
    start = codecs.getincrementaldecoder("utf-8")("replace").decode(head)
    for _ in range(3):
        tail = tail[1:] if tail and tail[0] & 0xC0 == 0x80 else tail
    return f"{start}\n... [{size - 2 * half} bytes cut] ...\n{tail.decode(errors='replace')}"


def _open_ordinary(path: Path) -> int | None:
    """Return a descriptor of ``path`` for reading, or None for no ordinary file; never waits, follows no link."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in {errno.ELOOP, errno.ENXIO, errno.EOPNOTSUPP}:  # a link; a socket, there and on macOS
            return None
        raise
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    return None


class ProcessGroup:
    """A started command: the leader of a session and process group of its own.

    ``ended`` is a future of the leader's exit code, 128 + N if signal N killed it; grandchildren may live on. Wait for
    it with `asyncio.wait` or a shield, for cancelling it would take it from everybody.
    """

    def __init__(self, popen: subprocess.Popen[bytes], output: OutputFiles) -> None:
        self.output = output
        self.ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._popen = popen
        _call_at_exit(popen, self._reap)

    @classmethod
    async def start(
        cls, executor: Executor, argv: list[str], *, env: dict[str, str], cwd: Path, output: OutputFiles
    ) -> ProcessGroup:
        """Start ``argv``; raises OSError, or ValueError for what no process can be given, such as a NUL byte.

        Must not be cancelled: a process that was started meanwhile would be nobody's.
        """
        loop = asyncio.get_running_loop()
        return cls(await loop.run_in_executor(executor, _popen, argv, env, cwd, output), output)

    @property
    def is_alive(self) -> bool:
        """Whether anything of the group is left, be it a zombie."""
        try:
            self._signal(0)
        except ProcessLookupError:
            return False
        return True

    def kill(self) -> None:
        """SIGKILL the whole group."""
        with suppress(ProcessLookupError):
            self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        if self._popen.returncode is not None and _exists(self._popen.pid):
            # The leader was reaped, yet its number is in use: the kernel gives it away again only after the whole
            # group has gone, so this is a stranger.
            raise ProcessLookupError
        with suppress(PermissionError):  # only members that changed their user are left, or, on macOS, zombies
            os.killpg(self._popen.pid, number)

    def _reap(self) -> None:
        code = self._popen.wait()
        if not self.ended.done():
            self.ended.set_result(code if code >= 0 else 128 - code)


def _popen(argv: list[str], env: dict[str, str], cwd: Path, output: OutputFiles) -> subprocess.Popen[bytes]:
    with output.stdout.open("ab") as stdout, output.stderr.open("ab") as stderr:
        return subprocess.Popen(  # noqa: S603 - running what the request says is what a sandbox is for
            argv,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            env=env,
            cwd=cwd,
            start_new_session=True,
        )


def _call_at_exit(popen: subprocess.Popen[bytes], callback: Callback) -> None:
    """Call ``callback`` on the loop when the process has ended, and may be waited for without blocking."""
    loop = asyncio.get_running_loop()
    descriptor = _pidfd(popen.pid)
    if descriptor is None:
        threading.Thread(target=_wait_in_thread, args=(popen, loop, callback), daemon=True).start()
        return

    def readable() -> None:
        loop.remove_reader(descriptor)
        os.close(descriptor)
        callback()

    loop.add_reader(descriptor, readable)


def _pidfd(pid: int) -> int | None:
    if sys.platform == "linux":
        with suppress(OSError):  # an old kernel, a strict seccomp profile, or no descriptor left
            return os.pidfd_open(pid)
    return None


def _wait_in_thread(popen: subprocess.Popen[bytes], loop: asyncio.AbstractEventLoop, callback: Callback) -> None:
    popen.wait()
    with suppress(RuntimeError):  # the loop was closed meanwhile: nobody waits any more
        loop.call_soon_threadsafe(callback)


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


class Census:
    """Counts who belongs to which sandbox; one look at the process table serves all that ask at the same time.

    A look costs about 20 microseconds per process of the machine. Hundreds of sandboxes are deleted at once when a
    batch is cancelled; one look each would take minutes.
    """

    def __init__(self, executor: Executor, variable: str) -> None:
        self._executor = executor
        self._variable = variable
        self._current: asyncio.Task[Mapping[str, set[int]]] | None = None
        self._next: asyncio.Task[Mapping[str, set[int]]] | None = None

    async def take(self) -> Mapping[str, set[int]]:
        """Return process ids by the value of the variable, as of a moment after this call."""
        # A scan under way may have passed the place where the caller's processes will be: only a later one counts.
        if self._next is None:
            self._next = asyncio.create_task(self._scan(after=self._current))
        return await asyncio.shield(self._next)

    async def _scan(self, after: asyncio.Task[Mapping[str, set[int]]] | None) -> Mapping[str, set[int]]:
        if after:
            await asyncio.wait([after])
        self._current, self._next = self._next, None
        return await asyncio.get_running_loop().run_in_executor(self._executor, carriers, self._variable)


async def kill_all(census: Census, sandbox_id: str, groups: AbstractSet[ProcessGroup]) -> None:
    """Kill the process groups and whoever left them but carries the marker, until a look finds nobody.

    The look comes first: a process with a cleared environment is known by its parent only while that one lives.
    """
    killed: set[ProcessGroup] = set()
    met: set[int] = set()
    pause = 0.005
    while True:
        try:
            found = (await census.take()).get(sandbox_id, set())
        except OSError:  # this process has no descriptor left to look with: the next look tells
            found = None
        # One SIGKILL reaches all of a group. Whether it is still there afterwards tells nothing: it is for as long as
        # an init process that is slow, or none, leaves its orphans as zombies.
        left = groups - killed
        if not left and found is not None and not found:
            return
        for group in left:
            group.kill()
        kill_each(found or ())
        killed |= left
        if left:
            await asyncio.wait([group.ended for group in left])
        elif found is None or found <= met:
            # Killed before, and still there: it may wait inside the kernel for long, and each look costs everybody.
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
        met |= found or set()


def headline(command: str) -> str:
    """Return the head of a command's first line, for messages."""
    line = command.strip().partition("\n")[0]
    return line if len(line) <= 80 else f"{line[:80]}..."
