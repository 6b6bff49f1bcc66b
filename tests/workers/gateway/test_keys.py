"""Who may call what: an agent its own rollout's model, a worker with the control key the rest."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import Any

import orjson
import pytest

from workers.gateway.server import create_app
from workers.gateway.server.dialects.table import CHAT

CONTROL = [
    *(("POST", route) for route in ("register", "cancel", "unregister")),
    *(("GET", route) for route in ("trajectory", "trajectory?format=compact", "progress")),
]
AGENT = [("POST", "chat/completions"), ("GET", "models"), ("GET", "v1/models")]
WRONG_HEADERS: dict[str, dict[str, str]] = {
    "none": {},
    "wrong": {"authorization": "Bearer wrong"},
    "prefix": {"authorization": "Bearer agent-ke"},
    "empty": {"authorization": "Bearer"},
    "basic": {"authorization": "Basic agent-key"},
    "not_ascii": {"authorization": "Bearer clé"},
}
BODY = {"model": "m", "messages": [{"role": "user", "content": "x"}]}


@pytest.fixture
def guarded(gateway_with: Callable[..., Any], model: Any, model_url: str) -> Iterator[Any]:
    """A gateway with a control key, on which ``r-keys`` is registered with the key ``agent-key``."""
    gateway = gateway_with(upstream=model_url, control_key="control-key")
    headers = {"authorization": "Bearer control-key", "x-rollout-key": "agent-key"}
    assert gateway.post("/v1/rollouts/r-keys/register", json={"model": "m"}, headers=headers).status_code == 200
    return gateway


def call(gateway: Any, method: str, route: str, headers: dict[str, str]) -> Any:
    encoded = {name: value.encode() for name, value in headers.items()}
    return gateway.request(method, f"/v1/rollouts/r-keys/{route}", json=BODY, headers=encoded)


def test_every_route_refuses_every_wrong_key(guarded: Any, model: Any) -> None:
    for method, route in CONTROL + AGENT:
        for headers in WRONG_HEADERS.values():
            answer = call(guarded, method, route, headers)
            assert answer.status_code == 401, (route, headers)
            assert answer.json()["error"]["code"] == "invalid_api_key"
    assert model.requests == []


def test_the_routes_of_these_tests_are_all_there_are(shared: Any) -> None:
    app = shared[2].app
    routes = {*app._calls, *app._sides, *app._control, "models", "v1/models"}
    assert routes - {path for path in app._calls | app._sides if app._calls.get(path) is not CHAT} == {
        route.partition("?")[0] for _, route in CONTROL + AGENT
    }


def test_every_dialects_routes_want_the_rollouts_key(guarded: Any, shared: Any, model: Any) -> None:
    app = shared[2].app
    for route in [*app._calls, *app._sides]:
        for headers in [*WRONG_HEADERS.values(), {"authorization": "Bearer control-key"}, {"x-api-key": "wrong"}]:
            assert call(guarded, "POST", route, headers).status_code == 401, (route, headers)
    assert model.requests == []


def test_an_agents_key_opens_its_model_and_nothing_else(guarded: Any) -> None:
    for headers in ({"authorization": "Bearer agent-key"}, {"x-api-key": "agent-key"}):
        for method, route in AGENT:
            assert call(guarded, method, route, headers).status_code == 200
        for method, route in CONTROL:
            assert call(guarded, method, route, headers).status_code == 401


def test_the_control_key_opens_control_and_no_model(guarded: Any) -> None:
    headers = {"authorization": "Bearer control-key"}
    for method, route in AGENT:
        assert call(guarded, method, route, headers).status_code == 401
    statuses = [call(guarded, method, route, headers).status_code for method, route in reversed(CONTROL)]
    assert statuses == [200, 200, 200, 200, 404, 200]  # three of GET, unregister, cancel of a forgotten one, register


def test_one_rollouts_key_does_not_open_another(gateway: Any) -> None:
    first, second = gateway.register(key="key-1"), gateway.register(key="key-2")
    answer = gateway.post(
        f"/v1/rollouts/{second}/chat/completions", json=BODY, headers={"authorization": "Bearer key-1"}
    )
    assert answer.status_code == 401
    assert gateway.get(f"/v1/rollouts/{first}/models", headers={"authorization": "Bearer key-1"}).status_code == 200


def test_a_rollout_registered_without_a_key_takes_any(gateway: Any) -> None:
    rollout = gateway.register()
    assert gateway.get(f"/v1/rollouts/{rollout}/models").status_code == 200
    headers = {"authorization": "Bearer EMPTY"}
    assert gateway.get(f"/v1/rollouts/{rollout}/models", headers=headers).status_code == 200


def test_the_gateway_keeps_no_key_in_the_clear(gateway: Any, shared: Any) -> None:
    rollout = gateway.register(key="very-secret-key")
    kept = shared[2].app.state.recorder.get(rollout)
    assert "very-secret-key" not in repr(vars(kept))
    assert b"very-secret-key" not in repr(vars(kept)).encode()


def test_health_needs_no_key_and_tells_the_loops_lag(guarded: Any) -> None:
    answer = guarded.get("/healthz")
    assert answer.status_code == 200
    assert answer.json()["rollouts"] == 1
    assert answer.json()["loop_lag"] >= 0


def test_the_lag_is_what_the_loops_queue_took(model_url: str) -> None:
    async def body() -> float:
        said: list[Any] = []

        async def send(message: Any) -> None:
            said.append(message)

        scope = {"type": "http", "method": "GET", "path": "/healthz", "headers": [], "query_string": b""}
        asked = asyncio.ensure_future(create_app(upstream=model_url)(scope, asyncio.Event().wait, send))
        asyncio.get_running_loop().call_soon(time.sleep, 0.05)  # after it asked, and before it goes on
        await asked
        lag: float = orjson.loads(said[1]["body"])["loop_lag"]
        return lag

    assert asyncio.run(body()) >= 0.04


def test_models_lists_the_registered_model_alone(gateway: Any) -> None:
    rollout = gateway.register(model="my/model", max_seq_len=4096)
    listed = gateway.get(f"/v1/rollouts/{rollout}/models").json()["data"]
    assert [(entry["id"], entry["max_model_len"]) for entry in listed] == [("my/model", 4096)]


@pytest.mark.parametrize("rollout_id", ["a%2Fb", "..%2Fx", ".hidden", "a%20b", "a%0A", "x" * 161, "%00"])
def test_an_odd_id_is_404_on_every_route(gateway: Any, rollout_id: str) -> None:
    for method, route in CONTROL + AGENT:
        answer = gateway.request(method, f"/v1/rollouts/{rollout_id}/{route}", json=BODY)
        assert answer.status_code == 404, route


def test_a_later_attempts_id_of_the_longest_rollout_id_is_accepted(gateway: Any) -> None:
    gateway.register(rollout_id=f"{'x' * 128}.12")
