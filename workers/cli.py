"""The ``rollouts`` command: the producer's commands, and those that run parts of the fleet."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from producer import operator_cli  # noqa: F401 - its commands
from producer.cli import app
from producer.door import command as _door  # noqa: F401 - its command
from workers.init import become_init_if_first

if TYPE_CHECKING:
    from workers.settings import WorkerSettings

__all__ = ["app", "main"]

T = TypeVar("T")

#: Seconds that a worker's threads have to end after everything else.
_EXIT_LIMIT = 2.0


class LogLevel(StrEnum):
    """Celery's log levels."""

    DEBUG = "DEBUG"
    INFO = "INFO"
    WARNING = "WARNING"
    ERROR = "ERROR"


def _guides(incomplete: str) -> list[str]:
    from workers.guide import GUIDES

    return [name for name in GUIDES if name.startswith(incomplete)]


@app.command(rich_help_panel="Run the fleet")
def worker(
    name: Annotated[str, typer.Option(help="Name of this worker process; the host is appended.")] = "worker",
    concurrency: Annotated[
        int | None, typer.Option(min=1, help="Rollouts at one time; default: ROLLOUTS_CONCURRENCY, or 100.")
    ] = None,
    events: Annotated[bool, typer.Option(help="Send task events, for Flower.")] = False,
    loglevel: Annotated[LogLevel, typer.Option(help="How much to log.", case_sensitive=False)] = LogLevel.INFO,
) -> None:
    """Run a worker process until it is told to stop (as `celery -A workers worker`, without gossip and mingle)."""
    from workers.app import create_app
    from workers.registry import check
    from workers.settings import WorkerSettings
    from workers.telemetry import configure_logging
    from workers.threads import leave_within

    settings = _configured(WorkerSettings)
    configure_logging(loglevel, settings.log_format)  # Celery warns before it sets up its own
    _configured(lambda: check(settings))
    _configured(lambda: _require_admin_token(settings))
    celery_app = _configured(lambda: create_app(settings))
    _require_platform(settings)
    _configured(lambda: _require_redis(settings))
    # Quiet: Celery would print a banner into the log lines.
    arguments = ["--quiet", "worker", "--hostname", name if "@" in name else f"{name}@%h", "--loglevel", loglevel]
    arguments += ["--without-gossip", "--without-mingle"]
    arguments += ["--concurrency", str(concurrency)] if concurrency else []
    arguments += ["--task-events"] if events else []
    status = celery_app.worker_main(arguments) or 0
    leave_within(_EXIT_LIMIT, status)
    raise typer.Exit(status)


class Probe(StrEnum):
    """What a worker can be asked."""

    LIVE = "live"
    READY = "ready"


@app.command(rich_help_panel="Run the fleet")
def probe(
    what: Annotated[Probe, typer.Argument(help="live: its event loop moves; ready: it takes rollouts.")],
) -> None:
    """Ask the worker of this host that has the same ROLLOUTS_ADMIN_PORT; status 1 if it is not, or does not answer."""
    from producer.cli import bad_usage
    from workers.admin import probe as ask
    from workers.settings import WorkerSettings

    settings = _configured(WorkerSettings)
    if not settings.admin_port:
        bad_usage("ROLLOUTS_ADMIN_PORT is not set; give the worker and this command the same one")
    health = ask(settings.admin_host, settings.admin_port, f"/{what}z")
    typer.echo(health.words)
    raise typer.Exit(not health.ok)


@app.command(rich_help_panel="Run the fleet")
def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print one JSON list on stdout.")] = False) -> None:
    """Look at everything that a worker with these settings needs, and say what to do; status 1 if it cannot work."""
    from workers.doctor import State, examine
    from workers.settings import WorkerSettings

    findings = asyncio.run(examine(_configured(WorkerSettings)))
    if as_json:
        typer.echo(json.dumps([finding.as_dict() for finding in findings]))
    for finding in findings if not as_json else []:
        colour = {State.OK: "green", State.WARN: "yellow", State.FAIL: "red"}[finding.state]
        typer.echo(f"{typer.style(finding.state.value.rjust(4), fg=colour)}  {finding.check:<12}  {finding.message}")
    raise typer.Exit(any(finding.state is State.FAIL for finding in findings))


@app.command(rich_help_panel="Run the fleet")
def guide(
    name: Annotated[
        str, typer.Argument(help="Which one; without a name, all are listed.", autocompletion=_guides)
    ] = "",
) -> None:
    """Print a guide: how to train with the fleet, write an environment, run a gateway, read a failure."""
    from producer.cli import bad_usage
    from workers import guide as guides

    if name in guides.GUIDES:
        typer.echo(guides.guide(name))
        return
    listed = "\n".join(f"{name:<14}{about}" for name, (_, about) in guides.GUIDES.items())
    if name:
        bad_usage(f"there is no guide {name!r}; there are:\n{listed}")
    typer.echo(listed)


@app.command(rich_help_panel="Run the fleet")
def leaks(
    delete: Annotated[bool, typer.Option("--delete", help="Delete all of it, and say what was deleted.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")] = False,
    older_than: Annotated[
        float, typer.Option(min=0, metavar="SECONDS", help="Spare sandboxes and tunnels that are younger.")
    ] = 120.0,
) -> None:
    """List what attempts that are over have left on the platform, its owner and age; status 1 if something is left."""
    from redis import RedisError

    from producer.cli import bad_usage
    from workers.errors import RolloutError
    from workers.leaks_report import find_leaks
    from workers.settings import WorkerSettings

    settings = _configured(WorkerSettings)
    try:
        cleared = _configured(lambda: asyncio.run(find_leaks(settings, delete=delete, grace=older_than)))
    except RedisError as error:
        bad_usage(f"Redis does not answer: {error}; check ROLLOUTS_REDIS_URL, and that the server runs")
    except RolloutError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from None
    typer.echo(json.dumps(cleared.as_dict()) if as_json else str(cleared))
    raise typer.Exit(bool(cleared.left))


@app.command(rich_help_panel="Run the fleet")
def gateway(
    upstream: Annotated[
        list[str] | None,
        typer.Option(help="Model server, such as http://host:8000/v1; repeatable; or ROLLOUTS_GATEWAY_UPSTREAM."),
    ] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on; default 127.0.0.1.")] = None,
    port: Annotated[int | None, typer.Option(min=0, max=65535, help="Port to listen on; default 8080.")] = None,
    journal: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Keep registrations and answered calls there, for a restart.")
    ] = None,
) -> None:
    """Run the bundled rollout gateway in front of one or more model servers."""
    from workers.gateway.server import GatewaySettings, run_gateway

    urls = ",".join(upstream) if upstream else None
    given: dict[str, Any] = {"upstream": urls, "host": host, "port": port, "journal": journal}
    settings = _configured(lambda: GatewaySettings(**{k: v for k, v in given.items() if v is not None}))
    _configured(lambda: run_gateway(settings))


@app.command(rich_help_panel="Run the fleet")
def up(
    workers: Annotated[int, typer.Option(min=1, help="Worker processes.")] = 1,
    concurrency: Annotated[int, typer.Option(min=1, help="Rollouts at one time in each.")] = 100,
    upstream: Annotated[str | None, typer.Option(metavar="URL", help="Your model server; else a stand-in.")] = None,
    llm: Annotated[bool, typer.Option("--llm", help="A small real model on the CPU (extra `llm`).")] = False,
    gateway: Annotated[bool, typer.Option(help="A gateway, or have each worker serve model calls itself.")] = True,
    redis_url: Annotated[str | None, typer.Option(metavar="URL", help="Your Redis; else one of its own.")] = None,
    log_dir: Annotated[Path | None, typer.Option(help="Keep the logs of all parts there.")] = None,
) -> None:
    """Run the whole fleet on this machine until Ctrl-C: server, model, gateway, workers, beat."""
    from workers.local import LocalStack, StackOptions

    options = StackOptions(
        workers=workers,
        concurrency=concurrency,
        upstream=upstream,
        llm=llm,
        gateway=gateway,
        redis_url=redis_url,
        log_dir=log_dir,
    )
    with _stack_problems_end_it(), LocalStack(options, on_progress=_tell) as stack:
        exports = "".join(f"  export {name}={value}\n" for name, value in stack.joining_variables().items())
        typer.echo(
            f"\nThe fleet is up; Ctrl-C ends it. In another terminal:\n\n"
            f"  export ROLLOUTS_REDIS_URL={stack.redis_url}\n"
            f"  rollouts status\n"
            f"  rollouts run TASKS.jsonl --out results.jsonl --model {stack.model} "
            '--run-command "python3 $PWD/AGENT.py"\n\n'
            f"To add a worker:\n\n{exports}  rollouts worker --name another\n"
        )
        asyncio.run(stack.watch())


@app.command(rich_help_panel="Run the fleet")
def demo(
    out: Annotated[Path, typer.Option(metavar="FILE", help="Results, one JSON object a line.")] = Path("results.jsonl"),
    workers: Annotated[int, typer.Option(min=1, help="Worker processes.")] = 1,
    samples: Annotated[int, typer.Option(min=1, help="Rollouts of each of the 16 tasks.")] = 4,
    upstream: Annotated[str | None, typer.Option(metavar="URL", help="Your model server; else a stand-in.")] = None,
    model: Annotated[str | None, typer.Option(help="Model to ask for, with --upstream.")] = None,
    llm: Annotated[bool, typer.Option("--llm", help="A small real model on the CPU (extra `llm`).")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the results in --out.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")] = False,
) -> None:
    """Run 16 small tasks, some samples each, on a fleet of this command's own, and write the results."""
    from producer.cli import bad_usage, print_summary
    from workers.demo.run import DemoOptions, run_demo

    if upstream and not model:
        bad_usage("--upstream needs --model, the name under which that server knows its model")
    options = DemoOptions(
        out=out, workers=workers, samples=samples, upstream=upstream, model=model, llm=llm, overwrite=overwrite
    )
    with _stack_problems_end_it():
        summary = run_demo(options, on_progress=_tell)
    typer.echo(f"results are in {out}", err=True)
    print_summary(summary, as_json)
    raise typer.Exit(summary.exit_code)


def _require_admin_token(settings: WorkerSettings) -> None:
    from workers.admin import check_exposure

    if settings.admin_port:
        check_exposure(settings.admin_host, settings.admin_token.get_secret_value() if settings.admin_token else None)


def _require_platform(settings: WorkerSettings) -> None:
    """End the command when the platform refuses this worker: it would fail every rollout that it takes."""
    from workers.doctor import State, platform, uses_platform

    if not uses_platform(settings):
        return
    for finding in asyncio.run(platform()):
        if finding.state is not State.OK:
            typer.echo(f"rollouts: {finding.message}", err=True)
            raise typer.Exit(2)


def _require_redis(settings: WorkerSettings) -> None:
    """Raise `ConfigurationError` when Redis refuses this worker or evicts keys; one that is away is waited for."""
    from contextlib import suppress

    import redis

    from workers.access import require
    from workers.local import quick_client

    with suppress(redis.ConnectionError, redis.TimeoutError), quick_client(settings.redis_url) as client:
        require(client, settings.redis_url, allow_eviction=settings.allow_eviction)


def _tell(part: str, what: str) -> None:
    typer.echo(f"{part:>10}  {what}", err=True)


@contextmanager
def _stack_problems_end_it() -> Iterator[None]:
    from producer.cli import bad_usage
    from producer.errors import FleetError, RunBrokenError
    from producer.results_file import ResultsFileError
    from workers.local import StackError

    try:
        yield
    except (StackError, RunBrokenError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from None
    except (ResultsFileError, FleetError) as error:
        bad_usage(str(error))
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def _configured(make: Callable[[], T]) -> T:
    """Make something from the settings; wrong ones end the command with status 2 and one line for each."""
    from pydantic import ValidationError

    from workers.registry import ConfigurationError

    try:
        return make()
    except ValidationError as error:
        prefix = "ROLLOUTS_GATEWAY_" if error.title.startswith("Gateway") else "ROLLOUTS_"
        lines = [_setting_line(prefix, e) for e in error.errors(include_url=False, include_input=False)]
    except (ConfigurationError, ValueError, OSError) as error:
        lines = [str(error)]
    for line in lines:
        typer.echo(f"rollouts: {line}", err=True)
    raise typer.Exit(2)


def _setting_line(prefix: str, error: Any) -> str:
    name = "_".join(map(str, error["loc"]))
    if error["type"] == "missing":
        return f"{prefix}{name.upper()} is not set; set it, or give --{name.replace('_', '-')}"
    variable = name if name.isupper() else f"{prefix}{name.upper()}"
    return f"{variable}: {error['msg'].removeprefix('Value error, ')}"


def main() -> None:
    """Entry point of the ``rollouts`` console script."""
    become_init_if_first()
    app()


if __name__ == "__main__":
    main()
