"""What the fleet is doing now: workers, queues, and rollouts in flight by phase."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from producer import broker
from producer.connection import FleetConnection
from producer.counts import Counting, FleetCounts, QueueCounts, ask_what_there_is
from producer.queues import PRIORITY_STEPS, QUEUE
from producer.served import read_reports
from producer.server import redact
from producer.worker_report import (
    breaker,
    by_phase,
    count,
    lag_p99,
    listed,
    number,
    phases,
    serves,
    span,
    troubles,
    tunnel_state,
)


@dataclass(frozen=True)
class FleetStatus:
    """A moment of the fleet. ``maintenance`` is how many messages wait that are for the upkeep of the fleet.

    ``leaked`` counts attempts that may have left something behind, and things that could not be deleted. ``now`` is
    Redis's clock at that moment, in Unix seconds.
    """

    redis: str
    workers: list[dict[str, Any]] = field(default_factory=list)
    counts: FleetCounts = field(default_factory=FleetCounts)
    maintenance: int = 0
    leaked: int = 0
    now: float = 0.0

    @property
    def queues(self) -> dict[str, QueueCounts]:
        """All queues, the default one first."""
        return self.counts.queues

    @property
    def pending(self) -> int:
        """Rollouts of all queues that wait for a worker."""
        return sum(queue.pending for queue in self.queues.values())

    @property
    def delayed(self) -> int:
        """Rollouts that failed, and wait until they are run again."""
        return sum(queue.delayed for queue in self.queues.values())

    @property
    def running(self) -> int:
        """Rollouts that hold a lease."""
        return sum(queue.running for queue in self.queues.values())

    @property
    def lapsed(self) -> int:
        """Rollouts that have lost their lease, and await the sweep."""
        return sum(queue.lapsed for queue in self.queues.values())

    @property
    def oldest(self) -> float:
        """Seconds for which the first of those that are queued has waited."""
        return max((queue.oldest for queue in self.queues.values()), default=0.0)

    @property
    def served(self) -> Counter[str]:
        """How many workers take rollouts of each queue."""
        return Counter(queue for worker in self.workers for queue in serves(worker))

    @property
    def unserved(self) -> dict[str, int]:
        """How many rollouts wait in each queue that no worker serves: none of them will run as it is."""
        waiting = {name: queue.pending + queue.delayed + queue.lapsed for name, queue in self.queues.items()}
        return {name: amount for name, amount in waiting.items() if amount and not self.served[name]}

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
            "queues": {name: self._queue_as_dict(name) for name in self.queues},
            "maintenance": self.maintenance,
            "pending": self.pending,
            "delayed": self.delayed,
            "parked": self.counts.parked,
            "running": self.running,
            "lapsed": self.lapsed,
            "leaked": self.leaked,
            "oldest_queued_seconds": round(self.oldest, 1),
            "pools": self.pools,
            "phases": self.phases,
            "attention": self.attention,
        }

    def _queue_as_dict(self, name: str) -> dict[str, Any]:
        queue = self.queues[name]
        counts = {what: getattr(queue, what) for what in ("pending", "delayed", "running", "lapsed")}
        messages = {f"priority {step}": n for step, n in zip(PRIORITY_STEPS, queue.messages, strict=True)}
        oldest = round(queue.oldest, 1)
        return {"workers": self.served[name], **counts, "oldest_queued_seconds": oldest, "messages": messages}

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
        leaks = f"{count(self.leaked, 'attempt')} may have left something behind: rollouts leaks"
        return [*self.hindrances, *([leaks] if self.leaked else [])]

    @property
    def hindrances(self) -> list[str]:
        """What of it keeps rollouts from ending."""
        found = [] if self.workers else ["no worker is alive; start one with: rollouts worker"]
        unserved = {name: n for name, n in self.unserved.items() if self.workers or name != QUEUE}
        found += [told_unserved(name, amount) for name, amount in unserved.items()]
        found += [line for worker in self.workers for line in troubles(worker)]
        if self.lapsed:
            found.append(f"{count(self.lapsed, 'rollout')} lost the worker: it died or hangs; the sweep takes over")
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
        if set(self.queues) | set(self.served) > {QUEUE}:
            parts.append(self._queues())
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
        counts.add_row("queued", f"{self.pending:,}", _joined(self._waits()))
        counts.add_row("delayed", f"{self.delayed:,}", "failed, and run again later" if self.delayed else "")
        parked = self.counts.parked
        counts.add_row("parked", f"{parked:,}", "wait until there is room for what they need" if parked else "")
        counts.add_row("lapsed", _bad(self.lapsed), "")
        counts.add_row("leaked", _bad(self.leaked), "")
        if rates:
            attempts = rates.get("attempts", 0.0)
            ends = _joined(f"{rate:.1f} {outcome}" for outcome, rate in rates.items() if outcome != "attempts" and rate)
            counts.add_row("a second", f"{attempts:.1f} begun", ends)
        counts.add_row("redis", Text(self.redis), "")
        return counts

    def _waits(self) -> Iterator[str]:
        """Tell how many messages each list holds, over all queues, and for how long the first rollout has waited."""
        messages = map(sum, zip(*(queue.messages for queue in self.queues.values()), strict=True))
        labels = [*(f"priority {step}" for step in PRIORITY_STEPS), "maintenance"]
        yield from (f"{label}: {n:,}" for label, n in zip(labels, [*messages, self.maintenance], strict=False) if n)
        if self.oldest:
            yield f"the oldest for {span(self.oldest)}"

    def _queues(self) -> Table:
        table = Table("queue", title="\nqueues", title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
        for column in ("workers", "queued", "delayed", "running", "lapsed", "oldest"):
            table.add_column(column, justify="right")
        for name, queue in self.queues.items():
            workers = Text(str(self.served[name]), style="bold red" if name in self.unserved else "")
            counts = (f"{n:,}" for n in (queue.pending, queue.delayed, queue.running))
            oldest = span(queue.oldest) if queue.oldest else "-"
            table.add_row(Text(name), workers, *counts, _bad(queue.lapsed), oldest)
        return table

    def _workers(self) -> Table:
        table = Table(_worker(), "state", title="\nworkers", title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
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


def _worker() -> Column:
    return Column("worker", overflow="fold")  # names are to be copied, so none is cut


def _tunnels(tunnels: list[tuple[str, dict[str, Any]]]) -> Table:
    table = Table(_worker(), title="\ntunnels", title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
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
        pipe = connection.redis.pipeline(transaction=False)
        pipe.zrange(broker.WORKERS, 0, -1, withscores=True)
        ask_what_there_is(pipe)
        names, *there_is = await pipe.execute()
        now = broker.clock_ms(there_is[0])
        alive = [name.decode() for name, expires in names if expires > now]
        workers = await read_reports(connection, alive)
        counting = Counting(there_is, besides=[queue for worker in workers for queue in serves(worker)])
        pipe.llen(broker.MAINTENANCE_QUEUE)
        pipe.hlen(broker.LEDGER)
        pipe.hvals(broker.STRAYS)
        counting.ask(pipe)
        maintenance, entries, strays, *answers = await pipe.execute()
        leaked = entries + sum(map(int, strays))
        counts = counting.read(answers)
        return FleetStatus(redact(connection.url), workers, counts, maintenance, leaked, now=now / 1000)

    return await connection.call(read)


def told_unserved(queue: str, amount: int) -> str:
    """Say that rollouts wait where nobody takes them, and what to do."""
    wait = "waits" if amount == 1 else "wait"
    return (
        f"{count(amount, 'rollout')} {wait} in queue {queue}, which no worker serves; start one with: "
        f"ROLLOUTS_QUEUES={queue} rollouts worker"
    )
