"""The producer's commands: ``rollouts run``, ``status``, ``show`` and ``report``."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from shlex import join
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from producer.agents import AGENTS

if TYPE_CHECKING:
    from producer.files.output import ResultsOutput
    from producer.settings import ProducerSettings
    from producer.status import FleetStatus
    from producer.summary import Summary
    from producer.tasks_file import TaskDefaults, TasksFile

__all__ = ["app", "bad_usage", "print_summary", "problems_end_it", "read_settings"]

app = typer.Typer(name="rollouts", no_args_is_help=True)


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"rollouts {version('rollout-fleet')}")
        raise typer.Exit


@app.callback()
def _options(
    _: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version, and exit.")
    ] = False,
) -> None:
    """Run LLM-agent rollouts on a fleet of workers."""


RedisUrl = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="Redis of the fleet. A URL with a password belongs into ROLLOUTS_REDIS_URL: every user of the machine can "
        "read a command line. [default: $ROLLOUTS_REDIS_URL, or local]",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout, and nothing else there.")]


@app.command()
def run(
    tasks: Annotated[
        Path | None,
        typer.Argument(
            metavar="[TASKS]",
            help="Tasks: a file with one JSON object a line, or - for standard input; a Parquet or Arrow file; the "
            "folder of a Hugging Face dataset, or of such files.",
            show_default=False,
        ),
    ] = None,
    *,
    out: Annotated[
        Path,
        typer.Option(
            metavar="FILE",
            help="Results as they come: one JSON object a line, or with the suffix .parquet a folder of Parquet files.",
        ),
    ],
    maps: Annotated[
        list[str] | None,
        typer.Option(
            "--map", metavar="FIELD=COLUMN", help="Fill a field from a column, such as prompt=question. Repeatable."
        ),
    ] = None,
    template: Annotated[
        str | None,
        typer.Option(metavar="TEXT|@FILE", help="The prompt, with columns in it, such as 'Solve: {question}'."),
    ] = None,
    split: Annotated[str | None, typer.Option(metavar="NAME", help="Which split of a dataset's folder.")] = None,
    harbor: Annotated[
        Path | None,
        typer.Option(metavar="TASKS_DIR", help="Instead of a file: tasks in Harbor's format, a folder each."),
    ] = None,
    agent: Annotated[str | None, typer.Option(metavar="NAME", help=f"Agent for --harbor: {', '.join(AGENTS)}.")] = None,
    samples: Annotated[int, typer.Option(min=1, help="Rollouts of each task.")] = 1,
    model: Annotated[str | None, typer.Option(help="Model, for tasks that name none.")] = None,
    environment: Annotated[str | None, typer.Option(help="Environment, for tasks that name none.")] = None,
    run_command: Annotated[str | None, typer.Option(help="Agent's command, for tasks that give none.")] = None,
    image: Annotated[str | None, typer.Option(help="Sandbox image, for tasks that name none.")] = None,
    gateway_url: Annotated[str | None, typer.Option(help="Rollout gateway, for tasks that name none.")] = None,
    queue: Annotated[
        str | None, typer.Option(help="Queue of the workers that are to run tasks that name none.")
    ] = None,
    max_in_flight: Annotated[int | None, typer.Option(min=1, help="Rollouts in Redis at one time.")] = None,
    timeout: Annotated[float | None, typer.Option(help="Agent's seconds, for tasks that set none.")] = None,
    redis_url: RedisUrl = None,
    as_json: AsJson = False,
    resume: Annotated[bool, typer.Option("--resume", help="Run only what --out does not hold yet.")] = False,
    keep_failed: Annotated[bool, typer.Option("--keep-failed", help="On --resume, keep errors too.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the results in --out.")] = False,
) -> None:
    """Run every task of a file or a dataset, or of a folder of Harbor tasks, and write the results as they come.

    A line or row of TASKS has any fields of a rollout request; example_id defaults to its number, and batch_id is
    replaced by this run's own. With --map or --template, other columns are left out. With --harbor, a task's example_id
    is its folder's name, and --image and --timeout are for tasks that name none. All tasks are checked before anything
    is submitted.

    --resume matches results to tasks by example_id and sample_index. Results that completed, or whose agent ran out of
    time, are kept. Those with errors run again and their old results are dropped, unless --keep-failed is given. Tasks
    whose results are kept must be what they were. What a run that was killed had submitted is not submitted again: what
    ended meanwhile is written, and what still runs is waited for.

    Exit status: 0 all completed, with those kept by --resume; 1 some did not, or the run broke off; 2 bad usage or no
    Redis, and nothing runs; 130 interrupted.
    """
    from producer.files.mapping import ColumnMapping
    from producer.files.output import prepare_results
    from producer.files.record import Run, recall, remember
    from producer.resume import Resumption
    from producer.runner import RunOptions, run_batch
    from producer.tasks_file import TaskDefaults, TasksFile, run_batch_id

    if resume and overwrite:
        bad_usage("--resume and --overwrite exclude each other")
    with problems_end_it():
        settings = read_settings(redis_url)
        defaults = TaskDefaults(model, environment, run_command, image, gateway_url, timeout, queue)
        defaults.check()
        mapping = ColumnMapping(maps or (), template)
        if tasks is not None and harbor is None and agent is None:
            file = TasksFile.load(tasks, defaults, samples, mapping=mapping, split=split, tell=_tell_checked)
        elif mapping.is_set or split is not None:
            bad_usage("--map, --template and --split are for tables and lines of JSON, given as TASKS")
        else:
            file = _harbor_tasks(tasks, harbor, agent, defaults, samples)
        if mapping.left_out:
            typer.echo(f"columns that are left out: {', '.join(sorted(mapping.left_out))}", err=True)
        _refuse_same(out, file)
        results = prepare_results(out, overwrite=overwrite, resume=resume, keep_failed=keep_failed)
        one = Run(run_batch_id(file.path))
        if resume:
            _refuse_changed(out, file, results)
            one = (recall(out) or one).resumed()
        left = file.left(results.kept)
        if results.kept:
            typer.echo(f"{out} holds {len(results.kept)} results that are kept; {left} rollouts to run", err=True)
        options = RunOptions(
            settings=settings,
            batch_id=one.batch_id,
            total=left,
            max_in_flight=max_in_flight,
            fresh_ids=() if resume else file.explicit_ids,
            resume_hint=_resume_command(sys.argv[1:]),
            on_open=lambda: remember(out, file.digests(), one),
            resumption=Resumption(one, keep_failed=keep_failed) if resume else None,
        )
        summary = run_batch(file.requests(one.batch_id, results.kept), results, options)
    print_summary(summary, as_json)
    raise typer.Exit(summary.exit_code)


@app.command()
def status(
    redis_url: RedisUrl = None,
    as_json: AsJson = False,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Go on, live; with --json an object a line.")] = False,
    interval: Annotated[float, typer.Option(min=0.1, metavar="SECONDS", help="With --watch: how often.")] = 2.0,
) -> None:
    """Show workers, queue depths, and rollouts in flight by phase."""
    with problems_end_it():
        if watch:
            from producer.operator_cli import watch_status

            watch_status(read_settings(redis_url), interval, as_json)
        found = asyncio.run(_status(read_settings(redis_url)))
    if as_json:
        _print_json(found.as_dict())
    else:
        from rich.console import Console

        found.show(Console())


Results = Annotated[
    Path, typer.Argument(metavar="RESULTS", help="What --out named: lines of JSON, or a folder of Parquet files.")
]


@app.command()
def show(
    results: Results,
    rollout: Annotated[
        str | None,
        typer.Argument(metavar="[ID]", help="A rollout's id, how it begins, or its example id.", show_default=False),
    ] = None,
    *,
    failed: Annotated[bool, typer.Option("--failed", help="Only errors, and agents that ran out of time.")] = False,
    sort: Annotated[
        str | None, typer.Option(metavar="COLUMN", help="By id, reward, turns, tokens, time or start.")
    ] = None,
    reverse: Annotated[bool, typer.Option("--reverse", help="Highest first.")] = False,
    limit: Annotated[int, typer.Option(min=0, help="Rollouts in the table; 0 for all.")] = 50,
    full: Annotated[bool, typer.Option("--full", help="With ID, do not cut long texts.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With ID, print the whole result as JSON.")] = False,
) -> None:
    """Show the results of a run as a table, or with ID one rollout's trajectory: its turns, tool calls and failures."""
    from producer.files.read import ResultsReader
    from producer.show import SORTS, Listing, find, show_listing, show_result
    from producer.terminal import console

    if sort is not None and sort not in SORTS:
        bad_usage(f"--sort {sort}: there are {', '.join(SORTS)}")
    if rollout is None and (full or as_json):
        bad_usage("--full and --json are for one rollout; give its ID")
    with problems_end_it():
        reader = ResultsReader(results)
        if rollout is None:
            show_listing(reader, Listing(failed, sort, reverse, limit), console())
        elif as_json:
            sys.stdout.write(find(reader, rollout).to_json().decode() + "\n")
        else:
            show_result(find(reader, rollout), console(), full=full)


@app.command()
def report(
    results: Results,
    *,
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="The page.")] = Path("report.html"),
    trajectories: Annotated[int, typer.Option(min=0, help="Trajectories in the page; half of them failures.")] = 500,
    title: Annotated[str | None, typer.Option(help="The page's title. [default: the results' name]")] = None,
) -> None:
    """Make one self-contained HTML page of a run's results: plots, and a browser of trajectories."""
    from producer.files.read import ResultsReader
    from producer.report import ReportOptions, write_report

    if out.exists() and results.exists() and out.samefile(results):
        bad_usage(f"--out {out} is the results themselves")
    with problems_end_it():
        options = ReportOptions(title=title or f"Rollouts of {results.name}", trajectories=trajectories)
        written = write_report(ResultsReader(results), out, options)
    typer.echo(
        f"{out}: {written.rollouts} rollouts, {written.trajectories} trajectories, {written.size / 1e6:.1f} MB",
        err=True,
    )


def _harbor_tasks(
    tasks: Path | None, harbor: Path | None, agent: str | None, defaults: TaskDefaults, samples: int
) -> TasksFile:
    from producer.harbor import read_tasks
    from producer.tasks_file import TasksFile

    if (tasks is None) == (harbor is None):
        bad_usage("give either a file of tasks, or --harbor TASKS_DIR")
    if harbor is None:
        bad_usage("--agent is for --harbor; the agent of a file's tasks is their run_command")
    if agent is None:
        bad_usage(f"--harbor needs --agent; there are {', '.join(AGENTS)}")
    if defaults.run_command is not None:
        bad_usage("--run-command and --harbor exclude each other: --agent says what runs")
    return TasksFile.check(harbor.resolve(), read_tasks(harbor, agent, defaults.image), defaults, samples)


def _tell_checked(count: int) -> None:
    typer.echo(f"{count} tasks checked", err=True)


def _refuse_same(out: Path, file: TasksFile) -> None:
    from producer.files.lines import STDIN

    if file.path != STDIN and out.exists() and out.samefile(file.path):
        bad_usage(f"--out {out} is the file of tasks itself")


def _refuse_changed(out: Path, file: TasksFile, results: ResultsOutput) -> None:
    from producer.errors import first_of
    from producer.files.record import record_path

    if found := list(file.changed(out, results.kept)):
        bad_usage(
            f"{len(found)} of the tasks whose results {out} holds are not what they were: {first_of(found)}; give the "
            f"same tasks, model and template, or name another --out (or remove {record_path(out)} to mix them)"
        )


def _resume_command(arguments: list[str]) -> str:
    """Return the command that runs the rest of what ``arguments`` ran."""
    kept = [argument for argument in arguments if argument not in {"--overwrite", "--resume"}]
    return join(["rollouts", *kept, "--resume"])


def read_settings(redis_url: str | None = None) -> ProducerSettings:
    """Read the producer's settings, ``redis_url`` before the environment's; exits with 2 when one is wrong."""
    from pydantic import ValidationError

    from producer.settings import ProducerSettings

    given: dict[str, Any] = {} if redis_url is None else {"redis_url": redis_url}
    try:
        return ProducerSettings(**given)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        bad_usage(f"ROLLOUTS_{'.'.join(map(str, first['loc'])).upper()}: {first['msg'].removeprefix('Value error, ')}")


def print_summary(summary: Summary, as_json: bool = False) -> None:
    """Print a run's summary on stdout, as tables whose last line is the run in one line, or as one JSON object."""
    if as_json:
        _print_json(summary.as_dict())
    else:
        from rich.console import Console

        summary.show(Console())


def bad_usage(message: str) -> NoReturn:
    """Print what is wrong, and exit with status 2."""
    typer.echo(f"error: {message}", err=True)
    raise typer.Exit(2)


@contextmanager
def problems_end_it() -> Iterator[None]:
    """Turn what a command may meet into a sentence and an exit status."""
    from producer.contract import InvalidRequestError
    from producer.errors import FleetError, RunBrokenError
    from producer.files.errors import ResultsFileError, TasksFileError

    try:
        yield
    except TasksFileError as error:
        typer.echo(str(error), err=True)
        bad_usage(f"{error.count} problem(s) in the tasks; nothing was submitted")
    except RunBrokenError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from None
    except (InvalidRequestError, ResultsFileError, FleetError) as error:
        bad_usage(str(error))
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


async def _status(settings: ProducerSettings) -> FleetStatus:
    from producer.connection import FleetConnection
    from producer.status import read_status

    connection = FleetConnection(settings.redis_url, patience=0)
    await connection.open()
    try:
        return await read_status(connection)
    finally:
        await connection.close()


def _print_json(value: dict[str, Any]) -> None:
    import orjson

    sys.stdout.write(orjson.dumps(value).decode() + "\n")


if __name__ == "__main__":
    app()
