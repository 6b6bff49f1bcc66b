"""Finds out what a path of tasks is: lines of JSON, a table, a folder of tables, or standard input."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from producer.files.errors import TasksFileError
from producer.files.lines import STDIN, JsonLines, Task
from producer.files.mapping import ColumnMapping
from producer.files.tables import SUFFIXES, Table


def open_tasks(path: Path, split: str | None, mapping: ColumnMapping) -> Iterable[Task]:
    """Open the tasks of a path, so that they can be read more than once; raises `TasksFileError`.

    ``-`` is standard input, a folder holds tables, a suffix of `SUFFIXES` is a table, and all else is lines of JSON.
    """
    if path != STDIN and (path.is_dir() or path.suffix in SUFFIXES):
        return Table(path, split, mapping)
    if split is not None:
        raise TasksFileError([f"{path}: --split chooses from a dataset's folder, and these are lines of JSON"])
    return JsonLines(path)
