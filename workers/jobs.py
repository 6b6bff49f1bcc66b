"""The job record: which attempt owns a rollout, until when, and how it ended.

The record in Redis is the truth; a Celery message is only a wake-up call. Every change is one Lua script (``lua/``)
that checks the attempt number and uses Redis's own clock, so a stale attempt cannot write and hosts' clocks do not
matter.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import redis
from celery import Celery

from producer import broker
from producer.contract import FailedAttempt, InvalidRequestError, RolloutRequest, StopCondition
from producer.queues import QUEUE, running_key
from workers import instruments, records
from workers.history import HandBack, history_line, packed, parsed, with_turns
from workers.uptime import Uptime
from workers.wakeups import WakeUps

logger = logging.getLogger(__name__)

#: Brackets in a request of which none can be nested too deeply; orjson writes 254 levels, and a result adds some.
_SHALLOW = 200


@dataclass(frozen=True)
class Claim:
    """A rollout that this worker may run now. ``last`` is set when no further attempt is allowed after this one.

    ``at`` is when it was claimed, in `time.monotonic` seconds; ``submitted_at`` is in Unix seconds, 0 if unknown.
    """

    rollout_id: str
    attempt: int
    last: bool
    batch_id: str
    request: bytes
    #: The gateway that was chosen among those that the request names; "" where it names none or one.
    gateway_url: str = ""
    at: float = field(default_factory=time.monotonic, compare=False)
    submitted_at: float = 0.0

    def parsed(self) -> RolloutRequest:
        """Return the request; raises `InvalidRequestError` for one that no producer of ours can have written.

        It may be whatever somebody wrote into Redis, so its size is looked at before it is read: this is on the loop.
        """
        if len(self.request) > RolloutRequest.MAX_BYTES:
            raise InvalidRequestError(
                f"the request is {len(self.request)} bytes, more than {RolloutRequest.MAX_BYTES}; give large inputs by "
                "reference, and let the environment's setup fetch them"
            )
        request = RolloutRequest.parse(self.request)
        if request.rollout_id != self.rollout_id:
            # It would use, and end, what is another rollout's at the gateway.
            raise InvalidRequestError(f"rollout_id: {request.rollout_id!r}, in the record of another rollout")
        if self.request.count(b"[") + self.request.count(b"{") > _SHALLOW:
            request.to_json()  # refuses what is nested so deeply that its result could not be stored
        if self.gateway_url:
            request = request.model_copy(update={"gateway_url": self.gateway_url, "gateway_urls": ()})
        return request


@dataclass(frozen=True)
class Lapsed:
    """A running rollout whose lease has lapsed."""

    rollout_id: str
    attempt: int
    worker: str
    batch_id: str
    priority: int
    queue: str = QUEUE


class Renewal(StrEnum):
    """What a renewal found."""

    LOST = "lost"
    RENEWED = "renewed"
    CANCELLED = "cancelled"


class Requeue(StrEnum):
    """What became of a rollout that was given back."""

    REQUEUED = "requeued"
    EXHAUSTED = "exhausted"
    CANCELLED = "cancelled"
    STALE = "stale"


#: Order of the answers of renew.lua.
_RENEWALS = (Renewal.LOST, Renewal.RENEWED, Renewal.CANCELLED)
#: The priority in the message of a rollout that waits for a place; into which list it is put, the script decides.
_PARKED = 0
#: Records per script call: a script blocks Redis while it runs, about 2 microseconds a record.
_CHUNK = 500


class JobStore:
    """Claims, renews, commits and requeues records. Thread-safe, synchronous; raises `redis.RedisError`.

    ``lease_ttl`` is in seconds: how long a worker may be silent before its rollouts are run elsewhere. ``gateway_url``
    is where its worker registers what names no gateway: who clears up behind it may have another one. It claims what is
    of the queues that it ``serves``, or of any if there are none.
    """

    def __init__(
        self,
        client: redis.Redis,
        app: Celery,
        *,
        lease_ttl: float,
        gateway_url: str = "",
        serves: Sequence[str] = (),
    ) -> None:
        self.client: Any = client  # redis-py's annotations allow every type that any server may answer
        self.lease_ttl = lease_ttl
        self._gateway_url = gateway_url
        #: Told for how many seconds a rollout that was given back here waits.
        self.on_delay: Callable[[float], object] = lambda _: None
        self._uptime = Uptime(client, tolerance=lease_ttl / 4)
        self._lease_ms = int(lease_ttl * 1000)
        self._record_ttl = int(broker.RESULT_TTL.total_seconds())
        self._serves = f" {' '.join(serves)} " if serves else ""
        self._wakeups = WakeUps(client, app)
        self._claim, self._renew, self._commit, self._requeue = (
            client.register_script(broker.script("workers", name)) for name in ("claim", "renew", "commit", "requeue")
        )
        self._cancel = client.register_script(broker.script("producer", "cancel"))
        self._stale = client.register_script(broker.script("producer", "stale"))

    def claim(self, rollout_id: str, worker: str, offered: RolloutRequest | None = None) -> Claim | str:
        """Take a pending rollout, or say why not, in the words of ``claim.lua``.

        ``offered`` is the request of a message that carries its own; a record is made from it when there is none.
        """
        fields: list[Any] = []
        if offered is not None:
            fields = ["request", offered.to_json(), "batch", offered.batch_id]
            fields += ["max_attempts", offered.max_attempts, "priority", offered.priority]
            more = zip(broker.RECORD_FIELDS, broker.record_fields(offered), strict=True)
            fields += [part for pair in more if pair[1] for part in pair]
        answer = self._claim(
            keys=[broker.job_key(rollout_id)],
            args=[
                *(rollout_id, worker, self._lease_ms, self._record_ttl, self._gateway_url),
                *(self._wakeups.message(rollout_id, _PARKED, None), self._serves, *fields),
            ],
        )
        status = answer[0].decode()
        if status != "claimed":
            return str(status)
        _, attempt, spent, max_attempts, batch, gateway, submitted, request = answer
        instruments.ATTEMPTS.inc()
        last, at = int(spent) >= int(max_attempts), (records.number(submitted, digits=13) or 0) / 1000
        return Claim(rollout_id, int(attempt), last, batch.decode(), request, gateway.decode(), submitted_at=at)

    def renew(self, held: Iterable[tuple[str, int]]) -> dict[str, Renewal]:
        """Renew the leases of ``(rollout id, attempt)`` pairs; returns what was found for each id."""
        found: dict[str, Renewal] = {}
        for chunk in _chunks(list(held)):
            keys = [broker.job_key(rollout_id) for rollout_id, _ in chunk]
            args: list[Any] = [self._lease_ms]
            for rollout_id, attempt in chunk:
                args += [rollout_id, attempt]
            answers = self._renew(keys=keys, args=args)
            found |= {rollout_id: _RENEWALS[code] for (rollout_id, _), code in zip(chunk, answers, strict=True)}
        return found

    def commit(
        self,
        rollout_id: str,
        attempt: int,
        batch_id: str,
        outcome: StopCondition,
        result: bytes,
        *,
        error: str = "",
        lapsed: bool = False,
    ) -> bool:
        """Store the result (encoded as Celery's backend keeps it), end the rollout and announce it, in one step.

        False when another attempt owns it or has ended it, or, with ``lapsed``, when its worker came back: then
        nothing is stored. ``error`` is the kind of the result's error, for the metrics.
        """
        committed = bool(
            self._commit(
                keys=[
                    broker.job_key(rollout_id),
                    broker.stream_key(batch_id),
                    broker.result_key(rollout_id),
                    broker.LEDGER,
                ],
                args=[
                    rollout_id,
                    attempt,
                    outcome.value,
                    self._record_ttl,
                    result,
                    "lapsed" if lapsed else "owned",
                ],
            )
        )
        if committed:
            instruments.FINISHED.labels(outcome, error).inc()
            instruments.RESULT_BYTES.inc(len(result))
        return committed

    def cancel(self, rollout_id: str) -> None:
        """Cancel a rollout as a producer does: end one that waits, ask the worker of one that runs."""
        self._cancel(keys=[broker.job_key(rollout_id)], args=[self._record_ttl, broker.EVENTS_KEPT, "", rollout_id])

    def release(self, request: RolloutRequest, attempt: int, worker: str, how: HandBack) -> Requeue:
        """Give back a rollout that ``worker`` holds, to run again."""
        message = self._wakeups.message(request.rollout_id, request.priority, request.queue)
        return self._give_back(request.rollout_id, attempt, worker, message, how, "owned")

    def requeue_lapsed(self, lapsed: Lapsed, how: HandBack) -> Requeue:
        """Send a rollout whose lease lapsed to the next worker."""
        message = self._wakeups.message(lapsed.rollout_id, lapsed.priority, lapsed.queue)
        return self._give_back(lapsed.rollout_id, lapsed.attempt, lapsed.worker, message, how, "lapsed")

    def _give_back(
        self, rollout_id: str, attempt: int, worker: str, message: bytes, how: HandBack, mode: str
    ) -> Requeue:
        args: list[Any] = [rollout_id, attempt, mode, int(how.counts), int(how.delay * 1000), int(how.front)]
        args += [message, history_line(attempt, worker, how), packed(how.turns)]
        keys = [broker.job_key(rollout_id), broker.LEDGER]
        what = Requeue(self._requeue(keys=keys, args=args).decode())
        if what is Requeue.REQUEUED and how.delay:
            self.on_delay(how.delay)
        return what

    def failed_attempts(self, rollout_id: str) -> list[FailedAttempt]:
        """Return what the record keeps of the attempts that were given back, the first first."""
        key = broker.job_key(rollout_id)
        attempts = parsed(self.client.hget(key, "history") or b"")
        turns = self.client.hmget(key, [f"turns:{attempt.attempt}" for attempt in attempts]) if attempts else []
        return [with_turns(attempt, found) for attempt, found in zip(attempts, turns, strict=True)]

    def lapsed(self, limit: int = 1000) -> list[Lapsed]:
        """Return running rollouts whose lease has lapsed, the longest first."""
        now, named = self.now_ms(), self.queues()
        pipe = self.client.pipeline(transaction=False)
        for queue in named:
            pipe.zrangebyscore(running_key(queue), "-inf", now, start=0, num=limit, withscores=True)
        entries = [(at, i, queue) for queue, some in zip(named, pipe.execute(), strict=True) for i, at in some]
        entries = sorted(entries)[:limit]
        read = records.fields_of(self.client, [i for _, i, _ in entries], "attempt", "worker", "batch", "priority")
        found = []
        for (member, record), (_, _, queue) in zip(read, entries, strict=True):
            rollout_id, attempt = records.id_in(member), records.number(record[0] if record else None)
            if rollout_id is None or attempt is None:  # it expired, or is not one of ours: nothing is left to run
                logger.error("%r has no record that can be read; it is taken off the list of what runs", member)
                self.client.zrem(running_key(queue), member)
                continue
            worker, batch = ((value or b"").decode(errors="replace") for value in record[1:3])
            found.append(Lapsed(rollout_id, attempt, worker, batch, records.priority(record[3]), queue))
        return found

    def wake_delayed(self) -> int:
        """Send the messages of delayed rollouts whose time has come; returns how many."""
        return self._wakeups.wake_delayed(self.now_ms())

    def resend_missing(self, age: float) -> int:
        """Send the messages of rollouts that wait but are in no queue; returns how many.

        A message is lost when its worker dies, or Redis goes away, after it was taken and before the rollout was
        claimed. ``age`` is for how many seconds it must have been missing; a message too many is harmless.
        """
        return self._wakeups.resend_missing(self.now_ms(), age)

    def forget_queues(self) -> int:
        """Forget the queues of which nothing is left; returns how many."""
        return self._wakeups.forget_empty()

    def queues(self) -> list[str]:
        """Return all queues of which anything waits or runs, and the default one."""
        return self._wakeups.queues()

    def request_of(self, rollout_id: str) -> bytes:
        """Return the request in the record, b"" when there is no record."""
        return self.client.hget(broker.job_key(rollout_id), "request") or b""

    def cancel_reason(self, rollout_id: str) -> str | None:
        """Return why a rollout was cancelled; None when its producer wanted it."""
        reason = self.client.hget(broker.job_key(rollout_id), "reason")
        return reason.decode() if reason else None

    def end_stale(self) -> int:
        """End what is too old for the policy that is trained, where nobody has done so yet; returns how many."""
        ended = passed = 0
        while True:
            args = [self._record_ttl, broker.EVENTS_KEPT, _CHUNK, passed]
            found = [int(n) for n in self._stale(keys=[broker.POLICY], args=args)]
            ended, passed = ended + found[0] + found[1], passed + found[2]
            if found[3] < _CHUNK:
                return ended

    def claimed_by(self, rollout_id: str) -> tuple[int, str] | None:
        """Return attempt and worker of a running rollout, None for any other."""
        state, attempt, worker = self.client.hmget(broker.job_key(rollout_id), "state", "attempt", "worker")
        number = records.number(attempt)
        if state != b"running" or number is None:
            return None
        return number, (worker or b"").decode(errors="replace")

    def exists(self, rollout_id: str) -> bool:
        """Return whether there is a record."""
        return bool(self.client.exists(broker.job_key(rollout_id)))

    def now_ms(self) -> int:
        """Return Redis's own clock, in milliseconds."""
        with instruments.REDIS_ROUND_TRIP.time():
            return broker.clock_ms(self.client.time())

    def uptime(self) -> float:
        """Return for how many seconds at least the Redis server has been up."""
        return self._uptime.seconds()

    def take_turn(self, key: str, interval: float) -> bool:
        """Return whether nobody in the fleet took this turn within the last ``interval`` seconds."""
        return bool(self.client.set(key, 1, nx=True, px=max(1, int(interval * 1000))))


def _chunks(pairs: Sequence[tuple[str, int]]) -> Iterable[Sequence[tuple[str, int]]]:
    for start in range(0, len(pairs), _CHUNK):
        yield pairs[start : start + _CHUNK]
