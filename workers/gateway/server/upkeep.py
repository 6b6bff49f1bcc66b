"""What the gateway does while nobody asks: make turns of answers, forget the forgotten, keep the journal small."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from workers.gateway.server.journal import Journal
from workers.gateway.server.recorder import Recorder
from workers.gateway.server.snapshot import snapshots

logger = logging.getLogger(__name__)

_SETTLE_INTERVAL = 0.25
_UPKEEP_INTERVAL = 1.0
#: Seconds that the event loop's queue may take when it has nothing better to do.
_IDLE_LAG = 0.001


async def settle_when_idle(recorder: Recorder) -> None:
    """Make turns of the answers that are kept as they came, whenever the event loop has nothing else to do."""
    loop = asyncio.get_running_loop()
    while True:
        await asyncio.sleep(_SETTLE_INTERVAL)
        while (rollout := next(iter(recorder.unsettled), None)) is not None:
            asked = loop.time()
            await asyncio.sleep(0)
            if loop.time() - asked > _IDLE_LAG:
                break
            rollout.settle_part()


async def keep_tidy(recorder: Recorder, journal: Journal | None) -> None:
    """Forget registrations whose time has come, and compact the journal when it is due."""
    while True:
        await asyncio.sleep(_UPKEEP_INTERVAL)
        if expired := recorder.forget_expired():
            logger.info("forgot %d rollouts that nobody asked anything of: %s", len(expired), expired[:10])
        if journal is not None and journal.is_due:
            await journal.compact(snapshots(recorder))


async def unending(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Begin ``work`` again when it fails by a fault: none of it may stop for one rollout's sake."""
    while True:
        try:
            await work()
        except Exception:
            logger.exception("the gateway's upkeep failed by a fault of its own, and goes on")
        await asyncio.sleep(_UPKEEP_INTERVAL)
