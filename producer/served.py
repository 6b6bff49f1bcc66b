"""Which queues living workers serve, and a warning to whoever submits to one that none of them does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import orjson

from producer import broker
from producer.connection import FleetConnection, awaitable, end
from producer.errors import FleetError
from producer.queues import QUEUE
from producer.server import redact
from producer.worker_report import serves


class Served:
    """Tells of each queue once, when the first rollout of it is submitted; ``tell`` is given the sentence.

    Workers that come and go later are told by `rollouts status`, and by the alerts.
    """

    def __init__(self, connection: FleetConnection, tell: Callable[[str], object]) -> None:
        self._connection = connection.impatient()
        self._tell = tell
        self._new: set[str] = set()
        self._looked: set[str] = set()
        self._alone = False  # whether it was said that no worker is alive
        self._look: asyncio.Task[None] | None = None

    def expect(self, queue: str) -> None:
        """Note that something is submitted to a queue, and look soon whether it is served."""
        if queue in self._looked:
            return
        self._looked.add(queue)
        self._new.add(queue)
        if self._look is None or self._look.done():
            self._look = asyncio.create_task(self._warn_of_all())

    async def warn(self) -> None:
        """Say that no worker is alive, or which of the queues that were noted since no worker serves."""
        new, self._new = self._new, set()
        try:
            served = await queues_served(self._connection)
        except BaseException:
            self._looked -= new  # it is looked at again, with the next rollout
            raise
        where = redact(self._connection.url)
        if served is None and not self._alone:
            self._alone = True
            self._tell(f"no worker is running on {where}; start one with: rollouts worker (waiting for it)")
        for queue in sorted(new - (served or {QUEUE})):
            start = f"ROLLOUTS_QUEUES={queue} rollouts worker"
            self._tell(f"no worker on {where} serves queue {queue}; start one with: {start} (waiting for it)")

    async def _warn_of_all(self) -> None:
        while self._new:
            with suppress(FleetError):  # submitting itself tells that Redis is away
                await self.warn()

    async def aclose(self) -> None:
        """Look no more."""
        if self._look is not None:
            await end(self._look)


async def queues_served(connection: FleetConnection) -> set[str] | None:
    """Return the queues that living workers serve; None when there is no living worker."""

    async def read() -> set[str] | None:
        now = broker.clock_ms(await connection.redis.time())
        alive: Any = await connection.redis.zrangebyscore(broker.WORKERS, f"({now}", "+inf")
        workers = await read_reports(connection, [name.decode() for name in alive])
        return {queue for worker in workers for queue in serves(worker)} if workers else None

    return await connection.call(read)


async def read_reports(connection: FleetConnection, names: Sequence[str]) -> list[dict[str, Any]]:
    """Return what workers have told of themselves; of one that told nothing, or nothing that can be read, its name."""
    found: Any = await awaitable(connection.redis.mget([broker.worker_key(name) for name in names])) if names else []
    return [_report(name, report) for name, report in zip(names, found, strict=True)]


def _report(name: str, report: bytes | None) -> dict[str, Any]:
    try:
        found = orjson.loads(report or b"{}")
    except orjson.JSONDecodeError:
        found = {}
    return (found if isinstance(found, dict) else {}) | {"name": name}
