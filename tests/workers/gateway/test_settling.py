"""Making a turn of a long stream: a part at a time, because all other streams wait meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import orjson
import pytest

from workers.gateway.protocol import Registration
from workers.gateway.server import control
from workers.gateway.server.passing import Lines
from workers.gateway.server.recorder import RecordedRollout, Recorder
from workers.gateway.server.turns import Answered, Payload

TEXT = "a long answer, " * 100


def recorded(chunks: list[bytes]) -> RecordedRollout:
    rollout = Recorder().register("r", Registration(model="m"), None)
    lines = Lines()
    for chunk in chunks:
        lines.add(chunk)
    rollout.record(Answered([{"role": "user", "content": "hi"}], lines.payload(), {}))
    return rollout


@pytest.fixture
def chunks(answer_of: Callable[..., Any], events_of: Callable[..., list[bytes]]) -> list[bytes]:
    """What comes of a stream of 1,500 tokens, without the events' frames."""
    return [event[len(b"data: ") : -2] for event in events_of(answer_of(TEXT))[:-1]]


def step(rollout: RecordedRollout) -> dict[str, Any]:
    (turn,) = rollout.history.settled
    return turn.step(None)


def parts(rollout: RecordedRollout) -> int:
    count = 0
    while rollout.settle_part():
        count += 1
    return count


def test_a_part_at_a_time_makes_the_same_turn(chunks: list[bytes]) -> None:
    at_once, in_parts = recorded(chunks), recorded(chunks)
    at_once.settle()
    assert parts(in_parts) > len(chunks) / 200
    assert step(in_parts) == step(at_once)
    assert step(in_parts)["completion"][0]["content"] == TEXT
    assert len(step(in_parts)["tokens"]["completion_ids"]) == len(TEXT)


def test_whoever_asks_in_between_gets_all_of_it(chunks: list[bytes]) -> None:
    rollout = recorded(chunks)
    assert rollout.settle_part()
    assert rollout.settle_part()
    assert rollout.history.settled == []
    assert rollout.progress()["completion_tokens"] == len(TEXT)
    assert step(rollout)["completion"][0]["content"] == TEXT
    assert not rollout.settle_part()


@pytest.mark.parametrize("asked_for", [False, True])
def test_what_cannot_be_read_in_the_middle_is_no_shorter_answer(chunks: list[bytes], asked_for: bool) -> None:
    rollout = recorded([*chunks[:700], b'{"choices":', *chunks[700:]])
    assert rollout.settle_part()
    if asked_for:
        rollout.settle()
    else:
        parts(rollout)
    assert "cannot be read" in step(rollout)["extras"]["record_error"]
    assert step(rollout)["completion"][0]["content"] is None


def test_a_rollout_that_is_forgotten_in_between_leaves_nothing(chunks: list[bytes]) -> None:
    rollout = recorded(chunks)
    assert rollout.settle_part()
    rollout.forget()
    assert not rollout.settle_part()
    assert rollout.history.settled == []


def test_a_turn_that_comes_while_a_trajectory_is_written_down_is_all_of_it_or_nothing(
    chunks: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "_SLICE", -1.0)  # others go on after each turn
    rollout = recorded(chunks)

    async def main() -> dict[str, Any]:
        writing = asyncio.create_task(control._encoded(rollout))
        await asyncio.sleep(0)
        rollout.record(Answered([{"role": "user", "content": "later"}], Payload(b"{}"), {}))
        rollout.settle()
        found: dict[str, Any] = orjson.loads(await writing)
        return found

    whole = asyncio.run(main())
    assert whole["num_turns"] == len(whole["trajectory"]) == 1
