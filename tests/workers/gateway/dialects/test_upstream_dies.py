"""The model server dies before it answers, in the middle of its answer, and in the middle of its stream."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from support import wait_until

USER = [{"role": "user", "content": "hi"}]
#: By dialect: path, body, and where its error says what kind it is.
DIALECTS: dict[str, tuple[str, dict[str, Any], str]] = {
    "chat": ("/chat/completions", {"messages": USER}, "upstream_disconnected"),
    "responses": ("/responses", {"input": "hi"}, "upstream_disconnected"),
    "messages": ("/v1/messages", {"messages": USER, "max_tokens": 9}, "api_error"),
}
WAYS = [("chat", False), ("responses", False), ("responses", True), ("messages", False), ("messages", True)]
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: %s\r\ntransfer-encoding: chunked\r\n\r\n"
EVENTS = {
    "chat": b'data: {"choices": [{"index": 0, "delta": {"role": "assistant", "content": "he"}}]}\n\n',
    "responses": b'data: {"type": "response.created", "response": {"id": "resp_1", "output": []}}\n\n',
    "messages": b'data: {"type": "message_start", "message": {"id": "msg_1", "content": []}}\n\n',
}


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


@pytest.fixture
def ask(gateway_with: Callable[..., Any], serve_raw: Callable[..., Any]) -> Callable[..., Any]:
    """Make one call whose model server answers so; returns the answer, its last event or body, and the record."""

    def ask(name: str, native: bool, answers: list[bytes], stream: bool) -> tuple[Any, dict[str, Any], dict[str, Any]]:
        path, body, _ = DIALECTS[name]
        listener, thread = serve_raw(answers)
        with listener:
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            gateway = gateway_with(upstream=url, native=[name] if native else [])
            rollout = gateway.register()
            answer = gateway.post(f"/v1/rollouts/{rollout}{path}", json=body | {"stream": stream})
            thread.join(10)
            wait_until(lambda: gateway.trajectory(rollout)["failed_calls"] == 1)
            return answer, json.loads(answer.content.strip().rpartition(b"data: ")[2]), gateway.trajectory(rollout)

    return ask


@pytest.mark.parametrize(("name", "native"), WAYS)
@pytest.mark.parametrize("stream", [False, True])
def test_before_its_head_and_in_its_body(ask: Callable[..., Any], name: str, native: bool, stream: bool) -> None:
    broken = HEAD % b"application/json" + chunk(b'{"id":')
    for answers in ([b"", b""], [broken]):
        answer, body, recorded = ask(name, native, answers, stream)
        assert answer.status_code == 502
        assert body["error"]["type"] == DIALECTS[name][2]
        assert "broke" in body["error"]["message"]
        assert (recorded["num_turns"], recorded["failures"][0]["status"]) == (0, 502)


@pytest.mark.parametrize(("name", "native"), WAYS)
def test_in_its_stream(ask: Callable[..., Any], name: str, native: bool) -> None:
    event = EVENTS[name if native else "chat"]
    answer, last, recorded = ask(name, native, [HEAD % b"text/event-stream" + chunk(event)], True)
    assert answer.status_code == 200
    error = last["response"]["error"] if name == "responses" else last["error"]
    assert "broke" in error["message"]
    assert (recorded["num_turns"], recorded["failures"][0]["status"]) == (0, 502)
    assert b"[DONE]" not in answer.content
