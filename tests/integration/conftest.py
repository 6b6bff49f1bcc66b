"""The whole fleet as processes, and a producer beside it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from emulators.prime import PrimeEmulator
from fleets import SYSTEMS, fleet_on

from producer import Producer, RolloutRequest, RolloutResult
from producer.settings import ProducerSettings
from workers.local import LocalStack


@pytest.fixture(scope="module", params=[pytest.param(s, marks=pytest.mark.xdist_group(f"on-{s}")) for s in SYSTEMS])
def systems(request: pytest.FixtureRequest) -> str:
    """What a test's rollouts run on; a test that needs only one names it with ``indirect``."""
    return str(request.param)


@pytest.fixture(scope="module")
def fleet(systems: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LocalStack, PrimeEmulator | None]]:
    """One worker, for tests that do not break it."""
    settings = {"ROLLOUTS_SECRET_ENV": "TEST_SECRET", "TEST_SECRET": "s3cret!", "ROLLOUTS_GATEWAY_ALLOW": "127.0.0.1"}
    with fleet_on(systems, tmp_path_factory.mktemp(systems), concurrency=50, settings=settings) as fleet:
        yield fleet


@pytest.fixture
def stack(fleet: tuple[LocalStack, PrimeEmulator | None]) -> LocalStack:
    return fleet[0]


@pytest.fixture
def sandboxes_left(fleet: tuple[LocalStack, PrimeEmulator | None]) -> Callable[[], list[object]]:
    """Return what is left of sandboxes, live."""
    stack, emulator = fleet

    def left() -> list[object]:
        if emulator:
            return [*emulator.leaked()["sandboxes"], *emulator.leaked()["processes"]]
        homes = stack.directory / "sandboxes"
        return [path for home in homes.glob("*") if home.is_dir() for path in home.iterdir()]

    return left


def requests(count: int, **fields: Any) -> list[RolloutRequest]:
    return [RolloutRequest.parse({"model": "stand-in", "example_id": n, **fields}) for n in range(count)]


Run = Callable[..., list[RolloutResult]]


@pytest.fixture
def run(stack: LocalStack) -> Run:
    """Run requests on the shared stack to their end."""

    def run(*wanted: RolloutRequest) -> list[RolloutResult]:
        return asyncio.run(collect(stack.redis_url, list(wanted)))

    return run


async def collect(redis_url: str, wanted: list[RolloutRequest], timeout: float = 100) -> list[RolloutResult]:
    async with Producer(ProducerSettings(redis_url=redis_url)) as producer, asyncio.timeout(timeout):
        return [result async for result in await producer.submit_many(wanted)]
