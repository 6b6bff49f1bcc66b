"""Files of a local sandbox: paths are kept below its directory, and no file can block or exhaust the worker."""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Callable
from pathlib import Path

from workers.errors import SandboxError

#: Bytes of the largest file that is fetched: one file of an agent must not exhaust the worker's memory.
FETCH_LIMIT = 1024**3

#: Troubles of the machine, which may have passed at the next attempt; all others are the caller's or the agent's.
_PASSING = {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE}


def resolve(directory: Path, path: str) -> Path:
    """Return where ``path``, relative or absolute, is below ``directory``, which must itself be resolved.

    Raises `SandboxError` when '..' or a symbolic link leads out of it. This guards against mistakes: an agent that
    runs at the same time could change a link right after.
    """
    try:
        target = (directory / path.lstrip("/")).resolve()
    except RuntimeError:  # a loop of links, before Python 3.13
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path) from None
    if not target.is_relative_to(directory):
        raise SandboxError(f"{path!r} leads out of the sandbox", retryable=False)
    return target


def make_folder(directory: Path, path: str) -> Path:
    """Return the folder ``path`` below ``directory``, made if missing."""
    folder = resolve(directory, path)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def write(directory: Path, path: str, fill: Callable[[Path], object]) -> None:
    """Let ``fill`` write a new file, then put it at ``path`` below ``directory``, whose folders are made."""
    target = resolve(directory, path)
    if target == directory:
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    target.parent.mkdir(parents=True, exist_ok=True)
    # Written beside it and renamed: a pipe that an agent put there would block, and a running program refuse.
    part = target.with_name(f".{secrets.token_hex(6)}.part")
    try:
        fill(part)
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)


def read(directory: Path, path: str) -> bytes:
    """Return the content of the ordinary file ``path`` below ``directory``, at most `FETCH_LIMIT` bytes."""
    # Without O_NONBLOCK, opening a named pipe waits for its writer.
    descriptor = os.open(resolve(directory, path), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise SandboxError(f"{path!r} is not an ordinary file", retryable=False)
        if status.st_size > FETCH_LIMIT:
            message = f"{path!r} has {status.st_size} bytes; no more than {FETCH_LIMIT} are fetched"
            raise SandboxError(message, retryable=False)
        return file.read(FETCH_LIMIT)


def sandbox_error(what: str, error: OSError | ValueError) -> SandboxError:
    """Return ``error`` as a `SandboxError`, retryable where the machine may recover from it.

    Only its text is used: the repr of an error of encoding holds the whole string, which may be a secret.
    """
    if isinstance(error, OSError):
        return SandboxError(f"{what}: {error.strerror or error}", detail=str(error), retryable=error.errno in _PASSING)
    return SandboxError(f"{what}: {error}", retryable=False)
