"""A rate limit that a whole fleet shares: one token bucket in Redis, in one Lua script, by Redis's own clock."""

from __future__ import annotations

import asyncio
import logging
import random
from dataclasses import dataclass
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import RedisError

from producer import broker
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
        self._key = key
        self._bucket = _Bucket(interval=60.0 / per_minute, burst=burst)
        self._script: Any = client.register_script(broker.script("workers", "throttle")) if client else None
        self._queue = asyncio.Lock()
        self._away_until = 0.0

    async def take(self) -> None:
        """Wait until the fleet may do it once more. Waiting here stops the deadlines: it is a queue of our own."""
        # One caller of a process asks at a time, first come, first served: each question reserves a moment, and what
        # is reserved by somebody who is cancelled is lost to the fleet.
        async with off_the_clock(), self._queue:
            reserved = ""
            while True:
                wait, reserved = await self._ask("take", reserved)
                if wait <= 0:
                    return
                await asyncio.sleep(wait * random.uniform(1, 1 + JITTER))  # noqa: S311 - not for secrets

    async def pause(self, seconds: float) -> None:
        """Let nobody in the fleet have a token for ``seconds``, as a `Retry-After` wants it; the longest pause wins."""
        self._bucket.pause(asyncio.get_running_loop().time(), seconds)
        await self._ask("pause", int(seconds * 1e6))

    async def _ask(self, verb: str, argument: str | int) -> tuple[float, str]:
        """Return how many seconds to wait, and under which number the moment after that is reserved."""
        loop = asyncio.get_running_loop()
        if self._script is not None and loop.time() >= self._away_until:
            arguments = [int(self._bucket.interval * 1e6), self._bucket.burst, verb, argument]
            try:
                async with asyncio.timeout(PATIENCE):
                    wait, pauses = await self._script(keys=[self._key], args=arguments)
                return int(wait) / 1e6, str(int(pauses))
            except (RedisError, OSError, TimeoutError) as error:
                self._away_until = loop.time() + AWAY
                logger.warning(
                    "Redis does not answer: for %.0f s this process alone limits %s: %r",
                    AWAY,
                    self._key,
                    error,
                    extra={"stage": "throttle"},
                )
        return self._bucket.take(loop.time(), argument) if verb == "take" else (0.0, "")


@dataclass
class _Bucket:
    """What throttle.lua does, for one process: ``interval`` seconds for one token, ``burst`` tokens when full."""

    interval: float
    burst: int
    full_at: float = 0.0
    paused_until: float = 0.0
    pauses: int = 0

    def take(self, now: float, reserved: str | int) -> tuple[float, str]:
        number = f"local:{self.pauses}"
        if reserved == number:
            return 0.0, number
        full_at = max(self.full_at, now)
        self.full_at = full_at + self.interval
        return max(full_at - (self.burst - 1) * self.interval - now, 0.0), number

    def pause(self, now: float, seconds: float) -> None:
        if now + seconds > self.paused_until:
            self.pauses += 1
            self.paused_until = now + seconds
            self.full_at = max(self.full_at, self.paused_until + (self.burst - 1) * self.interval)
