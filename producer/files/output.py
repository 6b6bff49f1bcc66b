"""Where results go: what a run needs of it, and which kind a path asks for."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from producer.contract import RolloutResult
from producer.files.errors import ResultsFileError
from producer.files.index import SampleIndex
from producer.results_file import ResultsFile

__all__ = ["ResultsOutput", "prepare_results"]


class ResultsOutput(Protocol):
    """Takes results as they come; a context manager, which writes nothing before it is entered.

    ``kept`` names the rollouts whose results are there already, and ``kept_failed`` counts those that did not complete.
    """

    path: Path
    kept: SampleIndex
    kept_failed: int

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    @property
    def is_full(self) -> bool:
        """Whether it is time to `roll`."""

    def write(self, result: RolloutResult) -> object:
        """Append one result, so that it is there when the process dies; raises `ResultsFileError`."""

    def roll(self) -> None:
        """Make what was written ready for its readers; may take seconds, and may be called in another thread."""


#: Suffixes that promise what is not written.
_NOT_WRITTEN = {".csv", ".tsv", ".xlsx", ".arrow", ".feather"}


def prepare_results(
    path: Path, *, overwrite: bool = False, resume: bool = False, keep_failed: bool = False
) -> ResultsOutput:
    """Check that results may be written to ``path``: Parquet when that is its suffix, else one JSON object a line.

    For ``resume``, what is there is read. Of it, completed results and those whose agent ran out of time are kept, and
    with ``keep_failed`` those with errors too. Raises `ResultsFileError`.
    """
    if path.suffix.lower() in _NOT_WRITTEN:
        raise ResultsFileError(
            f"{path} would hold no {path.suffix[1:].upper()}: results are written as JSON lines (.jsonl), or as "
            "Parquet where the name ends in .parquet"
        )
    if path.suffix == ".parquet":
        from producer.files.parts import ParquetResults

        return ParquetResults.prepare(path, overwrite=overwrite, resume=resume, keep_failed=keep_failed)
    return ResultsFile.prepare(path, overwrite=overwrite, resume=resume, keep_failed=keep_failed)
