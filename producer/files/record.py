"""Remembers what the tasks of a run were, so that resuming it with others is noticed instead of mixing the two.

``.RESULTS.tasks`` beside the results is a small database: for each task a hash of its name, and one of what it is.
Results themselves do not tell: what an agent made of a prompt is not the prompt. Without the file nothing is checked.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import closing, suppress
from hashlib import blake2b
from pathlib import Path

import orjson

from producer.contract import RolloutRequest
from producer.files.index import Sample

#: What a task is; how long it may take, where it runs and with which command may be mended when a run is resumed.
_FIELDS = {"prompt", "answer", "info", "environment", "environment_args", "model", "sampling_params"}


def digest(request: RolloutRequest) -> int:
    """Return a hash of what the task is, above 0."""
    fields = request.model_dump(mode="json", include=_FIELDS)
    return _hash(orjson.dumps(fields, option=orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS)) or 1


def record_path(results: Path) -> Path:
    """Return where it is remembered what the tasks of these results were."""
    results = Path(os.path.realpath(results))
    return results.with_name(f".{results.name}.tasks")


def remember(results: Path, tasks: Iterable[tuple[Sample, int]]) -> None:
    """Write down the tasks with their digests; does nothing where results are no file or folder."""
    if not (results.is_file() or results.is_dir()):
        return
    path = record_path(results)
    other = path.with_name(f"{path.name}.{os.getpid()}")
    with suppress(sqlite3.Error, OSError):  # results may be where no other file can be: then resuming is not checked
        other.unlink(missing_ok=True)
        with closing(sqlite3.connect(other)) as database, database:
            database.execute("PRAGMA journal_mode = OFF")
            database.execute("CREATE TABLE tasks (name INTEGER PRIMARY KEY, digest INTEGER NOT NULL)")
            rows = ((_name(sample), number) for sample, number in tasks)
            database.executemany("INSERT OR REPLACE INTO tasks VALUES (?, ?)", rows)
        other.replace(path)
    with suppress(OSError):
        other.unlink(missing_ok=True)


def changed(results: Path, tasks: Iterable[tuple[Sample, int]]) -> Iterator[Sample]:
    """Return the tasks that are other ones than they were when the results were begun."""
    path = record_path(results)
    if not path.is_file():
        return
    with suppress(sqlite3.Error), closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)) as database:
        for sample, number in tasks:
            found = database.execute("SELECT digest FROM tasks WHERE name = ?", (_name(sample),)).fetchone()
            if found and found[0] != number:
                yield sample


def _name(sample: Sample) -> int:
    return _hash(orjson.dumps(sample))


def _hash(data: bytes) -> int:
    return int.from_bytes(blake2b(data, digest_size=8).digest()) >> 1
