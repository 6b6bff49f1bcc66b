"""Helpers that tests of every folder share."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import redis
from prometheus_client import Counter

# Its ports are none of those that the kernel gives to whoever binds or connects before this one is used.
from workers.children import free_port
from workers.local import find_redis_server

__all__ = ["RedisServer", "command", "counted", "free_port", "wait_until"]


def wait_until(predicate: Callable[[], object], timeout: float = 20.0, what: str = "the condition") -> None:
    """Poll ``predicate`` until it is true; fails the test after ``timeout`` seconds."""
    end = time.monotonic() + timeout
    while not predicate():
        if time.monotonic() > end:
            pytest.fail(f"waited {timeout} s for {what}")
        time.sleep(0.01)


def command(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the ``rollouts`` command to its end; ``variables`` are added to this process's own."""
    return subprocess.run(
        [sys.executable, "-m", "workers.cli", *arguments],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def counted(counter: Counter, **labels: str) -> float:
    """Return what a counter of this process has under these labels."""
    samples = [sample for family in counter.collect() for sample in family.samples if sample.name.endswith("_total")]
    return sum(sample.value for sample in samples if labels.items() <= sample.labels.items())


class RedisServer:
    """A real server that tests may stop, kill, pause and start again; it keeps its data in an append-only file."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self.client = redis.Redis.from_url(self.url)
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [find_redis_server(), "--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.directory)]
        # Synced by the system alone: a server that waits for a busy disk puts off its writes, and SIGKILL loses those.
        command += ["--appendonly", "yes", "--appendfsync", "no", "--save", ""]
        command += ["--maxmemory-policy", "noeviction", "--loglevel", "warning"]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        wait_until(self.answers, what="the Redis server")

    def answers(self) -> bool:
        try:
            return bool(self.client.ping())
        except (redis.ConnectionError, redis.TimeoutError):
            return False

    def stop(self, sig: int = signal.SIGTERM) -> None:
        if self.process:
            self.process.send_signal(signal.SIGCONT)
            self.process.send_signal(sig)
            self.process.wait()
            self.process = None
