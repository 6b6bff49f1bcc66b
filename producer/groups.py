"""Many groups, sent through a window: each is handed out once, whole or dropped, in the order in which they end."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator

from producer.connection import CHUNK, FleetConnection, end
from producer.consumer import Consumer
from producer.contract import InvalidRequestError, RolloutRequest
from producer.group import Group, GroupResult, GroupTerms
from producer.ids import new_batch_id, safe_id
from producer.results import Recent
from producer.source import Requests, Source


class Groups(AsyncIterator[GroupResult]):
    """The groups of many examples; at most ``max_groups`` of them are open at one time.

    A group's id is made of ``run_id`` and its example's, so that a trainer which is killed and started again with the
    same requests finds what it had submitted. With a ``consumer``, Redis keeps which groups were acknowledged under
    that name, and those are not submitted and delivered again: asking for the next group acknowledges the one before.
    The one that was in hand when the process ended comes again; ``redelivered`` is true until the next is asked for.
    """

    def __init__(
        self,
        connection: FleetConnection,
        requests: Requests,
        terms: GroupTerms,
        *,
        run_id: str | None = None,
        max_groups: int,
        consumer: str | None = None,
    ) -> None:
        if max_groups < 1:
            raise ValueError(f"max_groups is {max_groups}; there must be room for at least one group")
        self.run_id = run_id or new_batch_id("run")
        self.terms = terms
        self.max_groups = max_groups
        self.redelivered = False
        self._connection = connection
        self._source = Source(requests)
        self._consumer = Consumer(connection.lasting(), self.run_id, consumer, in_order=False) if consumer else None
        self._opened = consumer is None
        self._in_hand: str | None = None
        self._exhausted = False
        self._open: dict[asyncio.Task[GroupResult], Group] = {}
        self._ended: deque[asyncio.Task[GroupResult]] = deque()  # in this order
        self._kept: list[Group] = []
        self._ids = Recent()
        self._one_at_a_time = asyncio.Lock()

    @property
    def open(self) -> list[Group]:
        """The groups that are open now."""
        return list(self._open.values())

    def __aiter__(self) -> Groups:
        return self

    async def __anext__(self) -> GroupResult:
        async with self._one_at_a_time:
            if self._consumer:
                await self._acknowledge(self._consumer)
            while True:
                await self._fill()
                if not self._open:
                    await self.aclose()
                    raise StopAsyncIteration
                if not self._ended:
                    await asyncio.wait(self._open, return_when=asyncio.FIRST_COMPLETED)
                    continue
                decision = self._ended[0].result()
                if self._consumer:
                    await self._consumer.hand_out(decision.group_id)
                self._leave(self._open.pop(self._ended.popleft()))
                self.redelivered = decision.group_id == self._in_hand
                return decision

    async def cancel(self) -> None:
        """Submit no more groups, and cancel those that are open, each for good."""
        self._exhausted = True
        await asyncio.gather(*(group.cancel() for group in self.open))

    async def aclose(self) -> None:
        """Stop following; what is in flight goes on."""
        self._source.close()
        groups = [*self._open.values(), *self._kept]
        await end(*self._open)
        self._open.clear()
        for group in groups:
            await group.aclose()

    async def _acknowledge(self, consumer: Consumer) -> None:
        if not self._opened:
            self._in_hand = (await consumer.open()).hand
            self._opened = True
        await consumer.acknowledge()

    async def _fill(self) -> None:
        while not self._exhausted and len(self._open) < self.max_groups:
            requests = await self._source.take(min(CHUNK, self.max_groups - len(self._open)))
            self._exhausted = not requests
            named = {self._id_of(request): request for request in requests}
            taken = await self._consumer.taken(list(named)) if self._consumer else set()
            for group_id, request in named.items():
                if group_id not in taken:
                    await self._submit(group_id, request)

    def _id_of(self, request: RolloutRequest) -> str:
        group_id = safe_id(f"{self.run_id}-{request.example_id}")
        if not self._ids.add(group_id):
            raise InvalidRequestError(f"example_id {request.example_id!r} comes twice in {self.run_id}; it must differ")
        return group_id

    async def _submit(self, group_id: str, request: RolloutRequest) -> None:
        group = Group(self._connection, request, self.terms, group_id=group_id)
        try:
            await group.submitted()
        except BaseException:
            await group.aclose()
            raise
        decided = asyncio.create_task(group.result())
        decided.add_done_callback(self._ended.append)
        self._open[decided] = group

    def _leave(self, group: Group) -> None:
        """Let a group that was handed out come to its end: others of its rollouts may still be cancelled."""
        self._kept = [kept for kept in self._kept if not kept.ended]
        self._kept.append(group)
