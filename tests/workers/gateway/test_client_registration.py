"""Holding a registration with `HttpGateway`: whatever happens, none is left over."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import pytest
from support import free_port

from producer.contract import Phase
from workers.gateway.client import HttpGateway
from workers.gateway.protocol import Registration, RolloutStatus
from workers.gateway.server import create_app

WIRE = Path(__file__).parent / "wire"
REGISTRATION = Registration(model="m")


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(work, 60))


async def hold(client: HttpGateway, url: str, _: Any) -> None:
    async with client.registered(url, "r-1", REGISTRATION, api_key="agent-key"):
        pass


# against the real server


def real(serve: Callable[[Any], Any], model_url: str, act: Callable[[HttpGateway, str, Any], Awaitable[Any]]) -> Any:
    app = create_app(upstream=model_url, control_key="control-key")
    url = serve(app).url

    async def body() -> Any:
        client = HttpGateway(control_key="control-key", retry_delay=0.001, cleanup_timeout=50)
        try:
            return await act(client, url, app)
        finally:
            await client.aclose()

    return run(body())


def test_the_gateways_line_about_a_failed_call_names_rollout_attempt_and_worker(
    serve: Callable[[Any], Any], caplog: pytest.LogCaptureFixture
) -> None:
    async def body(url: str) -> None:
        client = HttpGateway(control_key="control-key", worker="w1@a")
        async with client.registered(url, "r-line~2", REGISTRATION, api_key="k"), aiohttp.ClientSession() as agent:
            call = {"messages": [{"role": "user", "content": "hi"}]}
            where = f"{url}/v1/rollouts/r-line~2/chat/completions"
            async with agent.post(where, json=call, headers={"authorization": "Bearer k"}) as answer:
                assert answer.status == 502
        await client.aclose()

    url = serve(create_app(upstream=f"http://127.0.0.1:{free_port()}", control_key="control-key")).url
    with caplog.at_level(logging.WARNING):
        run(body(url))
    (line,) = [record for record in caplog.records if "model call of rollout r-line~2" in record.message]
    about = line.rollout_id, line.attempt, line.worker, line.stage  # type: ignore[attr-defined]
    assert about == ("r-line", 2, "w1@a", "model_call")


def test_a_whole_rollout_on_the_real_server(serve: Callable[[Any], Any], model: Any, model_url: str) -> None:
    async def act(client: HttpGateway, url: str, app: Any) -> Any:
        async with client.registered(url, "r-1", Registration(model="m", max_turns=1), api_key="agent-key"):
            async with httpx.AsyncClient(headers={"authorization": "Bearer agent-key"}, timeout=20) as agent:
                body = {"messages": [{"role": "user", "content": "hi"}]}
                answer = await agent.post(f"{url}/v1/rollouts/r-1/chat/completions", json=body)
                assert answer.status_code == 200
            trajectory = await client.fetch_trajectory(url, "r-1")
            await client.cancel(url, "r-1")
            assert len(app.state.recorder) == 1
        await client.unregister(url, "r-1")
        await client.cancel(url, "r-1")
        assert len(app.state.recorder) == 0
        return trajectory

    trajectory = real(serve, model_url, act)
    assert (trajectory.status, trajectory.num_turns) == (RolloutStatus.COMPLETED, 1)
    assert trajectory.trajectory[0]["tokens"]["completion_ids"] == [ord(c) for c in "hello"]


def test_registrations_cancelled_at_any_moment_do_not_leak(
    serve: Callable[[Any], Any], model: Any, model_url: str
) -> None:
    async def one(client: HttpGateway, url: str, n: int) -> None:
        async with client.registered(url, f"r-{n}", REGISTRATION, api_key="k"):
            await asyncio.Event().wait()

    async def act(client: HttpGateway, url: str, app: Any) -> list[Any]:
        tasks = [asyncio.create_task(one(client, url, n)) for n in range(60)]
        for n, task in enumerate(tasks):  # some before they began, some on their way, some registered
            for _ in range(n % 7):
                await asyncio.sleep(0)
            task.cancel()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert len(app.state.recorder) == 0
        return outcomes

    assert all(isinstance(outcome, asyncio.CancelledError) for outcome in real(serve, model_url, act))


def test_more_calls_than_connections_wait_their_turn(
    serve: Callable[[Any], Any], model: Any, model_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.gateway.client.MAX_CONNECTIONS", 3)

    async def act(client: HttpGateway, url: str, app: Any) -> int:
        async def one(n: int) -> None:
            async with client.registered(url, f"r-{n}", REGISTRATION, api_key="k"):
                await client.cancel(url, f"r-{n}")

        await asyncio.gather(*(one(n) for n in range(30)))
        return len(app.state.recorder)

    assert real(serve, model_url, act) == 0


# registration


def test_cancelled_while_its_answer_is_awaited_a_registration_is_undone_after_it_came(
    against: Callable[..., Any],
) -> None:
    async def act(client: HttpGateway, url: str, scripted: Any) -> None:
        asked, answered = asyncio.Event(), asyncio.Event()

        async def slow() -> Any:
            asked.set()
            await answered.wait()
            return 200, {}

        scripted.script = [slow]
        task = asyncio.create_task(hold(client, url, scripted))
        await asked.wait()
        task.cancel()
        await asyncio.wait({task}, timeout=0.005)
        assert scripted.calls == ["POST register"]  # unregistering now could overtake it
        answered.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert scripted.calls == ["POST register", "POST unregister"]

    against([], act)


def test_a_release_survives_being_cancelled_again_and_again(against: Callable[..., Any]) -> None:
    async def act(client: HttpGateway, url: str, scripted: Any) -> None:
        entered, asked, answered = asyncio.Event(), asyncio.Event(), asyncio.Event()

        async def slow() -> Any:
            asked.set()
            await answered.wait()
            return 200, {}

        async def body() -> None:
            async with client.registered(url, "r-1", REGISTRATION, api_key="k"):
                entered.set()
                await asyncio.Event().wait()

        scripted.script = [(200, {}), slow]
        task = asyncio.create_task(body())
        await entered.wait()
        task.cancel()
        await asked.wait()
        task.cancel()
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.sleep(0)
        assert not task.done()
        answered.set()
        with pytest.raises(asyncio.CancelledError):
            await task

    _, scripted = against([], act)
    assert scripted.calls == ["POST register", "POST unregister"]


def test_a_dropped_registration_is_undone_and_made_again(against: Callable[..., Any]) -> None:
    _, scripted = against(["drop"], hold)
    assert scripted.calls == ["POST register", "POST unregister", "POST register", "POST unregister"]


def test_a_registration_that_is_dropped_twice_fails_and_is_undone(failing: Callable[..., Any]) -> None:
    error, scripted = failing(["drop", (404, {}), "drop"])
    assert scripted.calls == ["POST register", "POST unregister", "POST register", "POST unregister"]
    assert error.retryable


def test_a_lost_registration_that_arrives_late_counts_as_made(against: Callable[..., Any]) -> None:
    _, scripted = against(["drop", (404, {}), (409, {"detail": "already"})], hold)
    assert scripted.calls[-1] == "POST unregister"


@pytest.mark.parametrize("status", [409, 422, 401, 404])
def test_a_refused_registration_leaves_what_has_the_id_alone(status: int, failing: Callable[..., Any]) -> None:
    _, scripted = failing([(status, {"detail": "no"})])
    assert scripted.calls == ["POST register"]


@pytest.mark.parametrize("status", [500, 502])
def test_a_registration_that_failed_somehow_is_undone(status: int, failing: Callable[..., Any]) -> None:
    _, scripted = failing([(status, b"oops")])
    assert scripted.calls == ["POST register", "POST unregister"]


def test_a_registration_without_an_answer_is_undone_in_bounded_time(failing: Callable[..., Any]) -> None:
    async def never() -> Any:
        loop = asyncio.get_running_loop()
        clock = loop.time
        loop.time = lambda: clock() + 30  # type: ignore[method-assign]  # the time is up as soon as it was asked
        await asyncio.Event().wait()

    error, scripted = failing([never], timeout=30)
    assert "did not answer" in error.message
    assert scripted.calls == ["POST register", "POST unregister"]


def test_an_unregister_without_an_answer_is_given_up_in_bounded_time(failing: Callable[..., Any]) -> None:
    async def never() -> Any:
        await asyncio.Event().wait()

    error, _ = failing([(200, {}), never], cleanup_timeout=0.05)
    assert "may be left over" in error.message
    assert error.info().phase is Phase.CLEANUP


def test_a_failed_release_is_raised_unless_the_block_failed_first(
    caplog: pytest.LogCaptureFixture, against: Callable[..., Any], failing: Callable[..., Any]
) -> None:
    error, _ = failing([(200, {}), (400, {"detail": "no"})])
    assert error.info().phase is Phase.CLEANUP

    async def act(client: HttpGateway, url: str, _: Any) -> None:
        with pytest.raises(ZeroDivisionError):
            async with client.registered(url, "r-1", REGISTRATION, api_key="k"):
                raise ZeroDivisionError

    with caplog.at_level(logging.WARNING):
        against([(200, {}), (400, {"detail": "no"})], act)
    assert "r-1 could not be unregistered" in caplog.text
