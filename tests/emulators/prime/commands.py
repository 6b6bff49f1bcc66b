"""Runs commands and background jobs in sandboxes, and answers at once what needs no process.

The SDK asks the same few things of every sandbox: a reachability echo, a job's launch line (three shells to start one
command) and its poll line. The echo and the poll are answered from what is known here. The launch line is taken apart
and its command started as one process. Whatever does not parse to the letter is really run by bash.
"""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import shutil
from collections.abc import Iterable
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

from emulators.prime import connect, processes
from emulators.prime.sandboxes import Job, Sandbox
from emulators.prime.web import Connection

#: Seconds that the output of what a command left behind is still waited for, once the command itself has ended.
DRAIN_SECONDS = 0.5

_ECHO = "echo 'sandbox ready'"
_READY = connect.whole(0, b"sandbox ready\n")

_LAUNCH = re.compile(
    r"mkdir /tmp/job_(?P<id>[0-9a-f]{8})\.launch \|\| \{ test -d /tmp/job_(?P=id)\.launch; exit; \}; "
    r"ack=\$\(nohup sh -c (?P<script>.*) < /dev/null 2>&1 &\); "
    r'test "\$ack" = started \|\| \{ echo "job did not start\$\{ack:\+: \$ack\}" >&2; exit 1; \}',
    re.DOTALL,
)
_SAFE = r"[\w@%+=:,./-]+"
_QUOTED = rf"""(?:'[^']*'(?:"'"'[^']*')*|{_SAFE})"""
_EXPORT = re.compile(rf"export (?P<name>[A-Za-z_][A-Za-z0-9_]*)=(?P<value>{_QUOTED}); ", re.ASCII)
_CD = re.compile(rf"cd (?P<path>{_QUOTED}) \|\| exit 1; ", re.ASCII)
#: A command without operators, and the builtins that are also programs.
_SIMPLE = re.compile(r"(?P<program>[\w./+-]+)(?: [^;&|<>()`\n#]*)?", re.ASCII)
_BUILTINS = frozenset({"echo", "printf", "test", "true", "false", "kill", "pwd"})
_POLL = re.compile(r"grep -s \. /tmp/job_(?P<id>[0-9a-f]{8})\.exit && exit; ")


def native(sandbox: Sandbox, command: str, cwd: str) -> bytes | None:
    """Return all frames of a command that is answered without running it, or None."""
    if command == _ECHO:
        return _READY
    sandbox.prepare()
    poll = _POLL.match(command)
    if poll and command == _poll_command(poll["id"]):
        outcome = job_outcome(sandbox, poll["id"])
        return connect.whole(0, b"" if outcome == "running" else f"{outcome}\n".encode())
    launch = _LAUNCH.fullmatch(command)
    return _launch(sandbox, launch["id"], launch["script"], cwd) if launch else None


def _poll_command(job_id: str) -> str:
    exit_file = f"/tmp/job_{job_id}.exit"
    return (
        f"grep -s . {exit_file} && exit; "
        f"grep -qF {exit_file} /proc/$(cat /tmp/job_{job_id}.launch/pid 2>/dev/null)/cmdline 2>/dev/null && exit; "
        f"grep -s . {exit_file} || echo lost"
    )


def job_outcome(sandbox: Sandbox, job_id: str) -> int | str | None:
    """Return a job's exit code, "running", "lost", or None when this sandbox has no such job."""
    job = sandbox.jobs.get(job_id)
    if job:
        return "running" if job.exit_code is None else job.exit_code
    tmp = sandbox.paths.locate("/tmp")
    exit_file = tmp / f"job_{job_id}.exit"
    for look in range(2):  # the job writes its exit file just before it ends, so look again after it is gone
        with suppress(OSError, ValueError):
            return int(exit_file.read_text())
        if look == 0 and _named_in_command_line(tmp / f"job_{job_id}.launch" / "pid", str(exit_file)):
            return "running"
    return "lost" if (tmp / f"job_{job_id}.launch").is_dir() else None


def _named_in_command_line(pid_file: Path, text: str) -> bool:
    try:
        return text.encode() in Path(f"/proc/{int(pid_file.read_text())}/cmdline").read_bytes()
    except (OSError, ValueError):
        return False


def _unquote(text: str) -> str | None:
    """Undo `shlex.quote`; None if ``text`` is not what it would have made. (shlex.split takes 1 ms for 1 KB.)"""
    plain = text[1:-1].replace("'\"'\"'", "'") if text.startswith("'") else text
    return plain if shlex.quote(plain) == text else None


def _body(job_id: str, script: str) -> str | None:
    """Return what the launch line's inner script runs in its subshell, if it is the SDK's."""
    plain = _unquote(script)
    before = f"echo $$ > /tmp/job_{job_id}.launch/pid || exit 1; echo started; exec > /dev/null 2>&1; ("
    after = f") > /tmp/job_{job_id}.stdout.log 2> /tmp/job_{job_id}.stderr.log; echo $? > /tmp/job_{job_id}.exit"
    if plain is None or not (plain.startswith(before) and plain.endswith(after)):
        return None
    body = plain[len(before) : -len(after)]
    return None if _may_not_stand_alone(body) else body


def _may_not_stand_alone(body: str) -> bool:
    """Return whether a command could mean something else in the SDK's parentheses: then a real shell finds out.

    A comment or a here-document would swallow the closing parenthesis; a syntax error fails the launch, not the job.
    """
    unbalanced = body.count("'") % 2 or body.count('"') % 2 or body.count("(") != body.count(")")
    return bool(unbalanced) or "#" in body or "<<" in body or not body.strip() or body.endswith("\\")


def _launch(sandbox: Sandbox, job_id: str, script: str, cwd: str) -> bytes | None:
    body = _body(job_id, script)
    if body is None:
        return None
    tmp = sandbox.paths.locate("/tmp")
    try:
        (tmp / f"job_{job_id}.launch").mkdir()
    except FileExistsError:
        return connect.whole(0, b"", b"mkdir: cannot create directory: File exists\n")
    command, variables, folder = _take_apart(body)
    where = sandbox.paths.locate(folder, cwd=cwd) if folder else sandbox.paths.locate(cwd)
    job = sandbox.jobs[job_id] = Job(job_id)
    with open(tmp / f"job_{job_id}.stdout.log", "wb") as out, open(tmp / f"job_{job_id}.stderr.log", "wb") as err:
        if not where.is_dir():
            err.write(f"sh: 1: cd: can't cd to {folder}\n".encode())
            _record_exit(sandbox, job, 1)
            return connect.whole(0)
        env = sandbox.environment(variables)
        argv = ["/bin/sh", "-c", _without_shell(sandbox.paths.enter(command), env["PATH"])]
        job.child = processes.start(argv, env=env, cwd=where, stdout=out, stderr=err)
    sandbox.adopt(job.child)
    (tmp / f"job_{job_id}.launch" / "pid").write_text(f"{job.child.pid}\n")
    job.child.on_exit(lambda code: _record_exit(sandbox, job, code))
    return connect.whole(0, pid=job.child.pid)


def _take_apart(body: str) -> tuple[str, list[tuple[str, str]], str | None]:
    """Split the SDK's ``export`` and ``cd`` prefixes off a job's command."""
    variables = []
    while match := _EXPORT.match(body):
        value = _unquote(match["value"])
        if value is None:
            break
        variables.append((match["name"], value))
        body = body[match.end() :]
    match = _CD.match(body)
    folder = _unquote(match["path"]) if match else None
    return (body[match.end() :], variables, folder) if match and folder else (body, variables, None)


def _without_shell(command: str, path: str) -> str:
    """Let a simple command replace its shell, which dash does not do by itself: one process instead of two."""
    match = _SIMPLE.fullmatch(command)
    program = match and match["program"] not in _BUILTINS and _find(match["program"], path)
    return f"exec {command}" if program else command


@lru_cache(maxsize=256)
def _find(program: str, path: str) -> str | None:
    return shutil.which(program, path=path)


def _record_exit(sandbox: Sandbox, job: Job, code: int) -> None:
    if not sandbox.deleted:
        with suppress(OSError):  # a full disk; the platform would not see the exit file either
            sandbox.paths.locate(f"/tmp/job_{job.job_id}.exit").write_text(f"{code}\n")
    job.exit_code = code


class Command:
    """One foreground command, whose output goes to the client as it comes."""

    def __init__(self, sandbox: Sandbox, connection: Connection) -> None:
        self._sandbox = sandbox
        self._connection = connection
        self._loop = asyncio.get_running_loop()
        self._open: dict[str, int] = {}
        self._child: processes.Child | None = None
        self._timers: list[asyncio.TimerHandle] = []
        self._exit_code: int | None = None
        self._done: asyncio.Future[None] = self._loop.create_future()

    async def run(self, command: str, variables: Iterable[tuple[str, str]], cwd: Path, timeout: float | None) -> None:
        """Run it to its end, its deadline, or the sandbox's death."""
        argv = ["/bin/bash", "-c", self._sandbox.paths.enter(command)]
        self._connection.start(200, connect.CONTENT_TYPE)
        try:
            child = processes.start(argv, env=self._sandbox.environment(variables), cwd=cwd)
        except OSError as error:
            self._connection.chunk(connect.failure("internal", f"cannot start the command: {error}"))
            self._connection.end()
            return
        self._child = child
        self._sandbox.adopt(child)
        self._sandbox.on_death.add(self._cut)
        self._connection.chunk(connect.start(child.pid))
        for name, pipe in (("stdout", child.process.stdout), ("stderr", child.process.stderr)):
            self._read(name, os.dup(pipe.fileno()))  # type: ignore[union-attr]
            pipe.close()  # type: ignore[union-attr]
        if timeout is not None:
            self._timers.append(self._loop.call_later(timeout, self._expire, timeout))
        child.on_exit(self._exited)
        await self._done

    def _read(self, name: str, descriptor: int) -> None:
        os.set_blocking(descriptor, False)
        self._open[name] = descriptor
        self._loop.add_reader(descriptor, self._readable, name)

    def _readable(self, name: str) -> None:
        try:
            content = os.read(self._open[name], 65536)
        except BlockingIOError:
            return
        if content:
            self._connection.chunk(connect.data(name, self._sandbox.paths.leave(content)))
        else:
            self._close(name)
            self._end_if_complete()

    def _close(self, name: str) -> None:
        descriptor = self._open.pop(name)
        self._loop.remove_reader(descriptor)
        os.close(descriptor)

    def _exited(self, code: int) -> None:
        self._exit_code = code
        self._timers.append(self._loop.call_later(DRAIN_SECONDS, self._finish, None))
        self._end_if_complete()

    def _end_if_complete(self) -> None:
        if self._exit_code is not None and not self._open:
            self._finish(None)

    def _expire(self, timeout: float) -> None:
        if self._child:
            self._child.kill()
        self._finish(connect.failure("deadline_exceeded", f"the command exceeded {timeout:g} s"))

    def _cut(self) -> None:
        """Let the stream break off: the sandbox is dead."""
        if not self._done.done():
            self._release()
            self._connection.abort()

    def _finish(self, failure: bytes | None) -> None:
        if self._done.done():
            return
        self._release()
        self._connection.chunk(failure or connect.end(self._exit_code or 0) + connect.CLOSE)
        self._connection.end()

    def _release(self) -> None:
        for name in list(self._open):
            self._close(name)
        for timer in self._timers:
            timer.cancel()
        self._sandbox.on_death.discard(self._cut)
        self._done.set_result(None)
