"""Tasks as rows of tables: Parquet and Arrow files, and folders of them such as a dataset that was saved to disk.

The folder that `datasets` writes with ``save_to_disk`` has ``state.json``, which names its Arrow files; one of several
splits has ``dataset_dict.json``, and a folder for each. Other folders hold shards, whose names or folders may tell a
split: ``train-00000-of-00002.parquet``, ``data/train-...``, ``train/*.parquet``.
"""

from __future__ import annotations

import datetime
import decimal
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from producer.contract import InvalidRequestError
from producer.files.errors import TasksChangedError, TasksFileError, arrow
from producer.files.lines import Task
from producer.files.mapping import ColumnMapping

SUFFIXES = (".parquet", ".arrow", ".feather")
_ROWS = 256
_READ_BYTES = 1024 * 1024
_ARROW_FILE = b"ARROW1"
_SHARD = re.compile(r"(?P<split>[\w.-]+?)-\d{5}-of-\d{5}(-[0-9a-f]+)?")


class Table:
    """The rows of tables with the same columns, one after the other; iterating again begins again.

    Only the columns that ``mapping`` uses are read, some hundred rows at a time.
    """

    def __init__(self, path: Path, split: str | None, mapping: ColumnMapping) -> None:
        """Find the files and their columns; raises `TasksFileError`."""
        self._path = path
        self._shards = shards(path, split)
        self._states = [_state(shard) for shard in self._shards]
        self._all = _columns(self._shards[0])
        try:
            self._chosen = mapping.choose(self._all)
        except InvalidRequestError as error:
            raise TasksFileError([f"{path}: {error}"]) from None

    def __iter__(self) -> Iterator[Task]:
        number = 0
        for shard, state in zip(self._shards, self._states, strict=True):
            if set(_columns(shard)) != set(self._all):
                raise TasksFileError([f"{shard}: has other columns than {self._shards[0]}"])
            for batch in _batches(shard, self._chosen):
                if _state(shard) != state:
                    raise TasksChangedError(f"{shard}: was changed while its tasks are run; --resume checks it anew")
                for row in batch.to_pylist():
                    number += 1
                    yield Task(number, f"{self._path}:row {number}", row)


def shards(path: Path, split: str | None = None) -> list[Path]:
    """Return the files that a path stands for, in order; raises `TasksFileError`, also for a missing split."""
    if not path.is_dir():
        if split is not None:
            raise TasksFileError([f"{path}: --split chooses from a folder, and this is a file"])
        return [path]
    splits = _splits(path)
    if not splits:
        raise TasksFileError([f"{path}: is a directory, and holds neither a dataset nor Parquet or Arrow files"])
    if split is None and len(splits) > 1:
        raise TasksFileError([f"{path}: holds the splits {', '.join(map(str, splits))}; choose one with --split"])
    if split is not None and split not in splits:
        there = ", ".join(str(name) for name in splits if name) or "none"
        raise TasksFileError([f"{path}: has no split {split!r}; there is {there}"])
    found = splits[split] if split is not None else next(iter(splits.values()))
    if not found:
        raise TasksFileError([f"{path}: holds no data"])
    return found


def _splits(path: Path) -> dict[str | None, list[Path]]:
    if (path / "dataset_dict.json").is_file():
        names = _described(path / "dataset_dict.json").get("splits", [])
        return {str(name): next(iter(_saved(path / str(name)).values())) for name in names}
    if (path / "state.json").is_file():
        return _saved(path)
    found: dict[str | None, list[Path]] = {}
    folders = [path, *(p for p in sorted(path.iterdir()) if p.is_dir() and p.name[0] not in "._")]
    for folder in folders:
        own = None if folder.name == "data" or folder == path else folder.name
        for file in sorted(folder.iterdir()):
            if file.suffix in SUFFIXES and file.name[0] not in "._":
                named = _SHARD.fullmatch(file.stem)
                split = named["split"] if named and named["split"] not in {"data", "part"} else own
                found.setdefault(split, []).append(file)
    return found


def _saved(path: Path) -> dict[str | None, list[Path]]:
    """Return the files of a folder that ``save_to_disk`` made, by the split that it says it is."""
    state = _described(path / "state.json")
    if state.get("_indices_data_files"):
        raise TasksFileError([f"{path}: has a table of indices, of datasets 1.x; save it again with a newer datasets"])
    try:
        names = [str(file["filename"]) for file in state["_data_files"]]
    except (KeyError, TypeError):
        raise TasksFileError([f"{path}: state.json does not name its _data_files"]) from None
    if strange := [name for name in names if Path(name).name != name]:
        raise TasksFileError([f"{path}: state.json names {strange[0]!r}, which is not in the folder"])
    split = state.get("_split")
    return {split if isinstance(split, str) else None: [path / name for name in names]}


def _described(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except OSError as error:
        raise TasksFileError([f"{path}: cannot be read: {error.strerror}"]) from None
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise TasksFileError([f"{path}: is not a JSON object, as datasets writes it"])
    return found


def _columns(shard: Path) -> list[str]:
    with _Opened(shard) as table:
        return list(table.names)


def _batches(shard: Path, columns: list[str]) -> Iterator[Any]:
    with _Opened(shard) as table:
        yield from table.batches(columns)


class _Opened:
    """One file, as Parquet or as either of Arrow's two formats; a context manager that maps their errors."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._arrow = arrow("pyarrow", TasksFileError)
        self._source: Any = None
        self._reader: Any = None
        self.names: list[str] = []

    def __enter__(self) -> _Opened:
        with self._mapped():
            if self._path.suffix == ".parquet":
                parquet = arrow("pyarrow.parquet", TasksFileError)
                # With a buffer's size, columns are read piece by piece and not a whole row group at once.
                self._reader = self._source = parquet.ParquetFile(self._path, buffer_size=_READ_BYTES)
                self.names = list(self._reader.schema_arrow.names)
            else:
                self._source = self._arrow.memory_map(str(self._path))
                is_file = self._source.read(len(_ARROW_FILE)) == _ARROW_FILE
                self._source.seek(0)
                ipc = self._arrow.ipc
                self._reader = ipc.open_file(self._source) if is_file else ipc.open_stream(self._source)
                self.names = list(self._reader.schema.names)
        return self

    def __exit__(self, *_: object) -> None:
        if self._source is not None:
            self._source.close()

    def batches(self, columns: list[str]) -> Iterator[Any]:
        """Read the columns, ``_ROWS`` rows at a time."""
        batches = self._all(columns)
        while True:
            with self._mapped():
                batch = next(batches, None)
            if batch is None:
                return
            for start in range(0, batch.num_rows, _ROWS):
                yield batch.slice(start, _ROWS)

    def _all(self, columns: list[str]) -> Iterator[Any]:
        if self._path.suffix == ".parquet":
            yield from self._reader.iter_batches(batch_size=_ROWS, columns=columns)
        elif hasattr(self._reader, "get_batch"):
            for number in range(self._reader.num_record_batches):
                yield self._reader.get_batch(number).select(columns)
        else:
            for batch in self._reader:
                yield batch.select(columns)

    def _mapped(self) -> _Mapped:
        return _Mapped(self._path, self._arrow.ArrowException)


class _Mapped:
    """Turns what pyarrow raises about a file into a `TasksFileError` that names it."""

    def __init__(self, path: Path, kind: type[Exception]) -> None:
        self._path = path
        self._kind = kind

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, FileNotFoundError):
            raise TasksFileError([f"{self._path}: no such file"]) from None
        if isinstance(error, self._kind | OSError):
            what = "Parquet" if self._path.suffix == ".parquet" else "Arrow"
            words = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise TasksFileError([f"{self._path}: cannot be read as {what}: {words[:300]}"]) from None


def plain(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row as JSON can hold it; raises `InvalidRequestError` naming the column that it cannot.

    A table has every member in every struct: one that is null is what JSON leaves out, and is left out.
    """
    fields = {}
    for name, value in row.items():
        try:
            fields[name] = _plain(value)
        except TypeError as error:
            raise InvalidRequestError(f"{name}: {error}") from None
    return fields


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        members = {name: _plain(inner) for name, inner in value.items()}
        return {name: inner for name, inner in members.items() if inner is not None}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, float):
        return None if math.isnan(value) else value
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, decimal.Decimal | datetime.timedelta):
        return str(value)
    if isinstance(value, bytes):
        raise TypeError("holds bytes, which a request cannot; leave the column out, or give large inputs by reference")
    return value


def _state(shard: Path) -> tuple[int, int] | None:
    try:
        about = shard.stat()
    except OSError:
        return None
    return about.st_size, about.st_mtime_ns
