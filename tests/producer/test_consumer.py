"""A named consumer: it goes on where it was, without a repeat and without a gap, also after kill -9."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest
from killed_consumer import BATCH, consume_killed, share

from producer import (
    ConsumerTakenError,
    InvalidRequestError,
    Producer,
    ProducerSettings,
    RolloutRequest,
    RolloutResult,
    StopCondition,
    broker,
)

#: ``benchmarks/bench_killed_consumer.py`` does it with 5,000.
COUNT, KILLS = 500, 10


def end_all(worker, requests: list[RolloutRequest]) -> None:
    for request in requests:
        worker.finish(RolloutResult.for_request(request, StopCondition.COMPLETED))


async def submit(settings: ProducerSettings, requests: list[RolloutRequest], batch_id: str = "b") -> None:
    async with Producer(settings) as producer:
        await (await producer.submit_many(requests, batch_id=batch_id, max_in_flight=len(requests))).aclose()


async def take(settings: ProducerSettings, count: int, **options: object) -> list[tuple[str, bool]]:
    """Take ``count`` results as a process that is killed with the last one in hand."""
    async with Producer(settings) as producer:
        results = producer.results("b", consumer="trainer", **options)
        taken = []
        for _ in range(count):
            result = await anext(results)
            taken.append((result.rollout_id, results.redelivered))
        results._consumption._done.clear()  # what a killed process does not tell
        return taken


def test_a_consumer_goes_on_and_only_what_was_in_hand_comes_again(settings, idle_worker, make):
    requests = [r.model_copy(update={"batch_id": "b"}) for r in make(6)]
    asyncio.run(submit(settings, requests))
    end_all(idle_worker, requests[:4])

    assert asyncio.run(take(settings, 3)) == [("r-0", False), ("r-1", False), ("r-2", False)]
    end_all(idle_worker, requests[4:])  # meanwhile
    expected = [("r-2", True), ("r-3", False), ("r-4", False), ("r-5", False)]
    assert asyncio.run(take(settings, 4)) == expected


def test_count_counts_what_was_acknowledged_before(settings, idle_worker, make):
    requests = [r.model_copy(update={"batch_id": "b"}) for r in make(4)]
    asyncio.run(submit(settings, requests))
    end_all(idle_worker, requests)
    asyncio.run(take(settings, 2))

    async def rest() -> list[str]:
        async with Producer(settings) as producer:
            return [result.rollout_id async for result in producer.results("b", consumer="trainer", count=4)]

    assert asyncio.run(rest()) == ["r-1", "r-2", "r-3"]
    assert asyncio.run(rest()) == []


def test_waiting_for_the_next_result_acknowledges_the_one_before(settings, idle_worker, make):
    requests = [r.model_copy(update={"batch_id": "b"}) for r in make(2)]
    asyncio.run(submit(settings, requests))
    end_all(idle_worker, requests[:1])

    async def main() -> None:
        async with Producer(settings) as producer:
            results = producer.results("b", consumer="trainer")
            await anext(results)
            waiting = asyncio.create_task(anext(results))
            key = broker.consumer_key("b", "trainer")
            while not idle_worker.client.hexists(key, "position"):
                await asyncio.sleep(0.001)
            waiting.cancel()
            assert not idle_worker.client.hexists(key, "hand")

    asyncio.run(main())


def test_two_names_each_get_everything(settings, idle_worker, make):
    requests = [r.model_copy(update={"batch_id": "b"}) for r in make(3)]
    asyncio.run(submit(settings, requests))
    end_all(idle_worker, requests)

    async def main(name: str) -> list[str]:
        async with Producer(settings) as producer:
            return [result.rollout_id async for result in producer.results("b", consumer=name, count=3)]

    assert asyncio.run(main("one")) == asyncio.run(main("two")) == ["r-0", "r-1", "r-2"]


def test_of_two_processes_under_one_name_the_later_one_goes_on(settings, idle_worker, make):
    requests = [r.model_copy(update={"batch_id": "b"}) for r in make(3)]
    asyncio.run(submit(settings, requests))
    end_all(idle_worker, requests)

    async def main() -> None:
        async with Producer(settings) as producer:
            first = producer.results("b", consumer="trainer")
            assert (await anext(first)).rollout_id == "r-0"
            second = producer.results("b", consumer="trainer")
            assert (await anext(second)).rollout_id == "r-0"
            assert second.redelivered
            with pytest.raises(ConsumerTakenError, match="another process"):
                await anext(first)
            assert (await anext(second)).rollout_id == "r-1"

    asyncio.run(main())


def test_a_consumer_outlasts_a_redis_that_lost_what_it_had_taken(settings, idle_worker, make):
    requests = [r.model_copy(update={"batch_id": "b"}) for r in make(3)]
    asyncio.run(submit(settings, requests))
    end_all(idle_worker, requests)

    async def main() -> None:
        async with Producer(settings) as producer:
            results = producer.results("b", consumer="trainer")
            await anext(results)
            idle_worker.client.delete(broker.consumer_key("b", "trainer"))
            assert [(await anext(results)).rollout_id for _ in range(2)] == ["r-1", "r-2"]

    asyncio.run(main())
    assert asyncio.run(take(settings, 1)) == [("r-2", True)]


def test_a_consumers_name_is_an_id(settings):
    async def main() -> None:
        async with Producer(settings) as producer:
            with pytest.raises(InvalidRequestError, match="consumer"):
                producer.results("b", consumer="a:b")

    asyncio.run(main())


def test_a_batch_submitted_again_goes_on_with_what_was_not_acknowledged(settings, worker, make):
    async def some(count: int) -> tuple[list[str], list[bool], int]:
        async with Producer(settings) as producer:
            batch = await producer.submit_many(make(20), batch_id="again", consumer="trainer", max_in_flight=8)
            taken, again = [], []
            async for result in batch:
                taken.append(result.rollout_id)
                again.append(batch.redelivered)
                if len(taken) == count:
                    break
            return taken, again, batch.counts.before

    first, again, before = asyncio.run(some(7))
    assert (len(set(first)), any(again), before) == (7, False, 0)
    second, again, before = asyncio.run(some(100))
    assert before == 6
    assert set(second) | set(first[:-1]) == {f"r-{n}" for n in range(20)}
    assert len(second) == 14
    assert [i for i, flag in zip(second, again, strict=True) if flag] == [first[-1]]
    assert asyncio.run(some(100)) == ([], [], 20)
    assert len(worker.started) == 20


def test_a_consumer_that_is_killed_ten_times_gets_each_exactly_once(redis_url, idle_worker, tmp_path: Path):
    requests = [
        RolloutRequest.parse({"model": "m", "rollout_id": f"r-{n}", "batch_id": BATCH, "example_id": n})
        for n in range(COUNT)
    ]
    asyncio.run(submit(ProducerSettings(redis_url=redis_url), requests, BATCH))
    out, seed = tmp_path / "out.txt", random.randrange(2**32)
    consume_killed(redis_url, out, COUNT, KILLS, seed, lambda n: end_all(idle_worker, requests[share(n, KILLS, COUNT)]))
    lines = out.read_text().splitlines()
    assert sorted(lines) == sorted(request.rollout_id for request in requests), f"seed {seed}"


def test_a_batch_submitted_again_under_a_newer_policy_keeps_what_it_had_submitted(settings, idle_worker, make):
    def requests(version: int) -> list[RolloutRequest]:
        fields = [{"model": "m", "example_id": n, "policy_version": version} for n in range(300)]
        return [RolloutRequest.parse(of) for of in fields]

    async def main() -> None:
        async with Producer(settings) as producer:
            await producer.submit_many(requests(1)[5:], batch_id="b", max_in_flight=300)
            again = await producer.submit_many(requests(2), batch_id="b", max_in_flight=300)
            assert again.counts.submitted == 300
            versions = [request.policy_version for request in again._waiting.values()]
            assert (versions.count(2), versions.count(1)) == (5, 295)

    asyncio.run(main())
    assert idle_worker.client.zcard(broker.PENDING) == 300
