"""For how long the Redis server has been up: leases that lapsed while it was away tell nothing of their workers."""

from __future__ import annotations

import logging
import time
from typing import Any

import redis

from producer.server import warn_once

logger = logging.getLogger(__name__)


class Uptime:
    """Tells how long ago the server started, by INFO; where that is refused, counts from this object's own start.

    So a worker whose user may not ask waits for one lease more after its own start, and recovery goes on all the same.
    A restart that comes later is noticed by what keeps its leases (`workers.leases.LeaseKeeper.trusts_leases`).
    """

    def __init__(self, client: redis.Redis) -> None:
        self._client: Any = client  # redis-py's annotations allow every type that any server may answer
        self._began = time.monotonic()

    def seconds(self) -> float:
        """Return for how many seconds at least the server has been up. Raises `redis.RedisError` when it is away."""
        try:
            return float(self._client.info("server")["uptime_in_seconds"])
        except (redis.ResponseError, KeyError, TypeError, ValueError) as error:
            warn_once(f"INFO server does not tell since when it is up ({error}): counted from this process's own start")
            return time.monotonic() - self._began
