"""A rate limit that a whole fleet shares: one token bucket in Redis, in one Lua script, by Redis's own clock."""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections import deque
from contextlib import suppress
from contextvars import Context
from dataclasses import dataclass
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import RedisError

from producer import broker
from producer.heeding import heed_cancellations
from workers.aio import off_the_clock

logger = logging.getLogger(__name__)

#: Seconds that one question may take before this process decides by itself.
PATIENCE = 2.0
#: Seconds before a Redis that did not answer is asked again.
AWAY = 10.0
#: Longest part of a wait that is added to it at random, so that a fleet does not wake in step.
JITTER = 0.05


class Throttle:
    """Lets the fleet do something ``per_minute`` times a minute, and up to ``burst`` times at once.

    ``key`` is the bucket's key in Redis (`producer.broker.throttle_key`). Where Redis does not answer, or with no
    ``client``, a bucket of the same size in this process decides: too much for a while is better than nothing at all.
    Belongs to one event loop.
    """

    def __init__(self, client: Redis | None, key: str, *, per_minute: float, burst: int) -> None:
        if client is not None:
            heed_cancellations(client)
        self._key = key
        self._bucket = _Bucket(interval=60.0 / per_minute, burst=burst)
        self._script: Any = client.register_script(broker.script("workers", "throttle")) if client else None
        self._queue: deque[asyncio.Future[str]] = deque()  # also of those who were cancelled
        self._waiting = 0  # without those
        self._nobody_waits = asyncio.Event()
        self._unused = ("", 0)  # tokens whose callers were cancelled, and under which number they were granted
        self._serving: asyncio.Task[None] | None = None
        self._away_until = 0.0

    async def take(self) -> None:
        """Wait until the fleet may do it once more. Waiting here stops the deadlines: it is a queue of our own."""
        turn: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._queue.append(turn)
        self._waiting += 1
        self._nobody_waits.clear()
        self._begin_to_serve()
        try:
            async with off_the_clock():
                await turn
        except asyncio.CancelledError:
            self._cancelled(turn)
            raise

    async def pause(self, seconds: float) -> None:
        """Let nobody in the fleet have a token for ``seconds``, as a `Retry-After` wants it; the longest pause wins."""
        self._bucket.pause(asyncio.get_running_loop().time(), seconds)
        await self._ask("pause", 0, int(seconds * 1e6))

    async def aclose(self) -> None:
        """Finish giving back what callers that were cancelled have not used. Nobody may wait any more."""
        if self._serving is not None:
            await asyncio.wait({self._serving})

    # -- one question for all who wait ---------------------------------------------------------------------------------

    def _begin_to_serve(self) -> None:
        if self._serving is None:
            self._serving = asyncio.get_running_loop().create_task(self._serve(), context=Context())

    def _cancelled(self, turn: asyncio.Future[str]) -> None:
        if turn.cancelled():
            self._waiting -= 1
            if not self._waiting:
                self._nobody_waits.set()
        elif turn.exception() is None:  # it had its token already, and has not seen it
            self._leave_unused(turn.result(), 1)
            self._begin_to_serve()

    def _leave_unused(self, number: str, tokens: int) -> None:
        earlier, left = self._unused
        self._unused = (number, tokens + (left if number == earlier else 0))  # those from before a pause are void

    async def _serve(self) -> None:
        """Take tokens for all who wait, first come, first served, until nobody waits; give back what is left over.

        What is granted is handed over at once, so that a pause which comes later finds no token in store here.
        """
        reserved = ""
        try:
            while self._waiting or reserved or self._unused[1]:
                if self._unused[1]:
                    number, tokens = self._unused
                    self._unused = ("", 0)
                    await self._ask("give", tokens, number)
                elif not self._waiting:
                    number, reserved = reserved, ""
                    await self._ask("give", 1, number)
                else:
                    grant = await self._ask("take", self._waiting, reserved)
                    self._hand_over(grant)
                    reserved = grant.pauses if grant.wait else ""
                    if reserved:
                        await self._sleep(grant.wait * random.uniform(1, 1 + JITTER))  # noqa: S311 - not for secrets
        except BaseException as error:
            self._fail(error)
            raise
        finally:
            self._serving = None

    def _hand_over(self, grant: Grant) -> None:
        tokens = grant.tokens
        while tokens and self._queue:
            turn = self._queue.popleft()
            if not turn.done():
                turn.set_result(grant.pauses)
                self._waiting -= 1
                tokens -= 1
        if tokens:  # their callers were cancelled while the question was on its way
            self._leave_unused(grant.pauses, tokens)

    async def _sleep(self, seconds: float) -> None:
        """Wait for a reserved moment, for as long as there is anybody to use it."""
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        while self._waiting and (left := end - loop.time()) > 0:
            with suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._nobody_waits.wait()

    def _fail(self, error: BaseException) -> None:
        """Nobody may wait for ever: this is the end of the loop, or something that cannot happen."""
        while self._queue:
            turn = self._queue.popleft()
            if turn.done():
                continue
            if isinstance(error, asyncio.CancelledError):
                turn.cancel()
            else:
                self._waiting -= 1
                turn.set_exception(error)

    async def _ask(self, verb: str, tokens: int, argument: str | int) -> Grant:
        loop = asyncio.get_running_loop()
        if self._script is not None and loop.time() >= self._away_until:
            arguments = [max(1, int(self._bucket.interval * 1e6)), self._bucket.burst, verb, tokens, argument]
            try:
                async with asyncio.timeout(PATIENCE):
                    granted, wait, pauses = await self._script(keys=[self._key], args=arguments)
                return Grant(int(granted), int(wait) / 1e6, str(int(pauses)))
            except (RedisError, OSError, TimeoutError) as error:
                self._away_until = loop.time() + AWAY
                logger.warning(
                    "Redis does not answer: for %.0f s this process alone limits %s: %r",
                    AWAY,
                    self._key,
                    error,
                    extra={"stage": "throttle"},
                )
        # As a question to Redis does, this lets those who were cancelled meanwhile say so: else they would be taken to
        # wait, and their tokens given back and taken again for ever, in a loop that nothing else gets a turn in.
        await asyncio.sleep(0)
        return self._bucket.answer(verb, loop.time(), tokens, argument)


@dataclass(frozen=True)
class Grant:
    """What one question brought: ``tokens`` and, if more were wanted, one that is reserved for ``wait`` seconds later.

    ``pauses`` is the number of pauses so far: a reservation made under another number is void.
    """

    tokens: int
    wait: float
    pauses: str


@dataclass
class _Bucket:
    """What throttle.lua does, for one process: ``interval`` seconds for one token, ``burst`` tokens when full."""

    interval: float
    burst: int
    full_at: float = 0.0
    paused_until: float = 0.0
    pauses: int = 0

    def answer(self, verb: str, now: float, tokens: int, argument: str | int) -> Grant:
        number = f"local:{self.pauses}"
        if verb == "take":
            return self._take(now, tokens, held=argument == number)
        if verb == "give" and argument == number:
            self.full_at -= tokens * self.interval
        return Grant(0, 0.0, number)

    def _take(self, now: float, wanted: int, *, held: bool) -> Grant:
        number = f"local:{self.pauses}"
        self.full_at = max(self.full_at, now)
        ready = self.full_at - (self.burst - 1) * self.interval
        free = max(0, math.floor((now - ready) / self.interval + 1 + 1e-9)) if now >= ready else 0
        tokens = min(wanted, free + held)
        self.full_at += (tokens - held) * self.interval
        if tokens == wanted:
            return Grant(tokens, 0.0, number)
        self.full_at += self.interval
        return Grant(tokens, max(self.full_at - self.burst * self.interval - now, 1e-6), number)

    def pause(self, now: float, seconds: float) -> None:
        if now + seconds > self.paused_until:
            self.pauses += 1
            self.paused_until = now + seconds
            self.full_at = max(self.full_at, self.paused_until + (self.burst - 1) * self.interval)
