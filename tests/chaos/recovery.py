"""How soon the rollouts of a killed worker run again, told from their records.

All moments are the server's own: when the killed attempt's lease had lapsed and when the next one was claimed stand in
Redis, and a sweep's turn in the expiry of its lock. So nothing depends on when somebody got round to looking.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import orjson
import redis

from chaos.fleet import Fleet, Part
from producer import broker

_TICK = 0.03


@dataclass
class Watched:
    """A rollout that a killed worker ran: attempt ``attempt`` until ``killed``. Moments are the server's (ms)."""

    rollout_id: str
    attempt: int
    killed: int
    quiet: bool
    since: float = field(default_factory=time.monotonic)
    lapse: int | None = None  #: when its lease had lapsed
    requeued: int | None = None  #: when a sweep had sent it again
    claimed: int | None = None  #: when it ran again


@dataclass(frozen=True)
class Recovery:
    """How a killed worker's rollout came to run again; times are seconds.

    ``after_lapse`` is how long after its lease had lapsed, and ``sweeps`` how many turns to sweep had been taken by
    then without it, the one that sent it included: 1 is as few as there can be.
    """

    took: float
    after_lapse: float = 0.0
    sweeps: int = 1


class Recoveries:
    """Watches records past the proxy, in a thread. A kill is quiet when nothing else was broken meanwhile."""

    def __init__(self, fleet: Fleet) -> None:
        #: The machine's load for each core at a quiet kill, the highest of all.
        self.load = 0.0
        self._fleet = fleet
        self._watched: list[Watched] = []
        self._open: list[Watched] = []
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._disturbed_until = 0.0
        self._turns: list[int] = []  # when a turn to sweep was taken (ms)
        self._thread = threading.Thread(target=self._run, name="recoveries", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        self._thread.join(10)

    def watch(self, part: Part, *, quiet: bool) -> int:
        """Watch what a worker runs, just before it is killed; returns how many rollouts that is."""
        try:
            running, killed = self.running_on(part), _ms(self._fleet.redis.time())
        except redis.RedisError:
            return 0
        watched = [Watched(rollout_id, attempt, killed, quiet) for rollout_id, attempt in running]
        if quiet:
            self.load = max(self.load, os.getloadavg()[0] / (os.cpu_count() or 1))
        with self._lock:
            self._open += watched
        return len(watched)

    def running_on(self, part: Part) -> list[tuple[str, int]]:
        """Return the rollouts that a worker runs and their attempts; none while Redis is away."""
        if not part.alive:
            return []
        try:
            name = self._fleet.worker_name(part)
            return [(i, a) for i, worker, a in self._running() if name and worker == name]
        except redis.RedisError:
            return []

    @contextmanager
    def redis_disturbed(self) -> Iterator[None]:
        """Note that Redis is broken meanwhile: nobody believes for a TTL after that that a lease has lapsed."""
        try:
            yield
        finally:
            self._disturbed_until = time.monotonic()

    @property
    def trusted(self) -> bool:
        """Whether Redis has been whole for so long that its leases are believed."""
        return time.monotonic() > self._disturbed_until + 1.5 * self._fleet.lease_ttl + 1

    @property
    def settled(self) -> bool:
        """Whether everything that was watched runs again or is done."""
        return not self._open

    def found(self, *, quiet: bool) -> list[Recovery]:
        """Return the recoveries, the quickest first; for what never recovered, the time it has been watched for."""
        with self._lock:
            ended = [self._recovery(w, w.claimed) for w in self._watched if w.quiet is quiet and w.claimed]
            left = [w for w in self._open if w.quiet is quiet]
        never = [self._recovery(w, w.killed + round((time.monotonic() - w.since) * 1000)) for w in left]
        return sorted(ended + never, key=lambda recovery: recovery.took)

    def _recovery(self, watched: Watched, again: int) -> Recovery:
        lapse = watched.lapse or watched.killed
        requeued = min(watched.requeued or again, again)
        sweeps = sum(lapse < turn <= requeued for turn in self._turns)
        return Recovery((again - watched.killed) / 1000, (again - lapse) / 1000, sweeps)

    def _running(self) -> list[tuple[str, str, int]]:
        ids = [i.decode() for i in self._fleet.redis.zrange(broker.RUNNING, 0, -1)]
        pipe = self._fleet.redis.pipeline(transaction=False)
        for rollout_id in ids:
            pipe.hmget(broker.job_key(rollout_id), "worker", "attempt")
        rows = zip(ids, pipe.execute(), strict=True)
        return [(i, worker.decode(), int(attempt)) for i, (worker, attempt) in rows if worker and attempt]

    def _run(self) -> None:
        while not self._over.wait(_TICK):
            if self._open:
                try:
                    self._look()
                except redis.RedisError:
                    continue  # away: it goes on when Redis is back

    def _look(self) -> None:
        with self._lock:
            looked_at = list(self._open)
        pipe = self._fleet.redis.pipeline(transaction=False)
        pipe.time()
        pipe.pttl(broker.SWEPT)
        for watched in looked_at:
            pipe.hmget(broker.job_key(watched.rollout_id), "state", "attempt", "claimed_ms")
            pipe.zscore(broker.RUNNING, watched.rollout_id)
            pipe.hget(broker.LEDGER, f"{watched.rollout_id} {watched.attempt}")
        time_, left, *found = pipe.execute()
        now = _ms(time_)
        self._note_turn(now, left)
        for watched, (state, attempt, claimed), lease, entry in zip(
            looked_at, found[::3], found[1::3], found[2::3], strict=True
        ):
            again = int(attempt or 0) > watched.attempt
            if not again and state == b"running":
                watched.lapse = int(lease) if lease else watched.lapse  # it may have been renewed just before the kill
                continue
            if watched.requeued is None:
                # The entry is written in the same step, and stands until the orphans are swept.
                watched.requeued = orjson.loads(entry)["since_ms"] if entry else now
            if again:
                watched.claimed = int(claimed)
            # One that is done by the killed attempt itself had ended before the kill: it tells nothing.
            if again or state in {b"done", None}:
                with self._lock:
                    self._open.remove(watched)
                    self._watched.append(watched)

    def _note_turn(self, now: int, left: int) -> None:
        """Note when the present turn to sweep was taken: its lock has ``left`` milliseconds of a known time to live."""
        interval = self._fleet.lease_ttl / 4 * 1000
        taken = round(now + left - interval)
        if left > 0 and (not self._turns or taken - self._turns[-1] > interval / 2):
            self._turns.append(taken)


def _ms(told: tuple[int, int]) -> int:
    """Return what TIME tells, in milliseconds."""
    return int(told[0]) * 1000 + int(told[1]) // 1000


def percentile(times: Sequence[float], share: float) -> float | None:
    """Return the value below which ``share`` of the sorted ``times`` lie."""
    return round(times[min(len(times) - 1, int(share * len(times)))], 2) if times else None
