"""The producer for code without an event loop: the same calls, run on a loop in a thread of their own."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Self

from producer.background import BackgroundLoop, Following
from producer.batch import Batch, Counts
from producer.broker import JobState
from producer.client import Producer, RolloutHandle
from producer.connection import CancelAnswer
from producer.contract import RolloutRequest, RolloutResult
from producer.group import Group, GroupResult, GroupTerms, OnReady, Usable, is_usable
from producer.groups import Groups
from producer.pace import Pace
from producer.policy import OnStale, Staled
from producer.results import START, Results
from producer.settings import ProducerSettings
from producer.source import Requests
from producer.watching import RolloutProgress


class SyncProducer:
    """`Producer` without ``await``; a context manager. Works inside a running loop too, for example in a notebook.

    An iterable of requests is iterated in the producer's own thread.
    """

    def __init__(self, settings: ProducerSettings, *, patience: float = 30.0) -> None:
        self.settings = settings
        self._patience = patience
        self._loop: BackgroundLoop | None = None
        self._producer: Producer | None = None

    @classmethod
    def from_settings(cls, settings: ProducerSettings | None = None) -> Self:
        """Return a producer for ``settings``, by default read from the ``ROLLOUTS_*`` variables."""
        return cls(settings or ProducerSettings())

    def __enter__(self) -> Self:
        self._loop = BackgroundLoop()
        try:
            self._producer = self._loop.run(self._open())
        except BaseException:
            self._loop.stop()
            self._loop = None
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop following and disconnect; rollouts in flight go on."""
        loop, producer = self._loop, self._producer
        self._loop = self._producer = None
        if loop is None:
            return
        try:
            if producer is not None:
                loop.run(producer.close())
        finally:
            loop.stop()

    def submit(self, request: RolloutRequest) -> SyncHandle:
        """Submit one rollout; see `Producer.submit`."""
        loop, producer = self._opened()
        return SyncHandle(loop, loop.run(producer.submit(request)))

    def submit_many(
        self,
        requests: Requests,
        *,
        batch_id: str | None = None,
        max_in_flight: int | None = None,
        consumer: str | None = None,
        pace: Pace | None = None,
    ) -> SyncBatch:
        """Submit a batch; see `Producer.submit_many`."""
        loop, producer = self._opened()
        submitting = producer.submit_many(
            requests, batch_id=batch_id, max_in_flight=max_in_flight, consumer=consumer, pace=pace
        )
        return SyncBatch(loop, loop.run(submitting))

    def submit_group(
        self,
        request: RolloutRequest,
        size: int,
        *,
        group_id: str | None = None,
        min_usable: int | None = None,
        replace_failed: int = 0,
        on_ready: OnReady | str = OnReady.CANCEL,
        usable: Usable = is_usable,
    ) -> SyncGroup:
        """Submit the rollouts of one example; see `Producer.submit_group`. ``usable`` is called in another thread."""
        loop, producer = self._opened()
        submitting = producer.submit_group(
            request,
            size,
            group_id=group_id,
            min_usable=min_usable,
            replace_failed=replace_failed,
            on_ready=on_ready,
            usable=usable,
        )
        return SyncGroup(loop, loop.run(submitting))

    def groups(
        self,
        requests: Requests,
        terms: GroupTerms,
        *,
        run_id: str | None = None,
        max_groups: int = 32,
        consumer: str | None = None,
        pace: Pace | None = None,
    ) -> SyncGroups:
        """Submit groups and hand out each as it ends; see `Producer.groups`."""
        loop, producer = self._opened()

        async def follow() -> Groups:
            return producer.groups(requests, terms, run_id=run_id, max_groups=max_groups, consumer=consumer, pace=pace)

        return SyncGroups(loop, loop.run(follow()))

    def set_policy_version(
        self, version: int, *, max_off_policy_steps: int, on_stale: OnStale | str = OnStale.CANCEL
    ) -> Staled:
        """Say which policy version is trained now; see `Producer.set_policy_version`."""
        loop, producer = self._opened()
        return loop.run(
            producer.set_policy_version(version, max_off_policy_steps=max_off_policy_steps, on_stale=on_stale)
        )

    def progress(self, rollout_ids: Sequence[str], *, timeout: float = 5.0) -> dict[str, RolloutProgress]:
        """Ask how far rollouts have come; see `Producer.progress`."""
        loop, producer = self._opened()
        return loop.run(producer.progress(rollout_ids, timeout=timeout))

    def batch_progress(self, batch_id: str, *, timeout: float = 5.0) -> dict[str, RolloutProgress]:
        """Ask how far a batch's unfinished rollouts have come; see `Producer.batch_progress`."""
        loop, producer = self._opened()
        return loop.run(producer.batch_progress(batch_id, timeout=timeout))

    def shed(self, count: int) -> list[str]:
        """Cancel the training rollouts that began last; see `Producer.shed`."""
        loop, producer = self._opened()
        return loop.run(producer.shed(count))

    def cancel_batch(self, batch_id: str) -> dict[str, CancelAnswer]:
        """Cancel a batch or a group for good; see `Producer.cancel_batch`."""
        loop, producer = self._opened()
        return loop.run(producer.cancel_batch(batch_id))

    def set_limit(self, place: str, count: int | None) -> None:
        """Limit how many rollouts run in a place; see `Producer.set_limit`."""
        loop, producer = self._opened()
        loop.run(producer.set_limit(place, count))

    def results(
        self, batch_id: str, *, after: str = START, count: int | None = None, consumer: str | None = None
    ) -> SyncResults:
        """Follow a batch's results; see `Producer.results`."""
        loop, producer = self._opened()

        async def follow() -> Results:
            return producer.results(batch_id, after=after, count=count, consumer=consumer)

        return SyncResults(loop, loop.run(follow()))

    def cancel(self, rollout_ids: Sequence[str]) -> dict[str, CancelAnswer]:
        """Cancel rollouts; see `Producer.cancel`."""
        loop, producer = self._opened()
        return loop.run(producer.cancel(rollout_ids))

    def handle(self, rollout_id: str, batch_id: str = "default") -> SyncHandle:
        """Return the handle of a rollout that was submitted before; see `Producer.handle`."""
        loop, producer = self._opened()
        return SyncHandle(loop, producer.handle(rollout_id, batch_id))

    async def _open(self) -> Producer:
        return await Producer(self.settings, patience=self._patience).__aenter__()

    def _opened(self) -> tuple[BackgroundLoop, Producer]:
        if self._loop is None or self._producer is None:
            raise RuntimeError("the producer is not open; use it as `with SyncProducer.from_settings() as producer:`")
        return self._loop, self._producer


class SyncHandle:
    """`RolloutHandle` without ``await``."""

    def __init__(self, loop: BackgroundLoop, handle: RolloutHandle) -> None:
        self._loop = loop
        self._handle = handle
        self.rollout_id = handle.rollout_id
        self.batch_id = handle.batch_id

    def result(self, timeout: float | None = None) -> RolloutResult:
        """Wait for the result, for at most ``timeout`` seconds; raises TimeoutError, and the rollout goes on."""
        return self._loop.run(self._handle.result(timeout))

    def cancel(self) -> CancelAnswer:
        """Cancel the rollout, and say what was found."""
        return self._loop.run(self._handle.cancel())

    def progress(self, timeout: float = 5.0) -> RolloutProgress:
        """Ask how far the rollout has come; see `Producer.progress`."""
        return self._loop.run(self._handle.progress(timeout))

    def state(self) -> JobState | None:
        """Return where the rollout stands, None when Redis knows nothing of it."""
        return self._loop.run(self._handle.state())


class SyncBatch(Following[RolloutResult]):
    """`Batch` without ``await``: iterate over it for the results, in the order in which they end."""

    def __init__(self, loop: BackgroundLoop, batch: Batch) -> None:
        super().__init__(loop, batch)
        self._batch = batch
        self.batch_id = batch.batch_id

    @property
    def counts(self) -> Counts:
        """How many were submitted, and how those that were delivered ended."""
        return self._batch.counts

    @property
    def redelivered(self) -> bool:
        """Whether the result that came last was in hand when an earlier process of its consumer ended."""
        return self._batch.redelivered

    @property
    def max_in_flight(self) -> int:
        """The window, which may be moved at any time; see `Batch.max_in_flight`."""
        return self._batch.max_in_flight

    @max_in_flight.setter
    def max_in_flight(self, count: int) -> None:
        async def move() -> None:
            self._batch.max_in_flight = count

        self._loop.run(move())

    def set_pace(self, *, per_minute: float | None = None, burst: int | None = None) -> None:
        """Submit at another pace from now on; see `Pace`."""

        async def change() -> None:
            self._batch.set_pace(per_minute=per_minute, burst=burst)

        self._loop.run(change())

    def cancel(self) -> dict[str, CancelAnswer]:
        """Submit no more, and cancel what is in flight; see `Batch.cancel`."""
        return self._loop.run(self._batch.cancel())


class SyncResults(Following[RolloutResult]):
    """`Results` without ``await``."""

    def __init__(self, loop: BackgroundLoop, results: Results) -> None:
        super().__init__(loop, results)
        self._results = results

    @property
    def position(self) -> str:
        """The place in the batch's stream just after the result that came last."""
        return self._results.position

    @property
    def redelivered(self) -> bool:
        """Whether the result that came last was in hand when an earlier process of its consumer ended."""
        return self._results.redelivered


class SyncGroup(Following[RolloutResult]):
    """`Group` without ``await``: iterate over it for each rollout as it ends, or take the group with `result`."""

    def __init__(self, loop: BackgroundLoop, group: Group) -> None:
        super().__init__(loop, group)
        self._group = group
        self.group_id = group.group_id

    @property
    def decision(self) -> GroupResult | None:
        """How the group ended, None while that is open."""
        return self._group.decision

    @property
    def ended(self) -> bool:
        """Whether all of its rollouts have ended."""
        return self._group.ended

    def result(self, timeout: float | None = None) -> GroupResult:
        """Wait until the group is whole or dropped; see `Group.result`."""
        return self._loop.run(self._group.result(timeout))

    def cancel(self) -> dict[str, CancelAnswer]:
        """Cancel all of the group, for good; see `Group.cancel`."""
        return self._loop.run(self._group.cancel())


class SyncGroups(Following[GroupResult]):
    """`Groups` without ``await``: iterate over them for each group as it ends."""

    def __init__(self, loop: BackgroundLoop, groups: Groups) -> None:
        super().__init__(loop, groups)
        self._groups = groups
        self.run_id = groups.run_id

    @property
    def open(self) -> list[SyncGroup]:
        """The groups that are open now."""
        return [SyncGroup(self._loop, group) for group in self._groups.open]

    @property
    def redelivered(self) -> bool:
        """Whether the group that came last was in hand when an earlier process of its consumer ended."""
        return self._groups.redelivered

    @property
    def max_groups(self) -> int:
        """The window, which may be moved at any time; see `Groups.max_groups`."""
        return self._groups.max_groups

    @max_groups.setter
    def max_groups(self, count: int) -> None:
        async def move() -> None:
            self._groups.max_groups = count

        self._loop.run(move())

    def set_pace(self, *, per_minute: float | None = None, burst: int | None = None) -> None:
        """Submit at another pace from now on; see `Groups.set_pace`."""

        async def change() -> None:
            self._groups.set_pace(per_minute=per_minute, burst=burst)

        self._loop.run(change())

    def cancel(self) -> None:
        """Submit no more groups, and cancel those that are open; see `Groups.cancel`."""
        self._loop.run(self._groups.cancel())
