"""What a worker tells Prometheus: figures that are right, also without Redis, and counted where things happen."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
from celery import Celery
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.registry import Collector
from support import RedisServer, wait_until

from producer import broker
from producer.contract import Phase, RolloutRequest, StopCondition
from producer.queues import QUEUES, pending_key, running_key
from workers import instruments, metrics
from workers.history import HandBack
from workers.jobs import Claim, JobStore
from workers.metrics import QueueCollector, RolloutCollector
from workers.settings import WorkerSettings
from workers.state import Rollout
from workers.stores import connected

#: Seconds that a scrape waits for a Redis that is there.
PATIENCE = 20.0


@contextmanager
def queue_of(url: str, patience: float = PATIENCE) -> Iterator[tuple[JobStore, QueueCollector]]:
    app = Celery("test", set_as_current=False)
    app.config_from_object(broker.celery_config(url))
    with ExitStack() as stack:
        stack.callback(app.close)
        store = stack.enter_context(connected(WorkerSettings(redis_url=url), app, patience=patience, once=True))
        yield store, QueueCollector(store)


def scraped(*collectors: Collector) -> dict[str, float]:
    """Return the samples of a scrape, each under its name and labels as they stand in the text."""
    registry = CollectorRegistry()
    for collector in collectors:
        registry.register(collector)
    lines = re.findall(r"^([^#\n]\S*) (\S+)$", generate_latest(registry).decode(), re.MULTILINE)
    return {name: float(value) for name, value in lines}


def of(name: str, queue: str = "rollouts") -> str:
    return f'{name}{{queue="{queue}"}}'


def counted(name: str) -> float:
    return scraped(*instruments.ALL).get(name, 0.0)


def claimed(store: JobStore, rollout_id: str) -> tuple[RolloutRequest, Claim]:
    request = RolloutRequest(rollout_id=rollout_id, model="m", max_attempts=5)
    claim = store.claim(rollout_id, "w1", request)
    assert isinstance(claim, Claim)
    return request, claim


def test_the_queue_is_told_as_redis_has_it(redis_url: str) -> None:
    with queue_of(redis_url) as (store, queue):
        now = store.now_ms()
        # The one in the front of the last list has no time; the other has waited a minute.
        waiting = {"front": broker.pending_base(9), "old": broker.pending_base(9) + now - 60_000}
        store.client.zadd(broker.PENDING, waiting | {"new": broker.pending_base(0) + now})
        store.client.zadd(broker.DELAYED, {"later": now + 60_000})
        store.client.sadd(broker.PLACES, "env:full")
        store.client.zadd(broker.parked_key("env:full"), {"p1": now, "p2": now})
        store.client.zadd(broker.RUNNING, {"r1": now + 60_000, "r2": now + 60_000, "lost": now - 1})
        store.client.config_set("maxmemory", 10**9)
        try:
            found = scraped(queue)
        finally:
            store.client.config_set("maxmemory", 0)

        assert 60 <= found[of("rollouts_oldest_queued_seconds")] < 70
        assert (found[of("rollouts_queued")], found[of("rollouts_delayed")], found["rollouts_parked"]) == (3, 1, 2)
        assert (found[of("rollouts_running")], found[of("rollouts_lapsed")], found["rollouts_redis_up"]) == (2, 1, 1)
        assert found["rollouts_redis_memory_limit_bytes"] == 10**9
        assert 0 < found["rollouts_redis_memory_used_bytes"] < 10**9


def test_each_queue_is_told_and_which_of_them_this_worker_serves(redis_url: str) -> None:
    with queue_of(redis_url) as (store, _):
        now = store.now_ms()
        store.client.sadd(QUEUES, "gpu")
        store.client.zadd(pending_key("gpu"), {"a": now - 9_000, "b": now})
        store.client.zadd(running_key("gpu"), {"c": now + 60_000})
        found = scraped(QueueCollector(store, ("cpu",)))

    assert (found[of("rollouts_queued", "gpu")], found[of("rollouts_running", "gpu")]) == (2, 1)
    assert 9 <= found[of("rollouts_oldest_queued_seconds", "gpu")] < 19
    assert [found[of("rollouts_queued", queue)] for queue in ("rollouts", "cpu")] == [0, 0], "nothing waits there"
    assert found[of("rollouts_serves", "cpu")] == 1
    assert of("rollouts_serves") not in found


def test_an_empty_queue_is_not_old(redis_url: str) -> None:
    with queue_of(redis_url) as (_, queue):
        found = scraped(queue)

    assert (found[of("rollouts_queued")], found[of("rollouts_oldest_queued_seconds")]) == (0, 0)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_scrape_without_redis_tells_the_rest(
    own_redis: RedisServer, monkeypatch: pytest.MonkeyPatch, how: signal.Signals
) -> None:
    monkeypatch.setattr(metrics, "_FRESH", 0.0)
    with queue_of(own_redis.url, patience=0.3) as (_, queue):
        wait_until(lambda: scraped(queue).get(of("rollouts_queued")) == 0)
        assert own_redis.process is not None
        own_redis.process.send_signal(how)
        began = time.monotonic()
        found = scraped(queue, RolloutCollector(list, lambda: 7))
        took = time.monotonic() - began

    assert (found["rollouts_redis_up"], found["rollouts_concurrency"]) == (0, 7)
    assert of("rollouts_queued") not in found
    assert took < 8, "what else asks Redis waits for 10 s"


def test_a_user_that_may_not_ask_for_memory_still_sees_the_queue(redis_url: str) -> None:
    with queue_of(redis_url) as (store, _):
        store.client.acl_setuser("few", enabled=True, passwords=["+p"], keys=["*"], commands=["+@all", "-info"])
        with queue_of(redis_url.replace("://", "://few:p@")) as (_, queue):
            found = scraped(queue)
        store.client.acl_deluser("few")

    assert (found["rollouts_redis_up"], found[of("rollouts_queued")]) == (1, 0)
    assert "rollouts_redis_memory_used_bytes" not in found


def test_attempts_are_told_by_phase_and_their_sandboxes_while_they_are_held() -> None:
    rollouts = [Rollout(RolloutRequest(rollout_id=f"r{n}", model="m"), "http://g") for n in range(3)]
    rollouts[0].phase = Phase.AGENT
    rollouts[0].sandbox = object()  # type: ignore[assignment]

    found = scraped(RolloutCollector(lambda: rollouts, lambda: 100))

    assert (found['rollouts_in_phase{phase="agent"}'], found['rollouts_in_phase{phase="register"}']) == (1, 2)
    assert (found['rollouts_in_phase{phase="score"}'], found["rollouts_concurrency"]) == (0, 100)
    assert found["rollouts_sandboxes"] == 1


def test_attempts_and_ends_are_counted_once_each_and_not_for_who_lost_them(redis_url: str) -> None:
    failed = 'rollouts_finished_total{error="sandbox",outcome="has_error"}'
    names = (
        "rollouts_attempts_total",
        failed,
        "rollouts_result_bytes_total",
        "rollouts_redis_round_trip_seconds_count",
    )
    before = [counted(name) for name in names]
    with queue_of(redis_url) as (store, _):
        request, first = claimed(store, "r1")
        assert store.claim("r1", "w2") == "running"
        store.release(request, first.attempt, "w1", HandBack.over("the worker shut down"))
        _, second = claimed(store, "r1")
        assert not store.commit("r1", first.attempt, "b", StopCondition.COMPLETED, b"late")
        assert store.commit("r1", second.attempt, "b", StopCondition.HAS_ERROR, b"12345", error="sandbox")
        store.now_ms()

    after = [counted(name) for name in names]
    assert [now - then for now, then in zip(after, before, strict=True)] == [2, 1, 5, 1]


def test_every_end_and_phase_is_there_before_it_happens() -> None:
    found = scraped(*instruments.ALL)

    assert {f'rollouts_phase_seconds_count{{phase="{phase}"}}' for phase in Phase} <= set(found)
    assert 'rollouts_finished_total{error="limit",outcome="has_error"}' in found
    assert 'rollouts_finished_total{error="cancelled",outcome="cancelled"}' in found
