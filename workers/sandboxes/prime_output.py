"""What a job in a Prime sandbox has printed: the head and the tail of each stream, however long it is.

The SDK's own way fetches the last 10 MiB of each stream, keeps 64 MiB of them for later, has no head, and tells of a
failure in a field of its answer. Reading the two files costs as many requests and can be repeated.
"""

from __future__ import annotations

import asyncio
import logging
import shlex

from prime_sandboxes import SandboxFileNotFoundError, SandboxFileTooLargeError

from workers.errors import SandboxError
from workers.sandboxes.base import CommandResult
from workers.sandboxes.prime_client import JobKey, Platform, output_paths

logger = logging.getLogger(__name__)

#: Times that a stream is asked for, and the seconds before the second time; doubled each time.
TRIES, DELAY = 4, 0.25
#: Seconds for one stream, all tries together.
LIMIT = 60.0

#: Prints a file's ends; where the platform finds a file too long to be read.
_ENDS = (
    's=$(wc -c < {path}); if [ "$s" -le {limit} ]; then cat {path}; '
    "else head -c {half} {path}; printf {cut} $((s - 2 * {half})); tail -c {half} {path}; fi"
)
_CUT = "\n... [%s bytes cut] ...\n"


async def read_output(platform: Platform, key: JobKey, exit_code: int, limit: int) -> CommandResult:
    """Return what the job has printed, about ``limit`` bytes of each stream.

    A rollout is not lost for its output: a stream that cannot be read is replaced by why not.
    """
    sandbox_id, job_id = key
    streams = [_read_stream(platform, sandbox_id, path, limit) for path in output_paths(job_id)]
    stdout, stderr = await asyncio.gather(*streams)
    return CommandResult(exit_code, stdout, stderr)


async def _read_stream(platform: Platform, sandbox_id: str, path: str, limit: int) -> str:
    error: SandboxError | None = None
    try:
        async with asyncio.timeout(LIMIT):
            for attempt in range(TRIES):
                try:
                    return await _read(platform, sandbox_id, path, limit)
                except SandboxError as failure:
                    error = failure
                    if not failure.retryable:
                        break
                await asyncio.sleep(DELAY * 2**attempt)
    except TimeoutError:
        pass
    why = error.message if error else f"it took longer than {LIMIT:g} s"
    logger.warning("%s of sandbox %s is not known: %s", path, sandbox_id, why, extra={"sandbox_id": sandbox_id})
    return f"[output could not be read: {why}]"


async def _read(platform: Platform, sandbox_id: str, path: str, limit: int) -> str:
    try:
        end = await platform.read(sandbox_id, path, offset=-limit, length=limit)
    except SandboxError as error:
        if isinstance(error.__cause__, SandboxFileNotFoundError):
            return ""  # it is made when the command begins
        if isinstance(error.__cause__, SandboxFileTooLargeError):
            return await _read_by_command(platform, sandbox_id, path, limit)
        raise
    if not end.offset:  # it is all there, or this sandbox has no windows and always sends all of it
        return keep_ends(end.content, limit)
    half = limit // 2
    begin = await platform.read(sandbox_id, path, offset=0, length=half)
    size = end.total_size or end.offset + end.size
    return _joined(begin.content.encode()[:half], end.content.encode()[-half:], size - 2 * half)


async def _read_by_command(platform: Platform, sandbox_id: str, path: str, limit: int) -> str:
    command = _ENDS.format(path=shlex.quote(path), limit=limit, half=limit // 2, cut=shlex.quote(_CUT))
    result = await platform.execute(sandbox_id, command, what=f"could not read the ends of {path!r}", timeout=30)
    return result.stdout


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
