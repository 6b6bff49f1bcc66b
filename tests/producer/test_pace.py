"""How fast a batch submits, and its window, both moved while it runs."""

from __future__ import annotations

import asyncio

import pytest

from producer import Pace, Producer, RolloutResult, StopCondition, SyncProducer, broker


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def sent(pace: Pace, most: int = 1000) -> int:
    free = pace.free(most)
    pace.spend(free)
    return free


def test_without_limits_everything_is_sent_at_once():
    pace = Pace()
    assert (sent(pace), sent(pace), pace.delay) == (1000, 1000, 0.0)


def test_rollouts_per_minute_hold_in_the_long_run():
    clock = Clock()
    pace = Pace(120, clock=clock)
    total = sent(pace)
    for _ in range(600):
        clock.now += 0.1
        total += sent(pace)
    assert 120 <= total <= 122


def test_what_was_not_used_is_not_saved_up_beyond_the_burst():
    clock = Clock()
    pace = Pace(60, 5, clock=clock)
    clock.now += 3600
    assert [sent(pace), sent(pace)] == [5, 0]
    assert pace.delay == pytest.approx(1.0)
    clock.now += 1.0
    assert sent(pace) == 1


def test_a_burst_alone_bounds_the_growth_of_each_second():
    clock = Clock()
    pace = Pace(burst=10, clock=clock)
    assert [sent(pace), sent(pace)] == [10, 0]
    clock.now += 1
    assert sent(pace) == 10


@pytest.mark.parametrize("limits", [{"per_minute": 0}, {"per_minute": -1}, {"burst": 0}, {"per_minute": float("nan")}])
def test_a_pace_that_means_nothing_is_refused(limits):
    with pytest.raises(ValueError, match="both must be above 0"):
        Pace(**limits)


async def until(there) -> None:
    async with asyncio.timeout(20):
        while not there():
            await asyncio.sleep(0.005)


def test_the_window_can_be_moved_while_the_batch_runs(settings, idle_worker, make):
    async def main() -> None:
        async with Producer(settings) as producer:
            batch = await producer.submit_many(make(20), max_in_flight=2)
            assert batch.counts.submitted == 2
            batch.max_in_flight = 5
            await until(lambda: idle_worker.client.zcard(broker.PENDING) == 5)
            batch.max_in_flight = 0
            for request in make(5):
                done = RolloutResult.for_request(request, StopCondition.COMPLETED)
                idle_worker.finish(done.model_copy(update={"batch_id": batch.batch_id}))
                await anext(batch)
            assert (batch.counts.submitted, batch.counts.in_flight) == (5, 0), "paused"
            batch.max_in_flight = 100
            await until(lambda: batch.counts.submitted == 20)
            with pytest.raises(ValueError, match="0 pauses"):
                batch.max_in_flight = -1
            await batch.aclose()

    asyncio.run(main())


def test_a_batch_needs_room_to_begin(settings, make):
    async def main() -> None:
        async with Producer(settings) as producer:
            with pytest.raises(ValueError, match="max_in_flight is 0"):
                await producer.submit_many(make(1), max_in_flight=0)

    asyncio.run(main())


def test_a_batch_keeps_to_its_pace_and_another_can_be_set(settings, idle_worker, make):
    async def main() -> None:
        async with Producer(settings) as producer:
            batch = await producer.submit_many(make(50), max_in_flight=50, pace=Pace(1, 3))
            assert batch.counts.submitted == 3, "it returns while the pace holds it up"
            batch.set_pace()
            await until(lambda: batch.counts.submitted == 50)
            await batch.aclose()

    asyncio.run(main())


def test_the_same_without_await(settings, worker, make):
    with SyncProducer(settings) as producer:
        batch = producer.submit_many(make(10), max_in_flight=1, pace=Pace(60_000))
        batch.max_in_flight = 4
        batch.set_pace(per_minute=600_000)
        assert batch.max_in_flight == 4
        assert len(list(batch)) == 10
        assert not batch.redelivered
