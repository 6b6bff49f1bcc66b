"""Tasks as lines of JSON: a file, or what comes through a pipe; read as often as is wanted, in bounded memory."""

from __future__ import annotations

import io
import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from producer.files.errors import TasksChangedError, TasksFileError

#: Up to this size a file is held in memory, so that it may be edited while its tasks run.
IN_MEMORY = 64 * 1024 * 1024
LONGEST_LINE = 64 * 1024 * 1024
_LOOK_EVERY = 1000
_BOM = b"\xef\xbb\xbf"

STDIN = Path("-")


@dataclass(frozen=True)
class Task:
    """One task: its number, which is its example id unless it gives one, where it stands, and its fields.

    They are JSON, or a row of a table: then a null is a field that is left out.
    """

    number: int
    where: str
    line: bytes | dict[str, Any]


class JsonLines:
    """The tasks of a file or a pipe, one JSON object a line; iterating again begins again.

    A small file is held in memory. A large one is read anew, and noticed when it was changed meanwhile; one that was
    replaced is read on as it was. A pipe can be read once only: it goes to a temporary file when it is large.
    """

    def __init__(self, path: Path) -> None:
        self._name = "stdin" if path == STDIN else str(path)
        self._file: BinaryIO | None = None
        self._state: tuple[int, int] | None = None
        self._data = self._hold(path)

    def __iter__(self) -> Iterator[Task]:
        with self._open() as file:
            number = 0
            while line := file.readline(LONGEST_LINE + 1):
                number += 1
                if len(line) > LONGEST_LINE:
                    raise TasksFileError(
                        [f"{self._name}:{number}: longer than {LONGEST_LINE} bytes; each task is a line"]
                    )
                if number == 1:
                    line = line.removeprefix(_BOM)
                if number % _LOOK_EVERY == 0:
                    self._check_unchanged()
                if line.strip():
                    yield Task(number, f"{self._name}:{number}", line.removesuffix(b"\n"))
            self._check_unchanged()

    def _hold(self, path: Path) -> bytes:
        try:
            file = sys.stdin.buffer if path == STDIN else path.open("rb")
            data = file.read(IN_MEMORY + 1)
            if len(data) <= IN_MEMORY:
                return data
            if stat.S_ISREG(os.fstat(file.fileno()).st_mode) and path != STDIN:
                self._file, self._state = file, _state(file)
            else:
                self._file = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as this object
                self._file.write(data)
                shutil.copyfileobj(file, self._file, 1024 * 1024)
                self._file.flush()
        except FileNotFoundError:
            raise TasksFileError([f"{path}: no such file"]) from None
        except OSError as error:
            raise TasksFileError([f"{path}: cannot be read: {error.strerror}"]) from None
        return b""

    def _open(self) -> BinaryIO:
        if self._file is None:
            return io.BytesIO(self._data)
        return io.BufferedReader(_Reread(self._file.fileno()), 1024 * 1024)

    def _check_unchanged(self) -> None:
        if self._file is not None and self._state not in {None, _state(self._file)}:
            raise TasksChangedError(f"{self._name}: was changed while its tasks are run; --resume checks it anew")


class _Reread(io.RawIOBase):
    """Reads an open file from its start without moving the file's own position, which other readers share."""

    def __init__(self, handle: int) -> None:
        self._handle = handle
        self._position = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count = os.preadv(self._handle, [buffer], self._position)
        self._position += count
        return count


def _state(file: BinaryIO) -> tuple[int, int]:
    about = os.fstat(file.fileno())
    return about.st_size, about.st_mtime_ns
