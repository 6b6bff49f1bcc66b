"""The producer for code without an event loop: the same calls, run on a loop in a thread of their own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Self, TypeVar

from producer.batch import Batch, Counts
from producer.broker import JobState
from producer.client import Producer, RolloutHandle
from producer.connection import CancelAnswer, end
from producer.contract import RolloutRequest, RolloutResult
from producer.group import Group, GroupResult, GroupTerms, OnReady, Usable, is_usable
from producer.pace import Pace
from producer.policy import OnStale, Staled
from producer.results import START
from producer.settings import ProducerSettings
from producer.source import Requests
from producer.watching import RolloutProgress

T = TypeVar("T")


class _Loop:
    """An event loop in a daemon thread; usable from any thread, also from inside another running loop."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rollouts-producer", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        future: Future[T] = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # a Ctrl-C in the caller's thread ends the work too
            raise

    def stop(self) -> None:
        self.run(self._end_tasks())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    @staticmethod
    async def _end_tasks() -> None:
        await end(*(task for task in asyncio.all_tasks() if task is not asyncio.current_task()))
        await asyncio.get_running_loop().shutdown_default_executor()


class SyncProducer:
    """`Producer` without ``await``; a context manager. Works inside a running loop too, for example in a notebook.

    An iterable of requests is iterated in the producer's own thread.
    """

    def __init__(self, settings: ProducerSettings, *, patience: float = 30.0) -> None:
        self.settings = settings
        self._patience = patience
        self._loop: _Loop | None = None
        self._producer: Producer | None = None

    @classmethod
    def from_settings(cls, settings: ProducerSettings | None = None) -> Self:
        """Return a producer for ``settings``, by default read from the ``ROLLOUTS_*`` variables."""
        return cls(settings or ProducerSettings())

    def __enter__(self) -> Self:
        self._loop = _Loop()
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
    ) -> Iterator[GroupResult]:
        """Submit groups and hand out each as it ends; see `Producer.groups`."""
        loop, producer = self._opened()

        async def follow() -> AsyncIterator[GroupResult]:
            return producer.groups(requests, terms, run_id=run_id, max_groups=max_groups, consumer=consumer)

        return _iterate(loop, loop.run(follow()))

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
    ) -> Iterator[RolloutResult]:
        """Follow a batch's results; see `Producer.results`."""
        loop, producer = self._opened()

        async def follow() -> AsyncIterator[RolloutResult]:
            return producer.results(batch_id, after=after, count=count, consumer=consumer)

        return _iterate(loop, loop.run(follow()))

    def cancel(self, rollout_ids: Sequence[str]) -> dict[str, CancelAnswer]:
        """Cancel rollouts; see `Producer.cancel`."""
        loop, producer = self._opened()
        return loop.run(producer.cancel(rollout_ids))

    async def _open(self) -> Producer:
        return await Producer(self.settings, patience=self._patience).__aenter__()

    def _opened(self) -> tuple[_Loop, Producer]:
        if self._loop is None or self._producer is None:
            raise RuntimeError("the producer is not open; use it as `with SyncProducer.from_settings() as producer:`")
        return self._loop, self._producer


class SyncHandle:
    """`RolloutHandle` without ``await``."""

    def __init__(self, loop: _Loop, handle: RolloutHandle) -> None:
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


class SyncBatch(Iterator[RolloutResult]):
    """`Batch` without ``await``: iterate over it for the results, in the order in which they end."""

    def __init__(self, loop: _Loop, batch: Batch) -> None:
        self._loop = loop
        self._batch = batch
        self._results = _iterate(loop, batch)
        self.batch_id = batch.batch_id

    @property
    def counts(self) -> Counts:
        """How many were submitted, and how those that were delivered ended."""
        return self._batch.counts

    def __next__(self) -> RolloutResult:
        return next(self._results)

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


class SyncGroup(Iterator[RolloutResult]):
    """`Group` without ``await``: iterate over it for each rollout as it ends, or take the group with `result`."""

    def __init__(self, loop: _Loop, group: Group) -> None:
        self._loop = loop
        self._group = group
        self._results = _iterate(loop, group)
        self.group_id = group.group_id

    def __next__(self) -> RolloutResult:
        return next(self._results)

    def result(self, timeout: float | None = None) -> GroupResult:
        """Wait until the group is whole or dropped; see `Group.result`."""
        return self._loop.run(self._group.result(timeout))

    def cancel(self) -> dict[str, CancelAnswer]:
        """Cancel all of the group, for good; see `Group.cancel`."""
        return self._loop.run(self._group.cancel())


def _iterate(loop: _Loop, results: AsyncIterator[T]) -> Iterator[T]:
    async def following() -> T | None:
        return await anext(results, None)

    while (result := loop.run(following())) is not None:
        yield result
