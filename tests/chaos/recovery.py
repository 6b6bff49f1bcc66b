"""How soon the rollouts of a killed worker run again, told from their records."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import redis

from chaos.fleet import Fleet, Part
from producer import broker

_TICK = 0.03


@dataclass
class Watched:
    """A rollout that a killed worker ran: attempt ``attempt`` until ``killed`` (monotonic)."""

    rollout_id: str
    attempt: int
    killed: float
    quiet: bool
    took: float | None = None
    seen: bool = False


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
        self._thread = threading.Thread(target=self._run, name="recoveries", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        self._thread.join(10)

    def watch(self, part: Part, *, quiet: bool) -> int:
        """Watch what a worker runs, just before it is killed; returns how many rollouts that is."""
        now = time.monotonic()
        watched = [Watched(rollout_id, attempt, now, quiet) for rollout_id, attempt in self.running_on(part)]
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

    def times(self, *, quiet: bool) -> list[float]:
        """Return the seconds that recoveries took; for what never recovered, those that it has been watched for."""
        now = time.monotonic()
        with self._lock:
            closed = [w.took for w in self._watched if w.quiet is quiet and w.took is not None]
            return sorted(closed + [now - w.killed for w in self._open if w.quiet is quiet])

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
        for watched in looked_at:
            pipe.hmget(broker.job_key(watched.rollout_id), "state", "attempt")
        now = time.monotonic()
        for watched, (state, attempt) in zip(looked_at, pipe.execute(), strict=True):
            again = int(attempt or 0) > watched.attempt
            if again:
                watched.took = now - watched.killed
            # One that is done by the killed attempt itself had ended before the kill: it tells nothing.
            if again or state in {b"done", None}:
                with self._lock:
                    self._open.remove(watched)
                    self._watched.append(watched)


def percentile(times: Sequence[float], share: float) -> float | None:
    """Return the value below which ``share`` of the sorted ``times`` lie."""
    return round(times[min(len(times) - 1, int(share * len(times)))], 2) if times else None
