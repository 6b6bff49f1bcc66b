"""How far a rollout has come: asked of the bundled gateway, and of those that cannot tell."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from starlette.responses import Response
from support import wait_until

from workers.errors import GatewayError
from workers.gateway.client import HttpGateway
from workers.gateway.protocol import Progress, RolloutStatus

NONE_YET = {
    "status": "active",
    "turns": 0,
    "failed_calls": 0,
    "in_flight": False,
    "idle_seconds": None,
    "prompt_tokens": 0,
    "completion_tokens": 0,
}


def progress(gateway: Any, rollout_id: str) -> dict[str, Any]:
    answer = gateway.get(f"/v1/rollouts/{rollout_id}/progress")
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


def test_turns_failures_and_tokens_are_counted(gateway: Any, model: Any, answer_of: Callable[..., Any]) -> None:
    rollout_id = gateway.register()
    assert progress(gateway, rollout_id) == NONE_YET | {"rollout_id": rollout_id}
    model.will(answer_of("four", prompt=10), answer_of("sixsix", prompt=20), Response(status_code=500))
    gateway.chat(rollout_id)
    gateway.chat(rollout_id, stream=True)
    gateway.chat(rollout_id)

    told = progress(gateway, rollout_id)
    assert 0 <= told.pop("idle_seconds") < 20
    counted = {"turns": 2, "failed_calls": 1, "prompt_tokens": 30, "completion_tokens": 10}
    assert told == {name: value for name, value in (NONE_YET | counted).items() if name != "idle_seconds"} | {
        "rollout_id": rollout_id
    }


@pytest.mark.parametrize(
    ("usage", "counted"),
    [
        ({"prompt_tokens": 7, "completion_tokens": 2}, (7, 2)),
        (None, (3, 5)),  # the ids of `answer_of`
        ({"prompt_tokens": "many", "completion_tokens": -1}, (3, 5)),
        ([], (3, 5)),
    ],
)
def test_tokens_are_those_of_the_models_server_else_of_the_ids(
    gateway: Any, model: Any, answer_of: Callable[..., Any], usage: Any, counted: tuple[int, int]
) -> None:
    rollout_id = gateway.register()
    model.will(answer_of("hello") | {"usage": usage})
    gateway.chat(rollout_id)
    told = progress(gateway, rollout_id)
    assert (told["prompt_tokens"], told["completion_tokens"]) == counted


def test_it_is_answered_while_a_call_is_in_flight(gateway: Any, model: Any, answer_of: Callable[..., Any]) -> None:
    rollout_id = gateway.register()
    go_on = threading.Event()

    def answer(body: Any) -> Any:
        go_on.wait(20)
        return answer_of()

    model.will(answer)
    with ThreadPoolExecutor(1) as agent:
        calling = agent.submit(gateway.chat, rollout_id)
        try:
            wait_until(lambda: progress(gateway, rollout_id)["in_flight"], what="the call")
        finally:
            go_on.set()
        assert calling.result().status_code == 200
    told = progress(gateway, rollout_id)
    assert (told["in_flight"], told["turns"]) == (False, 1)


def test_it_wants_the_control_key_and_a_rollout_that_is_there(gateway_with: Callable[..., Any], model_url: str) -> None:
    gateway = gateway_with(upstream=model_url, control_key="ctl")
    gateway.headers["authorization"] = "Bearer ctl"
    rollout_id = gateway.register(key="agents")
    assert progress(gateway, rollout_id)["turns"] == 0
    assert gateway.get("/v1/rollouts/unknown/progress").status_code == 404
    gateway.headers["authorization"] = "Bearer agents"
    assert gateway.get(f"/v1/rollouts/{rollout_id}/progress").status_code == 401
    del gateway.headers["authorization"]
    assert gateway.get(f"/v1/rollouts/{rollout_id}/progress").status_code == 401


# -- the client --------------------------------------------------------------------------------------------------------

TOLD = {"rollout_id": "r-1", "status": "active", "turns": 3, "prompt_tokens": 9, "idle_seconds": 1.5, "new": "field"}
STEP = {"tokens": {"prompt_ids": [1, 2, 3], "completion_ids": [4, 5]}}
TRAJECTORY = {"rollout_id": "r-1", "status": "cancelled", "num_turns": 2, "trajectory": [STEP, {"tokens": None}]}


async def ask(client: HttpGateway, url: str, _: Any) -> Progress:
    return await client.progress(url, "r-1")


def test_the_client_asks_for_progress_alone(against: Any) -> None:
    told, scripted = against([(200, TOLD)], ask)
    assert (told.turns, told.prompt_tokens, told.idle_seconds, told.in_flight) == (3, 9, 1.5, False)
    assert scripted.calls == ["GET progress"]


@pytest.mark.parametrize(
    "answer", [(404, {"detail": "Not Found"}), (405, b""), (200, b"<html>"), (200, {})], ids=lambda a: str(a[0])
)
def test_a_gateway_without_progress_is_asked_for_the_trajectory(against: Any, answer: Any) -> None:
    told, scripted = against([answer, (200, TRAJECTORY)], ask)
    assert scripted.calls == ["GET progress", "GET trajectory"]
    assert told == Progress(
        rollout_id="r-1", status=RolloutStatus.CANCELLED, turns=2, prompt_tokens=3, completion_tokens=2
    )


def test_a_rollout_that_the_gateway_does_not_know_has_no_progress(failing: Any) -> None:
    error, scripted = failing([(404, {"detail": "Rollout not found: r-1"})] * 2, ask)
    assert isinstance(error, GatewayError)
    assert "does not know" in str(error)
    assert scripted.calls == ["GET progress", "GET trajectory"]


def test_a_refused_key_is_no_missing_path(failing: Any) -> None:
    error, scripted = failing([(401, {"detail": "no"})], ask)
    assert "ROLLOUTS_GATEWAY_CONTROL_KEY" in str(error)
    assert scripted.calls == ["GET progress"]
