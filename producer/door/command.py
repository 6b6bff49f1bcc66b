"""The command ``rollouts env-server``."""

from __future__ import annotations

import asyncio
import logging
import signal
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

import typer

from producer.addresses import is_loopback
from producer.cli import RedisUrl, app, bad_usage, problems_end_it, read_settings
from producer.door.wire import Wire
from producer.queues import QUEUE, named

if TYPE_CHECKING:
    from producer.door.door import DoorOptions
    from producer.settings import ProducerSettings

_DAY = 24 * 3600.0


@app.command("env-server", rich_help_panel="Run the fleet")
def env_server(
    env: Annotated[
        str,
        typer.Option(
            metavar="CONFIG",
            help="The environment: a NAME.json or NAME.toml that the workers have too, in their ROLLOUTS_VERIFIERS, or "
            "only that NAME.",
        ),
    ],
    *,
    address: Annotated[str, typer.Option(help="Where to listen.")] = "tcp://127.0.0.1:5000",
    name: Annotated[
        str | None,
        typer.Option(help="Another door of this name goes on where this one was. [default: of config and address]"),
    ] = None,
    wire: Annotated[
        Wire, typer.Option(help="deltas: clients of verifiers 0.4; whole: of the versions before it.")
    ] = Wire.DELTAS,
    live: Annotated[bool, typer.Option("--live", help="Pass deltas on as they come, not with the reply.")] = False,
    timeout: Annotated[float, typer.Option(min=1, max=7 * _DAY, help="Seconds that an episode may take.")] = _DAY,
    patience: Annotated[
        float, typer.Option(min=1, help="Seconds in which a client that is gone may connect again; then cancelled.")
    ] = 60.0,
    attempts: Annotated[int, typer.Option(min=1, max=100, help="How often an episode is tried at most.")] = 3,
    priority: Annotated[int, typer.Option(min=0, max=9, help="0 is served first.")] = 3,
    allow_remote: Annotated[
        bool,
        typer.Option("--allow-remote", help="Listen on other addresses than loopback. The protocol knows no password."),
    ] = False,
    queue: Annotated[str, typer.Option(help="Queue of the workers that are to run the episodes.")] = QUEUE,
    redis_url: RedisUrl = None,
) -> None:
    """Serve verifiers' environment-server protocol, for prime-rl (serve.address) or any EnvClient (extra `verifiers`).

    Each run becomes a rollout of the fleet: a worker that dies is replaced, and a door that is started again answers
    what was in flight.
    """
    from producer.door.config import ServedConfigError, named_config
    from producer.errors import FleetError

    if not allow_remote and not _is_local(address):
        bad_usage(
            f"--address {address}: whoever reaches it can run episodes, and it knows no password; give a loopback "
            "address, or --allow-remote within a network of your own"
        )
    try:
        from producer.door.door import DoorOptions
    except ImportError as error:
        bad_usage(f"{error}: the door needs pyzmq and msgpack, pip install 'rollout-fleet[verifiers]'")
    with problems_end_it():
        settings = read_settings(redis_url)
        try:
            config, digest = named_config(env)
        except ServedConfigError as error:
            bad_usage(f"--env: {error}")
        options = DoorOptions(
            env=config,
            digest=digest,
            name=name or f"door-{config}-{address}",
            wire=wire,
            live=live,
            timeout=timeout,
            max_attempts=attempts,
            priority=priority,
            queue=_queue(queue),
            patience=patience,
        )
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
        try:
            asyncio.run(_serve(settings, address, options))
        except FleetError as error:
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(1) from None


def _queue(text: str) -> str:
    try:
        return named(text)
    except ValueError as error:
        bad_usage(f"--queue: {error}")


async def _serve(settings: ProducerSettings, address: str, options: DoorOptions) -> None:
    """Serve until SIGTERM or Ctrl-C; what is in flight goes on, for the door that comes next."""
    import zmq

    from producer.client import Producer
    from producer.door.door import Door
    from producer.door.socket import DoorSocket

    async with Producer(settings) as producer:
        try:
            socket = DoorSocket(address)
        except zmq.ZMQError as error:
            bad_usage(f"--address {address}: {error}")
        async with socket:
            typer.echo(f"env-server  {options.env} at {socket.address}", err=True)
            serving = asyncio.ensure_future(Door(producer, socket, options).serve())
            for number in (signal.SIGTERM, signal.SIGINT):
                asyncio.get_running_loop().add_signal_handler(number, serving.cancel)
            producer.served.expect(options.queue)
            await asyncio.wait({serving})
            if not serving.cancelled():
                serving.result()


def _is_local(address: str) -> bool:
    return address.startswith("ipc://") or is_loopback(urlsplit(address).hostname or "")
