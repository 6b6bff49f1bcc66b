"""Lets callers wait for single rollouts, over one connection for all those of a batch."""

from __future__ import annotations

import asyncio

from producer import broker
from producer.connection import FleetConnection, end
from producer.errors import FleetError
from producer.results import Completions, last_position


class Waiters:
    """Lets any number of callers wait for single rollouts of one batch, over one connection."""

    def __init__(self, connection: FleetConnection, batch_id: str) -> None:
        self._connection = connection.lasting()
        self._batch_id = batch_id
        self._futures: dict[str, asyncio.Future[None]] = {}
        self._counts: dict[str, int] = {}
        self._follower: asyncio.Task[None] | None = None
        self._starting = asyncio.Lock()

    async def wait(self, rollout_id: str) -> None:
        """Return once the rollout has ended, or when Redis knows nothing of it."""
        future = self._futures.setdefault(rollout_id, asyncio.get_running_loop().create_future())
        self._counts[rollout_id] = self._counts.get(rollout_id, 0) + 1
        try:
            await self._follow()
            # Looked up only now: what ended before the follower's first position shows in the record.
            await self._settle([rollout_id])
            await asyncio.shield(future)
        finally:
            self._counts[rollout_id] -= 1
            if not self._counts[rollout_id]:
                del self._counts[rollout_id], self._futures[rollout_id]
            if not self._futures:
                await self._stop_following()

    @property
    def idle(self) -> bool:
        """Whether nobody waits."""
        return not self._futures

    async def aclose(self) -> None:
        """Stop following; callers that still wait get a `FleetError`."""
        self._fail(FleetError(f"the producer was closed while rollouts of batch {self._batch_id} were waited for"))
        await self._stop_following()

    async def _stop_following(self) -> None:
        # Taken off before anything is awaited: whoever begins to wait meanwhile gets a follower of its own.
        follower, self._follower = self._follower, None
        if follower is not None:
            await asyncio.shield(end(follower))

    async def _follow(self) -> None:
        async with self._starting:
            if self._follower is None or self._follower.done():
                position = await last_position(self._connection, self._batch_id)
                completions = Completions(self._connection, self._batch_id, position)
                self._follower = asyncio.create_task(self._announce(completions))

    async def _announce(self, completions: Completions) -> None:
        try:
            while True:
                announced = await completions.read()
                for _, rollout_id in announced.entries:
                    self._resolve(rollout_id)
                if announced.missed:
                    await self._settle(list(self._futures))
        except Exception as error:  # noqa: BLE001 - raised by those who wait: they would else wait for ever
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        for future in self._futures.values():
            if not future.done():
                future.set_exception(error)

    async def _settle(self, rollout_ids: list[str]) -> None:
        for rollout_id, state in (await self._connection.states(rollout_ids)).items():
            if state in (None, broker.JobState.DONE):
                self._resolve(rollout_id)

    def _resolve(self, rollout_id: str) -> None:
        future = self._futures.get(rollout_id)
        if future and not future.done():
            future.set_result(None)
