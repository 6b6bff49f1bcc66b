"""Connections to Redis that heed a cancellation in whichever moment it comes.

redis-py sends with `asyncio.wait_for`, which before Python 3.12 forgets a cancellation that comes in the moment in
which it is done (bpo-37658): a deadline around a call would pass, and whoever was cancelled would wait on for ever.
"""

from __future__ import annotations

import asyncio
from typing import Any

import redis.asyncio as aioredis


def heed_cancellations(client: aioredis.Redis) -> None:
    """Have all connections that ``client`` makes from now on be such ones."""
    pool: Any = client.connection_pool
    if not issubclass(pool.connection_class, _Heeding):
        pool.connection_class = type("HeedingConnection", (_Heeding, pool.connection_class), {})


class _Heeding:
    async def send_packed_command(self, command: Any, check_health: bool = True) -> None:
        task = asyncio.current_task()
        before = task.cancelling() if task else 0
        here: Any = super()
        await here.send_packed_command(command, check_health)
        if task and task.cancelling() > before:
            await here.disconnect(nowait=True)  # an answer comes that nobody reads
            raise asyncio.CancelledError
