"""A stand-in for the worker at its narrowest seam: real Celery messages in, real Celery results out.

Records change by the scripts that the workers run, read as text, so the stand-in cannot drift from them.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from urllib.parse import urlsplit

import pytest
import redis
from celery import Celery
from kombu import Consumer

from producer import broker
from producer.contract import RolloutRequest, RolloutResult, StopCondition
from producer.policy import cancelled_error
from producer.settings import ProducerSettings

LEASE_MS = 60_000
RECORD_TTL = int(broker.RESULT_TTL.total_seconds())

Behaviour = Callable[[RolloutRequest], RolloutResult | None]


def complete(request: RolloutRequest) -> RolloutResult:
    return RolloutResult.for_request(request, StopCondition.COMPLETED, reward=1.0)


class StandInWorker(threading.Thread):
    """Consumes with kombu and encodes with Celery's backend; a behaviour that returns None holds the rollout."""

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
        self._wakeup = broker.WakeUp.for_app(self.app, 0)
        self._claim = self.client.register_script(broker.script("workers", "claim"))
        self._commit = self.client.register_script(broker.script("workers", "commit"))

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
        self.join(30)
        self.app.close()

    def receive(self, message: object) -> None:
        rollout_id = message.headers["id"]  # type: ignore[attr-defined]
        message.ack()  # type: ignore[attr-defined]
        request = self.claim(rollout_id)
        if request is None:
            return
        result = self.behaviour(request)
        if result is None:
            self.held[rollout_id] = request
        self.started.append(rollout_id)  # now, so that who sees it there finds it held
        if result is not None:
            self.finish(result)

    def claim(self, rollout_id: str) -> RolloutRequest | None:
        args = [rollout_id, "stand-in", LEASE_MS, RECORD_TTL, "", self._wakeup.render(rollout_id, None), ""]
        status, *found = self._claim(keys=[broker.job_key(rollout_id)], args=args)
        return RolloutRequest.parse(found[-1]) if status == b"claimed" else None

    def end_cancelled(self) -> None:
        for rollout_id, request in list(self.held.items()):
            if self.client.hget(broker.job_key(rollout_id), "cancel"):
                del self.held[rollout_id]
                reason = self.client.hget(broker.job_key(rollout_id), "reason")
                error = cancelled_error(reason.decode() if reason else None)
                self.finish(RolloutResult.for_request(request, StopCondition.CANCELLED, error=error))

    def finish(self, result: RolloutResult) -> None:
        """End a rollout as the worker does that has claimed it; one that still waits is claimed first."""
        rollout_id, backend = result.rollout_id, self.app.backend
        self.claim(rollout_id)
        meta = backend._get_result_meta(result=result, state="SUCCESS", traceback=None, request=None)
        stream = broker.stream_key(result.batch_id)
        ended = self._commit(
            keys=[broker.job_key(rollout_id), stream, broker.result_key(rollout_id)],
            args=[
                rollout_id,
                self.client.hget(broker.job_key(rollout_id), "attempt"),
                result.stop_condition.value,
                RECORD_TTL,
                backend.encode(meta | {"task_id": rollout_id}),
                "owned",
            ],
        )
        assert ended, f"{rollout_id} is not running"

    def announce(self, rollout_id: str, batch_id: str, outcome: str) -> None:
        """End a rollout without storing a result for it, and again when it had ended: what no worker does."""
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


class LossyProxy:
    """Stands between a producer and Redis, and loses the reply to one command on request."""

    def __init__(self, url: str) -> None:
        self._redis = urlsplit(url)
        self.url = ""
        self.lose_reply_to: bytes | None = None

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[LossyProxy]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}/0"
        try:
            yield self
        finally:
            server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up_reader, up_writer = await asyncio.open_connection(self._redis.hostname, self._redis.port)
        lossy = False

        async def up() -> None:
            nonlocal lossy
            while data := await reader.read(65536):
                if self.lose_reply_to and self.lose_reply_to in data:
                    self.lose_reply_to, lossy = None, True
                up_writer.write(data)

        async def down() -> None:
            while (data := await up_reader.read(65536)) and not lossy:
                writer.write(data)

        both = [asyncio.create_task(up()), asyncio.create_task(down())]
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in both:
                task.cancel()
            writer.close()
            up_writer.close()


@pytest.fixture
def lossy_proxy() -> Callable[[str], contextlib.AbstractAsyncContextManager[LossyProxy]]:
    """Starts a proxy to the server at a URL, on the running loop."""
    return lambda url: LossyProxy(url).running()
