"""A run in which nothing ends says why: what the fleet's status finds wrong."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import pytest
import redis

from producer import broker
from producer.batch import Counts
from producer.connection import FleetConnection
from producer.stalled import Stalled

FAILING = {"state": "closed", "failures": 4, "last_error": "cannot connect to the rollout gateway at http://gw:8080"}


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("producer.stalled._PATIENCE", 0.2)
    monkeypatch.setattr("producer.stalled._LOOK", 0.01)


def tell_of(client: redis.Redis, name: str, **fields: Any) -> None:
    report = {"concurrency": 4, "running": 0, "breaker": {"state": "closed", "systems": {"gateway": FAILING}}}
    seconds, _ = client.time()
    client.zadd(broker.WORKERS, {name: (seconds + 60) * 1000})
    client.set(broker.worker_key(name), json.dumps(report | fields))


def watched(url: str, counts: Any, until: Any) -> list[str]:
    told: list[str] = []

    async def scenario() -> None:
        connection = FleetConnection(url)
        async with Stalled(connection, counts, told.append).watching(), asyncio.timeout(20):
            while not until(told):
                await asyncio.sleep(0.01)
        await connection.close()

    asyncio.run(scenario())
    return told


@pytest.mark.usefixtures("quick")
def test_a_gateway_that_fails_is_told_before_the_breaker_opens_and_ever_less_often(redis_url: str) -> None:
    with redis.Redis.from_url(redis_url) as client:
        tell_of(client, "w1@a")
    told = watched(redis_url, lambda: Counts(submitted=5), lambda told: len(told) >= 2)
    assert re.fullmatch(
        r"no result for \d+ s: w1@a: its gateway failed 4 times in a row, and is tried again; "
        "last: cannot connect to the rollout gateway at http://gw:8080",
        told[0],
    )


@pytest.mark.usefixtures("quick")
def test_of_many_workers_with_the_same_trouble_three_are_told_of(redis_url: str) -> None:
    with redis.Redis.from_url(redis_url) as client:
        for number in range(5):
            tell_of(client, f"w{number}@a")
    told = watched(redis_url, lambda: Counts(submitted=5), lambda told: len(told) >= 4)
    assert told[3] == "... and 2 more: rollouts status"


@pytest.mark.usefixtures("quick")
def test_nothing_is_told_while_results_come_or_nothing_is_wrong(redis_url: str) -> None:
    rounds = 0

    def coming() -> Counts:
        nonlocal rounds
        rounds += 1
        return Counts(submitted=10_000, completed=rounds)

    with redis.Redis.from_url(redis_url) as client:
        tell_of(client, "w1@a")
        assert watched(redis_url, coming, lambda told: rounds > 100) == []
        tell_of(client, "w1@a", breaker={"state": "closed", "systems": {}})
    rounds = 0
    looked: list[Counts] = []

    def still() -> Counts:
        looked.append(Counts(submitted=3))
        return looked[-1]

    assert watched(redis_url, still, lambda told: len(looked) > 100) == []
