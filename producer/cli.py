"""The producer's commands: ``rollouts run`` and ``rollouts status``."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from shlex import join
from typing import Annotated, Any, NoReturn

import orjson
import typer
from pydantic import ValidationError
from rich.console import Console

from producer.connection import FleetConnection
from producer.contract import InvalidRequestError
from producer.errors import FleetError, RunBrokenError
from producer.harbor import AGENTS, read_tasks
from producer.results_file import ResultsFile, ResultsFileError
from producer.runner import RunOptions, run_batch
from producer.settings import ProducerSettings
from producer.status import FleetStatus, read_status
from producer.summary import Summary
from producer.tasks_file import TaskDefaults, TasksFile, TasksFileError, run_batch_id

__all__ = ["RunOptions", "Summary", "app", "bad_usage", "print_summary", "read_settings", "run_batch"]

app = typer.Typer(
    name="rollouts", no_args_is_help=True, add_completion=False, help="Run LLM-agent rollouts on a fleet of workers."
)

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
        Path | None, typer.Argument(metavar="[TASKS.jsonl]", help="Tasks, one JSON object a line.", show_default=False)
    ] = None,
    *,
    out: Annotated[Path, typer.Option(metavar="FILE", help="Results, one JSON object a line, as they come.")],
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
    max_in_flight: Annotated[int | None, typer.Option(min=1, help="Rollouts in Redis at one time.")] = None,
    timeout: Annotated[float | None, typer.Option(help="Agent's seconds, for tasks that set none.")] = None,
    redis_url: RedisUrl = None,
    as_json: AsJson = False,
    resume: Annotated[bool, typer.Option("--resume", help="Run only what --out does not hold yet.")] = False,
    keep_failed: Annotated[bool, typer.Option("--keep-failed", help="On --resume, keep errors too.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the results in --out.")] = False,
) -> None:
    """Run every task of a file, or of a folder of Harbor tasks, and write the results as they come.

    A line of TASKS.jsonl has any fields of a rollout request; example_id defaults to the line's number, and batch_id is
    replaced by this run's own. With --harbor, a task's example_id is its folder's name, and --image and --timeout are
    for tasks that name none. All tasks are checked before anything is submitted.

    --resume matches results to tasks by example_id and sample_index. Results that completed, or whose agent ran out of
    time, are kept. Those with errors run again and their old lines are dropped, unless --keep-failed is given.

    Exit status: 0 all completed, with those kept by --resume; 1 some did not, or the run broke off; 2 bad usage or no
    Redis, and nothing runs; 130 interrupted.
    """
    if resume and overwrite:
        bad_usage("--resume and --overwrite exclude each other")
    with _problems_end_it():
        settings = read_settings(redis_url)
        defaults = TaskDefaults(model, environment, run_command, image, gateway_url, timeout)
        defaults.check()
        file = _tasks(tasks, harbor, agent, defaults, samples)
        if out.exists() and out.samefile(file.path):
            bad_usage(f"--out {out} is the file of tasks itself")
        results = ResultsFile.prepare(out, overwrite=overwrite, resume=resume, keep_failed=keep_failed)
        batch_id = run_batch_id(file.path)
        left = len(file.all_samples - results.kept)
        if results.kept:
            typer.echo(f"{out} holds {len(results.kept)} results that are kept; {left} rollouts to run", err=True)
        options = RunOptions(
            settings=settings,
            batch_id=batch_id,
            total=left,
            max_in_flight=max_in_flight,
            fresh_ids=() if resume else file.explicit_ids,
            resume_hint=_resume_command(sys.argv[1:]),
        )
        suffix = f"-{batch_id[-6:]}" if resume else ""
        summary = run_batch(file.requests(batch_id, results.kept, suffix), results, options)
    print_summary(summary, as_json)
    raise typer.Exit(summary.exit_code)


@app.command()
def status(redis_url: RedisUrl = None, as_json: AsJson = False) -> None:
    """Show workers, queue depths, and rollouts in flight by phase."""
    with _problems_end_it():
        found = asyncio.run(_status(read_settings(redis_url)))
    if as_json:
        _print_json(found.as_dict())
    else:
        found.show(Console())


def _tasks(
    tasks: Path | None, harbor: Path | None, agent: str | None, defaults: TaskDefaults, samples: int
) -> TasksFile:
    """Read and check what is to be run, from the one place that is named."""
    if (tasks is None) == (harbor is None):
        bad_usage("give either a file of tasks, or --harbor TASKS_DIR")
    if tasks is not None:
        if agent is not None:
            bad_usage("--agent is for --harbor; the agent of a file's tasks is their run_command")
        return TasksFile.load(tasks, defaults, samples)
    if agent is None or harbor is None:
        bad_usage(f"--harbor needs --agent; there are {', '.join(AGENTS)}")
    if defaults.run_command is not None:
        bad_usage("--run-command and --harbor exclude each other: --agent says what runs")
    return TasksFile.check(harbor.resolve(), read_tasks(harbor, agent, defaults.image), defaults, samples)


def _resume_command(arguments: list[str]) -> str:
    """Return the command that runs the rest of what ``arguments`` ran."""
    kept = [argument for argument in arguments if argument not in {"--overwrite", "--resume"}]
    return join(["rollouts", *kept, "--resume"])


def read_settings(redis_url: str | None = None) -> ProducerSettings:
    """Read the producer's settings, ``redis_url`` before the environment's; exits with 2 when one is wrong."""
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
        summary.show(Console())


def bad_usage(message: str) -> NoReturn:
    """Print what is wrong, and exit with status 2."""
    typer.echo(f"error: {message}", err=True)
    raise typer.Exit(2)


@contextmanager
def _problems_end_it() -> Iterator[None]:
    try:
        yield
    except TasksFileError as error:
        typer.echo(str(error), err=True)
        bad_usage(f"{len(error.problems)} problem(s) in the tasks; nothing was submitted")
    except RunBrokenError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from None
    except (InvalidRequestError, ResultsFileError, FleetError) as error:
        bad_usage(str(error))
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


async def _status(settings: ProducerSettings) -> FleetStatus:
    connection = FleetConnection(settings.redis_url, patience=0)
    await connection.open()
    try:
        return await read_status(connection)
    finally:
        await connection.close()


def _print_json(value: dict[str, Any]) -> None:
    sys.stdout.write(orjson.dumps(value).decode() + "\n")


if __name__ == "__main__":
    app()
