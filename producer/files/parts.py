"""Results in Parquet: a folder of parts, each written whole, and a journal of what is not in a part yet.

``OUT.parquet/part-00000.parquet`` and so on are one data set to every reader. A result is first appended as a line to
``.journal-00003.jsonl``, which readers pass over, and is on disk then. A full journal becomes the part of its number:
written beside, renamed, and only then is the journal removed. So a journal whose part exists is a leftover, and whoever
is killed at any moment leaves each result in one place that counts.
"""

from __future__ import annotations

import fcntl
import os
import re
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import compress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from producer.contract import RolloutResult, StopCondition
from producer.files.errors import ResultsFileError, arrow
from producer.files.index import SampleIndex
from producer.files.schema import DICTIONARY, arrow_schema, to_table
from producer.results_file import ResultsFile, is_kept, parse_line, sample_of

#: A part holds so many rollouts, or what so many bytes of JSON hold.
PART_ROWS = 10_000
PART_BYTES = 256 * 1024 * 1024
#: Likewise a row group, which a reader takes into memory at once.
_GROUP_ROWS = 1000
_GROUP_BYTES = 32 * 1024 * 1024
_PAGE_BYTES = 8 * 1024 * 1024

_NAME = re.compile(r"part-(\d{5,})\.parquet|\.journal-(\d{5,})\.jsonl")
_TEMPORARY = re.compile(r"\.part-\d{5,}\.parquet\.tmp|\..*\.resume-\d+")
_NEEDED = ["rollout_id", "example_id", "sample_index", "stop_condition"]


def parts_of(folder: Path) -> tuple[list[Path], list[Path]]:
    """Return a folder's parts, and its journals that are not in a part, each in order of their numbers."""
    parts, journals = _numbered(folder)
    return list(parts.values()), [path for number, path in journals.items() if number not in parts]


@dataclass
class ParquetResults:
    """A folder to append results to; `prepare` it, then use it as a context manager while writing.

    ``kept`` names the rollouts whose results are there already and stay; ``kept_failed`` is how many of them did not
    complete. Nothing is changed on disk before the context is entered.
    """

    path: Path
    overwrite: bool = False
    part_rows: int = PART_ROWS
    kept: SampleIndex = field(default_factory=SampleIndex)
    kept_failed: int = 0
    _keep: dict[Path, bytearray] = field(default_factory=dict)
    _number: int = 0
    _journal: ResultsFile | None = None
    _rows: int = 0
    _bytes: int = 0
    _handle: int = -1
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def prepare(
        cls, path: Path, *, overwrite: bool = False, resume: bool = False, keep_failed: bool = False
    ) -> ParquetResults:
        """Check that results may be written to ``path``, and for ``resume`` read what is there.

        What is kept is said at `ResultsFile.prepare`. Raises `ResultsFileError`.
        """
        path = Path(os.path.realpath(path))
        arrow("pyarrow.parquet", ResultsFileError)
        _check_place(path)
        folder = cls(path, overwrite)
        parts, journals = parts_of(path)
        if resume:
            for file in [*parts, *journals]:
                folder._read_kept(file, keep_failed)
        elif (parts or journals) and not overwrite:
            raise ResultsFileError(
                f"{path} holds results already; continue it with --resume, replace it with --overwrite, or name another"
            )
        return folder

    def __enter__(self) -> Self:
        try:
            self.path.mkdir(exist_ok=True)
            self._handle = _locked(self.path)
            self._clear()
            for file, keep in self._keep.items():
                self._rewrite(file, keep)
            self._number = max((int(n) for n in _numbered(self.path)[0]), default=-1) + 1
        except OSError as error:
            self._unlock()
            raise ResultsFileError(f"{self.path} cannot be written: {error.strerror or error}") from None
        except ResultsFileError:
            self._unlock()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.roll()
        except ResultsFileError:
            if error is None:  # else: it is the same trouble; the journal has what the part would have held
                raise
        finally:
            if self._journal is not None:
                self._journal.close()
            self._unlock()

    @property
    def is_full(self) -> bool:
        """Whether it is time to `roll`."""
        return self._rows >= self.part_rows or self._bytes >= PART_BYTES

    def write(self, result: RolloutResult) -> None:
        """Append one result; raises `ResultsFileError`, and then leaves nothing of it."""
        with self._lock:
            if self._journal is None:
                journal = ResultsFile.prepare(self.path / f".journal-{self._number:05}.jsonl")
                self._journal = journal.__enter__()
            self._bytes += self._journal.write(result)
            self._rows += 1

    def roll(self) -> None:
        """Turn what was written since the last time into a part: seconds of work, which another thread may do."""
        with self._lock:
            if self._journal is None:
                return
            journal = self._journal.path
            try:
                if self._rows:
                    self._write_part(self._number, _groups(_json_lines(journal)))
                journal.unlink()
            except OSError as error:
                raise ResultsFileError(f"{self.path} cannot be written: {error.strerror or error}") from None
            self._journal.close()
            self._journal, self._rows, self._bytes = None, 0, 0
            self._number += 1

    def _clear(self) -> None:
        for file in self.path.iterdir():
            known = _NAME.fullmatch(file.name)
            if _TEMPORARY.fullmatch(file.name) or (self.overwrite and known):
                file.unlink()
        parts, journals = _numbered(self.path)
        for number in journals.keys() & parts.keys():
            journals[number].unlink()

    def _read_kept(self, file: Path, keep_failed: bool) -> None:
        keep = bytearray()
        for found in _found(file):
            is_wanted = found is not None and is_kept(found, self.kept, keep_failed)
            if found is not None and is_wanted:
                self.kept.add(sample_of(found))
                self.kept_failed += found["stop_condition"] != StopCondition.COMPLETED
            keep.append(is_wanted)
        self._keep[file] = keep

    def _rewrite(self, file: Path, keep: bytearray) -> None:
        """Leave in a part what is kept; a journal becomes the part of its number."""
        named = _NAME.fullmatch(file.name)
        if named is None or not file.exists():
            return
        number = int(named[1] or named[2])
        if named[2]:
            if any(keep):
                self._write_part(number, _groups(compress(_json_lines(file), keep)))
            file.unlink()
        elif not any(keep):
            file.unlink()
        elif not all(keep):
            self._write_part(number, _kept_groups(file, keep))

    def _write_part(self, number: int, groups: Iterable[Any]) -> None:
        parquet = arrow("pyarrow.parquet", ResultsFileError)
        target = self.path / f"part-{number:05}.parquet"
        other = self.path / f".{target.name}.tmp"
        try:
            with other.open("wb") as file:
                options = {"compression": "zstd", "use_dictionary": DICTIONARY, "data_page_size": _PAGE_BYTES}
                with parquet.ParquetWriter(file, arrow_schema(), **options) as writer:
                    for group in groups:
                        writer.write_table(group, row_group_size=_GROUP_ROWS)
                file.flush()
                os.fsync(file.fileno())
            other.replace(target)
            os.fsync(self._handle)
        except BaseException:
            other.unlink(missing_ok=True)
            raise

    def _unlock(self) -> None:
        handle, self._handle = self._handle, -1
        if handle >= 0:
            os.close(handle)


def _check_place(path: Path) -> None:
    if not path.parent.is_dir():
        raise ResultsFileError(f"{path.parent} is no directory; make it first")
    if path.exists() and not path.is_dir():
        raise ResultsFileError(
            f"{path} is a file; results in Parquet are a folder of parts: name another, or remove it"
        )
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ResultsFileError(f"{path} cannot be written: permission denied")
    for file in path.iterdir() if path.exists() else ():
        if not _NAME.fullmatch(file.name) and not _TEMPORARY.fullmatch(file.name):
            raise ResultsFileError(f"{path} holds {file.name!r}, which is no part of results; name another folder")


def _numbered(folder: Path) -> tuple[dict[int, Path], dict[int, Path]]:
    parts: dict[int, Path] = {}
    journals: dict[int, Path] = {}
    with suppress(FileNotFoundError):
        for file in sorted(folder.iterdir()):
            if named := _NAME.fullmatch(file.name):
                (parts if named[1] else journals)[int(named[1] or named[2])] = file
    return dict(sorted(parts.items())), dict(sorted(journals.items()))


def _locked(folder: Path) -> int:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise ResultsFileError(f"{folder} is being written by another run; wait for it, or stop it") from None
    return handle


def _found(file: Path) -> Iterator[dict[str, Any] | None]:
    """Return for each result of a part or a journal what tells whether it is kept; None for a line cut short."""
    if file.suffix == ".jsonl":
        for number, line in enumerate(_json_lines(file), start=1):
            yield parse_line(file, number, line)
        return
    with open_part(file, _NEEDED) as part:
        for batch in part.iter_batches(columns=_NEEDED):
            yield from batch.to_pylist()


@contextmanager
def open_part(file: Path, columns: list[str]) -> Iterator[Any]:
    """Open a Parquet file that has ``columns``; raises `ResultsFileError`, also for what is read of it later."""
    pa, parquet = arrow("pyarrow", ResultsFileError), arrow("pyarrow.parquet", ResultsFileError)
    try:
        with parquet.ParquetFile(file, buffer_size=1024 * 1024) as part:
            if missing := [name for name in columns if name not in part.schema_arrow.names]:
                raise ResultsFileError(f"{file} is no file of results: it has no column {missing[0]!r}")
            yield part
    except (pa.ArrowException, OSError) as error:
        raise ResultsFileError(f"{file} cannot be read as Parquet: {str(error)[:300]}") from None


def _json_lines(file: Path) -> Iterator[bytes]:
    with file.open("rb") as lines:
        yield from lines


def _groups(lines: Iterable[bytes]) -> Iterator[Any]:
    group: list[bytes] = []
    size = 0
    for line in lines:
        group.append(line)
        size += len(line)
        if len(group) >= _GROUP_ROWS or size >= _GROUP_BYTES:
            yield to_table(group)
            group, size = [], 0
    if group:
        yield to_table(group)


def _kept_groups(file: Path, keep: bytearray) -> Iterator[Any]:
    pa = arrow("pyarrow", ResultsFileError)
    names = arrow_schema().names
    with open_part(file, names) as part:
        start = 0
        for number in range(part.num_row_groups):
            table = part.read_row_group(number, columns=names)
            mask = pa.array([bool(wanted) for wanted in keep[start : start + table.num_rows]])
            start += table.num_rows
            if (kept := table.filter(mask)).num_rows:
                yield kept.select(names)
