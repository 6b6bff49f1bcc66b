"""The file of results: one JSON object a line, appended whole, never overwritten unasked.

A line is written by one system call, so a process that is killed leaves whole lines, or at worst a last one cut short
by the machine's own death; resuming cuts that one off.
"""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import compress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import orjson

from producer.contract import RolloutResult, StopCondition
from producer.files.errors import ResultsFileError
from producer.files.index import Sample, SampleIndex

__all__ = ["ResultsFile", "ResultsFileError", "is_kept", "parse_line", "sample_of"]

_KEPT = {StopCondition.COMPLETED, StopCondition.AGENT_TIMEOUT}
_NEEDED = {"rollout_id", "example_id", "sample_index", "stop_condition"}


@dataclass
class ResultsFile:
    """A file to append results to; `prepare` it, then use it as a context manager while writing.

    ``kept`` names the rollouts whose results are in the file already and stay; ``kept_failed`` is how many of them did
    not complete. Nothing is changed on disk before the context is entered.
    """

    path: Path
    overwrite: bool = False
    kept: SampleIndex = field(default_factory=SampleIndex)
    kept_failed: int = 0
    is_full: bool = False
    _keep_lines: bytearray | None = None
    _handle: int = -1

    @classmethod
    def prepare(
        cls, path: Path, *, overwrite: bool = False, resume: bool = False, keep_failed: bool = False
    ) -> ResultsFile:
        """Check that results may be written to ``path``, and for ``resume`` read what is there.

        Of the results that are there, completed ones and those whose agent ran out of time are kept, and with
        ``keep_failed`` those with errors too; the lines of what runs again are dropped. Raises `ResultsFileError`.
        """
        path = Path(os.path.realpath(path))
        file = cls(path, overwrite)
        if path.is_dir():
            raise ResultsFileError(f"{path} is a directory; --out names a file")
        if not path.parent.is_dir():
            raise ResultsFileError(f"{path.parent} is no directory; make it first")
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise ResultsFileError(f"{path} cannot be written: permission denied")
        if resume and path.is_file():
            file._read_kept(keep_failed)
        elif path.is_file() and path.stat().st_size and not overwrite:
            raise ResultsFileError(
                f"{path} holds results already; continue it with --resume, replace it with --overwrite, or name another"
            )
        return file

    def __enter__(self) -> Self:
        try:
            self._handle = self._open()
            if self._keep_lines is not None:
                self._rewrite(self._keep_lines)
            elif self.overwrite and self._regular():
                os.ftruncate(self._handle, 0)
        except OSError as error:
            self.close()
            raise ResultsFileError(f"{self.path} cannot be written: {error.strerror}") from None
        except ResultsFileError:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        handle, self._handle = self._handle, -1
        if handle >= 0:
            os.close(handle)

    def roll(self) -> None:
        """Do nothing: there are no parts to be made of what was written."""

    def write(self, result: RolloutResult) -> int:
        """Append one result as one line; raises `ResultsFileError`, and then leaves no half line.

        Returns its length in bytes.
        """
        line = result.to_json() + b"\n"
        end = os.fstat(self._handle).st_size
        try:
            written = os.write(self._handle, line)
            while written < len(line):  # a full disk or a signal: the rest, or the error that says why not
                written += os.write(self._handle, line[written:])
        except OSError as error:
            if self._regular():
                os.ftruncate(self._handle, end)
            raise ResultsFileError(f"{self.path} cannot be written: {error.strerror}") from None
        return len(line)

    def _open(self) -> int:
        handle = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            raise ResultsFileError(f"{self.path} is being written by another run; wait for it, or stop it") from None
        return handle

    def _regular(self) -> bool:
        return stat.S_ISREG(os.fstat(self._handle).st_mode)

    def _read_kept(self, keep_failed: bool) -> None:
        keep_lines = bytearray()
        for number, line in enumerate(_lines(self.path), start=1):
            found = parse_line(self.path, number, line)
            keep = found is not None and is_kept(found, self.kept, keep_failed)
            if keep and found is not None:
                self.kept.add(sample_of(found))
                self.kept_failed += found["stop_condition"] != StopCondition.COMPLETED
            keep_lines.append(keep)
        self._keep_lines = keep_lines

    def _rewrite(self, keep_lines: bytearray) -> None:
        """Drop the lines that are not kept, by replacing the file at once: a crash leaves the old one or the new."""
        if all(keep_lines) and _ends_a_line(self.path):
            return
        other = self.path.with_name(f".{self.path.name}.resume-{os.getpid()}")
        try:
            with other.open("wb") as file:
                file.writelines(line.rstrip(b"\n") + b"\n" for line in compress(_lines(self.path), keep_lines))
                file.flush()
                os.fsync(file.fileno())
            other.chmod(stat.S_IMODE(self.path.stat().st_mode))
            other.replace(self.path)
        except BaseException:
            other.unlink(missing_ok=True)
            raise
        self.close()
        self._handle = self._open()


def _lines(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        yield from file


def _ends_a_line(path: Path) -> bool:
    with path.open("rb") as file:
        if not file.seek(0, os.SEEK_END):
            return True
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"


def parse_line(path: Path, number: int, line: bytes) -> dict[str, Any] | None:
    """Return a line's result as it stands there, None for the last line when it was cut short.

    Raises `ResultsFileError` for anything else.
    """
    try:
        found = orjson.loads(line)
    except orjson.JSONDecodeError:
        found = None
    if isinstance(found, dict) and found.keys() >= _NEEDED:
        return found
    if line.endswith(b"\n"):
        raise ResultsFileError(f"{path}:{number}: is not a result; mend or remove the line, then resume")
    return None


def is_kept(found: dict[str, Any], kept: SampleIndex, keep_failed: bool) -> bool:
    """Whether a result stays when its run is resumed, where ``kept`` are those before it that do."""
    stop = found["stop_condition"]
    wanted = stop in _KEPT or (keep_failed and stop == StopCondition.HAS_ERROR)
    return wanted and sample_of(found) not in kept


def sample_of(found: dict[str, Any]) -> Sample:
    """Return what names a result across runs."""
    return str(found["example_id"]), int(found["sample_index"])
