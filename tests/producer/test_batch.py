from __future__ import annotations

import asyncio
import logging
from itertools import count

import pytest
import zstandard
from support import wait_until

from producer import (
    CancelAnswer,
    ErrorKind,
    InvalidRequestError,
    Producer,
    ProducerSettings,
    RolloutRequest,
    RolloutResult,
    StopCondition,
    broker,
)
from producer.connection import CHUNK, end
from producer.results import Recent


def open_producer(url, **more):
    return Producer(ProducerSettings(redis_url=url), **more)


async def until(predicate):
    await asyncio.to_thread(wait_until, predicate)


def done(request, **fields):
    return RolloutResult.for_request(request, StopCondition.COMPLETED, **fields)


def test_a_batch_delivers_each_result_once_and_counts_them(settings, worker, make):
    def behaviour(request):
        stop = {1: StopCondition.HAS_ERROR, 2: StopCondition.AGENT_TIMEOUT, 3: StopCondition.CANCELLED}
        return RolloutResult.for_request(request, stop.get(request.example_id, StopCondition.COMPLETED))

    worker.behaviour = behaviour

    async def go():
        async with Producer(settings) as producer:
            batch = await producer.submit_many(make(8))
            assert batch.counts.submitted == 8
            return [r async for r in batch], batch.counts, batch.batch_id

    results, counts, batch_id = asyncio.run(go())
    assert sorted(r.rollout_id for r in results) == [f"r-{i}" for i in range(8)]
    assert {r.batch_id for r in results} == {batch_id}
    assert (counts.completed, counts.failed, counts.cancelled, counts.done, counts.in_flight) == (5, 2, 1, 8, 0)


def test_the_window_is_never_exceeded(settings, worker, make):
    taken = []

    def source():
        for request in make(60):
            taken.append(request.rollout_id)
            yield request

    most = 0

    async def go():
        nonlocal most
        async with Producer(settings) as producer:
            batch = await producer.submit_many(source(), max_in_flight=7)
            assert len(taken) == 7
            delivered = 0
            async for _ in batch:
                delivered += 1
                most = max(most, batch.counts.in_flight + 1)  # with the one that was delivered just now
                assert len(taken) <= delivered + 7
                # the records in Redis that are not delivered: what the window is about
                assert worker.client.zcard(broker.PENDING) <= 7
            return delivered

    assert asyncio.run(go()) == 60
    assert most == 7


def test_an_endless_source_waits_for_its_results_to_be_taken(settings, idle_worker, make):
    template = make(1)[0]
    endless = (template.model_copy(update={"rollout_id": f"e-{i}"}) for i in count())

    async def go():
        async with Producer(settings) as producer:
            batch = await producer.submit_many(endless, max_in_flight=CHUNK + 50)
            return batch.counts.submitted

    assert asyncio.run(go()) == CHUNK + 50
    assert idle_worker.client.zcard(broker.PENDING) == CHUNK + 50


def test_results_are_delivered_while_an_asynchronous_source_is_slow(settings, worker, make):
    async def go():
        more = asyncio.Event()

        async def source():
            yield make(2)[0]
            await more.wait()
            yield make(2)[1]

        async with Producer(settings) as producer:
            batch = await producer.submit_many(source())
            first = await anext(batch)
            more.set()
            return [first.rollout_id] + [r.rollout_id async for r in batch]

    assert asyncio.run(go()) == ["r-0", "r-1"]


def test_an_empty_source_ends_at_once(settings):
    async def go():
        async with Producer(settings) as producer:
            return [r async for r in await producer.submit_many([])]

    assert asyncio.run(go()) == []


def test_an_error_of_the_source_is_raised_once_and_what_is_in_flight_is_still_delivered(settings, worker, make):
    async def go():
        async def source():
            yield make(1)[0]
            raise OSError("the disk with the tasks is gone")

        async with Producer(settings) as producer:
            batch = await producer.submit_many(source())
            seen = []

            async def take_all():
                async for result in batch:
                    seen.append(result)

            with pytest.raises(OSError, match="disk with the tasks"):
                await take_all()
            await take_all()
            return seen

    assert [r.rollout_id for r in asyncio.run(go())] == ["r-0"]


def test_an_id_that_comes_twice_is_refused(settings, idle_worker, make):
    async def go():
        async with Producer(settings) as producer:
            await producer.submit_many([*make(2), *make(1)])

    with pytest.raises(InvalidRequestError, match="'r-0' comes twice"):
        asyncio.run(go())
    assert idle_worker.client.zcard(broker.PENDING) == 0


@pytest.mark.parametrize("batch_id", ["no spaces", "a/b", "-x"])
def test_a_malformed_batch_id_is_refused(settings, make, batch_id):
    async def go():
        async with Producer(settings) as producer:
            await producer.submit_many(make(1), batch_id=batch_id)

    with pytest.raises(InvalidRequestError, match="batch_id"):
        asyncio.run(go())


def test_cancel_stops_the_source_and_ends_what_waits_and_what_runs(settings, start_worker, redis_url, make):
    worker = start_worker(redis_url)
    worker.behaviour = lambda request: None if request.example_id == 0 else done(request)

    async def go():
        async with Producer(settings) as producer:
            batch = await producer.submit_many(iter(make(1)), max_in_flight=2)
            await until(lambda: worker.held)
            worker.stop()
            batch = await producer.submit_many(make(30)[1:], batch_id="waiting", max_in_flight=3)
            answers = await batch.cancel()
            results = [r async for r in batch]
            return answers, results, batch.counts

    answers, results, counts = asyncio.run(go())
    assert set(answers.values()) == {CancelAnswer.CANCELLED}
    assert [r.stop_condition for r in results] == [StopCondition.CANCELLED] * 3
    assert (counts.submitted, counts.cancelled) == (3, 3)


def test_cancel_of_running_rollouts_delivers_their_cancelled_results(settings, worker, make):
    worker.behaviour = lambda request: None

    async def go():
        async with Producer(settings) as producer:
            batch = await producer.submit_many(make(3))
            await until(lambda: len(worker.held) == 3)
            answers = await batch.cancel()
            return answers, [r.stop_condition async for r in batch]

    answers, stops = asyncio.run(go())
    assert set(answers.values()) == {CancelAnswer.REQUESTED}
    assert stops == [StopCondition.CANCELLED] * 3


def test_resubmitting_a_batch_delivers_what_had_ended_before(settings, worker, make):
    async def go():
        async with Producer(settings) as producer:
            first = [r.rollout_id async for r in await producer.submit_many(make(9), batch_id="b")]
            again = [r.rollout_id async for r in await producer.submit_many(make(9), batch_id="b", max_in_flight=2)]
            return sorted(first), sorted(again)

    first, again = asyncio.run(go())
    assert first == again == [f"r-{i}" for i in range(9)]
    assert len(worker.started) == 9


def test_a_cancelled_anext_loses_no_result(settings, idle_worker, make):
    async def go():
        async with Producer(settings) as producer:
            batch = await producer.submit_many(make(1))
            waiting = asyncio.create_task(anext(batch))
            for _ in range(5):
                await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.wait({waiting})
            idle_worker.finish(done(make(1)[0].model_copy(update={"batch_id": batch.batch_id})))
            return [r.rollout_id async for r in batch]

    assert asyncio.run(go()) == ["r-0"]


def test_several_tasks_share_the_results_of_one_batch(settings, worker, make):
    async def go():
        async with Producer(settings) as producer:
            batch = await producer.submit_many(make(40), max_in_flight=10)

            async def consume():
                return [r.rollout_id async for r in batch]

            return [i for ids in await asyncio.gather(consume(), consume(), consume()) for i in ids]

    assert sorted(asyncio.run(go())) == sorted(f"r-{i}" for i in range(40))


def test_redis_restarts_during_a_batch(own_redis, start_worker, make):
    worker = start_worker(own_redis.url)
    worker.behaviour = lambda request: done(request) if request.example_id < 5 else None

    async def go():
        async with open_producer(own_redis.url) as producer:
            batch = await producer.submit_many(make(10))
            results = [await anext(batch) for _ in range(5)]
            await until(lambda: len(worker.held) == 5)
            await asyncio.to_thread(worker.stop)
            await asyncio.to_thread(own_redis.stop)
            waiting = asyncio.create_task(anext(batch))
            await asyncio.to_thread(own_redis.start)
            for request in worker.held.values():
                worker.finish(done(request))
            results.append(await waiting)
            return [r.rollout_id for r in results] + [r.rollout_id async for r in batch]

    assert sorted(asyncio.run(go())) == sorted(f"r-{i}" for i in range(10))


def test_results_follow_through_a_restart_of_redis_from_where_they_were(own_redis, start_worker, make, caplog):
    caplog.set_level(logging.WARNING)
    worker = start_worker(own_redis.url)
    worker.behaviour = lambda request: done(request) if request.example_id < 3 else None

    async def go():
        async with open_producer(own_redis.url) as producer:
            await producer.submit_many(make(6), batch_id="b")
            results = producer.results("b", count=6)
            seen = [(await anext(results)).rollout_id for _ in range(3)]
            await until(lambda: len(worker.held) == 3)
            await asyncio.to_thread(worker.stop)
            following = asyncio.create_task(anext(results))
            await asyncio.to_thread(own_redis.stop)
            await until(lambda: "went away" in caplog.text)
            await asyncio.to_thread(own_redis.start)
            for request in worker.held.values():
                worker.finish(done(request))
            return seen + [(await following).rollout_id] + [r.rollout_id async for r in results]

    ids = asyncio.run(go())
    assert sorted(ids) == [f"r-{i}" for i in range(6)]
    assert [r.getMessage() for r in caplog.records if "went away" in r.getMessage()]


def test_a_dropped_connection_loses_no_result(settings, idle_worker, make):
    async def go():
        async with Producer(settings) as producer:
            batch = await producer.submit_many(make(1))
            waiting = asyncio.create_task(anext(batch))
            await until(lambda: idle_worker.client.info("clients")["blocked_clients"] == 1)
            idle_worker.client.client_kill_filter(_type="normal", skipme=True)
            idle_worker.finish(done(make(1)[0].model_copy(update={"batch_id": batch.batch_id})))
            return await waiting

    assert asyncio.run(go()).rollout_id == "r-0"


def test_a_rollout_that_a_restarting_redis_forgot_is_submitted_again(own_redis, start_worker, make):
    async def go():
        async with open_producer(own_redis.url) as producer:
            batch = await producer.submit_many(make(3))
            own_redis.client.flushall()  # stands for the last second before a crash
            own_redis.client.client_kill_filter(_type="normal", skipme=True)
            await until(lambda: own_redis.client.zcard(broker.PENDING) == 3)
            start_worker(own_redis.url)
            return [r.rollout_id async for r in batch]

    assert sorted(asyncio.run(go())) == ["r-0", "r-1", "r-2"]


def test_an_announcement_that_was_lost_is_found_in_the_record(settings, idle_worker, make):
    async def go():
        async with Producer(settings) as producer:
            batch = await producer.submit_many(make(1))
            await until(lambda: idle_worker.client.info("clients")["blocked_clients"] == 1)
            request = make(1)[0].model_copy(update={"batch_id": batch.batch_id})
            idle_worker.app.backend.store_result("r-0", done(request), "SUCCESS")
            idle_worker.client.hset(broker.job_key("r-0"), mapping={"state": "done", "outcome": "completed"})
            idle_worker.client.client_kill_filter(_type="normal", skipme=True)
            return [r.rollout_id async for r in batch]

    assert asyncio.run(go()) == ["r-0"]


def test_results_of_a_stream_that_was_lost_come_from_the_one_that_replaced_it(settings, idle_worker, make):
    client, key = idle_worker.client, broker.stream_key("b")

    async def go():
        async with Producer(settings) as producer:
            requests = make(2, batch_id="b")
            await producer.submit_many(requests, batch_id="b")
            results = producer.results("b", count=2)
            idle_worker.finish(done(requests[0]))
            first = await anext(results)
            following = asyncio.create_task(anext(results))
            await until(lambda: client.info("clients")["blocked_clients"] == 2)
            client.delete(key)
            client.xadd(key, {"id": "r-0", "outcome": "completed"}, id="1-1")  # a clock that is behind
            client.hset(broker.job_key("r-1"), "state", "done")
            client.xadd(key, {"id": "r-1", "outcome": "completed"}, id="1-2")
            client.client_kill_filter(_type="normal", skipme=True)
            async with asyncio.timeout(20):  # who is not told by the lost connection looks after 30 s
                return first.rollout_id, (await following).rollout_id

    assert asyncio.run(go()) == ("r-0", "r-1")


def test_a_follower_that_hears_nothing_looks_for_itself(settings, idle_worker, make, monkeypatch):
    monkeypatch.setattr("producer.results._BLOCK_MS", 20)

    async def go():
        async with Producer(settings) as producer:
            batch = await producer.submit_many(make(1))
            idle_worker.client.hset(broker.job_key("r-0"), mapping={"state": "done", "outcome": "cancelled"})
            async with asyncio.timeout(30):
                return [r.stop_condition async for r in batch]

    assert asyncio.run(go()) == [StopCondition.CANCELLED]


def test_a_loss_that_nobody_noticed_is_found_although_there_is_always_something_to_hear(
    settings, idle_worker, make, monkeypatch
):
    monkeypatch.setattr("producer.results._LOOK_EVERY", 0.1)
    client, requests = idle_worker.client, make(500)
    lost = broker.job_key(requests[0].rollout_id)

    async def go():
        async with Producer(settings) as producer:
            batch = await producer.submit_many(requests, max_in_flight=len(requests))
            client.delete(lost)
            for request in requests[1:]:
                if await asyncio.to_thread(client.exists, lost):
                    return
                await asyncio.to_thread(idle_worker.finish, done(request, batch_id=batch.batch_id))
            raise AssertionError("it was not submitted again")

    asyncio.run(go())


def test_the_ids_that_were_seen_are_bounded():
    recent = Recent(limit=3)
    assert [recent.add(i) for i in ("a", "b", "a", "c", "d", "b", "a")] == [True, True, False, True, True, False, True]
    assert len(recent._ids) == 3


def test_a_cancelled_batch_of_which_redis_has_no_record_ends_as_cancelled(settings, idle_worker, make):
    async def go():
        async with Producer(settings) as producer:
            batch = await producer.submit_many(make(2))
            idle_worker.client.flushall()
            answers = await batch.cancel()
            return set(answers.values()), [r async for r in batch], batch.counts

    answers, results, counts = asyncio.run(go())
    assert answers == {CancelAnswer.UNKNOWN}
    assert [r.error.kind for r in results] == [ErrorKind.CANCELLED] * 2
    assert (counts.cancelled, counts.failed) == (2, 0)


# -- what is stored for a rollout, and the result it becomes ---------------------------------------------------------


def read_one(settings, idle_worker, request, store):
    async def go():
        async with Producer(settings) as producer:
            await producer.submit(request)
            store(idle_worker)
            idle_worker.announce(request.rollout_id, request.batch_id, "completed")
            return await anext(producer.results(request.batch_id))

    return asyncio.run(go())


def test_a_duplicate_announcement_is_delivered_once(settings, idle_worker, make):
    async def go():
        async with Producer(settings) as producer:
            requests = make(2, batch_id="b")
            for request in requests:
                await producer.submit(request)
            idle_worker.finish(done(requests[0]))
            idle_worker.announce("r-0", "b", "completed")  # by a Redis that had lost its last second and ran it again
            idle_worker.finish(done(requests[1]))
            results = producer.results("b")
            first = await anext(results)
            position = results.position
            second = await anext(results)
            resumed = [r.rollout_id async for r in producer.results("b", after=position, count=2)]
            return first.rollout_id, second.rollout_id, resumed

    first, second, resumed = asyncio.run(go())
    assert (first, second) == ("r-0", "r-1")
    assert resumed == ["r-0", "r-1"]  # the position is that of the first entry: its duplicate comes after it


@pytest.mark.parametrize("look", ["stored_results", "states"])
@pytest.mark.parametrize("given_up", [False, True])
def test_a_rollout_that_runs_again_and_ends_while_it_is_looked_up_is_delivered(
    settings, idle_worker, make, look, given_up
):
    async def go():
        async with Producer(settings) as producer:
            batch = await producer.submit_many(make(1), batch_id="b")
            [request] = batch._waiting.values()
            idle_worker.announce("r-0", "b", "has_error")  # and it is retried, before its result was fetched
            looking, looks, second = getattr(batch._lasting, look), count(), asyncio.Event()

            async def looked(ids):
                nth = next(looks) if ids else None
                if nth == 1:
                    second.set()
                    await asyncio.sleep(3600 if given_up else 0)
                if nth != 0:
                    return await looking(ids)
                before = batch._completions.position
                idle_worker.client.hset(broker.job_key("r-0"), "state", "pending")
                found = await looking(ids)
                idle_worker.finish(done(request))
                await until(lambda: batch._completions.position != before)
                return found

            setattr(batch._lasting, look, looked)
            async with asyncio.timeout(20):  # who misses it looks after 30 s
                if given_up:
                    taking = asyncio.create_task(anext(batch))
                    await second.wait()
                    await end(taking)
                return [result async for result in batch]

    assert [result.completed for result in asyncio.run(go())] == [True]


def test_a_failed_task_becomes_a_typed_result(settings, idle_worker, make):
    def store(worker):
        error = RuntimeError("cannot pickle", "this")
        worker.app.backend.store_result("r-0", error, "FAILURE", traceback="Traceback: line 7")

    result = read_one(settings, idle_worker, make(1, info={"k": 1})[0], store)
    assert result.stop_condition is StopCondition.HAS_ERROR
    assert result.error.kind is ErrorKind.ENVIRONMENT
    assert "FAILURE: RuntimeError: cannot pickle, this" in result.error.message
    assert result.error.detail == "Traceback: line 7"
    assert (result.info, result.model) == ({"k": 1}, "m")


def test_a_revoked_task_becomes_a_cancelled_result(settings, idle_worker, make):
    def store(worker):
        worker.app.backend.mark_as_revoked("r-0", "terminated")

    assert read_one(settings, idle_worker, make(1)[0], store).stop_condition is StopCondition.CANCELLED


def test_an_expired_result_says_so(settings, idle_worker, make):
    result = read_one(settings, idle_worker, make(1)[0], lambda worker: None)
    assert result.stop_condition is StopCondition.HAS_ERROR
    assert result.error.kind is ErrorKind.LEASE
    assert "result expired" in result.error.message


def test_a_result_without_any_record_still_has_its_id(settings, idle_worker):
    async def go():
        async with Producer(settings) as producer:
            idle_worker.client.xadd(broker.stream_key("b"), {"id": "gone", "outcome": "completed"})
            return await anext(producer.results("b"))

    result = asyncio.run(go())
    assert (result.rollout_id, result.batch_id, result.error.kind) == ("gone", "b", ErrorKind.LEASE)
    assert "Redis has no record of the rollout" in result.error.message


@pytest.mark.parametrize(
    ("stored", "words"),
    [
        (b"not zstd at all", "cannot be read"),
        (zstandard.compress(b"{half"), "cannot be read"),
        (broker.encode_result([1]), "not one of Celery's results"),
        (broker.encode_result({"status": "SUCCESS", "result": None}), "the result is null"),
        (broker.encode_result({"status": "SUCCESS", "result": {"schema_version": 9}}), "schema_version: 9"),
    ],
)
def test_a_result_that_cannot_be_read_becomes_a_typed_one(settings, idle_worker, make, stored, words):
    result = read_one(
        settings, idle_worker, make(1)[0], lambda worker: worker.client.set(broker.result_key("r-0"), stored)
    )
    assert result.stop_condition is StopCondition.HAS_ERROR
    assert words in result.error.message


def test_a_large_result_is_decoded_off_the_event_loop(settings, idle_worker, make, monkeypatch):
    threads = []
    to_thread = asyncio.to_thread

    async def noted(function, *args):
        threads.append(function.__name__)
        return await to_thread(function, *args)

    monkeypatch.setattr(asyncio, "to_thread", noted)
    request = make(1)[0]
    result = read_one(
        settings, idle_worker, request, lambda w: w.finish(done(request, agent_stdout="x" * (2 * 1024 * 1024)))
    )
    assert len(result.agent_stdout) == 2 * 1024 * 1024
    assert threads == ["_decode_now"]


def test_only_a_window_of_the_requests_is_held_in_memory(settings, worker):
    made = 0

    def source():
        nonlocal made
        for i in range(500):
            made += 1
            yield RolloutRequest(model="m", rollout_id=f"s-{i}")

    async def go():
        async with Producer(settings) as producer:
            batch = await producer.submit_many(source(), max_in_flight=20)
            held = [made - batch.counts.done async for _ in batch]
            return len(held), max(held), len(batch._waiting) + len(batch._sent)

    delivered, most_held, left = asyncio.run(go())
    assert (delivered, left) == (500, 0)
    assert most_held <= 20
