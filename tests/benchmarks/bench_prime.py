"""No-op rollouts at once in one worker process in Prime mode, against verifiers' RolloutGatewayMixin in the same run.

Both sides use the real Prime SDKs, which talk to the emulator of the platform (``tests/emulators/prime``), and the
bundled gateway; each measurement has processes of its own, and the two sides run in turn. Each is warm: its processes
run and its tunnel is open. The mixin is `upstream/drive_mixin.py`, in a virtual environment that is made at first use
(``--venv``). Ours is timed from the first enqueueing to the last delivered result, so Redis, Celery and the producer
are in it. The event loop's lag is sampled on both sides by the same code (`upstream/ticker.py`).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import struct
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import psutil
import redis
from bench_in_flight import worker_report
from harness import HERE, default_venv, finish, python_of, report
from upstream.ticker import summary, tick

from producer import Producer, RolloutRequest, RolloutResult
from producer.settings import ProducerSettings
from workers.children import HOST, free_port
from workers.environment import CommandEnvironment
from workers.local import LocalStack, StackOptions

UPSTREAM = HERE / "upstream"
TESTS = HERE.parent
MEMORY = "/dev/shm"
#: Seconds between two looks at whether an agent has ended, on both sides at most.
POLL_INTERVAL = 1.0
#: Names the file to which `NoopEnvironment` writes the samples of its worker's event loop.
LAG_FILE = "ROLLOUTS_BENCH_LAG"
SAMPLE = struct.Struct("=dd")
#: What the emulator counts and the platform does not see: model calls through the tunnel.
NOT_PLATFORM = {"forwarded"}
REQUESTS_ALLOWED = 9  #: a rollout, its share of the polls among them
WARM_UP = 1  #: rollouts before the measurement begins


class NoopEnvironment(CommandEnvironment):
    """An agent that ends at once. Its first rollout starts the sampling of the worker's event loop."""

    def __init__(self) -> None:
        self._ticking: asyncio.Task[None] | None = None

    def run_command(self, request: RolloutRequest) -> str:
        if self._ticking is None and (path := os.environ.get(LAG_FILE)):
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            self._ticking = asyncio.create_task(tick(lambda *sample: os.write(descriptor, SAMPLE.pack(*sample))))
        return "true"


# -- ours --------------------------------------------------------------------------------------------------------------


async def run_batch(redis_url: str, count: int) -> list[RolloutResult]:
    wanted = [RolloutRequest(model="null", environment="noop", example_id=n) for n in range(count)]
    async with Producer(ProducerSettings(redis_url=redis_url)) as producer:
        batch = await producer.submit_many(wanted, max_in_flight=count)
        return [result async for result in batch]


def ours(count: int, emulator: Any, profile: Path | None) -> dict[str, Any]:
    """Measure ``count`` rollouts in one worker process; with no ``emulator``, in local sandboxes."""
    with TemporaryDirectory(prefix="bench-prime-") as directory:
        lag_file = Path(directory) / "lag"
        with LocalStack(stack_options(count, emulator, lag_file)) as stack:
            with redis.Redis.from_url(stack.redis_url) as client:
                worker = psutil.Process(worker_report(client)["pid"])
            asyncio.run(run_batch(stack.redis_url, WARM_UP))
            before = Counter(emulator.requests()) if emulator else Counter()
            profiler = start_profiler(worker.pid, profile) if profile else None
            used = Used(
                {"worker": worker, **processes_of("workers.cli gateway", "emulators.prime", "valkey", "redis-server")}
            )
            began = time.monotonic()
            results = asyncio.run(run_batch(stack.redis_url, count))
            ended = time.monotonic()
            numbers: dict[str, Any] = {
                **outcomes(results, count, ended - began),
                "loop_lag_ms": summary(lag for woke, lag in SAMPLE.iter_unpack(lag_file.read_bytes()) if began <= woke),
                "cpu_seconds": (spent := used.cpu_seconds()),
                "cpu_ms_per_rollout": round(spent["worker"] / count * 1000, 2),
                "worker_rss_mb": round(worker.memory_info().rss / 2**20, 1),
                "phase_seconds": phases(results),
            }
            if profiler:
                profiler.wait(120)
            if emulator:
                requests = Counter(emulator.requests()) - before
                numbers["requests_per_rollout"] = requests_per_rollout(requests, count)
        if emulator:  # the worker has ended: nothing may be left
            numbers |= {"tunnels_started": len(emulator.tunnels()), "leaked": emulator.leaked()}
            numbers["refused"] = emulator.refused()
    return numbers


def stack_options(count: int, emulator: Any, lag_file: Path) -> StackOptions:
    settings = {"PYTHONPATH": os.pathsep.join([str(HERE), str(TESTS)]), LAG_FILE: str(lag_file)}
    if emulator:
        settings |= {
            "ROLLOUTS_SANDBOX_PROVIDER": "prime",
            "ROLLOUTS_TUNNEL_PROVIDER": "prime",
            "ROLLOUTS_POLL_INTERVAL": str(POLL_INTERVAL),
            # The platform's limits are no part of what is measured: the mixin keeps none.
            "ROLLOUTS_SANDBOX_CREATES_PER_MINUTE": "1000000",
            **emulator.environ,
        }
    return StackOptions(concurrency=count, environments={"noop": "bench_prime:NoopEnvironment"}, settings=settings)


def outcomes(results: list[RolloutResult], count: int, seconds: float) -> dict[str, Any]:
    completed = sum(result.completed for result in results)
    return {
        "rollouts": count,
        "delivered": len({result.rollout_id for result in results}),
        "completed": completed,
        "attempts_max": max((result.attempt for result in results), default=0),
        "first_failure": next((str(result.error) for result in results if not result.completed), None),
        "seconds": round(seconds, 3),
        "rollouts_per_second": round(completed / seconds, 2),
    }


def phases(results: list[RolloutResult]) -> dict[str, float]:
    """Return the median seconds of each phase."""
    names = {name for result in results for name in result.durations}
    return {name: round(statistics.median(r.durations.get(name, 0.0) for r in results), 3) for name in sorted(names)}


def start_profiler(pid: int, path: Path) -> subprocess.Popen[bytes]:
    """Sample the worker's stacks for ten seconds, into a file of folded stacks."""
    command = [str(Path(sys.executable).parent / "py-spy"), "record", "--pid", str(pid), "--duration", "10"]
    command += ["--format", "raw", "--rate", "200", "--gil", "--threads", "--output", str(path)]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


# -- processes beside the measured one ---------------------------------------------------------------------------------


def processes_of(*marks: str) -> dict[str, psutil.Process]:
    """Return our child processes whose command line holds one of ``marks``, by it."""
    found = {}
    for process in psutil.Process().children(recursive=True):
        try:
            line = " ".join(process.cmdline())
        except psutil.Error:  # it has ended meanwhile
            continue
        found |= {mark: process for mark in marks if mark in line and mark not in found}
    return found


class Used:
    """CPU seconds that processes use from now on; what they waited for, such as sandboxes' commands, is apart."""

    def __init__(self, processes: dict[str, psutil.Process]) -> None:
        self._processes = processes
        self._before = {name: process.cpu_times() for name, process in processes.items()}

    def cpu_seconds(self) -> dict[str, float]:
        used = {}
        for name, process in self._processes.items():
            now, before = process.cpu_times(), self._before[name]
            used[name] = round(now.user + now.system - before.user - before.system, 2)
            children = now.children_user + now.children_system - before.children_user - before.children_system
            if children > 0.05:
                used[f"{name}'s children"] = round(children, 2)
        return used


@contextmanager
def emulated(start_seconds: float) -> Iterator[Any]:
    """A platform of this measurement's own, on which a sandbox takes ``start_seconds`` to start."""
    from emulators.prime import PrimeEmulator

    with (
        # In memory if possible: half of the emulator's time goes into folders of sandboxes.
        TemporaryDirectory(prefix="bench-prime-", dir=MEMORY if os.access(MEMORY, os.W_OK) else None) as directory,
        PrimeEmulator(Path(directory), start_seconds=start_seconds) as emulator,
    ):
        yield emulator


@contextmanager
def open_gateway() -> Iterator[str]:
    """The bundled gateway without a control key, which the mixin does not know; its upstream is never called."""
    port = free_port()
    command = [sys.executable, "-m", "workers.cli", "gateway", "--host", HOST, "--port", str(port)]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("ROLLOUTS_")}
    environment["ROLLOUTS_GATEWAY_UPSTREAM"] = f"http://{HOST}:1/v1"
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        url = f"http://{HOST}:{port}"
        await_gateway(f"{url}/healthz", process)
        yield url
    finally:
        process.terminate()
        process.wait()


def await_gateway(url: str, process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + 30
    while True:
        try:
            httpx.get(url, trust_env=False).raise_for_status()
        except httpx.HTTPError:
            assert process.poll() is None, "the gateway ended"
            assert time.monotonic() < end, "the gateway does not answer"
            time.sleep(0.01)
        else:
            return


# -- the mixin ---------------------------------------------------------------------------------------------------------


def theirs(count: int, emulator: Any, python: Path) -> dict[str, Any]:
    """Measure ``count`` rollouts of the mixin in one process."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("ROLLOUTS_", "PRIME_", "PYTHON"))}
    environment |= emulator.environ
    with open_gateway() as gateway_url:
        used = Used(processes_of("workers.cli gateway", "emulators.prime"))
        command = [str(python), str(UPSTREAM / "drive_mixin.py"), "--gateway-url", gateway_url]
        command += ["--rollouts", str(count), "--warm-up", str(WARM_UP), "--poll-interval", str(POLL_INTERVAL)]
        # The SDK's workers complain by the thousand when the mixin's threads end.
        done = subprocess.run(command, check=False, env=environment, capture_output=True, text=True, timeout=600)
        assert not done.returncode, done.stderr[-3000:]
        numbers: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        own = numbers["cpu_seconds"]
        numbers["cpu_seconds"] = {"mixin": own, **used.cpu_seconds()}
        numbers["cpu_ms_per_rollout"] = round(own / count * 1000, 2)
    return numbers | {
        "requests_per_rollout": requests_per_rollout(emulator.requests(), count + WARM_UP),
        "tunnels_started": len(emulator.tunnels()),
        "leaked": emulator.leaked(),
    }


# -- the whole ---------------------------------------------------------------------------------------------------------


def requests_per_rollout(requests: dict[str, int], rollouts: int) -> dict[str, float]:
    """Return the platform's requests for each rollout, by endpoint."""
    seen = {name: n for name, n in requests.items() if name not in NOT_PLATFORM and n}
    each = {name: round(n / rollouts, 3) for name, n in sorted(seen.items())}
    return {"total": round(sum(seen.values()) / rollouts, 3), **each}


def compare(mine: list[dict[str, Any]], others: list[dict[str, Any]]) -> None:
    """Print what was required: medians of both sides, and of the pairs' ratios with their range."""
    numbers: dict[str, Any] = {}
    values: dict[str, Callable[[dict[str, Any]], float]] = {
        "rate": lambda run: run["rollouts_per_second"],
        "lag_p99": lambda run: run["loop_lag_ms"]["p99"],
        "lag_due_p99": lambda run: run["loop_lag_ms"]["due_p99"],
        "cpu_ms_per_rollout": lambda run: run["cpu_ms_per_rollout"],
    }
    for name, of in values.items():
        ratios = [of(ours) / of(theirs) for ours, theirs in zip(mine, others, strict=True)]
        numbers |= {
            f"ours_{name}": statistics.median(map(of, mine)),
            f"upstream_{name}": statistics.median(map(of, others)),
            f"ratio_{name}": statistics.median(ratios),
            f"ratio_{name}_min": min(ratios),
            f"ratio_{name}_max": max(ratios),
        }
    report("prime_ratios", {"ratio_rate": (">=", 3), "ratio_lag_p99": ("<=", 0.2)}, **numbers)


def load(mine: list[dict[str, Any]]) -> None:
    """Print what was required of the load on the platform, of the worst run."""
    most = max((run["requests_per_rollout"] for run in mine), key=lambda each: each["total"])
    nothing = ("leaked_sandboxes", "leaked_tunnels", "leaked_processes")
    report(
        "prime_load",
        required={
            "requests_per_rollout.total": ("<=", REQUESTS_ALLOWED),
            "loop_lag_p99_ms_max": ("<=", 100),
            **dict.fromkeys(nothing, ("==", 0)),
        },
        rollouts=mine[0]["rollouts"],
        completed_min=min(run["completed"] for run in mine),
        requests_per_rollout=most,
        tunnels_started_max=max(run["tunnels_started"] for run in mine),
        loop_lag_p99_ms_max=max(run["loop_lag_ms"]["p99"] for run in mine),
        leaked_sandboxes=max(len(run["leaked"]["sandboxes"]) for run in mine),
        leaked_tunnels=max(len(run["leaked"]["tunnels"]) for run in mine),
        leaked_processes=max(len(run["leaked"]["processes"]) for run in mine),
        refused=[each for run in mine for each in run["refused"]][:5],
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=300, help="Rollouts at once (300).")
    parser.add_argument("--pairs", type=int, default=3, help="Measurements of each side, in turn (3).")
    parser.add_argument("--start-seconds", type=float, default=0.0, help="What a sandbox takes to start (0).")
    parser.add_argument("--no-upstream", action="store_true", help="Measure ours only.")
    parser.add_argument("--local", action="store_true", help="Ours only, in local sandboxes, without the emulator.")
    parser.add_argument(
        "--venv", type=Path, default=default_venv("upstream-mixin"), help="Where the mixin is installed."
    )
    parser.add_argument("--profile", type=Path, help="Folded stacks of the worker, by py-spy if it is installed.")
    return parser.parse_args()


def main() -> None:
    """Measure both sides in turn, and print a line for each measurement and for what was required."""
    given = arguments()
    for name in [name for name in os.environ if name.startswith(("PRIME_", "ROLLOUTS_"))]:
        del os.environ[name]  # a user's own account or fleet must have no part in it
    python = (
        None if given.no_upstream or given.local else python_of(given.venv, UPSTREAM / "requirements.txt", "the mixin")
    )
    mine, others = [], []
    for _ in range(given.pairs):
        with ExitStack() as stack:
            emulator = None if given.local else stack.enter_context(emulated(given.start_seconds))
            mine.append(ours(given.rollouts, emulator, given.profile))
        report("prime_ours", **mine[-1])
        if python:
            with emulated(given.start_seconds) as emulator:
                others.append(theirs(given.rollouts, emulator, python))
            report("prime_upstream", **others[-1])
    if not given.local:
        load(mine)
    if others:
        compare(mine, others)


if __name__ == "__main__":
    main()
    finish()
