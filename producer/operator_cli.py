"""The operators' commands: ``rollouts ps``, ``logs``, ``cancel``, ``retry`` and ``drain``.

Exit status: 0 done; 1 not all of what was named could be done; 2 bad usage or no Redis; 130 interrupted.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from producer.cli import AsJson, RedisUrl, app, bad_usage, problems_end_it, read_settings

if TYPE_CHECKING:
    from producer.operating import Operator, Wanted
    from producer.settings import ProducerSettings

T = TypeVar("T")

PANEL = "Operate the fleet"
#: Seconds between two looks of ``logs --follow`` and ``drain --wait``.
_LOOK = 1.0

Ids = Annotated[list[str] | None, typer.Argument(metavar="[ID]...", help="Rollouts.", show_default=False)]
Batch = Annotated[str | None, typer.Option(metavar="BATCH", help="All of this batch that have not ended.")]
Group = Annotated[str | None, typer.Option(metavar="GROUP", help="All of this group that have not ended.")]


def _workers(incomplete: str) -> list[str]:
    """Complete a worker's name; silent when Redis does not answer."""
    try:
        names = asyncio.run(_with_operator(read_settings(), lambda operator: operator.workers()))
    except (Exception, SystemExit):  # noqa: BLE001 - a completion has nobody to tell
        return []
    return [name for name in names if name.startswith(incomplete)]


Worker = Annotated[str, typer.Argument(help="A worker's name, as `rollouts status` shows it.", autocompletion=_workers)]


@app.command(rich_help_panel=PANEL)
def ps(
    where: Annotated[
        str | None, typer.Option("--state", metavar="STATE", help="running, lapsed, delayed, parked or pending.")
    ] = None,
    batch: Annotated[str | None, typer.Option(metavar="BATCH", help="Only of this batch.")] = None,
    group: Annotated[str | None, typer.Option(metavar="GROUP", help="Only of this group.")] = None,
    worker: Annotated[str | None, typer.Option(metavar="NAME", help="Only on this worker, or pool.")] = None,
    queue: Annotated[str | None, typer.Option(metavar="QUEUE", help="Only of this queue.")] = None,
    limit: Annotated[int, typer.Option(min=0, help="How many at most; 0 for all.")] = 50,
    redis_url: RedisUrl = None,
    as_json: AsJson = False,
) -> None:
    """List the rollouts that have not ended: where each is, on which worker, in which phase and for how long."""
    wanted = _wanted(where, batch, group, worker, queue)
    with problems_end_it():
        found, more = asyncio.run(_with_operator(read_settings(redis_url), lambda op: _first(op, wanted, limit)))
    if as_json:
        _print_json({"rollouts": [one.as_dict() for one in found], "more": more})
        return
    from producer.listing import show_listed

    show_listed(found, more)


@app.command(rich_help_panel=PANEL)
def logs(
    rollout_id: Annotated[str, typer.Argument(metavar="ID", help="A rollout.")],
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until it ends.")] = False,
    redis_url: RedisUrl = None,
    as_json: AsJson = False,
) -> None:
    """Show where a rollout stands, what failed before, and what its workers have logged of it.

    Lines come from the memory of workers that are alive (ROLLOUTS_RECENT_LINES each): those of a dead worker are where
    its standard error went.
    """
    with problems_end_it():
        known = asyncio.run(_with_operator(read_settings(redis_url), lambda op: _logs(op, rollout_id, follow, as_json)))
    raise typer.Exit(not known)


@app.command(rich_help_panel=PANEL)
def cancel(
    ids: Ids = None, batch: Batch = None, group: Group = None, redis_url: RedisUrl = None, as_json: AsJson = False
) -> None:
    """Cancel rollouts by their ids, or all of a batch or group; those that run end a moment later."""
    _require_named(ids, batch, group)

    async def act(operator: Operator) -> dict[str, Any]:
        named = ids or await _ids_of(operator, _wanted(None, batch, group))
        return dict(await operator.cancel(named))

    with problems_end_it():
        answers = asyncio.run(_with_operator(read_settings(redis_url), act))
    _print_answers(answers, as_json, good={"cancelled", "requested"})


@app.command(rich_help_panel=PANEL)
def retry(ids: Ids = None, redis_url: RedisUrl = None, as_json: AsJson = False) -> None:
    """Run rollouts that have ended again, with all their attempts, and those that wait for a delay at once.

    The result that such a rollout had is dropped. A consumer that has it already is not told of the next one; what a
    run that is over has in its results file runs again with `rollouts run --resume`.
    """
    _require_named(ids, None, None)
    with problems_end_it():
        answers = asyncio.run(_with_operator(read_settings(redis_url), lambda operator: operator.retry(ids or [])))
    _print_answers(dict(answers), as_json, good={"retried"})


@app.command(rich_help_panel=PANEL)
def drain(
    worker: Worker,
    wait: Annotated[bool, typer.Option("--wait", help="Until it has ended.")] = False,
    redis_url: RedisUrl = None,
    as_json: AsJson = False,
) -> None:
    """Have a worker take nothing new, end what it runs within its drain timeout, hand over the rest, and exit.

    As SIGTERM does; what restarts workers, such as Kubernetes, will start another.
    """
    with problems_end_it():
        drained, living = asyncio.run(_with_operator(read_settings(redis_url), lambda op: _drain(op, worker, wait)))
    if as_json:
        _print_json({"worker": drained or worker, "draining": drained is not None})
    elif drained:
        typer.echo(f"{drained} {'has ended' if wait else 'drains'}")
    else:
        typer.echo(
            f"error: no living worker named {worker} answers; there are: {', '.join(living) or 'none'}", err=True
        )
    raise typer.Exit(not drained)


def watch_status(settings: ProducerSettings, interval: float, as_json: bool) -> None:
    """Show the fleet's status until Ctrl-C."""
    from rich.console import Console

    from producer.watch import watch

    async def act(operator: Operator) -> None:
        await watch(operator.connection, Console(), interval, as_json=as_json)

    try:
        asyncio.run(_with_operator(settings, act))
    except KeyboardInterrupt:
        raise typer.Exit(0) from None


def _wanted(
    where: str | None, batch: str | None, group: str | None, worker: str | None = None, queue: str | None = None
) -> Wanted:
    from producer.operating import Wanted, Where

    if where is not None and where not in set(Where):
        bad_usage(f"--state {where}: there are {', '.join(Where)}")
    return Wanted(Where(where) if where else None, batch, group, worker, queue)


def _require_named(ids: list[str] | None, batch: str | None, group: str | None) -> None:
    if bool(ids) + (batch is not None) + (group is not None) != 1:
        bad_usage("give ids of rollouts, or one of --batch and --group, where the command has these")


@asynccontextmanager
async def _operator(settings: ProducerSettings) -> AsyncIterator[Operator]:
    from producer.connection import FleetConnection
    from producer.operating import Operator

    connection = FleetConnection(settings.redis_url, patience=0)
    await connection.open()
    try:
        yield Operator(connection)
    finally:
        await connection.close()


async def _with_operator(settings: ProducerSettings, act: Callable[[Operator], Awaitable[T]]) -> T:
    async with _operator(settings) as operator:
        return await act(operator)


async def _first(operator: Operator, wanted: Wanted, limit: int) -> tuple[list[Any], bool]:
    """Return the first ``limit`` that are wanted, and whether there are more."""
    found: list[Any] = []
    async for one in operator.listed(wanted):
        if limit and len(found) == limit:
            return found, True
        found.append(one)
    return found, False


async def _ids_of(operator: Operator, wanted: Wanted) -> list[str]:
    return [one.rollout_id async for one in operator.listed(wanted)]


async def _logs(operator: Operator, rollout_id: str, follow: bool, as_json: bool) -> bool:
    """Print a rollout's state and lines, again while it runs; returns whether there is such a rollout."""
    from producer.listing import show_line, show_record

    shown: set[str] = set()
    told: dict[str, Any] = {}
    while True:
        record = await operator.record(rollout_id)
        lines = await operator.lines_of(rollout_id)
        if not record and not lines and not shown:
            typer.echo(f"error: Redis has no record of {rollout_id}, and no worker has lines of it", err=True)
            return False
        if as_json and not follow:
            _print_json({"rollout_id": rollout_id, "record": record, "lines": lines})
            return True
        if not as_json and record != told:
            show_record(rollout_id, record)
            told = record
        for line in lines:
            if (key := repr(line)) not in shown:
                shown.add(key)
                _print_json(line) if as_json else show_line(line)
        if not follow or record.get("state") in {None, "done"}:
            return True
        await asyncio.sleep(_LOOK)


async def _drain(operator: Operator, given: str, wait: bool) -> tuple[str | None, list[str]]:
    """Return the worker that drains, None where none answers, and the living ones; one host's needs no ``@HOST``."""
    living = await operator.workers()
    named = [name for name in living if given in {name, name.partition("@")[0]}]
    if len(named) != 1 or not await operator.ask("drain", 1, worker=named[0]):
        return None, living
    while wait and named[0] in await operator.workers():  # noqa: ASYNC110 - Redis has no event for it
        await asyncio.sleep(_LOOK)
    return named[0], living


def _print_answers(answers: dict[str, Any], as_json: bool, good: set[str]) -> None:
    """Print what became of each rollout; status 1 where it was not what was asked for."""
    if as_json:
        _print_json({"rollouts": answers})
    else:
        for rollout_id, answer in answers.items():
            typer.echo(f"{answer:<10} {rollout_id}")
        if not answers:
            typer.echo("there are none", err=True)
    raise typer.Exit(not answers or any(answer not in good for answer in answers.values()))


def _print_json(value: dict[str, Any]) -> None:
    import orjson

    sys.stdout.write(orjson.dumps(value).decode() + "\n")
    sys.stdout.flush()
