"""Queues of the fleet's pools: a rollout waits, runs and comes back in its own, and one that nobody serves is told."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import orjson
import pytest
import redis
from celery import Celery
from kombu import Connection
from model_worker import backend_app
from pydantic import ValidationError
from support import RedisServer

from producer import InvalidRequestError, Producer, ProducerSettings, RolloutRequest, StopCondition, broker, queues
from producer.contract import ErrorInfo, ErrorKind
from producer.operating import Operator, RetryAnswer, Wanted
from workers import transport
from workers.app import create_app
from workers.history import HandBack
from workers.jobs import Claim, JobStore, Requeue
from workers.places import Places
from workers.settings import WorkerSettings
from workers.sweep import sweep

FAILED = HandBack(error=ErrorInfo(kind=ErrorKind.SANDBOX, message="it died"))
OVER = HandBack.over("it shut down")
LISTS = queues.queue_keys("gpu")
PENDING, DELAYED, RUNNING = (key("gpu") for key in (queues.pending_key, queues.delayed_key, queues.running_key))


@pytest.fixture
def app(redis_url: str) -> Iterator[Celery]:
    with closing(backend_app(redis_url)) as app:
        yield app


@pytest.fixture
def client(redis_url: str) -> Iterator[Any]:
    with redis.Redis.from_url(redis_url) as client:
        yield client


@pytest.fixture
def gpu(client: Any, app: Celery) -> JobStore:
    """The store of a worker of the queue."""
    return JobStore(client, app, lease_ttl=60, serves=("gpu",))


@pytest.fixture
def other(client: Any, app: Celery) -> JobStore:
    """The store of a worker that serves the default queue only."""
    store = JobStore(client, app, lease_ttl=60, serves=("rollouts",))
    store.uptime = lambda: 1000.0  # type: ignore[method-assign]
    return store


def submit(url: str, *ids: str, limits: dict[str, int] | None = None, **fields: Any) -> None:
    async def act() -> None:
        async with Producer(ProducerSettings(redis_url=url)) as producer:
            for place, count in (limits or {}).items():
                await producer.set_limit(place, count)
            made = [RolloutRequest.parse({"model": "m", "rollout_id": i, "queue": "gpu"} | fields) for i in ids]
            await producer.connection.submit(made)

    asyncio.run(act())


def operate(url: str, act: Any) -> Any:
    async def run() -> Any:
        async with Producer(ProducerSettings(redis_url=url)) as producer:
            return await act(Operator(producer.connection))

    return asyncio.run(run())


def waiting(client: Any, queue: str = "gpu") -> list[str]:
    """Return whose messages lie in a queue's lists, the next first; each is one for that queue."""
    found = []
    for key in queues.queue_keys(queue):
        for message in map(orjson.loads, reversed(client.lrange(key, 0, -1))):
            assert message["properties"]["delivery_info"]["routing_key"] == queues.celery_name(queue)
            found.append(message["headers"]["id"])
    return found


def take(client: Any, queue: str = "gpu") -> str:
    key = next(key for key in queues.queue_keys(queue) if client.llen(key))
    return str(orjson.loads(client.rpop(key))["headers"]["id"])


def claimed(store: JobStore, rollout_id: str) -> Claim:
    claim = store.claim(rollout_id, "w")
    assert isinstance(claim, Claim), claim
    return claim


def end(store: JobStore, claim: Claim) -> None:
    assert store.commit(claim.rollout_id, claim.attempt, claim.batch_id, StopCondition.COMPLETED, b"x")


# -- names -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["", "GPU", "-gpu", "a b", "a.b", "a,b", "a:b", "x" * 64, "a\n", "größe"])
def test_what_is_no_queues_name_is_refused_with_the_field(name: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"^queue: .* is no queue's name: lower-case letters"):
        RolloutRequest.parse({"model": "m", "queue": name})
    with pytest.raises(ValidationError, match=r"queues"):
        WorkerSettings(queues=(name,))


def test_a_worker_serves_the_queues_of_its_setting_each_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert WorkerSettings().queues == ("rollouts",)
    monkeypatch.setenv("ROLLOUTS_QUEUES", "gpu, cpu,gpu")
    assert WorkerSettings().queues == ("gpu", "cpu")


@pytest.mark.parametrize("name", ["rollouts", "gpu", "maintenance", "a_b-c0"])
def test_celery_knows_a_queue_by_a_name_of_which_it_can_be_told(name: str) -> None:
    assert queues.rollout_queue(queues.celery_name(name)) == name
    assert queues.queue_key(0, name).startswith("rollouts"), "what an ACL rule lets in"
    assert queues.celery_name(name) not in {broker.MAINTENANCE_QUEUE, broker.HEALTH_QUEUE}


@pytest.mark.parametrize("name", [broker.MAINTENANCE_QUEUE, broker.HEALTH_QUEUE, "gpu", "rollouts.q.rollouts"])
def test_what_celery_knows_by_another_name_is_no_queue_of_rollouts(name: str) -> None:
    assert queues.rollout_queue(name) is None


def test_a_request_of_the_default_queue_costs_nothing_more(client: Any, redis_url: str) -> None:
    submit(redis_url, "r1", queue="rollouts")
    assert b"queue" not in client.hgetall(broker.job_key("r1"))
    assert b"queue" not in client.hget(broker.job_key("r1"), "request")
    assert not client.exists(queues.QUEUES)


# -- where a rollout is ------------------------------------------------------------------------------------------------


def test_a_rollout_waits_and_runs_in_its_own_queue_and_nowhere_else(client: Any, gpu: JobStore, redis_url: str) -> None:
    submit(redis_url, "r1", priority=9)
    assert [client.llen(key) for key in LISTS] == [0, 0, 0, 1]
    assert waiting(client) == ["r1"]
    assert client.zrange(PENDING, 0, -1) == [b"r1"]
    assert client.smembers(queues.QUEUES) == {b"gpu"}
    claim = claimed(gpu, take(client))
    assert client.zrange(RUNNING, 0, -1) == [b"r1"]
    assert gpu.renew([("r1", 1)]) == {"r1": "renewed"}
    assert client.zcard(RUNNING) == 1
    assert not client.exists(broker.PENDING, broker.RUNNING, broker.DELAYED, *broker.queue_keys(), PENDING)
    end(gpu, claim)
    assert not client.exists(RUNNING)


def test_a_worker_that_does_not_serve_its_queue_leaves_it_to_one_that_does(
    client: Any, gpu: JobStore, other: JobStore, redis_url: str
) -> None:
    submit(redis_url, "r1")
    assert other.claim("r1", "w") == "elsewhere"
    assert client.hget(broker.job_key("r1"), "state") == b"pending"
    assert waiting(client) == ["r1"]
    claimed(gpu, "r1")


def test_a_message_that_carries_a_request_of_another_queue_is_sent_there(
    client: Any, gpu: JobStore, other: JobStore
) -> None:
    offered = RolloutRequest(rollout_id="r1", model="m", queue="gpu", priority=0)
    assert other.claim("r1", "w", offered) == "elsewhere"
    assert waiting(client) == ["r1"]
    assert client.zrange(PENDING, 0, -1) == [b"r1"]
    assert claimed(gpu, take(client)).parsed() == offered


@pytest.mark.parametrize(("how", "order"), [(FAILED, ["r2", "r1"]), (OVER, ["r1", "r2"])])
def test_what_is_given_back_goes_to_its_own_queue_and_a_hand_over_to_the_front(
    client: Any, gpu: JobStore, redis_url: str, how: HandBack, order: list[str]
) -> None:
    submit(redis_url, "r1", "r2")
    claim = claimed(gpu, take(client))
    assert gpu.release(claim.parsed(), 1, "w", how) is Requeue.REQUEUED
    assert waiting(client) == order
    assert not client.exists(*broker.queue_keys())


def test_any_worker_sweeps_up_after_the_workers_of_a_queue_that_it_does_not_serve(
    client: Any, gpu: JobStore, other: JobStore, app: Celery, redis_url: str
) -> None:
    submit(redis_url, "lapsed", "delayed", "lost")
    for _ in range(3):
        take(client)
    claimed(gpu, "lapsed")
    client.zadd(RUNNING, {"lapsed": 1})
    failed = replace(FAILED, delay=30.0)
    assert gpu.release(claimed(gpu, "delayed").parsed(), 1, "w", failed) is Requeue.REQUEUED
    assert client.zrange(DELAYED, 0, -1) == [b"delayed"]
    client.zadd(DELAYED, {"delayed": 1})
    client.zadd(PENDING, {"lost": queues.pending_base(3) + 1})
    assert sweep(other, app) == {"requeued": 1, "woken": 1}
    client.delete(*LISTS)
    client.delete(broker.SWEPT)
    other.resend_missing(age=-1)
    assert sorted(waiting(client)) == ["delayed", "lapsed", "lost"]
    assert not client.exists(*broker.queue_keys())


def test_what_is_parked_is_woken_into_its_own_queue(
    client: Any, gpu: JobStore, other: JobStore, redis_url: str
) -> None:
    submit(redis_url, "r1", limits={"env:e": 1}, environment="e", queue="rollouts")
    submit(redis_url, "r2", environment="e")
    first = claimed(other, take(client, "rollouts"))
    assert gpu.claim(take(client), "w") == "parked"
    assert waiting(client) == []
    assert other.forget_queues() == 1, "nothing of it is queued or runs"
    assert Places(client).mend() == 0
    end(other, first)
    assert waiting(client) == ["r2"]
    assert client.smembers(queues.QUEUES) == {b"gpu"}, "it is known again"
    assert Places(client).mend() == 0
    claimed(gpu, "r2")
    assert Places(client).mend() == 0


def test_evaluation_goes_first_in_each_queue_and_starves_nobody_there(
    client: Any, gpu: JobStore, redis_url: str
) -> None:
    submit(redis_url, *(f"t{n}" for n in range(8)))
    submit(redis_url, *(f"e{n}" for n in range(20)), purpose="eval")
    submit(redis_url, *(f"x{n}" for n in range(20)), queue="rollouts", purpose="eval")
    served = []
    for _ in range(20):
        served.append(take(client))
        claimed(gpu, served[-1])
    assert [i for i in served if i[0] == "t"] == ["t0", "t1", "t2", "t3"], "every fourth place is theirs"
    assert len(waiting(client, "rollouts")) == 20, "and none is another queue's"


def test_cancel_retry_and_ps_find_it_where_it_is(client: Any, gpu: JobStore, redis_url: str) -> None:
    submit(redis_url, "r1", "r2")
    submit(redis_url, "x", queue="rollouts")
    end(gpu, claimed(gpu, take(client)))

    async def act(operator: Operator) -> Any:
        await operator.cancel(["r2"])
        assert client.zcard(PENDING) == 0
        assert await operator.retry(["r1", "r2"]) == dict.fromkeys(("r1", "r2"), RetryAnswer.RETRIED)
        everywhere = {one.rollout_id: one.queue async for one in operator.listed(Wanted())}
        there = [one.rollout_id async for one in operator.listed(Wanted(queue="gpu"))]
        return everywhere, sorted(there)

    everywhere, there = operate(redis_url, act)
    assert everywhere == {"r1": "gpu", "r2": "gpu", "x": "rollouts"}
    assert there == ["r1", "r2"]
    client.delete(*LISTS)
    gpu.resend_missing(age=-1)
    assert sorted(waiting(client)) == ["r1", "r2"]


def test_a_queue_is_forgotten_when_nothing_of_it_is_left(client: Any, gpu: JobStore, redis_url: str) -> None:
    submit(redis_url, "r1")
    assert gpu.forget_queues() == 0
    claim = claimed(gpu, take(client))
    assert gpu.forget_queues() == 0
    end(gpu, claim)
    assert gpu.forget_queues() == 1
    assert gpu.queues() == ["rollouts"]


def test_what_is_no_name_among_the_queues_ends_no_sweep(client: Any, other: JobStore, app: Celery) -> None:
    client.sadd(queues.QUEUES, b"\xff", "A B", "ok")
    assert other.queues() == ["rollouts", "ok"]
    assert sweep(other, app) == {"queues": 1}


# -- who takes what ----------------------------------------------------------------------------------------------------


def test_a_worker_takes_from_its_queues_in_turn_whatever_their_priorities(client: Any, redis_url: str) -> None:
    submit(redis_url, *(f"e{n}" for n in range(4)), queue="rollouts", purpose="eval")
    submit(redis_url, *(f"t{n}" for n in range(4)), priority=9)
    taken: list[str] = []
    with Connection(redis_url, transport=transport.Transport) as connection:
        connection.transport_options = broker.celery_config(redis_url)["broker_transport_options"]
        channel = connection.default_channel
        both = [queues.celery_name(queue) for queue in ("rollouts", "gpu")]
        for name in both:
            channel.queue_declare(name)
            channel.basic_consume(name, True, lambda m: taken.append(m.headers["id"]), name)
        while len(taken) < 8:
            connection.drain_events(timeout=10)
    assert taken == ["e0", "t0", "e1", "t1", "e2", "t2", "e3", "t3"]


@pytest.mark.parametrize("options", [("-Q", "gpu"), ("-Q", "rollouts.q.cpu,rollouts.q.gpu"), ("-X", "rollouts.q.cpu")])
def test_celerys_own_choice_of_queues_is_refused_with_what_to_do(own_redis: RedisServer, options: tuple[str]) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "celery", "-A", "workers", "worker", *options],
        env=os.environ | {"ROLLOUTS_REDIS_URL": own_redis.url, "ROLLOUTS_QUEUES": "cpu"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 1
    assert "ROLLOUTS_QUEUES is cpu: leave them out, and name in ROLLOUTS_QUEUES the queues" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_message_on_a_queue_that_says_nothing_of_one_is_of_that_queue(redis_url: str) -> None:
    app = create_app(WorkerSettings(redis_url=redis_url, queues=("gpu",)), {})
    seen: list[Any] = []
    claims = SimpleNamespace(claim=lambda job, carried: bool(seen.append(carried)))
    app.rollout_fleet.claims = claims
    task = app.tasks[broker.RUN_ROLLOUT]
    for carried in ({"model": "m"}, {"model": "m", "queue": "cpu"}, "text"):
        request = {"args": [carried], "kwargs": {}, "delivery_info": {"routing_key": "rollouts.q.gpu"}}
        assert not task.admit(SimpleNamespace(request=request))
    assert seen == [{"model": "m", "queue": "gpu"}, {"model": "m", "queue": "cpu"}, "text"]
    assert set(app.amqp.queues.consume_from) >= {"rollouts.q.gpu", broker.MAINTENANCE_QUEUE}
    assert "rollouts" not in app.amqp.queues.consume_from
