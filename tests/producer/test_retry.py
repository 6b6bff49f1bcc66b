"""``rollouts retry`` of a rollout whose end its running batch has heard of, and not yet handed out."""

from __future__ import annotations

import asyncio
from typing import Any

from producer import Producer, StopCondition
from producer.contract import RolloutResult
from producer.operating import Operator
from producer.results import GROUP


def failed(request: Any) -> RolloutResult:
    return RolloutResult.for_request(request, StopCondition.HAS_ERROR)


def test_a_rollout_that_is_retried_before_its_end_is_handed_out_is_handed_out_once_with_its_own_result(
    settings: Any, idle_worker: Any, make: Any
) -> None:
    async def main() -> RolloutResult:
        async with Producer(settings) as producer, asyncio.timeout(20):
            (request,) = make(1)
            batch = await producer.submit_many([request])
            request = request.model_copy(update={"batch_id": batch.batch_id})
            await asyncio.to_thread(idle_worker.finish, failed(request))
            while not batch._announced:  # its consumer is busy with something else
                await asyncio.sleep(0.01)
            assert set((await Operator(producer.connection).retry([request.rollout_id])).values()) == {"retried"}
            end = RolloutResult.for_request(request, StopCondition.COMPLETED, reward=1.0)
            taking = asyncio.create_task(anext(batch))
            while not (batch._waiting or taking.done()):  # until it waits for the new end, as it should
                await asyncio.sleep(0.01)
            await asyncio.to_thread(idle_worker.finish, end)
            return await taking

    result = asyncio.run(main())
    assert result.error is None, result.error
    assert result.stop_condition is StopCondition.COMPLETED


def test_who_follows_a_batch_is_given_what_a_retried_rollout_ends_with(
    settings: Any, idle_worker: Any, make: Any
) -> None:
    async def main() -> list[RolloutResult]:
        async with Producer(settings) as producer, asyncio.timeout(20):
            requests = [request.model_copy(update={"batch_id": "b"}) for request in make(GROUP + 1)]
            for request in requests:
                await producer.submit(request)
                await asyncio.to_thread(idle_worker.finish, failed(request))
            results = producer.results("b", count=len(requests))
            found = [await anext(results)]  # the last one is announced by now, and not fetched
            last = requests[-1]
            assert set((await Operator(producer.connection).retry([last.rollout_id])).values()) == {"retried"}
            found += [await anext(results) for _ in range(GROUP - 1)]
            coming = asyncio.create_task(anext(results))
            while not (results._announced == results._fetched or coming.done()):  # until it waits for the new end
                await asyncio.sleep(0.01)
            await asyncio.to_thread(idle_worker.finish, RolloutResult.for_request(last, StopCondition.COMPLETED))
            return [*found, await coming]

    *others, last = asyncio.run(main())
    assert {result.stop_condition for result in others} == {StopCondition.HAS_ERROR}
    assert last.completed, last.error


def test_who_waits_for_a_rollout_that_is_retried_before_its_result_is_fetched_is_given_the_next(
    settings: Any, idle_worker: Any, make: Any
) -> None:
    async def main() -> RolloutResult:
        async with Producer(settings) as producer, asyncio.timeout(20):
            (request,) = make(1)
            handle = await producer.submit(request)
            fetch, retried = producer.connection.stored_results, asyncio.Event()

            async def fetch_later(ids: list[str]) -> list[bytes | None]:
                if not retried.is_set():
                    assert set((await Operator(producer.connection).retry(ids)).values()) == {"retried"}
                    retried.set()
                return await fetch(ids)

            producer.connection.stored_results = fetch_later  # type: ignore[method-assign]
            await asyncio.to_thread(idle_worker.finish, failed(request))
            taking = asyncio.create_task(handle.result())
            await retried.wait()
            while not (producer._waiters or taking.done()):  # until it waits again
                await asyncio.sleep(0.01)
            await asyncio.to_thread(idle_worker.finish, RolloutResult.for_request(request, StopCondition.COMPLETED))
            return await taking

    result = asyncio.run(main())
    assert result.completed, result.error
