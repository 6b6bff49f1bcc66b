"""Agents that do harm: none holds a worker's slot beyond its deadline, fills its memory, or outlives its sandbox."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import redis
from emulators.prime import PrimeEmulator
from fleets import LEASE_TTL
from submitting import request, results_of
from support import wait_until

from producer import RolloutResult, broker
from producer.contract import ErrorKind, StopCondition
from workers.local import LocalStack

pytestmark = pytest.mark.parametrize(
    "systems",
    [pytest.param(name, marks=pytest.mark.xdist_group(f"on-{name}")) for name in ("local", "prime")],
    indirect=True,
)

#: Seconds that an agent may run, and that its end and the clean-up may take on a busy machine.
DEADLINE, SLACK = 2.0, 30.0

#: Each never ends by itself; SLEEP becomes a command line that no other process has.
ENDLESS = {
    "ignores SIGTERM": "trap '' TERM INT HUP QUIT; while :; do SLEEP; done",
    "forks": "trap '' TERM; for n in $(seq 20); do (setsid SLEEP &); done; SLEEP & while :; do (true &); done",
    "closes its streams": "exec 0<&- 1>&- 2>&-; SLEEP",
}


@pytest.fixture
def worker(stack: LocalStack) -> psutil.Process:
    return psutil.Process(next(child.process.pid for child in stack._children if child.name == "worker1"))


def ended_in_time(result: RolloutResult) -> bool:
    return result.timing.total_ms < (DEADLINE + SLACK) * 1000


def holds_nothing(stack: LocalStack) -> bool:
    client: Any = redis.Redis.from_url(stack.redis_url)
    reports = [client.get(broker.worker_key(name.decode())) or b"" for name in client.zrange(broker.WORKERS, 0, -1)]
    return bool(reports) and all(b'"running":0' in report for report in reports)


def named(marker: str) -> list[psutil.Process]:
    """Return the processes that have ``marker`` as an argument."""
    found = []
    for process in psutil.process_iter():
        try:
            if marker in process.cmdline():
                found.append(process)
        except psutil.Error:
            continue
    return found


@pytest.mark.parametrize("how", ENDLESS)
def test_an_agent_that_never_ends_holds_no_slot_beyond_its_deadline_and_leaves_nothing(
    stack: LocalStack, sandboxes_left: Callable[[], list[object]], how: str
) -> None:
    seconds = f"9{secrets.randbelow(10**6):06}"
    command = ENDLESS[how].replace("SLEEP", f"sleep {seconds}")
    (result,) = results_of(stack.redis_url, [request(run_command=command, deadlines={"agent": DEADLINE})])

    assert result.stop_condition is StopCondition.AGENT_TIMEOUT
    assert result.error is None, "its end was no trouble"
    assert ended_in_time(result)
    wait_until(lambda: holds_nothing(stack), timeout=LEASE_TTL + 10, what="the worker to report a free slot")
    wait_until(lambda: not sandboxes_left(), what="the sandbox to be deleted")
    wait_until(lambda: not named(seconds), what="its processes to be ended")


def test_an_agent_that_prints_1_gb_fills_nobodys_memory(
    stack: LocalStack, worker: psutil.Process, sandboxes_left: Callable[[], list[object]]
) -> None:
    results_of(stack.redis_url, [request(run_command="yes | head -c 1M")])  # what is loaded once is loaded by now
    before = worker.memory_info().rss
    forget_peak(worker)
    (result,) = results_of(stack.redis_url, [request(run_command="yes | head -c 1G")])

    assert result.stop_condition is StopCondition.COMPLETED
    assert len(result.agent_stdout) < 80_000
    assert result.agent_stdout.startswith("y\ny\n")
    assert " bytes cut] ..." in result.agent_stdout
    grown = peak(worker) - before
    assert grown < 50 * 1024**2, f"it grew by {grown / 1024**2:.0f} MB"
    wait_until(lambda: not sandboxes_left(), what="the sandbox to be deleted")


def test_an_agent_that_prints_for_ever_is_ended_at_its_deadline(stack: LocalStack, worker: psutil.Process) -> None:
    before = worker.memory_info().rss
    forget_peak(worker)
    command = "while :; do head -c 20M /dev/zero | tr '\\0' x; sleep 0.1; done"
    (result,) = results_of(stack.redis_url, [request(run_command=command, deadlines={"agent": DEADLINE})])

    assert result.stop_condition is StopCondition.AGENT_TIMEOUT
    assert ended_in_time(result)
    assert len(result.agent_stdout) < 80_000
    assert peak(worker) - before < 50 * 1024**2


def test_an_agent_that_fills_its_disk_quota_fails_alone(
    stack: LocalStack, fleet: tuple[LocalStack, PrimeEmulator | None], sandboxes_left: Callable[[], list[object]]
) -> None:
    """The platform keeps its own quota; in the emulator, which has none, the agent's shell sets one for itself."""
    limit = "ulimit -f 20480; " if fleet[1] else ""
    command = f"{limit}trap '' XFSZ; head -c 2G /dev/zero > fill; echo full >&2; exit 7"
    wanted = request(run_command=command, resources={"disk_gb": 0.02})
    ill, well = results_of(stack.redis_url, [wanted, request(example_id="well", run_command="echo well")])
    if ill.example_id == "well":
        ill, well = well, ill

    assert well.stop_condition is StopCondition.COMPLETED
    assert ill.error is not None
    assert (ill.error.kind, ill.agent_exit_code) == (ErrorKind.AGENT, 7)
    assert "File too large" in ill.agent_stderr
    wait_until(lambda: not sandboxes_left(), what="the sandbox to be deleted")


def forget_peak(process: psutil.Process) -> None:
    Path(f"/proc/{process.pid}/clear_refs").write_text("5")


def peak(process: psutil.Process) -> int:
    """Return the most memory that it had since `forget_peak`, in bytes."""
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) * 1024
