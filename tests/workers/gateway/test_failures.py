"""What fails behind or at the gateway: typed answers, remembered failures, limits."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from starlette.responses import Response
from support import free_port


def error_body(message: str) -> bytes:
    return b'{"error": {"message": "' + message.encode() + b'", "type": "T", "param": null, "code": 1}}'


@pytest.mark.parametrize(
    ("status", "answered", "kind"),
    [
        (400, 400, "invalid_request_error"),
        (422, 400, "invalid_request_error"),
        (413, 413, "invalid_request_error"),
        (429, 429, "rate_limit_error"),
        (401, 502, "upstream_auth_error"),
        (403, 502, "upstream_auth_error"),
        (404, 502, "upstream_error"),
        (500, 502, "upstream_error"),
        (503, 502, "upstream_error"),
        (504, 504, "upstream_timeout"),
        (302, 502, "upstream_error"),
    ],
)
def test_every_status_of_the_upstream_becomes_a_typed_answer(
    gateway: Any, model: Any, status: int, answered: int, kind: str
) -> None:
    rollout = gateway.register()
    model.will(Response(error_body("the reason"), status))
    answer = gateway.chat(rollout)
    assert answer.status_code == answered
    assert answer.json()["error"]["type"] == kind
    assert "the reason" in answer.json()["detail"] == answer.json()["error"]["message"]
    recorded = gateway.trajectory(rollout)
    assert recorded["num_turns"] == 0
    assert recorded["failures"] == [{"status": answered, "message": answer.json()["detail"], "turns": 0}]


def test_a_rate_limit_passes_with_its_retry_after(gateway: Any, model: Any) -> None:
    model.will(Response(error_body("slow down"), 429, {"retry-after": "7"}))
    answer = gateway.chat(gateway.register())
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "7")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"<html>",
        b"[]",
        b"{}",
        b'{"choices": []}',
        b'{"choices": [1]}',
        b'{"choices": [{"message": null}]}',
        b'{"choices": [{"message": {"role": "assistant", "tool_calls": "x"}}]}',
    ],
)
def test_an_answer_that_is_no_completion_is_502(gateway: Any, model: Any, body: bytes) -> None:
    rollout = gateway.register()
    model.will(Response(body, 200))
    answer = gateway.chat(rollout)
    assert (answer.status_code, answer.json()["error"]["type"]) == (502, "upstream_malformed")
    assert gateway.trajectory(rollout)["failed_calls"] == 1


def test_an_unreachable_upstream_is_502_and_not_ready(gateway_with: Callable[..., Any]) -> None:
    gateway = gateway_with(upstream=f"http://127.0.0.1:{free_port()}")
    rollout = gateway.register()
    for stream in (False, True):
        answer = gateway.chat(rollout, stream=stream)
        assert (answer.status_code, answer.json()["error"]["type"]) == (502, "upstream_unreachable")
    assert gateway.get("/healthz").status_code == 200
    assert gateway.get("/readyz").status_code == 503
    assert gateway.trajectory(rollout)["failed_calls"] == 2


def test_a_reachable_upstream_is_ready(gateway: Any) -> None:
    assert gateway.get("/readyz").json() == {"status": "ready"}


def test_an_upstream_that_says_nothing_is_504(gateway_with: Callable[..., Any]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # connections are taken by the kernel, and never answered
        gateway = gateway_with(upstream=f"http://127.0.0.1:{silent.getsockname()[1]}", upstream_timeout=0.5)
        (server,) = gateway.served.app.state.upstreams.servers
        server._connections._connect_timeout = 20.0  # else it is 0.5 s too, and another failure
        answer = gateway.chat(gateway.register())
    assert (answer.status_code, answer.json()["error"]["type"]) == (504, "upstream_timeout")
    assert "0.5 s" in answer.json()["detail"]


def test_readiness_does_not_wait_for_an_upstream_that_says_nothing(
    gateway_with: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.gateway.server.upstream.READY_TIMEOUT", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        gateway = gateway_with(upstream=f"http://127.0.0.1:{silent.getsockname()[1]}")
        answer = gateway.get("/readyz")
    assert (answer.status_code, answer.json()["status"]) == (503, "upstream unavailable")


def test_a_call_that_the_upstream_drops_unanswered_is_sent_once_more(
    gateway_with: Callable[..., Any], serve_raw: Callable[..., Any]
) -> None:
    body = b'{"choices": [{"message": {"role": "assistant", "content": "again"}, "finish_reason": "stop"}]}'
    good = b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)
    listener, thread = serve_raw([b"", good, b"", b""])
    with listener:
        gateway = gateway_with(upstream=f"http://127.0.0.1:{listener.getsockname()[1]}")
        rollout = gateway.register()
        assert gateway.chat(rollout).json()["choices"][0]["message"]["content"] == "again"
        answer = gateway.chat(rollout)
        thread.join(10)
    assert (answer.status_code, answer.json()["error"]["type"]) == (502, "upstream_disconnected")


def test_an_answer_that_breaks_off_is_502(gateway_with: Callable[..., Any], serve_raw: Callable[..., Any]) -> None:
    listener, thread = serve_raw([b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{"])
    with listener:
        gateway = gateway_with(upstream=f"http://127.0.0.1:{listener.getsockname()[1]}")
        answer = gateway.chat(gateway.register())
        thread.join(10)
    assert (answer.status_code, answer.json()["error"]["type"]) == (502, "upstream_disconnected")


def test_the_latest_20_failures_are_kept_and_all_are_counted(gateway: Any, model: Any) -> None:
    rollout = gateway.register()
    model.will(*[Response(error_body(f"failure {n}"), 400) for n in range(23)])
    for _ in range(23):
        gateway.chat(rollout)
    recorded = gateway.trajectory(rollout)
    assert recorded["failed_calls"] == 23
    assert [failure["message"] for failure in recorded["failures"]] == [f"failure {n}" for n in range(3, 23)]


def test_a_body_beyond_the_limit_is_413_whether_or_not_its_length_is_told(
    gateway_with: Callable[..., Any], model: Any, model_url: str
) -> None:
    gateway = gateway_with(upstream=model_url, max_body_bytes=1000)
    rollout = gateway.register()
    path = f"/v1/rollouts/{rollout}/chat/completions"
    for content in (b"x" * 1001, iter([b"x" * 600, b"x" * 600])):
        answer = gateway.post(path, content=content)
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "request_too_large")
    assert gateway.post("/v1/rollouts/big/register", content=b"x" * 1001).status_code == 413
    assert gateway.chat(rollout).status_code == 200
    assert len(model.requests) == 1


def test_a_body_that_grows_beyond_the_limit_is_413_before_it_ends(
    gateway_with: Callable[..., Any], model_url: str
) -> None:
    gateway = gateway_with(upstream=model_url, max_body_bytes=200_000)
    rollout = gateway.register()
    with socket.create_connection((gateway.base_url.host, gateway.base_url.port), timeout=20) as made:
        head = f"POST /v1/rollouts/{rollout}/chat/completions HTTP/1.1\r\nhost: g\r\ntransfer-encoding: chunked\r\n\r\n"
        made.sendall(head.encode())
        for _ in range(4):
            made.sendall(b"%x\r\n%s\r\n" % (60_000, b" " * 60_000))
        assert made.recv(65536).startswith(b"HTTP/1.1 413")


@pytest.mark.parametrize("body", [b"[" * 100_000, b'{"a": "\\ud800"}', b"\xff\xfe", b'{"a": NaN}'])
def test_json_that_cannot_be_read_is_422(gateway: Any, body: bytes) -> None:
    answer = gateway.post(f"/v1/rollouts/{gateway.register()}/chat/completions", content=body)
    assert answer.status_code == 422
    assert answer.json()["detail"][0]["type"] == "json_invalid"


def test_a_refusal_that_is_final_tells_openai_clients_not_to_retry(gateway: Any) -> None:
    rollout = gateway.register()
    gateway.post(f"/v1/rollouts/{rollout}/cancel")
    assert gateway.chat(rollout).headers["x-should-retry"] == "false"


def test_a_fault_of_the_gateways_own_is_json_too(gateway: Any, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("internal words")

    monkeypatch.setattr("workers.gateway.server.calls.scan_answer", broken)
    rollout = gateway.register()
    answer = gateway.chat(rollout)
    assert answer.status_code == 500
    assert answer.json()["error"]["type"] == "gateway_error"
    assert "internal words" not in answer.text
    # On a connection of its own: uvicorn closes the one on which an application has failed.
    recorded = httpx.get(f"{gateway.base_url}/v1/rollouts/{rollout}/trajectory", timeout=20).json()
    assert recorded["failures"] == [{"status": 500, "message": answer.json()["detail"], "turns": 0}]


def test_a_fault_of_the_gateways_own_has_the_dialects_shape(gateway: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("internal words")

    monkeypatch.setattr("workers.gateway.server.calls.read_answer", broken)
    rollout = gateway.register()
    body = {"max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}
    answer = gateway.post(f"/v1/rollouts/{rollout}/v1/messages", json=body)
    assert (answer.status_code, answer.json()["type"], answer.json()["error"]["type"]) == (500, "error", "api_error")
    answer = httpx.post(f"{gateway.base_url}/v1/rollouts/{rollout}/responses", json={"input": "hi"}, timeout=20)
    assert (answer.status_code, answer.json()["error"]["type"]) == (500, "gateway_error")
    assert "internal words" not in answer.text


def nested(levels: int) -> Any:
    value: Any = "x"
    for level in range(levels):
        value = [value] if level % 2 else {"inner": value}
    return value


def test_a_request_that_is_nested_too_deep_is_refused_and_not_recorded(gateway: Any, model: Any) -> None:
    rollout = gateway.register()
    for content, status in ((nested(97), 200), (nested(98), 422), (nested(300), 422)):
        answer = gateway.chat(rollout, messages=[{"role": "user", "content": content}])
        assert answer.status_code == status
    assert "nested at most 100" in answer.json()["error"]["message"]
    recorded = gateway.trajectory(rollout)
    assert (recorded["num_turns"], recorded["prompt"][0]["content"], len(model.requests)) == (1, nested(97), 1)


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_is_nested_too_deep_is_malformed(gateway: Any, model: Any, stream: bool) -> None:
    rollout = gateway.register()
    deep = b'{"choices": [{"%s": {"role": "assistant", "blocks": %s}}]}'
    body = deep % (b"delta" if stream else b"message", b"[" * 300 + b"]" * 300)
    model.will((lambda _: model.events([b"data: " + body + b"\n\n"])) if stream else Response(body, 200))
    assert b"upstream_malformed" in gateway.chat(rollout, stream=stream).content
    recorded = gateway.trajectory(rollout)
    assert (recorded["num_turns"], recorded["failures"][0]["status"]) == (0, 502)


@pytest.mark.parametrize("stream", [False, True])
def test_text_that_is_none_passes_and_is_recorded_with_question_marks(gateway: Any, model: Any, stream: bool) -> None:
    rollout, part = gateway.register(), "delta" if stream else "message"
    body = b'{"choices": [{"%s": {"role": "assistant", "content": "a\\ud800z"}, "finish_reason": "stop"}]}'
    body %= part.encode()
    model.will((lambda _: model.events([b"data: " + body + b"\n\n"])) if stream else Response(body, 200))
    answer = gateway.chat(rollout, stream=stream)
    recorded = gateway.trajectory(rollout)
    if b"upstream_malformed" in answer.content:
        assert recorded["failed_calls"] == 1
    else:
        assert recorded["trajectory"][0]["completion"][0]["content"] == "a?z"


@pytest.mark.parametrize("limit", [0, -1])
def test_a_sequence_limit_that_is_not_positive_is_refused(gateway: Any, limit: int) -> None:
    answer = gateway.post("/v1/rollouts/none/register", json={"model": "m", "max_seq_len": limit})
    assert answer.status_code == 422
    assert answer.json()["detail"][0]["loc"] == ["body", "max_seq_len"]
