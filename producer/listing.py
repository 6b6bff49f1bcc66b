"""How the operators' commands look in a terminal: a list of rollouts, one rollout's state, and its log lines."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from producer.operating import Listed
from producer.terminal import console
from producer.worker_report import span

_COLOURS = {"running": "green", "lapsed": "red", "delayed": "yellow", "parked": "yellow", "pending": ""}
_LEVELS = {"WARNING": "yellow", "ERROR": "red", "CRITICAL": "red"}


def show_listed(found: Sequence[Listed], more: bool) -> None:
    """Print rollouts as a table."""
    table = Table("rollout", "state", box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("attempt", justify="right")
    for column in ("phase", "for", "worker", "queue", "batch", "submitted"):
        table.add_column(column, overflow="fold")
    for one in found:
        table.add_row(
            Text(one.rollout_id),
            Text(one.where, style=_COLOURS[one.where]),
            f"{one.attempt} of {one.max_attempts}",
            one.phase or "-",
            span(one.phase_age) if one.phase_age is not None else "-",
            Text(one.worker or "-"),
            Text(one.queue),
            Text(one.batch_id),
            f"{span(one.age)} ago",
        )
    shown = console()
    shown.print(table if found else "no rollout is queued or running")
    if more:
        shown.print("there are more: --limit 0 shows all")


def show_record(rollout_id: str, record: Mapping[str, Any]) -> None:
    """Print where a rollout stands, and the attempts that failed."""
    if not record:
        typer.echo(f"{rollout_id}: Redis has no record of it any more")
        return
    state = record.get("state", "?")
    outcome = f" as {record['outcome']}" if "outcome" in record else ""
    worker = f" on {record['worker']}" if "worker" in record else ""
    typer.echo(f"{rollout_id}: {state}{outcome}, attempt {record.get('attempt', '0')}{worker}")
    for attempt in record.get("history", []):
        error = attempt.get("error", {})
        what = f"{error.get('type') or error.get('kind', '?')}: {error.get('message', '')}"
        typer.echo(f"  attempt {attempt.get('attempt', '?')} on {attempt.get('worker') or '?'}: {what}")


def show_line(line: Mapping[str, Any]) -> None:
    """Print one log line."""
    stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(line["time"]))
    level = typer.style(f"{line['level']:<7}", fg=_LEVELS.get(line["level"]))
    typer.echo(f"{stamp} {level} {line['message']}  [attempt={line.get('attempt')} worker={line.get('worker')}]")
