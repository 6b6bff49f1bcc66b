"""The systems of a worker close side by side, in bounded time, whatever one of them does."""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path

import pytest

from producer.contract import ErrorKind, RolloutRequest
from workers import systems as module
from workers.aio import uninterrupted
from workers.cli import _EXIT_LIMIT
from workers.fleet import _KEEPER_LIMIT
from workers.pool import AsyncioPool
from workers.settings import WorkerSettings
from workers.state import SYSTEMS
from workers.systems import close_together
from workers.tunnels import pool as tunnels
from workers.tunnels.backend import Limits

#: Seconds that `workers.threads.LoopThread.stop` waits beyond the lifespan's end.
LOOP_END = 2.0


class Systems:
    """One that hangs and cannot be interrupted, one that fails, and one that takes its time."""

    def __init__(self) -> None:
        self.closed: list[str] = []

    async def hangs(self) -> None:
        await uninterrupted(asyncio.get_running_loop().create_future(), timeout=None)

    async def fails(self) -> None:
        raise RuntimeError("no answer")

    async def takes_its_time(self) -> None:
        await asyncio.sleep(0.005)
        self.closed.append("tunnels")


def test_one_that_hangs_takes_no_time_from_the_others(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "CLOSE_LIMIT", 0.3)
    systems = Systems()

    async def scenario() -> float:
        began = time.monotonic()
        closing = {"sandboxes": systems.hangs, "gateway": systems.fails, "tunnels": systems.takes_its_time}
        await close_together(closing)
        return time.monotonic() - began

    with caplog.at_level(logging.ERROR):
        assert 0.3 <= asyncio.run(scenario()) < 5
    assert systems.closed == ["tunnels"]
    assert "sandboxes did not close within 0.3 s, and are left behind" in caplog.text
    assert "gateway did not close cleanly: RuntimeError('no answer')" in caplog.text


def test_nobody_is_waited_for_when_all_have_closed() -> None:
    systems = Systems()

    async def scenario() -> float:
        began = time.monotonic()
        await close_together({"tunnels": systems.takes_its_time})
        await close_together({})
        return time.monotonic() - began

    assert asyncio.run(scenario()) < 5
    assert systems.closed == ["tunnels"]


OURS, OTHER = "http://127.0.0.1:1", "http://127.0.0.1:2"


@pytest.mark.parametrize(
    ("use_gateway", "wanted", "met"),
    [
        (True, {}, SYSTEMS),
        (True, {"gateway_url": OURS}, SYSTEMS),
        (True, {"gateway_url": OTHER}, {ErrorKind.SANDBOX}),
        (True, {"use_gateway": False}, {ErrorKind.SANDBOX}),
        (False, {}, SYSTEMS),
        (False, {"use_gateway": True}, {ErrorKind.SANDBOX}),
        (False, {"gateway_url": OURS}, {ErrorKind.SANDBOX}),
    ],
)
def test_which_of_the_workers_own_systems_a_rollout_meets(
    tmp_path: Path, use_gateway: bool, wanted: dict[str, object], met: frozenset[ErrorKind]
) -> None:
    settings = WorkerSettings(
        gateway_url=OURS, gateway_allow=("*",), use_gateway=use_gateway, model_url=OTHER, sandbox_dir=tmp_path
    )

    async def scenario() -> frozenset[ErrorKind]:
        async with module.WorkerSystems(settings, "w1") as systems:
            assert systems.met_at(systems.none()[0]) == frozenset(), "an episode meets none"
            return systems.met_at(systems.of(RolloutRequest(model="m", **wanted))[0])  # type: ignore[arg-type]

    assert asyncio.run(scenario()) == met


def test_the_parts_of_a_workers_end_fit_into_its_whole() -> None:
    """And the whole into the seconds that the chart gives a pod beyond its drain (``worker.handoverTimeout``)."""
    whole = AsyncioPool.shutdown_grace + AsyncioPool.lifespan_grace + LOOP_END + _EXIT_LIMIT
    assert whole < 90
    assert AsyncioPool.lifespan_grace > module.CLOSE_LIMIT + _KEEPER_LIMIT
    assert Limits().close_timeout + tunnels._CLOSE_TIMEOUT < module.CLOSE_LIMIT
