"""Work that recurs: beat orders it, and a worker does without beat when it is late."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

logger = logging.getLogger(__name__)

#: Intervals without a turn after which one is done without beat: it may be gone, and a worker whose slots are all taken
#: is sent no task of any kind.
LATE = 1.5


class Upkeep:
    """Does ``work`` when it is called, and by itself when it was not called for too long: use it as a context manager.

    ``interval`` is in seconds, ``late`` in intervals; ``stage`` names the work in the log.
    """

    def __init__(
        self, work: Callable[[], Awaitable[object]], *, interval: float, stage: str, late: float = LATE
    ) -> None:
        self._work = work
        self._interval = interval
        self._stage = stage
        self._late = late * interval
        self._done = time.monotonic()

    async def __call__(self) -> None:
        """Do one turn now."""
        self._done = time.monotonic()
        await self._work()

    async def __aenter__(self) -> Upkeep:
        self._watch = asyncio.create_task(self._do_when_late(), name=self._stage)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._watch.cancel()
        await asyncio.gather(self._watch, return_exceptions=True)

    async def _do_when_late(self) -> None:
        while True:
            await asyncio.sleep(self._interval / 4)
            if time.monotonic() - self._done < self._late:
                continue
            try:
                await self()
            except Exception:
                logger.exception("%s failed", self._stage, extra={"stage": self._stage})
