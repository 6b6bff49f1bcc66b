"""Says why no result comes, while none does: what the fleet's status finds wrong, and nothing where that is nothing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

from producer.batch import Counts
from producer.connection import FleetConnection, end
from producer.errors import FleetError
from producer.status import read_status
from producer.worker_report import span

#: Seconds without a result before it is asked, the first time; doubled each time, for agents may take hours.
_PATIENCE = 10.0
_LOOK = 0.25
#: Of many workers with the same trouble, those that are told of.
_TOLD = 3


class Stalled:
    """Watches a batch by its ``counts``; ``tell`` is given a sentence for each thing that is wrong."""

    def __init__(
        self, connection: FleetConnection, counts: Callable[[], Counts | None], tell: Callable[[str], None]
    ) -> None:
        self._connection = connection.impatient()
        self._counts = counts
        self._tell = tell

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Watch until the end of the block."""
        watch = asyncio.create_task(self._watch())
        try:
            yield
        finally:
            await end(watch)

    async def _watch(self) -> None:
        done, since, patience = 0, time.monotonic(), _PATIENCE
        while True:
            await asyncio.sleep(_LOOK)
            counts, now = self._counts(), time.monotonic()
            if counts is None or counts.done != done or not counts.in_flight:
                done, since, patience = counts.done if counts else 0, now, _PATIENCE
            elif now - since >= patience:
                patience *= 2
                with suppress(FleetError):  # that Redis is away is told elsewhere
                    await self._say(now - since)

    async def _say(self, seconds: float) -> None:
        found = (await read_status(self._connection)).hindrances
        for line in found[:_TOLD]:
            self._tell(f"no result for {span(seconds)}: {line}")
        if len(found) > _TOLD:
            self._tell(f"... and {len(found) - _TOLD} more: rollouts status")
