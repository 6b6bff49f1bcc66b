"""Two workers of two queues, as processes: each runs its own, and a queue whose workers are gone is told."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fleets import LEASE_TTL, Agents, lean
from support import wait_until
from typer.testing import CliRunner

from producer import Producer, RolloutRequest, RolloutResult, StopCondition
from producer.cli import app
from producer.settings import ProducerSettings
from workers.local import LocalStack, StackOptions


class Pools:
    """A fleet with a worker of the default queue, and one of another queue beside it."""

    def __init__(self, stack: LocalStack, directory: Path) -> None:
        self.stack = stack
        self.directory = directory
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, name: str, queues: str) -> subprocess.Popen[bytes]:
        variables = self.stack.worker_variables() | dict(self.stack.options.settings) | {"ROLLOUTS_QUEUES": queues}
        command = [sys.executable, "-m", "workers.cli", "worker", "--name", name]
        with (self.directory / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                command, env=os.environ | variables, stdout=log, stderr=log, start_new_session=True
            )
        self.processes.append(process)
        wait_until(lambda: self.status()["queues"].get(queues, {}).get("workers"), timeout=60, what=f"worker {name}")
        return process

    def status(self) -> Any:
        ended = CliRunner().invoke(app, ["status", "--json", "--redis-url", self.stack.redis_url])
        assert ended.exit_code == 0, ended.output
        return json.loads(ended.stdout)

    def run(self, *requests: dict[str, Any]) -> list[RolloutResult]:
        return asyncio.run(self._run([RolloutRequest.parse({"model": "stand-in"} | fields) for fields in requests]))

    async def _run(self, requests: list[RolloutRequest]) -> list[RolloutResult]:
        async with Producer(ProducerSettings(redis_url=self.stack.redis_url)) as producer, asyncio.timeout(90):
            return [result async for result in await producer.submit_many(requests)]

    def close(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait()


@pytest.fixture
def pools(tmp_path: Path) -> Iterator[Pools]:
    settings = {"ROLLOUTS_LEASE_TTL": str(LEASE_TTL), "ROLLOUTS_SANDBOX_DIR": str(tmp_path / "sandboxes")}
    with LocalStack(StackOptions(concurrency=10, settings=settings, **lean())) as stack:
        found = Pools(stack, tmp_path)
        yield found
        found.close()


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[Agents]:
    (directory := tmp_path / "agents").mkdir()
    agents = Agents(directory)
    yield agents
    agents.close()


def test_each_pool_runs_its_own_queue_and_a_dead_ones_rollouts_wait_there_and_are_told(
    pools: Pools, agents: Agents
) -> None:
    gpu = pools.start("gpu", "gpu")
    mixed = [{"run_command": "true", "example_id": n, "queue": ("gpu", "rollouts")[n % 2]} for n in range(10)]
    results = pools.run(*mixed)
    assert {result.stop_condition for result in results} == {StopCondition.COMPLETED}
    ran = {(int(result.example_id) % 2, str(result.worker).partition("@")[0]) for result in results}
    assert ran == {(0, "gpu"), (1, ran_by_default(results))}

    async def scenario() -> list[RolloutResult]:
        fields = {"model": "stand-in", "run_command": agents.command(), "queue": "gpu"}
        requests = [RolloutRequest.parse(fields | {"example_id": n}) for n in range(2)]
        async with Producer(ProducerSettings(redis_url=pools.stack.redis_url)) as producer, asyncio.timeout(90):
            batch = await producer.submit_many(requests)
            await asyncio.to_thread(wait_until, lambda: len(agents.starts()) == 2, timeout=30, what="two agents")
            gpu.send_signal(signal.SIGKILL)
            await asyncio.to_thread(wait_until, lambda: told(pools), timeout=60, what="the queue to be told")
            queue = (await asyncio.to_thread(pools.status))["queues"]["gpu"]
            assert (queue["workers"], queue["running"] + queue["lapsed"]) == (0, 0)
            await asyncio.to_thread(pools.start, "gpu2", "gpu")
            agents.release()
            return [result async for result in batch]

    results = asyncio.run(scenario())
    assert [(result.stop_condition, result.attempt) for result in results] == [(StopCondition.COMPLETED, 2)] * 2
    assert {str(result.worker).partition("@")[0] for result in results} == {"gpu2"}
    assert not [line for line in pools.status()["attention"] if "no worker serves" in line]


def ran_by_default(results: list[RolloutResult]) -> str:
    (name,) = {str(result.worker).partition("@")[0] for result in results if int(result.example_id) % 2}
    assert name != "gpu"
    return name


def told(pools: Pools) -> bool:
    """Whether both rollouts wait, and it is said that nobody will take them."""
    found = pools.status()["attention"]
    return any(line.startswith("2 rollouts wait in queue gpu, which no worker serves") for line in found)


def test_run_says_at_once_that_nobody_serves_the_queue(pools: Pools, tmp_path: Path) -> None:
    (tasks := tmp_path / "tasks.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b", "queue": "tpu"}\n')
    (out := tmp_path / "err").touch()
    command = [sys.executable, "-m", "workers.cli", "run", str(tasks), "--out", str(tmp_path / "r.jsonl")]
    command += ["--model", "stand-in", "--run-command", "true", "--queue", "rollouts"]
    variables = os.environ | {"ROLLOUTS_REDIS_URL": pools.stack.redis_url}
    with out.open("wb") as log:
        run = subprocess.Popen(command, env=variables, stderr=log, stdout=subprocess.DEVNULL)
    pools.processes.append(run)
    wait_until(lambda: "serves queue tpu" in out.read_text(), timeout=30, what="the warning")
    assert "start one with: ROLLOUTS_QUEUES=tpu rollouts worker" in out.read_text()
    assert "serves queue rollouts" not in out.read_text()
    run.send_signal(signal.SIGINT)
    assert run.wait(30) == 130
