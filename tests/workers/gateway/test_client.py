"""`HttpGateway`: the recorded shapes on the wire, what is retried, and what errors say."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import orjson
import pytest
from support import counted, free_port

from producer.contract import ErrorKind
from workers.errors import GatewayError
from workers.gateway.client import HttpGateway
from workers.gateway.protocol import Registration
from workers.instruments import GATEWAY_REQUESTS, NO_ANSWER

WIRE = Path(__file__).parent / "wire"
REGISTRATION = Registration(model="m")


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(work, 60))


async def hold(client: HttpGateway, url: str, _: Any) -> None:
    async with client.registered(url, "r-1", REGISTRATION, api_key="agent-key"):
        pass


# the recorded shapes


#: What our gateway's trajectories tell beside the protocol's fields, where there is nothing to tell.
OURS = {"failures": [], "failed_calls": 0, "in_flight": False, "idle_seconds": None, "integrity": {}}


def exchange(name: str) -> Any:
    return json.loads((WIRE / f"{name}.json").read_text())


def test_the_client_sends_the_recorded_requests_and_reads_the_recorded_answers(against: Callable[..., Any]) -> None:
    names = ["register_ok", "trajectory_3_turns", "cancel_ok", "unregister_cancelled"]
    recorded = [exchange(name) for name in names]
    registration = Registration(**recorded[0]["request"]["body"])

    async def act(client: HttpGateway, url: str, _: Any) -> Any:
        async with client.registered(f"{url}/v1/", "rollout_aaaa0001", registration, api_key="agent-key"):
            trajectory = await client.fetch_trajectory(url, "rollout_aaaa0001")
            await client.cancel(url, "rollout_aaaa0001")
        return trajectory

    trajectory, scripted = against([(e["response"]["status"], e["response"]["body"]) for e in recorded], act)

    for (method, path, headers, body), entry in zip(scripted.requests, recorded, strict=True):
        request = entry["request"]
        assert method == request["method"]
        assert path.partition("?")[0] == request["path"]  # ours bounds the trajectory's wait by a query
        assert body == (b"" if request["body"] is None else orjson.dumps(request["body"]))
        assert "authorization" not in headers
    assert scripted.requests[0][2]["x-rollout-key"] == "agent-key"
    assert all("x-rollout-key" not in headers for _, _, headers, _ in scripted.requests[1:])
    expected = recorded[1]["response"]["body"]
    assert trajectory.model_dump(mode="json") == expected | OURS


CALLS = [
    (entry["name"], call, entry["status"])
    for entry in json.loads((WIRE / "index.json").read_text())
    if (call := entry["path"].rpartition("/")[2]) in {"register", "trajectory", "cancel", "unregister"}
]


def replay(against: Callable[..., Any], name: str, call: str, status: int) -> tuple[Any, Any]:
    """Have the client meet one recorded answer; returns what it made of it, and the recorded body."""
    recorded = exchange(name)["response"]["body"]
    ok = (200, {"rollout_id": "r-1", "status": "ok"})

    async def act(client: HttpGateway, url: str, _: Any) -> Any:
        async with client.registered(url, "r-1", REGISTRATION, api_key="k"):
            if call == "trajectory":
                return await client.fetch_trajectory(url, "r-1")
            if call == "cancel":
                await client.cancel(url, "r-1")
        return None

    first = [] if call == "register" else [ok]
    return against([*first, (status, recorded), *[ok] * 3], act)[0], recorded


GONE = {"cancel", "unregister"}  #: what these are told of is over already: no error


@pytest.mark.parametrize("recorded", [c for c in CALLS if c[2] == 200 or c[1] in GONE], ids=lambda c: c[0])
def test_each_recorded_success_is_read(against: Callable[..., Any], recorded: tuple[str, str, int]) -> None:
    read, body = replay(against, *recorded)
    if recorded[1] == "trajectory":
        assert read.model_dump(mode="json") == body | OURS


@pytest.mark.parametrize("recorded", [c for c in CALLS if c[2] != 200 and c[1] not in GONE], ids=lambda c: c[0])
def test_each_recorded_refusal_is_an_error_with_the_gateways_own_words(
    against: Callable[..., Any], recorded: tuple[str, str, int]
) -> None:
    with pytest.raises(GatewayError, match="the rollout gateway") as raised:
        replay(against, *recorded)
    detail = exchange(recorded[0])["response"]["body"]["detail"]
    said = detail if isinstance(detail, str) else detail[0]["msg"]
    assert said in f"{raised.value} {raised.value.detail}"


def test_one_rollouts_calls_come_in_the_recorded_order(against: Callable[..., Any]) -> None:
    recorded = [call for call in exchange("trace_one_rollout")["calls"] if call["src"] == "gateway"]

    async def act(client: HttpGateway, url: str, _: Any) -> None:
        async with client.registered(url, "r-1", Registration(**recorded[0]["request"]), api_key="k"):
            await client.fetch_trajectory(url, "r-1")

    good = (200, exchange("trajectory_before_any_chat")["response"]["body"])
    _, scripted = against([(200, {}), good], act)
    assert scripted.calls == [f"{call['m']} {call['p'].rpartition('/')[2]}" for call in recorded]
    assert orjson.loads(scripted.requests[0][3]) == recorded[0]["request"]


def test_the_control_key_is_sent_with_every_call_and_shown_nowhere(against: Callable[..., Any]) -> None:
    async def act(client: HttpGateway, url: str, _: Any) -> str:
        await hold(client, url, _)
        await client.cancel(url, "r-1")
        return repr(client)

    shown, scripted = against([], act, control_key="control-key")
    assert {headers["authorization"] for _, _, headers, _ in scripted.requests} == {"Bearer control-key"}
    assert "control-key" not in shown


def test_calls_reuse_their_connection(against: Callable[..., Any]) -> None:
    async def act(client: HttpGateway, url: str, scripted: Any) -> int:
        for _ in range(5):
            await hold(client, url, scripted)
        return scripted.connections

    assert against([], act)[0] == 1


# retries

TRAJECTORY = {"rollout_id": "r-1", "status": "active", "num_turns": 0}


async def fetch(client: HttpGateway, url: str, _: Any) -> Any:
    return await client.fetch_trajectory(url, "r-1")


async def cancel(client: HttpGateway, url: str, _: Any) -> None:
    await client.cancel(url, "r-1")


async def unregister(client: HttpGateway, url: str, _: Any) -> None:
    await client.unregister(url, "r-1")


@pytest.mark.parametrize("act", [fetch, cancel, unregister])
def test_idempotent_calls_survive_three_failures(act: Any, against: Callable[..., Any]) -> None:
    before = [counted(GATEWAY_REQUESTS, status=status) for status in (NO_ANSWER, "503", "502", "200")]
    _, scripted = against(["drop", (503, b""), (502, b""), (200, TRAJECTORY)], act)
    assert len(scripted.requests) == 4
    after = [counted(GATEWAY_REQUESTS, status=status) for status in (NO_ANSWER, "503", "502", "200")]
    # aiohttp itself sends a read that was dropped once more.
    assert [now - then for now, then in zip(after, before, strict=True)] == [act is not fetch, 1, 1, 1]


@pytest.mark.parametrize("act", [fetch, cancel, unregister])
def test_idempotent_calls_fail_after_the_fourth_failure(act: Any, failing: Callable[..., Any]) -> None:
    drops = 6 if act is fetch else 3  # aiohttp itself sends a read that was dropped once more
    error, scripted = failing(["drop"] * drops + [(504, b"busy")], act)
    assert len(scripted.requests) == drops + 1
    assert (error.retryable, error.detail) == (True, "HTTP 504: busy")


def test_a_connection_that_the_server_closed_while_it_idled_is_no_failure(against: Callable[..., Any]) -> None:
    async def act(client: HttpGateway, url: str, scripted: Any) -> Any:
        await client.cancel(url, "r-1")
        scripted.script = ["drop", (200, TRAJECTORY)]
        return await client.fetch_trajectory(url, "r-1")

    trajectory, scripted = against([], act)
    assert trajectory.num_turns == 0
    assert scripted.connections == 2


@pytest.mark.parametrize("status", [400, 401, 404, 409, 422, 500])
def test_answers_that_would_come_again_are_not_retried(status: int, failing: Callable[..., Any]) -> None:
    _, scripted = failing([(status, {"detail": "no"})], fetch)
    assert len(scripted.requests) == 1


@pytest.mark.parametrize("act", [cancel, unregister])
def test_a_forgotten_rollout_is_a_success(act: Any, against: Callable[..., Any]) -> None:
    _, scripted = against([(404, {"detail": "Rollout not found: r-1"})], act)
    assert len(scripted.requests) == 1


# what errors say


@pytest.mark.parametrize(
    ("status", "retryable", "words"),
    [
        (401, False, "ROLLOUTS_GATEWAY_CONTROL_KEY"),
        (403, False, "ROLLOUTS_GATEWAY_CONTROL_KEY"),
        (404, False, "no rollout gateway"),
        (409, True, "left over from a dead worker"),
        (413, False, "too large"),
        (422, False, "422"),
        (429, True, "429"),
        (500, True, "500"),
        (503, True, "switched off"),
    ],
)
def test_every_status_says_what_to_do_and_whether_to_retry(
    status: int, retryable: bool, words: str, failing: Callable[..., Any]
) -> None:
    error, _ = failing([(status, {"detail": "the reason"})])
    assert error.retryable is retryable
    assert words in error.message
    assert error.detail == f'HTTP {status}: {{"detail":"the reason"}}'
    assert error.info().kind is ErrorKind.GATEWAY


def test_a_trajectory_of_a_restarted_gateway_can_be_retried_by_another_attempt(failing: Callable[..., Any]) -> None:
    error, _ = failing([(404, {"detail": "Rollout not found: r-1"})], fetch)
    assert error.retryable
    assert "restarted" in error.message


def test_an_unreachable_gateway_names_its_address_and_the_setting(failing: Callable[..., Any]) -> None:
    url = f"http://127.0.0.1:{free_port()}"

    async def act(client: HttpGateway, _: str, __: Any) -> None:
        await client.fetch_trajectory(url, "r-1")

    error, _ = failing([], act)
    assert error.retryable
    assert url in error.message
    assert "ROLLOUTS_GATEWAY_URL" in error.message


@pytest.mark.parametrize("body", [b"<html>", b"[]", b'{"rollout_id": "r-1"}'])
def test_an_answer_that_is_no_trajectory_is_an_error(body: bytes, failing: Callable[..., Any]) -> None:
    error, _ = failing([(200, body)], fetch)
    assert not error.retryable
    assert "is this the address of a rollout gateway?" in error.message


def test_details_keep_the_head_of_a_long_body(failing: Callable[..., Any]) -> None:
    error, _ = failing([(500, b"x" * 100_000)])
    assert error.detail is not None
    assert len(error.detail) == 500
