"""Real parts for every test: a Redis-protocol server of this test process's own."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from fleets import Agents
from hypothesis import HealthCheck
from hypothesis import settings as hypothesis_settings
from support import RedisServer

from workers import children

# How long an example takes says how busy the machine is, and nothing of what is tested.
hypothesis_settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
hypothesis_settings.load_profile("any machine")

# Each of the processes that run tests side by side has ports of its own: no two choose one at the same time.
_process = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
children.PORTS = children.PORTS[_process :: int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))]


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


@pytest.fixture
def agents() -> Iterator[Agents]:
    # Not below /tmp: a sandbox of the platform has a /tmp of its own.
    with tempfile.TemporaryDirectory(prefix="rollouts-agents-", dir="/var/tmp") as directory:
        agents = Agents(Path(directory))
        yield agents
        agents.close()


@pytest.fixture(autouse=True)
def _no_outside_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("ROLLOUTS_") or name == "REDIS_URL":
            monkeypatch.delenv(name)
