"""What the fleet is doing now: workers, queues, and rollouts in flight by phase."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import orjson
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from producer import broker
from producer.connection import FleetConnection
from producer.server import redact
from producer.worker_report import (
    breaker,
    by_phase,
    count,
    lag_p99,
    listed,
    number,
    phases,
    span,
    troubles,
    tunnel_state,
)


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

    #: Redis's clock at that moment, in Unix seconds.
    now: float = 0.0

    @property
    def phases(self) -> dict[str, int]:
        """Rollouts in flight by phase, summed over the workers' last reports."""
        total: Counter[str] = Counter()
        for worker in self.workers:
            total.update(phases(worker))
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
            "attention": self.attention,
        }

    @property
    def attention(self) -> list[str]:
        """What somebody should look at, the worst first, each with what it means or what to do."""
        found = [] if self.workers else ["no worker is alive; start one with: rollouts worker"]
        found += [line for worker in self.workers for line in troubles(worker)]
        if self.lapsed:
            found.append(f"{count(self.lapsed, 'rollout')} lost the worker: it died or hangs; the sweep takes over")
        if self.leaked:
            found.append(f"{count(self.leaked, 'attempt')} may have left something behind: rollouts leaks")
        return found

    def show(self, console: Console) -> None:
        """Print what needs attention, then the counts, the workers and their tunnels."""
        for line in self.attention:
            console.print(Text.assemble(("! ", "bold red"), line))
        if self.attention:
            console.print()
        console.print(self._counts())
        if self.workers:
            console.print(self._workers())
        tunnels = [(worker["name"], tunnel) for worker in self.workers for tunnel in listed(worker, "tunnels")]
        if tunnels:
            console.print(_tunnels(tunnels))

    def _counts(self) -> Table:
        counts = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
        slots = sum(number(worker, "concurrency") for worker in self.workers)
        running = f"{self.running:,} of {slots:,} slots" if slots else f"{self.running:,}"
        counts.add_row("running", running, Text(_joined(f"{n:,} in {phase}" for phase, n in by_phase(self.phases))))
        lists = _joined(f"{name}: {n:,}" for name, n in self.queues.items() if n)
        counts.add_row("queued", f"{self.pending:,}", lists)
        counts.add_row("delayed", f"{self.delayed:,}", "failed, and run again later" if self.delayed else "")
        counts.add_row("lapsed", _bad(self.lapsed), "")
        counts.add_row("leaked", _bad(self.leaked), "")
        counts.add_row("redis", Text(self.redis), "")
        return counts

    def _workers(self) -> Table:
        table = Table("worker", "state", title="\nworkers", title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
        for column in ("running", "slots", "loop lag p99"):
            table.add_column(column, justify="right")
        table.add_column("breaker")
        table.add_column("up")
        for worker in self.workers:
            state = str(worker.get("state", "-"))
            table.add_row(
                Text(f"{worker['name']}"),
                Text(state, style=_COLOURS.get(state, "")),
                f"{number(worker, 'running'):,}",
                f"{number(worker, 'concurrency'):,}",
                lag_p99(worker),
                Text(breaker(worker)),
                span(self.now - worker["started_at"]) if number(worker, "started_at") and self.now else "-",
            )
        return table


_COLOURS = {
    **{"running": "green", "paused": "red", "hung": "red", "draining": "yellow"},
    **{"alive": "green", "down": "red", "starting": "yellow"},
}


def _tunnels(tunnels: list[tuple[str, dict[str, Any]]]) -> Table:
    table = Table("worker", title="\ntunnels", title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("gateway", overflow="fold")
    table.add_column("tunnel", overflow="fold")
    for column in ("rollouts", "generation", "restarts"):
        table.add_column(column, justify="right")
    table.add_column("state")
    for worker, tunnel in tunnels:
        state = tunnel_state(tunnel)
        table.add_row(
            Text(worker),
            Text(str(tunnel.get("gateway_url"))),
            Text(str(tunnel.get("tunnel_id") or "-")),
            *(str(number(tunnel, name)) for name in ("rollouts", "generation", "restarts")),
            Text(state, style=_COLOURS[state]),
        )
    return table


def _joined(parts: Iterable[str]) -> str:
    return " · ".join(parts)


def _bad(value: int) -> Text:
    return Text(f"{value:,}", style="bold red" if value else "")


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
        pending, delayed, running, lapsed, leaked = counts[len(labels) :]
        return FleetStatus(
            redact(connection.url), workers, queues, pending, delayed, running, lapsed, leaked, now=now / 1000
        )

    return await connection.call(read)


async def workers_alive(connection: FleetConnection) -> int:
    """Return how many worker processes have reported recently."""

    async def count() -> int:
        return int(await connection.redis.zcount(broker.WORKERS, f"({await _now_ms(connection)}", "+inf"))

    return await connection.call(count)


async def _now_ms(connection: FleetConnection) -> int:
    seconds, micros = await connection.redis.time()
    return int(seconds) * 1000 + int(micros) // 1000


def _report(name: str, report: bytes | None) -> dict[str, Any]:
    try:
        found = orjson.loads(report or b"{}")
    except orjson.JSONDecodeError:
        found = {}
    return (found if isinstance(found, dict) else {}) | {"name": name}
