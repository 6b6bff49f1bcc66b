"""The producer's connection to Redis: submit, cancel and look up records, each retried through a lost connection.

Everything here may be sent twice without harm: a submitted id that is there already is left alone, and so is a
cancelled one. That is what makes retrying right when a reply was lost.
"""

from __future__ import annotations

import asyncio
import copy
import math
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import redis.asyncio as aioredis
from celery import Celery
from redis import exceptions as rx
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from producer import broker
from producer.contract import RolloutRequest
from producer.errors import BatchCancelledError, FleetFullError, FleetUnreachableError, RolloutConflictError
from producer.heeding import heed_cancellations
from producer.policy import PolicyView, Staled
from producer.queues import QUEUES, queues_in
from producer.server import explained, is_refusal, passes, redact

if TYPE_CHECKING:
    from producer.tracing import Traces

T = TypeVar("T")

#: Rollouts per script call: Redis does nothing else while a script runs, about 10 microseconds a rollout.
CHUNK = 250
_CHUNK_BYTES = 4 * 1024 * 1024
_CALLS_AT_ONCE = 16
_CANCEL_AGAIN = 0.1  # seconds
_FIRST_DELAY, _LAST_DELAY = 0.05, 2.0
#: Entries of a stream that are looked at beyond those of what was consumed, and batches whose position is remembered.
_LOOK_AHEAD, _BATCHES_KNOWN = 64, 1000

#: What submitting raises when it has written nothing.
REJECTED = (RolloutConflictError, BatchCancelledError, FleetFullError)

#: What is to be looked at with `passes`.
ERRORS = (rx.RedisError, OSError)


class Submitted(IntEnum):
    """What submitting found for one rollout."""

    CREATED = 0
    EXISTING = 1
    FINISHED = 2
    CONFLICT = 3
    CLOSED = 4


class CancelAnswer(StrEnum):
    """What cancelling found for one rollout."""

    CANCELLED = "cancelled"  #: it waited, and is cancelled now
    REQUESTED = "requested"  #: it runs; its worker was told
    DONE = "done"  #: it had ended already
    UNKNOWN = "unknown"  #: Redis has no record of it


@dataclass(frozen=True, slots=True)
class Record:
    """What Redis knows of one rollout; ``state`` is None when it has no record."""

    state: str | None
    outcome: str | None
    request: bytes | None = field(repr=False)
    reason: str | None = None


class Chunk:
    """What one call of submit.lua is given: ``requests`` that Redis takes all together or not at all."""

    def __init__(self, ttl: int) -> None:
        self.requests: list[RolloutRequest] = []
        self.keys: list[str] = []
        self.args: list[Any] = [ttl]
        self.size = 0


@dataclass(slots=True)
class Backoff:
    """Doubling delays, in seconds."""

    delay: float = _FIRST_DELAY

    async def wait(self) -> None:
        """Sleep for the present delay and double the next."""
        await asyncio.sleep(self.delay)
        self.delay = min(self.delay * 2, _LAST_DELAY)


async def end(*tasks: asyncio.Future[Any]) -> None:
    """Cancel tasks until they have ended, whatever they end with: a caller's own requests may lose a cancellation."""
    left = {task for task in tasks if not task.done()}
    while left:
        for task in left:
            task.cancel()
        _, left = await asyncio.wait(left, timeout=_CANCEL_AGAIN)
    for task in tasks:  # whose error nobody will ask for; asyncio would complain of that
        if not task.cancelled():
            task.exception()


class FleetConnection:
    """One producer's connection, bound to the event loop in which `open` is called.

    ``patience`` is for how many seconds a call is retried while Redis is away, before it raises
    `FleetUnreachableError`. What is `consumed` lives for ``keep_consumed`` seconds more.
    """

    def __init__(
        self,
        redis_url: str,
        *,
        patience: float = 30.0,
        keep_consumed: float = broker.KEEP_CONSUMED.total_seconds(),
    ) -> None:
        self.url = redis_url
        self.patience = patience
        self.traces: Traces | None = None  #: what is told of each rollout that is submitted
        self.on_queue: Callable[[str], object] = lambda _: None  #: is told its queue
        self._keep_consumed = max(1, int(keep_consumed))
        self._consumed_to: OrderedDict[str, str] = OrderedDict()
        self._ttl = int(broker.RESULT_TTL.total_seconds())
        self._app: Celery | None = None
        self._wakeups: dict[int, broker.WakeUp] = {}
        # Each blocked reader of a stream holds a connection of its own, so only the calls are limited.
        self._slots = asyncio.Semaphore(_CALLS_AT_ONCE)
        try:
            self.redis: aioredis.Redis = aioredis.Redis.from_url(
                redis_url,
                socket_timeout=30,
                socket_connect_timeout=5,
                socket_keepalive=True,
                health_check_interval=25,
                retry=Retry(NoBackoff(), 0),
            )
        except ValueError as error:
            raise FleetUnreachableError(
                f"{redact(redis_url)!r} is not a Redis URL ({error}); set ROLLOUTS_REDIS_URL to one such as "
                "redis://127.0.0.1:6379/0 (or give --redis-url, when it holds no password)"
            ) from None
        heed_cancellations(self.redis)
        self.policy = PolicyView()
        self._submit = self.redis.register_script(broker.script("producer", "submit"))
        self._cancel = self.redis.register_script(broker.script("producer", "cancel"))
        self.deliver = self.redis.register_script(broker.script("producer", "deliver"))
        self._limit = self.redis.register_script(broker.script("producer", "limit"))
        self._stale = self.redis.register_script(broker.script("producer", "stale"))
        self._consume = self.redis.register_script(broker.script("producer", "consume"))

    async def open(self) -> None:
        """Check at once that Redis answers; raises `FleetUnreachableError`."""
        try:
            await self.call(self._ping, patience=0)
        except BaseException:
            await self.close()
            raise

    async def _ping(self) -> None:
        await self.redis.execute_command("PING")  # type: ignore[no-untyped-call]

    async def close(self) -> None:
        """Close the connections."""
        await self.redis.aclose()

    def lasting(self) -> FleetConnection:
        """Return this connection with endless patience, for work that has begun and must outlast any outage."""
        return self._with_patience(math.inf)

    def impatient(self) -> FleetConnection:
        """Return this connection with no patience, for what may as well not be done."""
        return self._with_patience(0)

    def _with_patience(self, patience: float) -> FleetConnection:
        other = copy.copy(self)
        other.patience = patience
        return other

    async def call(self, operation: Callable[[], Awaitable[T]], *, patience: float | None = None) -> T:
        """Run ``operation``, again while Redis is away; raises `FleetUnreachableError` or `FleetFullError`."""
        clock = asyncio.get_running_loop().time
        deadline = clock() + (self.patience if patience is None else patience)
        backoff = Backoff()
        while True:
            try:
                async with self._slots:
                    return await operation()
            except rx.OutOfMemoryError as error:
                raise FleetFullError(
                    f"Redis at {redact(self.url)} has no memory left ({error}); raise its maxmemory, or keep fewer "
                    "rollouts in flight"
                ) from None
            except ERRORS as error:
                if is_refusal(error) or (passes(error) and clock() + backoff.delay > deadline):
                    self.raise_unreachable(error)
                if not passes(error):
                    raise
            await backoff.wait()

    def raise_unreachable(self, error: Exception) -> NoReturn:
        """Raise the error that says which Redis, which setting, and what to do."""
        raise FleetUnreachableError(explained(error, self.url)) from error

    # -- submitting ----------------------------------------------------------------------------------------------------

    async def submit(self, requests: Sequence[RolloutRequest]) -> list[Submitted]:
        """Write records and wake-up messages, chunk by chunk; answers in the order of ``requests``.

        Raises:
            RolloutConflictError: an id has another request already; nothing of its chunk was submitted.
            BatchCancelledError: the batch was cancelled for good; nothing of its chunk was submitted.
            InvalidRequestError: a request exceeds `RolloutRequest.MAX_BYTES`; nothing of its chunk was submitted.
        """
        answers: list[Submitted] = []
        for chunk in self.chunks(requests):
            answers += await self.submit_chunk(chunk)
        return answers

    def chunks(self, requests: Iterable[RolloutRequest]) -> Iterator[Chunk]:
        """Encode requests into what `submit_chunk` takes; raises `InvalidRequestError` for one that is too large."""
        chunk = Chunk(self._ttl)
        for request in requests:
            entry = self._encode(request)
            if chunk.requests and (len(chunk.requests) == CHUNK or chunk.size + len(entry[1]) > _CHUNK_BYTES):
                yield chunk
                chunk = Chunk(self._ttl)
            chunk.keys.append(broker.job_key(request.rollout_id))
            chunk.args += entry
            chunk.requests.append(request)
            chunk.size += len(entry[1])
        if chunk.requests:
            yield chunk

    async def submit_chunk(self, chunk: Chunk) -> list[Submitted]:
        """Submit one chunk, all of it or nothing.

        Nothing was written when this raises one of `REJECTED`; after any other error the chunk may be in
        Redis all the same, for example when only the reply was lost.
        """
        began = time.time()
        codes = await self.call(partial(self._submit, keys=chunk.keys, args=chunk.args))
        found = [Submitted(code) for code in codes]
        pairs = list(zip(chunk.requests, found, strict=True))
        conflicts = [request.rollout_id for request, answer in pairs if answer is Submitted.CONFLICT]
        if conflicts:
            raise RolloutConflictError(conflicts)
        if Submitted.CLOSED in found:
            closed = chunk.requests[found.index(Submitted.CLOSED)].batch_id
            raise BatchCancelledError(f"{closed} was cancelled for good, and takes no more rollouts: use another id")
        if self.traces is not None:
            self.traces.submitted((request for request, answer in pairs if answer is Submitted.CREATED), began)
        return found

    def _encode(self, request: RolloutRequest) -> list[Any]:
        data = request.to_json()
        self.on_queue(request.queue)
        message = self.message(request.rollout_id, request.priority, request.queue)
        identity = [request.rollout_id, data, request.batch_id, request.max_attempts, request.priority]
        return [*identity, message, *broker.record_fields(request)]

    def message(self, rollout_id: str, priority: int, queue: str) -> bytes:
        """Return the message that wakes a worker for a rollout."""
        return self._wakeup(priority).render(rollout_id, queue)

    def _wakeup(self, priority: int) -> broker.WakeUp:
        step = broker.step_of(priority)
        if step not in self._wakeups:
            if self._app is None:
                self._app = Celery("rollouts", set_as_current=False)
                self._app.config_from_object(broker.celery_config(self.url))
            self._wakeups[step] = broker.WakeUp.for_app(self._app, step)
        return self._wakeups[step]

    # -- cancelling and looking up -------------------------------------------------------------------------------------

    async def cancel(self, rollout_ids: Sequence[str], *, reason: str = "") -> dict[str, CancelAnswer]:
        """Cancel rollouts; returns what was found for each. ``reason`` is for where their producer does not want it."""
        answers: dict[str, CancelAnswer] = {}
        for start in range(0, len(rollout_ids), CHUNK):
            ids = rollout_ids[start : start + CHUNK]
            args: list[Any] = [self._ttl, broker.EVENTS_KEPT, reason, *ids]
            found = await self.call(partial(self._cancel, keys=list(map(broker.job_key, ids)), args=args))
            answers |= {i: CancelAnswer(answer.decode()) for i, answer in zip(ids, found, strict=True)}
        return answers

    async def set_policy(self, policy: Sequence[int | str]) -> Staled:
        """Set version, ``max_off_policy_steps`` and ``on_stale``, and deal with all that is stale by them."""
        total, given = Staled(), list(policy)
        while True:
            args: list[Any] = [self._ttl, broker.EVENTS_KEPT, CHUNK, total.left, *given]
            ended, asked, left, seen = map(int, await self.call(partial(self._stale, keys=[broker.POLICY], args=args)))
            total, given = Staled(total.ended + ended, total.asked + asked, total.left + left), []
            if seen < CHUNK:
                return total

    async def close_batch(self, batch_id: str) -> None:
        """Have Redis refuse what is submitted to this batch from now on."""
        key = broker.tombstone_key(batch_id)
        await self.call(lambda: awaitable(self.redis.set(key, 1, ex=self._ttl)))

    async def set_limit(self, place: str, count: int | None) -> None:
        """Set or lift the limit of a place, and wake those for which there is room now."""
        await self.call(partial(self._limit, keys=[broker.LIMITS], args=[place, "" if count is None else count]))

    async def queues(self) -> list[str]:
        """Return the names of the queues of which anything waits or runs, and the default one, which comes first."""
        found = await self.call(lambda: awaitable(self.redis.smembers(QUEUES)))
        return queues_in(found)

    async def states(self, rollout_ids: Sequence[str]) -> dict[str, str | None]:
        """Return each record's state, None where there is no record."""
        states: dict[str, str | None] = {}
        for start in range(0, len(rollout_ids), CHUNK):
            ids = rollout_ids[start : start + CHUNK]
            found = await self.call(partial(self._states, ids))
            states |= {i: state.decode() if state else None for i, state in zip(ids, found, strict=True)}
        return states

    async def _states(self, ids: Sequence[str]) -> list[bytes | None]:
        pipe = self.redis.pipeline(transaction=False)
        for rollout_id in ids:
            pipe.hget(broker.job_key(rollout_id), "state")
        return list(await pipe.execute())

    async def fields(self, rollout_ids: Sequence[str], names: Sequence[str]) -> list[list[bytes | None]]:
        """Return these fields of each record, None for those that it has not."""
        return await self.call(partial(self._fields, rollout_ids, list(names)))

    async def _fields(self, ids: Sequence[str], names: list[str]) -> list[list[bytes | None]]:
        pipe = self.redis.pipeline(transaction=False)
        for rollout_id in ids:
            pipe.hmget(broker.job_key(rollout_id), names)
        return list(await pipe.execute())

    async def record(self, rollout_id: str) -> Record:
        """Return what Redis knows of one rollout."""
        key, names = broker.job_key(rollout_id), ["state", "outcome", "reason", "request"]
        *words, request = await self.call(lambda: awaitable(self.redis.hmget(key, names)))
        state, outcome, reason = (word.decode() if word else None for word in words)
        return Record(state, outcome, request, reason)

    async def stored_results(self, rollout_ids: Sequence[str]) -> list[bytes | None]:
        """Return the results as Celery's backend keeps them, None where there is none; `policy` is that of now."""
        results, policy = await self.call(partial(self._results_and_policy, rollout_ids))
        self.policy.saw(policy)
        return list(results)

    async def _results_and_policy(self, rollout_ids: Sequence[str]) -> list[Any]:
        pipe = self.redis.pipeline(transaction=False)
        pipe.mget([broker.result_key(rollout_id) for rollout_id in rollout_ids])
        pipe.hmget(broker.POLICY, PolicyView.FIELDS)
        return list(await pipe.execute())

    # -- consuming -----------------------------------------------------------------------------------------------------

    async def consumed(self, batch_id: str, rollout_ids: Sequence[str]) -> None:
        """Have Redis drop rollouts whose results were consumed, ``keep_consumed`` seconds from now.

        The batch's stream goes too once all that it announces is consumed. Rollouts that have not ended are left alone.
        """
        stream = broker.stream_key(batch_id)
        for start in range(0, len(rollout_ids), CHUNK):
            ids = rollout_ids[start : start + CHUNK]
            keys = [stream, *(key for i in ids for key in (broker.job_key(i), broker.result_key(i)))]
            position = self._consumed_to.pop(batch_id, "-")
            args: list[Any] = [
                self._keep_consumed,
                position,
                2 * len(ids) + _LOOK_AHEAD,
                broker.job_key(""),
                broker.result_key(""),
            ]
            reply = await self.call(partial(self._consume, keys=keys, args=args))
            self._consumed_to[batch_id] = reply.decode()
            if len(self._consumed_to) > _BATCHES_KNOWN:
                self._consumed_to.popitem(last=False)


def awaitable(reply: Any) -> Awaitable[Any]:
    """Narrow redis-py's ``Awaitable[X] | X``: the asyncio client always returns an awaitable."""
    assert not isinstance(reply, list)  # noqa: S101
    return reply  # type: ignore[no-any-return]
