"""Reads results again, from lines of JSON or from Parquet, also while a run still writes them."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from producer.contract import InvalidRequestError, RolloutResult, StopCondition
from producer.files.errors import ResultsFileError
from producer.results_file import parse_line

_LINES_AT_ONCE = 200


@dataclass(frozen=True, slots=True)
class Brief:
    """One result without its trajectory: what listings and plots are made of.

    ``number`` is its place in the results. ``seconds`` is the attempt's whole time, ``started`` Unix seconds or 0.
    """

    number: int
    rollout_id: str
    example_id: str
    sample_index: int
    stop_condition: StopCondition
    reward: float | None
    turns: int
    prompt_tokens: int
    completion_tokens: int
    started: float
    seconds: float
    durations: dict[str, float]
    error_kind: str
    error_type: str
    error_message: str
    warnings: tuple[str, ...]

    @property
    def tokens(self) -> int:
        """Tokens of all its model calls."""
        return self.prompt_tokens + self.completion_tokens

    @property
    def failed(self) -> bool:
        """Whether it ended with an error, or its agent ran out of time."""
        return self.stop_condition in {StopCondition.HAS_ERROR, StopCondition.AGENT_TIMEOUT}


class ResultsReader:
    """The results of a file of lines, of a folder of parts, or of one Parquet file with the parts' columns.

    ``cut_short`` tells after reading whether a last line was left out because it is not whole: a run writes it just
    now, or its machine died.
    """

    def __init__(self, path: Path) -> None:
        """Look at what the path is; raises `ResultsFileError`."""
        self.path = path
        self.cut_short = False
        if not path.exists():
            raise ResultsFileError(f"{path}: no such file")
        if path.is_dir():
            from producer.files.parts import parts_of

            parts, journals = parts_of(path)
            self._files = [*parts, *journals]
            if not self._files:
                raise ResultsFileError(
                    f"{path}: is a directory without parts of results (part-00000.parquet and so on)"
                )
        else:
            self._files = [path]

    def briefs(self) -> Iterator[Brief]:
        """Return every result without its trajectory, in the order in which they were written."""
        number = 0
        for file in self._files:
            if file.suffix == ".parquet":
                for row in _rows(file, briefly=True):
                    yield _brief_of_row(number, row, file)
                    number += 1
            else:
                for result in self._lines(file, None, 0):
                    yield _brief(number, result)
                    number += 1

    def results(self, wanted: Collection[int]) -> Iterator[tuple[int, RolloutResult]]:
        """Return the results that have one of these numbers, with it."""
        number, left = 0, len(wanted)
        for file in self._files:
            if not left:
                return
            if file.suffix == ".parquet":
                found: Iterator[RolloutResult | None] = _wanted_rows(file, wanted, number)
            else:
                found = self._lines(file, wanted, number)
            for result in found:
                if result is not None:
                    left -= 1
                    yield number, result
                number += 1

    def _lines(self, file: Path, wanted: Collection[int] | None, first: int) -> Iterator[Any]:
        """Return each line's result, or None for one that is not ``wanted``."""
        try:
            with file.open("rb") as lines:
                number = first
                for at, line in enumerate(lines, start=1):
                    if not line.strip():
                        continue
                    if wanted is not None and number not in wanted and line.endswith(b"\n"):
                        yield None
                    elif (found := parse_line(file, at, line)) is None:
                        self.cut_short = True
                        continue
                    else:
                        yield _parsed(found, f"{file}:{at}")
                    number += 1
        except FileNotFoundError:  # a journal that has become a part since the folder was listed
            part = file.with_name(file.name.replace(".journal", "part")).with_suffix(".parquet")
            if not part.exists():
                raise ResultsFileError(f"{file} was removed meanwhile") from None
            yield from _wanted_rows(part, wanted, first)
        except OSError as error:
            raise ResultsFileError(f"{file}: cannot be read: {error.strerror}") from None


def _parsed(found: dict[str, Any], where: str) -> RolloutResult:
    try:
        return RolloutResult.parse(found)
    except InvalidRequestError as error:
        raise ResultsFileError(f"{where}: is not a result: {str(error)[:500]}") from None


def _rows(file: Path, *, briefly: bool) -> Iterator[dict[str, Any]]:
    from producer.files.parts import open_part
    from producer.files.schema import BRIEF_COLUMNS, arrow_schema

    columns = BRIEF_COLUMNS if briefly else arrow_schema().names
    size = 1000 if briefly else 16
    with open_part(file, columns) as part:
        for batch in part.iter_batches(batch_size=size, columns=columns):
            yield from batch.to_pylist()


def _wanted_rows(file: Path, wanted: Collection[int] | None, first: int) -> Iterator[RolloutResult | None]:
    """Return each row's result, or None for one that is not ``wanted``; row groups without any are passed over."""
    from producer.files.parts import open_part
    from producer.files.schema import arrow_schema, from_row

    names = arrow_schema().names
    with open_part(file, names) as part:
        for group in range(part.num_row_groups):
            count = part.metadata.row_group(group).num_rows
            mine = [n for n in range(count) if wanted is None or first + n in wanted]
            first += count
            results: dict[int, RolloutResult] = {}
            for number, row in _taken(part, group, names, mine):
                try:
                    results[number] = _parsed(from_row(row), f"{file}: {row['rollout_id']}")
                except (ValueError, TypeError, KeyError, AttributeError) as error:
                    raise ResultsFileError(f"{file}: {row['rollout_id']} is not a result: {error}") from None
            yield from (results.get(n) for n in range(count))


def _taken(part: Any, group: int, names: list[str], mine: list[int]) -> Iterator[tuple[int, dict[str, Any]]]:
    if mine:
        rows = part.read_row_group(group, columns=names).take(mine)
        for at, number in enumerate(mine):
            yield number, rows.slice(at, 1).to_pylist()[0]


def _brief(number: int, result: RolloutResult) -> Brief:
    prompt, completion = token_counts(result)
    error = result.error
    return Brief(
        number=number,
        rollout_id=result.rollout_id,
        example_id=str(result.example_id),
        sample_index=result.sample_index,
        stop_condition=result.stop_condition,
        reward=result.reward,
        turns=len(result.trajectory),
        prompt_tokens=prompt,
        completion_tokens=completion,
        started=result.timing.start_time,
        seconds=result.timing.total_ms / 1000,
        durations=result.durations,
        error_kind=error.kind.value if error else "",
        error_type=error.type if error else "",
        error_message=error.message if error else "",
        warnings=result.warnings,
    )


def _brief_of_row(number: int, row: dict[str, Any], file: Path) -> Brief:
    try:
        stop = StopCondition(row["stop_condition"])
    except ValueError:
        raise ResultsFileError(f"{file}: {row['stop_condition']!r} is no stop condition of a result") from None
    return Brief(
        number=number,
        rollout_id=str(row["rollout_id"]),
        example_id=str(row["example_id"]),
        sample_index=int(row["sample_index"] or 0),
        stop_condition=stop,
        reward=row["reward"],
        turns=int(row["num_turns"] or 0),
        prompt_tokens=int(row["prompt_tokens"] or 0),
        completion_tokens=int(row["completion_tokens"] or 0),
        started=float(row["start_time"] or 0),
        seconds=float(row["total_ms"] or 0) / 1000,
        durations={name: value for name, value in (row["durations"] or {}).items() if value is not None},
        error_kind=row["error_kind"] or "",
        error_type=row["error_type"] or "",
        error_message=row["error_message"] or "",
        warnings=tuple(row["warnings"] or ()),
    )


def token_counts(result: RolloutResult) -> tuple[int, int]:
    """Return how many prompt and completion tokens all steps of a result have."""
    prompt = completion = 0
    for step in result.trajectory:
        tokens = step.get("tokens")
        if isinstance(tokens, dict):
            prompt += len(tokens.get("prompt_ids") or ())
            completion += len(tokens.get("completion_ids") or ())
    return prompt, completion
