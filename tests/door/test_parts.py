"""The door's parts by themselves: what it takes in, and what a client has in the end."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("zmq")
pytest.importorskip("msgpack")

import msgpack

from producer import ErrorInfo, ErrorKind, RolloutResult, StopCondition
from producer.door.config import ServedConfigError, named_config, read_config
from producer.door.episode import EpisodeAnswer, pack
from producer.door.frames import MAX_RUN_BYTES, MalformedError, answer_of, fields, model_of, read
from producer.door.live import LiveDelta, PassedOn
from producer.door.wire import Wire


class Client:
    """Assembles deltas as verifiers' client does: a trace is what came of it since it was last discarded."""

    def __init__(self) -> None:
        self.traces: dict[str, list[int]] = {}

    def apply(self, data: bytes) -> None:
        delta = msgpack.unpackb(data)
        if delta.get("discard"):
            self.traces.pop(delta["trace"], None)
        else:
            self.traces.setdefault(delta["trace"], []).append(delta["n"])


def deltas_of(attempt: int, count: int) -> list[tuple[str, bytes]]:
    """Return the deltas of an attempt that has two traces of its own."""
    traces = [f"{attempt}-{number % 2}" for number in range(count)]
    return [(trace, msgpack.packb({"trace": trace, "n": number})) for number, trace in enumerate(traces)]


@given(
    counts=st.lists(st.integers(0, 6), min_size=1, max_size=3),
    lost=st.sets(st.tuples(st.integers(1, 3), st.integers(0, 5))),
    died_at=st.integers(0, 6),
    ended_by=st.integers(1, 3),
    earlier=st.booleans(),
    forgot=st.booleans(),
)
def test_a_client_has_each_delta_of_the_attempt_that_ended_it_once_whatever_was_lost(
    counts: list[int], lost: set[tuple[int, int]], died_at: int, ended_by: int, earlier: bool, forgot: bool
) -> None:
    client, passed_on = Client(), PassedOn()
    ended_by = min(ended_by, len(counts))
    for attempt, count in enumerate(counts, 1):
        for number, (trace, data) in enumerate(deltas_of(attempt, count)):
            if attempt < ended_by and number >= died_at:
                break
            if earlier and number == 1:  # the door is another one from here on
                passed_on, earlier = PassedOn(unsure=True), False
            if (attempt, number) not in lost:
                for sent in passed_on.take(LiveDelta("r", 1 if forgot else attempt, number, trace, data)):
                    client.apply(sent)
        if attempt == ended_by:
            break
    final = deltas_of(ended_by, counts[ended_by - 1])
    traces = sorted({trace for trace, _ in final})
    for data in passed_on.rest(1 if forgot else ended_by, [data for _, data in final], traces):
        client.apply(data)
    expected = Client()
    for _, data in final:
        expected.apply(data)
    assert {trace: client.traces.get(trace) for trace in traces} == expected.traces


def test_what_nobody_could_be_answered_is_refused() -> None:
    assert read([b"p", b"id", b"run", b""]).method == "run"
    for frames in (
        [b"p", b"id", b"run"],
        [b"p", b"", b"run", b""],
        [b"p", b"\xff", b"run", b""],
        [b"p", b"i" * 201, b"", b""],
    ):
        with pytest.raises(MalformedError):
            read(frames)


@pytest.mark.parametrize(
    "payload", [b"", b"\xc1", msgpack.packb([1]), msgpack.packb({"model": 1}), b"\x00" * (MAX_RUN_BYTES + 1)]
)
def test_a_run_that_is_none_is_refused(payload: bytes) -> None:
    with pytest.raises(MalformedError):
        model_of(payload)


def test_objects_of_no_plain_kind_are_not_made() -> None:
    """An extension type, which is how msgpack would carry a pickle, stays the bytes that it is."""
    found = fields(msgpack.packb({"model": msgpack.ExtType(42, b"cos\nsystem\n")}))
    assert found == {"model": msgpack.ExtType(42, b"cos\nsystem\n")}


def result(**more: object) -> RolloutResult:
    return RolloutResult(rollout_id="r", **{"stop_condition": StopCondition.COMPLETED, **more})  # type: ignore[arg-type]


def test_however_an_episode_ended_there_is_an_answer() -> None:
    answer = EpisodeAnswer(wire=Wire.DELTAS, deltas=[pack(b"d")], reply=pack(b"r"), traces=["t"]).model_dump(
        mode="json"
    )
    assert answer_of(result(episode=answer), Wire.DELTAS) == ([b"d"], b"r", ["t"])
    error = ErrorInfo(kind=ErrorKind.ENVIRONMENT, message="ValueError: no")
    words = {
        "ValueError: no": result(stop_condition=StopCondition.HAS_ERROR, error=error),
        "Cancelled: rollout aborted": result(stop_condition=StopCondition.CANCELLED),
        "the episode left no answer": result(),
        "the worker's answer cannot be read: ValidationError": result(episode={"wire": "deltas"}),
        "the worker's answer cannot be read: Error": result(episode=answer | {"reply": "?"}),
    }
    for said, ended in words.items():
        deltas, reply, traces = answer_of(ended, Wire.DELTAS)
        assert (deltas, traces, msgpack.unpackb(reply)) == ([], [], {"success": False, "error": said})
    assert "--wire deltas" in msgpack.unpackb(answer_of(result(episode=answer), Wire.WHOLE)[1])["error"]


def test_a_configuration_is_the_same_in_either_form(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"taskset": {"id": "x"}, "agent": {"max_turns": 3}}')
    (tmp_path / "a.toml").write_text('[agent]\nmax_turns = 3\n[taskset]\nid = "x"\n')
    assert read_config(tmp_path / "a.json") == read_config(tmp_path / "a.toml")
    assert named_config(str(tmp_path / "a.toml"))[0] == "a"
    assert named_config("a") == ("a", None)


@pytest.mark.parametrize(
    ("name", "text"), [("a.json", "{"), ("a.json", "[]"), ("a.toml", "x"), ("a.yaml", ""), ("a b.json", "{}")]
)
def test_a_configuration_that_cannot_be_used_says_so(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ServedConfigError, match=name):
        read_config(tmp_path / name)
    with pytest.raises(ServedConfigError):
        read_config(tmp_path / "missing.json")
    with pytest.raises(ServedConfigError):
        named_config("no/name")
