"""Streams: passed on as they come, and recorded as the same call without ``stream`` would be."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.responses import Response
from support import wait_until

from workers.gateway.server.streaming import CompletionAssembler, EventSplitter, event_data

TOOL_CALLS = [
    {"id": "call_1", "type": "function", "function": {"name": "bash", "arguments": '{"command": "ls -la"}'}},
    {"id": "call_2", "type": "function", "function": {"name": "bash", "arguments": '{"command": "pwd"}'}},
]
LLAMA_ENTRIES = [{"id": 7, "token": "o", "logprob": -0.5}, {"id": 8, "token": "k", "logprob": -0.25}]
ANSWERS: dict[str, dict[str, Any]] = {
    "text": {"content": "hello world"},
    "reasoning": {"content": "4", "message": {"reasoning_content": "2 and 2"}},
    "vllm_reasoning": {"content": "4", "message": {"reasoning": "2 and 2"}},
    "tool_calls": {"content": None, "message": {"tool_calls": TOOL_CALLS}, "choice": {"finish_reason": "tool_calls"}},
    "length": {"content": "cut", "choice": {"finish_reason": "length"}},
    "no_tokens": {"choice": {"logprobs": None, "token_ids": None}, "prompt_token_ids": None},
    "llama": {
        "content": "ok",
        "choice": {"token_ids": None, "logprobs": {"content": LLAMA_ENTRIES}},
        "prompt_token_ids": None,
    },
}


def stream_of(gateway: Any, rollout: str, **fields: Any) -> bytes:
    answer = gateway.chat(rollout, stream=True, **fields)
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    content: bytes = answer.content
    return content


@pytest.mark.parametrize("name", ANSWERS)
def test_a_streamed_turn_is_recorded_as_the_same_turn_answered_whole(
    gateway: Any, model: Any, answer_of: Callable[..., Any], name: str
) -> None:
    whole, streamed = gateway.register(), gateway.register()
    model.will(answer_of(**ANSWERS[name]), answer_of(**ANSWERS[name]))
    assert gateway.chat(whole).status_code == 200
    stream_of(gateway, streamed)
    expected, recorded = gateway.trajectory(whole), gateway.trajectory(streamed)
    assert min(expected.pop("idle_seconds"), recorded.pop("idle_seconds")) >= 0
    assert recorded | {"rollout_id": whole} == expected
    assert expected["num_turns"] == 1
    assert (expected["trajectory"][0]["tokens"] is None) == (name == "no_tokens")


def test_the_upstream_is_asked_for_usage_and_for_a_stream(gateway: Any, model: Any) -> None:
    stream_of(gateway, gateway.register(), stream_options={"continuous_usage_stats": True})
    assert model.requests[0]["stream"] is True
    assert model.requests[0]["stream_options"] == {"continuous_usage_stats": True, "include_usage": True}


def test_the_first_chunk_reaches_the_agent_before_the_upstream_sends_the_second(
    gateway: Any, model: Any, answer_of: Callable[..., Any], events_of: Callable[..., list[bytes]]
) -> None:
    rollout, gate = gateway.register(), threading.Event()
    first, *rest = events_of(answer_of("ab"))
    model.will(lambda _: model.events([first, lambda: gate.wait(20), *rest]))
    fields = {
        "messages": [{"role": "user", "content": "hi"}],
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    with gateway.stream("POST", f"/v1/rollouts/{rollout}/chat/completions", json=fields) as answer:
        parts = answer.iter_raw()
        assert next(parts) == first
        assert not gate.is_set()
        gate.set()
        assert b"".join(parts) == b"".join(rest)  # unchanged, byte for byte
    assert gateway.trajectory(rollout)["trajectory"][0]["completion"][0]["content"] == "ab"


@pytest.mark.parametrize("asked", [True, False])
def test_the_usage_chunk_reaches_only_agents_that_asked_for_it(gateway: Any, asked: bool) -> None:
    fields = {"stream_options": {"include_usage": True}} if asked else {}
    body = stream_of(gateway, gateway.register(), **fields)
    assert (b'"choices":[]' in body) is asked
    assert body.endswith(b"data: [DONE]\n\n")


def test_events_that_chunks_cut_anywhere_arrive_whole_and_comments_pass(
    gateway: Any, model: Any, answer_of: Callable[..., Any], events_of: Callable[..., list[bytes]]
) -> None:
    rollout = gateway.register()
    whole = b": keep-alive\n\n" + b"".join(events_of(answer_of("cut anywhere"), usage=False)).replace(
        b"\n\n", b"\r\n\r\n"
    )
    model.will(lambda _: model.events([whole[i : i + 7] for i in range(0, len(whole), 7)]))
    assert stream_of(gateway, rollout) == whole
    assert gateway.trajectory(rollout)["completion"][0]["content"] == "cut anywhere"


@given(st.lists(st.sampled_from([b"data: a\n\n", b": c\r\n\r\n", b"data: b\r\r", b"data: x\ndata: y\n\n"])), st.data())
def test_the_splitter_finds_the_same_events_however_the_bytes_are_cut(events: list[bytes], data: st.DataObject) -> None:
    whole = b"".join(events)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)))))
    splitter, found = EventSplitter(), []
    for start, end in zip([0, *cuts], [*cuts, len(whole)], strict=True):
        found += list(splitter.feed(whole[start:end]))
    assert found == events
    assert splitter.rest() == b""


def test_an_events_data_lines_are_joined() -> None:
    assert event_data(b"event: x\ndata: a\ndata:b\n\n") == b"a\nb"
    assert event_data(b": comment\n\n") is None


def test_tool_calls_without_an_index_are_told_apart_by_their_ids() -> None:
    assembler = CompletionAssembler()
    for part in (
        {"id": "a", "function": {"name": "f", "arguments": "{"}},
        {"function": {"arguments": "}"}},
        {"id": "b"},
    ):
        assembler.feed(orjson.dumps({"choices": [{"delta": {"tool_calls": [part]}}]}))
    calls = assembler.completion()["choices"][0]["message"]["tool_calls"]
    assert [(call["id"], call["function"]["arguments"]) for call in calls] == [("a", "{}"), ("b", "")]


def test_an_agent_that_leaves_its_stream_ends_the_upstreams_call_and_leaves_a_partial_step(
    gateway: Any, model: Any, answer_of: Callable[..., Any], events_of: Callable[..., list[bytes]]
) -> None:
    rollout, gate = gateway.register(), threading.Event()
    events = events_of(answer_of("abcdef"))
    model.will(lambda _: model.events([*events[:4], lambda: gate.wait(20), *events[4:]]))
    fields = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
    with gateway.stream("POST", f"/v1/rollouts/{rollout}/chat/completions", json=fields) as answer:
        received = b""
        for part in answer.iter_raw():
            received += part
            if received.count(b"data: ") == 4:
                break
    recorded = gateway.trajectory(rollout)  # waits for the call to end, though the upstream is still held
    step = recorded["trajectory"][0]
    assert step["completion"][0]["content"] == "abc"
    assert step["tokens"]["completion_ids"] == [97, 98, 99]
    assert step["extras"] == {"partial": True}
    assert step["is_truncated"] is recorded["is_truncated"] is True
    wait_until(lambda: model.left_early == 1, what="the upstream to notice")
    gate.set()


def test_an_agent_that_leaves_before_anything_came_leaves_no_step(gateway: Any, model: Any) -> None:
    rollout, gate = gateway.register(), threading.Event()
    model.will(lambda _: model.events([b": hello\n\n", lambda: gate.wait(20)]))
    fields = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
    with gateway.stream("POST", f"/v1/rollouts/{rollout}/chat/completions", json=fields) as answer:
        next(answer.iter_raw())
    recorded = gateway.trajectory(rollout)
    gate.set()
    assert (recorded["num_turns"], recorded["failed_calls"]) == (0, 0)


def test_an_upstream_that_breaks_in_mid_stream_is_told_to_the_agent_and_is_no_turn(
    gateway: Any, model: Any, answer_of: Callable[..., Any], events_of: Callable[..., list[bytes]]
) -> None:
    rollout = gateway.register()
    events = events_of(answer_of("abcdef"))
    model.will(lambda _: model.events([*events[:3], ConnectionResetError("gone")]))
    body = stream_of(gateway, rollout)
    error = orjson.loads(body.removeprefix(b"".join(events[:3])).removeprefix(b"data: "))["error"]
    assert error["type"] == "upstream_disconnected"
    assert b"[DONE]" not in body
    recorded = gateway.trajectory(rollout)
    assert recorded["num_turns"] == 0
    assert recorded["failures"] == [{"status": 502, "message": error["message"], "turns": 0}]


def test_an_upstream_that_ends_its_stream_without_a_finish_is_a_failure(
    gateway: Any, model: Any, answer_of: Callable[..., Any], events_of: Callable[..., list[bytes]]
) -> None:
    rollout = gateway.register()
    model.will(lambda _: model.events(events_of(answer_of("abcdef"))[:3]))
    assert b"ended its stream early, after 3 chunks" in stream_of(gateway, rollout)
    assert gateway.trajectory(rollout)["num_turns"] == 0


def test_an_error_event_of_the_upstream_passes_and_is_a_failure(gateway: Any, model: Any) -> None:
    rollout = gateway.register()
    event = b'data: {"error": {"message": "out of memory", "code": 500}}\n\n'
    model.will(lambda _: model.events([event, b"data: [DONE]\n\n"]))
    assert stream_of(gateway, rollout) == event + b"data: [DONE]\n\n"
    failure = gateway.trajectory(rollout)["failures"][0]
    assert failure["status"] == 502
    assert failure["message"].endswith("out of memory")


@pytest.mark.parametrize("chunk", [b"data: {nope\n\n", b'data: {"choices": 3}\n\n', b"data: []\n\n"])
def test_a_chunk_that_is_none_is_a_failure(gateway: Any, model: Any, chunk: bytes) -> None:
    rollout = gateway.register()
    model.will(lambda _: model.events([chunk, b"data: [DONE]\n\n"]))
    assert b"upstream_malformed" in stream_of(gateway, rollout)
    assert gateway.trajectory(rollout)["failed_calls"] == 1


def test_an_event_without_an_end_does_not_fill_the_memory(
    gateway: Any, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.gateway.server.streaming.LARGEST_EVENT", 100_000)
    never = threading.Event()
    model.will(model.events([b"data: {" + b" " * 60_000, b" " * 60_000, lambda: never.wait(20)]))
    rollout = gateway.register()
    answer = gateway.chat(rollout, stream=True)
    wait_until(lambda: model.left_early == 1, what="the gateway to end the model server's call")
    never.set()
    assert b"upstream_malformed" in answer.content
    assert len(answer.content) < 1000
    assert gateway.trajectory(rollout)["failed_calls"] == 1


def test_a_streamed_call_that_fails_before_its_first_byte_has_a_status_of_its_own(gateway: Any, model: Any) -> None:
    rollout = gateway.register()
    model.will(
        Response(b'{"error": {"message": "too long"}}', 400), Response(b"{}", 200, media_type="application/json")
    )
    assert gateway.chat(rollout, stream=True).json()["detail"] == "too long"
    answer = gateway.chat(rollout, stream=True)
    assert (answer.status_code, answer.json()["error"]["type"]) == (502, "upstream_malformed")
    assert [failure["status"] for failure in gateway.trajectory(rollout)["failures"]] == [400, 502]


def test_a_long_stream_is_recorded_whole(
    gateway: Any, model: Any, answer_of: Callable[..., Any], events_of: Callable[..., list[bytes]]
) -> None:
    rollout, text = gateway.register(), "abcdefghij" * 200  # some hundred kilobytes of chunks: kept in several pieces
    model.will(answer_of(text))
    assert stream_of(gateway, rollout).count(b"data: ") == 2003
    step = gateway.trajectory(rollout)["trajectory"][0]
    assert step["completion"][0]["content"] == text
    assert step["tokens"]["completion_ids"] == [ord(c) for c in text]


def test_the_second_stream_of_a_rollout_uses_the_connection_of_the_first(
    gateway_with: Callable[..., Any], model: Any, model_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.gateway.server.upstream.KEEPALIVE_EXPIRY", 600)  # however long a stream takes here
    gateway = gateway_with(upstream=model_url)
    rollout = gateway.register()
    for _ in range(3):
        stream_of(gateway, rollout)
    assert len({headers["x-client-port"] for headers in model.headers}) == 1
