"""What an operator does to a fleet by way of Redis: list rollouts, cancel and retry them, ask workers, drain one."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import partial
from typing import Any

import orjson

from producer import broker, queues
from producer.asking import ask
from producer.connection import CHUNK, CancelAnswer, FleetConnection

_FIELDS = (
    *("state", "attempt", "spent", "max_attempts", "batch", "worker", "priority", "queue", "enqueued_ms", "outcome"),
)

#: Seconds that workers have to answer.
PATIENCE = 3.0


class Where(StrEnum):
    """In which of the fleet's sets a rollout is that has not ended, in the order in which they are listed."""

    RUNNING = "running"
    LAPSED = "lapsed"  #: its worker has stopped renewing its lease
    DELAYED = "delayed"  #: an attempt failed, and the next is due later
    PARKED = "parked"  #: what it needs is limited, and taken
    PENDING = "pending"


class RetryAnswer(StrEnum):
    """What retrying found for one rollout."""

    RETRIED = "retried"  #: it had ended, or waited for its delay; it is queued now
    PENDING = "pending"  #: it is queued
    RUNNING = "running"
    UNKNOWN = "unknown"  #: Redis has no record of it
    CLOSED = "closed"  #: its batch was cancelled for good


@dataclass(frozen=True)
class Listed:
    """One rollout that has not ended. ``age`` is its seconds since it was submitted, ``phase_age`` those of its phase.

    ``phase`` and ``phase_age`` are None where no worker tells them.
    """

    rollout_id: str
    where: Where
    attempt: int
    max_attempts: int
    batch_id: str
    worker: str
    queue: str
    priority: int
    age: float
    phase: str | None = None
    phase_age: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return it as plain data."""
        return asdict(self)


@dataclass(frozen=True)
class Wanted:
    """Which rollouts: all of these must fit; None fits all."""

    where: Where | None = None
    batch: str | None = None
    group: str | None = None
    worker: str | None = None
    queue: str | None = None

    def fits(self, found: Listed, request: bytes | None) -> bool:
        """Whether a rollout is one of them; ``request`` is needed for its group only."""
        if self.where not in {None, found.where} or self.batch not in {None, found.batch_id}:
            return False
        if self.worker is not None and self.worker not in {found.worker, found.worker.partition("@")[0]}:
            return False
        if self.queue not in {None, found.queue}:
            return False
        return self.group is None or _group_of(request) == self.group


class Operator:
    """One operator's connection; everything raises `FleetUnreachableError`."""

    def __init__(self, connection: FleetConnection) -> None:
        self.connection = self._connection = connection
        self._redis: Any = connection.redis
        self._retry = connection.redis.register_script(broker.script("producer", "retry"))

    # -- looking -------------------------------------------------------------------------------------------------------

    async def listed(self, wanted: Wanted) -> AsyncIterator[Listed]:
        """Yield the rollouts that have not ended, those that run first, as they are found: there may be very many."""
        runs = await self._connection.call(self._runs)
        now = await self._connection.call(self._now_ms)
        places = [place.decode() for place in await self._connection.call(partial(self._redis.smembers, broker.PLACES))]
        named = await self._connection.queues() if wanted.queue is None else [wanted.queue]
        ranges = [
            *((Where.RUNNING, queues.running_key(queue), f"({now}", "+inf") for queue in named),
            *((Where.LAPSED, queues.running_key(queue), "-inf", str(now)) for queue in named),
            *((Where.DELAYED, queues.delayed_key(queue), "-inf", "+inf") for queue in named),
            *((Where.PARKED, broker.parked_key(place), "-inf", "+inf") for place in places),
            *((Where.PENDING, queues.pending_key(queue), "-inf", "+inf") for queue in named),
        ]
        for where, key, low, high in ranges:
            if wanted.where in {None, where}:
                members = await self._connection.call(partial(self._redis.zrangebyscore, key, low, high))
                for start in range(0, len(members), CHUNK):
                    ids = [member.decode(errors="replace") for member in members[start : start + CHUNK]]
                    for found, request in await self._records(where, ids, now, runs, wanted.group is not None):
                        if wanted.fits(found, request):
                            yield found

    async def _records(
        self, where: Where, ids: Sequence[str], now: int, runs: Mapping[str, Any], with_request: bool
    ) -> list[tuple[Listed, bytes | None]]:
        fields = [*_FIELDS, "request"] if with_request else list(_FIELDS)

        async def read() -> list[Any]:
            pipe = self._redis.pipeline(transaction=False)
            for rollout_id in ids:
                pipe.hmget(broker.job_key(rollout_id), fields)
            return list(await pipe.execute(raise_on_error=False))

        found = []
        for rollout_id, record in zip(ids, await self._connection.call(read), strict=True):
            if isinstance(record, list) and record[0] is not None:
                listed = _listed(rollout_id, where, record, now, runs.get(rollout_id))
                found.append((listed, record[-1] if with_request else None))
        return found

    async def _runs(self) -> dict[str, tuple[str, float]]:
        """Return phase and its beginning of the rollouts of which workers tell."""
        names = [name.decode() for name in await self._redis.zrange(broker.WORKERS, 0, -1)]
        told = await self._redis.mget([broker.worker_runs_key(name) for name in names]) if names else []
        found: dict[str, tuple[str, float]] = {}
        for runs in told:
            for rollout_id, run in (orjson.loads(runs) if runs else {}).items():
                found[rollout_id] = run[1], run[2]
        return found

    async def _now_ms(self) -> int:
        return broker.clock_ms(await self._redis.time())

    async def record(self, rollout_id: str) -> dict[str, Any]:
        """Return a rollout's record as plain data, an empty one where there is none."""
        fields = [*_FIELDS, "history"]
        found = await self._connection.call(lambda: self._redis.hmget(broker.job_key(rollout_id), fields))
        record = {name: value.decode(errors="replace") for name, value in zip(fields, found, strict=True) if value}
        history = [orjson.loads(line) for line in record.pop("history", "").splitlines()]
        if history:
            record["history"] = history
        return record

    async def lines_of(self, rollout_id: str) -> list[dict[str, Any]]:
        """Return what living workers have logged of a rollout, the oldest line first."""
        answers = await self.ask("logs", len(await self.workers()), rollout=rollout_id)
        return sorted((line for answer in answers for line in answer["lines"]), key=lambda line: line["time"])

    # -- acting --------------------------------------------------------------------------------------------------------

    async def cancel(self, rollout_ids: Sequence[str]) -> dict[str, CancelAnswer]:
        """Cancel rollouts, and say what was found for each."""
        return await self._connection.cancel(rollout_ids)

    async def retry(self, rollout_ids: Sequence[str]) -> dict[str, RetryAnswer]:
        """Run rollouts that have ended again, with all their attempts; the results they had are dropped.

        Whoever consumed such a result is not told of the next one: a run that is over picks it up with ``--resume``.
        """
        answers: dict[str, RetryAnswer] = {}
        for start in range(0, len(rollout_ids), CHUNK):
            ids = rollout_ids[start : start + CHUNK]
            keys: list[str] = []
            args: list[Any] = [int(broker.RESULT_TTL.total_seconds())]
            for rollout_id, record in zip(ids, await self._connection.fields(ids, ["priority", "queue"]), strict=True):
                keys += [broker.job_key(rollout_id), broker.result_key(rollout_id)]
                args += [rollout_id, self._connection.message(rollout_id, _number(record[0]), _queue(record[1]))]
            found = await self._connection.call(partial(self._retry, keys=keys, args=args))
            answers |= {i: RetryAnswer(answer.decode()) for i, answer in zip(ids, found, strict=True)}
        return answers

    async def workers(self) -> list[str]:
        """Return the names of the workers that are alive."""
        now = await self._connection.call(self._now_ms)
        alive = await self._connection.call(lambda: self._redis.zrangebyscore(broker.WORKERS, f"({now}", "+inf"))
        return [name.decode() for name in alive]

    async def ask(self, what: str, answers: int, **fields: str) -> list[dict[str, Any]]:
        """Ask all workers; returns when there are so many ``answers``, or after `PATIENCE` seconds."""
        return await ask(self._connection, [{"what": what} | fields], answers=answers, timeout=PATIENCE)


def _listed(rollout_id: str, where: Where, record: list[Any], now: int, run: tuple[str, float] | None) -> Listed:
    values = dict(zip(_FIELDS, record, strict=False))
    batch, worker = ((values[name] or b"").decode(errors="replace") for name in ("batch", "worker"))
    holds = where in {Where.RUNNING, Where.LAPSED}
    return Listed(
        rollout_id=rollout_id,
        where=where,
        attempt=_number(values["attempt"]),
        max_attempts=_number(values["max_attempts"]),
        batch_id=batch,
        worker=worker if holds else "",
        queue=_queue(values["queue"]),
        priority=_number(values["priority"]),
        age=max(0.0, (now - _number(values["enqueued_ms"])) / 1000),
        phase=run[0] if run and holds else None,
        phase_age=max(0.0, now / 1000 - run[1]) if run and holds else None,
    )


def _number(value: bytes | None) -> int:
    try:
        return int(value or 0)
    except ValueError:
        return 0


def _queue(value: bytes | None) -> str:
    return value.decode(errors="replace") if value else queues.QUEUE


def _group_of(request: bytes | None) -> str | None:
    try:
        found = orjson.loads(request or b"{}")
    except orjson.JSONDecodeError:
        return None
    return found.get("group_id") if isinstance(found, dict) else None
