"""The tunnels' health task: beat sends it to every worker process, and a worker does without when it does not come."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from support import wait_until

from workers.local import LocalStack, StackOptions
from workers.metrics import TunnelCollector
from workers.settings import WorkerSettings
from workers.systems import WorkerSystems
from workers.tunnels.base import TunnelLease
from workers.tunnels.direct import DirectTunnels

HERE = Path(__file__).parent
REPORT = {
    "gateway_url": "http://gateway:8080",
    "tunnel_id": "t1",
    "url": "https://t1.example",
    "alive": True,
    "generation": 2,
    "restarts": 3,
    "rollouts": 4,
    "last_error": None,
}


class CountedTunnels(DirectTunnels):
    """Direct tunnels that note each health check in a file of this process's own."""

    def __init__(self, directory: Path) -> None:
        self.file = directory / f"checks-{os.getpid()}"

    async def check(self) -> None:
        with self.file.open("a") as file:
            file.write(f"{time.monotonic()}\n")

    def report(self) -> list[dict[str, Any]]:
        return [REPORT]

    @asynccontextmanager
    async def lease(self, gateway_url: str) -> AsyncIterator[TunnelLease]:
        async with super().lease(gateway_url) as lease:
            yield lease


def counted_tunnels(settings: WorkerSettings) -> CountedTunnels:
    assert settings.sandbox_dir
    return CountedTunnels(settings.sandbox_dir.parent)


INTERVAL = 0.5


@pytest.fixture
def started(tmp_path: Path) -> Iterator[LocalStack]:
    settings = {
        "ROLLOUTS_TUNNEL_PROVIDER": "test_tunnel_health:counted_tunnels",
        "ROLLOUTS_TUNNEL_CHECK_INTERVAL": str(INTERVAL),
        "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", "")]),
    }
    with LocalStack(StackOptions(workers=2, settings=settings, log_dir=tmp_path)) as stack:
        yield stack


def checks(stack: LocalStack) -> list[list[float]]:
    """Return when each worker process checked its tunnels."""
    return [[float(at) for at in file.read_text().split()] for file in stack.directory.glob("checks-*")]


def least(stack: LocalStack) -> int:
    return min((len(times) for times in checks(stack)), default=0) if len(checks(stack)) == 2 else 0


def test_beat_has_every_worker_process_check_its_tunnels_and_workers_do_without_beat(started: LocalStack) -> None:
    wait_until(lambda: least(started) >= 10, what="checks in both workers")
    began = min(times[0] for times in checks(started))
    for times in checks(started):
        # Some may come late, and together; but twice as many would be beat's own and the worker's besides.
        assert len(times) <= (times[-1] - began) / INTERVAL + 3.5

    beat = next(child for child in started._children if child.name == "beat")
    beat.process.kill()
    beat.process.wait()
    before = least(started)
    wait_until(lambda: least(started) >= before + 4, what="checks without beat")


def test_a_worker_checks_by_itself_when_beat_is_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(HERE)

    async def scenario() -> int:
        settings = WorkerSettings(
            tunnel_provider="test_tunnel_health:counted_tunnels",
            tunnel_check_interval=0.05,
            sandbox_dir=tmp_path / "sandboxes",
        )
        async with WorkerSystems(settings, "w1@here") as systems:
            tunnels: Any = systems.tunnels
            async with asyncio.timeout(30):
                while not tunnels.file.exists() or len(tunnels.file.read_text().split()) < 3:
                    await asyncio.sleep(0.005)
            return len(tunnels.file.read_text().split())

    assert asyncio.run(scenario()) >= 3


def test_a_health_check_that_fails_is_not_the_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        settings = WorkerSettings(tunnel_check_interval=0.02, sandbox_dir=tmp_path / "sandboxes")
        async with WorkerSystems(settings, "w1@here") as systems, asyncio.timeout(30):
            calls: list[int] = []

            async def fail() -> None:
                calls.append(1)
                raise RuntimeError("the platform is on fire")

            monkeypatch.setattr(systems.tunnels, "check", fail)
            while len(calls) < 3:
                await asyncio.sleep(0.005)

    asyncio.run(scenario())


def test_prometheus_reads_how_the_tunnels_are() -> None:
    registry = CollectorRegistry()
    registry.register(TunnelCollector(lambda: [REPORT]))
    text = generate_latest(registry).decode()
    for line in ("alive{%s} 1.0", "generation{%s} 2.0", "restarts_total{%s} 3.0", "rollouts{%s} 4.0"):
        assert f"rollouts_tunnel_{line}" % 'gateway="http://gateway:8080"' in text
