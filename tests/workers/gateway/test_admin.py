"""What the trainer and operators ask, from where they may ask it, and what is forgotten by itself."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from support import wait_until

from workers.gateway.server.admin import is_inner_host

ADMIN = [("POST", "pause"), ("POST", "resume"), ("GET", "status")]


@pytest.fixture
def paused(gateway: Any) -> Iterator[Any]:
    """The shared gateway, paused; it goes on when the test ends."""
    assert gateway.post("/admin/pause").json()["paused"] is True
    yield gateway
    gateway.post("/admin/resume")


@pytest.mark.parametrize("stream", [False, True])
def test_calls_are_held_while_the_weights_change_and_their_steps_name_the_version(
    paused: Any, model: Any, shared: Any, stream: bool
) -> None:
    rollout = paused.register()
    with ThreadPoolExecutor(1) as pool:
        chat = pool.submit(paused.chat, rollout, stream=stream)
        wait_until(shared[2].app.state.recorder.get(rollout).lock.locked, what="the call to be held")
        assert model.requests == []
        resumed = paused.post("/admin/resume", json={"policy_version": "step-7"}).json()
        assert (resumed["paused"], resumed["policy_version"]) == (False, "step-7")
        assert chat.result(20).status_code == 200
    assert paused.trajectory(rollout)["trajectory"][0]["extras"] == {"policy_version": "step-7"}
    shared[2].app.state.gate.version = None


@pytest.mark.parametrize("stream", [False, True])
def test_a_held_call_of_a_rollout_that_is_cancelled_is_not_made(
    paused: Any, model: Any, shared: Any, stream: bool
) -> None:
    """After an update of the weights those that are too old are cancelled: their calls would be spent on nobody."""
    rollout = paused.register()
    with ThreadPoolExecutor(1) as pool:
        chat = pool.submit(paused.chat, rollout, stream=stream)
        wait_until(shared[2].app.state.recorder.get(rollout).lock.locked, what="the call to be held")
        paused.post(f"/v1/rollouts/{rollout}/cancel")
        paused.post("/admin/resume")
        answer = chat.result(20)
    assert (answer.status_code, answer.headers["x-should-retry"]) == (409, "false")
    assert model.requests == []
    assert paused.trajectory(rollout)["failed_calls"] == 0


def test_a_call_under_which_the_weights_changed_names_both_versions(
    gateway: Any, model: Any, answer_of: Callable[..., Any], shared: Any
) -> None:
    gateway.post("/admin/resume", json={"policy_version": 1})
    rollout, released = gateway.register(), threading.Event()
    model.will(lambda _: (released.wait(20), answer_of())[1])
    with ThreadPoolExecutor(1) as pool:
        chat = pool.submit(gateway.chat, rollout)
        wait_until(lambda: model.running == 1)
        assert gateway.post("/admin/pause", params={"drain": "0.01"}).json()["in_flight"] == 1
        gateway.post("/admin/resume", json={"policy_version": 2})
        released.set()
        assert chat.result(20).status_code == 200
    extras = gateway.trajectory(rollout)["trajectory"][0]["extras"]
    assert extras == {"policy_version": 1, "policy_version_at_end": 2}
    shared[2].app.state.gate.version = None


def test_pausing_can_wait_for_the_calls_that_run(gateway: Any, model: Any, answer_of: Callable[..., Any]) -> None:
    released = threading.Event()
    model.will(lambda _: (released.wait(20), answer_of())[1])
    with ThreadPoolExecutor(2) as pool:
        chat = pool.submit(gateway.chat, gateway.register())
        wait_until(lambda: model.running == 1)
        pause = pool.submit(gateway.post, "/admin/pause", params={"drain": "20"})
        released.set()
        assert pause.result(20).json()["in_flight"] == 0
        assert chat.result(20).status_code == 200
    gateway.post("/admin/resume")


def test_a_pause_that_is_never_ended_is_a_typed_failure(
    gateway_with: Callable[..., Any], model: Any, model_url: str
) -> None:
    gateway = gateway_with(upstream=model_url, pause_limit=0.05)
    gateway.post("/admin/pause")
    for stream in (False, True):
        answer = gateway.chat(gateway.register(), stream=stream)
        assert (answer.status_code, answer.json()["error"]["type"]) == (503, "gateway_paused")
    assert model.requests == []


@pytest.mark.parametrize("body", [b"[]", b'{"policy_version": []}', b'{"policy_version": true}', b"{"])
def test_a_version_that_is_none_is_refused(gateway: Any, body: bytes) -> None:
    assert gateway.post("/admin/resume", content=body).status_code == 422


@pytest.mark.parametrize("drain", ["x", "nan", "-1", "1e999"])
def test_an_odd_drain_does_not_hang(gateway: Any, drain: str) -> None:
    assert gateway.post("/admin/pause", params={"drain": drain}).status_code in {200, 400}
    gateway.post("/admin/resume")


def test_admin_wants_the_control_key(gateway_with: Callable[..., Any], model_url: str) -> None:
    gateway = gateway_with(upstream=model_url, control_key="control-key")
    gateway.post(
        "/v1/rollouts/r/register",
        json={"model": "m"},
        headers={"authorization": "Bearer control-key", "x-rollout-key": "agent-key"},
    )
    for method, route in ADMIN:
        for headers in ({}, {"authorization": "Bearer agent-key"}, {"authorization": "Bearer control-ke"}):
            assert gateway.request(method, f"/admin/{route}", headers=headers).status_code == 401
        headers = {"authorization": "Bearer control-key"}
        assert gateway.request(method, f"/admin/{route}", headers=headers).status_code == 200


def test_admin_and_metrics_are_not_there_under_a_tunnels_host_name(gateway: Any) -> None:
    for host in ("t-1234.tunnel.example.com", "T-1.EXAMPLE.COM:443", "gateway.example.com:8080", ""):
        for method, path in [*((method, f"/admin/{route}") for method, route in ADMIN), ("GET", "/metrics")]:
            answer = gateway.request(method, path, headers={"host": host})
            assert answer.status_code == 404, (host, path)
        assert gateway.get("/healthz", headers={"host": host}).status_code == 200


def test_a_second_host_name_does_not_open_what_the_first_may_not(gateway: Any) -> None:
    for hosts in (["127.0.0.1", "t-1.example.com"], ["t-1.example.com", "127.0.0.1"]):
        with socket.create_connection((gateway.base_url.host, gateway.base_url.port), timeout=20) as made:
            lines = "".join(f"host: {host}\r\n" for host in hosts)
            made.sendall(f"GET /metrics HTTP/1.1\r\n{lines}\r\n".encode())
            assert made.recv(65536).startswith(b"HTTP/1.1 404"), hosts


@pytest.mark.parametrize(
    ("host", "inner"),
    [
        ("127.0.0.1:8080", True),
        ("[::1]:8080", True),
        ("10.1.2.3", True),
        ("localhost:1", True),
        ("gateway:8080", True),
        ("gateway.fleet.svc.cluster.local:8080", True),
        ("named.example.com:8080", True),
        ("other.example.com", False),
        ("svc.example.com", False),
        ("127.0.0.1.example.com", False),
        ("", False),
        (None, False),
    ],
)
def test_which_hosts_no_tunnel_has(host: str | None, inner: bool) -> None:
    assert is_inner_host(host, frozenset({"named.example.com"})) is inner


def test_a_registration_that_nobody_asks_for_is_forgotten(gateway: Any, shared: Any) -> None:
    recorder = shared[2].app.state.recorder
    short, long = gateway.register(ttl=0.01), gateway.register(ttl=1000)
    wait_until(lambda: recorder.find(short) is None, what="the registration to be forgotten")
    assert gateway.chat(short).status_code == 404
    assert gateway.chat(long).status_code == 200


def test_a_call_keeps_its_registration(gateway: Any, model: Any, answer_of: Callable[..., Any], shared: Any) -> None:
    rollout, released = gateway.register(ttl=1000), threading.Event()
    model.will(lambda _: (released.wait(20), answer_of())[1])
    with ThreadPoolExecutor(1) as pool:
        chat = pool.submit(gateway.chat, rollout)
        wait_until(lambda: model.running == 1)
        recorder = shared[2].app.state.recorder
        recorder.find(rollout).ttl = 0.0
        assert rollout not in recorder.forget_expired()
        assert recorder.find(rollout) is not None
        released.set()
        assert chat.result(20).status_code == 200


@pytest.mark.parametrize("ttl", [0, -1, "1", True])
def test_an_odd_ttl_is_refused(gateway: Any, ttl: Any) -> None:
    assert gateway.post("/v1/rollouts/r-ttl/register", json={"model": "m", "ttl": ttl}).status_code == 422


def test_metrics_count_calls_tokens_and_times(
    gateway_with: Callable[..., Any], model: Any, model_url: str, answer_of: Callable[..., Any]
) -> None:
    gateway = gateway_with(upstream=model_url)
    rollout = gateway.register()
    gateway.chat(rollout)
    gateway.chat(rollout, stream=True)
    model.will({"no": "completion"})
    gateway.chat(rollout)
    lines = gateway.get("/metrics").text.splitlines()
    name = "rollouts_gateway"
    assert f'{name}_calls_total{{dialect="chat",outcome="answered"}} 2.0' in lines
    assert f'{name}_calls_total{{dialect="chat",outcome="upstream_malformed"}} 1.0' in lines
    assert f'{name}_tokens_total{{kind="completion"}} 10.0' in lines
    assert f"{name}_call_seconds_count 2.0" in lines
    assert f"{name}_first_byte_seconds_count 1.0" in lines
    assert f"{name}_rollouts 1.0" in lines
    assert f'{name}_upstream_up{{upstream="{model_url}/v1"}} 1.0' in lines


def test_every_answer_names_its_instance(gateway_with: Callable[..., Any], model_url: str) -> None:
    gateway = gateway_with(upstream=model_url, instance="gw-7")
    assert gateway.get("/healthz").json()["instance"] == "gw-7"
    for answer in (gateway.get("/nothing"), gateway.chat(gateway.register()), gateway.chat("unknown")):
        assert answer.headers["x-gateway-instance"] == "gw-7"
