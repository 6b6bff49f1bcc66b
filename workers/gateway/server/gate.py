"""Pausing model calls while the trainer swaps weights, and the policy version that calls are sampled under."""

from __future__ import annotations

import asyncio
from typing import Any

from workers.gateway.server.errors import GatewayRefusal


class Gate:
    """Holds new model calls while it is closed; those that run go on.

    ``version`` is whatever the trainer names its weights (a string or a number); None until it said.
    """

    def __init__(self, limit: float) -> None:
        self.version: Any = None
        self._limit = limit
        self._open = asyncio.Event()
        self._open.set()

    @property
    def is_paused(self) -> bool:
        """Whether new calls are held."""
        return not self._open.is_set()

    def pause(self) -> None:
        """Hold new calls."""
        self._open.clear()

    def resume(self) -> None:
        """Let them go."""
        self._open.set()

    async def passed(self) -> None:
        """Wait until calls may be made; raises `GatewayRefusal` (503) when that takes longer than the limit."""
        if self._open.is_set():
            return
        try:
            async with asyncio.timeout(self._limit):
                await self._open.wait()
        except TimeoutError:
            message = f"Model calls have been paused for {self._limit:g} s, for an update of the weights."
            error = {"message": message, "type": "gateway_paused", "param": None, "code": 503}
            raise GatewayRefusal(503, message, error=error, headers={"retry-after": "5"}) from None
