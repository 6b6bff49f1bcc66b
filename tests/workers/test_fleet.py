"""The fleet's claims: taken on Celery's thread, and given up by whatever keeps a rollout from beginning."""

from __future__ import annotations

import asyncio
import functools
import json
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from celery.app.trace import trace_task_ret
from celery.exceptions import Ignore, Terminated
from support import RedisServer, free_port, wait_until

from producer import broker
from producer.contract import (
    ErrorInfo,
    ErrorKind,
    FailedAttempt,
    Phase,
    RolloutRequest,
    RolloutResult,
    StopCondition,
)
from workers import claims, systems
from workers.app import create_app
from workers.environment import EpisodeEnvironment
from workers.history import HandBack
from workers.jobs import Claim, Requeue
from workers.leases import LeaseKeeper
from workers.pool import AsyncioPool, AsyncTask, CancelReason, Job
from workers.registry import Environments
from workers.sandboxes.local import LocalSandboxes
from workers.settings import WorkerSettings
from workers.state import Rollout


class Told(list[Any]):
    """What Celery's request would be told."""

    def handlers(self) -> dict[str, Callable[..., None]]:
        return {
            "accept_callback": lambda pid, at: self.append("accepted"),
            "callback": lambda result: self.append("ended"),
            "error_callback": lambda info: self.append(type(getattr(info.exception, "exc", info.exception))),
        }


class Worker:
    """A worker's pool with one slot, in this process: a rollout that is woken waits while the slot is taken."""

    def __init__(self, url: str, directory: Path, lease_ttl: float = 30.0) -> None:
        settings = WorkerSettings(
            redis_url=url,
            lease_ttl=lease_ttl,
            gateway_url=f"http://127.0.0.1:{free_port()}",
            sandbox_dir=directory / "sandboxes",
        )
        self.app = create_app(settings, {})
        self.fleet: Any = self.app.rollout_fleet
        self.client = redis.Redis.from_url(url)
        self.pool = AsyncioPool(1, app=self.app, initargs=(self.app, "w1@here"))
        self.pool.start()
        self.free = threading.Event()

    def occupy(self) -> None:
        async def occupy() -> None:
            entered.set()
            while not self.free.is_set():
                await asyncio.sleep(0.002)

        entered = threading.Event()
        task = self.app.task(base=AsyncTask, name="occupy", ignore_result=True, shared=False)(occupy)
        self.app.finalize()
        self.apply(task.name, "occupy")
        assert entered.wait(20)

    def wake(self, rollout_id: str = "r1", **fields: Any) -> tuple[Job, Told]:
        """Bring the message of a rollout, which carries its request; it names an environment that nobody offers."""
        carried = {"model": "m", "batch_id": "b", "environment": "none", "max_attempts": 1, "priority": 0} | fields
        return self.apply(broker.RUN_ROLLOUT, rollout_id, carried)

    def apply(self, name: str, task_id: str, *args: object) -> tuple[Job, Told]:
        told = Told()
        request = {"id": task_id, "task": name, "args": args, "kwargs": {}}
        message = (name, task_id, request, json.dumps([args, {}, {}]), "application/json", "utf-8")
        target = functools.partial(trace_task_ret, app=self.app)
        return self.pool.apply_async(target, message, **told.handlers()), told

    def record(self, rollout_id: str = "r1") -> dict[str, str]:
        return {k.decode(): v.decode() for k, v in self.client.hgetall(broker.job_key(rollout_id)).items()}

    def result(self, rollout_id: str = "r1") -> RolloutResult:
        return RolloutResult.parse(broker.decode_result(self.client.get(broker.result_key(rollout_id)))["result"])

    def holds(self) -> tuple[list[str], list[str]]:
        """Return the ids that the fleet holds, and those whose leases are kept."""
        return self.fleet.claims.held(), [rollout_id for rollout_id, _ in self.fleet.keeper.held()]

    def stop(self) -> None:
        """Shut down warmly; what runs may end when the shutdown waits for it."""

        def let_it_end() -> None:
            wait_until(lambda: self.pool.closing)
            self.free.set()

        letting = threading.Thread(target=let_it_end)
        letting.start()
        self.pool.stop()
        letting.join()

    def close(self) -> None:
        self.pool.terminate()
        self.client.close()
        self.app.close()


Start = Callable[..., Worker]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    workers: list[Worker] = []

    def start(url: str, **options: Any) -> Worker:
        workers.append(Worker(url, tmp_path, **options))
        workers[-1].occupy()
        # What it does at its start is over then; the lease keeper's next duties are a quarter of a lease away.
        wait_until(lambda: workers[-1].client.exists(broker.SWEPT), what="the first sweep")
        # The sweep may be one of a worker that has just been closed.
        wait_until(lambda: workers[-1].fleet.keeper._told, what="the keeper's first round")
        return workers[-1]

    yield start
    for worker in workers:
        worker.close()


@pytest.fixture
def worker(start: Start, redis_url: str) -> Worker:
    return start(redis_url)


NOTHING: tuple[list[str], list[str]] = ([], [])


def test_a_rollout_is_claimed_before_it_enters_the_pool(worker: Worker) -> None:
    _, told = worker.wake()
    assert worker.record()["state"] == "running"
    assert worker.holds() == (["r1"], ["r1"])
    wait_until(lambda: told == ["accepted"])
    wait_until(lambda: worker.pool.info["waiting"] == 1)

    worker.free.set()
    wait_until(lambda: told == ["accepted", "ended"])
    assert (worker.record()["state"], worker.record()["outcome"]) == ("done", "has_error")
    assert "'none' is not known to this worker" in str(worker.result().error)
    assert worker.holds() == NOTHING


def test_a_duplicate_wake_up_never_enters_the_pool(worker: Worker) -> None:
    worker.wake()
    _, again = worker.wake()
    wait_until(lambda: again == [Ignore])
    wait_until(lambda: worker.pool.info["waiting"] == 1, what="the first one, which is on its way to the loop")
    assert worker.holds() == (["r1"], ["r1"]), "the duplicate's end leaves the claim alone"


def test_a_wake_up_that_comes_before_the_lost_attempt_has_cleaned_up_is_sent_again_when_it_has(
    start: Start, redis_url: str
) -> None:
    """Dropped, it would come back with a sweep that is a lease's time away."""
    worker = start(redis_url, lease_ttl=3600.0)
    job, lost = worker.wake(max_attempts=2)
    request = RolloutRequest(rollout_id="r1", model="m")
    given_back = worker.fleet.store.release(request, 1, "w2", HandBack.over("another worker's sweep", counts=True))
    assert given_back is Requeue.REQUEUED
    worker.client.delete(*broker.queue_keys())  # it is taken by this worker
    _, early = worker.apply(broker.RUN_ROLLOUT, "r1")
    wait_until(lambda: early == [Ignore])
    assert not worker.client.exists(*broker.queue_keys()), "while it is held"
    job.cancel(CancelReason.LEASE_LOST)
    wait_until(lambda: lost == ["accepted", Ignore])
    wait_until(lambda: worker.client.llen(broker.queue_key(0)) == 1, what="its message")
    worker.apply(broker.RUN_ROLLOUT, "r1")
    assert (worker.record()["state"], worker.record()["attempt"]) == ("running", "2")


@pytest.mark.parametrize("state", ["running", "done"])
def test_a_wake_up_for_what_others_run_or_ended_never_enters_the_pool(worker: Worker, state: str) -> None:
    worker.client.hset(broker.job_key("r1"), mapping={"state": state, "attempt": 1, "spent": 1})
    _, told = worker.wake()
    wait_until(lambda: told == [Ignore])
    assert worker.pool.info["waiting"] == 0
    assert worker.record() == {"state": state, "attempt": "1", "spent": "1"}
    assert worker.holds() == NOTHING


def test_a_wake_up_without_a_record_is_named_in_the_log(worker: Worker, caplog: pytest.LogCaptureFixture) -> None:
    _, told = worker.apply(broker.RUN_ROLLOUT, "r1")
    wait_until(lambda: told == [Ignore])
    assert "r1: a message without a record" in caplog.text


def test_an_invalid_request_has_no_record_and_gets_its_result_from_the_pool(worker: Worker) -> None:
    _, told = worker.wake(modle="x")
    worker.free.set()
    wait_until(lambda: told == ["accepted", "ended"])
    assert "modle: no such field" in str(worker.result().error)
    assert worker.record() == {}


def test_arguments_that_the_task_does_not_take_fail_it_unclaimed(worker: Worker) -> None:
    _, told = worker.apply(broker.RUN_ROLLOUT, "r1", {"model": "m"}, "surplus")
    wait_until(lambda: told == ["accepted", TypeError])
    assert worker.record() == {}


def test_a_shutdown_hands_a_waiting_rollout_back_to_the_front(worker: Worker) -> None:
    _, told = worker.wake()
    worker.stop()
    assert told == ["accepted", Ignore]
    record = worker.record()
    assert (record["state"], record["spent"], record["attempt"]) == ("pending", "0", "1")
    assert "did not start it: shutdown" in record["history"]
    assert worker.client.llen(broker.queue_key(0)) == 1
    assert worker.client.zscore(broker.PENDING, "r1") == broker.pending_base(0)
    assert worker.holds() == NOTHING


def test_a_shutdown_ends_a_waiting_rollout_whose_cancellation_it_has_not_seen(worker: Worker) -> None:
    worker.wake()
    worker.client.hset(broker.job_key("r1"), "cancel", 1)
    worker.stop()
    assert worker.record()["outcome"] == "cancelled"
    assert worker.result().stop_condition == "cancelled"


def test_a_lost_broker_connection_keeps_a_waiting_rollout(worker: Worker) -> None:
    _, told = worker.wake()
    worker.pool.flush()
    worker.free.set()
    wait_until(lambda: told == ["accepted", "ended"])
    assert worker.record()["state"] == "done"


def test_a_waiting_rollout_that_its_producer_cancels_ends_so(worker: Worker) -> None:
    _, told = worker.wake()
    worker.fleet.claims.cancel("r1")
    wait_until(lambda: told == ["accepted", Ignore])
    assert worker.record()["outcome"] == "cancelled"
    assert str(worker.result().error).endswith("cancelled before it began")
    assert [fields[b"outcome"] for _, fields in worker.client.xrange(broker.stream_key("b"))] == [b"cancelled"]
    assert worker.holds() == NOTHING


def test_a_waiting_rollout_that_is_revoked_ends_as_cancelled(worker: Worker) -> None:
    job, told = worker.wake()
    job.terminate(15)
    wait_until(lambda: told == ["accepted", Terminated])
    assert worker.record()["outcome"] == "cancelled"
    assert worker.result().stop_condition == "cancelled"
    assert worker.holds() == NOTHING


def test_a_waiting_rollout_whose_lease_is_lost_is_dropped_and_left_alone(worker: Worker) -> None:
    _, told = worker.wake()
    worker.client.hset(broker.job_key("r1"), mapping={"attempt": 2, "worker": "w2@there"})
    before = worker.record()
    worker.fleet.keeper.hurry()
    wait_until(lambda: told == ["accepted", Ignore])
    assert worker.holds() == NOTHING
    assert worker.record() == before


@pytest.mark.parametrize("reason", [CancelReason.SHUTDOWN, CancelReason.REVOKED])
def test_a_rollout_that_is_cancelled_before_its_first_step_is_not_forgotten(
    worker: Worker, reason: CancelReason
) -> None:
    job, told = worker.wake()

    def start_and_cancel() -> None:
        worker.pool.limit += 1
        worker.pool._start_waiting()
        worker.pool._cancel(job, reason)

    worker.pool._loop.call(start_and_cancel)
    wait_until(lambda: told == ["accepted", Terminated if reason is CancelReason.REVOKED else Ignore])
    assert worker.record()["state"] == ("done" if reason is CancelReason.REVOKED else "pending")
    assert worker.holds() == NOTHING


def test_redis_away_refuses_the_claim_and_the_next_one_succeeds(start: Start, own_redis: RedisServer) -> None:
    worker = start(own_redis.url)
    own_redis.stop(signal.SIGKILL)
    _, told = worker.wake()
    wait_until(lambda: told == [Ignore])
    assert worker.holds() == NOTHING
    own_redis.start()
    worker.wake()
    assert worker.record()["state"] == "running"


def test_a_redis_that_hangs_does_not_hold_celerys_thread(
    start: Start, own_redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert claims.CLAIM_PATIENCE <= 5
    monkeypatch.setattr(claims, "CLAIM_PATIENCE", 0.2)
    worker = start(own_redis.url)
    worker.wake("before")
    assert own_redis.process is not None
    own_redis.process.send_signal(signal.SIGSTOP)
    began = time.monotonic()
    _, told = worker.wake()
    assert time.monotonic() - began < 8, "what else asks Redis waits for 10 s"
    retry = worker.fleet.claims._impatient.client.connection_pool.connection_kwargs["retry"]
    assert retry._retries == 0, "one attempt, of one time-out"
    own_redis.process.send_signal(signal.SIGCONT)
    wait_until(lambda: told == [Ignore])


@pytest.fixture
def resting(start: Start, redis_url: str, monkeypatch: pytest.MonkeyPatch) -> Worker:
    """Return a worker whose lease keeper does nothing more: the test alone settles what is unsure."""
    monkeypatch.setattr(LeaseKeeper, "hurry", lambda self: None)
    worker = start(redis_url, lease_ttl=3600.0)
    wait_until(lambda: worker.client.exists(broker.SWEPT), what="its first round, before one that is far away")
    return worker


def unsure(worker: Worker, rollout_id: str = "r1") -> None:
    """Have the claim of a rollout succeed, and its answer be lost."""
    claim = worker.fleet.claims._impatient.claim
    states: list[str] = []

    def lose(*args: object) -> None:
        claim(*args)
        states.append(worker.record(rollout_id)["state"])  # later, a sweep may have settled it already
        raise redis.TimeoutError("the answer was lost")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker.fleet.claims._impatient, "claim", lose)
        _, told = worker.wake(rollout_id)
    wait_until(lambda: told == [Ignore])
    assert states == ["running"]


def test_a_claim_whose_answer_was_lost_is_given_back_and_spends_no_attempt(resting: Worker) -> None:
    worker = resting
    unsure(worker)
    worker.fleet.claims.settle_unsure()
    record = worker.record()
    assert (record["state"], record["attempt"], record["spent"]) == ("pending", "1", "0")
    assert not worker.fleet.claims.unsure


def test_a_claim_that_is_being_made_is_not_taken_for_the_lost_one(
    resting: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is settled in the moment between the second claim's answer and its being held."""
    worker = resting
    held = worker.fleet.claims
    held._unsure["r1"] = None  # the first claim never reached Redis
    claim = held._impatient.claim

    def settled_meanwhile(*args: object) -> object:
        found = claim(*args)
        held.settle_unsure()
        return found

    monkeypatch.setattr(held._impatient, "claim", settled_meanwhile)
    worker.wake()
    assert (worker.record()["state"], worker.holds()) == ("running", (["r1"], ["r1"]))
    held.settle_unsure()
    assert (worker.record()["state"], held.unsure) == ("running", False)


def test_a_lost_claim_of_what_cannot_be_read_holds_up_neither_the_others_nor_the_sweep(resting: Worker) -> None:
    worker = resting
    for rollout_id in ("r1", "r2", "r3"):
        unsure(worker, rollout_id)
    worker.client.hset(broker.job_key("r1"), "request", b"[1]")
    worker.client.hset(broker.job_key("r2"), "attempt", "x")
    worker.client.zadd(broker.DELAYED, {"r3": 1})
    worker.client.delete(broker.SWEPT)
    worker.fleet.sweep()
    assert not worker.fleet.claims.unsure
    assert [worker.record(rollout_id)["state"] for rollout_id in ("r1", "r2", "r3")] == ["running"] * 2 + ["pending"]
    assert worker.client.zcard(broker.DELAYED) == 0, "the sweep was made"


def test_a_lost_claim_is_kept_in_mind_while_redis_is_away(resting: Worker) -> None:
    worker = resting
    unsure(worker)

    def away(rollout_id: str) -> None:
        raise redis.ConnectionError("away")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker.fleet.claims._store, "claimed_by", away)
        with pytest.raises(redis.ConnectionError):
            worker.fleet.claims.settle_unsure()
    worker.fleet.claims.settle_unsure()
    assert worker.record()["state"] == "pending"


def test_a_message_that_carries_its_request_outlasts_a_redis_that_was_away_at_its_claim(
    start: Start, own_redis: RedisServer
) -> None:
    """No record tells the sweep of it, and the message is gone: whoever waits for its result would wait for ever."""
    worker = start(own_redis.url)
    own_redis.stop(signal.SIGKILL)
    _, told = worker.wake()
    wait_until(lambda: told == [Ignore])
    assert worker.pool.num_processes == 0, "it takes no more, which this process alone would know of"
    own_redis.start()
    wait_until(lambda: worker.record().get("state") == "pending", what="its record")
    assert worker.client.llen(broker.queue_key(0)) == 1, "and its wake-up call"
    record = worker.record()
    assert (record["spent"], record["carried"], json.loads(record["request"])["model"]) == ("0", "1", "m")
    wait_until(lambda: worker.pool.num_processes == 1, what="the worker to take messages again")
    worker.apply(broker.RUN_ROLLOUT, "r1")
    worker.free.set()
    wait_until(lambda: worker.record()["state"] == "done")
    assert "'none' is not known" in str(worker.result().error)


def test_a_message_that_carries_its_request_outlasts_a_redis_that_is_full_at_its_claim(
    start: Start, own_redis: RedisServer
) -> None:
    """The worker would take, and keep for itself, one after the other."""
    worker = start(own_redis.url)
    worker.client.config_set("maxmemory", 1)
    _, told = worker.wake()
    wait_until(lambda: told == [Ignore])
    assert (worker.pool.num_processes, worker.record()) == (0, {})
    worker.client.config_set("maxmemory", 0)
    wait_until(lambda: worker.record().get("state") == "pending", what="its record")


def test_an_invalid_message_whose_claim_redis_missed_gets_its_result(start: Start, own_redis: RedisServer) -> None:
    worker = start(own_redis.url)
    own_redis.stop(signal.SIGKILL)
    worker.wake(modle="x")
    own_redis.start()
    wait_until(lambda: worker.client.exists(broker.result_key("r1")), what="its result")
    assert "modle: no such field" in str(worker.result().error)
    assert worker.record() == {}


def test_what_a_message_carried_gets_its_record_when_the_worker_ends_meanwhile(
    resting: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = resting

    def away(*_: object) -> None:
        raise redis.TimeoutError("no answer")

    monkeypatch.setattr(worker.fleet.claims._impatient, "claim", away)
    worker.wake()
    assert (worker.fleet.claims.unsure, worker.record()) == (True, {})
    worker.stop()
    assert worker.record()["state"] == "pending"


def test_a_carried_request_whose_record_was_made_meanwhile_is_left_to_that(resting: Worker) -> None:
    worker = resting
    worker.fleet.claims._unsure["r1"] = {"model": "late"}
    worker.client.hset(broker.job_key("r1"), mapping={"state": "pending", "attempt": 0, "spent": 0})
    worker.fleet.claims.settle_unsure()
    assert worker.record() == {"state": "pending", "attempt": "0", "spent": "0"}
    assert not worker.fleet.claims.unsure


def test_a_claim_of_what_is_no_record_does_not_keep_the_worker_from_taking_others(resting: Worker) -> None:
    worker = resting
    worker.client.set(broker.job_key("r1"), "no record")
    _, told = worker.wake()
    wait_until(lambda: told == [Ignore])
    worker.fleet.claims.settle_unsure()
    assert (worker.fleet.claims.unsure, worker.pool.num_processes) == (False, 1)


def test_a_refusal_is_not_told_as_silence(
    start: Start, redis_url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    worker = start(redis_url, lease_ttl=3600.0)

    def refuse(*_: object, **__: object) -> None:
        raise redis.exceptions.NoPermissionError("this user has no permissions to run the 'eval' command")

    monkeypatch.setattr(worker.fleet.store, "take_turn", refuse)
    worker.fleet.sweep()
    assert "no sweep, Redis refuses it: this user has no permissions" in caplog.text


def test_a_worker_that_waits_for_redis_names_the_setting_and_asks_less_and_less_often(
    start: Start, redis_url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    worker = start(redis_url)
    worker.fleet.settings = worker.fleet.settings.model_copy(update={"redis_url": "redis://u:secret@nowhere:1/0"})
    delays: list[float] = []
    failures = iter(range(6))

    def call() -> str:
        if next(failures, None) is None:
            return "there"
        raise redis.ConnectionError("refused")

    async def note(delay: float) -> None:
        if threading.get_ident() != here:  # others sleep meanwhile
            await sleep(delay)
        else:
            delays.append(delay)

    async def wait() -> str:
        return str(await worker.fleet._when_redis_answers(None, call))

    sleep, here = asyncio.sleep, threading.get_ident()
    monkeypatch.setattr("workers.fleet.asyncio.sleep", note)
    assert asyncio.run(wait()) == "there"
    monkeypatch.undo()
    assert delays == [0.5, 1, 2, 4, 8, 8]
    (line, *_) = [r for r in caplog.records if "worker's start waits" in r.getMessage()]
    assert "redis://***@nowhere:1/0, check ROLLOUTS_REDIS_URL" in line.getMessage()
    assert "secret" not in caplog.text
    assert not hasattr(line, "rollout_id")


def test_each_system_has_a_budget_of_its_own_for_failures_that_are_not_charged(
    start: Start, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = start(redis_url)
    gateway = ErrorInfo(kind=ErrorKind.GATEWAY, message="away", retryable=True, phase=Phase.REGISTER)
    sandbox = ErrorInfo(kind=ErrorKind.SANDBOX, message="none left", retryable=True, phase=Phase.SANDBOX)
    by_agent = gateway.model_copy(update={"phase": Phase.AGENT})
    earlier = [
        FailedAttempt(attempt=n, error=error, counted=counted)
        for n, (error, counted) in enumerate([(gateway, False), (gateway, True), (by_agent, False), (sandbox, False)])
    ]
    monkeypatch.setattr(worker.fleet.store, "failed_attempts", lambda _: earlier)
    claim = Claim("r1", 5, last=False, batch_id="b", request=b"")

    async def excused() -> list[int]:
        return [await worker.fleet._excused(claim, error) for error in (gateway, sandbox)]

    assert asyncio.run(excused()) == [1, 1]


def test_an_environment_that_does_not_end_keeps_no_system_open(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[str] = []

    async def hangs(_: Environments) -> None:
        closed.append("environments")
        await asyncio.Event().wait()

    async def close(_: LocalSandboxes) -> None:
        closed.append("sandboxes")

    monkeypatch.setattr(Environments, "aclose", hangs)
    monkeypatch.setattr(LocalSandboxes, "aclose", close)
    monkeypatch.setattr(systems, "CLOSE_LIMIT", 0.1)
    worker = Worker(redis_url, tmp_path)
    began = time.monotonic()
    worker.close()
    assert sorted(closed) == ["environments", "sandboxes"]
    assert time.monotonic() - began < worker.pool.lifespan_grace


def test_a_shutdown_without_redis_lets_the_lease_lapse(
    start: Start, own_redis: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    worker = start(own_redis.url)
    worker.wake()
    own_redis.stop(signal.SIGTERM)  # not SIGKILL: where the disk is busy, the claim is not in the file yet
    worker.stop()
    assert "r1: not handed back, its lease lapses" in caplog.text
    assert worker.holds() == NOTHING
    own_redis.start()
    request = RolloutRequest(rollout_id="r1", model="m")
    assert worker.fleet.store.release(request, 1, "w2", HandBack.over("another worker's sweep")) is Requeue.REQUEUED


@pytest.mark.parametrize("reason", [CancelReason.SHUTDOWN, CancelReason.CANCELLED])
def test_what_is_finished_is_not_lost_to_a_cancellation_while_redis_is_away(
    start: Start, redis_url: str, monkeypatch: pytest.MonkeyPatch, reason: CancelReason
) -> None:
    worker = start(redis_url)
    worker.fleet.environments._by_name["quick"] = Quick()
    store, request = worker.fleet.store, RolloutRequest(rollout_id="r1", model="m", environment="quick", max_attempts=2)
    store.claim("r1", "w2", request)
    assert store.release(request, 1, "w2", HandBack.over("w2 ended", counts=True)) is Requeue.REQUEUED
    asked, back, answer = threading.Event(), threading.Event(), store.failed_attempts

    def failed_attempts(rollout_id: str) -> list[FailedAttempt]:
        asked.set()
        if not back.is_set():
            raise redis.ConnectionError("refused")
        found: list[FailedAttempt] = answer(rollout_id)
        return found

    monkeypatch.setattr(store, "failed_attempts", failed_attempts)
    job, told = worker.wake()
    worker.free.set()
    assert asked.wait(10)
    job.cancel(reason)
    wait_until(lambda: job.cancel_reason is reason)
    back.set()
    wait_until(lambda: len(told) == 2, what="its end")
    assert told == ["accepted", "ended"]
    assert worker.record()["state"] == "done"
    assert (worker.result().stop_condition, worker.result().reward) == (StopCondition.COMPLETED, 1.0)


class Quick(EpisodeEnvironment):
    async def run(self, rollout: Rollout) -> None:
        rollout.reward = 1.0


def test_an_attempt_that_fails_while_redis_is_full_runs_again_when_there_is_room(
    start: Start, own_redis: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    """Its result waits for room (`Claims.commit`); giving it back must too, or a failure that passes is its end."""
    worker = start(own_redis.url)
    worker.wake(environment="command", run_command="true", max_attempts=3)  # nobody listens at its gateway
    assert worker.record()["state"] == "running"
    worker.client.config_set("maxmemory", 1)
    worker.free.set()
    wait_until(lambda: "command not allowed" in caplog.text, what="its worker to wait for room")
    worker.client.config_set("maxmemory", 0)
    wait_until(lambda: worker.record()["state"] != "running", what="its end, or its next attempt")
    assert worker.record()["state"] == "pending"
