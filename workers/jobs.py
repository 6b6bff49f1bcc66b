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

import orjson
import redis
from celery import Celery

from producer import broker
from producer.contract import FailedAttempt, InvalidRequestError, RolloutRequest, StopCondition
from workers import instruments
from workers.history import HandBack, history_line, packed, parsed, with_turns
from workers.uptime import Uptime

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
    is where its worker registers what names no gateway: who clears up behind it may have another one.
    """

    def __init__(self, client: redis.Redis, app: Celery, *, lease_ttl: float, gateway_url: str = "") -> None:
        self.client: Any = client  # redis-py's annotations allow every type that any server may answer
        self.lease_ttl = lease_ttl
        self._gateway_url = gateway_url
        #: Told for how many seconds a rollout that was given back here waits.
        self.on_delay: Callable[[float], object] = lambda _: None
        self._uptime = Uptime(client, tolerance=lease_ttl / 4)
        self._lease_ms = int(lease_ttl * 1000)
        self._record_ttl = int(broker.RESULT_TTL.total_seconds())
        self._messages = {step: broker.WakeUp.for_app(app, step) for step in broker.PRIORITY_STEPS}
        self._claim, self._renew, self._commit, self._requeue, self._wake = (
            client.register_script(broker.script("workers", name))
            for name in ("claim", "renew", "commit", "requeue", "wake")
        )
        self._cancel = client.register_script(broker.script("producer", "cancel"))
        self._stale = client.register_script(broker.script("producer", "stale"))

    def claim(self, rollout_id: str, worker: str, offered: RolloutRequest | None = None) -> Claim | str:
        """Take a pending rollout, or say why not: ``running``, ``done`` or ``unknown``, ``stale`` or ``parked``.

        ``offered`` is the request of a message that carries its own; a record is made from it when there is none.
        """
        fields: list[Any] = []
        if offered is not None:
            fields = ["request", offered.to_json(), "batch", offered.batch_id]
            fields += ["max_attempts", offered.max_attempts, "priority", offered.priority]
            more = zip(("policy", "places", "gateways", "shares"), broker.record_fields(offered), strict=True)
            fields += [part for pair in more if pair[1] for part in pair]
        answer = self._claim(
            keys=[broker.job_key(rollout_id), broker.PENDING, broker.RUNNING, broker.DELAYED],
            args=[
                *(rollout_id, worker, self._lease_ms, self._record_ttl, self._gateway_url),
                *(self._message(rollout_id, _PARKED), *fields),
            ],
        )
        status = answer[0].decode()
        if status != "claimed":
            return str(status)
        _, attempt, spent, max_attempts, batch, gateway, submitted, request = answer
        instruments.ATTEMPTS.inc()
        last, at = int(spent) >= int(max_attempts), (_number(submitted, digits=13) or 0) / 1000
        return Claim(rollout_id, int(attempt), last, batch.decode(), request, gateway.decode(), submitted_at=at)

    def renew(self, held: Iterable[tuple[str, int]]) -> dict[str, Renewal]:
        """Renew the leases of ``(rollout id, attempt)`` pairs; returns what was found for each id."""
        found: dict[str, Renewal] = {}
        for chunk in _chunks(list(held)):
            keys: list[Any] = [broker.RUNNING, *(broker.job_key(rollout_id) for rollout_id, _ in chunk)]
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
                    broker.RUNNING,
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
        keys = [broker.PENDING, broker.DELAYED, broker.CANCELS, broker.job_key(rollout_id)]
        self._cancel(keys=keys, args=[self._record_ttl, broker.EVENTS_KEPT, "", rollout_id])

    def release(self, request: RolloutRequest, attempt: int, worker: str, how: HandBack) -> Requeue:
        """Give back a rollout that ``worker`` holds, to run again."""
        return self._give_back(request.rollout_id, attempt, worker, request.priority, how, "owned")

    def requeue_lapsed(self, lapsed: Lapsed, how: HandBack) -> Requeue:
        """Send a rollout whose lease lapsed to the next worker."""
        return self._give_back(lapsed.rollout_id, lapsed.attempt, lapsed.worker, lapsed.priority, how, "lapsed")

    def _give_back(
        self, rollout_id: str, attempt: int, worker: str, priority: int, how: HandBack, mode: str
    ) -> Requeue:
        queue = broker.queue_key(priority)
        keys = [broker.job_key(rollout_id), broker.RUNNING, broker.PENDING, broker.DELAYED, queue, broker.LEDGER]
        args: list[Any] = [rollout_id, attempt, mode, int(how.counts), int(how.delay * 1000), int(how.front)]
        args += [self._message(rollout_id, priority), history_line(attempt, worker, how)]
        args += [broker.pending_base(priority), packed(how.turns)]
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
        members = self.client.zrangebyscore(broker.RUNNING, "-inf", self.now_ms(), start=0, num=limit)
        found = []
        for member, record in self._records(members, "attempt", "worker", "batch", "priority"):
            rollout_id, attempt = _id_in(member), _number(record[0] if record else None)
            if rollout_id is None or attempt is None:  # it expired, or is not one of ours: nothing is left to run
                logger.error("%r has no record that can be read; it is taken off the list of what runs", member)
                self.client.zrem(broker.RUNNING, member)
                continue
            worker, batch = ((value or b"").decode(errors="replace") for value in record[1:3])
            found.append(Lapsed(rollout_id, attempt, worker, batch, _priority(record[3])))
        return found

    def _records(self, members: Sequence[bytes], *fields: str) -> list[tuple[bytes, list[bytes | None]]]:
        """Return the members of a set, each with fields of its record; with no field where that is no record."""
        pipe = self.client.pipeline(transaction=False)
        for member in members:
            pipe.hmget(broker.job_key(member.decode(errors="replace")), *fields)
        found = []
        for member, record in zip(members, pipe.execute(raise_on_error=False), strict=True):
            if isinstance(record, Exception) and "WRONGTYPE" not in str(record):
                raise record
            found.append((member, [] if isinstance(record, Exception) else record))
        return found

    def wake_delayed(self) -> int:
        """Send the messages of delayed rollouts whose time has come; returns how many."""
        woken, now = 0, self.now_ms()
        while found := self._wake_up_to(broker.DELAYED, 0, now):
            woken += found
        return woken

    def resend_missing(self, age: float) -> int:
        """Send the messages of rollouts that wait but are in no queue; returns how many.

        A message is lost when its worker dies, or Redis goes away, after it was taken and before the rollout was
        claimed. A list is served in order, so whatever should have been served ``age`` seconds before the message that
        is next has no message any more. A message too many is harmless.
        """
        resent, now = 0, self.now_ms()
        for priority, key in zip(broker.PRIORITY_STEPS, broker.queue_keys(), strict=True):
            base = broker.pending_base(priority)
            upcoming = self.client.lindex(key, -1)
            if upcoming is None:
                limit: float = base + now
            else:
                score = self.client.zscore(broker.PENDING, _woken_by(upcoming))
                if score is None:  # a duplicate or not one of ours: the next free worker drops it
                    continue
                limit = score
            resent += self._wake_up_to(broker.PENDING, base, limit - age * 1000, judged=(key, upcoming or b""))
        return resent

    def _wake_up_to(self, key: str, low: float, high: float, judged: tuple[str, bytes] | None = None) -> int:
        members = self.client.zrangebyscore(key, low, high, start=0, num=_CHUNK)
        by_step: dict[int, list[Any]] = {}
        for member, record in self._records(members, "priority"):
            rollout_id = _id_in(member)
            if rollout_id is None or not record or record[0] is None:  # it expired: nothing is left to run
                self.client.zrem(key, member)
                continue
            step = broker.step_of(_priority(record[0]))
            by_step.setdefault(step, []).extend((rollout_id, self._message(rollout_id, step)))
        woken = 0
        how = ("any", b"") if judged is None else ("next", judged[1])
        for step, pairs in by_step.items():
            keys = [key, broker.PENDING, broker.queue_key(step), judged[0] if judged else broker.queue_key(step)]
            woken += int(self._wake(keys=keys, args=[high, broker.pending_base(step), *how, *pairs]))
        return woken

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
        number = _number(attempt)
        if state != b"running" or number is None:
            return None
        return number, (worker or b"").decode(errors="replace")

    def exists(self, rollout_id: str) -> bool:
        """Return whether there is a record."""
        return bool(self.client.exists(broker.job_key(rollout_id)))

    def now_ms(self) -> int:
        """Return Redis's own clock, in milliseconds."""
        with instruments.REDIS_ROUND_TRIP.time():
            seconds, micros = self.client.time()
        return int(seconds) * 1000 + int(micros) // 1000

    def uptime(self) -> float:
        """Return for how many seconds at least the Redis server has been up."""
        return self._uptime.seconds()

    def take_turn(self, key: str, interval: float) -> bool:
        """Return whether nobody in the fleet took this turn within the last ``interval`` seconds."""
        return bool(self.client.set(key, 1, nx=True, px=max(1, int(interval * 1000))))

    def _message(self, rollout_id: str, priority: int) -> bytes:
        return self._messages[broker.step_of(priority)].render(rollout_id)


def _chunks(pairs: Sequence[tuple[str, int]]) -> Iterable[Sequence[tuple[str, int]]]:
    for start in range(0, len(pairs), _CHUNK):
        yield pairs[start : start + _CHUNK]


def _id_in(member: bytes) -> str | None:
    try:
        return member.decode()
    except UnicodeDecodeError:
        return None


def _number(text: bytes | None, digits: int = 9) -> int | None:
    """Return a number that the scripts count up; None for what none of them has written."""
    return int(text) if text and text.isdigit() and len(text) <= digits else None


def _priority(text: bytes | None) -> int:
    """Return a record's priority; the last one's for one that cannot be read, so that it goes before nobody."""
    found = _number(text or b"0")
    return min(found, 9) if found is not None else max(broker.PRIORITY_STEPS)


def _woken_by(message: bytes) -> str:
    """Return the id of the rollout that a message in the queue is for; "" for one that is not a wake-up call."""
    try:
        return str(orjson.loads(message)["headers"]["id"])
    except (ValueError, TypeError, KeyError):
        return ""
