from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time

import pytest
from celery import Celery
from celery.worker.request import Request
from kombu import Consumer
from pydantic import ValidationError
from redis import ResponseError

from producer import (
    CancelAnswer,
    ErrorKind,
    FleetUnreachableError,
    InvalidRequestError,
    JobState,
    Producer,
    ProducerSettings,
    RolloutConflictError,
    RolloutRequest,
    RolloutResult,
    StopCondition,
    SyncProducer,
    broker,
)
from producer.connection import CHUNK
from producer.ids import sample_rollout_id
from producer.queues import LIST_SPAN
from producer.results import Completions
from producer.server import redact


def test_submit_writes_the_record_and_sends_one_wake_up_message(settings, idle_worker, make):
    request = make(1, priority=7, max_attempts=2)[0]

    async def submit():
        async with Producer(settings) as producer:
            handle = await producer.submit(request)
            return handle.rollout_id, await handle.state()

    assert asyncio.run(submit()) == ("r-0", JobState.PENDING)
    client = idle_worker.client
    record = client.hgetall(broker.job_key("r-0"))
    assert RolloutRequest.parse(record.pop(b"request")) == request
    third_list = 2 * LIST_SPAN  # priority 7 is served from the third of the queue's lists
    assert client.zscore(broker.PENDING, "r-0") == third_list + int(record.pop(b"enqueued_ms"))
    assert record == {
        b"state": b"pending",
        b"attempt": b"0",
        b"spent": b"0",
        b"batch": b"default",
        b"max_attempts": b"2",
        b"priority": b"7",
        b"places": b"env:command",
    }
    assert client.ttl(broker.job_key("r-0")) > 6 * 24 * 3600
    assert [client.llen(key) for key in broker.queue_keys()] == [0, 0, 1, 0]


def test_a_message_equals_what_apply_async_would_have_put(settings, idle_worker, make):
    async def submit():
        async with Producer(settings) as producer:
            await producer.submit(make(1, priority=6)[0])

    asyncio.run(submit())
    key = broker.queue_key(6)
    [ours] = idle_worker.client.lrange(key, 0, -1)
    idle_worker.client.delete(key)
    idle_worker.app.send_task(broker.RUN_ROLLOUT, task_id="r-0", queue=broker.QUEUE, priority=6)
    [theirs] = idle_worker.client.lrange(key, 0, -1)

    def comparable(raw):
        message = json.loads(raw)
        assert message["properties"].pop("delivery_tag")
        message["properties"].pop("reply_to")
        message["headers"].pop("origin")
        assert not message["headers"].pop("ignore_result")  # None or False: the result is kept either way
        return message

    assert comparable(ours) == comparable(theirs)


def test_a_real_consumer_and_celery_s_request_read_the_message(settings, idle_worker, make):
    async def submit():
        async with Producer(settings) as producer:
            await producer.submit_many(make(3))

    asyncio.run(submit())
    app: Celery = idle_worker.app

    @app.task(name=broker.RUN_ROLLOUT, bind=True, shared=False)
    def run(self):
        return None

    read = []

    def on_message(message):
        request = Request(message, app=app, task=app.tasks[broker.RUN_ROLLOUT], decoded=False)
        read.append((request.id, request.name, request.args, request.kwargs, message.delivery_tag))
        message.ack()

    queue = app.amqp.queues[broker.QUEUE]
    with (
        app.connection_for_read() as connection,
        Consumer(connection, [queue], accept=["json"], on_message=on_message),
    ):
        while len(read) < 3:
            connection.drain_events(timeout=30)
    assert sorted(entry[:4] for entry in read) == [(f"r-{i}", broker.RUN_ROLLOUT, [], {}) for i in range(3)]
    assert len({entry[4] for entry in read}) == 3


def test_resubmitting_the_same_request_does_nothing(settings, idle_worker, make):
    async def submit():
        async with Producer(settings) as producer:
            await producer.submit(make(1)[0])
            idle_worker.client.hset(broker.job_key("r-0"), "attempt", 1)
            await producer.submit(make(1)[0])

    asyncio.run(submit())
    assert idle_worker.client.llen(broker.queue_key(3)) == 1
    assert idle_worker.client.hget(broker.job_key("r-0"), "attempt") == b"1"


def test_a_conflicting_request_is_named_and_nothing_of_its_chunk_is_submitted(settings, idle_worker, make):
    async def submit():
        async with Producer(settings) as producer:
            await producer.submit(make(1, batch_id="b")[0])
            others = [*make(5, prompt="other")][::-1]
            await producer.submit_many(others, batch_id="b")

    with pytest.raises(RolloutConflictError, match="r-0") as caught:
        asyncio.run(submit())
    assert caught.value.rollout_ids == ("r-0",)
    assert idle_worker.client.zcard(broker.PENDING) == 1
    assert idle_worker.client.llen(broker.queue_key(3)) == 1


def test_a_conflict_in_a_later_chunk_cancels_what_the_batch_has_sent(settings, idle_worker, make):
    async def submit():
        async with Producer(settings) as producer:
            await producer.submit(make(1)[0].model_copy(update={"rollout_id": "taken", "batch_id": "b"}))
            requests = [*make(CHUNK), make(1, prompt="other")[0].model_copy(update={"rollout_id": "taken"})]
            await producer.submit_many(requests, batch_id="b")

    with pytest.raises(RolloutConflictError, match="taken"):
        asyncio.run(submit())
    assert idle_worker.client.hget(broker.job_key("r-0"), "outcome") == b"cancelled"
    assert idle_worker.client.zrange(broker.PENDING, 0, -1) == [b"taken"]


def test_a_conflict_in_a_later_chunk_of_one_window_cancels_the_earlier_ones(settings, idle_worker, make):
    large = "x" * 2_500_000  # each one fills a chunk of its own

    async def submit():
        async with Producer(settings) as producer:
            await producer.submit(make(1, rollout_id="taken", batch_id="b")[0])
            await producer.submit_many([*make(3, prompt=large), *make(1, rollout_id="taken", prompt=large)])

    with pytest.raises(RolloutConflictError, match="taken"):
        asyncio.run(submit())
    outcomes = [idle_worker.client.hget(broker.job_key(f"r-{i}"), "outcome") for i in range(3)]
    assert outcomes == [b"cancelled"] * 3
    assert idle_worker.client.zrange(broker.PENDING, 0, -1) == [b"taken"]


def test_a_submission_whose_reply_was_lost_is_cancelled(idle_worker, redis_url, make, lossy_proxy):
    async def submit():
        async with (
            lossy_proxy(redis_url) as proxy,
            Producer(ProducerSettings(redis_url=proxy.url), patience=0) as producer,
        ):
            await producer.submit(make(1, rollout_id="before")[0])  # loads the script
            proxy.lose_reply_to = b"r-2"
            await producer.submit_many(make(3))

    with pytest.raises(FleetUnreachableError):
        asyncio.run(submit())
    outcomes = [idle_worker.client.hget(broker.job_key(f"r-{i}"), "outcome") for i in range(3)]
    assert outcomes == [b"cancelled"] * 3


def test_a_submission_whose_reply_was_lost_is_in_flight_for_those_who_iterate_on(worker, redis_url, make, lossy_proxy):
    async def source():
        for request in make(1):
            yield request

    async def go():
        async with (
            lossy_proxy(redis_url) as proxy,
            Producer(ProducerSettings(redis_url=proxy.url), patience=0) as producer,
        ):
            await producer.submit(make(1, rollout_id="before")[0])
            proxy.lose_reply_to = b"r-0"
            batch = await producer.submit_many(source())
            ids = []

            async def take() -> None:
                async for result in batch:
                    ids.append(result.rollout_id)

            with pytest.raises(FleetUnreachableError):  # before or after the result: two connections tell of them
                await take()
            await take()
            return ids, batch.counts

    ids, counts = asyncio.run(go())
    assert ids == ["r-0"]
    assert (counts.submitted, counts.completed) == (1, 1)


def test_a_batch_that_is_submitted_again_has_the_same_ids(settings, idle_worker):
    def requests():
        return [RolloutRequest(model="m", example_id=e, sample_index=s) for e in (1, "two/x") for s in (0, 1)]

    async def submit():
        async with Producer(settings) as producer:
            await producer.submit_many(requests(), batch_id="b")
            await producer.submit_many(requests(), batch_id="b")
            await producer.submit_many(requests())  # without an id it is another batch each time

    asyncio.run(submit())
    ids = {i.decode() for i in idle_worker.client.zrange(broker.PENDING, 0, -1)}
    assert len(ids) == 4 + 4
    expected = {sample_rollout_id("b", e, s) for e in (1, "two/x") for s in (0, 1)}
    assert {"b-1-0", "b-1-1"} < expected < ids


def test_samples_that_cannot_be_told_apart_are_refused_also_beyond_the_window(settings, worker):
    async def go():
        async with Producer(settings) as producer:
            requests = [RolloutRequest(model="m", example_id=1)] * 2
            return [r async for r in await producer.submit_many(requests, batch_id="b", max_in_flight=1)]

    with pytest.raises(InvalidRequestError, match="a sample_index each"):
        asyncio.run(go())


def test_a_stream_that_is_always_in_use_loses_entries_whose_results_have_expired(settings, idle_worker, make):
    client, key = idle_worker.client, broker.stream_key("default")
    old = int((time.time() - broker.RESULT_TTL.total_seconds() - 3600) * 1000)
    for i in range(500):
        client.xadd(key, {"id": f"old-{i}", "outcome": "completed"}, id=f"{old}-{i}")
    client.xadd(key, {"id": "young", "outcome": "completed"})

    async def submit():
        async with Producer(settings) as producer:
            await producer.submit(make(1)[0])

    asyncio.run(submit())
    assert client.xlen(key) <= 100  # Redis drops whole blocks of a hundred
    assert client.xrevrange(key, count=1)[0][1][b"id"] == b"young"


def test_a_request_beyond_the_size_limit_is_refused(settings, make):
    async def submit():
        async with Producer(settings) as producer:
            await producer.submit(make(1, prompt="x" * RolloutRequest.MAX_BYTES)[0])

    with pytest.raises(InvalidRequestError, match="r-0: the request is"):
        asyncio.run(submit())


def test_handles_wait_for_their_own_result(settings, worker, make):
    async def go():
        async with Producer(settings) as producer:
            handles = [await producer.submit(request) for request in make(5)]
            results = await asyncio.gather(*(handle.result(timeout=30) for handle in handles))
            again = await handles[0].result(timeout=30)
            return [r.rollout_id for r in results], again, await handles[0].state()

    ids, again, state = asyncio.run(go())
    assert ids == [f"r-{i}" for i in range(5)]
    assert again.completed
    assert state is JobState.DONE


def test_a_handle_s_timeout_says_that_the_rollout_goes_on(settings, idle_worker, make):
    async def go():
        async with Producer(settings) as producer:
            handle = await producer.submit(make(1)[0])
            with pytest.raises(TimeoutError, match=r"r-0 has not ended after 0.05 s; it goes on"):
                await handle.result(timeout=0.05)
            idle_worker.finish(RolloutResult.for_request(make(1)[0], StopCondition.COMPLETED))
            return await handle.result(timeout=30)

    assert asyncio.run(go()).completed


def test_closing_the_producer_ends_those_who_wait(settings, make):
    async def go():
        async with Producer(settings) as producer:
            handle = await producer.submit(make(1)[0])
            waiting = asyncio.create_task(handle.result())
            while not producer._waiters or producer._waiters["default"]._follower is None:
                await asyncio.sleep(0)
        await waiting

    with pytest.raises(Exception, match="producer was closed"):
        asyncio.run(go())


def test_who_begins_to_wait_while_another_stops_is_not_told_that_the_producer_was_closed(settings, idle_worker, make):
    async def go():
        async with Producer(settings) as producer:
            first, second = [await producer.submit(request) for request in make(2)]
            leaving = asyncio.create_task(first.result())
            while not producer._waiters or not producer._waiters["default"]._futures["r-0"]._callbacks:
                await asyncio.sleep(0)  # until nothing but the end of r-0 is waited for
            leaving.cancel()
            staying = asyncio.create_task(second.result(timeout=30))
            await asyncio.wait({leaving})
            idle_worker.finish(RolloutResult.for_request(make(2)[1], StopCondition.COMPLETED))
            return await staying

    assert asyncio.run(go()).rollout_id == "r-1"


def test_who_waits_is_told_of_an_error_that_ends_the_following(settings, idle_worker, make, monkeypatch):
    async def read(self):
        raise ResponseError("ERR what Redis may not say")

    monkeypatch.setattr(Completions, "read", read)

    async def main():
        async with Producer(settings) as producer:
            handle = await producer.submit(make(1)[0])
            with pytest.raises(ResponseError, match="may not say"):
                await asyncio.wait_for(handle.result(), 20)

    asyncio.run(main())


def test_nothing_is_kept_of_batches_that_nobody_waits_for(settings, worker, make):
    async def go():
        async with Producer(settings) as producer:
            for request in make(3):
                own = request.model_copy(update={"batch_id": f"b-{request.example_id}"})
                await (await producer.submit(own)).result(timeout=30)
            return len(producer._waiters)

    assert asyncio.run(go()) == 0


def test_cancel_of_a_pending_rollout_ends_it_at_once(settings, idle_worker, make):
    async def go():
        async with Producer(settings) as producer:
            handle = await producer.submit(make(1)[0])
            answer = await handle.cancel()
            return answer, await handle.result(timeout=30), await handle.cancel()

    answer, result, again = asyncio.run(go())
    assert (answer, again) == (CancelAnswer.CANCELLED, CancelAnswer.DONE)
    assert result.stop_condition is StopCondition.CANCELLED
    assert result.error.kind is ErrorKind.CANCELLED
    assert (result.example_id, result.model) == (0, "m")
    assert idle_worker.client.zcard(broker.PENDING) == 0
    [(_, entry)] = idle_worker.client.xrange(broker.stream_key("default"))
    assert entry == {b"id": b"r-0", b"outcome": b"cancelled"}
    assert idle_worker.client.ttl(broker.stream_key("default")) > 0


def test_cancel_of_a_delayed_rollout_takes_it_out_of_the_delayed(settings, idle_worker, make):
    async def go():
        async with Producer(settings) as producer:
            await producer.submit(make(1)[0])
            idle_worker.client.zrem(broker.PENDING, "r-0")
            idle_worker.client.zadd(broker.DELAYED, {"r-0": 1})
            return await producer.cancel(["r-0"])

    assert asyncio.run(go()) == {"r-0": CancelAnswer.CANCELLED}
    assert idle_worker.client.zcard(broker.DELAYED) == 0


def test_cancel_of_a_running_rollout_marks_it_and_tells_the_workers(settings, idle_worker, make):
    async def go():
        async with Producer(settings) as producer:
            await producer.submit(make(1)[0])
            idle_worker.client.hset(broker.job_key("r-0"), "state", "running")
            return await producer.cancel(["r-0", "nobody"])

    assert asyncio.run(go()) == {"r-0": CancelAnswer.REQUESTED, "nobody": CancelAnswer.UNKNOWN}
    assert idle_worker.client.hget(broker.job_key("r-0"), "cancel") == b"1"
    [(_, entry)] = idle_worker.client.xrange(broker.CANCELS)
    assert entry == {b"id": b"r-0"}
    assert idle_worker.client.exists(broker.stream_key("default")) == 0


def test_unreachable_redis_is_a_clear_error_without_the_password():
    async def go():
        async with Producer(ProducerSettings(redis_url="redis://me:hunter2@127.0.0.1:1/0")):
            pass

    begun = time.monotonic()
    with pytest.raises(FleetUnreachableError) as caught:
        asyncio.run(go())
    text = str(caught.value)
    assert "redis://***@127.0.0.1:1/0" in text
    assert "ROLLOUTS_REDIS_URL" in text
    assert "hunter2" not in text
    assert time.monotonic() - begun < 20, "it was tried again, for 30 s"


def test_a_refused_password_is_not_retried(own_redis):
    own_redis.client.config_set("requirepass", "sesame")

    async def go():
        async with Producer(ProducerSettings(redis_url=own_redis.url)):
            pass

    begun = time.monotonic()
    with pytest.raises(FleetUnreachableError, match=r"(?i)auth"):
        asyncio.run(go())
    assert time.monotonic() - begun < 20, "it was tried again, for 30 s"


@pytest.mark.parametrize("url", ["nonsense", "http://x", "redis://h:port/0", "redis://[::1"])
def test_a_wrong_redis_url_is_named(url):
    with pytest.raises(ValidationError, match="this is no Redis URL"):
        ProducerSettings(redis_url=url)


def test_urls_are_shown_without_secrets():
    assert redact("redis://127.0.0.1:6379/0") == "redis://127.0.0.1:6379/0"
    assert redact("rediss://u:p@h:1/2?password=x&db=1") == "rediss://***@h:1/2?password=***&db=1"
    assert redact("redis://[::1") == "(an unreadable URL)"


def test_a_call_waits_for_redis_to_come_back(own_redis, make):
    async def go():
        async with Producer(ProducerSettings(redis_url=own_redis.url)) as producer:
            await asyncio.to_thread(own_redis.stop)
            submitting = asyncio.create_task(producer.submit(make(1)[0]))
            await asyncio.to_thread(own_redis.start)
            return await (await submitting).state()

    assert asyncio.run(go()) is JobState.PENDING


def test_a_call_gives_up_after_its_patience(own_redis, make):
    async def go():
        async with Producer(ProducerSettings(redis_url=own_redis.url), patience=0.2) as producer:
            await asyncio.to_thread(own_redis.stop)
            await producer.submit(make(1)[0])

    with pytest.raises(FleetUnreachableError):
        asyncio.run(go())


def test_a_full_redis_is_a_clear_error_and_nothing_is_stored(own_redis, make):
    async def go():
        async with Producer(ProducerSettings(redis_url=own_redis.url)) as producer:
            own_redis.client.config_set("maxmemory", 1)
            await producer.submit_many(make(3))

    with pytest.raises(Exception, match="no memory left"):
        asyncio.run(go())
    assert own_redis.client.zcard(broker.PENDING) == 0


def test_a_producer_that_is_not_open_says_how_to_open_it(settings, make):
    with pytest.raises(RuntimeError, match="async with"):
        asyncio.run(Producer(settings).submit(make(1)[0]))
    with pytest.raises(RuntimeError, match="with SyncProducer"):
        SyncProducer(settings).submit(make(1)[0])


def test_the_sync_face_does_the_same(settings, worker, make):
    with SyncProducer(settings) as producer:
        handle = producer.submit(make(1, rollout_id="one")[0])
        assert handle.result(timeout=30).completed
        assert handle.state() is JobState.DONE
        assert handle.cancel() is CancelAnswer.DONE
        batch = producer.submit_many(make(5), max_in_flight=2)
        assert sorted(r.rollout_id for r in batch) == [f"r-{i}" for i in range(5)]
        assert batch.counts.completed == 5
        assert batch.cancel() == {}
        assert len(list(producer.results(batch.batch_id, count=5))) == 5
        assert producer.cancel(["one"]) == {"one": CancelAnswer.DONE}


def test_the_sync_face_works_inside_a_running_loop(settings, worker, make):
    async def notebook_cell():
        with SyncProducer(settings) as producer:
            return [result.completed for result in producer.submit_many(make(3))]

    assert asyncio.run(notebook_cell()) == [True] * 3


def test_the_sync_face_leaves_no_thread_when_redis_is_unreachable():
    import threading

    with pytest.raises(FleetUnreachableError):
        SyncProducer(ProducerSettings(redis_url="redis://127.0.0.1:1/0")).__enter__()
    assert not [t for t in threading.enumerate() if t.name == "rollouts-producer"]


@pytest.mark.parametrize("module", ["producer", "producer.cli"])
def test_importing_the_producer_loads_no_worker_and_no_server(module):
    heavy = "('workers', 'prime_sandboxes', 'prime_tunnel', 'starlette', 'uvicorn')"
    code = f"import sys, {module}; print([m for m in sys.modules if m.split('.')[0] in {heavy}])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
