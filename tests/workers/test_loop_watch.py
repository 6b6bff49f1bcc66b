"""An event loop that a hook blocks: no lease is lost for it, and the log and the metrics name who did it."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager, nullcontext
from typing import Any

import pytest
import redis
from celery import Celery
from prometheus_client import CollectorRegistry
from support import wait_until

from producer import broker
from producer.contract import RolloutRequest
from workers.environment import Environment
from workers.history import HandBack
from workers.hooks import call_hook, derive
from workers.jobs import Claim, JobStore, Renewal, Requeue
from workers.leases import LeaseKeeper
from workers.loop_watch import OTHER, LoopWatch
from workers.metrics import LoopCollector
from workers.state import Rollout
from workers.threads import LoopThread

TTL = 0.6
WARN_AFTER = 0.3


class Blocking(Environment):
    """Its hooks are coroutines that wait without awaiting, as users' sometimes do."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.go_on = threading.Event()

    async def score(self, rollout: Rollout) -> float:
        return self.block()

    def docker_image(self, request: RolloutRequest) -> str:
        return str(self.block())

    def block(self) -> float:
        self.entered.set()
        assert self.go_on.wait(30)
        return 1.0


class Worker:
    """A real event loop in its thread, and a real lease keeper that looks at it."""

    def __init__(self, url: str, hang_limit: float) -> None:
        self.app = Celery("test", set_as_current=False)
        self.app.config_from_object(broker.celery_config(url))
        self.store = JobStore(redis.Redis.from_url(url, socket_timeout=5), self.app, lease_ttl=TTL)
        self.loop = LoopThread(nullcontext, lambda: None, 1.0)
        self.watch = LoopWatch(lambda: self.loop.lag.progress, lambda: self.loop.thread.ident, warn_after=WARN_AFTER)
        self.lost: list[tuple[str, Renewal]] = []
        self.hangs: list[bool] = []
        self.rounds = 0
        self.keeper = LeaseKeeper(
            self.store,
            "w1",
            hang_limit=hang_limit,
            loop=self.watch,
            on_lost=lambda rollout_id, renewal: self.lost.append((rollout_id, renewal)),
            on_hang=self.hangs.append,
            report=dict,
            duties=self.turn,
        )
        self.registry = CollectorRegistry()
        self.registry.register(LoopCollector(self.watch, self.lag_ms))

    def lag_ms(self) -> dict[str, float]:
        return {name: value * 1000 for name, value in self.loop.lag.summary().items()}

    def turn(self) -> None:
        self.rounds += 1

    def claim(self, *rollout_ids: str, worker: str = "w1") -> None:
        for rollout_id in rollout_ids:
            claim = self.store.claim(rollout_id, worker, RolloutRequest(rollout_id=rollout_id, model="m"))
            assert isinstance(claim, Claim)
            if worker == "w1":
                self.keeper.hold(rollout_id, claim.attempt)

    def lease_left(self, rollout_id: str) -> float:
        return float(self.store.client.zscore(broker.RUNNING, rollout_id) or 0) - self.store.now_ms()

    def run(self, environment: Blocking, rollout_id: str = "r1") -> Future[Any]:
        """Have the loop run the hook ``score`` of a rollout, and return when that blocks it."""
        rollout = Rollout(RolloutRequest(rollout_id=rollout_id, model="m"), "http://g", attempt=1)
        assert self.loop._loop is not None
        ended = asyncio.run_coroutine_threadsafe(call_hook(environment, "score", rollout), self.loop._loop)
        assert environment.entered.wait(30)
        return ended

    def metric(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(name, labels) or 0.0


@contextmanager
def worker_on(url: str, hang_limit: float = 60.0) -> Iterator[Worker]:
    worker = Worker(url, hang_limit)
    worker.loop.start()
    worker.keeper.start()
    try:
        yield worker
    finally:
        worker.keeper.stop()
        worker.loop.stop()
        worker.store.client.close()
        worker.app.close()


@pytest.fixture
def blocking() -> Iterator[Blocking]:
    environment = Blocking()
    yield environment
    environment.go_on.set()


def test_a_loop_moves_while_its_lifespan_waits_to_be_entered() -> None:
    may_enter = threading.Event()

    @asynccontextmanager
    async def waiting_for_redis() -> AsyncIterator[None]:
        while not may_enter.is_set():
            await asyncio.sleep(0.01)
        yield

    loop = LoopThread(waiting_for_redis, lambda: None, 1.0)
    made = loop.lag.progress
    starting = threading.Thread(target=loop.start)
    starting.start()
    try:
        wait_until(lambda: loop.lag.progress > made, what="the loop to be seen moving")
    finally:
        may_enter.set()
        starting.join()
        loop.stop()


def test_what_blocks_the_loop_is_named_while_redis_stalls(
    redis_url: str, blocking: Blocking, monkeypatch: pytest.MonkeyPatch
) -> None:
    stalled, answers = threading.Event(), threading.Event()

    def stall() -> int:
        stalled.set()
        answers.wait(30)
        return 0

    with worker_on(redis_url) as worker:
        monkeypatch.setattr(worker.store, "now_ms", stall)
        try:
            assert stalled.wait(30)
            ended = worker.run(blocking)
            wait_until(lambda: "Blocking.score" in worker.watch.episodes, what="the hook to be named")
        finally:
            blocking.go_on.set()
            answers.set()
        assert ended.result(30) is not None


def test_a_hook_that_blocks_the_loop_for_two_ttls_costs_no_lease_and_is_named(
    redis_url: str, blocking: Blocking, caplog: pytest.LogCaptureFixture
) -> None:
    with worker_on(redis_url) as worker:
        worker.claim("r1", "r2")
        began = time.monotonic()
        ended = worker.run(blocking)
        wait_until(lambda: "s by Blocking.score" in caplog.text, what="the hook to be named while it blocks")
        wait_until(lambda: time.monotonic() - began > 2 * TTL)
        wait_until(lambda: min(worker.lease_left("r1"), worker.lease_left("r2")) > 0, what="a renewal of both")
        assert worker.metric("rollouts_loop_behind_seconds") > TTL
        blocking.go_on.set()
        assert ended.result(30) == 1.0
        wait_until(lambda: "event loop moves again; Blocking.score" in caplog.text)

        assert worker.lost == []
        line = next(record for record in caplog.records if "s by Blocking.score" in record.message)
        assert line.levelno == logging.ERROR
        assert line.message.startswith("event loop blocked for")
        assert "by Blocking.score of rollout r1" in line.message
        assert "self.go_on.wait(30)" in line.message
        assert (line.rollout_id, line.attempt, line.stage) == ("r1", 1, "loop_blocked")  # type: ignore[attr-defined]
        assert worker.metric("rollouts_loop_blocked_total", hook="Blocking.score") == 1
        assert worker.metric("rollouts_loop_blocked_seconds_total", hook="Blocking.score") > 2 * TTL - WARN_AFTER
        wait_until(lambda: worker.metric("rollouts_loop_lag_seconds", statistic="max") > TTL, what="the lag's maximum")
        assert worker.watch.report()["count"] >= 1


def test_a_hook_that_blocks_beyond_the_hang_limit_loses_all_leases_and_the_worker_goes_on(
    redis_url: str, blocking: Blocking, caplog: pytest.LogCaptureFixture
) -> None:
    with worker_on(redis_url, hang_limit=1.0) as worker:
        worker.claim("r1", "r2")
        ended = worker.run(blocking)
        wait_until(lambda: "its leases are given up" in caplog.text, what="the hang to be told")
        wait_until(lambda: max(worker.lease_left("r1"), worker.lease_left("r2")) < 0, what="the leases to lapse")
        wait_until(lambda: "Blocking.score" in caplog.text, what="the hook to be named")
        for lapsed in worker.store.lapsed():
            assert worker.store.requeue_lapsed(lapsed, HandBack.over("w1 hangs", counts=True)) is Requeue.REQUEUED
        worker.claim("r1", worker="w2")  # another one runs it; the other still waits

        blocking.go_on.set()
        assert ended.result(30) == 1.0
        wait_until(lambda: len(worker.lost) == 2, what="both losses")
        assert sorted(worker.lost) == [("r1", Renewal.LOST), ("r2", Renewal.LOST)]
        assert worker.keeper.held() == []
        assert worker.hangs[-2:] == [True, False]
        assert worker.store.claimed_by("r1") == (2, "w2")

        worker.claim("r3")
        rounds = worker.rounds
        wait_until(lambda: worker.rounds > rounds + 4, what="a lease's length")
        wait_until(lambda: worker.lease_left("r3") > 0, what="a renewal")
        assert worker.keeper.attempt_of("r3") == 1


class Clock:
    """A loop that moves when the test says so, in a thread that does what the test says."""

    def __init__(self) -> None:
        self.progress = time.monotonic()
        self.thread: int | None = threading.get_ident()
        self.watch = LoopWatch(lambda: self.progress, lambda: self.thread, warn_after=5.0)

    def look(self, late: float) -> None:
        """Look at a loop that has not moved for ``late`` seconds since the same moment, or since a new one."""
        self.progress = time.monotonic() - late
        self.watch.look()

    def look_again(self) -> None:
        self.watch.look()


def test_a_process_that_was_stopped_is_no_blocked_loop(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    clock.look(late=100)  # both threads were stopped; the loop moves at once
    clock.look(late=0.0)
    clock.look(late=100)
    clock.look(late=0.0)
    assert clock.watch.report() == {"count": 0, "seconds": 0, "last": None}
    assert caplog.text == ""


def test_each_blocking_is_counted_once_and_its_seconds_as_they_come() -> None:
    clock = Clock()
    for late in (10, 20):
        clock.look(late)
        for _ in range(3):
            clock.look_again()
    report = clock.watch.report()
    assert report["count"] == 2
    assert 30 <= report["seconds"] < 50, "not once for each look"
    assert 20 <= report["last"]["seconds"] < 40
    assert list(clock.watch.episodes) == [OTHER], "no hook was called"


def test_a_loop_whose_thread_is_gone_is_told_of_too() -> None:
    clock = Clock()
    clock.thread = None
    clock.look(10)
    clock.look_again()
    assert clock.watch.report()["count"] == 1


def test_a_method_that_only_derives_is_named_as_well(blocking: Blocking) -> None:
    thread = threading.Thread(target=derive, args=(blocking, "docker_image", RolloutRequest(model="m")))
    thread.start()
    assert blocking.entered.wait(30)
    clock = Clock()
    clock.thread = thread.ident
    clock.look(10)
    clock.look_again()
    blocking.go_on.set()
    thread.join()
    assert list(clock.watch.episodes) == ["Blocking.docker_image"]


def test_the_names_in_the_metrics_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.loop_watch._MOST_NAMES", 0)
    environment = Blocking()
    thread = threading.Thread(target=derive, args=(environment, "docker_image", RolloutRequest(model="m")))
    thread.start()
    assert environment.entered.wait(30)
    clock = Clock()
    clock.thread = thread.ident
    clock.look(10)
    clock.look_again()
    environment.go_on.set()
    thread.join()
    assert list(clock.watch.episodes) == [OTHER]
