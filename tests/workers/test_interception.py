"""Rollouts without a gateway beside the worker: the worker process serves their model calls itself."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis
from fleets import lean

from producer import Producer, RolloutRequest, RolloutResult, broker
from producer.contract import ErrorKind, StopCondition
from producer.settings import ProducerSettings
from workers.demo.environment import demo_requests
from workers.gateway.client import HttpGateway
from workers.gateway.protocol import Registration
from workers.interception import InterceptingGateway
from workers.local import LocalStack, StackOptions
from workers.registry import ConfigurationError, check
from workers.settings import WorkerSettings
from workers.systems import WorkerSystems

pytestmark = pytest.mark.xdist_group("interception")


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    options = StackOptions(gateway=False, concurrency=50, log_dir=tmp_path_factory.mktemp("logs"), **lean())
    with LocalStack(options) as stack:
        yield stack


def run(stack: LocalStack, wanted: list[RolloutRequest]) -> list[RolloutResult]:
    async def scenario() -> list[RolloutResult]:
        async with Producer(ProducerSettings(redis_url=stack.redis_url)) as producer, asyncio.timeout(60):
            return [result async for result in await producer.submit_many(wanted)]

    return asyncio.run(scenario())


def test_the_demos_tasks_complete_with_every_token_and_no_gateway_process(stack: LocalStack) -> None:
    results = run(stack, demo_requests(samples=1))

    assert "gateway" not in stack.logs
    assert [r.stop_condition for r in results] == [StopCondition.COMPLETED] * 16
    assert len({r.gateway_url for r in results}) == 1, "one for the whole process"
    for result in results:
        assert (result.gateway_url or "").startswith("http://127.0.0.1:")
        assert len(result.trajectory) >= 3
        for step in result.trajectory:
            assert len(step["tokens"]["completion_ids"]) == len(step["tokens"]["completion_logprobs"]) > 0


def test_its_control_key_is_in_no_log_and_not_in_redis(stack: LocalStack) -> None:
    (result,) = run(stack, [RolloutRequest.parse({"model": "m", "run_command": "env; sleep 0"})])
    url = f"{result.gateway_url}/v1/rollouts/{result.rollout_id}/trajectory"
    assert httpx.get(url).status_code == 401, "control endpoints want the key of this process"
    assert "CONTROL_KEY" not in result.agent_stdout
    assert redis.Redis.from_url(stack.redis_url).exists(broker.result_key(result.rollout_id))
    assert "Bearer" not in Path(stack.logs["worker1"]).read_text()


def systems(**fields: Any) -> WorkerSystems:
    return WorkerSystems(WorkerSettings(**fields), "w1@here")


def test_a_request_decides_over_the_workers_setting(tmp_path: Path) -> None:
    async def scenario() -> None:
        settings: dict[str, Any] = {"gateway_url": "http://g:1", "gateway_allow": ("other",)}
        settings |= {"model_url": "http://127.0.0.1:9/v1", "sandbox_dir": tmp_path}
        async with systems(**settings) as with_gateway, systems(use_gateway=False, **settings) as without:
            url = {
                (of, use): of.of(RolloutRequest(model="m", use_gateway=use))[0]
                for of in (with_gateway, without)
                for use in (None, True, False)
            }
            assert url[with_gateway, None] == url[with_gateway, True] == url[without, True] == "http://g:1"
            assert url[without, None] == url[without, False]
            assert url[with_gateway, False].startswith("http://127.0.0.1:")
            named = RolloutRequest(model="m", gateway_url="http://other:1")
            assert without.of(named)[0] == "http://other:1", "naming a gateway is wanting one"

    asyncio.run(scenario())


def test_a_worker_without_a_model_server_refuses_rollouts_without_a_gateway(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="there is no ROLLOUTS_MODEL_URL: name the model server"):
        check(WorkerSettings(use_gateway=False))

    async def scenario() -> None:
        async with systems(sandbox_dir=tmp_path) as of:
            of.of(RolloutRequest(model="m", use_gateway=False))

    with pytest.raises(Exception, match="this worker has no ROLLOUTS_MODEL_URL to pass") as raised:
        asyncio.run(scenario())
    assert raised.value.info().kind is ErrorKind.INVALID_REQUEST  # type: ignore[attr-defined]


def test_a_blocked_loop_does_not_stall_it() -> None:
    """A plain hook may block the worker's loop by mistake; the agents of all other rollouts go on talking."""

    async def scenario() -> int:
        gateway = InterceptingGateway("http://127.0.0.1:9/v1")
        gateway.start()
        client = HttpGateway(control_key=gateway.control_key)
        async with client.registered(gateway.url, "r1", Registration(model="m"), api_key="k"):
            answers: list[int] = []

            def ask() -> None:
                url = f"{gateway.url}/v1/rollouts/r1/trajectory"
                key = {"Authorization": f"Bearer {gateway.control_key}"}
                answers.append(httpx.get(url, headers=key, timeout=10).status_code)

            thread = threading.Thread(target=ask)
            thread.start()
            thread.join(10)  # blocks the loop meanwhile
        await client.aclose()
        await gateway.aclose()
        with pytest.raises(httpx.ConnectError):
            httpx.get(gateway.url)
        return answers[0]

    assert asyncio.run(scenario()) == 200
