"""The ledger: attempts that are over and may have left something behind, and whose fleet it is.

What an attempt creates needs no entry of its own before it is created: the claim says as much. By then the record says
that it runs, which attempt and on which worker, and everything that the attempt creates carries that in its labels, or
in its id at the gateway. So the ledger is told only of attempts that ended badly: by the step in Redis that takes one
from a worker that died (``lua/requeue.lua``, ``lua/commit.lua``), and by the worker whose clean-up failed. An attempt
with an entry is never run again, as attempts are only counted up.
"""

from __future__ import annotations

import math
import secrets
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import orjson
import redis

from producer import broker
from producer.contract import InvalidRequestError, RolloutRequest
from workers.leases import REPORT_TTL
from workers.state import gateway_id
from workers.uptime import Uptime

#: Longest seconds between two tries to clear an entry.
LONGEST_DELAY = 3600.0
#: Seconds without a report after which a worker may be dead: it sends one every two.
_SILENCE = 6.0
#: Rollouts in one pipeline.
_CHUNK = 500


@dataclass(frozen=True, kw_only=True)
class Entry:
    """An attempt that may have left something behind, since ``since_ms`` by Redis's clock; due again at ``due_ms``.

    ``gateway`` is its worker's own gateway, "" when that is not known.
    """

    rollout_id: str
    attempt: int
    worker: str = ""
    gateway: str = ""
    since_ms: int = 0
    tries: int = 0
    due_ms: int = 0

    @property
    def field(self) -> str:
        """The entry's name in the ledger."""
        return f"{self.rollout_id} {self.attempt}"

    @property
    def gateway_id(self) -> str:
        """The id under which the gateway knew the attempt; see `workers.state.Rollout.gateway_id`."""
        return gateway_id(self.rollout_id, self.attempt)

    def age(self, now_ms: int) -> float:
        """Return for how many seconds it has been open."""
        return max(0.0, (now_ms - self.since_ms) / 1000)


@dataclass(frozen=True)
class Origin:
    """Where a rollout's attempts have put what they left: what its request says of that."""

    gateway_url: str | None = None
    use_gateway: bool | None = None
    team_id: str | None = None


@dataclass(frozen=True)
class Workers:
    """What is known of workers at ``now_ms``: when each last reported, its process, its tunnels, who holds rollouts."""

    now_ms: int
    patience_ms: int
    reported_ms: dict[str, int] = field(default_factory=dict)
    processes: dict[str, str] = field(default_factory=dict)
    tunnels: dict[str, frozenset[str]] = field(default_factory=dict)
    holding: frozenset[str] = frozenset()

    def lives(self, worker: str, since_ms: int = 0) -> bool:
        """Whether it has reported since, and still does."""
        return worker in self.tunnels and self.reported_ms.get(worker, 0) > max(
            since_ms, self.now_ms - self.patience_ms
        )

    def silence(self, worker: str) -> float:
        """Return for how many seconds it has not reported; infinite for one that never did, or withdrew."""
        reported = self.reported_ms.get(worker)
        return math.inf if reported is None else max(0.0, (self.now_ms - reported) / 1000)

    def is_dead(self, worker: str) -> bool:
        """Whether it has been silent for as long as a lease lives, and holds no rollout any more."""
        silent_since = self.reported_ms.get(worker, 0)
        return silent_since <= self.now_ms - self.patience_ms and worker not in self.holding


class Ledger:
    """Reads and writes the ledger. Thread-safe, synchronous; raises `redis.RedisError`. ``lease_ttl`` is in seconds."""

    def __init__(self, client: redis.Redis, *, lease_ttl: float) -> None:
        self._client: Any = client  # redis-py's annotations allow every type that any server may answer
        self._lease_ttl = lease_ttl
        self._uptime = Uptime(client, tolerance=lease_ttl / 4)

    def fleet_id(self) -> str:
        """Return this fleet's identity: 12 hexadecimal digits, made once by whoever comes first.

        Two fleets may share an account and a name. Where Redis lost its data, the fleet is another one: what the former
        one left ends by its lifetime.
        """
        self._client.set(broker.FLEET_ID, secrets.token_hex(6), nx=True)
        return str(self._client.get(broker.FLEET_ID).decode())

    # -- entries -------------------------------------------------------------------------------------------------------

    def note(self, rollout_id: str, attempt: int, worker: str, gateway: str = "") -> None:
        """Open an entry for an attempt whose clean-up failed; one that is open already stays as it is."""
        entry = Entry(rollout_id=rollout_id, attempt=attempt, worker=worker, gateway=gateway, since_ms=self.now_ms())
        self._client.hsetnx(broker.LEDGER, entry.field, _encoded(entry))

    def entries(self) -> list[Entry]:
        """Return the open entries, the oldest first; those that cannot be read are dropped."""
        found, unreadable = [], []
        for name, value in self._client.hgetall(broker.LEDGER).items():
            entry = _decoded(name, value)
            if entry is None:
                unreadable.append(name)
            else:
                found.append(entry)
        if unreadable:
            self._client.hdel(broker.LEDGER, *unreadable)
        return sorted(found, key=lambda entry: (entry.since_ms, entry.field))

    def settle(self, entry: Entry) -> None:
        """Remove an entry: nothing of its attempt is left."""
        self._client.hdel(broker.LEDGER, entry.field)

    def postpone(self, entry: Entry, interval: float) -> None:
        """Have a failed clean-up tried again, later each time."""
        delay = min(LONGEST_DELAY, interval * 2.0 ** min(entry.tries, 20))
        later = replace(entry, tries=entry.tries + 1, due_ms=self.now_ms() + int(delay * 1000))
        self._client.hset(broker.LEDGER, later.field, _encoded(later))

    def origin(self, entry: Entry) -> Origin:
        """Return what the rollout's request says; the defaults when its record is gone or cannot be read.

        Where it names no gateway, its attempt was registered at that of its own worker, which may not be the caller's.
        Raises `SupersededError` when the record is younger than the entry: its id was submitted once more, and an
        attempt of the new rollout may have the same number.
        """
        request, enqueued = self._client.hmget(broker.job_key(entry.rollout_id), "request", "enqueued_ms")
        if (enqueued or b"").isdigit() and int(enqueued) > entry.since_ms:
            raise SupersededError
        try:
            found = RolloutRequest.parse(request or b"")
        except InvalidRequestError:
            return Origin(entry.gateway or None)
        of_worker = None if found.use_gateway is False else entry.gateway or None
        return Origin(found.gateway_url or of_worker, found.use_gateway, found.team_id)

    # -- how many are left ---------------------------------------------------------------------------------------------

    def note_strays(self, **counts: int) -> None:
        """Keep how many things of no attempt were found and could not be deleted, for each kind that was looked for."""
        self._client.hset(broker.STRAYS, mapping=counts)

    def leaked(self) -> int:
        """Return how many attempts and things may be left over: open entries, and strays."""
        return int(self._client.hlen(broker.LEDGER)) + sum(map(int, self._client.hvals(broker.STRAYS)))

    # -- who lives -----------------------------------------------------------------------------------------------------

    def running(self, attempts: Collection[tuple[str, int]]) -> set[tuple[str, int]]:
        """Return which of these (rollout id, attempt) pairs the records say are running."""
        ids = sorted({rollout_id for rollout_id, _ in attempts})
        found = zip(ids, self._records(ids, "state", "attempt"), strict=True)
        live = {(i, _number(attempt)) for i, (state, attempt) in found if state == b"running"}
        return live & set(attempts)

    def workers(self, names: Collection[str]) -> Workers:
        """Return what is known of the worker processes of these names."""
        now = self.now_ms()
        running = [i.decode() for i in self._client.zrange(broker.RUNNING, 0, -1)] if names else []
        records = self._records(running, "worker", "state")
        pipe = self._client.pipeline(transaction=False)
        for name in names:
            pipe.zscore(broker.WORKERS, name)
            pipe.get(broker.worker_key(name))
        answers = pipe.execute()
        expiries = dict(zip(names, answers[::2], strict=True))
        reports = {name: _report(answer) for name, answer in zip(names, answers[1::2], strict=True) if answer}
        return Workers(
            now_ms=now,
            patience_ms=int(max(self._lease_ttl, _SILENCE) * 1000),
            reported_ms={name: int(expiry) - REPORT_TTL * 1000 for name, expiry in expiries.items() if expiry},
            processes={name: str(report.get("process", "")) for name, report in reports.items()},
            tunnels={name: _tunnels(report) for name, report in reports.items()},
            holding=frozenset(worker.decode() for worker, state in records if worker and state == b"running"),
        )

    def take_turn(self, key: str, interval: float) -> bool:
        """Return whether nobody in the fleet took this turn within the last ``interval`` seconds."""
        return bool(self._client.set(key, 1, nx=True, px=max(1, int(interval * 1000))))

    def is_settled(self) -> bool:
        """Whether Redis has been up for as long as a lease lives: before that, living workers may seem silent."""
        return self._uptime.seconds() >= self._lease_ttl

    def now_ms(self) -> int:
        """Return Redis's own clock, in milliseconds."""
        return broker.clock_ms(self._client.time())

    def _records(self, ids: Sequence[str], *fields: str) -> list[list[bytes | None]]:
        found: list[list[bytes | None]] = []
        for start in range(0, len(ids), _CHUNK):
            pipe = self._client.pipeline(transaction=False)
            for rollout_id in ids[start : start + _CHUNK]:
                pipe.hmget(broker.job_key(rollout_id), *fields)
            found += pipe.execute()
        return found


class SupersededError(Exception):
    """An entry's rollout is gone, and another one has its id."""


def fleet_label(fleet_id: str) -> str:
    """Return the label that everything carries which this fleet creates."""
    return f"fleet-id:{fleet_id}"


def by_worker(entries: Iterable[Entry]) -> dict[str, list[Entry]]:
    """Return the entries of each worker."""
    found: dict[str, list[Entry]] = defaultdict(list)
    for entry in entries:
        found[entry.worker].append(entry)
    return dict(found)


def _encoded(entry: Entry) -> bytes:
    fields = ("worker", "gateway", "since_ms", "tries", "due_ms")
    return orjson.dumps({name: getattr(entry, name) for name in fields})


def _decoded(name: bytes, value: bytes) -> Entry | None:
    rollout_id, _, attempt = name.decode(errors="replace").rpartition(" ")
    try:
        fields = orjson.loads(value)
        numbers = {key: int(fields.get(key, 0)) for key in ("since_ms", "tries", "due_ms")}
        worker, gateway = str(fields.get("worker", "")), str(fields.get("gateway", ""))
        return Entry(
            rollout_id=rollout_id,
            attempt=int(attempt),
            worker=worker,
            gateway=gateway,
            since_ms=numbers["since_ms"],
            tries=numbers["tries"],
            due_ms=numbers["due_ms"],
        )
    except (ValueError, TypeError, AttributeError):
        return None


def _number(text: bytes | None) -> int:
    return int(text) if text and text.isdigit() and len(text) < 10 else 0


def _report(encoded: bytes) -> dict[str, Any]:
    try:
        report = orjson.loads(encoded)
    except ValueError:
        return {}
    return report if isinstance(report, dict) else {}


def _tunnels(report: dict[str, Any]) -> frozenset[str]:
    """Return the ids of the tunnels in a worker's report."""
    try:
        return frozenset(str(tunnel["tunnel_id"]) for tunnel in report.get("tunnels", []))
    except (TypeError, KeyError):
        return frozenset()
