"""The lease keeper: renews while the loop moves, tells what must end, and outlives Redis."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import orjson
import pytest
import redis
from celery import Celery
from support import RedisServer, wait_until

from producer import broker
from producer.contract import ErrorInfo, ErrorKind, RolloutRequest
from workers.history import HandBack
from workers.jobs import Claim, JobStore, Renewal, Requeue
from workers.leases import LeaseKeeper
from workers.loop_watch import LoopWatch

TTL = 0.4


class Keeping:
    def __init__(self, url: str, progress: Callable[[], float], hang_limit: float) -> None:
        self.app = Celery("test", set_as_current=False)
        self.app.config_from_object(broker.celery_config(url))
        self.store = JobStore(redis.Redis.from_url(url, socket_timeout=10), self.app, lease_ttl=TTL)
        self.ended: list[tuple[str, Renewal]] = []
        self.trusted: list[bool] = []
        self.hangs: list[bool] = []
        self.keeper = LeaseKeeper(
            self.store,
            "w1",
            hang_limit=hang_limit,
            loop=LoopWatch(progress, lambda: None),
            on_lost=lambda rollout_id, renewal: self.ended.append((rollout_id, renewal)),
            on_hang=self.hangs.append,
            report=lambda: {"running": 1},
            duties=lambda: self.trusted.append(self.keeper.trusts_leases),
        )

    def claim(self, rollout_id: str) -> Claim:
        request = RolloutRequest(rollout_id=rollout_id, model="m")
        claim = self.store.claim(rollout_id, "w1", request)
        assert isinstance(claim, Claim)
        self.keeper.hold(rollout_id, claim.attempt)
        return claim

    def lease_left(self, rollout_id: str) -> float:
        return float(self.store.client.zscore(broker.RUNNING, rollout_id)) - self.store.now_ms()


@contextmanager
def keeping(url: str, progress: Callable[[], float] = time.monotonic, hang_limit: float = 300) -> Iterator[Keeping]:
    keeping = Keeping(url, progress, hang_limit)
    keeping.keeper.start()
    try:
        yield keeping
    finally:
        keeping.keeper.stop()
        keeping.store.client.close()
        keeping.app.close()


def renewals(keeping: Keeping, rollout_id: str) -> Callable[[], bool]:
    """Return a predicate: the lease was renewed since now."""
    before = float(keeping.store.client.zscore(broker.RUNNING, rollout_id))
    return lambda: float(keeping.store.client.zscore(broker.RUNNING, rollout_id)) > before


def test_a_held_lease_is_renewed_and_a_dropped_one_is_not(redis_url: str) -> None:
    with keeping(redis_url) as k:
        k.claim("held")
        k.claim("dropped")
        k.keeper.drop("dropped")
        wait_until(lambda: k.lease_left("dropped") < 0, what="the dropped lease to lapse")
        wait_until(lambda: k.lease_left("held") > 0, what="a renewal")
        assert k.ended == []


def test_a_lost_lease_is_told_once(redis_url: str) -> None:
    with keeping(redis_url) as k:
        k.claim("r1")
        k.store.client.hincrby(broker.job_key("r1"), "attempt", 1)
        wait_until(lambda: k.ended, what="the loss to be told")
        assert k.keeper.attempt_of("r1") is None
        rounds = len(k.trusted)
        wait_until(lambda: len(k.trusted) > rounds + 2)
        assert k.ended == [("r1", Renewal.LOST)]


def test_a_loss_that_is_told_late_does_not_end_the_next_attempt_of_the_same_worker(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    k = Keeping(redis_url, time.monotonic, hang_limit=300)
    renew = k.store.renew

    def late(held: list[tuple[str, int]]) -> dict[str, Renewal]:
        """Renew when the attempt has been given back meanwhile, and the next one was claimed here."""
        monkeypatch.setattr(k.store, "renew", renew)
        how = HandBack.over("it failed")
        assert k.store.release(RolloutRequest(rollout_id="r1", model="m"), 1, "w1", how) is Requeue.REQUEUED
        k.keeper.drop("r1")
        assert k.claim("r1").attempt == 2
        return renew(held)

    monkeypatch.setattr(k.store, "renew", late)
    k.claim("r1")
    k.keeper._renew()
    assert k.ended == []
    assert k.keeper.held() == [("r1", 2)]
    k.store.client.close()
    k.app.close()


def test_a_cancel_reaches_the_worker_well_before_the_next_renewal(redis_url: str) -> None:
    with keeping(redis_url) as k:
        k.claim("r1")
        wait_until(lambda: k.trusted)
        wait_until(lambda: k.keeper._seen_cancel is not None)
        k.store.client.xadd(broker.CANCELS, {"id": "somebody-elses"})
        k.store.client.xadd(broker.CANCELS, {"id": "r1"})
        wait_until(lambda: k.ended == [("r1", Renewal.CANCELLED)])


def test_a_cancel_that_the_stream_missed_is_found_at_the_renewal(redis_url: str) -> None:
    with keeping(redis_url) as k:
        k.claim("r1")
        k.store.client.hset(broker.job_key("r1"), "cancel", 1)
        wait_until(lambda: ("r1", Renewal.CANCELLED) in k.ended)


def test_a_loop_blocked_for_two_ttls_costs_no_lease(redis_url: str) -> None:
    frozen = time.monotonic()
    with keeping(redis_url, progress=lambda: frozen, hang_limit=300) as k:
        k.claim("r1")
        wait_until(lambda: time.monotonic() - frozen > 2 * TTL)
        wait_until(lambda: k.lease_left("r1") > 0, what="a renewal")
        assert k.hangs == []
        assert k.ended == []


def test_a_loop_that_hangs_beyond_its_limit_gives_its_leases_up(
    redis_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    frozen = time.monotonic()
    with keeping(redis_url, progress=lambda: frozen, hang_limit=0.05) as k:
        k.claim("r1")
        wait_until(lambda: k.hangs, what="the hang to be told")
        wait_until(lambda: k.lease_left("r1") < 0, what="the lease to lapse")
        assert k.ended == []
        assert k.hangs == [True]
    assert "its leases are given up" in caplog.text


def test_leases_survive_a_redis_restart_and_none_is_trusted_lapsed_for_one_ttl(own_redis: RedisServer) -> None:
    with keeping(own_redis.url) as k:
        k.claim("r1")
        wait_until(renewals(k, "r1"))
        own_redis.stop(signal.SIGTERM)
        down = time.monotonic()
        wait_until(lambda: time.monotonic() - down > 1.5 * TTL)
        seen = len(k.trusted)
        own_redis.start()
        wait_until(lambda: len(k.trusted) > seen)
        assert k.trusted[seen] is False
        wait_until(lambda: k.trusted[-1] is True)
        wait_until(lambda: k.lease_left("r1") > 0)
        assert k.ended == []


def test_no_lease_is_trusted_lapsed_by_who_has_not_heard_of_redis_for_half_a_ttl(redis_url: str) -> None:
    """After a stop of the whole machine, a sweep that beat has ordered may come before the first renewal."""
    with keeping(redis_url) as k:
        wait_until(lambda: k.trusted and k.trusted[-1])
        k.keeper.stop()  # as if it had been stopped, and others went on first
        wait_until(lambda: not k.keeper.trusts_leases)


def test_a_delayed_rollout_is_woken_when_its_time_comes_and_not_by_the_next_sweep(redis_url: str) -> None:
    with keeping(redis_url) as kept:
        claim = kept.claim("r1")
        client = kept.store.client
        delayed: list[object] = []

        def told(seconds: float) -> None:
            delayed.append(client.zcard(broker.DELAYED))
            kept.keeper.wake_in(seconds)

        kept.store.on_delay = told
        failed = ErrorInfo(kind=ErrorKind.SANDBOX, message="it failed")
        request = RolloutRequest(rollout_id="r1", model="m")
        given_back = kept.store.release(request, claim.attempt, "w1", HandBack(error=failed, counts=True, delay=0.3))
        assert given_back is Requeue.REQUEUED
        assert delayed == [1]
        wait_until(lambda: client.llen(broker.queue_key(request.priority)) == 1, what="its message")
        assert client.zcard(broker.DELAYED) == 0


def test_the_workers_report_is_there_and_is_withdrawn_at_the_end(redis_url: str) -> None:
    with keeping(redis_url) as k:
        wait_until(lambda: k.store.client.zscore(broker.WORKERS, "w1"))
        assert orjson.loads(k.store.client.get(broker.worker_key("w1"))) == {"name": "w1", "running": 1}
        assert k.store.client.zscore(broker.WORKERS, "w1") > k.store.now_ms()
        client = redis.Redis.from_url(redis_url)
    assert client.get(broker.worker_key("w1")) is None
    assert client.zcard(broker.WORKERS) == 0
    client.close()


def test_an_idle_worker_believes_no_lease_lapsed_that_could_not_be_renewed_while_redis_was_full(
    own_redis: RedisServer,
) -> None:
    with keeping(own_redis.url) as busy, keeping(own_redis.url) as idle:
        busy.claim("r1")
        wait_until(renewals(busy, "r1"))
        busy.store.client.config_set("maxmemory", 1)
        full = time.monotonic()
        wait_until(lambda: time.monotonic() - full > 2 * TTL)
        assert busy.lease_left("r1") < 0, "a renewal is a write, and was refused"
        seen = len(idle.trusted)
        busy.store.client.config_set("maxmemory", 0)
        wait_until(lambda: len(idle.trusted) > seen)
        assert idle.trusted[seen] is False, "its sweep would run r1 a second time"
