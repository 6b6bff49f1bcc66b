"""What can be wrong with a file of tasks or of results."""

from __future__ import annotations

import importlib
from typing import Any

from producer.contract import InvalidRequestError

SHOWN_PROBLEMS = 20


class TasksFileError(Exception):
    """The tasks cannot be used; ``problems`` holds one sentence for each wrong line or row, with its number and field.

    ``count`` is how many there are in all, where not each of them is kept.
    """

    def __init__(self, problems: list[str], count: int | None = None) -> None:
        self.problems = problems
        self.count = len(problems) if count is None else count
        shown = problems[:SHOWN_PROBLEMS]
        if self.count > len(shown):
            shown.append(f"... {self.count - len(shown)} more; {self.count} problems in all")
        super().__init__("\n".join(shown))


class TasksChangedError(InvalidRequestError):
    """The tasks are no longer those that were checked before anything was submitted."""


class ResultsFileError(Exception):
    """The file of results cannot be used; the message says why and what to do."""


def arrow(name: str, error: type[Exception]) -> Any:
    """Import ``name`` from pyarrow, which only those who use Parquet have; raises ``error`` that says how to get it."""
    try:
        return importlib.import_module(name)
    except ImportError:
        words = "Parquet files and datasets need pyarrow; install it with: pip install 'rollout-fleet[parquet]'"
        raise error([words] if error is TasksFileError else words) from None
