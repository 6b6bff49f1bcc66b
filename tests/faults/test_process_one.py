"""A worker as process 1 of a container: of a PID namespace, where the kernel gives it no default actions of signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import redis
from fleets import fleet_on
from submitting import request, requests, results_of
from support import wait_until

from producer import broker
from producer.contract import ErrorKind, StopCondition
from workers.local import LocalStack

UNSHARE = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc", "--kill-child"]


def _may_unshare() -> bool:
    try:
        return subprocess.run([*UNSHARE, "true"], capture_output=True, check=False).returncode == 0
    except OSError:
        return False


pytestmark = pytest.mark.skipif(not _may_unshare(), reason="this system makes no PID namespaces for ordinary users")


@dataclass
class Contained:
    """A worker in a PID namespace; ``init`` is its process 1, as it is seen from outside."""

    outside: subprocess.Popen[bytes]
    init: psutil.Process
    name: str
    log: Path

    @property
    def worker(self) -> psutil.Process:
        """The process that runs rollouts, once it has been started."""
        wait_until(self.init.children, what="the worker proper")
        return min(self.init.children(), key=lambda child: child.create_time())

    def end(self) -> int:
        return self.outside.wait(30)


Start = Callable[..., Contained]


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[LocalStack]:
    with fleet_on("local", tmp_path, workers=0) as (stack, _):
        yield stack


@pytest.fixture
def start(stack: LocalStack, tmp_path: Path) -> Iterator[Start]:
    started: list[Contained] = []

    def start(*, ready: bool = True, **settings: str) -> Contained:
        name, log = f"contained{len(started)}@here", tmp_path / "contained.log"
        command = [*UNSHARE, sys.executable, "-m", "workers.cli", "worker", "--name", name, "--concurrency", "20"]
        environment = os.environ | stack._celery_variables() | dict(stack.options.settings) | settings
        with log.open("ab") as output:
            process = subprocess.Popen(command, stdout=output, stderr=output, env=environment, start_new_session=True)
        wait_until(lambda: "python" in str(psutil.Process(process.pid).children()), what="process 1")
        init = psutil.Process(process.pid).children()[0]
        contained = Contained(process, init, name, log)
        started.append(contained)
        if ready:
            client = redis.Redis.from_url(stack.redis_url)
            wait_until(lambda: client.exists(broker.worker_key(name)), what="its first report")
            assert not contained.worker.name().startswith("unshare")
        return contained

    yield start
    for contained in started:
        contained.outside.kill()
        contained.outside.wait()


def draining(stack: LocalStack, worker: Contained) -> None:
    client = redis.Redis.from_url(stack.redis_url)
    key = broker.worker_key(worker.name)
    wait_until(lambda: b'"draining"' in (client.get(key) or b""), what="the report to say that it drains")


def orphans_of(init: psutil.Process) -> list[psutil.Process]:
    """Return the agents' sleeping processes whose parent is process 1."""
    found = []
    for process in init.children():
        with suppress(psutil.NoSuchProcess):  # it has been reaped meanwhile
            found += [process] if process.name() == "sleep" else []
    return found


def test_sigterm_drains_and_what_agents_left_behind_is_reaped(stack: LocalStack, start: Start, agents: Any) -> None:
    worker = start()

    def drain() -> None:
        wait_until(lambda: len(agents.starts()) == 3)
        # Started by a process that has ended since: process 1 is its parent now, and nobody else will wait for it.
        wait_until(lambda: len(orphans_of(worker.init)) == 3, what="the orphans")
        orphans = orphans_of(worker.init)
        for orphan in orphans:
            orphan.kill()
        wait_until(lambda: not any(psutil.pid_exists(p.pid) for p in orphans), what="the zombies to be reaped")
        worker.init.send_signal(signal.SIGTERM)
        draining(stack, worker)
        assert worker.outside.poll() is None
        agents.release()

    orphan = "(setsid sleep 600 > /dev/null 2>&1 &); "
    results = results_of(stack.redis_url, requests(3, run_command=orphan + agents.command()), drain)

    assert {(r.stop_condition, r.attempt) for r in results} == {(StopCondition.COMPLETED, 1)}
    assert worker.end() == 0


def test_a_second_sigterm_hands_over_at_once_and_exits_0(stack: LocalStack, start: Start, agents: Any) -> None:
    worker = start(ROLLOUTS_DRAIN_TIMEOUT="600")
    codes: list[int] = []

    def drain() -> None:
        wait_until(lambda: len(agents.starts()) == 3)
        worker.init.send_signal(signal.SIGTERM)
        draining(stack, worker)
        worker.init.send_signal(signal.SIGTERM)
        codes.append(worker.end())
        agents.release()
        start()

    wanted = requests(3, run_command=agents.command(), max_attempts=1)
    results = results_of(stack.redis_url, wanted, drain)

    assert codes == [0]
    assert {(r.stop_condition, r.attempt) for r in results} == {(StopCondition.COMPLETED, 2)}
    handed_over = [attempt for r in results for attempt in r.failed_attempts]
    assert {(a.counted, a.error.kind) for a in handed_over} == {(False, ErrorKind.LEASE)}


def test_a_sigterm_that_comes_before_the_worker_is_up_ends_it(stack: LocalStack, start: Start) -> None:
    """Process 1 would not hear of it: with no handler set, the kernel drops the signal."""
    worker = start(ready=False)
    assert worker.worker.is_running()
    worker.init.send_signal(signal.SIGTERM)
    assert worker.end() in {0, 128 + signal.SIGTERM}


def test_a_worker_that_is_killed_takes_its_container_with_it_and_its_watchdog_clears_up_first(
    stack: LocalStack, start: Start, agents: Any, tmp_path: Path
) -> None:
    worker = start()
    folders = stack.directory / "sandboxes"

    def kill() -> None:
        wait_until(lambda: len(agents.starts()) == 1)
        assert list(folders.iterdir())
        worker.worker.kill()
        assert worker.end() == 128 + signal.SIGKILL
        assert list(folders.iterdir()) == []
        agents.release()
        start()

    (result,) = results_of(stack.redis_url, [request(run_command=agents.command())], kill)
    assert (result.stop_condition, result.attempt) == (StopCondition.COMPLETED, 2)


def test_an_agent_that_forks_for_ever_leaves_no_zombies(stack: LocalStack, start: Start, agents: Any) -> None:
    worker = start()
    forks = "for i in $(seq 300); do (true &); done; "

    def look() -> None:
        wait_until(lambda: len(agents.starts()) == 2)
        wait_until(lambda: not _zombies(worker.init), what="300 zombies of each to be reaped")
        agents.release()

    results = results_of(stack.redis_url, requests(2, run_command=forks + agents.command()), look)
    assert {r.stop_condition for r in results} == {StopCondition.COMPLETED}


def _zombies(root: psutil.Process) -> list[psutil.Process]:
    found = []
    for process in root.children():
        try:
            if process.status() == psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found
