"""Deltas of episodes that still run: what was passed on of each, and the stream by which they come from the workers.

Only what comes without a gap is passed on. The result holds all of them, and what was not passed on goes with it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from producer import broker
from producer.connection import ERRORS, Backoff, FleetConnection
from producer.door.frames import discard
from producer.server import passes

logger = logging.getLogger(__name__)

_BLOCK_MS, _ENTRIES = 5000, 200


@dataclass(frozen=True, slots=True)
class LiveDelta:
    """One delta of one attempt, the ``number``-th, which belongs to ``trace``."""

    rollout_id: str
    attempt: int
    number: int
    trace: str
    data: bytes


@dataclass
class PassedOn:
    """What a client has been sent of one episode before its end.

    ``unsure`` says that an earlier door, or an earlier connection, may have sent it something too.
    """

    attempt: int = 0
    count: int = 0
    traces: set[str] = field(default_factory=set)
    unsure: bool = False

    def take(self, delta: LiveDelta) -> list[bytes]:
        """Return the deltas to send now; none for one that comes too late, or after a gap."""
        if self.unsure or delta.attempt < self.attempt:
            return []
        before: list[bytes] = []
        if delta.attempt > self.attempt:  # the attempt before has died, and its traces with it
            before = [discard(trace) for trace in sorted(self.traces)]
            self.attempt, self.count, self.traces = delta.attempt, 0, set()
        if delta.number != self.count:
            return before
        self.count += 1
        self.traces.add(delta.trace)
        return [*before, delta.data]

    def rest(self, attempt: int, deltas: list[bytes], traces: list[str]) -> list[bytes]:
        """Return the deltas that complete what the client has, for an episode that ``attempt`` has ended."""
        # A trace's id is made anew each time. A Redis that lost its last second counts an attempt twice.
        if attempt == self.attempt and self.traces <= set(traces) and not self.unsure:
            return deltas[self.count :]
        return [*map(discard, sorted(self.traces.union(traces) if self.unsure else self.traces)), *deltas]


async def follow(connection: FleetConnection, batch_id: str, take: Callable[[LiveDelta], Awaitable[None]]) -> None:
    """Hand over deltas as they come, from now on; never returns. Those that come while Redis is away are lost."""
    key, backoff = broker.DELTAS + batch_id, Backoff()
    position: Any = "$"
    while True:
        try:
            streams: Any = await connection.redis.xread({key: position}, count=_ENTRIES, block=_BLOCK_MS)
        except ERRORS as error:
            if not passes(error):
                raise
            logger.info("no deltas for now: %s", error, extra={"stage": "live"})
            await backoff.wait()
            continue
        backoff = Backoff()
        for _, entries in streams or ():
            for position, fields in entries:  # noqa: B007 - where to read on
                delta = _read(fields)
                if delta is not None:
                    await take(delta)
        await asyncio.sleep(0)


def _read(fields: dict[bytes, bytes]) -> LiveDelta | None:
    try:
        rollout_id, attempt = fields[b"a"].decode().split(" ")
        return LiveDelta(rollout_id, int(attempt), int(fields[b"n"]), fields[b"t"].decode(), fields[b"d"])
    except (KeyError, ValueError):
        return None
