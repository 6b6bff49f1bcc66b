"""Clients that send too much, too slowly or not at all, and streams that are silent."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support import wait_until

from workers.gateway.server import app as gateway_app
from workers.gateway.server.guard import LARGEST_HEAD, GuardedProtocol


@pytest.fixture
def connection(gateway: Any) -> Iterator[socket.socket]:
    """A connection to the gateway, over which the test speaks for itself."""
    with socket.create_connection((gateway.base_url.host, gateway.base_url.port), timeout=20) as made:
        yield made


def received(connection: socket.socket) -> bytes:
    """Return all that comes until the gateway closes."""
    parts = []
    try:
        while part := connection.recv(65536):
            parts.append(part)
    except ConnectionResetError:
        pass
    return b"".join(parts)


def answered(connection: socket.socket) -> bytes:
    """Return one whole answer, and nothing of what comes after it."""
    said = b""
    while b"\r\n\r\n" not in said:
        said += connection.recv(1)
    length = int(said.lower().partition(b"content-length:")[2].partition(b"\r\n")[0])
    while length:
        part = connection.recv(length)
        said, length = said + part, length - len(part)
    return said


def trickled(connection: socket.socket) -> bytes:
    """Send a byte now and then until the gateway closes, and return what it said."""
    said = b""
    connection.settimeout(0.02)
    for _ in range(1000):
        try:
            connection.sendall(b"x")
            part = connection.recv(65536)
        except TimeoutError:
            continue
        except OSError:  # whichever way the system tells that the other side is closed; what it said is still there
            return said + received(connection)
        if not part:
            return said
        said += part
    raise AssertionError("the gateway still waits")


def test_a_head_that_never_ends_is_cut_off(connection: socket.socket) -> None:
    connection.sendall(b"GET /healthz HTTP/1.1\r\nhost: g\r\n\r\n")
    assert b"200 OK" in connection.recv(65536)  # the limit is one for each request
    line = b"x-%05d: " + b"y" * 1000 + b"\r\n"
    connection.sendall(b"GET /healthz HTTP/1.1\r\nhost: g\r\n")
    lines = b"".join(line % n for n in range(100 * LARGEST_HEAD // 1000))
    with pytest.raises(OSError):  # noqa: PT011 - whichever way the system tells that the other side is closed
        connection.sendall(lines)


def test_a_client_that_sends_its_head_slowly_is_cut_off(
    gateway_with: Callable[..., Any], model_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway = gateway_with(upstream=model_url)
    address = (gateway.base_url.host, gateway.base_url.port)
    with monkeypatch.context() as brief:
        brief.setattr(GuardedProtocol, "head_timeout", 0.1)
        for start in (b"", b"GET /healthz HT", b"GET /healthz HTTP/1.1\r\nhost: g\r\n"):
            with socket.create_connection(address, timeout=20) as slow:
                if start:
                    slow.sendall(start)
                assert received(slow) == b""
    assert gateway.get("/healthz").status_code == 200


def test_a_second_request_on_a_connection_has_a_limit_too(
    gateway_with: Callable[..., Any], model_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway = gateway_with(upstream=model_url)
    with socket.create_connection((gateway.base_url.host, gateway.base_url.port), timeout=20) as slow:
        slow.sendall(b"GET /healthz HTTP/1.1\r\nhost: g\r\n\r\n")
        assert b"200 OK" in answered(slow)
        monkeypatch.setattr(GuardedProtocol, "head_timeout", 0.1)
        slow.sendall(b"GET /healthz HTTP/1.1\r\nhost")
        assert received(slow) == b""


def test_a_body_that_does_not_come_is_given_up(
    gateway_with: Callable[..., Any], model: Any, model_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway = gateway_with(upstream=model_url)
    rollout, address = gateway.register(), (gateway.base_url.host, gateway.base_url.port)
    with monkeypatch.context() as brief, socket.create_connection(address, timeout=20) as slow:
        brief.setattr(gateway_app, "BODY_TIMEOUT", 0.05)
        head = f"POST /v1/rollouts/{rollout}/chat/completions HTTP/1.1\r\nhost: g\r\ncontent-length: 100\r\n\r\n"
        slow.sendall(head.encode() + b'{"messages"')
        assert received(slow).startswith(b"HTTP/1.1 408")
    assert model.requests == []
    assert gateway.chat(rollout).status_code == 200


def test_a_body_that_trickles_in_is_given_up(
    gateway_with: Callable[..., Any], model: Any, model_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway = gateway_with(upstream=model_url)
    rollout = gateway.register()
    monkeypatch.setattr("workers.gateway.server.exchange.BODY_DEADLINE", 0.3)
    with socket.create_connection((gateway.base_url.host, gateway.base_url.port), timeout=20) as slow:
        head = f"POST /v1/rollouts/{rollout}/chat/completions HTTP/1.1\r\nhost: g\r\ncontent-length: 100000\r\n\r\n"
        slow.sendall(head.encode())
        assert trickled(slow).startswith(b"HTTP/1.1 408")
    assert model.requests == []


def test_the_body_of_a_refused_request_is_not_waited_for_without_end(
    gateway_with: Callable[..., Any], model_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever has no key, too, could hold a connection for ever with a byte a minute."""
    gateway = gateway_with(upstream=model_url)
    with socket.create_connection((gateway.base_url.host, gateway.base_url.port), timeout=20) as slow:
        slow.sendall(b"GET /healthz HTTP/1.1\r\nhost: g\r\n\r\n")
        assert b"200 OK" in answered(slow)  # a head has as long as ever, and the body of what follows has not
        monkeypatch.setattr(GuardedProtocol, "head_timeout", 0.2)
        slow.sendall(b"POST /v1/rollouts/none/cancel HTTP/1.1\r\nhost: g\r\ncontent-length: 1000000000\r\n\r\n")
        assert trickled(slow).startswith(b"HTTP/1.1 404")


def test_a_refused_request_whose_body_comes_keeps_its_connection(
    gateway_with: Callable[..., Any], model_url: str
) -> None:
    gateway = gateway_with(upstream=model_url)
    with socket.create_connection((gateway.base_url.host, gateway.base_url.port), timeout=20) as made:
        made.sendall(b"POST /v1/rollouts/none/cancel HTTP/1.1\r\nhost: g\r\ncontent-length: 4\r\n\r\n{")
        assert answered(made).startswith(b"HTTP/1.1 404")
        (protocol,) = gateway.served.server.server_state.connections
        wait_until(lambda: protocol._timer is not None, what="its body to have a limit")
        made.sendall(b"   ")
        wait_until(lambda: protocol._timer is None, what="the limit to be off")
        made.sendall(b"GET /healthz HTTP/1.1\r\nhost: g\r\n\r\n")
        assert answered(made).startswith(b"HTTP/1.1 200")


def test_a_request_of_20_megabytes_passes_whole(gateway: Any, model: Any) -> None:
    rollout, text = gateway.register(), "x" * 20_000_000
    assert gateway.chat(rollout, text).status_code == 200
    assert model.requests[0]["messages"][0]["content"] == text
    assert gateway.trajectory(rollout)["prompt"][0]["content"] == text


def test_images_in_messages_pass_through(gateway: Any, model: Any) -> None:
    rollout = gateway.register()
    parts = [
        {"type": "text", "text": "what is this?"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "iVBOR" * 1000}},
    ]
    assert gateway.chat(rollout, messages=[{"role": "user", "content": parts}]).status_code == 200
    assert model.requests[0]["messages"][0]["content"] == parts
    assert gateway.trajectory(rollout)["trajectory"][0]["prompt"][0]["content"] == parts


def test_ten_thousand_registrations(gateway_with: Callable[..., Any], model_url: str) -> None:
    gateway = gateway_with(upstream=model_url)
    body, batch = b'{"model":"m"}', 200
    head = "POST /v1/rollouts/many-{} HTTP/1.1\r\nhost: g\r\ncontent-length: 13\r\n\r\n"
    with socket.create_connection((gateway.base_url.host, gateway.base_url.port), timeout=20) as pipelined:
        for first in range(0, 10_000, batch):  # a client of HTTP would take four times the time of the gateway
            pipelined.sendall(b"".join(head.format(f"{first + n}/register").encode() + body for n in range(batch)))
            answers = b""
            while answers.count(b'"max_seq_len":') < batch:
                answers += pipelined.recv(1 << 20)
            assert answers.count(b"HTTP/1.1 200 OK") == batch
    assert gateway.get("/healthz").json()["rollouts"] == 10_000
    assert gateway.chat("many-7777").status_code == 200
    assert gateway.trajectory("many-7777")["num_turns"] == 1


def silent_stream(model: Any, gate: threading.Event, events: list[bytes], before: int) -> None:
    model.will(lambda _: model.events([*events[:before], lambda: gate.wait(20), *events[before:]]))


@pytest.mark.parametrize("before", [0, 3])
def test_an_agent_hears_that_a_silent_stream_goes_on(
    gateway_with: Callable[..., Any],
    model: Any,
    model_url: str,
    answer_of: Callable[..., Any],
    events_of: Callable[..., list[bytes]],
    before: int,
) -> None:
    gateway = gateway_with(upstream=model_url, keep_alive=0.02)
    rollout, gate = gateway.register(), threading.Event()
    silent_stream(model, gate, events_of(answer_of("abc"), usage=False), before)
    body = {"messages": [{"role": "user", "content": "x"}], "stream": True}
    with gateway.stream("POST", f"/v1/rollouts/{rollout}/chat/completions", json=body) as answer:
        whole = b""
        for part in answer.iter_raw():
            whole += part
            if whole.count(b": keep-alive\n\n") >= 2:
                gate.set()
    assert whole.replace(b": keep-alive\n\n", b"") == b"".join(events_of(answer_of("abc"), usage=False))
    assert gateway.trajectory(rollout)["completion"][0]["content"] == "abc"


def test_a_failure_after_a_keep_alive_is_an_event_of_the_stream(
    gateway_with: Callable[..., Any], model: Any, model_url: str
) -> None:
    gateway = gateway_with(upstream=model_url, keep_alive=0.02)
    rollout, gate = gateway.register(), threading.Event()

    def fail(_: object) -> Any:
        assert gate.wait(20)
        return {"no": "stream"}

    model.will(fail)
    body = {"messages": [{"role": "user", "content": "x"}], "stream": True}
    with gateway.stream("POST", f"/v1/rollouts/{rollout}/chat/completions", json=body) as answer:
        whole = b""
        for part in answer.iter_raw():
            whole += part
            gate.set()
    assert answer.status_code == 200
    assert b'"error"' in whole
    assert gateway.trajectory(rollout)["failed_calls"] == 1


def test_more_calls_of_a_rollout_than_may_wait_are_told_to_come_back(
    gateway: Any, model: Any, answer_of: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, shared: Any
) -> None:
    monkeypatch.setattr("workers.gateway.server.recorder.MAX_WAITING", 1)
    rollout, released = gateway.register(), threading.Event()
    model.will(lambda _: (released.wait(20), answer_of())[1])
    statuses: list[int] = []
    threads = [threading.Thread(target=lambda: statuses.append(gateway.chat(rollout).status_code)) for _ in range(2)]
    for n, thread in enumerate(threads):
        thread.start()
        lock = shared[2].app.state.recorder.get(rollout).lock
        wait_until(lambda n=n, lock=lock: lock.locked() and len(lock._waiters or ()) == n)
    answer = gateway.chat(rollout)
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
    released.set()
    for thread in threads:
        thread.join(20)
    assert statuses == [200, 200]


def test_a_slow_reader_slows_the_model_server_down_and_not_the_gateway(
    gateway: Any, model: Any, events_of: Callable[..., list[bytes]], answer_of: Callable[..., Any]
) -> None:
    """A stream of some megabytes whose reader does nothing for a while; other calls go on meanwhile."""
    rollout, sent = gateway.register(), threading.Event()
    event = b'data: {"choices": [{"index": 0, "delta": {"content": "%s"}}]}\n\n' % (b"x" * 50_000)
    model.will(lambda _: model.events([*[event] * 400, sent.set, *events_of(answer_of("end"), usage=False)]))
    body = {"messages": [{"role": "user", "content": "x"}], "stream": True}
    with gateway.stream("POST", f"/v1/rollouts/{rollout}/chat/completions", json=body) as answer:
        parts = answer.iter_raw()
        size = len(next(parts))
        assert gateway.chat(gateway.register()).status_code == 200
        assert not sent.wait(0.1)  # the kernel's buffers and the gateway's hold some of it, not all
        size += sum(map(len, parts))
    assert size > 400 * 50_000
    assert len(gateway.trajectory(rollout)["completion"][0]["content"]) == 400 * 50_000 + 3
