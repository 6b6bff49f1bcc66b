"""Every submitted rollout is delivered exactly once: whatever is submitted, cancelled, stale, killed and restarted."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from typing import Any, TypeVar

import pytest
import redis
from celery import Celery
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test
from model_worker import NAME, QUEUES, ModelWorker, backend_app

from producer import OnStale, Producer, ProducerSettings, RolloutRequest, StopCondition, broker
from producer.queues import pending_key, running_key
from workers.history import HandBack
from workers.jobs import JobStore, Requeue

T = TypeVar("T")
BOTH = st.sampled_from(QUEUES)


class Delivery(RuleBasedStateMachine):
    """A producer, a worker and a consumer of one batch, each of which may be killed at any moment."""

    url = ""
    store: JobStore
    worker: ModelWorker

    def __init__(self) -> None:
        super().__init__()
        self.store.client.flushall()
        self.runner = asyncio.Runner()
        self.producer = Producer(ProducerSettings(redis_url=self.url))
        self.run(self.producer.__aenter__())
        self.submitted: dict[str, int] = {}
        self.worker.running.clear()
        self.delivered: list[str] = []
        self.open_consumer()
        self.may_come_again: str | None = None

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(work)

    # -- the trainer ---------------------------------------------------------------------------------------------------

    @rule(count=st.integers(1, 3), version=st.sampled_from([None, 0, 1, 2, 3]), attempts=st.integers(1, 2), queue=BOTH)
    def submit(self, count: int, version: int | None, attempts: int, queue: str) -> None:
        made = []
        for _ in range(count):
            rollout_id = f"r{len(self.submitted)}"
            self.submitted[rollout_id] = -1 if version is None else version
            fields = {"rollout_id": rollout_id, "batch_id": "b", "policy_version": version, "max_attempts": attempts}
            made.append(RolloutRequest.parse({"model": "m", "queue": queue} | fields))
        self.run(self.producer.connection.submit(made))
        self.run(self.producer.connection.submit(made))  # as after a lost reply

    @precondition(lambda self: self.submitted)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.run(self.producer.cancel([data.draw(st.sampled_from(sorted(self.submitted)))]))

    @rule(version=st.integers(0, 4), steps=st.integers(0, 2), on_stale=st.sampled_from(OnStale))
    def train(self, version: int, steps: int, on_stale: OnStale) -> None:
        self.run(self.producer.set_policy_version(version, max_off_policy_steps=steps, on_stale=on_stale))

    @rule(version=st.integers(0, 4), on_stale=st.sampled_from(OnStale))
    def trainer_dies_as_it_says_so(self, version: int, on_stale: OnStale) -> None:
        self.store.client.hset(broker.POLICY, mapping={"version": version, "steps": 0, "on_stale": on_stale.value})

    # -- the worker ----------------------------------------------------------------------------------------------------

    @rule()
    def serve(self) -> None:
        self.worker.serve_one()

    @precondition(lambda self: self.worker.running)
    @rule(data=st.data())
    def complete(self, data: st.DataObject) -> None:
        assert self.worker.end(data.draw(st.sampled_from(sorted(self.worker.running))))

    @precondition(lambda self: self.worker.running)
    @rule(data=st.data())
    def hand_back(self, data: st.DataObject) -> None:
        claim = self.worker.running[data.draw(st.sampled_from(sorted(self.worker.running)))]
        if self.store.release(claim.parsed(), claim.attempt, NAME, HandBack.over("test")) is Requeue.REQUEUED:
            del self.worker.running[claim.rollout_id]

    @rule()
    def worker_dies(self) -> None:
        lost, self.worker.running = self.worker.running, {}
        for rollout_id, claim in lost.items():
            self.store.client.zadd(running_key(claim.parsed().queue), {rollout_id: 1})
        self.worker.sweep()
        for claim in lost.values():  # it was only believed dead, and comes too late
            self.store.commit(claim.rollout_id, claim.attempt, "b", StopCondition.COMPLETED, b"late")
            assert self.store.client.get(broker.result_key(claim.rollout_id)) != b"late"

    @rule()
    def sweep(self) -> None:
        self.worker.sweep()

    # -- the consumer --------------------------------------------------------------------------------------------------

    def open_consumer(self) -> None:
        self.results = self.producer.results("b", consumer="trainer")

    @property
    def ended(self) -> int:
        return int(self.store.client.xlen(broker.stream_key("b")))

    @rule()
    def take(self) -> None:
        self.take_one()

    def take_one(self) -> bool:
        if self.may_come_again is None and self.ended <= len(self.delivered):
            return False
        result = self.run(anext(self.results))
        if self.results.redelivered:
            assert result.rollout_id == self.may_come_again == self.delivered[-1]
        else:
            assert result.rollout_id not in self.delivered
            self.delivered.append(result.rollout_id)
        self.may_come_again = None
        return True

    @rule()
    def consumer_dies(self) -> None:
        self.may_come_again = self.delivered[-1] if self.delivered else None
        self.open_consumer()

    def teardown(self) -> None:
        """All of them come to an end, and each has been delivered once by then."""
        while self.worker.serve_one() or self.worker.running:
            self.worker.end_all()
            self.worker.sweep()
        while self.take_one():
            pass
        self.run(self.producer.close())
        self.runner.close()
        assert sorted(self.delivered) == sorted(self.submitted)
        assert self.ended == len(self.submitted)
        assert not self.store.client.exists(broker.PENDING, broker.RUNNING, broker.VERSIONS, broker.PLACES)
        assert not self.store.client.exists(pending_key("gpu"), running_key("gpu"))


@pytest.fixture
def app(redis_url: str) -> Iterator[Celery]:
    app = backend_app(redis_url)
    yield app
    app.close()


def test_each_rollout_is_delivered_exactly_once_whatever_happens(redis_url: str, app: Celery) -> None:
    with redis.Redis.from_url(redis_url) as client:
        store = JobStore(client, app, lease_ttl=60)
        store.uptime = lambda: 1000.0  # type: ignore[method-assign]
        machine = type("Machine", (Delivery,), {"url": redis_url, "store": store, "worker": ModelWorker(store, app)})
        quick = settings(
            max_examples=25,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            database=None,
        )
        run_state_machine_as_test(machine, settings=quick)
