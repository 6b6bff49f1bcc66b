"""Policy versions: what is too old for what is trained now never starts, is cancelled, or is marked."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import redis

from producer import ErrorKind, OnStale, Producer, Purpose, RolloutRequest, RolloutResult, StopCondition, broker

Client = redis.Redis


def version_of(number: int) -> dict[str, Any]:
    return {"policy_version": number, "batch_id": "b"}


def by_id(results: list[RolloutResult]) -> dict[str, RolloutResult]:
    return {result.rollout_id: result for result in results}


async def take(producer: Producer, count: int) -> dict[str, RolloutResult]:
    return by_id([result async for result in producer.results("b", count=count)])


def test_a_stale_rollout_that_waits_never_starts_and_is_delivered_as_cancelled(settings, idle_worker, make):
    async def main() -> None:
        async with Producer(settings) as producer:
            for request in make(3, **version_of(4)):
                await producer.submit(request)
            staled = await producer.set_policy_version(7, max_off_policy_steps=2)
            assert (staled.ended, staled.asked, staled.left) == (3, 0, 0)
            results = await take(producer, 3)
            assert {r.error.reason for r in results.values()} == {"stale"}
            assert {r.error.kind for r in results.values()} == {ErrorKind.CANCELLED}
            assert {r.stop_condition for r in results.values()} == {StopCondition.CANCELLED}

    asyncio.run(main())
    assert idle_worker.claim("r-0") is None
    assert idle_worker.client.zcard(broker.PENDING) == idle_worker.client.zcard(broker.VERSIONS) == 0


def test_one_that_is_submitted_when_it_is_stale_already_ends_at_its_claim(settings, idle_worker, make):
    async def main() -> None:
        async with Producer(settings) as producer:
            await producer.set_policy_version(7, max_off_policy_steps=2)
            await producer.submit(make(1, **version_of(4))[0])
            assert idle_worker.claim("r-0") is None
            assert (await take(producer, 1))["r-0"].error.reason == "stale"

    asyncio.run(main())
    assert idle_worker.client.hget(broker.job_key("r-0"), "attempt") == b"0"


def test_exactly_max_off_policy_steps_behind_is_fresh(settings, idle_worker, make):
    async def main() -> None:
        async with Producer(settings) as producer:
            await producer.submit(make(1, **version_of(5))[0])
            await producer.set_policy_version(7, max_off_policy_steps=2)
            idle_worker.finish(RolloutResult.for_request(make(1, **version_of(5))[0], StopCondition.COMPLETED))
            result = (await take(producer, 1))["r-0"]
            assert (result.completed, result.stale) == (True, False)

    asyncio.run(main())


def test_a_stale_rollout_that_runs_is_cancelled_with_the_reason(settings, idle_worker, make):
    async def main() -> None:
        async with Producer(settings) as producer:
            await producer.submit(make(1, **version_of(1))[0])
            assert idle_worker.claim("r-0")
            staled = await producer.set_policy_version(9, max_off_policy_steps=1)
            assert (staled.ended, staled.asked) == (0, 1)

    asyncio.run(main())
    assert idle_worker.client.hmget(broker.job_key("r-0"), "cancel", "reason") == [b"1", b"stale"]
    assert [fields for _, fields in idle_worker.client.xrange(broker.CANCELS)] == [{b"id": b"r-0"}]


@pytest.mark.parametrize("purpose", [Purpose.EVAL, Purpose.FROZEN])
def test_frozen_and_evaluation_work_is_exempt(settings, idle_worker, make, purpose):
    async def main() -> None:
        async with Producer(settings) as producer:
            request = make(1, purpose=purpose, **version_of(0))[0]
            await producer.submit(request)
            staled = await producer.set_policy_version(100, max_off_policy_steps=0)
            assert (staled.ended, staled.asked) == (0, 0)
            assert idle_worker.claim("r-0")
            idle_worker.finish(RolloutResult.for_request(request, StopCondition.COMPLETED, trajectory=[{"a": 1}]))
            result = (await take(producer, 1))["r-0"]
            assert (result.completed, result.stale, len(result.trajectory)) == (True, False, 1)

    asyncio.run(main())


def test_a_rollout_without_a_version_is_never_stale(settings, idle_worker, make):
    async def main() -> None:
        async with Producer(settings) as producer:
            await producer.submit(make(1)[0])
            await producer.set_policy_version(100, max_off_policy_steps=0)

    asyncio.run(main())
    assert idle_worker.claim("r-0")


def test_withheld_results_come_without_their_turns_and_can_still_be_read(settings, idle_worker, make):
    async def main() -> None:
        async with Producer(settings) as producer:
            running, waiting = make(2, **version_of(1))
            await producer.submit(running)
            await producer.submit(waiting)
            assert idle_worker.claim("r-0")
            staled = await producer.set_policy_version(5, max_off_policy_steps=0, on_stale="withhold")
            assert (staled.ended, staled.asked, staled.left) == (1, 0, 1)
            turns = [{"prompt": [], "completion": []}]
            idle_worker.finish(RolloutResult.for_request(running, StopCondition.COMPLETED, trajectory=turns))
            results = await take(producer, 2)
            assert {r.error.reason for r in results.values()} == {"stale"}
            assert (results["r-0"].stale, results["r-0"].trajectory) == (True, [])
            whole = await producer.handle("r-0", "b").result()
            assert (whole.completed, whole.stale, whole.trajectory) == (True, True, turns)

    asyncio.run(main())


def test_kept_ones_start_and_are_marked(settings, idle_worker, make):
    async def main() -> None:
        async with Producer(settings) as producer:
            request = make(1, **version_of(1))[0]
            await producer.submit(request)
            await producer.set_policy_version(5, max_off_policy_steps=0, on_stale=OnStale.KEEP)
            idle_worker.finish(RolloutResult.for_request(request, StopCondition.COMPLETED, trajectory=[{"a": 1}]))
            result = (await take(producer, 1))["r-0"]
            assert (result.completed, result.stale, len(result.trajectory)) == (True, True, 1)

    asyncio.run(main())


def test_a_result_that_comes_before_its_cancellation_is_delivered_marked(settings, idle_worker, make):
    async def main() -> None:
        async with Producer(settings) as producer:
            request = make(1, **version_of(1))[0]
            await producer.submit(request)
            assert idle_worker.claim("r-0")
            await producer.set_policy_version(5, max_off_policy_steps=0)
            idle_worker.finish(RolloutResult.for_request(request, StopCondition.COMPLETED))
            result = (await take(producer, 1))["r-0"]
            assert (result.completed, result.stale) == (True, True)

    asyncio.run(main())


def test_more_than_one_chunk_becomes_stale_also_when_some_are_left(settings, idle_worker, make):
    async def main() -> None:
        async with Producer(settings) as producer:
            batch = await producer.submit_many(make(700, **version_of(1)), batch_id="b", max_in_flight=700)
            for number in range(0, 700, 2):
                assert idle_worker.claim(f"r-{number}")
            staled = await producer.set_policy_version(5, max_off_policy_steps=0, on_stale="withhold")
            assert (staled.ended, staled.asked, staled.left) == (350, 0, 350)
            staled = await producer.set_policy_version(5, max_off_policy_steps=0)
            assert (staled.ended, staled.asked, staled.left) == (0, 350, 0)
            await batch.aclose()

    asyncio.run(main())


def test_shedding_load_cancels_the_youngest_that_train(settings, idle_worker, make):
    async def main() -> list[str]:
        async with Producer(settings) as producer:
            requests = [*make(4), *[r.model_copy(update={"rollout_id": "eval"}) for r in make(1, purpose="eval")]]
            for number, request in enumerate(requests):
                await producer.submit(request)
                assert idle_worker.claim(request.rollout_id)
                idle_worker.client.hset(broker.job_key(request.rollout_id), "claimed_ms", 1000 + number)
            return await producer.shed(2)

    assert asyncio.run(main()) == ["r-3", "r-2"]
    reasons = [idle_worker.client.hget(broker.job_key(i), "reason") for i in ("r-0", "r-1", "r-2", "r-3", "eval")]
    assert reasons == [None, None, b"overload", b"overload", None]


def test_evaluation_is_queued_first_unless_it_says_otherwise():
    assert RolloutRequest.parse({"model": "m", "purpose": "eval"}).priority == 0
    assert RolloutRequest.parse({"model": "m", "purpose": "eval", "priority": 5}).priority == 5
    assert RolloutRequest.parse({"model": "m"}).priority == 3
    again = RolloutRequest.parse(RolloutRequest.parse({"model": "m", "purpose": "eval"}).to_json())
    assert (again.priority, again.purpose) == (0, Purpose.EVAL)
