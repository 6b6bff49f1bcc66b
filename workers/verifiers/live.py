"""Sends an episode's deltas to its door as they come, beside those that its result holds.

Whoever misses some gets all of them with the result: nothing here may fail an episode or hold it up for long.
"""

from __future__ import annotations

import logging

import redis.asyncio as aioredis
from redis import RedisError
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from producer import broker
from producer.heeding import heed_cancellations

logger = logging.getLogger(__name__)

#: Entries kept of a door's stream, about, and for how many seconds after the last.
_KEPT, _TTL = 20_000, 3600
_PATIENCE = 2.0


class LiveDeltas:
    """A connection for the deltas of one process; belongs to the event loop on which the episodes run."""

    def __init__(self, redis_url: str) -> None:
        self._redis: aioredis.Redis = aioredis.Redis.from_url(
            redis_url, socket_timeout=_PATIENCE, socket_connect_timeout=_PATIENCE, retry=Retry(NoBackoff(), 0)
        )
        heed_cancellations(self._redis)

    def of(self, batch_id: str, rollout_id: str, attempt: int) -> Episode:
        """Return where one attempt sends its deltas."""
        return Episode(self._redis, broker.DELTAS + batch_id, f"{rollout_id} {attempt}")

    async def aclose(self) -> None:
        """Close the connections."""
        await self._redis.aclose()


class Episode:
    """One attempt's deltas; stops at the first that cannot be sent, for a door takes none after a gap."""

    def __init__(self, client: aioredis.Redis, key: str, attempt: str) -> None:
        self._redis = client
        self._key = key
        self._attempt = attempt
        self._stopped = False

    async def __call__(self, number: int, trace: str, delta: bytes) -> None:
        """Send one delta."""
        if self._stopped:
            return
        fields: dict[str | bytes, str | int | bytes] = {"a": self._attempt, "n": number, "t": trace, "d": delta}
        try:
            pipe = self._redis.pipeline(transaction=False)
            pipe.xadd(self._key, fields, maxlen=_KEPT, approximate=True)  # type: ignore[arg-type]
            pipe.expire(self._key, _TTL)
            await pipe.execute()
        except (RedisError, OSError) as error:
            self._stopped = True
            logger.info("%s: its deltas come with its result: %s", self._attempt, error, extra={"stage": "live"})
