"""What killed workers and failed clean-ups leave on the platform: gone one sweep later, and nothing else with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import orjson
import psutil
import pytest
import redis
from emulators.prime import PrimeEmulator
from fleets import fleet_on
from submitting import request, results_of
from support import wait_until

from producer import broker
from producer.contract import ErrorKind, StopCondition
from workers.local import LocalStack

SETTINGS = {"ROLLOUTS_ORPHAN_INTERVAL": "0.5"}
ROLLOUTS = [sys.executable, "-m", "workers.cli"]


def of_attempt(emulator: PrimeEmulator, attempt: int) -> set[str]:
    return {s["id"] for s in emulator.sandboxes() if f"attempt:{attempt}" in s["labels"]}


def registered(stack: LocalStack, gateway_id: str) -> bool:
    """Whether the gateway knows an attempt."""
    url = f"{stack.gateway_url}/v1/rollouts/{gateway_id}/trajectory"
    return httpx.get(url, headers={"Authorization": f"Bearer {stack.control_key}"}).status_code == 200


def status(stack: LocalStack) -> dict[str, Any]:
    environment = os.environ | {"ROLLOUTS_REDIS_URL": stack.redis_url}
    shown = subprocess.run([*ROLLOUTS, "status", "--json"], env=environment, capture_output=True, check=True)
    found: dict[str, Any] = orjson.loads(shown.stdout)
    return found


def test_what_a_killed_worker_left_is_gone_one_sweep_later_and_what_runs_on_is_untouched(
    tmp_path: Path, agents: Any
) -> None:
    with fleet_on("prime", tmp_path, workers=1, concurrency=20, settings=SETTINGS) as (stack, emulator):
        assert emulator is not None
        client = redis.Redis.from_url(stack.redis_url)
        last = request(example_id="last", run_command=agents.command(), max_attempts=1)
        wanted = [last, *(request(example_id=n, run_command=agents.command()) for n in range(10))]
        took: list[float] = []

        def kill() -> None:
            wait_until(lambda: len(agents.starts()) == 11)
            first, (tunnel,) = of_attempt(emulator, 1), emulator.tunnels()
            worker = psutil.Process(next(c.process.pid for c in stack._children if c.name == "worker1"))
            stack._start_workers()
            wait_until(lambda: client.zcard(broker.WORKERS) == 2, what="a second worker")
            assert registered(stack, last.rollout_id)

            os.kill(worker.pid, signal.SIGKILL)
            killed = time.monotonic()
            wait_until(lambda: not psutil.pid_exists(tunnel["frpc_pid"]), what="the end of its frpc")
            wait_until(lambda: len(agents.starts()) == 21, what="the second attempts")
            second = of_attempt(emulator, 2)
            wait_until(lambda: not first & set(emulator.leaked()["sandboxes"]), what="its sandboxes to be deleted")
            wait_until(lambda: not registered(stack, last.rollout_id), what="its registration to be forgotten")
            wait_until(lambda: tunnel["tunnel_id"] not in emulator.leaked()["tunnels"], what="its tunnel")
            wait_until(lambda: client.hlen(broker.LEDGER) == 0, what="an empty ledger")
            took.append(time.monotonic() - killed)

            assert (len(first), len(second)) == (11, 10)
            assert set(emulator.leaked()["sandboxes"]) == second, "the second attempts run on"
            assert registered(stack, f"{wanted[1].rollout_id}~2")
            assert len(emulator.leaked()["tunnels"]) == 1
            agents.release()

        results = results_of(stack.redis_url, wanted, kill)

        by_example = {result.example_id: result for result in results}
        assert by_example.pop("last").stop_condition is StopCondition.HAS_ERROR
        assert {(r.stop_condition, r.attempt) for r in by_example.values()} == {(StopCondition.COMPLETED, 2)}
        assert len(by_example) == 10
        # A lease, six seconds until the worker is known to be dead, and what a busy machine takes.
        assert took[0] < 20, f"it took {took[0]:.1f} s"


@pytest.mark.parametrize("again", [False, True], ids=["its name is gone", "its name lives on"])
def test_the_tunnel_of_a_worker_that_was_killed_while_it_was_idle_does_not_wait_for_the_look_by_label(
    tmp_path: Path, again: bool
) -> None:
    """It had no attempt, so the ledger has no entry; with a fixed name, as in a StatefulSet, its successor is alive."""
    settings = SETTINGS | {"ROLLOUTS_TUNNEL_CHECK_INTERVAL": "600"}
    with fleet_on("prime", tmp_path, workers=1, concurrency=5, settings=settings) as (stack, emulator):
        assert emulator is not None
        client = redis.Redis.from_url(stack.redis_url)
        results_of(stack.redis_url, [request(run_command="true")], lambda: None)
        (tunnel,) = emulator.tunnels()
        first = next(child for child in stack._children if child.name == "worker1")
        assert first.restart is not None
        client.set(broker.LABELS_SWEPT, 1)

        first.process.kill()
        first.process.wait()
        if again:
            first.restart()
        else:
            stack._start_workers()
        # Six seconds of silence or ten of age, and one interval; the rest is the start of a worker.
        wait_until(lambda: tunnel["tunnel_id"] not in emulator.leaked()["tunnels"], timeout=80, what="its tunnel to go")
        assert client.exists(broker.LABELS_SWEPT), "nobody has looked by label"
        (result,) = results_of(stack.redis_url, [request(run_command="true")], lambda: None)
        assert result.stop_condition is StopCondition.COMPLETED
        assert len(emulator.leaked()["tunnels"]) == 1, "the second worker's own"


def test_a_clean_up_that_fails_is_made_up_for_by_a_later_sweep(tmp_path: Path) -> None:
    with fleet_on("prime", tmp_path, concurrency=10, settings=SETTINGS) as (stack, emulator):
        assert emulator is not None
        client = redis.Redis.from_url(stack.redis_url)
        emulator.fault("delete_sandbox", status=403, times=None)
        wanted = [request(example_id="well", run_command="true"), request(example_id="ill", run_command="exit 3")]

        results = {result.example_id: result for result in results_of(stack.redis_url, wanted, lambda: None)}

        error = results["well"].error
        assert error is not None
        assert (error.kind, error.phase) == (ErrorKind.SANDBOX, "cleanup")
        error = results["ill"].error
        assert error is not None
        assert error.kind is ErrorKind.AGENT, "the clean-up's failure is in the log alone, and in the ledger"

        def tries() -> list[int]:
            return [orjson.loads(value).get("tries", 0) for value in client.hvals(broker.LEDGER)]

        wait_until(lambda: len(tries()) == 2 and min(tries()) >= 1, what="sweeps that fail as well")
        assert len(emulator.leaked()["sandboxes"]) == 2
        wait_until(lambda: status(stack)["workers"][0]["leaked"] == 2, what="the worker to report it")
        assert status(stack)["leaked"] == 2

        emulator.clear_faults()
        wait_until(lambda: client.hlen(broker.LEDGER) == 0, what="the next sweep")
        assert emulator.leaked()["sandboxes"] == []
        assert "was left over, and is deleted" in stack.logs["worker1"].read_text()
