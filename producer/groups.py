"""Many groups, sent through a window: each is handed out once, whole or dropped, in the order in which they end."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import suppress

from producer.connection import CHUNK, FleetConnection, end
from producer.consumer import Consumer
from producer.contract import InvalidRequestError
from producer.errors import BatchCancelledError
from producer.group import Drop, Group, GroupResult, GroupTerms
from producer.ids import new_batch_id, safe_id
from producer.pace import Pace
from producer.results import Recent
from producer.source import Requests, Source


class Groups(AsyncIterator[GroupResult]):
    """The groups of many examples; at most ``max_groups`` of them are open at one time.

    A group's id is made of ``run_id`` and its example's, so that a trainer which is killed and started again with the
    same requests finds what it had submitted. With a ``consumer``, Redis keeps which groups were acknowledged under
    that name, and those are not submitted and delivered again: asking for the next group acknowledges the one before.
    The one that was in hand when the process ended comes again; ``redelivered`` is true until the next is asked for.
    Until then its results stay in Redis, for a trainer that is away for long, and only ``keep_consumed`` seconds after.

    Submitting begins when the first group is asked for. An error of the requests' source, or a `RolloutConflictError`,
    is raised once, from the iteration; iterating on hands out the groups that are open.
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
        pace: Pace | None = None,
    ) -> None:
        if max_groups < 1:
            raise ValueError(f"max_groups is {max_groups}; there must be room for at least one group")
        self.run_id = run_id or new_batch_id("run")
        self.terms = terms
        self._max_groups = max_groups
        self._pace = pace or Pace()
        self.redelivered = False
        self._connection = connection
        self._source = Source(requests)
        self._consumer = Consumer(connection.lasting(), self.run_id, consumer, in_order=False) if consumer else None
        self._in_hand: str | None = None
        self._feeder: asyncio.Task[None] | None = None
        self._cancelled = self._reported = False
        self._open: dict[asyncio.Future[GroupResult], Group] = {}
        self._ended: deque[asyncio.Future[GroupResult]] = deque()  # in this order
        self._handed_out: Group | None = None
        self._kept: list[Group] = []
        self._ids = Recent()
        self._changed = asyncio.Event()
        self._one_at_a_time = asyncio.Lock()
        self._submitting = asyncio.Lock()

    @property
    def open(self) -> list[Group]:
        """The groups that are open now."""
        return list(self._open.values())

    @property
    def max_groups(self) -> int:
        """How many may be open at one time; may be moved at any time, as `Batch.max_in_flight`."""
        return self._max_groups

    @max_groups.setter
    def max_groups(self, count: int) -> None:
        if count < 0:
            raise ValueError(f"max_groups is {count}; 0 pauses the run, and less means nothing")
        self._max_groups = count
        self._changed.set()

    def set_pace(self, *, per_minute: float | None = None, burst: int | None = None) -> None:
        """Submit at another pace from now on, in rollouts and not in groups; see `Pace`."""
        self._pace = Pace(per_minute, burst)
        self._changed.set()

    def __aiter__(self) -> Groups:
        return self

    async def __anext__(self) -> GroupResult:
        async with self._one_at_a_time:
            if self._consumer:
                await self._consumer.acknowledge()
            if self._handed_out is not None:
                await self._handed_out.release()
                self._handed_out = None
            while not self._ended:
                if await self._is_over():
                    await self.aclose()
                    raise StopAsyncIteration
                self._changed.clear()
                await self._changed.wait()
            return await self._hand_out(self._ended[0])

    async def cancel(self) -> None:
        """Submit no more groups, and cancel those that are open, each for good."""
        async with self._submitting:  # never in the middle of a group: its rollouts would escape
            self._cancelled = True
            self._source.close()
            if self._feeder is not None:
                self._feeder.cancel()
        if self._feeder is not None:
            await end(self._feeder)
        await asyncio.gather(*(group.cancel() for group in self.open))
        self._changed.set()

    async def aclose(self) -> None:
        """Stop following; what is in flight goes on."""
        self._source.close()
        if self._feeder is not None:
            await end(self._feeder)
        groups = [*self._open.values(), *self._kept]
        await end(*self._open)
        self._open.clear()
        self._ended.clear()
        await asyncio.gather(*(group.aclose() for group in groups))

    # -- handing out ---------------------------------------------------------------------------------------------------

    async def _is_over(self) -> bool:
        """Return whether nothing more will come; raises once what ended the submitting."""
        if self._feeder is None:
            if self._consumer:
                self._in_hand = (await self._consumer.open()).hand
            self._feeder = asyncio.create_task(self._feed())
            self._feeder.add_done_callback(lambda _: self._changed.set())
        if not self._feeder.done():
            return False
        if not self._reported and not self._feeder.cancelled() and (error := self._feeder.exception()):
            self._reported = True
            raise error
        return not self._open

    async def _hand_out(self, ended: asyncio.Future[GroupResult]) -> GroupResult:
        if error := ended.exception():  # it could not be followed to its end, and will not be
            await self._open[ended].aclose()
            self._leave(ended)
            raise error
        decision = ended.result()
        if self._consumer:
            await self._consumer.hand_out(decision.group_id)
        # Taken off only after the last await: a cancelled caller loses nothing.
        self._handed_out = self._leave(ended)
        self.redelivered = decision.group_id == self._in_hand
        return decision

    def _leave(self, ended: asyncio.Future[GroupResult]) -> Group:
        """Let a group that was handed out come to its end: others of its rollouts may still be cancelled."""
        self._ended.remove(ended)
        self._kept.append(group := self._open.pop(ended))
        group.when_ended(self._forget_ended)  # which keeps this alive until then, for the producer to close
        self._changed.set()
        return group

    def _forget_ended(self) -> None:
        self._kept = [kept for kept in self._kept if not kept.ended]

    # -- the window ----------------------------------------------------------------------------------------------------

    async def _feed(self) -> None:
        while not self._cancelled and (requests := await self._source.take(await self._room())):
            named = [(safe_id(f"{self.run_id}-{request.example_id}"), request) for request in requests]
            taken = await self._consumer.taken([group_id for group_id, _ in named]) if self._consumer else set()
            for group_id, request in named:
                if not self._ids.add(group_id):
                    raise InvalidRequestError(
                        f"example_id {request.example_id!r} comes twice in {self.run_id}; it must differ"
                    )
                async with self._submitting:
                    if group_id not in taken and not self._cancelled:
                        await self._submit(Group(self._connection, request, self.terms, group_id=group_id))

    async def _room(self) -> int:
        """Wait until the window and the pace let some groups be submitted; returns how many."""
        while True:
            room, size = min(CHUNK, self._max_groups - len(self._open)), self.terms.size
            # A group begins as soon as one of its rollouts may: the pace makes up for the others before the next.
            if room > 0 and (free := self._pace.free(room * size)):
                return max(1, free // size)
            self._changed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(self._pace.delay if room > 0 else None):
                    await self._changed.wait()

    async def _submit(self, group: Group) -> None:
        decided: asyncio.Future[GroupResult]
        self._pace.spend(self.terms.size)
        try:
            await group.submitted()
        except BatchCancelledError as error:  # by somebody who knew its id, before it was here
            await group.aclose()
            decided = asyncio.get_running_loop().create_future()
            decided.set_result(GroupResult(group.group_id, group.example_id, (), Drop.CANCELLED, str(error)))
        except BaseException:
            await group.aclose()
            raise
        else:
            decided = asyncio.create_task(group.decided())
        self._open[decided] = group
        decided.add_done_callback(self._end)

    def _end(self, decided: asyncio.Future[GroupResult]) -> None:
        if not decided.cancelled():
            self._ended.append(decided)
            self._changed.set()
