"""Room at model servers: it goes to the first in line that can use it, whatever happens to those before."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from workers.gateway.protocol import Registration
from workers.gateway.server.calls import CallSettings, ModelCalls
from workers.gateway.server.dialects.table import CHAT
from workers.gateway.server.errors import GatewayRefusal, UpstreamError
from workers.gateway.server.gate import Gate
from workers.gateway.server.recorder import Recorder
from workers.gateway.server.upstreams import Opened, UpstreamLimits, Upstreams

#: No test waits for room for as long.
WAIT = 60.0


def run(body: Callable[[Upstreams], Awaitable[None]], servers: int = 1, room: int = 1) -> None:
    """Run ``body`` with servers that have ``room`` for so many calls each, and answer at once."""

    async def main() -> None:
        limits = UpstreamLimits(per_server=room, wait=WAIT)
        upstreams = Upstreams([f"http://127.0.0.1:{port}" for port in range(1, servers + 1)], None, 60.0, limits=limits)
        for server in upstreams.servers:
            server.post = answer  # type: ignore[method-assign]
        async with asyncio.timeout(WAIT / 3):
            await body(upstreams)
        assert (upstreams.in_flight, upstreams.waiting) == (0, 0)

    asyncio.run(main())


async def answer(path: str, body: bytes) -> Any:
    return SimpleNamespace(close=lambda: None)


def call(upstreams: Upstreams) -> asyncio.Task[Opened]:
    return asyncio.create_task(upstreams.open(SimpleNamespace(upstream=None), lambda server: ("/", b"")))


def close(upstreams: Upstreams, opened: Opened) -> None:
    opened.server.release = lambda answer: None  # type: ignore[method-assign]
    upstreams.close(opened)


async def in_line(upstreams: Upstreams, count: int) -> None:
    while upstreams.waiting < count:
        await asyncio.sleep(0)


@pytest.mark.parametrize("turns", [0, 1, 2])
def test_room_that_a_call_was_given_as_it_was_cancelled_goes_to_the_next(turns: int) -> None:
    async def body(upstreams: Upstreams) -> None:
        running = await call(upstreams)
        first = call(upstreams)
        await in_line(upstreams, 1)
        second = call(upstreams)
        await in_line(upstreams, 2)
        close(upstreams, running)
        for _ in range(turns):
            await asyncio.sleep(0)
        first.cancel()
        (outcome,) = await asyncio.gather(first, return_exceptions=True)
        if isinstance(outcome, Opened):  # it was too late for that
            close(upstreams, outcome)
        close(upstreams, await second)

    run(body)


def test_a_server_that_answers_again_has_room_for_who_waits() -> None:
    async def body(upstreams: Upstreams) -> None:
        well, ill = upstreams.servers
        ill.ejected = True
        at_well = await call(upstreams)
        waiting = call(upstreams)
        await in_line(upstreams, 1)

        async def check() -> None:
            pass

        ill.check = check  # type: ignore[method-assign]
        await upstreams._look_at(ill)
        close(upstreams, opened := await waiting)
        close(upstreams, at_well)
        assert (opened.server, at_well.server) == (ill, well)

    run(body, servers=2)


def test_room_at_a_server_that_the_first_in_line_has_tried_goes_to_the_next() -> None:
    async def body(upstreams: Upstreams) -> None:
        gone, full = upstreams.servers

        async def refuse(path: str, body: bytes) -> Any:
            gone.post = answer  # type: ignore[method-assign]
            raise UpstreamError(502, "refused", "connect", unsent=True)

        gone.post = refuse  # type: ignore[method-assign]
        full.in_flight += 1  # a call that takes its time
        first = call(upstreams)
        await in_line(upstreams, 1)
        at_gone = await call(upstreams)
        assert at_gone.server is gone
        second = call(upstreams)
        await in_line(upstreams, 2)
        close(upstreams, at_gone)
        close(upstreams, opened := await second)
        assert (opened.server, first.done()) == (gone, False)
        upstreams._left(full)
        close(upstreams, opened := await first)
        assert opened.server is full

    run(body, servers=2)


@pytest.mark.parametrize("ends", ["well", "refused"])
def test_all_the_room_at_a_server_that_is_well_again_goes_to_who_waits(ends: str) -> None:
    async def body(upstreams: Upstreams) -> None:
        well, ill = upstreams.servers
        asked, refusal = asyncio.Event(), UpstreamError(400, "too long", "invalid_request_error")

        async def later(path: str, body: bytes) -> Any:
            await asked.wait()
            if ends == "refused":
                raise refusal
            return await answer(path, body)

        well.ejected, ill.post = True, later  # type: ignore[method-assign]
        at_ill = call(upstreams)
        await asyncio.sleep(0)
        well.ejected, ill.ejected, ill.post = False, True, answer  # type: ignore[method-assign]
        at_well = [await call(upstreams), await call(upstreams)]
        waiting = [call(upstreams), call(upstreams)]
        await in_line(upstreams, 2)
        asked.set()
        (outcome,) = await asyncio.gather(at_ill, return_exceptions=True)
        if isinstance(outcome, Opened):
            close(upstreams, outcome)
        opened = [await each for each in waiting]
        assert {each.server for each in opened} == {ill}
        for each in [*at_well, *opened]:
            close(upstreams, each)

    run(body, servers=2, room=2)


def test_a_server_that_is_ill_too_is_asked_for_who_waits_when_the_last_one_is_left_alone() -> None:
    async def body(upstreams: Upstreams) -> None:
        first, second = upstreams.servers
        second.ejected = True
        running = await call(upstreams)
        waiting = call(upstreams)
        await in_line(upstreams, 1)

        async def check() -> None:
            raise UpstreamError(504, "silent", "upstream_timeout")

        first.check, first.failures = check, 2  # type: ignore[method-assign]
        await upstreams._look_at(first)
        opened = await waiting
        assert (opened.server, running.server) == (second, first)
        close(upstreams, opened)
        close(upstreams, running)

    run(body, servers=2)


def test_room_at_a_server_that_is_left_alone_goes_to_a_call_that_the_others_refused() -> None:
    async def body(upstreams: Upstreams) -> None:
        well, ill = upstreams.servers

        async def refuse(path: str, body: bytes) -> Any:
            well.post = answer  # type: ignore[method-assign]
            await in_line(upstreams, 2)
            raise UpstreamError(502, "refused", "connect", unsent=True)

        well.post, ill.ejected = refuse, True  # type: ignore[method-assign]
        ill.in_flight += 1  # a call that takes its time
        refused = call(upstreams)
        await asyncio.sleep(0)
        first, second = call(upstreams), call(upstreams)
        running = await first
        upstreams._left(ill)
        close(upstreams, opened := await refused)
        assert (opened.server, second.done()) == (ill, False)
        close(upstreams, running)
        close(upstreams, await second)

    run(body, servers=2)


def test_room_is_not_looked_for_once_for_each_in_line_who_cannot_use_it() -> None:
    """As many as were on their way to a server that went away may stand there, and calls end by the hundred."""

    async def body(upstreams: Upstreams) -> None:
        gone, full = upstreams.servers
        looks, original = 0, upstreams._choose

        def look(*arguments: Any) -> Any:
            nonlocal looks
            looks += 1
            return original(*arguments)

        async def refuse(path: str, body: bytes) -> Any:
            await asyncio.sleep(0)  # until all are on their way
            raise UpstreamError(502, "refused", "connect", unsent=True)

        gone.post = refuse  # type: ignore[method-assign]
        gone.in_flight, full.in_flight = -50, 1
        refused = [call(upstreams) for _ in range(50)]
        await in_line(upstreams, 50)
        gone.in_flight += 50
        upstreams._choose = look  # type: ignore[method-assign]
        upstreams._left(full)
        assert looks < 5
        for each in refused:  # the first that was refused is the first that has its turn
            close(upstreams, await each)

    run(body, servers=2)


def test_a_call_in_line_is_not_made_in_a_weight_update_and_names_the_version_that_it_had() -> None:
    async def body(upstreams: Upstreams) -> None:
        gate = Gate(WAIT)
        gate.version = "old"
        rollout = Recorder().register("r", Registration(model="m"), None)
        asked = ModelCalls(upstreams, gate, CallSettings()).read(rollout, CHAT, b'{"messages": []}')
        running = await call(upstreams)
        waiting = asyncio.create_task(asked.open())
        await in_line(upstreams, 1)
        gate.pause()
        close(upstreams, running)
        while upstreams.in_flight:
            await asyncio.sleep(0)
        assert not waiting.done()
        gate.version = "new"
        gate.resume()
        close(upstreams, await waiting)
        assert asked.extras["policy_version"] == "new"

    run(body)


def test_a_call_whose_rollout_is_cancelled_while_it_is_in_line_is_not_made() -> None:
    async def body(upstreams: Upstreams) -> None:
        rollout = Recorder().register("r", Registration(model="m"), None)
        asked = ModelCalls(upstreams, Gate(WAIT), CallSettings()).read(rollout, CHAT, b'{"messages": []}')
        running = await call(upstreams)
        waiting = asyncio.create_task(asked.open())
        await in_line(upstreams, 1)
        rollout.cancel()  # by an update of the weights, say, that is over when there is room
        close(upstreams, running)
        with pytest.raises(GatewayRefusal) as refused:
            close(upstreams, await waiting)
        assert refused.value.status_code == 409

    run(body)
