"""Results as they complete: a batch's stream of completions, and what Celery's result backend keeps for each."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any

import zstandard
from redis import exceptions as rx

from producer import broker
from producer.connection import ERRORS, Backoff, FleetConnection, Record
from producer.consumer import Consumer
from producer.consumption import TOGETHER, Consumption
from producer.contract import (
    ErrorInfo,
    ErrorKind,
    InvalidRequestError,
    RolloutRequest,
    RolloutResult,
    StopCondition,
)
from producer.policy import cancelled_error
from producer.server import is_refusal, passes, redact

logger = logging.getLogger(__name__)

START = "0"
#: Results fetched by the first MGET; they stay compressed until each one's turn comes.
GROUP = 32
_LARGEST_GROUP, _GROUP_BYTES = 256, 4 * 1024 * 1024
_ENTRIES = 500
_BLOCK_MS = 5000
_QUIET_READS = 6  # blocked reads without an entry after which a follower is told to look for itself
#: Seconds after which a follower looks for itself, also when there is always something to hear: a server that came and
#: went while its connection was idle is not noticed.
_LOOK_EVERY = 300.0
_OFF_LOOP_BYTES = 1024 * 1024


# -- the stream of completions -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Announced:
    """Rollouts that have ended, in order, with the positions of their entries.

    ``missed`` says that more may have been missed: the connection was lost (a Redis that restarts may have lost its
    last second), nothing was heard for half a minute, or it was not said for five. Followers then look the records up.
    """

    entries: tuple[tuple[str, str], ...]
    missed: bool


class Completions:
    """Follows a batch's stream from ``position`` on, through lost connections and restarts of Redis.

    ``position`` is the id of the last entry that was read; a follower that starts there reads on.
    """

    def __init__(self, connection: FleetConnection, batch_id: str, position: str = START) -> None:
        self.batch_id = batch_id
        self.position = position
        self._connection = connection
        self._quiet = 0
        self._looked = time.monotonic()

    async def read(self) -> Announced:
        """Wait for the next entries; raises `FleetUnreachableError` only when Redis refuses the connection."""
        backoff, away = Backoff(), False
        missed = self._is_time_to_look
        while True:
            try:
                if missed:
                    await self._begin_again_if_reset()
                entries = await self._read_once(block=None if missed else _BLOCK_MS)
            except ERRORS as error:
                if is_refusal(error):
                    self._connection.raise_unreachable(error)
                if not passes(error):
                    raise
                if not away:
                    logger.warning(
                        "Redis at %s went away (%s); waiting for it to come back",
                        redact(self._connection.url),
                        error,
                        extra={"stage": "follow", "batch_id": self.batch_id},
                    )
                missed = away = True
                await backoff.wait()
                continue
            self._quiet = 0 if entries or missed else self._quiet + 1
            if missed:
                self._looked = time.monotonic()
            if entries or missed:
                return Announced(entries, missed)
            missed = self._is_time_to_look

    @property
    def _is_time_to_look(self) -> bool:
        return self._quiet >= _QUIET_READS or time.monotonic() - self._looked >= _LOOK_EVERY

    async def _begin_again_if_reset(self) -> None:
        """Go back to the start of a stream that ends before our position: it is another one than we have read.

        Positions are times. Redis lost the stream, or it expired, and the clock of the server that has it now is
        behind: its entries would never be read.
        """
        if self.position == START:
            return
        try:
            about: Any = await self._connection.redis.xinfo_stream(broker.stream_key(self.batch_id))
        except rx.ResponseError:  # it has no stream
            self.position = START
        else:
            # Not its last entry: entries of what was consumed are deleted.
            if _moment(about["last-generated-id"].decode()) < _moment(self.position):
                self.position = START

    async def _read_once(self, block: int | None) -> tuple[tuple[str, str], ...]:
        key = broker.stream_key(self.batch_id)
        reply: Any = await self._connection.redis.xread({key: self.position}, count=_ENTRIES, block=block)
        streams = list(reply.values()) if isinstance(reply, dict) else [entries for _, entries in reply or ()]
        entries = tuple((entry.decode(), fields[b"id"].decode()) for entry, fields in (streams[0] if streams else ()))
        if entries:
            self.position = entries[-1][0]
        return entries


def _moment(position: str) -> tuple[int, int]:
    milliseconds, _, sequence = position.partition("-")
    return int(milliseconds), int(sequence or 0)


async def last_position(connection: FleetConnection, batch_id: str) -> str:
    """Return the position of the stream's last entry."""
    key = broker.stream_key(batch_id)

    async def newest() -> Any:
        return await connection.redis.xrevrange(key, count=1)

    entries = await connection.call(newest)
    return entries[0][0].decode() if entries else START


# -- from what is stored to a result -----------------------------------------------------------------------------------


def next_group(fetched: Sequence[bytes | None]) -> int:
    """Return how many results to fetch after these: many small ones, or few large ones."""
    size = sum(len(raw) for raw in fetched if raw)
    return max(1, min(_LARGEST_GROUP, _GROUP_BYTES * len(fetched) // max(size, 1)))


async def look(connection: FleetConnection, rollout_ids: Sequence[str]) -> tuple[list[bytes | None], set[str]]:
    """Return what is stored for rollouts that were announced, and those without a result whose next end counts.

    These run again: they were retried, or Redis lost how they ended.
    """
    stored = await connection.stored_results(rollout_ids)
    missing = [rollout_id for rollout_id, raw in zip(rollout_ids, stored, strict=True) if raw is None]
    states = await connection.states(missing)
    ended = [rollout_id for rollout_id, state in states.items() if state == broker.JobState.DONE]
    # They may have run again, and ended between the two looks.
    late = dict(zip(ended, await connection.stored_results(ended) if ended else [], strict=True))
    again = {i for i, state in states.items() if state in {broker.JobState.PENDING, broker.JobState.RUNNING}}
    return [raw or late.get(i) for i, raw in zip(rollout_ids, stored, strict=True)], again


async def read_result(
    connection: FleetConnection,
    rollout_id: str,
    raw: bytes | None,
    batch_id: str,
    request: RolloutRequest | None = None,
    *,
    cancelled: bool = False,
) -> RolloutResult:
    """Turn what the result backend keeps (``raw``) into a typed result, whatever it is.

    A rollout without a usable result gets one that says why: cancelled before it ran, its task failed, its result
    expired or cannot be read. ``request`` is used for the identity fields when the record is gone too; then
    ``cancelled`` says that the caller has cancelled the rollout.
    """
    meta: Any
    if raw is None:
        meta = None
    else:
        try:
            meta = await _decode(raw)
        except (zstandard.ZstdError, ValueError) as unreadable:  # an InvalidRequestError is a ValueError
            meta = {"status": "UNREADABLE", "result": {"exc_message": str(unreadable)}}
    if isinstance(meta, RolloutResult):
        return meta
    record = await connection.record(rollout_id)
    cancelled = record.outcome == StopCondition.CANCELLED or (cancelled and meta is None and record.state is None)
    stop, error = _explain(meta, record, cancelled)
    known = request or _request_of(record)
    if known is None:
        return RolloutResult(rollout_id=rollout_id, batch_id=batch_id, stop_condition=stop, error=error)
    return RolloutResult.for_request(known, stop, error=error)


async def _decode(raw: bytes) -> RolloutResult | dict[str, Any]:
    # Trajectories run to megabytes; decoding those on the event loop would stall everything else on it.
    if zstandard.frame_content_size(raw) > _OFF_LOOP_BYTES:
        return await asyncio.to_thread(_decode_now, raw)
    return _decode_now(raw)


def _decode_now(raw: bytes) -> RolloutResult | dict[str, Any]:
    meta = broker.decode_result(raw)
    if not isinstance(meta, dict):
        raise InvalidRequestError(f"the stored value is {type(meta).__name__}, not one of Celery's results")
    return RolloutResult.parse(meta.get("result")) if meta.get("status") == "SUCCESS" else meta


def _explain(meta: dict[str, Any] | None, record: Record, cancelled: bool) -> tuple[StopCondition, ErrorInfo]:
    status = meta.get("status") if meta else None
    if cancelled or status == "REVOKED":
        return StopCondition.CANCELLED, cancelled_error(record.reason)
    if meta is None:
        # The tree has no kind for a result that is gone. A lease error is the nearest: it too says that the fleet lost
        # a rollout, not that the rollout failed, and that running it again can end differently.
        error = ErrorInfo(kind=ErrorKind.LEASE, message=_what_is_missing(record.state), retryable=True)
        return StopCondition.HAS_ERROR, error
    cause = meta.get("result")
    text = _exception_text(cause) if isinstance(cause, dict) else str(cause)
    if status == "UNREADABLE":
        message = f"the stored result cannot be read: {text}"
        return StopCondition.HAS_ERROR, ErrorInfo(kind=ErrorKind.INVALID_REQUEST, message=message)
    message = f"the worker's task ended as {status}: {text}"
    trace = meta.get("traceback")
    error = ErrorInfo(kind=ErrorKind.ENVIRONMENT, message=message, detail=str(trace) if trace else None)
    return StopCondition.HAS_ERROR, error


def _what_is_missing(state: str | None) -> str:
    kept = f"{broker.RESULT_TTL.days} days"
    if state is None:
        return (
            f"Redis has no record of the rollout: it is older than {kept}, was never submitted, or Redis lost its data"
        )
    if state == broker.JobState.DONE:
        return f"the result expired, {kept} after it was stored, or Redis lost it"
    return f"the rollout has no result, and its record says {state}: Redis lost how it ended"


def _exception_text(cause: dict[str, Any]) -> str:
    words = cause.get("exc_message", "")
    text = ", ".join(map(str, words)) if isinstance(words, list | tuple) else str(words)
    return ": ".join(part for part in (str(cause.get("exc_type") or ""), text) if part)


def _request_of(record: Record) -> RolloutRequest | None:
    if record.request is None:
        return None
    with suppress(InvalidRequestError):
        return RolloutRequest.parse(record.request)
    return None


# -- followers ---------------------------------------------------------------------------------------------------------


class Recent:
    """The ids that came last, 100,000 of them, so that one that comes again is noticed.

    That is enough: a rollout is announced once, in the step that ends it, and again only after a Redis that restarted
    has lost its last second. All the ids of an endless batch would fill the memory.
    """

    def __init__(self, limit: int = 100_000) -> None:
        self._limit = limit
        self._ids: OrderedDict[str, None] = OrderedDict()

    def add(self, rollout_id: str) -> bool:
        """Note an id; returns False when it was there."""
        if rollout_id in self._ids:
            return False
        self._ids[rollout_id] = None
        if len(self._ids) > self._limit:
            self._ids.popitem(last=False)
        return True

    def discard(self, rollout_id: str) -> None:
        """Forget an id: it may come again."""
        self._ids.pop(rollout_id, None)


class Results(AsyncIterator[RolloutResult]):
    """The results of a batch as they complete, each once; ends after ``count`` of them, or never.

    ``position`` is the place in the batch's stream just after the last delivered result: a consumer that starts again
    with ``after=position`` misses none. Asking for the next result says that those before it are consumed: Redis keeps
    them for the producer's ``keep_consumed`` more.

    With a ``consumer`` that position is kept in Redis under its name. A process that is killed and started again goes
    on with the results that were not acknowledged, and ``count`` counts what was acknowledged before too. Asking for
    the next result acknowledges the one before; the one that was in hand when the process ended comes again, first, and
    ``redelivered`` is true until the next one is asked for.
    """

    def __init__(
        self,
        connection: FleetConnection,
        batch_id: str,
        *,
        after: str = START,
        count: int | None = None,
        consumer: str | None = None,
    ) -> None:
        self.position = after
        self.redelivered = False
        self._connection = connection = connection.lasting()
        self._completions = Completions(connection, batch_id, after)
        self._left = count
        self._seen = Recent()
        self._announced: deque[tuple[str, str]] = deque()
        self._fetched: deque[tuple[str, str, bytes | None]] = deque()
        self._consumption = Consumption(connection, batch_id)
        self._consumer = Consumer(connection, batch_id, consumer, in_order=True) if consumer else None
        self._in_hand: str | None = None
        self._opened = consumer is None
        self._one_at_a_time = asyncio.Lock()
        self._group = GROUP

    def __aiter__(self) -> Results:
        return self

    async def __anext__(self) -> RolloutResult:
        async with self._one_at_a_time:
            self._consumption.came_back()
            if not self._opened:
                await self._open()
            if self._left is not None and self._left <= 0:
                await self._end()
                raise StopAsyncIteration
            while not self._fetched:
                if self._consumer:
                    await self._consumer.acknowledge()
                await self._fetch()
            position, rollout_id, raw = self._fetched[0]
            result = await read_result(self._connection, rollout_id, raw, self._completions.batch_id)
            if self._consumer:
                await self._consumer.hand_out(rollout_id, position)
            # Take the entry off only after the last await: a cancelled caller loses nothing.
            self._fetched.popleft()
            self._consumption.took(rollout_id)
            self.position = position
            self.redelivered = rollout_id == self._in_hand
            if self._left is not None:
                self._left -= 1
            return self._connection.policy.delivered(result)

    async def aclose(self) -> None:
        """Tell Redis which results are consumed; the last one that was taken is not among them."""
        await self._consumption.end()

    async def _open(self) -> None:
        assert self._consumer  # noqa: S101
        taken = await self._consumer.open()
        self._in_hand = taken.hand
        if taken.position is not None:
            self.position = self._completions.position = taken.position
        if self._left is not None:
            self._left -= taken.delivered
        self._opened = True

    async def _end(self) -> None:
        if self._consumer:
            await self._consumer.acknowledge()
        await self._consumption.end()

    async def _fetch(self) -> None:
        await self._consumption.report(at_least=TOGETHER if self._announced else 1)
        while not self._announced:
            for position, rollout_id in (await self._completions.read()).entries:
                if self._seen.add(rollout_id):
                    self._announced.append((position, rollout_id))
        group = list(islice(self._announced, self._group))
        stored, again = await look(self._connection, [rollout_id for _, rollout_id in group])
        self._group = next_group(stored)
        for (position, rollout_id), raw in zip(group, stored, strict=True):
            self._announced.popleft()
            if rollout_id in again:
                self._seen.discard(rollout_id)
            else:
                self._fetched.append((position, rollout_id, raw))
