"""The producer: submits rollouts to the fleet and receives their results."""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Self

from producer.batch import Batch
from producer.broker import JobState
from producer.connection import CancelAnswer, FleetConnection
from producer.consumption import forget
from producer.contract import RolloutRequest, RolloutResult
from producer.errors import FleetError
from producer.group import Group, GroupTerms, OnReady, Usable, is_usable
from producer.groups import Groups
from producer.inflight import unfinished, youngest
from producer.pace import Pace
from producer.policy import OVERLOAD, OnStale, Staled
from producer.results import START, Results, look, read_result
from producer.served import Served
from producer.server import require_noeviction
from producer.settings import ProducerSettings
from producer.source import Requests
from producer.waiters import Waiters
from producer.watching import RolloutProgress, progress_of

if TYPE_CHECKING:
    from producer.tracing import Traces

logger = logging.getLogger(__name__)

_GIVE_UP_SECONDS = 5.0


class Producer:
    """Submits rollouts and receives results; an asynchronous context manager bound to one event loop.

    ``patience`` is for how many seconds a call is retried while Redis is away. Iterating over results has no such
    limit: it reads on when Redis is back. ``tell`` is given a sentence where rollouts are submitted and no worker is
    alive or serves their queue: they wait until one comes.

        async with Producer.from_settings() as producer:
            batch = await producer.submit_many(requests)
            async for result in batch:
                ...
    """

    def __init__(
        self, settings: ProducerSettings, *, patience: float = 30.0, tell: Callable[[str], object] = logger.warning
    ) -> None:
        self.settings = settings
        self._tell = tell
        self._patience = patience
        self._connection: FleetConnection | None = None
        self._open: weakref.WeakSet[Batch | Results | Group | Groups] = weakref.WeakSet()
        self._traces: Traces | None = None
        self._waiters: dict[str, Waiters] = {}

    @classmethod
    def from_settings(cls, settings: ProducerSettings | None = None) -> Self:
        """Return a producer for ``settings``, by default read from the ``ROLLOUTS_*`` variables."""
        return cls(settings or ProducerSettings())

    async def __aenter__(self) -> Self:
        traces = _traces() if self.settings.tracing else None
        connection = FleetConnection(
            self.settings.redis_url, patience=self._patience, keep_consumed=self.settings.keep_consumed
        )
        await connection.open()
        await self._check_server(connection)
        connection.traces = self._traces = traces
        self.served = Served(connection, self._tell)
        connection.on_queue = self.served.expect
        self._connection = connection
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _check_server(self, connection: FleetConnection) -> None:
        if self.settings.allow_eviction:
            return
        try:
            await connection.call(partial(require_noeviction, connection.redis, connection.url))
        except BaseException:
            await connection.close()
            raise

    async def close(self) -> None:
        """Stop following and disconnect; rollouts in flight go on, and their results stay in Redis."""
        await asyncio.gather(*(handle.aclose() for handle in list(self._open)))
        for waiters in list(self._waiters.values()):
            await waiters.aclose()
        connection, self._connection = self._connection, None
        if connection is not None:
            await self.served.aclose()
            await asyncio.shield(connection.close())
        if self._traces is not None:
            traces, self._traces = self._traces, None
            await asyncio.to_thread(traces.close)

    @property
    def connection(self) -> FleetConnection:
        """The connection to Redis; raises RuntimeError outside of ``async with``."""
        if self._connection is None:
            raise RuntimeError("the producer is not open; use it as `async with Producer.from_settings() as producer:`")
        return self._connection

    async def submit(self, request: RolloutRequest) -> RolloutHandle:
        """Submit one rollout; submitting the same request again does nothing.

        Raises:
            FleetUnreachableError: Redis stayed away.
            RolloutConflictError: the id was submitted before with another request.
        """
        await self.connection.submit([request])
        return RolloutHandle(self, request.rollout_id, request.batch_id, request)

    async def submit_many(
        self,
        requests: Requests,
        *,
        batch_id: str | None = None,
        max_in_flight: int | None = None,
        consumer: str | None = None,
        pace: Pace | None = None,
    ) -> Batch:
        """Submit a batch from an iterable or an asynchronous one, and return its handle, from which results come.

        Each request gets the batch's id. Returns when all is submitted or ``max_in_flight`` (by default the setting)
        rollouts are in flight; iterating over the batch makes room for the rest. Pass ``max_in_flight=len(requests)``
        to have all of them in Redis at once.

        With a ``batch_id``, requests that have an ``example_id`` and no ``rollout_id`` of their own get one made of the
        batch's id, the example's and ``sample_index``: submitting the same batch again does nothing twice. With a
        ``consumer`` too, results that were acknowledged under that name are not submitted and delivered again, for as
        long as Redis keeps results; see `Batch`.

        ``pace`` bounds how fast rollouts are submitted.

        When it raises, what was submitted of the batch by then is cancelled, unless Redis is away for that too.

        Raises:
            FleetUnreachableError: Redis stayed away.
            RolloutConflictError: an id was submitted before with another request.
            BatchCancelledError: the batch was cancelled for good.
            InvalidRequestError: an id comes twice, a request is too large, or the batch's id is malformed.
        """
        batch = Batch(
            self.connection,
            requests,
            batch_id=batch_id,
            max_in_flight=self.settings.max_in_flight if max_in_flight is None else max_in_flight,
            consumer=consumer,
            pace=pace,
        )
        self._open.add(batch)
        try:
            await batch.primed()
        except BaseException:
            await self._give_up(batch)
            raise
        return batch

    async def _give_up(self, batch: Batch) -> None:
        """Cancel what a batch that failed to start has sent: nobody would have a handle to it."""
        with suppress(FleetError, TimeoutError):
            async with asyncio.timeout(_GIVE_UP_SECONDS):
                await batch.cancel()
        await batch.aclose()

    async def submit_group(
        self,
        request: RolloutRequest,
        size: int,
        *,
        group_id: str | None = None,
        min_usable: int | None = None,
        replace_failed: int = 0,
        on_ready: OnReady | str = OnReady.CANCEL,
        usable: Usable = is_usable,
    ) -> Group:
        """Submit the ``size`` rollouts of one example, and return their handle; see `Group` and `GroupTerms`.

        Raises what `submit_many` does, and `BatchCancelledError` when the group was cancelled before.
        """
        terms = GroupTerms(size, min_usable, replace_failed, OnReady(on_ready), usable)
        group = Group(self.connection, request, terms, group_id=group_id)
        self._open.add(group)
        try:
            await group.submitted()
        except BaseException:
            await self._give_up(group.batch)
            await group.aclose()
            raise
        return group

    def groups(
        self,
        requests: Requests,
        terms: GroupTerms,
        *,
        run_id: str | None = None,
        max_groups: int = 32,
        consumer: str | None = None,
        pace: Pace | None = None,
    ) -> Groups:
        """Submit a group for each request, at most ``max_groups`` at one time, and hand out each as it ends.

        ``pace`` bounds how fast rollouts are submitted. See `Groups` for what a trainer that is started again finds.
        """
        groups = Groups(
            self.connection, requests, terms, run_id=run_id, max_groups=max_groups, consumer=consumer, pace=pace
        )
        self._open.add(groups)
        return groups

    def results(
        self, batch_id: str, *, after: str = START, count: int | None = None, consumer: str | None = None
    ) -> Results:
        """Follow a batch's results as they complete, also those that ended before: each once.

        Starts after the position ``after`` in the batch's stream (`Results.position`), and ends after ``count``
        results, or never. Outlasts lost connections and restarts of Redis. Under the name ``consumer`` it goes on where
        the last process that used it was, without a repeat and without a gap; see `Results`.

        When a restart of Redis loses its last second, results that were lost with it come again when their rollouts
        have run again, and are delivered once. Rollouts whose very submission was lost are unknown here: they never
        come, and ``count`` results may never be reached, unless the `Batch` that submitted them lives on and submits
        them again. Submitting the batch again with the same ids mends that too. When the batch's stream itself was
        lost or expired, the new one is read from its beginning; of results that were delivered before, at least the
        last 100,000 are known and not delivered again.
        """
        results = Results(self.connection, batch_id, after=after, count=count, consumer=consumer)
        self._open.add(results)
        return results

    async def cancel(self, rollout_ids: Sequence[str]) -> dict[str, CancelAnswer]:
        """Cancel rollouts, and say what was found for each. Those that run end a moment later, as cancelled."""
        return await self.connection.cancel(rollout_ids)

    async def set_policy_version(
        self, version: int, *, max_off_policy_steps: int, on_stale: OnStale | str = OnStale.CANCEL
    ) -> Staled:
        """Say which policy version is trained now, to the whole fleet; returns what became of what is too old for it.

        Rollouts that train (`Purpose.TRAIN`) and whose ``policy_version`` is more than ``max_off_policy_steps`` behind
        are stale: see `OnStale`. Those that are cancelled are delivered so, with the error's reason ``stale``. Nothing
        becomes stale by itself: without this call every version is fresh.
        """
        connection, policy = self.connection, [version, max_off_policy_steps, OnStale(on_stale).value]
        if version < 0 or max_off_policy_steps < 0:
            raise ValueError(f"version is {version} and max_off_policy_steps is {max_off_policy_steps}; neither may be")
        staled = await connection.set_policy(policy)
        connection.policy.saw([str(value).encode() for value in policy])
        return staled

    async def progress(self, rollout_ids: Sequence[str], *, timeout: float = 5.0) -> dict[str, RolloutProgress]:
        """Ask how far rollouts have come: state, phase, turns and tokens so far.

        The workers that run them are asked, and they ask their gateways; what is not told within ``timeout`` seconds is
        left out. It costs nothing when nobody asks.
        """
        return await progress_of(self.connection, rollout_ids, timeout=timeout)

    async def batch_progress(self, batch_id: str, *, timeout: float = 5.0) -> dict[str, RolloutProgress]:
        """Ask how far those rollouts of a batch or group have come that have not ended; see `progress`."""
        return await self.progress(await unfinished(self.connection, batch_id), timeout=timeout)

    async def shed(self, count: int) -> list[str]:
        """Cancel the ``count`` training rollouts that began last, to shed load; returns their ids.

        The youngest have the least to lose. They are delivered as cancelled, with the error's reason ``overload``.
        """
        ids = await youngest(self.connection, count)
        await self.connection.cancel(ids, reason=OVERLOAD)
        return ids

    async def cancel_batch(self, batch_id: str) -> dict[str, CancelAnswer]:
        """Cancel a batch or a group for good, whoever submitted it; returns what was found for each of its rollouts.

        From here on nothing more is submitted under that id: `BatchCancelledError` is raised where it is tried.
        """
        await self.connection.close_batch(batch_id)
        answers = await self.connection.cancel(await unfinished(self.connection, batch_id))
        # Once more: one that its worker gave back during the look had left one place and was not yet in the other.
        while found := [i for i in await unfinished(self.connection, batch_id) if i not in answers]:
            answers |= await self.connection.cancel(found)
        return answers

    async def set_limit(self, place: str, count: int | None) -> None:
        """Let at most ``count`` rollouts of the whole fleet run in a place at one time; None lifts the limit.

        A place is ``env:NAME`` (with ``_`` for spaces) or ``gateway:URL``, as requests name it. Rollouts above the
        limit wait without a worker and are woken as places become free: as in the queue, what is of a higher priority
        first, then in the order in which they were submitted, and each fourth place is for the others.
        """
        await self.connection.set_limit(place, count)

    def handle(self, rollout_id: str, batch_id: str = "default") -> RolloutHandle:
        """Return the handle of a rollout that was submitted before, perhaps by another process."""
        return RolloutHandle(self, rollout_id, batch_id)

    async def _result(self, handle: RolloutHandle) -> RolloutResult:
        rollout_id, batch_id, request = handle.rollout_id, handle.batch_id, handle.request
        while True:
            await self._wait(rollout_id, batch_id)
            [raw], again = await look(self.connection, [rollout_id])
            if again:
                continue
            if raw is not None or request is None or handle.cancelled:
                break
            if (await self.connection.states([rollout_id]))[rollout_id] is not None:
                break
            await self.connection.lasting().submit([request])  # Redis has lost it
        result = await read_result(self.connection, rollout_id, raw, batch_id, request, cancelled=handle.cancelled)
        await forget(self.connection, batch_id, [rollout_id])
        return result.model_copy(update={"stale": True}) if self.connection.policy.is_stale(result) else result

    async def _wait(self, rollout_id: str, batch_id: str) -> None:
        waiters = self._waiters.setdefault(batch_id, Waiters(self.connection, batch_id))
        try:
            await waiters.wait(rollout_id)
        finally:
            if waiters.idle and self._waiters.get(batch_id) is waiters:
                del self._waiters[batch_id]


def _traces() -> Traces:
    from producer.tracing import Traces, TracingUnavailableError

    try:
        return Traces("rollouts-producer")
    except TracingUnavailableError as error:
        raise FleetError(str(error)) from None


class RolloutHandle:
    """One submitted rollout."""

    def __init__(
        self, producer: Producer, rollout_id: str, batch_id: str, request: RolloutRequest | None = None
    ) -> None:
        self._producer = producer
        self.rollout_id = rollout_id
        self.batch_id = batch_id
        #: What is submitted again when Redis has lost it: until its result was delivered, or it is cancelled.
        self.request = request
        self.cancelled = False

    async def result(self, timeout: float | None = None) -> RolloutResult:
        """Wait for the result, for at most ``timeout`` seconds; raises TimeoutError, and the rollout goes on.

        It is consumed then: Redis keeps it for the producer's ``keep_consumed`` more. The handle that submitted it
        submits it again when Redis has lost its data.
        """
        try:
            async with asyncio.timeout(timeout) as limit:
                result = await self._producer._result(self)
                self.request = None
                return result
        except TimeoutError:
            if limit.expired():
                raise TimeoutError(f"rollout {self.rollout_id} has not ended after {timeout} s; it goes on") from None
            raise

    async def cancel(self) -> CancelAnswer:
        """Cancel the rollout, and say what was found."""
        self.cancelled = True
        return (await self._producer.cancel([self.rollout_id]))[self.rollout_id]

    async def progress(self, timeout: float = 5.0) -> RolloutProgress:
        """Ask how far the rollout has come; see `Producer.progress`."""
        return (await self._producer.progress([self.rollout_id], timeout=timeout))[self.rollout_id]

    async def state(self) -> JobState | None:
        """Return where the rollout stands, None when Redis knows nothing of it."""
        state = (await self._producer.connection.states([self.rollout_id]))[self.rollout_id]
        return JobState(state) if state else None

    def __repr__(self) -> str:
        return f"<RolloutHandle {self.rollout_id} of {self.batch_id}>"
