"""What a consumer is done with: Redis is told, so that it need not keep every result for days."""

from __future__ import annotations

import logging

from producer.connection import FleetConnection
from producer.errors import FleetError

logger = logging.getLogger(__name__)

#: Results that are reported together, so that it costs a small part of what reading them does.
TOGETHER = 128


class Consumption:
    """Notes which of a batch's results their consumer is done with: those that came before the last one it took.

    A consumer that ends while it handles a result finds that one for as long as one that was never delivered. While it
    is ``held`` Redis is told nothing: who takes the results passes them on later, or never.
    """

    def __init__(self, connection: FleetConnection, batch_id: str, *, held: bool = False) -> None:
        self.held = held
        self._connection = connection
        self._batch_id = batch_id
        self._taken: str | None = None
        self._done: list[str] = []

    def came_back(self) -> None:
        """Note that the consumer asks for more: it is done with what it took."""
        if self._taken is not None:
            self._done.append(self._taken)
            self._taken = None

    def took(self, rollout_id: str) -> None:
        """Note that the consumer is given this one."""
        self.came_back()
        self._taken = rollout_id

    async def report(self, at_least: int = 1) -> bool:
        """Tell Redis when there are ``at_least`` so many, waiting for it as long as the connection does.

        Returns whether there were; when there were not, nothing was awaited.
        """
        if self.held or len(self._done) < at_least:
            return False
        done, self._done = self._done, []
        try:
            await self._connection.consumed(self._batch_id, done)
        except BaseException:
            self._done = done + self._done
            raise
        return True

    async def end(self) -> None:
        """Tell Redis of what is left; where it does not answer at once, that is kept for days instead."""
        if self.held or not self._done:
            return
        done, self._done = self._done, []
        await forget(self._connection, self._batch_id, done)


async def forget(connection: FleetConnection, batch_id: str, rollout_ids: list[str]) -> None:
    """Tell Redis that these are consumed; failing to is no error."""
    try:
        await connection.impatient().consumed(batch_id, rollout_ids)
    except FleetError as error:
        logger.info("%d consumed rollouts are kept in Redis: %s", len(rollout_ids), error, extra={"batch_id": batch_id})
