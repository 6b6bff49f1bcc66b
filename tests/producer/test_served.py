"""A producer says it where nobody runs what it submits."""

from __future__ import annotations

import asyncio
import json
import logging

import pytest
from support import RedisServer

from producer import Producer, ProducerSettings, RolloutRequest, broker

FOREVER = 10**14


def requests(*queues: str) -> list[RolloutRequest]:
    return [RolloutRequest(model="m", queue=queue) for queue in queues]


def report(server: RedisServer, name: str, *, expires: int = FOREVER, **fields: object) -> None:
    server.client.zadd(broker.WORKERS, {name: expires})
    server.client.set(broker.worker_key(name), json.dumps(fields))


def told_by(server: RedisServer, *batches: list[RolloutRequest], count: int) -> list[str]:
    """Submit, and return what was told as soon as there are so many sentences."""
    told: list[str] = []

    async def scenario() -> None:
        settings = ProducerSettings(redis_url=server.url)
        async with Producer(settings, tell=told.append) as producer, asyncio.timeout(30):
            for batch in batches:
                await producer.connection.submit(batch)
                while producer.served._look is not None and not producer.served._look.done():
                    await asyncio.sleep(0.01)

    asyncio.run(scenario())
    assert len(told) == count, told
    return told


def test_each_queue_that_no_worker_serves_is_told_once_with_what_to_do(own_redis: RedisServer) -> None:
    report(own_redis, "w1", queues=["rollouts", "cpu"])
    report(own_redis, "dead", expires=1, queues=["gpu"])
    report(own_redis, "leaves", state="draining", queues=["gpu"])
    first, second = told_by(own_redis, requests("cpu", "gpu", "rollouts"), requests("gpu", "tpu"), count=2)
    assert "serves queue gpu; start one with: ROLLOUTS_QUEUES=gpu rollouts worker (waiting for it)" in first
    assert "serves queue tpu" in second


def test_without_any_worker_that_is_told_once_and_another_queue_too(own_redis: RedisServer) -> None:
    first, second = told_by(own_redis, requests("rollouts"), requests("rollouts", "gpu"), count=2)
    assert "no worker is running on redis://127.0.0.1" in first
    assert "serves queue gpu" in second


def test_a_worker_of_a_version_that_knew_one_queue_serves_that_one(own_redis: RedisServer) -> None:
    report(own_redis, "w1", running=3)
    (only,) = told_by(own_redis, requests("rollouts", "gpu"), count=1)
    assert "serves queue gpu" in only


def test_a_trainer_finds_it_in_its_log(own_redis: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with Producer(ProducerSettings(redis_url=own_redis.url)) as producer, asyncio.timeout(30):
            await producer.submit(requests("gpu")[0])
            while "serves queue gpu" not in caplog.text:
                await asyncio.sleep(0.01)

    with caplog.at_level(logging.WARNING):
        asyncio.run(scenario())
