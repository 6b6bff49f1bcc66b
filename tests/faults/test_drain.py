"""A worker that is told to end: in time, whatever hangs, with no rollout lost and nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import redis
from emulators.prime import PrimeEmulator
from fleets import fleet_on
from submitting import request, requests, results_of
from support import wait_until

from producer import broker
from producer.contract import StopCondition
from workers.local import LocalStack

#: Seconds for the systems of a worker to close; its own default is for a platform that is far away.
CLOSE_LIMIT = 3.0
#: Seconds that all else may take that ends with a worker, on a busy machine; what hangs here would hang for a minute.
BUSY = 17.0
#: Seconds of a drain in which some rollouts end: they have to hear of it, be looked at, and cleared up.
DRAIN = 6.0
SETTINGS = {"ROLLOUTS_ORPHAN_INTERVAL": "0.5", "ROLLOUTS_DRAIN_TIMEOUT": "600"}


@dataclass
class Worker:
    name: str
    process: subprocess.Popen[bytes]
    client: redis.Redis

    def terminate(self) -> None:
        """Send SIGTERM, and wait until the drain has begun."""
        self.process.send_signal(signal.SIGTERM)
        key = broker.worker_key(self.name)
        wait_until(lambda: b'"draining"' in (self.client.get(key) or b""), what="the report to say that it drains")

    def terminate_again(self) -> float:
        """Send another one; returns how long it took to end, with status 0."""
        began = time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(60) == 0
        return time.monotonic() - began


Start = Callable[..., Worker]


@contextmanager
def workers_of(stack: LocalStack, directory: Path) -> Iterator[Start]:
    """Start workers of ``stack`` that close within `CLOSE_LIMIT`; they end before the stack does."""
    started: list[Worker] = []
    main = f"import workers.systems as s; s.CLOSE_LIMIT = {CLOSE_LIMIT}; from workers.cli import main; main()"

    def start(**settings: str) -> Worker:
        name = f"w{len(started)}@here"
        command = [sys.executable, "-c", main, "worker", "--name", name, "--concurrency", "10"]
        assert stack._reaper is not None
        environment = os.environ | stack._celery_variables() | dict(stack.options.settings)
        environment |= stack._reaper.environment() | settings
        with (directory / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
        started.append(Worker(name, process, redis.Redis.from_url(stack.redis_url)))
        wait_until(lambda: started[-1].client.exists(broker.worker_key(name)), what="its first report")
        return started[-1]

    try:
        yield start
    finally:
        for worker in started:
            if worker.process.poll() is None:
                worker.process.send_signal(signal.SIGQUIT)
        for worker in started:
            worker.process.wait(30)


@pytest.fixture
def prime(tmp_path: Path) -> Iterator[tuple[LocalStack, PrimeEmulator, Start]]:
    with fleet_on("prime", tmp_path, workers=0, settings=SETTINGS) as (stack, emulator):
        assert emulator is not None
        with workers_of(stack, tmp_path) as start:
            yield stack, emulator, start


@pytest.mark.parametrize(
    ("endpoint", "fault", "running"),
    [
        ("create_sandbox", {"hang": True, "skip": 2}, 2),
        ("create_sandbox", {"hang": "after", "skip": 2}, 2),
        ("delete_tunnel", {"hang": True, "times": None}, 3),
    ],
    ids=["a creation hangs", "a creation that was made hangs", "the end of the tunnel hangs"],
)
def test_a_platform_that_hangs_delays_no_shutdown_and_nothing_is_left_one_sweep_later(
    prime: tuple[LocalStack, PrimeEmulator, Start], agents: Any, endpoint: str, fault: dict[str, Any], running: int
) -> None:
    stack, emulator, start = prime
    worker = start()
    emulator.fault(endpoint, **fault)
    took: list[float] = []

    def end() -> None:
        wait_until(lambda: len(agents.starts()) == running)
        wait_until(lambda: emulator.requests()["create_sandbox"] == 3, what="the third creation")
        first = set(emulator.leaked()["sandboxes"])
        (tunnel,) = emulator.tunnels()
        worker.terminate()
        took.append(worker.terminate_again())
        emulator.clear_faults()
        start()
        wait_until(lambda: len(agents.starts()) == running + 3, what="all of them to run on the second worker")
        wait_until(lambda: worker.client.hlen(broker.LEDGER) == 0, what="a sweep")
        wait_until(lambda: tunnel["tunnel_id"] not in emulator.leaked()["tunnels"], what="the first worker's tunnel")
        assert not first & set(emulator.leaked()["sandboxes"])
        assert len(emulator.leaked()["sandboxes"]) == 3
        agents.release()

    wanted = requests(3, run_command=agents.command(), max_attempts=1)
    results = results_of(stack.redis_url, wanted, end)

    assert took[0] < CLOSE_LIMIT + BUSY, f"it took {took[0]:.1f} s to end"
    assert {(r.stop_condition, r.attempt) for r in results} == {(StopCondition.COMPLETED, 2)}


def test_a_sigterm_with_rollouts_running_loses_none_and_leaves_nothing(
    prime: tuple[LocalStack, PrimeEmulator, Start], agents: Any
) -> None:
    """Those that end within the drain have ended there; the others run elsewhere, and spend no attempt for it."""
    stack, emulator, start = prime
    worker = start(ROLLOUTS_DRAIN_TIMEOUT=str(DRAIN))
    quick = agents.directory / "quick"
    in_time = f"echo x >> {agents.directory}/started; until [ -e {quick} ]; do sleep 0.05; done"
    wanted = [
        *requests(3, run_command=agents.command(), max_attempts=1),
        *(request(example_id=f"quick{n}", run_command=in_time, max_attempts=1) for n in range(3)),
    ]
    took: list[float] = []

    def drain() -> None:
        wait_until(lambda: len(agents.starts()) == 6)
        first = set(emulator.leaked()["sandboxes"])
        (tunnel,) = emulator.tunnels()
        began = time.monotonic()
        worker.process.send_signal(signal.SIGTERM)
        quick.touch()
        assert worker.process.wait(60) == 0
        took.append(time.monotonic() - began)
        assert not first & set(emulator.leaked()["sandboxes"]), "it has cleared up itself"
        assert tunnel["tunnel_id"] not in emulator.leaked()["tunnels"]
        start()
        wait_until(lambda: len(agents.starts()) == 9, what="the other three to run on the second worker")
        agents.release()

    results = results_of(stack.redis_url, wanted, drain)

    assert took[0] < DRAIN + CLOSE_LIMIT + BUSY, f"it took {took[0]:.1f} s to end"
    by_example = {str(r.example_id): (r.stop_condition, r.attempt) for r in results}
    assert by_example == {
        **{str(n): (StopCondition.COMPLETED, 2) for n in range(3)},
        **{f"quick{n}": (StopCondition.COMPLETED, 1) for n in range(3)},
    }
    assert len(results) == 6


@pytest.mark.parametrize("how", [signal.SIGQUIT, signal.SIGTERM], ids=lambda how: how.name)
def test_a_cold_shutdown_while_finished_rollouts_are_cleaned_up_keeps_their_results(
    prime: tuple[LocalStack, PrimeEmulator, Start], agents: Any, how: signal.Signals
) -> None:
    """Their outcome is known: they must not run again for a sandbox that is slow to go."""
    stack, emulator, start = prime
    worker = start(ROLLOUTS_DRAIN_TIMEOUT="0")
    emulator.fault("delete_sandbox", delay=3.0, times=None)

    def end() -> None:
        wait_until(lambda: emulator.requests().get("delete_sandbox", 0) >= 3, what="the clean-up of all three")
        worker.process.send_signal(how)
        worker.process.wait(60)
        emulator.clear_faults()
        start()

    command = f"echo x >> {agents.directory}/started"
    wanted = [
        *requests(2, run_command=command, max_attempts=1),
        request(example_id="ill", run_command=f"{command}; exit 3", max_attempts=1),
    ]
    results = results_of(stack.redis_url, wanted, end)

    by_example = {str(r.example_id): (r.stop_condition, r.attempt, r.agent_exit_code) for r in results}
    assert by_example == {
        "0": (StopCondition.COMPLETED, 1, 0),
        "1": (StopCondition.COMPLETED, 1, 0),
        "ill": (StopCondition.HAS_ERROR, 1, 3),
    }
    assert len(agents.starts()) == 3, "each ran once"


#: A plain hook, in a thread that nobody can cancel.
HOOKS = """
import time
from pathlib import Path
from workers.environment import Environment

class Stuck(Environment):
    def setup(self, rollout):
        with open(rollout.request.environment_args["started"], "a") as file:
            file.write("x ")
        if rollout.attempt == 1:
            time.sleep(600)
"""


def test_a_hook_that_blocks_its_thread_for_ever_does_not_keep_the_process(tmp_path: Path, agents: Any) -> None:
    (tmp_path / "stuck_hooks.py").write_text(HOOKS)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    options: dict[str, Any] = {"environments": {"stuck": "stuck_hooks:Stuck"}, "settings": SETTINGS}
    options["settings"] = SETTINGS | {"PYTHONPATH": path}
    with fleet_on("local", tmp_path, workers=0, **options) as (stack, _), workers_of(stack, tmp_path) as start:
        worker = start()
        took: list[float] = []

        def end() -> None:
            wait_until(lambda: len(agents.starts()) == 1)
            worker.terminate()
            took.append(worker.terminate_again())
            start()

        arguments = {"started": str(agents.directory / "started")}
        wanted = request(environment="stuck", environment_args=arguments, run_command="true", max_attempts=1)
        (result,) = results_of(stack.redis_url, [wanted], end)

    assert took[0] < CLOSE_LIMIT + BUSY, f"it took {took[0]:.1f} s to end"
    assert (result.stop_condition, result.attempt) == (StopCondition.COMPLETED, 2)
