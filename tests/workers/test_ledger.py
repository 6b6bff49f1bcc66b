"""The ledger: who enters an attempt, and what is known of its rollout and its worker, on a real server."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import orjson
import pytest
import redis
from celery import Celery
from support import RedisServer

from producer import broker
from producer.contract import RolloutRequest, StopCondition
from workers.app import create_app
from workers.history import HandBack
from workers.jobs import Claim, JobStore, Requeue
from workers.leases import REPORT_TTL
from workers.ledger import Entry, Ledger, Origin, SupersededError
from workers.pool import AsyncioPool
from workers.settings import WorkerSettings

DIED = HandBack.over("its worker died", counts=True)


@pytest.fixture
def client(redis_url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(redis_url) as client:
        yield client


@pytest.fixture
def store(client: redis.Redis, redis_url: str) -> Iterator[JobStore]:
    app = Celery("test", set_as_current=False)
    app.config_from_object(broker.celery_config(redis_url))
    yield JobStore(client, app, lease_ttl=4)
    app.close()


@pytest.fixture
def ledger(client: redis.Redis) -> Ledger:
    return Ledger(client, lease_ttl=4)


def claimed(store: JobStore, rollout_id: str = "r1", worker: str = "w1", **fields: object) -> Claim:
    offered = RolloutRequest.parse({"rollout_id": rollout_id, "model": "m", "batch_id": "b", **fields})
    claim = store.claim(rollout_id, worker, offered)
    assert isinstance(claim, Claim)
    return claim


def lapse(store: JobStore, rollout_id: str = "r1") -> None:
    store.client.zadd(broker.RUNNING, {rollout_id: 1})


def test_an_attempt_at_a_chosen_gateway_is_cleared_up_there(store: JobStore, ledger: Ledger) -> None:
    urls = ["http://one:1", "http://two:1"]
    chosen = claimed(store, gateway_urls=urls).gateway_url
    assert chosen in urls
    lapse(store)
    [lapsed] = store.lapsed()
    store.requeue_lapsed(lapsed, DIED)
    [entry] = ledger.entries()
    assert entry.gateway == chosen
    assert ledger.origin(entry) == Origin(chosen)


def test_the_sweep_enters_a_lapsed_attempt_in_the_step_that_requeues_it(store: JobStore, ledger: Ledger) -> None:
    claimed(store)
    lapse(store)
    assert ledger.entries() == []

    assert store.requeue_lapsed(store.lapsed()[0], DIED) is Requeue.REQUEUED

    (entry,) = ledger.entries()
    assert (entry.rollout_id, entry.attempt, entry.worker, entry.tries) == ("r1", 1, "w1", 0)
    assert 0 <= ledger.now_ms() - entry.since_ms < 5000
    assert store.lapsed() == []


def test_the_sweep_enters_a_lapsed_attempt_in_the_step_that_ends_it(store: JobStore, ledger: Ledger) -> None:
    claim = claimed(store, max_attempts=1)
    lapse(store)
    assert store.requeue_lapsed(store.lapsed()[0], DIED) is Requeue.EXHAUSTED
    assert ledger.entries() == [], "nothing was changed"

    assert store.commit("r1", claim.attempt, "b", StopCondition.HAS_ERROR, b"x", lapsed=True)
    assert [(entry.rollout_id, entry.attempt, entry.worker) for entry in ledger.entries()] == [("r1", 1, "w1")]


def test_what_its_worker_ends_or_gives_back_itself_is_not_entered(store: JobStore, ledger: Ledger) -> None:
    claim = claimed(store)
    assert store.commit("r1", claim.attempt, "b", StopCondition.COMPLETED, b"x")
    claim = claimed(store, "r2")
    store.release(RolloutRequest.parse(claim.request), claim.attempt, "w1", HandBack.over("drained"))
    assert ledger.entries() == []


def test_a_worker_that_came_back_before_the_sweep_is_not_entered(store: JobStore, ledger: Ledger) -> None:
    claim = claimed(store)
    lapse(store)
    found = store.lapsed()[0]
    store.renew([("r1", claim.attempt)])
    assert store.requeue_lapsed(found, DIED) is Requeue.STALE
    assert not store.commit("r1", claim.attempt, "b", StopCondition.HAS_ERROR, b"x", lapsed=True)
    assert ledger.entries() == []


def test_an_entry_is_noted_once_settled_and_put_off_for_longer_each_time(ledger: Ledger) -> None:
    ledger.note("r1", 2, "w1")
    first = ledger.entries()
    ledger.note("r1", 2, "another")
    assert ledger.entries() == first

    for delay in (10, 20, 40):
        before = ledger.now_ms()
        ledger.postpone(ledger.entries()[0], 10.0)
        assert before <= ledger.entries()[0].due_ms - 1000 * delay <= ledger.now_ms()
    for _ in range(12):
        ledger.postpone(ledger.entries()[0], 10.0)
    assert (ledger.entries()[0].due_ms - ledger.now_ms()) / 1000 == pytest.approx(3600, abs=5)
    assert ledger.entries()[0].since_ms == first[0].since_ms

    ledger.settle(first[0])
    assert ledger.entries() == []


def test_entries_that_cannot_be_read_hold_up_no_other(ledger: Ledger, client: redis.Redis) -> None:
    ledger.note("r1", 1, "w1")
    client.hset(
        broker.LEDGER, mapping={"r2": b"{}", "r3 x": b"{}", "r4 1": b"\xff", "r5 1": b"[]", "r6 1": b'{"tries":[]}'}
    )
    assert [entry.rollout_id for entry in ledger.entries()] == ["r1"]
    assert client.hlen(broker.LEDGER) == 1


def test_the_gateways_id_is_the_flows() -> None:
    assert [Entry(rollout_id="r", attempt=attempt).gateway_id for attempt in (1, 2)] == ["r", "r~2"]


def test_a_fleet_has_one_identity_for_as_long_as_its_redis_keeps_it(ledger: Ledger, client: redis.Redis) -> None:
    first = ledger.fleet_id()
    assert len(first) == 12
    assert int(first, 16) >= 0
    assert ledger.fleet_id() == Ledger(client, lease_ttl=1).fleet_id() == first
    client.flushall()
    assert ledger.fleet_id() != first


def test_a_worker_that_starts_while_redis_is_away_waits_for_it(own_redis: RedisServer, tmp_path: Path) -> None:
    own_redis.stop()
    app = create_app(WorkerSettings(redis_url=own_redis.url, sandbox_dir=tmp_path), {})
    pool = AsyncioPool(1, app=app, initargs=(app, "w1@here"))
    starting = threading.Thread(target=pool.start)
    starting.start()
    try:
        starting.join(0.3)
        assert starting.is_alive()
        own_redis.start()
        starting.join(40)
        assert not starting.is_alive()
        labels = app.rollout_fleet.systems._labels
        assert f"fleet-id:{own_redis.client.get(broker.FLEET_ID).decode()}" in labels
    finally:
        starting.join()
        pool.terminate()
        app.close()


def test_where_an_attempt_left_things_is_in_its_request(store: JobStore, ledger: Ledger) -> None:
    claimed(store, gateway_url="http://far:1", use_gateway=True, team_id="t1")
    ledger.note("r1", 1, "w1")
    assert ledger.origin(ledger.entries()[0]) == Origin("http://far:1", True, "t1")
    assert ledger.origin(Entry(rollout_id="unknown", attempt=1)) == Origin()
    store.client.hset(broker.job_key("r1"), "request", b"\xff")
    assert ledger.origin(ledger.entries()[0]) == Origin()


@pytest.mark.parametrize("ended", ["requeued", "exhausted", "noted"])
def test_an_entry_names_the_gateway_of_the_worker_that_died(
    client: redis.Redis, store: JobStore, ledger: Ledger, ended: str
) -> None:
    theirs = JobStore(client, Celery("test", set_as_current=False), lease_ttl=0.2, gateway_url="http://theirs:1")
    claim = claimed(theirs, max_attempts=1 if ended == "exhausted" else 3)
    if ended == "requeued":
        lapse(store)
        store.requeue_lapsed(store.lapsed()[0], DIED)
    elif ended == "exhausted":
        lapse(store)
        store.commit("r1", claim.attempt, "b", StopCondition.HAS_ERROR, b"x", lapsed=True)
    else:
        ledger.note("r1", 1, "w1", "http://theirs:1")
    (entry,) = ledger.entries()
    assert entry.gateway == "http://theirs:1"
    assert ledger.origin(entry) == Origin("http://theirs:1")
    ledger.postpone(entry, 0.0)
    assert ledger.entries()[0].gateway == "http://theirs:1"


def test_the_gateway_of_a_request_comes_before_its_workers_and_none_is_none(store: JobStore, ledger: Ledger) -> None:
    claimed(store, gateway_url="http://far:1")
    claimed(store, "r2", use_gateway=False)
    for rollout_id in ("r1", "r2"):
        ledger.note(rollout_id, 1, "w1", "http://theirs:1")
    origins = {entry.rollout_id: ledger.origin(entry) for entry in ledger.entries()}
    assert origins == {"r1": Origin("http://far:1"), "r2": Origin(None, False)}


def test_an_id_that_is_used_once_more_is_another_rollouts(store: JobStore, ledger: Ledger) -> None:
    claimed(store)
    ledger.note("r1", 1, "w1")
    (entry,) = ledger.entries()
    store.client.hset(broker.job_key("r1"), "enqueued_ms", entry.since_ms + 1)
    with pytest.raises(SupersededError):
        ledger.origin(entry)


def test_only_the_attempt_that_the_record_names_is_running(store: JobStore, ledger: Ledger) -> None:
    claimed(store)
    claim = claimed(store, "r2")
    store.commit("r2", claim.attempt, "b", StopCondition.COMPLETED, b"x")
    assert ledger.running({("r1", 1), ("r1", 2), ("r2", 1), ("unknown", 1)}) == {("r1", 1)}
    assert ledger.running(set()) == set()


def reports(client: redis.Redis, ledger: Ledger, worker: str, seconds_ago: float, *tunnels: str) -> None:
    expiry = ledger.now_ms() - seconds_ago * 1000 + REPORT_TTL * 1000
    client.zadd(broker.WORKERS, {worker: expiry})
    if seconds_ago < REPORT_TTL:
        report = orjson.dumps({"tunnels": [{"tunnel_id": tunnel} for tunnel in tunnels]})
        client.set(broker.worker_key(worker), report)


def test_a_worker_is_dead_when_it_is_silent_and_holds_nothing(
    store: JobStore, ledger: Ledger, client: redis.Redis
) -> None:
    reports(client, ledger, "living", 1.0, "t1")
    reports(client, ledger, "silent", 8.0)
    reports(client, ledger, "holding", 8.0)
    claimed(store, worker="holding")

    known = ledger.workers(["living", "silent", "holding", "unheard"])

    assert [w for w in ("living", "silent", "holding", "unheard") if known.lives(w)] == ["living"]
    assert [w for w in ("living", "silent", "holding", "unheard") if known.is_dead(w)] == ["silent", "unheard"]
    assert known.tunnels["living"] == {"t1"}
    assert not known.lives("living", since_ms=ledger.now_ms()), "it may have died since"


def test_a_worker_may_be_silent_for_as_long_as_its_lease_lives(client: redis.Redis) -> None:
    ledger = Ledger(client, lease_ttl=60)
    reports(client, ledger, "w1", 50.0)
    assert not ledger.workers(["w1"]).is_dead("w1")
    reports(client, ledger, "w1", 61.0)
    assert ledger.workers(["w1"]).is_dead("w1")


def test_what_may_be_left_is_counted(ledger: Ledger) -> None:
    assert ledger.leaked() == 0
    ledger.note("r1", 1, "w1")
    ledger.note("r1", 2, "w1")
    ledger.note_strays(sandbox=2, tunnel=1)
    assert ledger.leaked() == 5
    ledger.note_strays(tunnel=0)
    assert ledger.leaked() == 4
