"""``rollouts retry`` of a rollout whose end its running batch has heard of, and not yet handed out."""

from __future__ import annotations

import asyncio
from typing import Any

from producer import Producer, StopCondition
from producer.contract import RolloutResult
from producer.operating import Operator


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
