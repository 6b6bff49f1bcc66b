"""A group: the rollouts of one example that are compared with each other, delivered whole or dropped whole."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from enum import StrEnum

from producer.batch import Batch
from producer.connection import CancelAnswer, FleetConnection, end
from producer.contract import RolloutRequest, RolloutResult, StopCondition
from producer.errors import BatchCancelledError, FleetError
from producer.ids import new_batch_id, safe_id
from producer.policy import OVERLOAD, STALE

#: Seconds that closing a group waits for its other rollouts to be cancelled, where Redis is away.
_CANCEL_SECONDS = 5.0


class OnReady(StrEnum):
    """What becomes of a group's other rollouts once enough of them are usable."""

    CANCEL = "cancel"
    KEEP = "keep"


class Drop(StrEnum):
    """Why a group was dropped."""

    FAILED = "failed"  #: too few of its rollouts were usable
    STALE = "stale"  #: it was too old for the policy that is trained
    OVERLOAD = "overload"  #: rollouts of it were cancelled to shed load
    CANCELLED = "cancelled"  #: on request


@dataclass(frozen=True, slots=True)
class GroupResult:
    """How a group ended: whole, with its usable ``results`` as they completed, or dropped, with none of them.

    ``reason`` is a sentence; "" for a group that is whole.
    """

    group_id: str
    example_id: int | str
    results: tuple[RolloutResult, ...] = ()
    dropped: Drop | None = None
    reason: str = ""


Usable = Callable[[RolloutResult], bool]


def is_usable(result: RolloutResult) -> bool:
    """Whether a rollout completed and is not too old: what counts as usable unless the caller says otherwise.

    Where it does not, a group takes also what is too old, as long as the trainer says `OnStale.KEEP`.
    """
    return result.completed and not result.stale


@dataclass(frozen=True, slots=True)
class GroupTerms:
    """When a group is whole.

    It is ready once ``min_usable`` of its ``size`` rollouts (by default all) are ``usable``. Failed ones are replaced,
    at most ``replace_failed`` of them; cancelled and stale ones are not, for the next would be so too. It is dropped as
    soon as it cannot become ready any more, and its other rollouts are cancelled.
    """

    size: int
    min_usable: int | None = None
    replace_failed: int = 0
    on_ready: OnReady = OnReady.CANCEL
    usable: Usable = is_usable

    def __post_init__(self) -> None:
        if self.size < 1 or not 1 <= self.needed <= self.size or self.replace_failed < 0:
            raise ValueError(
                f"size is {self.size}, min_usable {self.min_usable} and replace_failed {self.replace_failed}; a group "
                "has at least one rollout, of which 1 to size are to be usable"
            )

    @property
    def needed(self) -> int:
        """How many usable rollouts make the group whole."""
        return self.size if self.min_usable is None else self.min_usable


class Group(AsyncIterator[RolloutResult]):
    """The rollouts of one example: iterate over it for each as it ends, or take the group at once with `result`.

    Its rollouts are a batch of their own, whose id is the group's, and are named ``GROUP-0``, ``GROUP-1``, ...; so a
    group that is submitted again, also by another process, finds its rollouts. Each open group holds one connection to
    Redis.
    """

    def __init__(
        self, connection: FleetConnection, request: RolloutRequest, terms: GroupTerms, *, group_id: str | None = None
    ) -> None:
        self.group_id = group_id or new_batch_id("group")
        self.terms = terms
        self._request = request
        self._connection = connection
        self._more: asyncio.Queue[int | None] = asyncio.Queue()
        self._members, self._replaced = terms.size, 0
        self._results: list[RolloutResult] = []
        self._usable: list[RolloutResult] = []
        self._delivered = 0
        self._decision: GroupResult | None = None
        self._cancelling: asyncio.Task[object] | None = None
        self._changed = asyncio.Event()
        # One that is delivered makes room for the one that replaces it.
        self.batch = Batch(connection, self._requests(), batch_id=self.group_id, max_in_flight=terms.size, held=True)
        self._pump = asyncio.create_task(self._take())
        self._pump.add_done_callback(lambda _: self._changed.set())

    async def submitted(self) -> None:
        """Wait until all of its rollouts are submitted; raises what went wrong."""
        await self.batch.primed(always=True)

    def __aiter__(self) -> Group:
        return self

    async def __anext__(self) -> RolloutResult:
        await self._until(lambda: self._delivered < len(self._results))
        if self._delivered == len(self._results):
            self._raise_error()
            await self.release()
            raise StopAsyncIteration
        self._delivered += 1
        return self._results[self._delivered - 1]

    @property
    def example_id(self) -> int | str:
        """The example whose rollouts they are."""
        return self._request.example_id

    @property
    def decision(self) -> GroupResult | None:
        """How the group ended, None while that is open."""
        return self._decision

    @property
    def ended(self) -> bool:
        """Whether all of its rollouts have ended."""
        return self._pump.done()

    def when_ended(self, tell: Callable[[], object]) -> None:
        """Have ``tell`` called once all of its rollouts have ended."""
        self._pump.add_done_callback(lambda _: tell())

    async def result(self, timeout: float | None = None) -> GroupResult:
        """Wait until the group is whole or dropped, for at most ``timeout`` seconds; raises TimeoutError.

        It is consumed then, as it is when all of its results were taken one by one: Redis keeps them for the producer's
        ``keep_consumed`` more.
        """
        async with asyncio.timeout(timeout):
            decision = await self.decided()
        await self.release()
        return decision

    async def decided(self) -> GroupResult:
        """Wait until the group is whole or dropped, and leave it to `release` to say that it is consumed."""
        await self._until(lambda: self._decision is not None)
        if self._decision is None:
            self._raise_error()
            raise FleetError(f"group {self.group_id} was closed before it was whole")
        return self._decision

    async def cancel(self) -> dict[str, CancelAnswer]:
        """Cancel all of the group, for good: what is submitted under its id from now on is refused."""
        await self._connection.close_batch(self.group_id)
        self._decide(Drop.CANCELLED, "the group was cancelled")
        return await self.batch.cancel()

    async def release(self) -> None:
        """Say that the group is consumed, and what still comes of it too."""
        await self.batch.release()

    async def aclose(self) -> None:
        """Stop following it; what is in flight goes on, unless nobody needs it any more."""
        try:
            if self._cancelling is not None:  # its rollouts would run for hours, for nobody
                await asyncio.wait({self._cancelling}, timeout=_CANCEL_SECONDS)
        finally:
            self.batch.close()
        await self.batch.aclose()
        await end(self._pump, *([self._cancelling] if self._cancelling else []))

    # -- its rollouts --------------------------------------------------------------------------------------------------

    async def _requests(self) -> AsyncIterator[RolloutRequest]:
        for index in range(self.terms.size):
            yield self._member(index)
        while (next_ := await self._more.get()) is not None:
            yield self._member(next_)

    def _member(self, index: int) -> RolloutRequest:
        update = {
            "rollout_id": safe_id(f"{self.group_id}-{index}"),
            "group_id": self.group_id,
            "batch_id": self.group_id,
            "sample_index": index,
        }
        return self._request.model_copy(update=update)

    async def _take(self) -> None:
        try:
            await self._take_all()
        except BatchCancelledError as error:  # by somebody else, before one was replaced: the others come all the same
            self._decide(Drop.CANCELLED, str(error))
            await self._take_all()
        if self._cancelling is not None:  # of what has ended by now
            await end(self._cancelling)

    async def _take_all(self) -> None:
        async for result in self.batch:
            self._results.append(result)
            self._judge(result)
            self._changed.set()

    async def _until(self, there: Callable[[], bool]) -> None:
        """Wait until something is there, or will never be."""
        while not (there() or self._pump.done()):
            self._changed.clear()
            await self._changed.wait()

    def _judge(self, result: RolloutResult) -> None:
        if self._is_usable(result):
            self._usable.append(result)
        elif self._decision is None and self._may_be_replaced(result):
            self._replaced += 1
            self._members += 1
            self._more.put_nowait(self._members - 1)
        if self._decision is not None:
            return
        missing = self.terms.needed - len(self._usable)
        still_open = self._members - len(self._results)
        if missing <= 0:
            self._decide()
            if self.terms.on_ready is OnReady.CANCEL and still_open:
                self._cancelling = asyncio.create_task(self.batch.cancel(lasting=True))
        elif still_open < missing:
            self._decide(*self._why())
            if still_open:
                self._cancelling = asyncio.create_task(self.batch.cancel(lasting=True))

    def _is_usable(self, result: RolloutResult) -> bool:
        if self.terms.usable is is_usable and self._connection.policy.keeps_stale:
            return result.completed
        return self.terms.usable(result)

    def _is_lost_to_age(self, result: RolloutResult) -> bool:
        # One that is kept and completed can only be lost by the caller's own terms.
        return result.stale and (result.completed or not self._connection.policy.keeps_stale)

    def _may_be_replaced(self, result: RolloutResult) -> bool:
        gone = self._is_lost_to_age(result) or result.stop_condition is StopCondition.CANCELLED
        return not gone and self._replaced < self.terms.replace_failed

    def _decide(self, dropped: Drop | None = None, reason: str = "") -> None:
        if self._decision is None:
            results = () if dropped else tuple(self._usable)
            self._decision = GroupResult(self.group_id, self.example_id, results, dropped, reason)
            self._more.put_nowait(None)
            self._changed.set()

    def _why(self) -> tuple[Drop, str]:
        lost = [result for result in self._results if result not in self._usable]
        reasons = {result.error.reason for result in lost if result.error}
        said = f"only {len(self._usable)} of the {self.terms.needed} rollouts that it needs were usable"
        if any(map(self._is_lost_to_age, lost)) or STALE in reasons:
            return Drop.STALE, f"{said}: it is too old for the policy that is trained now"
        if OVERLOAD in reasons:
            return Drop.OVERLOAD, f"{said}: others were cancelled to shed load"
        failures = [result for result in lost if result.stop_condition is not StopCondition.CANCELLED]
        if not failures:
            return Drop.CANCELLED, f"{said}: others were cancelled"
        last = failures[-1]
        return Drop.FAILED, f"{said}: {last.rollout_id} ended as {last.error or last.stop_condition}"

    def _raise_error(self) -> None:
        if self._pump.done() and not self._pump.cancelled() and (error := self._pump.exception()):
            raise error
