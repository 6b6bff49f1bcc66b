"""Says it where nobody runs what is submitted: no worker is alive, or none serves the queue."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, suppress

from producer.connection import FleetConnection, end
from producer.contract import RolloutRequest
from producer.errors import FleetError
from producer.queues import QUEUE
from producer.server import redact
from producer.status import queues_served

#: Seconds between two looks whether a queue is new.
_LOOK = 0.5


class Served:
    """Tells of each queue once, when the first of its rollouts is submitted; ``tell`` is given the sentence."""

    def __init__(self, connection: FleetConnection, tell: Callable[[str], None]) -> None:
        self._connection = connection.impatient()
        self._tell = tell
        self._noted: set[str] = set()
        self._looked: set[str] = set()
        self._alone = False  # whether it was said that no worker is alive

    def expect(self, queue: str) -> None:
        """Note that something is submitted to a queue."""
        self._noted.add(queue)

    def noted(self, requests: Iterable[RolloutRequest]) -> Iterator[RolloutRequest]:
        """Pass requests on, and note their queues."""
        for request in requests:
            self.expect(request.queue)
            yield request

    async def warn(self) -> None:
        """Say that no worker is alive, or which of the queues that were noted since no worker serves."""
        new = self._noted - self._looked
        served = await queues_served(self._connection)
        self._looked |= new
        where = redact(self._connection.url)
        if served is None and not self._alone:
            self._alone = True
            self._tell(f"warning: no worker is running on {where}; start one with: rollouts worker (waiting for it)")
        for queue in sorted(new - (served or {QUEUE})):
            start = f"ROLLOUTS_QUEUES={queue} rollouts worker"
            self._tell(f"warning: no worker on {where} serves queue {queue}; start one with: {start} (waiting for it)")

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Warn of queues as they are noted."""
        watch = asyncio.create_task(self._watch())
        try:
            yield
        finally:
            await end(watch)

    async def _watch(self) -> None:
        while True:
            if self._noted - self._looked:
                with suppress(FleetError):  # it is looked at again; submitting itself tells that Redis is away
                    await self.warn()
            await asyncio.sleep(_LOOK)
