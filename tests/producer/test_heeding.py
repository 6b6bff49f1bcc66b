"""A cancellation holds, in whichever turn of the event loop it comes, and leaves no answer for whoever asks next."""

from __future__ import annotations

import asyncio

import pytest

from producer import Producer
from producer.connection import FleetConnection
from producer.heeding import heed_cancellations

#: A call takes fewer turns of the loop than this, also over a new connection.
TURNS = 80


@pytest.mark.parametrize("connects", [False, True])
def test_a_call_of_redis_that_is_cancelled_at_any_turn_ends_so(redis_url, connects):
    async def cancel_after(connection, turns):
        if connects:
            await connection.redis.connection_pool.disconnect()
        call = asyncio.create_task(connection.call(lambda: connection.redis.echo(str(turns))))
        for _ in range(turns):
            await asyncio.sleep(0)
        asked = call.cancel()
        await asyncio.wait({call})
        assert await connection.redis.echo("next") == b"next"
        return call.cancelled() if asked else call.result() == str(turns).encode()

    async def main():
        connection = FleetConnection(redis_url)
        await connection.open()
        held = [await cancel_after(connection, turns) for turns in range(TURNS)]
        await connection.close()
        return held

    assert asyncio.run(main()) == [True] * TURNS


def test_a_client_that_is_made_to_heed_cancellations_twice_still_connects(redis_url):
    async def main():
        connection = FleetConnection(redis_url)
        heed_cancellations(connection.redis)
        await connection.open()
        await connection.close()

    asyncio.run(main())


def test_the_time_that_a_handle_is_waited_for_holds_however_short_it_is(settings, idle_worker, make):
    async def main():
        async with Producer(settings) as producer:
            handle = await producer.submit(make(1)[0])
            waiting = [asyncio.create_task(handle.result(timeout)) for timeout in [n / 10_000 for n in range(40)]]
            _, left = await asyncio.wait(waiting, timeout=10)
            assert not left
            assert {type(task.exception()) for task in waiting} == {TimeoutError}

    asyncio.run(main())
