"""A whole fleet with watchdogs, and what it shows of itself: results, log lines, metrics, and ``rollouts status``."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis
from fleets import lean
from support import free_port, wait_until
from typer.testing import CliRunner

from producer import Producer, RolloutRequest, RolloutResult, broker
from producer.contract import ErrorKind, Phase, StopCondition
from producer.settings import ProducerSettings
from workers.cli import app
from workers.environment import Environment
from workers.local import LocalStack, StackOptions
from workers.state import Rollout

HERE = Path(__file__).parent
LEASE_TTL = 1.0
HANG_LIMIT = 1.5
#: Makes a model call, and then nothing.
CALLS_ONCE = f"""{sys.executable} -c '
import json, os, time, urllib.request
body = {{"model": "m", "messages": [{{"role": "user", "content": "hi"}}]}}
headers = {{"content-type": "application/json", "authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
print(urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)).status, flush=True)
time.sleep(600)'"""

pytestmark = pytest.mark.xdist_group("fleet-view")


class Blocking(Environment):
    """Its hook blocks the event loop for two leases."""

    async def score(self, rollout: Rollout) -> float:
        time.sleep(2 * LEASE_TTL + 1)
        return 1.0


@pytest.fixture(scope="module")
def admin_port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, admin_port: int) -> Iterator[LocalStack]:
    settings = {
        "ROLLOUTS_LEASE_TTL": str(LEASE_TTL),
        "ROLLOUTS_ADMIN_PORT": str(admin_port),
        "ROLLOUTS_ENVIRONMENTS": "blocking=test_fleet_view:Blocking",
        "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", "")]),
    }
    options = StackOptions(concurrency=20, settings=settings, log_dir=tmp_path_factory.mktemp("logs"), **lean())
    with LocalStack(options) as stack:
        yield stack


def run(stack: LocalStack, *requests: dict[str, Any]) -> list[RolloutResult]:
    async def scenario() -> list[RolloutResult]:
        wanted = [RolloutRequest.parse({"model": "stand-in", "run_command": "true"} | fields) for fields in requests]
        async with Producer(ProducerSettings(redis_url=stack.redis_url)) as producer, asyncio.timeout(60):
            return [result async for result in await producer.submit_many(wanted)]

    return asyncio.run(scenario())


def status(stack: LocalStack, *options: str) -> str:
    ended = CliRunner().invoke(app, ["status", "--redis-url", stack.redis_url, *options], env={"COLUMNS": "200"})
    assert ended.exit_code == 0, ended.output
    return ended.stdout


def scraped(port: int) -> str:
    """Return the metrics of a scrape for which Redis had an answer in time."""
    texts: list[str] = []

    def answers() -> bool:
        texts.append(httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=30).text)
        return "rollouts_redis_up 1.0" in texts[-1]

    wait_until(answers, what="a scrape")
    return texts[-1]


def wait_for_status(stack: LocalStack, state: str) -> str:
    """Return what is shown when the worker reports to be in ``state``."""

    def is_there() -> bool:
        workers = json.loads(status(stack, "--json"))["workers"]
        return [worker["state"] for worker in workers] == [state]

    wait_until(is_there, what=f"a worker that is {state}")
    return status(stack)


@pytest.fixture(scope="module")
def ended(stack: LocalStack) -> dict[str, RolloutResult]:
    """Results of two that a watchdog has ended, by which: time enough for their calls, and both at one time."""
    limits = {"idle": 4.0}, {"rollout": 6.0}
    results = run(stack, *({"rollout_id": str(*d), "run_command": CALLS_ONCE, "deadlines": d} for d in limits))
    return {result.rollout_id: result for result in results}


def test_an_agent_that_stalls_after_its_call_keeps_its_turn_and_its_output(ended: dict[str, RolloutResult]) -> None:
    result = ended["idle"]

    assert result.error is not None
    assert (result.error.kind, result.error.type) == (ErrorKind.AGENT, "AgentStalledError")
    assert (result.error.phase, result.error.retryable, result.attempt) == (Phase.AGENT, False, 1)
    assert (len(result.trajectory), result.agent_stdout, result.agent_exit_code) == (1, "200\n", None)
    assert result.durations["agent"] < 30


def test_an_attempt_that_exceeds_its_hard_limit_is_cleaned_up_and_not_tried_again(
    ended: dict[str, RolloutResult],
) -> None:
    result = ended["rollout"]

    assert result.error is not None
    assert (result.error.kind, result.error.type) == (ErrorKind.LIMIT, "RolloutLimitError")
    assert (result.error.phase, result.attempt, len(result.trajectory)) == (Phase.AGENT, 1, 1)
    assert "cleanup" in result.durations


def test_a_gateway_that_the_worker_does_not_allow_is_an_invalid_request(stack: LocalStack) -> None:
    inner = f"http://127.0.0.1:{stack.redis_url.rpartition(':')[2].partition('/')[0]}"
    refused, own = run(stack, {"gateway_url": inner, "example_id": 0}, {"gateway_url": stack.gateway_url})
    refused, own = sorted((refused, own), key=lambda result: result.completed)

    assert own.stop_condition is StopCondition.COMPLETED
    assert refused.error is not None
    assert refused.error.kind is ErrorKind.INVALID_REQUEST
    assert refused.error.message.startswith("gateway_url: this worker may not use")
    assert "ROLLOUTS_GATEWAY_ALLOW" in refused.error.message


def test_a_hook_that_blocks_the_loop_for_two_leases_costs_nobody_an_attempt_and_is_named(
    stack: LocalStack, admin_port: int
) -> None:
    waiting = {"run_command": f"sleep {2 * LEASE_TTL}"}
    results = run(stack, {"environment": "blocking", "rollout_id": "blocks"}, *[waiting] * 5)

    assert [(r.stop_condition, r.attempt) for r in results] == [(StopCondition.COMPLETED, 1)] * 6
    log = stack.logs["worker1"]
    wait_until(lambda: "moves again" in log.read_text(), what="the end of it in the log")
    named = r"event loop blocked for [\d.]+ s by Blocking\.score of rollout blocks:\n(.*\n)*?.*time\.sleep"
    assert re.search(named, log.read_text())
    metrics = scraped(admin_port)
    assert 'rollouts_loop_blocked_total{hook="Blocking.score"} 1.0' in metrics
    wait_until(lambda: "blocked for" in status(stack), what="the report")
    assert "by Blocking.score of blocks" in status(stack)


def test_status_shows_the_fleet_in_one_view_and_as_json(stack: LocalStack, admin_port: int) -> None:
    run(stack, {})
    wait_until(lambda: json.loads(status(stack, "--json"))["workers"], what="the worker's report")
    (worker,) = json.loads(status(stack, "--json"))["workers"]
    assert (worker["state"], worker["concurrency"]) == ("running", 20)
    assert worker["breaker"]["state"] == "closed"
    assert set(worker["breaker"]["systems"]) == {"gateway", "tunnel", "sandbox"}
    view = status(stack)
    assert re.search(r"worker\S*@\S+\s+running\s+\d+\s+20\s+[\d.]+ ms\s+closed", view), view
    metrics = scraped(admin_port)
    assert 'rollouts_breaker_state{state="closed",system="gateway"} 1.0' in metrics
    assert 'rollouts_loop_lag_seconds{statistic="p99"}' in metrics
    for sample in ("rollouts_concurrency 20.0", "rollouts_redis_up 1.0", "rollouts_lease_losses_total 0.0"):
        assert sample in metrics
    assert 'rollouts_gateway_requests_total{operation="register",status="200"}' in metrics


def operate(stack: LocalStack, *arguments: str) -> Any:
    return json.loads(CliRunner().invoke(app, [*arguments, "--redis-url", stack.redis_url, "--json"]).stdout)


def test_a_rollout_is_listed_while_it_runs_its_lines_are_found_and_it_can_be_retried(
    stack: LocalStack, tmp_path: Path
) -> None:
    end = tmp_path / "end"
    with ThreadPoolExecutor(1) as other:
        command = f"while [ ! -e {end} ]; do sleep 0.05; done; exit 3"
        held = other.submit(run, stack, {"rollout_id": "told", "run_command": command})
        wait_until(lambda: [one["phase"] for one in operate(stack, "ps")["rollouts"]] == ["agent"], what="its phase")
        assert operate(stack, "ps")["rollouts"][0]["rollout_id"] == "told"
        end.touch()
        held.result(60)

    told: dict[str, Any] = {}

    def has_answered() -> object:
        told.update(operate(stack, "logs", "told"))
        return told["lines"]

    wait_until(has_answered, what="its worker's lines")
    assert (told["record"]["state"], told["record"]["outcome"]) == ("done", "has_error")
    stages = [line["stage"] for line in told["lines"]]
    assert [s for s in stages if s in {"start", "register_rollout", "start_agent", "finish"}] == [
        *("start", "register_rollout", "start_agent", "finish")
    ]
    assert {(line["attempt"], line["worker"] != "") for line in told["lines"]} == {(1, True)}

    assert operate(stack, "retry", "told")["rollouts"] == {"told": "retried"}
    wait_until(lambda: operate(stack, "logs", "told")["record"]["attempt"] == "2", what="the next attempt")
    wait_until(lambda: operate(stack, "logs", "told")["record"]["state"] == "done", what="its end")


class Hanging(Environment):
    """Its hook hangs beyond the limit, in its first attempt, until there is a file."""

    async def score(self, rollout: Rollout) -> float:
        go_on = Path(rollout.request.info["go_on"])
        while rollout.attempt == 1 and not go_on.exists():
            time.sleep(0.01)
        return 1.0


def test_a_hook_that_hangs_beyond_the_limit_costs_each_rollout_one_attempt_and_the_worker_goes_on(
    tmp_path: Path,
) -> None:
    go_on = tmp_path / "go-on"
    settings = {
        "ROLLOUTS_LEASE_TTL": str(LEASE_TTL),
        "ROLLOUTS_LOOP_HANG_LIMIT": str(HANG_LIMIT),
        "ROLLOUTS_ENVIRONMENTS": "hanging=test_fleet_view:Hanging",
        "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", "")]),
    }
    with LocalStack(StackOptions(concurrency=20, settings=settings, log_dir=tmp_path, **lean())) as stack:
        log = stack.logs["worker1"]
        with ThreadPoolExecutor(2) as others:
            hanging = {"environment": "hanging", "info": {"go_on": str(go_on)}}
            held = others.submit(run, stack, hanging, *[{"run_command": "sleep 2"}] * 4)
            wait_until(lambda: "its leases are given up" in log.read_text(), what="the hang")
            assert "hangs: it has given up what it ran" in wait_for_status(stack, "hung")
            waiting = others.submit(run, stack, {"max_attempts": 1, "rollout_id": "late"})
            with redis.Redis.from_url(stack.redis_url) as client:
                wait_until(lambda: client.zcard(broker.PENDING) == 6, what="the return of all five, and the late one")
            go_on.touch()
            (late,) = waiting.result(60)
            results = held.result(60)
        assert "by Hanging.score of rollout" in log.read_text()

    assert [r.stop_condition for r in results] == [StopCondition.COMPLETED] * 5
    assert max(r.attempt for r in results) == 2
    assert (late.stop_condition, late.attempt) == (StopCondition.COMPLETED, 1), "nothing is claimed to lapse at once"
