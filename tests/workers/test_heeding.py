"""What a worker asks of Redis on its loop ends when it is cancelled, in whichever turn of the loop that comes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from redis.asyncio import Redis

from producer import broker
from workers.throttle import Throttle
from workers.verifiers.live import LiveDeltas

#: A call takes fewer turns of the loop than this, also over a new connection.
TURNS = 80
Call = Callable[[], Coroutine[Any, Any, Any]]


async def held(call: Call) -> list[bool]:
    found = []
    for turns in range(TURNS):
        calling = asyncio.create_task(call())
        for _ in range(turns):
            await asyncio.sleep(0)
        asked = calling.cancel()
        await asyncio.wait({calling})
        found.append(calling.cancelled() is asked)
    return found


@pytest.mark.parametrize("what", ["a pause of a throttle", "a delta of an episode"])
def test_a_cancellation_at_any_turn_holds(redis_url: str, what: str) -> None:
    async def main() -> list[bool]:
        client = Redis.from_url(redis_url, socket_timeout=2)
        throttle = Throttle(client, broker.throttle_key("test"), per_minute=60, burst=1)
        live = LiveDeltas(redis_url)
        calls: dict[str, Call] = {
            "a pause of a throttle": lambda: throttle.pause(0),
            "a delta of an episode": lambda: live.of("b", "r", 1)(0, "trace", b""),
        }
        try:
            return await held(calls[what])
        finally:
            await client.aclose()
            await live.aclose()

    assert asyncio.run(main()) == [True] * TURNS
