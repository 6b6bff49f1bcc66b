"""What a job in a Prime sandbox has printed: the head and the tail of each stream, however long it is.

The SDK's own way is a request for each stream, which fetches all of it, up to 10 MiB: sandboxes that are virtual
machines know no windows. So the job's shell itself leaves both streams' ends in one small *record* when the command has
ended (`recording`), which is one request to read. Where there is none, as for a command that still runs, one command
in the sandbox prints the same; and only where no command can be run there any more are the files themselves read.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from prime_sandboxes import SandboxFileNotFoundError

from workers.errors import SandboxError
from workers.sandboxes.base import CommandResult
from workers.sandboxes.prime_client import JobKey, Platform, output_paths

logger = logging.getLogger(__name__)

#: Times that the output is asked for in each way, and the seconds before the second time; doubled each time.
TRIES, DELAY = 3, 0.25
#: Seconds for a job's output, all tries together: fewer than a rollout waits for it.
LIMIT = 45.0
#: Bytes of a record beside the streams' ends.
MARKS = 200

#: Prints what is in both files, or their ends, and a mark after each. For any POSIX shell.
_ENDS = (
    "for f in {files}; do if [ -s $f ]; then s=$(wc -c < $f) && if [ $s -le {limit} ]; then cat $f; "
    "else head -c {half} $f && printf '\\n{mark}:%s\\n' $s && tail -c {half} $f; fi || break; fi; "
    "printf '\\n{mark};\\n'; done"
)
#: Runs a command, then leaves its record. The command has its streams and its exit code as ever; what the shell itself
#: would say goes nowhere. Without /proc there is no record.
_RECORDED = (
    "{{ (exec {line} 2>&4 3>&- 4>&-); c=$?; {{ [ -e /proc/self/fd/3 ] && {ends}; }} > {path}; }} "
    "3>&1 4>&2 2>/dev/null; exit $c"
)
_CUT = "\n... [%s bytes cut] ...\n"


@dataclass(frozen=True)
class Record:
    """Where a job leaves the ends of its streams, ``limit`` bytes of each; ``mark`` stands in no stream by chance."""

    mark: str
    limit: int

    @property
    def path(self) -> str:
        """The file in the sandbox."""
        return f"/tmp/.rollouts-{self.mark}.out"  # noqa: S108

    def of(self, line: str) -> str:
        """Return the shell line that does ``line``, with its exit code, and leaves the record."""
        ends = _ends(("/proc/self/fd/3", "/proc/self/fd/4"), self.mark, self.limit)
        return _RECORDED.format(line=line, ends=ends, path=self.path)


def new_record(limit: int) -> Record:
    """Return a record for a new job."""
    return Record(secrets.token_hex(8), limit)


async def read_output(
    platform: Platform, key: JobKey, exit_code: int, limit: int, record: Record | None
) -> CommandResult:
    """Return what the job has printed, about ``limit`` bytes of each stream; ``record`` is that of an ended job.

    A rollout is not lost for its output: what cannot be read is replaced by why not.
    """
    sandbox_id, job_id = key
    ways = [
        lambda: _by_command(platform, sandbox_id, output_paths(job_id), limit),
        lambda: _from_files(platform, sandbox_id, output_paths(job_id), limit),
    ]
    if record is not None:
        ways.insert(0, lambda: _from_record(platform, sandbox_id, record))
    why = f"it took longer than {LIMIT:g} s"
    try:
        async with asyncio.timeout(LIMIT):
            for way in ways:
                try:
                    return CommandResult(exit_code, *await _repeatedly(way))
                except SandboxError as error:
                    why = error.message
    except TimeoutError:
        pass
    logger.warning(
        "output of job %s in sandbox %s is not known: %s", job_id, sandbox_id, why, extra={"sandbox_id": sandbox_id}
    )
    message = f"[output could not be read: {why}]"
    return CommandResult(exit_code, message, message)


async def _repeatedly(way: Callable[[], Awaitable[tuple[str, str]]]) -> tuple[str, str]:
    for attempt in range(TRIES - 1):
        try:
            return await way()
        except SandboxError as error:
            if not error.retryable:
                raise
        await asyncio.sleep(DELAY * 2**attempt)
    return await way()


async def _from_record(platform: Platform, sandbox_id: str, record: Record) -> tuple[str, str]:
    content = await platform.read(sandbox_id, record.path, offset=0, length=2 * record.limit + MARKS)
    return _parsed(content.content, record.mark, record.limit)


async def _by_command(platform: Platform, sandbox_id: str, paths: tuple[str, str], limit: int) -> tuple[str, str]:
    mark = secrets.token_hex(8)
    command = _ends(paths, mark, limit)
    result = await platform.execute(sandbox_id, command, what="could not read the ends of a job's output", timeout=30)
    return _parsed(result.stdout, mark, limit)


async def _from_files(platform: Platform, sandbox_id: str, paths: tuple[str, str], limit: int) -> tuple[str, str]:
    stdout, stderr = [await _from_file(platform, sandbox_id, path, limit) for path in paths]
    return stdout, stderr


async def _from_file(platform: Platform, sandbox_id: str, path: str, limit: int) -> str:
    try:
        end = await platform.read(sandbox_id, path, offset=-limit, length=limit, whole=True)
    except SandboxError as error:
        if isinstance(error.__cause__, SandboxFileNotFoundError):
            return ""  # it is made when the command begins
        raise
    if not end.offset:  # it is all there, or this sandbox has no windows and always sends all of it
        return keep_ends(end.content, limit)
    half = limit // 2
    begin = await platform.read(sandbox_id, path, offset=0, length=half)
    size = end.total_size or end.offset + end.size
    return _joined(begin.content.encode()[:half], end.content.encode()[-half:], size - 2 * half)


def _ends(files: tuple[str, str], mark: str, limit: int) -> str:
    return _ENDS.format(files=" ".join(files), mark=mark, limit=limit, half=limit // 2)


def _parsed(text: str, mark: str, limit: int) -> tuple[str, str]:
    """Return the two streams of what `_ENDS` has printed; raises `SandboxError` when it is not complete."""
    stdout, *rest = text.split(f"\n{mark};\n")
    if len(rest) != 2 or rest[1]:
        raise SandboxError("what the job printed is not in its record", retryable=False)
    return _stream(stdout, mark, limit), _stream(rest[0], mark, limit)


def _stream(text: str, mark: str, limit: int) -> str:
    if (cut := re.search(f"\n{mark}:(\\d+)\n", text)) is None:
        return keep_ends(text, limit)
    # An end may begin or stop inside a character, whose bytes then show as replacement characters.
    head, tail = text[: cut.start()].rstrip("\ufffd"), text[cut.end() :].lstrip("\ufffd")
    return f"{head}{_CUT % (int(cut[1]) - 2 * (limit // 2))}{tail}"


def keep_ends(text: str, limit: int) -> str:
    """Return ``text``, or the first and last ``limit // 2`` bytes of it with the cut marked, as local sandboxes do."""
    if len(text) <= limit // 4:  # no character has more bytes than four
        return text
    data = text.encode(errors="replace")
    if len(data) <= limit:
        return text
    half = limit // 2
    return _joined(data[:half], data[-half:], len(data) - 2 * half)


def _joined(head: bytes, tail: bytes, cut: int) -> str:
    # Neither end may begin or stop inside a character: its bytes would show as replacement characters.
    return f"{head.decode(errors='ignore')}{_CUT % cut}{tail.decode(errors='ignore')}"
