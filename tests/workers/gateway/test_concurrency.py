"""Calls of one rollout that meet each other, as ``wire/concurrency.json`` recorded them."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support import wait_until

RECORDED = json.loads((Path(__file__).parent / "wire" / "concurrency.json").read_text())


class Held:
    """An answer of the model server that waits until the test releases it."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer
        self.asked = threading.Event()
        self.released = threading.Event()

    def __call__(self, body: dict[str, Any]) -> Any:
        self.asked.set()
        assert self.released.wait(20)
        return self.answer


@pytest.fixture
def held(model: Any, answer_of: Callable[..., Any]) -> Any:
    one = Held(answer_of("late"))
    model.will(one)
    yield one
    one.released.set()


@pytest.fixture
def pool() -> Any:
    with ThreadPoolExecutor(4) as threads:
        yield threads


def waiting(shared: Any, rollout: str) -> int:
    """How many calls wait for the one in flight."""
    return len(shared[2].app.state.recorder.get(rollout).lock._waiters or ())


def test_calls_of_one_rollout_follow_each_other_and_a_trajectory_waits_for_them(
    gateway: Any, model: Any, held: Held, pool: ThreadPoolExecutor, shared: Any
) -> None:
    rollout = gateway.register()
    first: Future[Any] = pool.submit(gateway.chat, rollout, "one")
    assert held.asked.wait(20)
    second = pool.submit(gateway.chat, rollout, "two")
    wait_until(lambda: waiting(shared, rollout) == 1)
    trajectory = pool.submit(gateway.trajectory, rollout)
    wait_until(lambda: waiting(shared, rollout) == 2)
    assert len(model.requests) == 1
    held.released.set()
    assert (first.result(20).status_code, second.result(20).status_code) == (200, 200)
    assert trajectory.result(20)["num_turns"] == RECORDED["two_chats"]["trajectory_num_turns_seen"]
    assert model.most_running == 1


def test_calls_of_different_rollouts_do_not_wait_for_each_other(
    gateway: Any, held: Held, pool: ThreadPoolExecutor
) -> None:
    first = pool.submit(gateway.chat, gateway.register())
    assert held.asked.wait(20)
    assert gateway.chat(gateway.register()).status_code == 200
    held.released.set()
    assert first.result(20).status_code == 200


def test_cancel_is_immediate_and_the_call_in_flight_ends_and_is_recorded(
    gateway: Any, held: Held, pool: ThreadPoolExecutor
) -> None:
    recorded = RECORDED["cancel_in_flight"]
    rollout = gateway.register("r-inflight")
    chat = pool.submit(gateway.chat, rollout)
    assert held.asked.wait(20)
    cancel = gateway.post(f"/v1/rollouts/{rollout}/cancel")
    assert (cancel.status_code, cancel.json()) == (recorded["cancel"]["status"], recorded["cancel"]["body"])
    assert not chat.done()
    held.released.set()
    assert chat.result(20).status_code == recorded["chat_status"]
    trajectory = gateway.trajectory(rollout)
    assert (trajectory["num_turns"], trajectory["status"]) == (recorded["num_turns"], recorded["status"])


def test_a_call_that_waited_while_its_rollout_was_cancelled_is_409(
    gateway: Any, model: Any, held: Held, pool: ThreadPoolExecutor, shared: Any
) -> None:
    rollout = gateway.register()
    first = pool.submit(gateway.chat, rollout)
    assert held.asked.wait(20)
    second = pool.submit(gateway.chat, rollout)
    wait_until(lambda: waiting(shared, rollout) == 1)
    gateway.post(f"/v1/rollouts/{rollout}/cancel")
    held.released.set()
    assert (first.result(20).status_code, second.result(20).status_code) == (200, 409)
    assert len(model.requests) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_unregistering_ends_the_call_in_flight_with_404(
    gateway: Any, held: Held, pool: ThreadPoolExecutor, stream: bool
) -> None:
    # The followed gateway answers a plain 500 here, because it closes its client under the call.
    recorded = RECORDED["unregister_in_flight"]
    rollout = gateway.register("r-inflight2")
    chat = pool.submit(gateway.chat, rollout, stream=stream)
    assert held.asked.wait(20)
    unregister = gateway.post(f"/v1/rollouts/{rollout}/unregister")
    assert (unregister.status_code, unregister.json()) == (200, recorded["unregister"]["body"])
    answer = chat.result(20)  # although the model server still holds it
    assert (answer.status_code, answer.json()["detail"]) == (404, recorded["trajectory_after"]["body"]["detail"])
    after = gateway.get(f"/v1/rollouts/{rollout}/trajectory")
    assert (after.status_code, after.json()) == (404, recorded["trajectory_after"]["body"])


def test_a_trajectory_waits_no_longer_than_it_is_asked_to(gateway: Any, held: Held, pool: ThreadPoolExecutor) -> None:
    rollout = gateway.register()
    chat = pool.submit(gateway.chat, rollout)
    assert held.asked.wait(20)
    early = gateway.trajectory(rollout, wait="0.01")
    assert (early["num_turns"], early["in_flight"]) == (0, True)
    held.released.set()
    chat.result(20)
    late = gateway.trajectory(rollout, wait="20")
    assert (late["num_turns"], late["in_flight"]) == (1, False)


def send_chat(gateway: Any, rollout: str) -> socket.socket:
    """Send a chat request over a connection of its own, which the test may close at any time."""
    connection = socket.create_connection((gateway.base_url.host, gateway.base_url.port))
    body = b'{"messages": [{"role": "user", "content": "x"}]}'
    head = f"POST /v1/rollouts/{rollout}/chat/completions HTTP/1.1\r\nhost: g\r\ncontent-length: {len(body)}\r\n\r\n"
    connection.sendall(head.encode() + body)
    return connection


def test_an_agent_that_disconnects_in_mid_call_still_has_its_turn_recorded(gateway: Any, held: Held) -> None:
    rollout = gateway.register()
    connection = send_chat(gateway, rollout)
    assert held.asked.wait(20)
    connection.close()
    held.released.set()
    recorded = gateway.trajectory(rollout)
    assert recorded["num_turns"] == RECORDED["agent_disconnect"]["num_turns"]
    assert recorded["completion"][0]["content"] == "late"


def test_a_call_whose_agent_left_while_it_waited_is_not_made(
    gateway: Any, model: Any, held: Held, pool: ThreadPoolExecutor, shared: Any
) -> None:
    rollout = gateway.register()
    first = pool.submit(gateway.chat, rollout)
    assert held.asked.wait(20)
    abandoned = send_chat(gateway, rollout)
    wait_until(lambda: waiting(shared, rollout) == 1)
    connections, client = shared[2].server.server_state.connections, abandoned.getsockname()
    assert any(each.client == client for each in list(connections))
    abandoned.close()
    wait_until(lambda: all(each.client != client for each in list(connections)), what="the gateway to see the close")
    held.released.set()
    assert first.result(20).status_code == 200
    assert gateway.trajectory(rollout)["num_turns"] == 1
    assert len(model.requests) == 1
