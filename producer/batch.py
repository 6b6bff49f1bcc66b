"""A batch: many requests, sent through a window, and their results as they complete."""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import AsyncIterator, Coroutine
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from producer.broker import JobState
from producer.connection import CHUNK, REJECTED, CancelAnswer, Chunk, FleetConnection, Submitted, end
from producer.consumer import Consumer
from producer.consumption import TOGETHER, Consumption
from producer.contract import ID_PATTERN, InvalidRequestError, RolloutRequest, RolloutResult, StopCondition
from producer.errors import RolloutConflictError
from producer.ids import new_batch_id, sample_rollout_id
from producer.pace import Pace
from producer.results import GROUP, Completions, Recent, look, next_group, read_result
from producer.source import Requests, Source
from producer.takeover import as_submitted


@dataclass(frozen=True, slots=True)
class Counts:
    """Where a batch stands; ``failed`` counts errors and agents that ran out of time.

    ``before`` are those that its named consumer had acknowledged in an earlier process: they were not submitted again.
    """

    submitted: int = 0
    completed: int = 0
    failed: int = 0
    cancelled: int = 0
    before: int = 0

    @property
    def done(self) -> int:
        """Rollouts whose result was delivered."""
        return self.completed + self.failed + self.cancelled

    @property
    def in_flight(self) -> int:
        """Rollouts that were submitted and whose result was not delivered yet."""
        return self.submitted - self.done


class Batch(AsyncIterator[RolloutResult]):
    """The rollouts that one job submitted; iterate over it for their results, in the order in which they end.

    At most ``max_in_flight`` of them are submitted and not yet delivered at one time: taking results is what makes room
    for the next requests, so a batch of millions never stands in Redis whole. Several tasks may iterate at once and
    share the results. Errors of the requests' source, and `RolloutConflictError`, are raised once, from the iteration;
    iterating on delivers what is in flight.

    Asking for the next result says that those before it are consumed: Redis keeps them, for this batch to be submitted
    again or its results to be read again, for the producer's ``keep_consumed`` more.

    Without a ``batch_id`` the batch gets a fresh one. With one, a request that has an ``example_id`` and no
    ``rollout_id`` of its own is given ``BATCH-EXAMPLE-SAMPLE`` as its id, so that submitting the batch again, also from
    another process, finds the rollouts of the first time; also under another ``policy_version``: they keep theirs.

    With a ``consumer`` as well, Redis keeps which results were acknowledged under that name: submitted again by a
    process that was killed and restarted, the batch goes on with the others. Asking for the next result acknowledges
    the one before; the one that was in hand when the process ended comes again, and ``redelivered`` is true until the
    next one is asked for.

    ``held`` has Redis keep what is taken as what is not, until `release`: for who passes it on.
    """

    def __init__(
        self,
        connection: FleetConnection,
        requests: Requests,
        *,
        batch_id: str | None = None,
        max_in_flight: int,
        consumer: str | None = None,
        pace: Pace | None = None,
        held: bool = False,
    ) -> None:
        if batch_id is not None and not re.match(ID_PATTERN, batch_id):
            raise InvalidRequestError(f"batch_id: {batch_id!r} does not match {ID_PATTERN}")
        if max_in_flight < 1:
            raise ValueError(f"max_in_flight is {max_in_flight}; a batch needs room for at least one rollout")
        self.batch_id = batch_id or new_batch_id()
        self._may_come_again = batch_id is not None
        self._max_in_flight = max_in_flight
        self._pace = pace or Pace()
        self.redelivered = False
        self._connection = connection
        self._lasting = connection.lasting()
        self._source = Source(requests)
        self._completions = Completions(connection, self.batch_id)
        self._consumption = Consumption(self._lasting, self.batch_id, held=held)
        self._consumer = Consumer(self._lasting, self.batch_id, consumer, in_order=False) if consumer else None
        self._in_hand: str | None = None
        self._group = GROUP
        self._counts = Counts()
        self._taken = Recent()
        #: Everything sent or being sent and not yet announced; `_sent` is the part whose sending is over.
        self._waiting: dict[str, RolloutRequest] = {}
        self._sent: set[str] = set()
        self._announced: deque[RolloutRequest] = deque()
        self._fetched: deque[tuple[RolloutRequest, bytes | None]] = deque()
        self._again: list[str] = []
        self._cancelled = self._closed = self._reported = False
        self._changed = asyncio.Event()
        self._primed = asyncio.Event()
        self._one_at_a_time = asyncio.Lock()
        self._submitting = asyncio.Lock()
        self._feeder = self._spawn(self._feed())
        self._follower = self._spawn(self._follow())

    # -- what callers use ----------------------------------------------------------------------------------------------

    @property
    def counts(self) -> Counts:
        """How many were submitted, and how those that were delivered ended."""
        return self._counts

    @property
    def max_in_flight(self) -> int:
        """How many may be submitted and not yet delivered; may be moved at any time.

        What is in flight stays so when it is lowered: no more are submitted until there is room.
        """
        return self._max_in_flight

    @max_in_flight.setter
    def max_in_flight(self, count: int) -> None:
        if count < 0:
            raise ValueError(f"max_in_flight is {count}; 0 pauses the batch, and less means nothing")
        self._max_in_flight = count
        self._changed.set()

    def set_pace(self, *, per_minute: float | None = None, burst: int | None = None) -> None:
        """Submit at another pace from now on; see `Pace`."""
        self._pace = Pace(per_minute, burst)
        self._changed.set()

    async def primed(self, *, always: bool = False) -> None:
        """Wait until the window is full, the pace holds it up, or everything is submitted; raises what went wrong.

        Returns at once for an asynchronous source, which may take its time, unless ``always``.
        """
        if always or not self._source.is_async:
            full = asyncio.create_task(self._primed.wait())
            try:
                await asyncio.wait({full, self._feeder}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                full.cancel()
        if error := _failure(self._follower) or _failure(self._feeder):
            self._reported = True
            raise error

    def __aiter__(self) -> Batch:
        return self

    async def __anext__(self) -> RolloutResult:
        async with self._one_at_a_time:
            self._consumption.came_back()
            while not self._fetched:
                self._raise_error()
                if self._again:
                    await self._look_again()
                elif self._announced:
                    await self._fetch()
                elif self._closed or (self._feeder.done() and not self._waiting):
                    await self._acknowledge()
                    await self.aclose()
                    raise StopAsyncIteration
                # having waited for it: look again before the event is cleared
                elif not (await self._acknowledge() or await self._consumption.report()):
                    self._changed.clear()
                    await self._changed.wait()
            # Take the entry off only after the last await: a cancelled caller loses nothing.
            request, raw = self._fetched[0]
            result = await read_result(
                self._lasting, request.rollout_id, raw, self.batch_id, request, cancelled=self._cancelled
            )
            if self._consumer:
                await self._consumer.hand_out(request.rollout_id)
            self._fetched.popleft()
            self._consumption.took(request.rollout_id)
            self.redelivered = request.rollout_id == self._in_hand
            result = self._lasting.policy.delivered(result)
            self._count(result)
            return result

    async def _acknowledge(self) -> bool:
        """Acknowledge what the consumer is done with; returns whether Redis was told anything."""
        return self._consumer is not None and await self._consumer.acknowledge()

    async def cancel(self, *, lasting: bool = False) -> dict[str, CancelAnswer]:
        """Submit no more, and cancel what is in flight; returns what was found for each rollout.

        Iterate on for the results: those that had ended, and those that end as cancelled. ``lasting`` waits for a Redis
        that is away as long as iterating does.
        """
        self._cancelled = True
        async with self._submitting:  # never in the middle of a chunk: its rollouts would escape
            self._feeder.cancel()
        await end(self._feeder)
        answers = await (self._lasting if lasting else self._connection).cancel(list(self._waiting))
        for rollout_id, answer in answers.items():
            if answer is not CancelAnswer.REQUESTED:
                self._announce(rollout_id)
        return answers

    async def release(self) -> None:
        """Say that what was ``held`` back is consumed, and that what comes is as soon as it was taken."""
        self._consumption.held = False
        await self._consumption.end()

    def close(self) -> None:
        """Stop submitting and following; what is in flight goes on, and its results stay in Redis."""
        self._closed = True
        self._feeder.cancel()
        self._follower.cancel()
        self._source.close()
        self._changed.set()

    async def aclose(self) -> None:
        """Do what `close` does, and wait until it is done."""
        self.close()
        await end(self._feeder, self._follower)
        await self._consumption.end()

    # -- the window ----------------------------------------------------------------------------------------------------

    @property
    def _held(self) -> int:
        return len(self._waiting) + len(self._announced) + len(self._fetched)

    async def _feed(self) -> None:
        if self._consumer:
            self._in_hand = (await self._consumer.open()).hand
        while True:
            room = await self._room()
            requests = await self._source.take(room)
            if not requests:
                return
            async with self._submitting:
                await self._send([self._named(request) for request in requests])

    async def _room(self) -> int:
        """Wait until the window and the pace let some be submitted; returns how many."""
        while True:
            room = min(CHUNK, self._max_in_flight - self._held)
            if room > 0 and (free := self._pace.free(room)):
                return free
            self._primed.set()
            self._changed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(self._pace.delay if room > 0 else None):
                    await self._changed.wait()

    def _named(self, request: RolloutRequest) -> RolloutRequest:
        """Return the request with the batch's id and, where it shall be found again, a rollout id made of it."""
        update = {"batch_id": self.batch_id}
        given = request.model_fields_set
        if self._may_come_again and "rollout_id" not in given and "example_id" in given:
            update["rollout_id"] = sample_rollout_id(self.batch_id, request.example_id, request.sample_index)
        return request.model_copy(update=update)

    async def _send(self, requests: list[RolloutRequest]) -> None:
        for request in requests:
            if not self._taken.add(request.rollout_id):
                raise InvalidRequestError(
                    f"rollout id {request.rollout_id!r} comes twice in batch {self.batch_id}; ids must differ, and "
                    "samples of one example need a sample_index each"
                )
        if self._consumer:
            taken = await self._consumer.taken([request.rollout_id for request in requests])
            requests = [request for request in requests if request.rollout_id not in taken]
            self._counts = replace(self._counts, before=self._counts.before + len(taken))
        self._pace.spend(len(requests))
        for chunk in self._connection.chunks(requests):
            if self._cancelled:  # `cancel` waits for the chunk before this one
                return
            await self._send_chunk(chunk)

    async def _send_chunk(self, chunk: Chunk) -> None:
        connection = self._lasting if self._counts.submitted else self._connection
        # Before they are sent: a worker may have finished one before the reply to the submission is read.
        self._waiting |= {request.rollout_id: request for request in chunk.requests}
        self._count_submitted(len(chunk.requests))
        try:
            answers = await connection.submit_chunk(chunk)
        except REJECTED as error:
            for request in chunk.requests:
                self._waiting.pop(request.rollout_id, None)
            self._count_submitted(-len(chunk.requests))
            if isinstance(error, RolloutConflictError) and (earlier := await self._as_submitted(chunk, error)):
                for part in connection.chunks(earlier):
                    await self._send_chunk(part)
                return
            raise
        finally:
            # After any other error too, for they may be in Redis: `cancel` must reach them, or their records be found.
            self._sent |= self._waiting.keys() & {request.rollout_id for request in chunk.requests}
        for request, answer in zip(chunk.requests, answers, strict=True):
            if answer is Submitted.FINISHED:  # by an earlier run: its entry in the stream may lie behind us
                self._announce(request.rollout_id)

    async def _as_submitted(self, chunk: Chunk, conflict: RolloutConflictError) -> list[RolloutRequest] | None:
        if not self._may_come_again:
            return None
        return await as_submitted(self._lasting, chunk.requests, conflict.rollout_ids)

    def _count_submitted(self, count: int) -> None:
        self._counts = replace(self._counts, submitted=self._counts.submitted + count)

    # -- completions ---------------------------------------------------------------------------------------------------

    async def _follow(self) -> None:
        while True:
            announced = await self._completions.read()
            for _, rollout_id in announced.entries:
                self._announce(rollout_id)
            if announced.missed:
                await self._look_up()

    def _announce(self, rollout_id: str) -> None:
        request = self._waiting.pop(rollout_id, None)
        if request is not None:  # else: not ours, or announced before
            self._sent.discard(rollout_id)
            self._announced.append(request)
            self._changed.set()

    async def _look_up(self) -> None:
        """Find what the stream did not tell: Redis may have lost the last second before it restarted."""
        for rollout_id, state in (await self._lasting.states(list(self._sent))).items():
            if state == JobState.DONE or (state is None and self._cancelled):
                self._announce(rollout_id)
            elif state is None and rollout_id in self._waiting:
                await self._lasting.submit([self._waiting[rollout_id]])

    async def _fetch(self) -> None:
        await self._consumption.report(at_least=TOGETHER)
        group = list(islice(self._announced, self._group))
        stored, again = await look(self._lasting, [request.rollout_id for request in group])
        self._group = next_group(stored)
        for request, raw in zip(group, stored, strict=True):
            self._announced.popleft()
            if request.rollout_id in again:
                self._waiting[request.rollout_id] = request
                self._sent.add(request.rollout_id)
                self._again.append(request.rollout_id)
            else:
                self._fetched.append((request, raw))

    async def _look_again(self) -> None:
        """Find which of those that run again have ended since: they were announced while nobody waited for them."""
        for rollout_id, state in (await self._lasting.states(self._again)).items():
            if state == JobState.DONE:
                self._announce(rollout_id)
        self._again.clear()

    # -- bookkeeping ---------------------------------------------------------------------------------------------------

    def _count(self, result: RolloutResult) -> None:
        counts = self._counts
        if result.completed:
            counts = replace(counts, completed=counts.completed + 1)
        elif result.stop_condition is StopCondition.CANCELLED:
            counts = replace(counts, cancelled=counts.cancelled + 1)
        else:
            counts = replace(counts, failed=counts.failed + 1)
        self._counts = counts
        self._changed.set()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        task.add_done_callback(lambda _: self._changed.set())
        return task

    def _raise_error(self) -> None:
        if error := _failure(self._follower):
            raise error  # every time: without it nothing more is learnt
        if not self._reported and (error := _failure(self._feeder)):
            self._reported = True
            raise error


def _failure(task: asyncio.Task[None]) -> BaseException | None:
    return task.exception() if task.done() and not task.cancelled() else None
