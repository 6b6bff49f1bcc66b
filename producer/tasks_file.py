"""Checks tasks, wherever they come from, and expands them into requests.

All tasks are checked before the first request leaves: every wrong line or row is named by its number and field. They
are then read again, as room is made for them, so that a million of them never stands in memory.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import orjson

from producer.contract import InvalidRequestError, RolloutRequest
from producer.files.errors import TasksChangedError, TasksFileError
from producer.files.index import NameIndex, Sample, SampleIndex
from producer.files.lines import Task
from producer.files.mapping import ColumnMapping
from producer.files.record import changed, digest
from producer.files.source import open_tasks
from producer.files.tables import plain
from producer.ids import safe_id, sample_rollout_id

__all__ = ["Sample", "Task", "TaskDefaults", "TasksFile", "TasksFileError", "run_batch_id"]

#: Wrong lines that are kept to be shown; the others are counted.
_KEPT_PROBLEMS = 1000
_TELL_EVERY = 100_000


@dataclass(frozen=True)
class TaskDefaults:
    """What fills the fields that a line leaves out; ``timeout`` is the agent's deadline in seconds."""

    model: str | None = None
    environment: str | None = None
    run_command: str | None = None
    image: str | None = None
    gateway_url: str | None = None
    timeout: float | None = None
    queue: str | None = None

    def check(self) -> None:
        """Raise `InvalidRequestError` when one of the defaults is itself wrong, so that no line is blamed for it."""
        RolloutRequest.parse(self.fill({"model": "any"}))

    def fill(self, task: dict[str, Any]) -> dict[str, Any]:
        """Return ``task`` with what it leaves out."""
        names = ("model", "environment", "run_command", "image", "gateway_url", "queue")
        filled = {name: getattr(self, name) for name in names if getattr(self, name) is not None} | task
        deadlines = filled.get("deadlines", {})
        if self.timeout is not None and isinstance(deadlines, dict):
            filled["deadlines"] = {"agent": self.timeout} | deadlines
        return filled


@dataclass
class TasksFile:
    """Checked tasks; `load` a file, or `check` others. They become requests one at a time, as they are asked for."""

    path: Path
    defaults: TaskDefaults
    samples: int
    mapping: ColumnMapping = field(default_factory=ColumnMapping)
    _tasks: Iterable[Task] = ()
    _samples: SampleIndex = field(default_factory=SampleIndex)
    _explicit: NameIndex = field(default_factory=NameIndex)

    @classmethod
    def load(
        cls,
        path: Path,
        defaults: TaskDefaults,
        samples: int = 1,
        *,
        mapping: ColumnMapping | None = None,
        split: str | None = None,
        tell: Callable[[int], None] | None = None,
    ) -> TasksFile:
        """Read and check everything that ``path`` holds (see `open_tasks`); raises `TasksFileError`.

        ``tell`` is called with their number whenever another 100,000 tasks were looked at.
        """
        mapping = mapping or ColumnMapping()
        checked = cls.check(path, open_tasks(path, split, mapping), defaults, samples, mapping, tell)
        if not checked._samples:
            raise TasksFileError([f"{path}: holds no tasks; each line or row is one, with a rollout's fields"])
        return checked

    @classmethod
    def check(
        cls,
        path: Path,
        tasks: Iterable[Task],
        defaults: TaskDefaults,
        samples: int = 1,
        mapping: ColumnMapping | None = None,
        tell: Callable[[int], None] | None = None,
    ) -> TasksFile:
        """Check tasks that come from ``path`` and can be iterated more than once; raises `TasksFileError`."""
        checked = cls(path, defaults, samples, mapping or ColumnMapping(), tasks)
        problems: list[str] = []
        count = 0
        for number, task in enumerate(tasks, start=1):
            if tell is not None and number % _TELL_EVERY == 0:
                tell(number)
            try:
                checked._add(task)
            except InvalidRequestError as error:
                count += 1
                if len(problems) < _KEPT_PROBLEMS:
                    problems.append(f"{task.where}: {error}")
        if problems:
            raise TasksFileError(problems, count)
        return checked

    @property
    def all_samples(self) -> Iterator[Sample]:
        """Every rollout that the tasks stand for."""
        for example, first in self._samples:
            for index in self._indices(first):
                yield example, index

    def digests(self) -> Iterator[tuple[Sample, int]]:
        """Return the first sample of each task, with a hash of what the task is."""
        return self._samples.items()

    def changed(self, results: Path, kept: Container[Sample]) -> Iterator[str]:
        """Return the example ids of tasks that have ``kept`` results, and are not what they were for these results."""
        for example, first in changed(results, self.digests()):
            if any((example, index) in kept for index in self._indices(first)):
                yield example

    def left(self, skip: Container[Sample] = ()) -> int:
        """Return how many rollouts the tasks stand for, without those in ``skip``."""
        return sum(sample not in skip for sample in self.all_samples)

    @property
    def explicit_ids(self) -> Iterator[str]:
        """The rollout ids that the tasks themselves give."""
        return iter(self._explicit)

    def requests(self, batch_id: str, skip: Container[Sample] = ()) -> Iterator[RolloutRequest]:
        """Return the requests, without those in ``skip``; the same file and batch id give the same rollout ids.

        Raises `InvalidRequestError` for what was changed since it was checked, so far as that shows.
        """
        for task in self._checked_tasks():
            try:
                request, explicit = self._parse(task)
            except InvalidRequestError as error:
                raise TasksChangedError(f"{task.where}: changed since it was checked: {error}") from None
            for index in self._indices(request.sample_index):
                if (str(request.example_id), index) in skip:
                    continue
                yield request.model_copy(
                    update={
                        "batch_id": batch_id,
                        "rollout_id": self._rollout_id(request, explicit, index, batch_id),
                        "sample_index": index,
                        "group_id": request.group_id or safe_id(f"{batch_id}-{request.example_id}"),
                    }
                )

    def _checked_tasks(self) -> Iterator[Task]:
        try:
            yield from self._tasks
        except TasksFileError as error:
            raise TasksChangedError(f"{error}; it could be read when it was checked") from None

    def _add(self, task: Task) -> None:
        request, explicit = self._parse(task)
        # With several samples of each task, its first stands for them all.
        if not self._samples.add((str(request.example_id), request.sample_index), digest(request)):
            raise InvalidRequestError(
                f"example_id {request.example_id!r} with sample_index {request.sample_index} comes twice; results "
                "could not be told apart: give each line an example_id of its own, or leave it out"
            )
        for index in self._indices(request.sample_index) if explicit else ():
            self._note_explicit(self._rollout_id(request, explicit, index, ""), task.number)

    def _note_explicit(self, rollout_id: str, number: int) -> None:
        first = self._explicit.add(rollout_id, number)
        if first is not None:
            raise InvalidRequestError(f"rollout_id: {rollout_id!r} is taken by line {first} already; ids must differ")

    def _parse(self, task: Task) -> tuple[RolloutRequest, bool]:
        given = self._given(task)
        explicit = "rollout_id" in given
        if self.samples > 1 and "sample_index" in given:
            raise InvalidRequestError(f"sample_index: given, while {self.samples} samples are asked for; drop one")
        try:
            request = RolloutRequest.parse(self.defaults.fill({"example_id": task.number} | given))
            request.to_json()  # its size and its nesting: refused now, not when half of the file is submitted
        except InvalidRequestError as error:
            hint = "model: missing; give it in the line, or for all lines with --model"
            raise InvalidRequestError(str(error).replace("model: missing; it is required", hint)) from None
        return request, explicit

    def _given(self, task: Task) -> dict[str, Any]:
        if isinstance(task.line, bytes):
            return self.mapping.apply(_object(task.line))
        fields = self.mapping.apply(plain(task.line))
        return {name: value for name, value in fields.items() if value is not None}

    def _indices(self, first: int) -> range:
        return range(self.samples) if self.samples > 1 else range(first, first + 1)

    def _rollout_id(self, request: RolloutRequest, explicit: bool, index: int, batch_id: str) -> str:
        if not explicit:
            return sample_rollout_id(batch_id, request.example_id, index)
        sample = f"-{index}" if self.samples > 1 else ""
        return safe_id(f"{request.rollout_id}{sample}")


def run_batch_id(path: Path) -> str:
    """Return a fresh batch id that says which file was run, and when."""
    stem = re.sub(r"[^A-Za-z0-9._-]", "_", path.stem).lstrip("._-")[:40] or "run"
    return f"{stem}-{datetime.now(UTC):%Y%m%d-%H%M%S}-{uuid.uuid4().hex[:6]}"


def _object(line: bytes) -> dict[str, Any]:
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        byte = f"byte 0x{line[error.start]:02x} at column {error.start + 1}"
        raise InvalidRequestError(f"not UTF-8 ({byte}); save the file as UTF-8") from None
    try:
        task = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise InvalidRequestError(f"not JSON: {error.msg} (column {error.colno})") from None
    if not isinstance(task, dict):
        raise InvalidRequestError(f"{type(task).__name__} found; each line is one JSON object with a rollout's fields")
    return task
