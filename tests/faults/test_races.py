"""Two things at once: whoever comes first, nothing is lost, run twice without need, or left over."""

from __future__ import annotations

import asyncio
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import redis
from celery import Celery
from fleets import lean
from submitting import request, requests, results_of
from support import RedisServer, wait_until

from producer import Producer, RolloutResult, broker
from producer.contract import ErrorKind, StopCondition
from producer.operating import Operator, RetryAnswer
from producer.settings import ProducerSettings
from workers.local import LocalStack, StackOptions

TTL = 3.0  #: longer than a busy machine stops a worker: where nobody dies, none may lapse


@contextmanager
def fleet(tmp_path: Path, **options: Any) -> Iterator[LocalStack]:
    settings = {"ROLLOUTS_LEASE_TTL": str(TTL)}
    with LocalStack(StackOptions(log_dir=tmp_path / "logs", settings=settings, **(lean() | options))) as stack:
        yield stack


def processes(stack: LocalStack, *kinds: str) -> list[psutil.Process]:
    return [psutil.Process(child.process.pid) for child in stack._children if child.name.startswith(kinds)]


def test_workers_and_beat_that_are_stopped_together_run_nothing_twice(tmp_path: Path, agents: Any) -> None:
    """As when the machine is suspended. All leases have lapsed when they go on, and beat's sweeps wait in the queue."""
    with fleet(tmp_path, workers=2, concurrency=20, beat=True) as stack:

        def stop_all() -> None:
            client = redis.Redis.from_url(stack.redis_url)
            wait_until(lambda: len(agents.starts()) == 20, what="20 running agents")
            wait_until(lambda: client.zcard(broker.RUNNING) == 20)
            stopped = processes(stack, "worker", "beat")
            assert len(stopped) == 3
            for process in stopped:
                process.suspend()
            for _ in range(5):  # what beat sends while the workers are stopped
                stack_app(stack.redis_url).send_task(broker.SWEEP, queue=broker.MAINTENANCE_QUEUE)
            wait_until(lambda: client.zcount(broker.RUNNING, "-inf", now_ms(client) - 1000 * TTL) == 20)
            client.delete(broker.SWEPT)
            for process in reversed(stopped):
                process.resume()
            wait_until(lambda: client.zcount(broker.RUNNING, now_ms(client), "+inf") == 20, what="their renewals")
            back = now_ms(client)
            wait_until(lambda: now_ms(client) > back + 1300 * TTL, what="the sweeps of more than a TTL")
            agents.release()

        results = results_of(stack.redis_url, requests(20, run_command=agents.command()), stop_all)

    assert {(r.stop_condition, r.attempt) for r in results} == {(StopCondition.COMPLETED, 1)}
    assert len(results) == len(agents.starts()) == 20


def test_a_cancel_that_races_a_hand_over_ends_each_rollout_once(tmp_path: Path, agents: Any) -> None:
    """One after the other is cancelled while their worker hands them over, and another one takes them."""
    with fleet(tmp_path, workers=1, concurrency=20) as stack:
        wanted = requests(20, run_command=agents.command(), max_attempts=1)
        ids = [r.rollout_id for r in wanted]

        def race() -> None:
            client = redis.Redis.from_url(stack.redis_url)
            wait_until(lambda: len(agents.starts()) == 20)
            (first,) = processes(stack, "worker")
            stack._start_workers()
            wait_until(lambda: client.zcard(broker.WORKERS) == 2, what="a second worker")
            first.send_signal(signal.SIGQUIT)
            asyncio.run(cancel_each(stack.redis_url, ids))
            first.wait(30)

        results = results_of(stack.redis_url, wanted, race)
        client = redis.Redis.from_url(stack.redis_url)
        wait_until(lambda: not any(map(client.zcard, (broker.PENDING, broker.RUNNING, broker.DELAYED))))
        entries = client.xrange(broker.stream_key(results[0].batch_id))

    assert Counter(r.rollout_id for r in results) == Counter(ids)
    assert {r.stop_condition for r in results} == {StopCondition.CANCELLED}
    assert {r.error.kind for r in results if r.error} == {ErrorKind.CANCELLED}
    assert Counter(fields[b"id"].decode() for _, fields in entries) == Counter(ids)


async def cancel_each(url: str, ids: list[str]) -> None:
    async with Producer(ProducerSettings(redis_url=url)) as producer:
        for rollout_id in ids:
            await producer.cancel([rollout_id])


def test_a_retry_at_the_very_end_of_a_rollout_runs_it_again_and_one_before_does_nothing(
    tmp_path: Path, agents: Any
) -> None:
    with fleet(tmp_path, workers=1, concurrency=20) as stack:
        wanted = requests(10, run_command=agents.command())

        async def scenario() -> list[RolloutResult]:
            async with Producer(ProducerSettings(redis_url=stack.redis_url)) as producer, asyncio.timeout(60):
                batch = await producer.submit_many(wanted)
                await asyncio.to_thread(wait_until, lambda: len(agents.starts()) == 10)
                operator = Operator(producer.connection)
                ids = [r.rollout_id for r in wanted]
                assert set((await operator.retry(ids)).values()) == {RetryAnswer.RUNNING}
                agents.release()
                left = set(ids)
                while left:  # as often as Redis answers, so that some come in the moment of the end
                    answers = await operator.retry(sorted(left))
                    left -= {i for i, answer in answers.items() if answer is RetryAnswer.RETRIED}
                return [result async for result in batch]

        results = asyncio.run(scenario())

    assert Counter(r.rollout_id for r in results) == Counter(r.rollout_id for r in wanted)
    assert {r.stop_condition for r in results} == {StopCondition.COMPLETED}
    assert {r.attempt for r in results} <= {1, 2}
    assert len(agents.starts()) == 20, "each ran twice, as it was told to"


def test_a_redis_that_dies_between_claim_and_start_costs_no_rollout_and_runs_none_twice(
    tmp_path: Path, own_redis: RedisServer, agents: Any
) -> None:
    """The gateway is stopped meanwhile, so that none of them gets further than to its claim."""
    with fleet(tmp_path, workers=1, concurrency=40, redis_url=own_redis.url) as stack:
        started: list[int] = []
        (gateway,) = processes(stack, "gateway")

        def runs() -> Counter[str]:
            return Counter(url.split("/rollouts/")[1].partition("~")[0].partition("/")[0] for url in agents.starts())

        def kill() -> None:
            client = redis.Redis.from_url(own_redis.url)
            wait_until(lambda: client.zcard(broker.RUNNING) >= 20, what="claims")
            own_redis.stop(signal.SIGKILL)
            started.append(len(agents.starts()))
            gateway.resume()
            over = time.monotonic() + 1.2 * TTL
            wait_until(lambda: time.monotonic() > over)
            own_redis.start()
            wait_until(lambda: len(runs()) == 40, what="all of them to run")
            agents.release()

        gateway.suspend()
        try:
            results = results_of(own_redis.url, requests(40, run_command=agents.command()), kill)
        finally:
            gateway.resume()

    assert started == [0], "none had begun"
    assert len({r.rollout_id for r in results}) == len(results) == 40
    assert {r.stop_condition for r in results} == {StopCondition.COMPLETED}
    # One whose claim got no answer is given back, and runs as the second attempt.
    assert set(runs().values()) == {1}


def test_messages_that_carry_their_request_outlast_a_redis_that_is_full_when_they_are_taken(
    tmp_path: Path, own_redis: RedisServer
) -> None:
    with fleet(tmp_path, workers=2, concurrency=5, redis_url=own_redis.url) as stack:
        client = redis.Redis.from_url(own_redis.url)
        workers = processes(stack, "worker")
        wait_until(
            lambda: sum(c["cmd"] == "brpop" for c in client.client_list()) == 2, what="them to wait for messages"
        )
        for process in workers:
            process.suspend()
        app = stack_app(own_redis.url)
        wanted = [request(rollout_id=f"plain{n}", run_command="true") for n in range(20)]
        for each in wanted:
            fields = each.model_dump(mode="json", exclude_defaults=True)
            app.send_task(broker.RUN_ROLLOUT, [fields], task_id=each.rollout_id, queue=broker.QUEUE)
        client.config_set("maxmemory", 1)
        for process in workers:
            process.resume()
        logs = [stack.logs[name] for name in ("worker1", "worker2")]
        wait_until(lambda: all("not claimed" in log.read_text() for log in logs), what="claims that are refused")
        left = sum(map(client.llen, broker.queue_keys()))
        assert left >= 20 - 2 - 2, "no worker has taken more than one, and one on its way"
        client.config_set("maxmemory", 0)
        keys = [broker.result_key(each.rollout_id) for each in wanted]
        wait_until(lambda: client.exists(*keys) == 20, timeout=80, what="all results")
        found = [RolloutResult.parse(broker.decode_result(client.get(key))["result"]) for key in keys]

    assert {r.stop_condition for r in found} == {StopCondition.COMPLETED}


def stack_app(url: str) -> Celery:
    app = Celery("anybody", set_as_current=False)
    app.config_from_object(broker.celery_config(url))
    return app


def now_ms(client: redis.Redis) -> int:
    seconds, micros = client.time()
    return int(seconds) * 1000 + int(micros) // 1000
