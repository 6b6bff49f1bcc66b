"""What the fleet is doing now: workers, queues, and rollouts in flight by phase."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson
from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
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
    #: Seconds for which the first of those that are queued has waited.
    oldest: float = 0.0

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
            "oldest_queued_seconds": round(self.oldest, 1),
            "pools": self.pools,
            "phases": self.phases,
            "attention": self.attention,
        }

    @property
    def pools(self) -> dict[str, dict[str, int]]:
        """Workers, running rollouts and slots of each pool: of the workers of one name, on whatever hosts."""
        found: dict[str, Counter[str]] = {}
        for worker in self.workers:
            here = Counter(workers=1, running=number(worker, "running"), slots=number(worker, "concurrency"))
            found.setdefault(str(worker["name"]).partition("@")[0], Counter()).update(here)
        return {name: dict(pool) for name, pool in sorted(found.items())}

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
        console.print(self.view())

    def view(self, rates: Mapping[str, float] | None = None) -> Group:
        """Return what `show` prints; ``rates`` are what workers did a second, if that is known."""
        parts: list[RenderableType] = [Text.assemble(("! ", "bold red"), line) for line in self.attention]
        if self.attention:
            parts.append("")
        parts.append(self._counts(rates or {}))
        if len(self.pools) > 1:
            parts.append(_pools(self.pools))
        if self.workers:
            parts.append(self._workers())
        tunnels = [(worker["name"], tunnel) for worker in self.workers for tunnel in listed(worker, "tunnels")]
        if tunnels:
            parts.append(_tunnels(tunnels))
        return Group(*parts)

    def _counts(self, rates: Mapping[str, float]) -> Table:
        counts = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
        slots = sum(number(worker, "concurrency") for worker in self.workers)
        running = f"{self.running:,} of {slots:,} slots" if slots else f"{self.running:,}"
        counts.add_row("running", running, Text(_joined(f"{n:,} in {phase}" for phase, n in by_phase(self.phases))))
        lists = _joined(f"{name}: {n:,}" for name, n in self.queues.items() if n)
        if self.oldest:
            lists = _joined([*([lists] if lists else []), f"the oldest for {span(self.oldest)}"])
        counts.add_row("queued", f"{self.pending:,}", lists)
        counts.add_row("delayed", f"{self.delayed:,}", "failed, and run again later" if self.delayed else "")
        counts.add_row("lapsed", _bad(self.lapsed), "")
        counts.add_row("leaked", _bad(self.leaked), "")
        if rates:
            attempts = rates.get("attempts", 0.0)
            ends = _joined(f"{rate:.1f} {outcome}" for outcome, rate in rates.items() if outcome != "attempts" and rate)
            counts.add_row("a second", f"{attempts:.1f} begun", ends)
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


def _pools(pools: Mapping[str, Mapping[str, int]]) -> Table:
    table = Table("pool", title="\npools", title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for column in ("workers", "running", "slots"):
        table.add_column(column, justify="right")
    for name, pool in pools.items():
        table.add_row(Text(name), *(f"{pool[column]:,}" for column in ("workers", "running", "slots")))
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
        pipe.hvals(broker.STRAYS)
        bases = [broker.pending_base(step) for step in broker.PRIORITY_STEPS]
        for base in bases:  # what was put to the front of its list has no time
            span_of_list = f"({base}", f"({base + broker.LIST_SPAN}"
            pipe.zrangebyscore(broker.PENDING, *span_of_list, start=0, num=1, withscores=True)
        *answers, entries, strays = (found := await pipe.execute())[: -len(bases)]
        times = [score - base for base, first in zip(bases, found[-len(bases) :], strict=True) for _, score in first]
        oldest = max(0.0, (now - min(times)) / 1000) if times else 0.0
        reports, counts = answers[: len(names)], answers[len(names) :]
        labels = [*(f"priority {step}" for step in broker.PRIORITY_STEPS), "maintenance"]
        queues = dict(zip(labels, counts, strict=False))
        workers = [_report(name, report) for name, report in zip(names, reports, strict=True)]
        counts.append(entries + sum(map(int, strays)))
        pending, delayed, running, lapsed, leaked = counts[len(labels) :]
        counted = pending, delayed, running, lapsed, leaked, oldest
        return FleetStatus(redact(connection.url), workers, queues, *counted, now=now / 1000)

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
