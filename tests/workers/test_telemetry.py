"""Log lines: JSON where no person reads along, with the fields of the attempt in which they are written."""

from __future__ import annotations

import ast
import asyncio
import gc
import io
import json
import logging
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from producer.contract import Phase, RolloutRequest
from workers import telemetry
from workers.state import Rollout
from workers.telemetry import LogFormat, about_attempt, configure_logging, recent_lines

Configured = Callable[..., io.StringIO]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _logging_as_it_was() -> Iterator[None]:
    root = logging.getLogger()
    before = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = before[0], before[1]


@pytest.fixture
def configured(monkeypatch: pytest.MonkeyPatch) -> Configured:
    """Configures logging, and returns what is written to standard error from then on."""

    def configure(stream: io.StringIO | None = None, **options: Any) -> io.StringIO:
        stream = stream or io.StringIO()
        monkeypatch.setattr(sys, "stderr", stream)
        configure_logging(**options)
        return stream

    return configure


def lines(stream: io.StringIO) -> list[dict[str, object]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def attempt(**fields: object) -> Rollout:
    request = RolloutRequest(rollout_id="r1", model="m")
    return Rollout(request, "http://g", attempt=2, worker="w1@h", phase=Phase.SETUP, **fields)  # type: ignore[arg-type]


def test_lines_are_json_where_standard_error_is_no_terminal(configured: Configured) -> None:
    stderr = configured()
    try:
        raise ValueError("what went wrong")
    except ValueError:
        logging.getLogger("uvicorn.error").exception("first\nsecond")

    (line,) = lines(stderr)
    assert (line["level"], line["logger"], line["message"]) == ("ERROR", "uvicorn.error", "first\nsecond")
    assert "ValueError: what went wrong" in str(line["exception"])
    assert str(line["time"]).endswith("Z")


def test_lines_are_for_people_in_a_terminal_and_as_it_is_set(configured: Configured) -> None:
    for form, stream, human in [
        (LogFormat.AUTO, Terminal(), True),
        (LogFormat.JSON, Terminal(), False),
        (LogFormat.HUMAN, io.StringIO(), True),
    ]:
        configured(stream, form=form)
        logging.getLogger("x").info("hello", extra={"rollout_id": "r1", "attempt": 1, "stage": "agent"})
        assert stream.getvalue().startswith("{") is not human
        assert ("[rollout_id=r1 attempt=1 stage=agent]" in stream.getvalue()) is human


def test_what_hooks_and_libraries_log_carries_the_attempt_and_no_secret(configured: Configured) -> None:
    stderr = configured()

    async def run() -> None:
        with about_attempt(attempt(secrets={"KEY": "s3cr3t-value"})):
            logging.getLogger("a.library").warning("called with %s", "s3cr3t-value")
            await asyncio.to_thread(logging.getLogger("a.hook").warning, "from a thread")
        logging.getLogger("a.library").warning("of nobody")

    asyncio.run(run())
    library, hook, nobody = lines(stderr)
    assert "s3cr3t-value" not in stderr.getvalue()
    for line in (library, hook):
        assert (line["rollout_id"], line["attempt"], line["worker"], line["stage"]) == ("r1", 2, "w1@h", "setup")
    assert "rollout_id" not in nobody


def test_what_a_worker_says_of_a_rollout_has_all_of_its_fields() -> None:
    """Lines of a rollout outside of its coroutine: nobody fills in what they lack."""
    for path in Path(telemetry.__file__).parent.rglob("*.py"):
        if "gateway" in path.parts:  # it knows of no worker
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Dict):
                keys = {key.value for key in node.keys if isinstance(key, ast.Constant)}
                if keys >= {"rollout_id", "stage"}:
                    assert keys >= {"attempt", "worker"}, f"{path.name}:{node.lineno}"


def test_fields_that_a_line_has_stay_and_those_of_another_rollout_are_left_alone(configured: Configured) -> None:
    stderr = configured()
    with about_attempt(attempt()):
        logging.getLogger("x").info("own", extra={"rollout_id": "r1", "attempt": None, "stage": "retry"})
        logging.getLogger("x").info("another's", extra={"rollout_id": "r2"})
        logging.getLogger("workers.tunnels.pool").info("what all share")

    own, other, shared = lines(stderr)
    assert (own["attempt"], own["worker"], own["stage"]) == (2, "w1@h", "retry")
    assert other["rollout_id"] == "r2"
    assert "attempt" not in other
    assert "rollout_id" not in shared


def test_what_an_attempt_left_running_neither_names_nor_keeps_it(configured: Configured) -> None:
    stderr = configured()

    async def run() -> weakref.ref[Rollout]:
        go_on = asyncio.Event()

        async def shared() -> None:
            await go_on.wait()
            logging.getLogger("x").info("later")

        rollout = attempt()
        with about_attempt(rollout):
            task = asyncio.create_task(shared())
            await asyncio.sleep(0)
        gone = weakref.ref(rollout)
        del rollout
        gc.collect()
        assert gone() is None
        go_on.set()
        await task
        return gone

    asyncio.run(run())
    assert "rollout_id" not in lines(stderr)[0]


def test_the_latest_lines_of_rollouts_are_kept(configured: Configured) -> None:
    configured(recent=3)
    for number in range(5):
        logging.getLogger("x").info("line %d", number, extra={"rollout_id": f"r{number % 2}", "stage": "start"})
    logging.getLogger("x").info("of no rollout")

    assert [line["message"] for line in recent_lines().of("r0")] == ["line 2", "line 4"]
    assert recent_lines().of("r1")[0]["stage"] == "start"
    assert recent_lines().of("unknown") == []
