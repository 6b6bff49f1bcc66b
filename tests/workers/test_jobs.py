"""The job record: every transition, on a real server, with Redis's own clock."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import orjson
import pytest
import redis
from celery import Celery
from model_worker import backend_app
from support import wait_until

from producer import broker
from producer.connection import FleetConnection
from producer.contract import ErrorInfo, ErrorKind, InvalidRequestError, RolloutRequest, RolloutResult, StopCondition
from workers import history
from workers.history import HandBack
from workers.jobs import Claim, JobStore, Renewal, Requeue
from workers.ledger import Ledger
from workers.sweep import sweep

FAILED = HandBack(error=ErrorInfo(kind=ErrorKind.SANDBOX, message="it died"))
DIED = HandBack.over("its worker died", counts=True)


@pytest.fixture
def app(redis_url: str) -> Iterator[Celery]:
    with closing(backend_app(redis_url)) as app:
        yield app


@pytest.fixture
def store(redis_url: str, app: Celery) -> Iterator[JobStore]:
    client = redis.Redis.from_url(redis_url)
    yield JobStore(client, app, lease_ttl=4)
    client.close()


def request(rollout_id: str = "r1", **fields: object) -> RolloutRequest:
    return RolloutRequest.parse({"rollout_id": rollout_id, "model": "m", "batch_id": "b", **fields})


def claimed(store: JobStore, worker: str = "w1", **fields: object) -> Claim:
    offered = request(**fields)
    claim = store.claim(offered.rollout_id, worker, offered)
    assert isinstance(claim, Claim)
    return claim


def record(store: JobStore, rollout_id: str = "r1") -> dict[str, str]:
    return {k.decode(): v.decode() for k, v in store.client.hgetall(broker.job_key(rollout_id)).items()}


def lapse(store: JobStore, rollout_id: str = "r1") -> None:
    store.client.zadd(broker.RUNNING, {rollout_id: 1})


def patient(store: JobStore) -> None:
    """Have a sweep believe in what it read however slow this machine is just now."""
    store.lease_ttl = 60.0
    store.uptime = lambda: 1000.0  # type: ignore[method-assign]


def test_a_claim_makes_it_running_with_a_lease_and_counts_the_attempt(store: JobStore) -> None:
    claim = claimed(store)

    assert (claim.attempt, claim.last, claim.batch_id) == (1, False, "b")
    assert RolloutRequest.parse(claim.request) == request()
    assert record(store)["state"] == "running"
    lease = store.client.zscore(broker.RUNNING, "r1")
    assert 0 < lease - store.now_ms() <= 1000 * store.lease_ttl


def test_a_duplicate_wake_up_finds_it_running_or_done(store: JobStore) -> None:
    claim = claimed(store)
    assert store.claim("r1", "w2", request()) == "running"
    assert store.commit("r1", claim.attempt, "b", StopCondition.COMPLETED, b"x")
    assert store.claim("r1", "w2", request()) == "done"


def test_a_message_without_a_record_is_unknown(store: JobStore) -> None:
    assert store.claim("nobody", "w1") == "unknown"


def test_only_one_of_many_concurrent_claims_wins(store: JobStore) -> None:
    answers: list[Claim | str] = []
    threads = [
        threading.Thread(target=lambda n=n: answers.append(store.claim("r1", f"w{n}", request()))) for n in range(16)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert sum(isinstance(a, Claim) for a in answers) == 1
    assert answers.count("running") == 15


def test_the_first_commit_wins_and_is_announced_once(store: JobStore) -> None:
    claim = claimed(store)

    assert store.commit("r1", claim.attempt, "b", StopCondition.COMPLETED, b"x")
    assert store.commit("r1", claim.attempt, "b", StopCondition.COMPLETED, b"x"), "told so again after a lost answer"
    assert not store.commit("r1", claim.attempt + 1, "b", StopCondition.HAS_ERROR, b"y")

    assert record(store)["outcome"] == "completed"
    entries = store.client.xrange(broker.stream_key("b"))
    assert [fields for _, fields in entries] == [{b"id": b"r1", b"outcome": b"completed"}]
    assert store.client.zcard(broker.RUNNING) == 0
    assert store.client.get(broker.result_key("r1")) == b"x"


def test_a_stale_attempt_can_neither_renew_nor_commit_nor_requeue(store: JobStore) -> None:
    first = claimed(store)
    lapse(store)
    assert store.requeue_lapsed(store.lapsed()[0], DIED) is Requeue.REQUEUED
    second = store.claim("r1", "w2")
    assert isinstance(second, Claim)
    assert second.attempt == 2

    assert store.renew([("r1", first.attempt)]) == {"r1": Renewal.LOST}
    assert not store.commit("r1", first.attempt, "b", StopCondition.COMPLETED, b"x")
    assert store.release(request(), first.attempt, "w1", FAILED) is Requeue.STALE
    assert store.renew([("r1", second.attempt)]) == {"r1": Renewal.RENEWED}


def test_a_lapsed_lease_is_renewed_if_nobody_else_claimed_it(store: JobStore) -> None:
    claim = claimed(store)
    lapse(store)

    assert store.renew([("r1", claim.attempt)]) == {"r1": Renewal.RENEWED}
    assert store.lapsed() == []


def test_renewing_thousands_keeps_the_order_of_answers(store: JobStore) -> None:
    claims = [claimed(store, rollout_id=f"r{n}") for n in range(1203)]
    lost = {f"r{n}" for n in range(0, 1203, 7)}
    for rollout_id in lost:
        store.client.hset(broker.job_key(rollout_id), "attempt", 9)

    found = store.renew([(c.rollout_id, c.attempt) for c in claims])

    assert {i for i, renewal in found.items() if renewal is Renewal.LOST} == lost
    assert len(found) == 1203


def test_a_renewal_tells_that_a_cancel_was_asked_for(store: JobStore) -> None:
    claim = claimed(store)
    store.client.hset(broker.job_key("r1"), "cancel", 1)
    assert store.renew([("r1", claim.attempt)]) == {"r1": Renewal.CANCELLED}


def test_requeueing_sends_a_wake_up_in_the_same_step(store: JobStore) -> None:
    claim = claimed(store, priority=6)

    assert (
        store.release(request(priority=6), claim.attempt, "w1", replace(HandBack.over("drained"), front=False))
        is Requeue.REQUEUED
    )

    assert record(store)["state"] == "pending"
    (message,) = store.client.lrange(broker.queue_key(6), 0, -1)
    assert b'"id":"r1"' in message
    again = store.claim("r1", "w2")
    assert isinstance(again, Claim)
    assert again.attempt == 2, "the attempt's number fences writes, so it grows"
    assert record(store)["spent"] == "1", "but a hand-over spends none"


def test_a_renewal_that_comes_just_after_the_commit_ends_nothing(store: JobStore) -> None:
    claim = claimed(store)
    assert store.commit("r1", claim.attempt, "b", StopCondition.COMPLETED, b"result")
    assert store.renew([("r1", claim.attempt)]) == {"r1": Renewal.RENEWED}
    assert store.client.zcard(broker.RUNNING) == 0
    assert store.renew([("r1", claim.attempt - 1)]) == {"r1": Renewal.LOST}


def test_attempts_run_out(store: JobStore) -> None:
    claimed(store, max_attempts=2)
    lapse(store)
    assert store.requeue_lapsed(store.lapsed()[0], DIED) is Requeue.REQUEUED
    second = store.claim("r1", "w2")
    assert isinstance(second, Claim)
    assert second.last

    lapse(store)
    assert store.requeue_lapsed(store.lapsed()[0], DIED) is Requeue.EXHAUSTED
    assert record(store)["state"] == "running", "the sweep ends it, with a result"


def test_the_turns_of_a_failed_attempt_are_kept_until_a_result_holds_them(store: JobStore) -> None:
    turns = [{"prompt": [{"role": "user", "content": "hi" * n}], "completion": []} for n in range(3)]
    claim = claimed(store)
    store.release(request(), claim.attempt, "w1", replace(FAILED, turns=turns))

    (failed,) = store.failed_attempts("r1")
    assert (failed.attempt, failed.worker, failed.turns, failed.trajectory) == (1, "w1", 3, turns)
    assert (failed.error, failed.counted) == (FAILED.error, True)

    assert isinstance(store.claim("r1", "w2"), Claim)
    assert store.commit("r1", 2, "b", StopCondition.COMPLETED, b"result")
    assert not store.client.hexists(broker.job_key("r1"), "turns:1")
    assert [(a.turns, a.trajectory) for a in store.failed_attempts("r1")] == [(3, [])]


def test_turns_that_are_too_many_to_keep_are_counted(store: JobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "MAX_PACKED_TURNS", 10)
    claim = claimed(store)
    store.release(request(), claim.attempt, "w1", replace(FAILED, turns=[{"prompt": []}]))
    assert [(a.turns, a.trajectory) for a in store.failed_attempts("r1")] == [(1, [])]


@pytest.mark.parametrize("spoilt", [{"history": b"\xff{}\n[]\n{}"}, {"turns:1": b"not packed"}])
def test_a_history_that_cannot_be_read_costs_nobody_a_result(store: JobStore, spoilt: dict[str, bytes]) -> None:
    claim = claimed(store)
    store.release(request(), claim.attempt, "w1", FAILED)
    store.client.hset(broker.job_key("r1"), mapping=spoilt)
    assert all(attempt.trajectory == [] for attempt in store.failed_attempts("r1"))


def test_a_delayed_rollout_waits_for_its_time(store: JobStore) -> None:
    claim = claimed(store)
    assert store.release(request(), claim.attempt, "w1", replace(FAILED, delay=60)) is Requeue.REQUEUED

    assert store.wake_delayed() == 0
    assert all(store.client.llen(key) == 0 for key in broker.queue_keys())
    store.client.zadd(broker.DELAYED, {"r1": 1})
    assert store.wake_delayed() == 1
    assert store.wake_delayed() == 0
    assert store.client.llen(broker.queue_key(3)) == 1


def waiting(store: JobStore, rollout_id: str, **fields: object) -> None:
    """Have a rollout wait in the queue, a minute later than the one before."""
    claim = claimed(store, rollout_id=rollout_id, **fields)
    offered = request(rollout_id, **fields)
    assert store.release(offered, claim.attempt, "w1", FAILED) is Requeue.REQUEUED
    waiting = int(store.client.zcard(broker.PENDING))
    store.client.zadd(broker.PENDING, {rollout_id: broker.pending_base(offered.priority) + waiting * 60_000})


def test_a_lost_message_is_sent_again_when_the_queue_is_empty(store: JobStore) -> None:
    waiting(store, "r1")
    assert store.resend_missing(age=1) == 0, "its message is still there"

    store.client.delete(broker.queue_key(3))

    assert store.resend_missing(age=1) == 1
    assert store.client.llen(broker.queue_key(3)) == 1
    assert store.resend_missing(age=1) == 0


def test_a_lost_message_is_found_in_a_queue_that_never_empties(store: JobStore) -> None:
    for n in range(4):
        waiting(store, f"r{n}")
    assert store.resend_missing(age=1) == 0
    store.client.rpop(broker.queue_key(3), 2)  # r0 and r1 are taken, and their worker dies

    assert store.resend_missing(age=1) == 2
    ids = [orjson.loads(m)["headers"]["id"] for m in store.client.lrange(broker.queue_key(3), 0, -1)]
    assert sorted(ids) == ["r0", "r1", "r2", "r3"]


def test_starved_low_priorities_are_not_taken_for_lost(store: JobStore) -> None:
    for n in range(4):
        waiting(store, f"low{n}", priority=9)
    waiting(store, "high", priority=0)
    claim = store.claim("high", "w")
    assert isinstance(claim, Claim)
    assert store.resend_missing(age=1) == 0


def test_what_was_put_to_the_front_is_not_taken_for_lost_and_hides_nothing(store: JobStore) -> None:
    for n in range(3):
        waiting(store, f"r{n}")
    claim = claimed(store, rollout_id="front")
    store.release(request("front"), claim.attempt, "w1", HandBack.over("drained"))
    assert orjson.loads(store.client.lindex(broker.queue_key(3), -1))["headers"]["id"] == "front"
    assert store.resend_missing(age=1) == 0


def test_what_comes_back_while_the_queue_is_looked_at_is_not_sent_twice(
    store: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    claim = claimed(store, rollout_id="r1")
    looked_at = store.client.lindex

    def then_handed_back(key: str, index: int) -> bytes | None:
        found: bytes | None = looked_at(key, index)
        if key == broker.queue_key(3):
            store.release(request("r1"), claim.attempt, "w1", HandBack.over("drained"))
        return found

    monkeypatch.setattr(store.client, "lindex", then_handed_back)
    assert store.resend_missing(age=1) == 0
    assert store.client.llen(broker.queue_key(3)) == 1


def test_all_messages_of_an_emptied_queue_are_sent_again(store: JobStore) -> None:
    for n in range(4):
        waiting(store, f"r{n}")
    store.client.delete(broker.queue_key(3))
    store.client.zadd(broker.PENDING, {f"r{n}": broker.pending_base(3) + n for n in range(4)})
    assert store.resend_missing(age=1) == 4
    assert store.client.llen(broker.queue_key(3)) == 4


# -- the sweep ---------------------------------------------------------------------------------------------------------


def test_the_sweep_requeues_a_dead_workers_rollout_once(store: JobStore, app: Celery) -> None:
    patient(store)
    claimed(store)
    lapse(store)

    assert sweep(store, app)["requeued"] == 1
    store.client.delete(broker.SWEPT)
    assert "requeued" not in sweep(store, app)
    assert [str(a.error) for a in store.failed_attempts("r1")] == ["lease error: worker w1 stopped renewing its lease"]


def test_two_sweeps_take_turns(store: JobStore, app: Celery) -> None:
    patient(store)
    claimed(store)
    lapse(store)
    assert sweep(store, app) == {"requeued": 1}
    assert 0 < store.client.pttl(broker.SWEPT) <= 1000 * store.lease_ttl / 4, "the next turn is an interval away"
    assert sweep(store, app) == {}


def test_garbage_in_the_queue_and_in_records_holds_up_nothing(store: JobStore, app: Celery) -> None:
    patient(store)
    store.client.rpush(broker.queue_key(3), b"garbage")
    store.client.hset(broker.job_key("odd"), mapping={"state": "running", "attempt": "x"})
    store.client.zadd(broker.RUNNING, {"odd": 0})
    claimed(store)
    lapse(store)

    assert sweep(store, app)["requeued"] == 1


def test_a_worker_that_comes_back_before_the_sweep_ends_its_last_attempt_keeps_it(store: JobStore) -> None:
    claim = claimed(store, max_attempts=1)
    lapse(store)
    assert store.requeue_lapsed(store.lapsed()[0], DIED) is Requeue.EXHAUSTED
    assert store.renew([("r1", claim.attempt)]) == {"r1": Renewal.RENEWED}

    assert not store.commit("r1", claim.attempt, "b", StopCondition.HAS_ERROR, b"y", lapsed=True)
    assert store.commit("r1", claim.attempt, "b", StopCondition.COMPLETED, b"x")


def test_no_lease_is_believed_lapsed_while_redis_was_away(store: JobStore, app: Celery) -> None:
    claimed(store)
    lapse(store)
    assert "requeued" not in sweep(store, app, trusted=False)
    assert record(store)["state"] == "running"


def test_no_lease_is_believed_lapsed_until_redis_has_been_up_for_as_long_as_one_lives(
    store: JobStore, app: Celery
) -> None:
    claimed(store)
    lapse(store)
    store.lease_ttl = store.uptime() + 3600
    store.client.delete(broker.SWEPT)
    assert "requeued" not in sweep(store, app)
    assert record(store)["state"] == "running"


def test_a_user_that_may_not_ask_for_the_uptime_recovers_one_lease_after_its_own_start(
    store: JobStore, app: Celery, redis_url: str
) -> None:
    store.client.execute_command("ACL", "SETUSER", "no-info", "on", ">pw", "~*", "&*", "+@all", "-info")
    claimed(store)
    lapse(store)
    with redis.Redis.from_url(redis_url, username="no-info", password="pw") as client:
        with pytest.raises(redis.exceptions.NoPermissionError):
            client.info("server")
        theirs = JobStore(client, app, lease_ttl=0.5)
        assert 0 <= theirs.uptime() < 60
        theirs.lease_ttl = 3600
        assert "requeued" not in sweep(theirs, app), "its own start is too recent"
        theirs.lease_ttl = 0.5
        store.client.delete(broker.SWEPT)
        wait_until(lambda: sweep(theirs, app).get("requeued") == 1)
        ledger = Ledger(client, lease_ttl=0.1)
        wait_until(ledger.is_settled)
    assert record(store)["state"] == "pending"


class Clock:
    """Redis, on a machine whose clock is set."""

    def __init__(self, client: redis.Redis) -> None:
        self.client: Any = client
        self.ahead = 0.0

    def info(self, section: str) -> dict[str, Any]:
        told = self.client.info(section)
        return told | {"server_time_usec": told["server_time_usec"] + int(self.ahead * 1e6)}


def test_no_lease_is_believed_lapsed_for_as_long_as_one_lives_after_redis_clock_was_set_forward(
    store: JobStore, app: Celery, caplog: pytest.LogCaptureFixture
) -> None:
    """All of them lapse at once then, though every worker lives: each has to be given the time to renew its own."""
    clock = Clock(store.client)
    store._uptime._client = clock
    wait_until(lambda: store.uptime() >= store.lease_ttl)
    claimed(store)
    clock.ahead = 60.0
    lapse(store)
    store.client.delete(broker.SWEPT)
    assert "requeued" not in sweep(store, app)
    # As near as the time that its answer took.
    assert re.search(r"Redis's clock was set forward by (5\d|60)\.", caplog.text)
    assert record(store)["state"] == "running"
    clock.ahead = 59.0
    wait_until(lambda: sweep(store, app).get("requeued") == 1, what="what nobody renewed meanwhile")


ODD = {
    "priority": {"priority": "x"},
    "huge priority": {"priority": "9" * 5000},
    "negative priority": {"priority": "-1"},
    "bytes": {"worker": b"\xff", "batch": b"\xff"},
}


@pytest.mark.parametrize("fields", ODD.values(), ids=list(ODD))
def test_a_record_with_odd_fields_is_run_again_and_holds_up_no_other(
    store: JobStore, app: Celery, fields: dict[str, str | bytes]
) -> None:
    patient(store)
    for rollout_id in ("odd", "r1", "late-odd", "late"):
        claimed(store, rollout_id=rollout_id)
        lapse(store, rollout_id)
    for rollout_id in ("late-odd", "late"):
        store.release(request(rollout_id), 1, "w1", replace(FAILED, delay=0.001))
    store.client.hset(broker.job_key("odd"), mapping=fields)
    store.client.hset(broker.job_key("late-odd"), mapping=fields)
    store.client.zadd(broker.DELAYED, {"late-odd": 1, "late": 1})

    assert sweep(store, app) == {"requeued": 2, "woken": 2}
    assert store.client.zcard(broker.RUNNING) == store.client.zcard(broker.DELAYED) == 0


def test_what_is_no_record_at_all_is_taken_off_the_lists(store: JobStore, app: Celery) -> None:
    patient(store)
    store.client.set(broker.job_key("text"), "x")
    for key in (broker.RUNNING, broker.DELAYED):
        store.client.zadd(key, {"text": 0, b"\xff": 0})
    store.client.hset(broker.job_key("long"), mapping={"state": "running", "attempt": "9" * 5000})
    store.client.zadd(broker.RUNNING, {"long": 0})
    claimed(store)
    lapse(store)

    assert sweep(store, app) == {"requeued": 1}
    assert store.client.zcard(broker.RUNNING) == store.client.zcard(broker.DELAYED) == 0


@pytest.mark.parametrize("name", ["spent", "max_attempts"])
def test_a_lapsed_rollout_whose_record_no_script_can_read_ends_with_the_reason(
    store: JobStore, app: Celery, name: str
) -> None:
    patient(store)
    claimed(store)
    store.client.hset(broker.job_key("r1"), name, "x")
    lapse(store)
    sweep(store, app)
    result = RolloutResult.parse(app.backend.get_task_meta("r1")["result"])
    assert "its worker died, and its record cannot be read" in str(result.error)
    assert (record(store)["state"], store.client.zcard(broker.RUNNING)) == ("done", 0)


def test_a_rollout_that_kills_its_workers_ends_with_its_history(store: JobStore, app: Celery) -> None:
    patient(store)
    claimed(store, max_attempts=1)
    lapse(store)

    assert sweep(store, app)["exhausted"] == 1

    meta = app.backend.get_task_meta("r1")
    result = RolloutResult.parse(meta["result"])
    assert result.stop_condition is StopCondition.HAS_ERROR
    assert result.error is not None
    assert result.error.kind == "lease"
    assert "attempt 1: lease error: worker w1 stopped renewing" in (result.error.detail or "")
    assert record(store)["state"] == "done"
    assert store.client.xlen(broker.stream_key("b")) == 1


def test_a_cancelled_rollout_whose_worker_died_ends_as_cancelled(store: JobStore, app: Celery) -> None:
    patient(store)
    claimed(store)
    store.client.hset(broker.job_key("r1"), "cancel", 1)
    lapse(store)

    assert sweep(store, app)["cancelled"] == 1
    assert RolloutResult.parse(app.backend.get_task_meta("r1")["result"]).stop_condition is StopCondition.CANCELLED
    assert record(store)["outcome"] == "cancelled"


def consume(redis_url: str, rollout_id: str) -> None:
    """Consume a result as a producer does that keeps it for a minute."""

    async def main() -> None:
        connection = FleetConnection(redis_url, keep_consumed=60)
        await connection.consumed("b", [rollout_id])
        await connection.close()

    asyncio.run(main())


def let_a_minute_pass(store: JobStore) -> None:
    """Have all expire that does so within a minute."""
    for key in store.client.scan_iter():
        if 0 <= store.client.pttl(key) <= 60_000:
            store.client.delete(key)


def test_a_message_that_comes_again_after_its_rollout_was_consumed_and_dropped_runs_nothing(
    store: JobStore, redis_url: str
) -> None:
    async def submit() -> None:
        connection = FleetConnection(redis_url)
        await connection.submit([request()])
        await connection.close()

    asyncio.run(submit())
    claim = store.claim("r1", "w1")
    assert isinstance(claim, Claim)
    assert store.commit("r1", claim.attempt, "b", StopCondition.COMPLETED, b"x")
    consume(redis_url, "r1")
    assert store.claim("r1", "w2") == "done"

    let_a_minute_pass(store)
    assert not store.exists("r1")
    assert store.client.exists(broker.result_key("r1"), broker.stream_key("b")) == 0
    assert store.claim("r1", "w2") == "unknown"
    assert not store.exists("r1")


def test_a_message_that_carries_its_request_finds_a_record_for_as_long_as_ever(store: JobStore, redis_url: str) -> None:
    claim = claimed(store)
    assert store.commit("r1", claim.attempt, "b", StopCondition.COMPLETED, b"x")
    consume(redis_url, "r1")

    let_a_minute_pass(store)
    assert not store.client.exists(broker.result_key("r1"), broker.stream_key("b"))
    assert store.claim("r1", "w2", request()) == "done"
    assert store.client.ttl(broker.job_key("r1")) > broker.RESULT_TTL.total_seconds() - 100


def test_a_commit_whose_answer_was_lost_and_that_comes_after_the_record_went_stores_nothing(
    store: JobStore, redis_url: str
) -> None:
    claim = claimed(store)
    store.client.delete(broker.job_key("r1"))
    assert not store.commit("r1", claim.attempt, "b", StopCondition.COMPLETED, b"x")
    assert store.client.exists(broker.result_key("r1"), broker.stream_key("b")) == 0


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (b"[1]", "the request is list"),
        (request("r2").to_json(), "rollout_id: 'r2', in the record of another rollout"),
        (b" " * (RolloutRequest.MAX_BYTES + 1), "more than 16777216"),
    ],
    ids=["list", "another", "huge"],
)
def test_a_claim_gives_no_request_that_no_producer_can_have_written(request_: bytes, words: str) -> None:
    claim = Claim("r1", 1, last=False, batch_id="b", request=request_)
    with pytest.raises(InvalidRequestError, match=re.escape(words)):
        claim.parsed()
    assert replace(claim, request=request().to_json()).parsed() == request()


def test_a_stale_rollout_is_ended_at_its_claim_also_when_its_message_brought_it(store: JobStore) -> None:
    store.client.hset(broker.POLICY, mapping={"version": 9, "steps": 1, "on_stale": "cancel"})
    assert store.claim("r1", "w1", request(policy_version=3)) == "stale"
    assert record(store)["reason"] == "stale"
    assert isinstance(store.claim("r2", "w1", request("r2", policy_version=8)), Claim)
    assert isinstance(store.claim("r3", "w1", request("r3", policy_version=3, purpose="eval")), Claim)
    assert store.client.zrange(broker.VERSIONS, 0, -1) == [b"r2"]


def test_the_sweep_ends_what_a_trainer_that_died_did_not_get_to(store: JobStore, app: Celery) -> None:
    claim = claimed(store, policy_version=3)
    store.client.hset(broker.POLICY, mapping={"version": 9, "steps": 1, "on_stale": "cancel"})
    assert sweep(store, app)["stale"] == 1
    assert store.renew([("r1", claim.attempt)]) == {"r1": Renewal.CANCELLED}
    assert store.cancel_reason("r1") == "stale"


def test_a_stale_rollout_whose_worker_died_is_ended_with_the_reason(store: JobStore, app: Celery) -> None:
    claimed(store, policy_version=3)
    store.client.hset(broker.POLICY, mapping={"version": 9, "steps": 1, "on_stale": "cancel"})
    store.end_stale()
    lapse(store)
    patient(store)
    assert sweep(store, app)["cancelled"] == 1
    result = broker.decode_result(store.client.get(broker.result_key("r1")))["result"]
    assert (result["stop_condition"], result["error"]["reason"]) == ("cancelled", "stale")


def test_one_sweep_requeues_all_that_a_dead_machine_has_left(store: JobStore, app: Celery) -> None:
    for number in range(1500):
        claimed(store, rollout_id=f"r{number}")
    store.client.zadd(broker.RUNNING, {f"r{number}": 1 for number in range(1500)})
    patient(store)
    assert sweep(store, app) == {"requeued": 1500}


def test_one_sweep_wakes_all_whose_delay_is_over(store: JobStore, app: Celery) -> None:
    for number in range(1200):
        claim = claimed(store, rollout_id=f"r{number}")
        assert store.release(claim.parsed(), claim.attempt, "w1", replace(FAILED, delay=60)) is Requeue.REQUEUED
    store.client.zadd(broker.DELAYED, {f"r{number}": 1 for number in range(1200)})  # as if a minute had passed
    patient(store)
    assert sweep(store, app)["woken"] == 1200


def test_a_sweep_that_waited_for_redis_believes_no_lease_that_lapsed_meanwhile(
    store: JobStore, app: Celery, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was trusted when it began; then Redis stalled for more than a TTL, and nobody could renew."""
    store = JobStore(store.client, app, lease_ttl=0.2)
    claimed(store)
    store.uptime = lambda: 1000.0  # type: ignore[method-assign]
    take_turn = store.take_turn

    def stalled(key: str, interval: float) -> bool:
        threading.Event().wait(2 * store.lease_ttl + 0.1)
        return take_turn(key, interval)

    monkeypatch.setattr(store, "take_turn", stalled)
    assert sweep(store, app, trusted=True) == {}
    assert record(store)["state"] == "running"
