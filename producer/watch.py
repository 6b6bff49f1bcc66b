"""``rollouts status --watch``: the fleet in a terminal, live, with rates from one look to the next."""

from __future__ import annotations

import sys
from asyncio import sleep as pause
from collections import Counter, deque
from collections.abc import Mapping
from typing import Any

import orjson
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from producer.connection import FleetConnection
from producer.errors import FleetError
from producer.status import FleetStatus, read_status
from producer.worker_report import mapped, number

#: Seconds over which rates are taken.
_WINDOW = 30.0


class Rates:
    """What workers did a second, by how their counters have grown over the last half minute."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, dict[str, Counter[str]]]] = deque()

    def of(self, status: FleetStatus) -> dict[str, float]:
        """Return ``attempts`` and each outcome a second; nothing at the first look.

        A process that is new counts from its next look on, so that a restart is no leap.
        """
        now = {_process(worker): _counters(worker) for worker in status.workers}
        self._seen.append((status.now, now))
        while self._seen[0][0] < status.now - _WINDOW:
            self._seen.popleft()
        then, before = self._seen[0]
        if status.now <= then:
            return {}
        grown: Counter[str] = Counter()
        for process in now.keys() & before.keys():
            grown.update(now[process] - before[process])
        return {what: count / (status.now - then) for what, count in grown.items()}


async def watch(connection: FleetConnection, console: Console, interval: float, *, as_json: bool = False) -> None:
    """Show the fleet every ``interval`` seconds, until cancelled; a Redis that is away is told, and waited for."""
    rates = Rates()
    shown: RenderableType = ""
    live = Live(console=console, screen=console.is_terminal, auto_refresh=False, redirect_stderr=False)
    if as_json or not console.is_terminal:
        while True:
            status = await read_status(connection)
            told = status.as_dict() | {"rates": rates.of(status)}
            if as_json:
                sys.stdout.write(orjson.dumps(told).decode() + "\n")
                sys.stdout.flush()
            else:
                console.print(status.view(told["rates"]))
            await pause(interval)
    with live:
        while True:
            try:
                status = await read_status(connection)
                shown = status.view(rates.of(status))
                live.update(shown, refresh=True)
            except FleetError as error:
                live.update(Group(Text(f"! {error}", style="bold red"), shown), refresh=True)
            await pause(interval)


def _process(worker: Mapping[str, Any]) -> str:
    return f"{worker.get('name')} {worker.get('process')}"


def _counters(worker: Mapping[str, Any]) -> Counter[str]:
    finished = mapped(worker, "finished")
    counted = {outcome: number(finished, outcome) for outcome in finished}
    return Counter({"attempts": number(worker, "attempts"), **counted})
