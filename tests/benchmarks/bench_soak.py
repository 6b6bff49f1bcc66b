"""A soak: small real rollouts at a steady rate for half an hour, while memory, file descriptors and keys are watched.

python bench_soak.py [--minutes 30] [--rate 5] [--leak]

One worker with local sandboxes, the bundled gateway, a producer in a process of its own, Redis. Of nine rollouts, four
complete at once; the others fail, are cancelled, run out of time, are tried again, or are badly scored. Growth is that
of the line that fits best to the samples after the warm-up, from the first of them to the last. Exit status 1 when
something grows, or a rollout came to something else than it should; ``--leak`` has the worker leak, and so must end so.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import redis
from fleets import install_agent
from growth import FDS, KEYS, MEMORY, RSS, THREADS, Growth, Sample, judged
from harness import HERE, report
from soak_producer import BATCH_SECONDS, KEEP_CONSUMED

from workers.local import LocalStack, StackOptions

INTERVAL = 10.0
#: The share of the soak that is warm-up, and the seconds of it at least: before that, nothing has expired yet.
WARM_UP_SHARE, WARM_UP_LEAST = 1 / 6, KEEP_CONSUMED + BATCH_SECONDS + 20
CONCURRENCY = 50
#: Seconds that the last rollouts have after the soak.
END_LIMIT = 60.0


def measured(process: psutil.Process) -> dict[str, float]:
    """Measure one process, without its children."""
    with process.oneshot():
        return {
            RSS: process.memory_info().rss / 1e6,
            FDS: process.num_fds(),
            THREADS: process.num_threads(),
        }


def sample(at: float, processes: dict[str, psutil.Process], client: Any) -> Sample:
    """Measure everything once."""
    values = {f"{part} {what}": v for part, process in processes.items() for what, v in measured(process).items()}
    values |= {f"redis {KEYS}": client.dbsize(), f"redis {MEMORY}": client.info("memory")["used_memory"] / 1e6}
    return Sample(round(at, 1), values)


def watch(stack: LocalStack, producer: subprocess.Popen[bytes], seconds: float) -> list[Sample]:
    """Sample until the time is over; raises when a part has died."""
    pids = {child.name: child.process.pid for child in stack._children}
    processes = {
        "worker": psutil.Process(pids["worker1"]),
        "gateway": psutil.Process(pids["gateway"]),
        "producer": psutil.Process(producer.pid),
    }
    began, samples = time.monotonic(), []
    with redis.Redis.from_url(stack.redis_url) as client:
        for number in range(1, int(seconds / INTERVAL) + 1):
            time.sleep(max(0.0, began + number * INTERVAL - time.monotonic()))
            stack.check()
            if producer.poll() is not None:
                break
            samples.append(sample(time.monotonic() - began, processes, client))
            print(f"{samples[-1].at:6.0f} s  {shown(samples[-1])}", file=sys.stderr, flush=True)
    return samples


def shown(of: Sample) -> str:
    """Return a sample as one line: memory, descriptors and threads of each process, then Redis."""
    parts = [f"{p} {of.values[f'{p} {RSS}']:.1f} MB {of.values[f'{p} {FDS}']:.0f} fds" for p in ("worker", "gateway")]
    parts.append(f"producer {of.values[f'producer {RSS}']:.1f} MB {of.values[f'producer {FDS}']:.0f} fds")
    return ", ".join([*parts, f"Redis {of.values[f'redis {KEYS}']:.0f} keys {of.values[f'redis {MEMORY}']:.1f} MB"])


def soak(minutes: float, rate: float, leak: bool) -> bool:
    """Run it, print its JSON line, and return whether nothing grew."""
    seconds = 60 * minutes
    warm_up = max(WARM_UP_SHARE * seconds, WARM_UP_LEAST)
    environment = "leaky" if leak else "unsteady"
    environments = {"unsteady": "soak_environment:Unsteady", "leaky": "soak_environment:Leaky"}
    options = StackOptions(concurrency=CONCURRENCY, environments=environments, settings={"PYTHONPATH": str(HERE)})
    with TemporaryDirectory(prefix="rollouts-soak-") as directory, LocalStack(options) as stack:
        command = [sys.executable, str(HERE / "soak_producer.py"), environment]
        command += [install_agent(Path(directory)), str(rate), str(seconds), str(CONCURRENCY)]
        variables = {"ROLLOUTS_REDIS_URL": stack.redis_url, "ROLLOUTS_KEEP_CONSUMED": str(KEEP_CONSUMED)}
        with subprocess.Popen(command, stdout=subprocess.PIPE, env=os.environ | variables) as producer:
            try:
                samples = watch(stack, producer, seconds)
                told, _ = producer.communicate(timeout=END_LIMIT)
            finally:
                producer.kill()
    counts = json.loads(told)
    grown = judged(samples, warm_up)
    verdict = verdicts(grown) | {"as_expected": not counts["wrong"] and counts["submitted"] == counts["delivered"]}
    report(
        "soak",
        minutes=minutes,
        rate=rate,
        warm_up_seconds=warm_up,
        samples=len(samples),
        rollouts=sum(counts["delivered"].values()),
        wrong=counts["wrong"],
        growth_percent={each.measure: round(each.percent, 2) for each in grown},
        growth_absolute={each.measure: round(each.absolute, 2) for each in grown},
        median={each.measure: round(each.middle, 1) for each in grown},
        grows=[each.measure for each in grown if not each.is_flat],
        **verdict,
    )
    return all(verdict.values())


def verdicts(grown: list[Growth]) -> dict[str, bool]:
    """Return what must hold; Redis's memory is only told: its allocator keeps what once was needed."""
    names = {"rss_flat": RSS, "fds_flat": FDS, "threads_flat": THREADS, "keys_flat": KEYS}
    return {name: all(g.is_flat for g in grown if g.measure.endswith(f" {what}")) for name, what in names.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description="Run small rollouts for a long time, and watch what grows.")
    parser.add_argument("--minutes", type=float, default=30.0, help="3 or more")
    parser.add_argument("--rate", type=float, default=5.0, help="rollouts a second")
    parser.add_argument("--leak", action="store_true", help="have the worker leak: the soak must fail")
    given = parser.parse_args()
    if given.minutes < 3:
        parser.error("less than 3 minutes are warm-up alone")
    return 0 if soak(given.minutes, given.rate, given.leak) else 1


if __name__ == "__main__":
    sys.exit(main())
