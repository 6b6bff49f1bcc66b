"""What the fleet is doing now: workers, queues, and rollouts in flight by phase."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import orjson
from rich.console import Console
from rich.table import Table

from producer import broker
from producer.connection import FleetConnection, redact


@dataclass(frozen=True)
class FleetStatus:
    """A moment of the fleet. ``running`` rollouts hold a lease; ``lapsed`` ones have lost it and await the sweep.

    ``leaked`` counts attempts that may have left something behind, and things that could not be deleted.
    """

    redis: str
    workers: list[dict[str, Any]] = field(default_factory=list)
    queues: dict[str, int] = field(default_factory=dict)
    pending: int = 0
    delayed: int = 0
    running: int = 0
    lapsed: int = 0
    leaked: int = 0

    @property
    def phases(self) -> dict[str, int]:
        """Rollouts in flight by phase, summed over the workers' last reports."""
        total: Counter[str] = Counter()
        for worker in self.workers:
            total.update(worker.get("phases") or {})
        return dict(total)

    def as_dict(self) -> dict[str, Any]:
        """Return everything as plain data."""
        return {
            "redis": self.redis,
            "workers": self.workers,
            "queues": self.queues,
            "pending": self.pending,
            "delayed": self.delayed,
            "running": self.running,
            "lapsed": self.lapsed,
            "leaked": self.leaked,
            "phases": self.phases,
        }

    def show(self, console: Console) -> None:
        """Print tables of workers, queues and phases."""
        columns = ("name", "host", "pid", "state", "running", "concurrency")
        workers = Table(*columns, "loop lag p99 (ms)", title="workers", title_justify="left")
        for worker in self.workers:
            workers.add_row(*(str(worker.get(name, "-")) for name in columns), _p99(worker.get("loop_lag_ms")))
        console.print(workers)
        if not self.workers:
            console.print("no worker is alive; start one with: rollouts worker")
        counts = Table("rollouts", "count", title=f"Redis at {self.redis}", title_justify="left")
        for name in ("pending", "delayed", "running", "lapsed", "leaked"):
            counts.add_row(name, str(getattr(self, name)))
        for name, length in self.queues.items():
            counts.add_row(f"queue {name}", str(length))
        for phase, count in self.phases.items():
            counts.add_row(f"in {phase}", str(count))
        console.print(counts)


async def read_status(connection: FleetConnection) -> FleetStatus:
    """Read the fleet's status; raises `FleetUnreachableError`."""

    async def read() -> FleetStatus:
        now = await _now_ms(connection)
        alive: Any = await connection.redis.zrangebyscore(broker.WORKERS, f"({now}", "+inf")
        names = [name.decode() for name in alive]
        pipe = connection.redis.pipeline(transaction=False)
        for name in names:
            pipe.get(broker.worker_key(name))
        for key in (*broker.queue_keys(), broker.MAINTENANCE_QUEUE):
            pipe.llen(key)
        pipe.zcard(broker.PENDING)
        pipe.zcard(broker.DELAYED)
        pipe.zcount(broker.RUNNING, f"({now}", "+inf")
        pipe.zcount(broker.RUNNING, "-inf", now)
        pipe.hlen(broker.LEDGER)
        pipe.get(broker.STRAYS)
        *found, entries, strays = await pipe.execute()
        reports, counts = found[: len(names)], found[len(names) :]
        labels = [*(f"priority {step}" for step in broker.PRIORITY_STEPS), "maintenance"]
        queues = dict(zip(labels, counts, strict=False))
        workers = [_report(name, report) for name, report in zip(names, reports, strict=True)]
        counts.append(entries + int(strays or 0))
        return FleetStatus(redact(connection.url), workers, queues, *counts[len(labels) :])

    return await connection.call(read)


async def workers_alive(connection: FleetConnection) -> int:
    """Return how many worker processes have reported recently."""

    async def count() -> int:
        return int(await connection.redis.zcount(broker.WORKERS, f"({await _now_ms(connection)}", "+inf"))

    return await connection.call(count)


async def _now_ms(connection: FleetConnection) -> int:
    seconds, micros = await connection.redis.time()
    return int(seconds) * 1000 + int(micros) // 1000


def _p99(lag: object) -> str:
    p99 = lag.get("p99") if isinstance(lag, dict) else None
    return f"{p99:.1f}" if isinstance(p99, int | float) else "-"


def _report(name: str, report: bytes | None) -> dict[str, Any]:
    try:
        found = orjson.loads(report or b"{}")
    except orjson.JSONDecodeError:
        found = {}
    return {"name": name} | (found if isinstance(found, dict) else {})
