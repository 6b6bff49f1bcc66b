"""A stand-in for the worker at its narrowest seam: real Celery messages in, records and real Celery results out."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

import pytest
import redis
from celery import Celery
from kombu import Consumer

from producer import broker
from producer.contract import RolloutRequest, RolloutResult, StopCondition
from producer.settings import ProducerSettings

Behaviour = Callable[[RolloutRequest], RolloutResult | None]


def complete(request: RolloutRequest) -> RolloutResult:
    return RolloutResult.for_request(request, StopCondition.COMPLETED, reward=1.0)


class StandInWorker(threading.Thread):
    """Consumes with kombu and stores with Celery's backend; a behaviour that returns None holds the rollout."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self.app = Celery("stand-in", set_as_current=False)
        self.app.config_from_object(broker.celery_config(url))
        # kombu's blocking read, which closing a connection waits for, takes a second by default.
        self.app.conf.broker_transport_options |= {"polling_interval": 0.05}
        self.client = redis.Redis.from_url(url)
        self.behaviour: Behaviour = complete
        self.started: list[str] = []
        self.held: dict[str, RolloutRequest] = {}
        self._stopping = threading.Event()

    def run(self) -> None:
        with self.app.connection_for_read() as connection:
            queue = self.app.amqp.queues[broker.QUEUE]
            with Consumer(connection, [queue], accept=["json"], on_message=self.receive, prefetch_count=1):
                while not self._stopping.is_set():
                    with contextlib.suppress(TimeoutError):
                        connection.drain_events(timeout=0.05)
                    self.end_cancelled()

    def stop(self) -> None:
        self._stopping.set()
        self.join(10)
        self.app.close()

    def receive(self, message: object) -> None:
        rollout_id = message.headers["id"]  # type: ignore[attr-defined]
        message.ack()  # type: ignore[attr-defined]
        key = broker.job_key(rollout_id)
        if self.client.hget(key, "state") != b"pending":
            return
        self.client.hset(key, mapping={"state": "running", "attempt": 1})
        self.client.zrem(broker.PENDING, rollout_id)
        request = RolloutRequest.parse(self.client.hget(key, "request"))
        self.started.append(rollout_id)
        result = self.behaviour(request)
        if result is None:
            self.held[rollout_id] = request
        else:
            self.finish(result)

    def end_cancelled(self) -> None:
        for rollout_id, request in list(self.held.items()):
            if self.client.hget(broker.job_key(rollout_id), "cancel"):
                del self.held[rollout_id]
                self.finish(RolloutResult.for_request(request, StopCondition.CANCELLED))

    def finish(self, result: RolloutResult) -> None:
        self.app.backend.store_result(result.rollout_id, result, "SUCCESS")
        self.announce(result.rollout_id, result.batch_id, result.stop_condition)

    def announce(self, rollout_id: str, batch_id: str, outcome: str) -> None:
        pipe = self.client.pipeline(transaction=True)
        pipe.hset(broker.job_key(rollout_id), mapping={"state": "done", "outcome": str(outcome)})
        pipe.xadd(broker.stream_key(batch_id), {"id": rollout_id, "outcome": str(outcome)})
        pipe.execute()


@pytest.fixture
def start_worker() -> Iterator[Callable[[str], StandInWorker]]:
    """Starts a stand-in worker on the server at a URL."""
    workers: list[StandInWorker] = []

    def start(url: str) -> StandInWorker:
        workers.append(StandInWorker(url))
        workers[-1].start()
        return workers[-1]

    yield start
    for worker in workers:
        worker.stop()


@pytest.fixture
def worker(redis_url: str, start_worker: Callable[[str], StandInWorker]) -> StandInWorker:
    """A stand-in worker that completes whatever it is given."""
    return start_worker(redis_url)


@pytest.fixture
def idle_worker(redis_url: str) -> Iterator[StandInWorker]:
    """A stand-in worker that does not consume: the test ends rollouts by hand."""
    worker = StandInWorker(redis_url)
    yield worker
    worker.app.close()


@pytest.fixture
def settings(redis_url: str) -> ProducerSettings:
    return ProducerSettings(redis_url=redis_url)


@pytest.fixture
def make() -> Callable[..., list[RolloutRequest]]:
    """Makes requests with the ids r-0, r-1, ..."""

    def requests(count: int, **fields: object) -> list[RolloutRequest]:
        return [
            RolloutRequest.parse({"model": "m", "rollout_id": f"r-{i}", "example_id": i} | fields) for i in range(count)
        ]

    return requests
