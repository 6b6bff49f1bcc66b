"""A batch outlasts a Redis that loses its last moments: each of its rollouts is delivered once all the same."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import suppress
from typing import Any, TypeVar

import pytest
import redis
from celery import Celery
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test
from model_worker import NAME, QUEUES, ModelWorker, backend_app

from producer import Producer, ProducerSettings, RolloutRequest, broker
from producer.queues import running_key
from workers.jobs import JobStore

T = TypeVar("T")

_ROUNDS = 3  #: round trips to the server, in which what the producer has asked is answered
_END = 60.0


class LostData(RuleBasedStateMachine):
    """A batch that submits and consumes, a worker, and a server that goes back to what it had saved."""

    url = ""
    store: JobStore
    worker: ModelWorker

    def __init__(self) -> None:
        super().__init__()
        self.store.client.flushall()
        self.runner = asyncio.Runner()
        self.producer = Producer(ProducerSettings(redis_url=self.url))
        self.asked = 0
        self.worker.running.clear()
        self.delivered: list[str] = []
        self.saved: dict[bytes, tuple[bytes, int]] = {}
        self.run(self.begin())

    async def begin(self) -> None:
        await self.producer.__aenter__()
        self.requests: asyncio.Queue[RolloutRequest | None] = asyncio.Queue()
        self.batch = await self.producer.submit_many(self.source(), batch_id="b", max_in_flight=6)

    async def source(self) -> AsyncIterator[RolloutRequest]:
        while (request := await self.requests.get()) is not None:
            yield request

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(work)

    # -- the batch -----------------------------------------------------------------------------------------------------

    @rule(count=st.integers(1, 3), queue=st.sampled_from(QUEUES))
    def submit(self, count: int, queue: str) -> None:
        for _ in range(count):
            fields = {"model": "m", "rollout_id": f"r{self.asked}", "queue": queue}
            self.requests.put_nowait(RolloutRequest.parse(fields))
            self.asked += 1
        self.go_on()

    def announced(self) -> set[str]:
        """Return what the server knows to have ended, and was not delivered yet."""
        entries = self.store.client.xrange(broker.stream_key("b"))
        return {fields[b"id"].decode() for _, fields in entries} - set(self.delivered)

    @rule()
    def take(self) -> None:
        self.run(self.take_one() if self.announced() else self.take_in_vain())

    async def take_one(self) -> None:
        async with asyncio.timeout(_END):
            self.delivered.append((await anext(self.batch)).rollout_id)
        assert len(self.delivered) == len(set(self.delivered))

    async def take_in_vain(self) -> None:
        waiting = asyncio.ensure_future(anext(self.batch))
        await self.rounds()
        waiting.cancel()
        with suppress(asyncio.CancelledError):
            self.delivered.append((await waiting).rollout_id)

    @rule()
    def go_on(self) -> None:
        self.run(self.rounds())

    async def rounds(self) -> None:
        """Let the producer's loop go on, for as long as the server takes to answer what it has asked."""
        for _ in range(_ROUNDS):
            await asyncio.to_thread(self.store.client.ping)

    # -- the worker ----------------------------------------------------------------------------------------------------

    @rule()
    def serve(self) -> None:
        while self.worker.serve_one():
            pass

    @precondition(lambda self: self.worker.running)
    @rule(data=st.data())
    def complete(self, data: st.DataObject) -> None:
        self.worker.end(data.draw(st.sampled_from(sorted(self.worker.running))))

    # -- the server ----------------------------------------------------------------------------------------------------

    @rule()
    def save(self) -> None:
        client = self.store.client
        self.saved = {key: (client.dump(key), max(0, client.pttl(key))) for key in client.scan_iter()}

    @rule()
    def lose(self) -> None:
        client = self.store.client
        client.flushall()
        for key, (value, ttl) in self.saved.items():
            client.restore(key, ttl, value)
        client.client_kill_filter(_type="normal", skipme=True)
        for rollout_id, claim in list(self.worker.running.items()):  # what renewing the leases finds
            if self.store.claimed_by(rollout_id) != (claim.attempt, NAME):
                del self.worker.running[rollout_id]

    def teardown(self) -> None:
        """The source ends; the worker goes on and the sweep runs, until all is delivered."""
        self.requests.put_nowait(None)
        self.worker.end_all()
        for key in map(running_key, QUEUES):
            for lapsed in self.store.client.zrange(key, 0, -1):  # of claims that only the server remembers
                self.store.client.zadd(key, {lapsed: 1})
        self.run(self.to_the_end())
        self.runner.close()
        assert sorted(self.delivered) == sorted(f"r{n}" for n in range(self.asked))

    async def to_the_end(self) -> None:
        async with asyncio.timeout(_END):
            while len(self.delivered) < self.asked:
                await asyncio.to_thread(self.worker.sweep)
                self.serve()
                self.worker.end_all()
                # The producer may have been told of one that the server has lost since.
                await (self.take_one() if self.announced() else self.take_in_vain())
        await self.producer.close()


@pytest.fixture
def app(redis_url: str) -> Iterator[Celery]:
    app = backend_app(redis_url)
    yield app
    app.close()


def test_each_rollout_of_a_batch_is_delivered_once_by_a_server_that_loses_data(
    redis_url: str, app: Celery, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A loss that comes while the one before is dealt with is found when the stream has been quiet for half a minute.
    monkeypatch.setattr("producer.results._BLOCK_MS", 20)
    with redis.Redis.from_url(redis_url) as client:
        store = JobStore(client, app, lease_ttl=0.05)
        store.uptime = lambda: 1000.0  # type: ignore[method-assign]
        machine = type("Machine", (LostData,), {"url": redis_url, "store": store, "worker": ModelWorker(store, app)})
        quick = settings(
            max_examples=8,
            stateful_step_count=30,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            database=None,
        )
        run_state_machine_as_test(machine, settings=quick)
