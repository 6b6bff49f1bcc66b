"""Remembers what the tasks of a run were, so that resuming it with others is noticed instead of mixing the two.

``.RESULTS.tasks`` beside the results is a small database: for each task a hash of its name, and one of what it is.
Results themselves do not tell: what an agent made of a prompt is not the prompt. Without the file nothing is checked.
It also holds how the run's rollouts are named in Redis, so that resuming finds those that are there.
"""

from __future__ import annotations

import os
import re
import sqlite3
import uuid
from collections.abc import Iterable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import orjson

from producer.contract import ID_PATTERN, RolloutRequest
from producer.files.index import Sample

#: What a task is; how long it may take, where it runs and with which command may be mended when a run is resumed.
_FIELDS = {"prompt", "answer", "info", "environment", "environment_args", "model", "sampling_params"}


@dataclass(frozen=True, slots=True)
class Run:
    """How the rollouts of a run are named: by its batch, their task, and the suffix of the process that sent them.

    Each process of the run has added a suffix, the present one's is the last.
    """

    batch_id: str
    suffixes: tuple[str, ...] = ("",)

    def resumed(self) -> Run:
        """Return the run as its next process goes on with it."""
        return Run(self.batch_id, (*self.suffixes, f"-{uuid.uuid4().hex[:6]}"))


def digest(request: RolloutRequest) -> int:
    """Return a hash of what the task is, above 0."""
    fields = request.model_dump(mode="json", include=_FIELDS)
    return _hash(orjson.dumps(fields, option=orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS)) or 1


def record_path(results: Path) -> Path:
    """Return where it is remembered what the tasks of these results were."""
    results = Path(os.path.realpath(results))
    return results.with_name(f".{results.name}.tasks")


def remember(results: Path, tasks: Iterable[tuple[Sample, int]], run: Run) -> None:
    """Write down the run, and the tasks with their digests; does nothing where results are no file or folder."""
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
            database.execute("CREATE TABLE run (batch_id TEXT NOT NULL, suffix TEXT NOT NULL)")
            named = [(run.batch_id, suffix) for suffix in run.suffixes]
            database.executemany("INSERT INTO run VALUES (?, ?)", named)
        other.replace(path)
    with suppress(OSError):
        other.unlink(missing_ok=True)


def recall(results: Path) -> Run | None:
    """Return the run that wrote these results last, None where that is not known."""
    path = record_path(results)
    if not path.is_file():
        return None
    with suppress(sqlite3.Error), closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)) as database:
        rows = database.execute("SELECT batch_id, suffix FROM run ORDER BY rowid").fetchall()
        if rows and all(re.match(ID_PATTERN, str(batch_id)) for batch_id, _ in rows):
            return Run(rows[-1][0], tuple(str(suffix) for _, suffix in rows))
    return None


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
