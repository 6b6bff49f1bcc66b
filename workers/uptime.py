"""For how long leases could be renewed: those that lapsed while Redis was away tell nothing of their workers.

Leases lapse by the server's own clock. Where that is set forward, or goes on while the machine is suspended, all of
them lapse at once, though every worker lives; it is as if the server had been away.
"""

from __future__ import annotations

import logging
import math
import time
from typing import Any

import redis

from producer.server import warn_once

logger = logging.getLogger(__name__)


class Uptime:
    """Tells how long ago the server started, by INFO; where that is refused, counts from this object's own start.

    So a worker whose user may not ask waits for one lease more after its own start, and recovery goes on all the same.
    A restart that comes later is noticed by what keeps its leases (`workers.leases.LeaseKeeper.trusts_leases`). A jump
    of the server's clock by more than ``tolerance`` seconds since this was asked last counts as a start.
    """

    def __init__(self, client: redis.Redis, tolerance: float = math.inf) -> None:
        self._client: Any = client  # redis-py's annotations allow every type that any server may answer
        self._tolerance = tolerance
        self._began = time.monotonic()
        self._ahead = math.inf  # of our monotonic clock, at most: what the server's clock was when it was asked last
        self._jumped = -math.inf  # when a jump was found, in `time.monotonic` seconds

    def seconds(self) -> float:
        """Return for how many seconds at least the server has been up. Raises `redis.RedisError` when it is away."""
        asked = time.monotonic()
        try:
            info = self._client.info("server")
            up = float(info["uptime_in_seconds"])
        except (redis.ResponseError, KeyError, TypeError, ValueError) as error:
            warn_once(f"INFO server does not tell since when it is up ({error}): counted from this process's own start")
            return time.monotonic() - self._began
        if micros := info.get("server_time_usec"):
            self._look_for_a_jump(float(micros) / 1e6, asked)
        return min(up, time.monotonic() - self._jumped)

    def _look_for_a_jump(self, server: float, asked: float) -> None:
        """Compare how the clocks went on; the server read its own between ``asked`` and now."""
        now = time.monotonic()
        if server - now > self._ahead + self._tolerance:
            logger.warning(
                "Redis's clock was set forward by %.1f s: no lease is believed lapsed", server - now - self._ahead
            )
            self._jumped = now
        self._ahead = server - asked
