"""Deadlines that pause, and clean-up that is not interrupted."""

from __future__ import annotations

import asyncio

import pytest

from workers.aio import Turnstile, deadline, first_of, off_the_clock, queued, too_late_to_cancel, uninterrupted


def test_the_clocks_of_all_deadlines_stop_while_waiting_and_go_on_with_what_was_left() -> None:
    async def scenario() -> None:
        async with deadline(50) as outer, deadline(60) as inner:
            before = outer.when(), inner.when()
            async with off_the_clock():
                assert (outer.when(), inner.when()) == (None, None)
            after = outer.when(), inner.when()
            for clock, again in zip(before, after, strict=True):
                assert clock is not None
                assert again is not None
                assert 0 <= again - clock < 5, "later by what was waited"

    asyncio.run(scenario())


def test_the_time_that_is_left_counts_again_afterwards() -> None:
    async def scenario() -> None:
        async with deadline(0.005):
            async with off_the_clock():
                pass
            await asyncio.Event().wait()

    with pytest.raises(TimeoutError):
        asyncio.run(scenario())


def test_a_task_started_inside_stops_the_same_clock() -> None:
    async def queue(clock: asyncio.Timeout) -> None:
        async with off_the_clock():
            assert clock.when() is None

    async def scenario() -> None:
        async with deadline(50) as clock:
            await asyncio.create_task(queue(clock))
            assert clock.when() is not None

    asyncio.run(scenario())


def test_waiting_for_a_place_stops_the_clock_and_holding_it_does_not() -> None:
    async def scenario() -> None:
        places = asyncio.Semaphore(1)

        async def holds() -> None:
            async with deadline(50) as clock, queued(places):
                clocks.append(clock)
                await asyncio.Event().wait()

        clocks: list[asyncio.Timeout] = []
        holder = asyncio.create_task(holds())
        await asyncio.sleep(0)
        assert clocks[0].when() is not None
        async with deadline(50) as clock:
            waiting = asyncio.create_task(queued(places).__aenter__())
            await asyncio.sleep(0)
            assert clock.when() is None
            holder.cancel()
            await waiting
            assert clock.when() is not None
            assert places.locked()
            places.release()

    asyncio.run(scenario())


def test_a_place_is_free_again_whatever_becomes_of_who_waited_for_it_or_held_it() -> None:
    async def scenario() -> None:
        places = asyncio.Semaphore(1)

        async def fails() -> None:
            async with queued(places):
                waiting = asyncio.create_task(queued(places).__aenter__())
                await asyncio.sleep(0)
                waiting.cancel()
                await asyncio.wait({waiting})
                assert waiting.cancelled()
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await fails()
        async with queued(places):
            assert places.locked()
        assert not places.locked()

    asyncio.run(scenario())


@pytest.mark.parametrize("begins", ["before the deadline's end", "after it"])
def test_a_task_that_outlives_the_deadline_it_was_started_in_gets_its_place_and_gives_it_back(begins: str) -> None:
    async def scenario() -> None:
        places, go = asyncio.Semaphore(1), asyncio.Event()

        async def waits() -> str:
            await go.wait()
            async with queued(places):
                return "had its turn"

        async with queued(places):
            async with deadline(50):
                left = asyncio.create_task(waits())
                if begins == "before the deadline's end":
                    go.set()
                    await asyncio.sleep(0)
                    await asyncio.sleep(0)
            go.set()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        assert await left == "had its turn"
        assert not places.locked()

    asyncio.run(scenario())


def test_a_cancellation_while_off_the_clock_passes_and_restores_it() -> None:
    async def scenario() -> str:
        try:
            async with deadline(10) as clock:
                with pytest.raises(asyncio.CancelledError):
                    async with off_the_clock():
                        raise asyncio.CancelledError
                assert clock.when() is not None
                return "went on"
        finally:
            pass

    assert asyncio.run(scenario()) == "went on"


def test_uninterrupted_work_ends_before_the_cancellation_is_raised() -> None:
    async def scenario() -> list[str]:
        done: list[str] = []
        go = asyncio.Event()

        async def work() -> None:
            await go.wait()
            done.append("work")

        task = asyncio.create_task(uninterrupted(work(), timeout=5))
        for _ in range(3):
            await asyncio.sleep(0)
            task.cancel()
        await asyncio.sleep(0)
        go.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        return done

    assert asyncio.run(scenario()) == ["work"]


def test_uninterrupted_work_is_bounded_and_its_failure_is_raised() -> None:
    async def fails() -> None:
        raise ValueError("broken")

    with pytest.raises(TimeoutError):
        asyncio.run(uninterrupted(asyncio.sleep(60), timeout=0.01))
    with pytest.raises(ValueError, match="broken"):
        asyncio.run(uninterrupted(fails(), timeout=1))


@pytest.mark.parametrize("turns", range(5))
def test_work_that_it_is_too_late_to_cancel_returns_what_it_returns(turns: int) -> None:
    async def work() -> str:
        for _ in range(3):
            await asyncio.sleep(0)
        return "done"

    async def scenario() -> str:
        task = asyncio.create_task(too_late_to_cancel(work()))
        await asyncio.sleep(0)  # begun: before that, nothing is there to be ended
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        return await task

    assert asyncio.run(scenario()) == "done"


def test_the_end_of_the_loop_ends_work_that_it_is_too_late_to_cancel() -> None:
    ended: list[bool] = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    async def scenario() -> None:
        left = asyncio.create_task(too_late_to_cancel(work()))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not left.done()

    asyncio.run(scenario())
    assert ended == [True]


def test_first_of_cancels_the_others_and_raises_what_the_first_raised() -> None:
    cancelled: list[str] = []

    async def for_ever() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.append("other")

    async def fails() -> None:
        raise ValueError("first")

    with pytest.raises(ValueError, match="first"):
        asyncio.run(first_of(for_ever(), fails(), timeout=5))
    assert cancelled == ["other"]
    assert asyncio.run(first_of(asyncio.sleep(0, "done"), for_ever(), timeout=5)) == "done"
    assert asyncio.run(first_of(for_ever(), timeout=0.01)) is None


def test_a_turnstile_lets_a_few_through_in_each_turn_of_the_loop_in_order() -> None:
    async def scenario() -> list[list[int]]:
        turnstile = Turnstile(3)
        turns: list[list[int]] = [[]]

        async def go(number: int) -> None:
            await turnstile()
            turns[-1].append(number)

        tasks = [asyncio.create_task(go(number)) for number in range(8)]
        while not all(task.done() for task in tasks):
            await asyncio.sleep(0)
            turns.append([])
        await turnstile()  # there is room again, later on
        return [turn for turn in turns if turn]

    turns = asyncio.run(scenario())
    assert [number for turn in turns for number in turn] == list(range(8))
    assert max(map(len, turns)) == 3


def test_who_is_cancelled_before_a_turnstile_takes_nobodys_turn() -> None:
    async def scenario() -> list[int]:
        turnstile = Turnstile(1)
        through: list[int] = []

        async def go(number: int) -> None:
            await turnstile()
            through.append(number)

        tasks = [asyncio.create_task(go(number)) for number in range(4)]
        await asyncio.sleep(0)
        tasks[1].cancel()
        tasks[2].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return through

    assert asyncio.run(scenario()) == [0, 3]


def test_a_cancellation_in_the_turn_in_which_the_work_ends_is_not_lost() -> None:
    async def scenario() -> bool:
        ended = asyncio.get_running_loop().create_future()
        outer = asyncio.create_task(uninterrupted(ended, None))
        for _ in range(3):
            await asyncio.sleep(0)
        ended.set_result(None)
        await asyncio.sleep(0)  # the inner task ends now, and the outer one has yet to hear of it
        outer.cancel()
        await asyncio.wait({outer})
        return outer.cancelled()

    assert asyncio.run(scenario())


def test_of_two_works_that_end_together_the_first_one_counts() -> None:
    async def fail() -> None:
        raise ValueError("too late")

    async def succeed() -> int:
        return 0

    assert asyncio.run(first_of(succeed(), fail(), timeout=5)) == 0
    with pytest.raises(ValueError, match="too late"):
        asyncio.run(first_of(fail(), succeed(), timeout=5))
