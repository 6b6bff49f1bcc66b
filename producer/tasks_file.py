"""Reads a file of tasks, one JSON object a line, and expands it into requests; or tasks that were read elsewhere.

All tasks are checked before the first request leaves: every wrong line is named by its number and field.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import orjson

from producer.contract import InvalidRequestError, RolloutRequest
from producer.ids import safe_id, sample_rollout_id

SHOWN_PROBLEMS = 20
_BOM = b"\xef\xbb\xbf"

#: What names one rollout of a file across runs: its example id, as text, and its sample index.
Sample = tuple[str, int]


class TasksFileError(Exception):
    """The file cannot be used; ``problems`` holds one sentence for each wrong line, with its number and field."""

    def __init__(self, problems: list[str]) -> None:
        self.problems = problems
        shown = problems[:SHOWN_PROBLEMS]
        if len(problems) > len(shown):
            shown.append(f"... {len(problems) - len(shown)} more; {len(problems)} problems in all")
        super().__init__("\n".join(shown))


@dataclass(frozen=True)
class Task:
    """One task: its number, which is its example id unless it gives one, where it stands, and its fields as JSON."""

    number: int
    where: str
    line: bytes


@dataclass(frozen=True)
class TaskDefaults:
    """What fills the fields that a line leaves out; ``timeout`` is the agent's deadline in seconds."""

    model: str | None = None
    environment: str | None = None
    run_command: str | None = None
    image: str | None = None
    gateway_url: str | None = None
    timeout: float | None = None

    def check(self) -> None:
        """Raise `InvalidRequestError` when one of the defaults is itself wrong, so that no line is blamed for it."""
        RolloutRequest.parse(self.fill({"model": "any"}))

    def fill(self, task: dict[str, Any]) -> dict[str, Any]:
        """Return ``task`` with what it leaves out."""
        names = ("model", "environment", "run_command", "image", "gateway_url")
        filled = {name: getattr(self, name) for name in names if getattr(self, name) is not None} | task
        deadlines = filled.get("deadlines", {})
        if self.timeout is not None and isinstance(deadlines, dict):
            filled["deadlines"] = {"agent": self.timeout} | deadlines
        return filled


@dataclass
class TasksFile:
    """Checked tasks; `load` a file, or `check` others. They are kept as they are and become requests one at a time."""

    path: Path
    defaults: TaskDefaults
    samples: int
    _tasks: list[Task] = field(default_factory=list)
    _samples: set[Sample] = field(default_factory=set)
    _explicit: dict[str, int] = field(default_factory=dict)

    @classmethod
    def load(cls, path: Path, defaults: TaskDefaults, samples: int = 1) -> TasksFile:
        """Read and check the whole file; raises `TasksFileError`."""
        lines = enumerate(_read(path).removeprefix(_BOM).split(b"\n"), start=1)
        checked = cls.check(
            path, [Task(n, f"{path}:{n}", line) for n, line in lines if line.strip()], defaults, samples
        )
        if not checked._tasks:
            raise TasksFileError([f"{path}: holds no tasks; each line is one JSON object with a rollout's fields"])
        return checked

    @classmethod
    def check(cls, path: Path, tasks: Iterable[Task], defaults: TaskDefaults, samples: int = 1) -> TasksFile:
        """Check tasks that come from ``path``; raises `TasksFileError`."""
        checked, problems = cls(path, defaults, samples), []
        for task in tasks:
            try:
                checked._add(task)
            except InvalidRequestError as error:
                problems.append(f"{task.where}: {error}")
        if problems:
            raise TasksFileError(problems)
        return checked

    @property
    def all_samples(self) -> frozenset[Sample]:
        """Every rollout that the file stands for."""
        return frozenset(self._samples)

    @property
    def explicit_ids(self) -> list[str]:
        """The rollout ids that the lines themselves give."""
        return list(self._explicit)

    def requests(self, batch_id: str, skip: Collection[Sample] = (), suffix: str = "") -> Iterator[RolloutRequest]:
        """Return the requests, without those in ``skip``; the same file and batch id give the same rollout ids.

        ``suffix`` is put behind the ids that lines give: a rollout that runs again needs an id of its own.
        """
        for task in self._tasks:
            request, explicit = self._parse(task)
            for index in self._indices(request):
                if (str(request.example_id), index) in skip:
                    continue
                yield request.model_copy(
                    update={
                        "batch_id": batch_id,
                        "rollout_id": self._rollout_id(request, explicit, index, batch_id, suffix),
                        "sample_index": index,
                        "group_id": request.group_id or safe_id(f"{batch_id}-{request.example_id}"),
                    }
                )

    def _add(self, task: Task) -> None:
        request, explicit = self._parse(task)
        for index in self._indices(request):
            sample = (str(request.example_id), index)
            if sample in self._samples:
                raise InvalidRequestError(
                    f"example_id {request.example_id!r} with sample_index {index} comes twice; results could not be "
                    "told apart: give each line an example_id of its own, or leave it out"
                )
            self._samples.add(sample)
            if explicit:
                self._note_explicit(self._rollout_id(request, explicit, index, "", ""), task.number)
        self._tasks.append(task)

    def _note_explicit(self, rollout_id: str, number: int) -> None:
        if rollout_id in self._explicit:
            first = self._explicit[rollout_id]
            raise InvalidRequestError(f"rollout_id: {rollout_id!r} is taken by line {first} already; ids must differ")
        self._explicit[rollout_id] = number

    def _parse(self, task: Task) -> tuple[RolloutRequest, bool]:
        given = _object(task.line)
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

    def _indices(self, request: RolloutRequest) -> range:
        return range(self.samples) if self.samples > 1 else range(request.sample_index, request.sample_index + 1)

    def _rollout_id(self, request: RolloutRequest, explicit: bool, index: int, batch_id: str, suffix: str) -> str:
        if not explicit:
            return sample_rollout_id(batch_id, request.example_id, index)
        sample = f"-{index}" if self.samples > 1 else ""
        return safe_id(f"{request.rollout_id}{sample}{suffix}")


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


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise TasksFileError([f"{path}: no such file"]) from None
    except IsADirectoryError:
        raise TasksFileError([f"{path}: is a directory; give a file with one JSON object a line"]) from None
    except OSError as error:
        raise TasksFileError([f"{path}: cannot be read: {error.strerror}"]) from None
