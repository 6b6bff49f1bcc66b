"""The producer without `await`: what a person at a notebook interrupts and goes on with."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from support import wait_until

from producer import (
    Drop,
    ErrorInfo,
    ErrorKind,
    GroupTerms,
    RolloutRequest,
    RolloutResult,
    StopCondition,
    SyncProducer,
    broker,
)
from producer.background import BackgroundLoop, Following

REQUEST = RolloutRequest.parse({"model": "m", "example_id": 7})


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Ctrl-C interrupts, also where the tests run in the background of a shell, which has it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupted(following: Following[Any]) -> None:
    """Wait for what does not come, until Ctrl-C."""
    main = threading.main_thread().ident

    def interrupt() -> None:
        wait_until(lambda: following._next, what="the waiting to begin")
        signal.pthread_kill(main, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        next(following)
    thread.join()


@pytest.mark.usefixtures("ctrl_c")
def test_an_interrupted_wait_loses_no_result_and_the_next_loop_goes_on(settings, idle_worker, make):
    with SyncProducer(settings) as producer:
        batch = producer.submit_many(make(3), batch_id="b")
        follower = producer.results("b", count=3)
        interrupted(batch)
        interrupted(follower)
        for request in make(3, batch_id="b"):
            idle_worker.finish(RolloutResult.for_request(request, StopCondition.COMPLETED))
        assert [result.rollout_id for result in batch] == ["r-0", "r-1", "r-2"]
        assert [result.rollout_id for result in follower] == ["r-0", "r-1", "r-2"]
        assert next(batch, None) is None


def test_an_error_of_the_source_is_raised_once_and_what_is_in_flight_is_still_delivered(settings, worker, make):
    def requests() -> Iterator[RolloutRequest]:
        yield from make(3)
        raise ValueError("the data set is broken")

    with SyncProducer(settings) as producer:
        batch = producer.submit_many(requests(), max_in_flight=1)
        found = []
        with pytest.raises(ValueError, match="broken"):
            found.extend(result.rollout_id for result in batch)
        found.extend(result.rollout_id for result in batch)
        assert sorted(found) == ["r-0", "r-1", "r-2"]


def test_a_named_consumer_is_told_what_comes_again(settings, worker, make):
    with SyncProducer(settings) as producer:
        assert len(list(producer.submit_many(make(3), batch_id="b"))) == 3
        first = producer.results("b", consumer="trainer")
        taken = [next(first).rollout_id, next(first).rollout_id]
        assert not first.redelivered
        again = producer.results("b", consumer="trainer", count=3)
        assert (next(again).rollout_id, again.redelivered) == (taken[1], True)
        assert next(again).rollout_id not in taken
        assert not again.redelivered
        assert again.position > first.position


@pytest.mark.usefixtures("ctrl_c")
def test_groups_can_be_watched_and_cancelled(settings, idle_worker):
    requests = [REQUEST.model_copy(update={"example_id": n}) for n in range(2)]
    with SyncProducer(settings) as producer:
        groups = producer.groups(requests, GroupTerms(2), run_id="run", consumer="trainer")
        interrupted(groups)
        wait_until(lambda: len(groups.open) == 2, what="both to be submitted")
        assert sorted(group.group_id for group in groups.open) == ["run-0", "run-1"]
        groups.max_groups = 3
        groups.set_pace(per_minute=60_000)
        assert groups.max_groups == 3
        groups.cancel()
        first = next(groups)
        assert (first.dropped, groups.redelivered) == (Drop.CANCELLED, False)
    with SyncProducer(settings) as producer:
        groups = producer.groups(requests, GroupTerms(2), run_id="run", consumer="trainer")
        found = {}
        for group in groups:
            found[group.group_id] = (group.dropped, groups.redelivered)
        assert found.pop(first.group_id) == (Drop.CANCELLED, True)
        assert list(found.values()) == [(Drop.CANCELLED, False)]


def test_a_handle_of_what_another_process_submitted(settings, worker, make):
    with SyncProducer(settings) as producer:
        producer.submit(make(1)[0])
    with SyncProducer(settings) as producer:
        assert producer.handle("r-0").result(30).completed


def test_a_rollout_that_redis_forgot_is_submitted_again_by_who_waits_for_it(settings, idle_worker, make, monkeypatch):
    monkeypatch.setattr("producer.results._BLOCK_MS", 20)
    [request] = make(1)

    def answer() -> None:
        wait_until(lambda: idle_worker.client.exists(broker.PENDING), what="the rollout to wait again")
        idle_worker.finish(RolloutResult.for_request(request, StopCondition.COMPLETED))

    with SyncProducer(settings) as producer:
        handle = producer.submit(request)
        idle_worker.client.flushall()
        again = threading.Thread(target=answer)
        again.start()
        assert handle.result(20).completed
        again.join()
        idle_worker.client.flushall()
        assert handle.result(20).error is not None, "what was delivered once does not run again"
        other = producer.submit(make(2)[1])
        other.cancel()
        idle_worker.client.flushall()
        assert other.result(20).stop_condition is StopCondition.CANCELLED
        assert producer.handle("r-9").result(20).error is not None, "nobody knows what it was"


def test_a_group_says_how_it_ended(settings, worker):
    broken = ErrorInfo(kind=ErrorKind.SANDBOX, message="it broke")
    worker.behaviour = lambda request: RolloutResult.for_request(request, StopCondition.HAS_ERROR, error=broken)
    with SyncProducer(settings) as producer:
        group = producer.submit_group(REQUEST, 1)
        assert group.result(30).dropped is Drop.FAILED
        assert group.decision is not None
        assert len(list(group)) == 1
        assert group.ended


def test_what_another_thread_begins_while_the_loop_ends_is_refused_and_does_not_hang():
    loop, busy = BackgroundLoop(), threading.Event()
    loop.begin(asyncio.to_thread(busy.wait))
    stopping = threading.Thread(target=loop.stop)
    stopping.start()
    wait_until(lambda: loop._loop._executor_shutdown_called)
    try:
        with pytest.raises(RuntimeError, match="closed"):
            loop.begin(asyncio.sleep(3600))
    finally:
        busy.set()
        stopping.join()
    with pytest.raises(RuntimeError, match="closed"):
        loop.run(asyncio.sleep(0))
