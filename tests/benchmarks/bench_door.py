"""verifiers' own client runs 200 episodes through a fleet of two workers, one of which is killed half-way.

The same episodes on verifiers' own pool of two workers must have the same rewards, or this fails. It needs the extra
``verifiers``, and does nothing without it.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from harness import finish, report

if find_spec("verifiers") is None:
    print("bench_door.py: skipped, for it needs the extra verifiers", file=sys.stderr)
    raise SystemExit(0)

sys.path.insert(0, str(Path(__file__).parents[1] / "door"))

from doors import CONFIG, EnvClient, reward, run_arguments, running_door, worker_settings, write_config
from fleets import LEASE_TTL
from support import free_port

from workers.local import LocalStack, StackOptions

EPISODES, AT_ONCE = 200, 32
#: How verifiers starts its own pool.
POOL = """
import json, sys
from verifiers.v1.serve import serve_env
if __name__ == "__main__":
    serve_env(max_workers=2, elastic=False, address=sys.argv[1], config_data=json.loads(sys.argv[2]))
"""


async def episodes(address: str, upstream: str, at_half: Any = None) -> tuple[list[float], float]:
    """Run all; returns the rewards in the tasks' order, and the seconds that it took."""
    client, places, ended, began = EnvClient(address), asyncio.Semaphore(AT_ONCE), 0, 0.0
    await client.wait_for_server_startup(timeout=120, interval=0.2)

    async def one(number: int) -> float:
        nonlocal ended
        async with places:
            episode = await client.run(**run_arguments(upstream, number))
        ended += 1
        if began and ended == EPISODES // 2 and at_half:
            at_half()
        return reward(episode)

    await asyncio.gather(*map(one, range(AT_ONCE)))  # each worker loads the environment at its first episode
    began, ended = time.perf_counter(), 0
    try:
        found = await asyncio.wait_for(asyncio.gather(*map(one, range(EPISODES))), 600)
    finally:
        await client.close()
    return found, time.perf_counter() - began


@contextmanager
def own_pool(directory: Path) -> Iterator[str]:
    """Run verifiers' pool; yields its address."""
    script, address = directory / "pool.py", f"tcp://127.0.0.1:{free_port()}"
    script.write_text(POOL)
    environment = worker_settings(directory / "unused")
    with (directory / "pool.log").open("wb") as log:
        command = [sys.executable, str(script), address, json.dumps(CONFIG)]
        process = subprocess.Popen(command, env=os.environ | environment, stdout=log, stderr=log)
    try:
        yield address
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


def main(directory: Path) -> None:
    """Run both, and compare."""
    config = write_config(directory)
    settings = {"ROLLOUTS_LEASE_TTL": str(LEASE_TTL), **worker_settings(config)}
    with LocalStack(StackOptions(workers=2, settings=settings)) as stack:
        worker = next(child for child in stack._children if child.name == "worker1").process
        with running_door(stack.redis_url, config, directory / "bench.log") as door:
            fleet, unharmed = asyncio.run(episodes(door.address, stack.upstream))
            killed, seconds = asyncio.run(episodes(door.address, stack.upstream, worker.kill))
        died = worker.wait(10) == -signal.SIGKILL
        with own_pool(directory) as address:
            expected, own = asyncio.run(episodes(address, stack.upstream))
    report(
        "door",
        required={"worker_killed": ("==", 1), "different_rewards": ("==", 0), "different_rewards_unharmed": ("==", 0)},
        episodes=EPISODES,
        at_once=AT_ONCE,
        worker_killed=died,
        different_rewards=sum(a != b for a, b in zip(killed, expected, strict=True)),
        different_rewards_unharmed=sum(a != b for a, b in zip(fleet, expected, strict=True)),
        lease_ttl=LEASE_TTL,
        seconds_killed=seconds,
        seconds=unharmed,
        seconds_own_pool=own,
    )


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as given:
        main(Path(given))
    finish()
