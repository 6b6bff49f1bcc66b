"""What a large fleet costs its Redis, and how long looking at it takes: real scripts and records, a real server.

Two lines of JSON. ``scale_view``: 10,000 rollouts wait and 5,000 run, and an operator's looks are timed: the sweep,
what ``rollouts status`` reads, and a scrape of a worker that runs all 5,000. All are to take less than 100 ms, and none
may hold up an event loop of the same process for as long. ``scale_records``: 100,000 rollouts go through all states, as
in a fleet of that size (no agent runs): bytes in Redis, operations a second of one client on one connection, and the
seconds in which all leases are renewed, which has to be done four times in each lease.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import redis
from bench_redis_memory import claim_all, end_all, used
from celery import Celery
from harness import finish, null_requests, report
from prometheus_client import CollectorRegistry, generate_latest
from support import RedisServer

from producer import Producer, broker
from producer.connection import FleetConnection
from producer.settings import ProducerSettings
from producer.status import read_status
from workers import instruments, results
from workers.jobs import JobStore
from workers.metrics import QueueCollector, RolloutCollector
from workers.state import Rollout
from workers.sweep import sweep

QUEUED, RUNNING = 10_000, 5_000
TRIES = 15
LEASE_TTL = 60.0


class Heartbeat:
    """An event loop in a thread of its own, and by how many milliseconds it was late at most."""

    def __init__(self) -> None:
        self.late = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._beat()))

    async def _beat(self) -> None:
        while not self._stop.is_set():
            began = time.perf_counter()
            await asyncio.sleep(0.005)
            self.late = max(self.late, (time.perf_counter() - began - 0.005) * 1000)

    def __enter__(self) -> Heartbeat:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stop.set()
        self._thread.join()


@contextmanager
def fresh_store() -> Iterator[tuple[RedisServer, JobStore, Celery]]:
    """Start an empty server, with an append-only file as in production."""
    with tempfile.TemporaryDirectory() as directory:
        server = RedisServer(Path(directory))
        server.start()
        app = Celery("benchmark", set_as_current=False)
        app.config_from_object(broker.celery_config(server.url) | {"result_backend": results.PREFIX + server.url})
        with redis.Redis.from_url(server.url) as client:
            yield server, JobStore(client, app, lease_ttl=LEASE_TTL), app
        app.close()
        server.stop()


def settings_of(server: RedisServer, count: int) -> ProducerSettings:
    return ProducerSettings.model_construct(
        redis_url=server.url, keep_consumed=3600.0, max_in_flight=count, allow_eviction=False
    )


async def submit(server: RedisServer, count: int) -> list[Any]:
    requests = null_requests(count)
    async with Producer(settings_of(server, count)) as producer:
        await producer.connection.submit(requests)
    return requests


def milliseconds(call: Callable[[], object]) -> dict[str, float]:
    took = []
    for _ in range(TRIES):
        began = time.perf_counter()
        call()
        took.append((time.perf_counter() - began) * 1000)
    took.sort()
    return {"median": round(took[len(took) // 2], 2), "worst": round(took[-1], 2)}


def view() -> None:
    """Time an operator's looks at a full queue."""
    with fresh_store() as (server, store, app):
        requests = asyncio.run(submit(server, QUEUED + RUNNING))
        messages = store.client.lrange(broker.QUEUE, 0, -1)
        running = [Rollout(request, "http://gateway") for request in requests[:RUNNING]]
        claims = [store.claim(request.rollout_id, "worker") for request in requests[:RUNNING]]
        assert all(not isinstance(claim, str) for claim in claims)
        store.client.ltrim(broker.QUEUE, 0, len(messages) - RUNNING - 1)

        def sweep_now() -> None:
            store.client.delete(broker.SWEPT)
            sweep(store, app)

        async def status() -> dict[str, float]:
            connection = FleetConnection(server.url)
            await connection.open()
            took = []
            for _ in range(TRIES):
                began = time.perf_counter()
                found = await read_status(connection)
                took.append((time.perf_counter() - began) * 1000)
                assert (found.pending, found.running) == (QUEUED, RUNNING)
            await connection.close()
            return {"median": round(sorted(took)[TRIES // 2], 2), "worst": round(max(took), 2)}

        registry = CollectorRegistry()
        queue = QueueCollector(store)
        for collector in (*instruments.ALL, queue, RolloutCollector(lambda: running, lambda: RUNNING)):
            registry.register(collector)

        def scrape() -> None:
            queue.forget()
            assert f'rollouts_queued{{queue="rollouts"}} {QUEUED:.1f}' in generate_latest(registry).decode()

        with Heartbeat() as heart:
            swept, scraped = milliseconds(sweep_now), milliseconds(scrape)
        dead, heart_of_dead = after_a_death(store, sweep_now, requests[:1000])
        report(
            "scale_view",
            required={
                **dict.fromkeys(("sweep_ms.worst", "status_ms.worst", "scrape_ms.worst"), ("<=", 100)),
                "loop_late_ms": ("<=", 100),
            },
            queued=QUEUED,
            running=RUNNING,
            sweep_ms=swept,
            status_ms=asyncio.run(status()),
            scrape_ms=scraped,
            loop_late_ms=heart.late,
            sweep_of_1000_lapsed_ms=dead,
            loop_late_of_1000_lapsed_ms=heart_of_dead,
        )


def after_a_death(store: JobStore, sweep_now: Callable[[], None], lost: list[Any]) -> tuple[float, float]:
    """Have as many leases lapse as one sweep takes up; returns its milliseconds, and those that a loop was late."""
    store.client.zadd(broker.RUNNING, {request.rollout_id: 1 for request in lost})
    store._uptime.seconds = lambda: LEASE_TTL  # type: ignore[method-assign]  # the server is younger
    with Heartbeat() as heart:
        began = time.perf_counter()
        sweep_now()
        took = (time.perf_counter() - began) * 1000
    assert store.client.zcard(broker.RUNNING) == RUNNING - len(lost)
    for request in lost:  # so that the counts are what they were
        store.claim(request.rollout_id, "worker")
    return took, heart.late


def records(count: int) -> None:
    """Take ``count`` rollouts through all states."""
    with fresh_store() as (server, store, app):
        empty = used(server)
        began = time.perf_counter()
        requests = asyncio.run(submit(server, count))
        submitted = time.perf_counter() - began
        queued = used(server) - empty

        began = time.perf_counter()
        claims = claim_all(store, requests)
        claimed = time.perf_counter() - began
        assert len(claims) == count
        running = used(server) - empty

        held = [(claim.rollout_id, claim.attempt) for claim in claims]
        began = time.perf_counter()
        store.renew(held)
        renewed = time.perf_counter() - began
        swept = milliseconds(lambda: (store.client.delete(broker.SWEPT), sweep(store, app)))

        began = time.perf_counter()
        end_all(store, app, claims)
        ended = time.perf_counter() - began
        report(
            "scale_records",
            rollouts=count,
            queued_bytes=queued / count,
            running_bytes=running / count,
            ended_bytes=(used(server) - empty) / count,
            submits_per_second=count / submitted,
            claims_per_second=count / claimed,
            commits_per_second=count / ended,
            renewals_per_second=count / renewed,
            renewing_all_seconds=renewed,
            share_of_lease_for_renewals=renewed * 4 / LEASE_TTL,
            sweep_ms=swept,
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rollouts", type=int, default=100_000)
    logging.disable(logging.WARNING)  # a line for each rollout that is requeued
    view()
    records(parser.parse_args().rollouts)
    finish()
