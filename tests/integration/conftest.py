"""The whole fleet as processes, and a producer beside it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from producer import Producer, RolloutRequest, RolloutResult
from producer.settings import ProducerSettings
from workers.local import LocalStack, StackOptions

LEASE_TTL = 2.0


@dataclass
class Agents:
    """Agents that note their start in a file and run until they are released."""

    directory: Path
    _writer: int | None = None

    def __post_init__(self) -> None:
        os.mkfifo(self.directory / "wait")

    def command(self) -> str:
        # Reading one byte from a FIFO costs nothing while it waits, unlike a loop around sleep.
        return f"echo $OPENAI_BASE_URL >> {self.directory}/started; head -c 1 {self.directory}/wait > /dev/null"

    def starts(self) -> list[str]:
        """Return the base URL of every agent that was started: one line for each start."""
        path = self.directory / "started"
        return path.read_text().split() if path.exists() else []

    def release(self) -> None:
        """Let the agents end, those that start later too."""
        self._writer = os.open(self.directory / "wait", os.O_RDWR)
        os.write(self._writer, b"." * 4096)

    def close(self) -> None:
        if self._writer is not None:
            os.close(self._writer)


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[Agents]:
    agents = Agents(tmp_path)
    yield agents
    agents.close()


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    """One worker, for tests that do not break it."""
    options = StackOptions(
        concurrency=50,
        log_dir=tmp_path_factory.mktemp("logs"),
        settings={"ROLLOUTS_LEASE_TTL": str(LEASE_TTL), "ROLLOUTS_SECRET_ENV": "TEST_SECRET", "TEST_SECRET": "s3cret!"},
    )
    with LocalStack(options) as stack:
        yield stack


def requests(count: int, **fields: Any) -> list[RolloutRequest]:
    return [RolloutRequest.parse({"model": "stand-in", "example_id": n, **fields}) for n in range(count)]


Run = Callable[..., list[RolloutResult]]


@pytest.fixture
def run(stack: LocalStack) -> Run:
    """Run requests on the shared stack to their end."""

    def run(*wanted: RolloutRequest) -> list[RolloutResult]:
        return asyncio.run(collect(stack.redis_url, list(wanted)))

    return run


async def collect(redis_url: str, wanted: list[RolloutRequest], timeout: float = 60) -> list[RolloutResult]:
    async with Producer(ProducerSettings(redis_url=redis_url)) as producer, asyncio.timeout(timeout):
        return [result async for result in await producer.submit_many(wanted)]
