"""The fleet's token bucket: real Redis, several workers' ends of it, and what happens when Redis is away."""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import Awaitable, Callable

import pytest
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from support import RedisServer

from producer import broker
from workers import throttle as module
from workers.aio import deadline
from workers.throttle import Grant, Throttle

KEY = broker.throttle_key("test")
#: Slack for a clock that ticks in two processes.
SLACK = 0.02


def with_workers(url: str | None, count: int, per_minute: float, burst: int) -> Callable[..., None]:
    """Run a coroutine function with the throttles of ``count`` workers of one fleet, and check that it ends."""

    def run(body: Callable[..., Awaitable[None]]) -> None:
        async def main() -> None:
            clients = [
                Redis.from_url(url, socket_timeout=30, socket_connect_timeout=30, retry=Retry(NoBackoff(), 0))
                if url
                else None
                for _ in range(count)
            ]
            try:
                await body(*(Throttle(client, KEY, per_minute=per_minute, burst=burst) for client in clients))
            finally:
                for client in clients:
                    if client:
                        await client.aclose()

        asyncio.run(main())

    return run


# A bucket fills while the machine stands still, so what is waited for at least counts from before its first token.


async def seconds(*works: Awaitable[object]) -> float:
    began = time.monotonic()
    await asyncio.gather(*works)
    return time.monotonic() - began


@pytest.mark.parametrize("shared", [True, False], ids=["redis", "alone"])
def test_after_a_burst_the_rate_holds(redis_url: str, shared: bool) -> None:
    async def body(throttle: Throttle) -> None:
        assert 0.2 - SLACK <= await seconds(*(throttle.take() for _ in range(20))) < 15

    with_workers(redis_url if shared else None, 1, per_minute=50 * 60, burst=10)(body)


@pytest.mark.parametrize("shared", [True, False], ids=["redis", "alone"])
def test_a_burst_is_free(redis_url: str, shared: bool) -> None:
    async def body(throttle: Throttle) -> None:
        assert await seconds(*(throttle.take() for _ in range(10))) < 15, "nine tokens are half a minute"

    with_workers(redis_url if shared else None, 1, per_minute=18, burst=10)(body)


def test_all_workers_of_a_fleet_share_one_bucket(redis_url: str) -> None:
    async def body(*throttles: Throttle) -> None:
        took = await seconds(*(throttle.take() for throttle in throttles for _ in range(8)))
        assert 0.38 - SLACK <= took < 15  # 24 tokens, 5 of them free, 50 a second

    with_workers(redis_url, 3, per_minute=50 * 60, burst=5)(body)


def test_a_pause_holds_for_everybody_and_for_those_who_wait_already(redis_url: str) -> None:
    async def body(one: Throttle, other: Throttle) -> None:
        await one.take()
        waiting = asyncio.create_task(other.take())  # due in 0.2 s
        await asyncio.sleep(0)
        began = time.monotonic()
        await one.pause(0.5)
        await asyncio.gather(one.take(), waiting)
        assert time.monotonic() - began >= 0.5 - SLACK

    with_workers(redis_url, 2, per_minute=5 * 60, burst=1)(body)


def test_the_longest_pause_wins(redis_url: str) -> None:
    async def body(throttle: Throttle) -> None:
        began = time.monotonic()
        await throttle.pause(0.4)
        await throttle.pause(0.05)
        await throttle.take()
        assert time.monotonic() - began >= 0.4 - SLACK

    with_workers(redis_url, 1, per_minute=6000, burst=10)(body)


def test_a_pause_ends_with_one_token_not_with_a_full_bucket(redis_url: str) -> None:
    async def body(throttle: Throttle) -> None:
        began = time.monotonic()
        await throttle.pause(0.05)
        await seconds(*(throttle.take() for _ in range(6)))
        assert time.monotonic() - began >= 0.05 + 5 * 0.02 - SLACK

    with_workers(redis_url, 1, per_minute=50 * 60, burst=10)(body)


def test_a_cancelled_caller_does_not_hold_up_the_others(redis_url: str) -> None:
    async def body(throttle: Throttle) -> None:
        await throttle.take()
        waiting = [asyncio.create_task(throttle.take()) for _ in range(3)]
        await asyncio.sleep(0)
        waiting[0].cancel()
        waiting[1].cancel()
        assert await seconds(waiting[2]) < 15

    with_workers(redis_url, 1, per_minute=10 * 60, burst=1)(body)


class Questions:
    """Counts what a throttle asks, and may hold its answers back."""

    def __init__(self, throttle: Throttle, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[tuple[str, int]] = []
        self.answers = asyncio.Event()
        self.answers.set()
        ask = throttle._ask

        async def counted(verb: str, tokens: int, argument: str | int) -> Grant:
            self.asked.append((verb, tokens))
            grant = await ask(verb, tokens, argument)
            await self.answers.wait()
            return grant

        monkeypatch.setattr(throttle, "_ask", counted)


async def until(predicate: Callable[[], object]) -> None:
    async with asyncio.timeout(30):
        while not predicate():
            await asyncio.sleep(0.002)


@pytest.mark.parametrize("shared", [True, False], ids=["redis", "alone"])
def test_all_who_wait_share_a_question_and_come_in_their_order(
    redis_url: str, shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(throttle: Throttle) -> None:
        questions, order = Questions(throttle, monkeypatch), list[int]()

        async def caller(number: int) -> None:
            await throttle.take()
            order.append(number)

        await asyncio.gather(*map(caller, range(100)))
        assert order == list(range(100))
        assert questions.asked[0] == ("take", 100)
        # 50 at once; then those that have become free while the one before was waited for.
        assert len(questions.asked) <= 52
        assert {verb for verb, _ in questions.asked} == {"take"}

    with_workers(redis_url if shared else None, 1, per_minute=500 * 60, burst=50)(body)


@pytest.mark.parametrize("shared", [True, False], ids=["redis", "alone"])
@pytest.mark.parametrize("seen", [True, False], ids=["granted", "on its way"])
def test_tokens_of_callers_that_are_cancelled_are_not_lost(
    redis_url: str, shared: bool, seen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(throttle: Throttle) -> None:
        questions = Questions(throttle, monkeypatch)
        questions.answers.clear()
        waiting = [asyncio.create_task(throttle.take()) for _ in range(20)]
        await until(lambda: questions.asked == [("take", 20)])

        def cancel_all(*_: object) -> None:
            for task in waiting:
                task.cancel()

        if seen:  # all have their token, and only the first one has gone on
            next(iter(throttle._queue)).add_done_callback(cancel_all)
        else:
            cancel_all()
        questions.answers.set()
        await asyncio.wait(waiting)
        await throttle.aclose()
        cancelled = sum(task.cancelled() for task in waiting)
        assert cancelled == (19 if seen else 20)
        assert sum(n for verb, n in questions.asked if verb == "give") == cancelled
        assert await seconds(*(throttle.take() for _ in range(cancelled))) < 15, "they are a minute"

    with_workers(redis_url if shared else None, 1, per_minute=18, burst=20)(body)


@pytest.mark.parametrize("shared", [True, False], ids=["redis", "alone"])
def test_a_reserved_moment_goes_to_the_next_caller_or_back(
    redis_url: str, shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(throttle: Throttle) -> None:
        questions = Questions(throttle, monkeypatch)
        began = time.monotonic()
        await throttle.take()
        for _ in range(5):
            waiting = asyncio.create_task(throttle.take())
            await until(lambda: throttle._waiting and questions.asked[-1][0] == "take")
            waiting.cancel()
            await asyncio.wait({waiting})
        await throttle.take()  # not five moments later
        assert 1.0 - SLACK <= time.monotonic() - began < 4.5
        await throttle.aclose()

    with_workers(redis_url if shared else None, 1, per_minute=60, burst=1)(body)


def test_what_is_given_back_does_not_open_a_pause(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(one: Throttle, other: Throttle) -> None:
        questions = Questions(one, monkeypatch)
        questions.answers.clear()
        waiting = [asyncio.create_task(one.take()) for _ in range(10)]
        await until(lambda: questions.asked)
        began = time.monotonic()
        await other.pause(0.4)
        for task in waiting:
            task.cancel()
        questions.answers.set()
        await asyncio.wait(waiting)
        await one.aclose()
        await asyncio.gather(one.take(), other.take())
        assert time.monotonic() - began >= 0.4 - SLACK

    with_workers(redis_url, 2, per_minute=50 * 60, burst=10)(body)  # ten tokens are 0.2 s


def test_waiting_for_a_token_stops_the_deadlines(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(throttle: Throttle) -> None:
        questions = Questions(throttle, monkeypatch)
        await throttle.take()
        questions.answers.clear()
        async with deadline(50) as clock:
            waiting = asyncio.create_task(throttle.take())
            await until(lambda: clock.when() is None)  # until it has an answer, and then until its moment comes
            questions.answers.set()
            while not waiting.done():
                assert clock.when() is None
                await asyncio.sleep(0.002)
            await waiting
            assert clock.when() is not None

    with_workers(redis_url, 1, per_minute=4 * 60, burst=1)(body)


def test_the_bucket_leaves_nothing_in_redis_for_ever(redis_url: str) -> None:
    async def body(throttle: Throttle) -> None:
        await throttle.take()
        async with Redis.from_url(redis_url) as client:
            assert 0 < await client.pttl(KEY) <= 62_000

    with_workers(redis_url, 1, per_minute=60, burst=1)(body)


@pytest.mark.timeout(20, method="thread")  # a loop that spins obeys no signal
@pytest.mark.parametrize("shared", [True, False], ids=["redis", "alone"])
def test_callers_that_are_all_cancelled_as_they_come_do_not_keep_the_loop(redis_url: str, shared: bool) -> None:
    """They are cancelled before their tokens are asked for, and say so only after that."""

    async def body(throttle: Throttle) -> None:
        callers = [asyncio.create_task(throttle.take()) for _ in range(3)]
        await asyncio.sleep(0)
        for caller in callers:
            caller.cancel()
        assert await asyncio.gather(*callers, return_exceptions=True) != [None] * 3
        await throttle.aclose()
        assert await seconds(*(throttle.take() for _ in range(5))) < 15, "they have used up no token"

    with_workers(redis_url if shared else None, 1, per_minute=1, burst=5)(body)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["gone", "hung"])
def test_a_redis_that_is_away_stops_nobody(
    own_redis: RedisServer, how: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "PATIENCE", 0.1)

    async def body(throttle: Throttle) -> None:
        await throttle.take()
        assert own_redis.process
        own_redis.process.send_signal(how)
        with caplog.at_level(logging.WARNING):
            took = await seconds(*(throttle.take() for _ in range(12)))
        # Redis is asked once, then this process's own bucket decides, at the same rate.
        assert 0.2 - SLACK <= took < 15
        assert sum("Redis does not answer" in message for message in caplog.messages) == 1

    with_workers(own_redis.url, 1, per_minute=10 * 60, burst=10)(body)


def test_a_pause_holds_here_although_redis_is_away(own_redis: RedisServer) -> None:
    async def body(throttle: Throttle) -> None:
        assert own_redis.process
        own_redis.process.send_signal(signal.SIGKILL)
        began = time.monotonic()
        await throttle.pause(0.2)
        await throttle.take()
        assert time.monotonic() - began >= 0.2 - SLACK

    with_workers(own_redis.url, 1, per_minute=6000, burst=10)(body)


def test_redis_is_asked_again_after_a_while(own_redis: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "AWAY", 0.0)

    async def body(throttle: Throttle) -> None:
        own_redis.stop(signal.SIGKILL)
        await throttle.take()
        own_redis.start()
        async with asyncio.timeout(30):
            while not own_redis.client.exists(KEY):
                await throttle.take()

    with_workers(own_redis.url, 1, per_minute=6000, burst=10)(body)
