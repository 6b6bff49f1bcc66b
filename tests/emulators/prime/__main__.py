"""The server process: ``python -m emulators.prime '{"channel": 3, ...}'``, started by `PrimeEmulator`."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import resource
import signal
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import uvloop

from emulators.prime.control import Channel, Commands
from emulators.prime.gateway import Gateway
from emulators.prime.paths import kept_paths
from emulators.prime.platform import SandboxApi
from emulators.prime.sandboxes import Sandboxes
from emulators.prime.server import Server
from emulators.prime.tunnels import Control, Tunnels
from emulators.prime.web import Connection
from workers.reaper import Reaper

_USER_NS = "ns-emulated"
MAX_FILES = 16_384
#: Bytes that have to be free in memory for the sandboxes to live there.
MEMORY_WANTED = 2 * 1024**3


@dataclass(frozen=True)
class Options:
    """What the handle hands over; see `PrimeEmulator`."""

    channel: int
    directory: str
    api_key: str
    minute_seconds: float
    start_seconds: float
    gateway_auth: bool
    windowed_reads: bool
    read_limit: int
    kept: list[str]


def roots_in(directory: Path) -> Path:
    """Return a new folder for the sandboxes: in memory if that will do, for a disk can take 10 ms to set one up."""
    memory = "/dev/shm"
    with suppress(OSError):
        about = os.statvfs(memory)
        if about.f_bavail * about.f_frsize >= MEMORY_WANTED and not about.f_flag & os.ST_NOEXEC:
            return Path(tempfile.mkdtemp(prefix="prime-emulator-", dir=memory))
    roots = directory / "sandboxes"
    roots.mkdir(exist_ok=True)
    return roots


async def serve(options: Options) -> None:
    """Serve until the handle's end of the channel is closed, however that comes about."""
    directory = Path(options.directory)
    roots = roots_in(directory)
    # Clears up what this process cannot, should it be killed.
    reaper = Reaper.start([roots, directory / "home"])
    sandboxes = Sandboxes(
        roots,
        kept_paths(directory, tuple(options.kept)),
        options.minute_seconds,
        options.start_seconds,
    )
    sandboxes.mark_processes(reaper.environment())
    tunnels = Tunnels()
    # Hundreds of sandboxes hold a few descriptors each, their clients' connections come on top.
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < MAX_FILES <= hard or hard == resource.RLIM_INFINITY:
        resource.setrlimit(resource.RLIMIT_NOFILE, (MAX_FILES, hard))
    loop = asyncio.get_running_loop()
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    frps = await loop.create_server(lambda: Control(tunnels), "127.0.0.1", 0)
    tunnels.frps_port = frps.sockets[0].getsockname()[1]
    connections: set[Connection] = set()
    service: Server | None = None

    def connected() -> Connection:
        assert service is not None
        return Connection(service, connections)

    web = await loop.create_server(connected, "127.0.0.1", 0, backlog=2048)
    tunnels.api_url = api_url = f"http://127.0.0.1:{web.sockets[0].getsockname()[1]}"
    gateway = Gateway(sandboxes, _USER_NS, options.read_limit, windowed_reads=options.windowed_reads)
    api = SandboxApi(sandboxes, f"{api_url}/gw", _USER_NS, gateway_auth=options.gateway_auth)
    service = Server(options.api_key, api, tunnels, gateway)
    try:
        channel = await Channel.open(options.channel, Commands(service, sandboxes, tunnels), stopped)
        channel.say({"result": {"api_url": api_url, "pid": reaper.pid}})
        await stopped.wait()
    finally:
        for tunnel in tunnels.all.values():
            tunnel.kill_frpc()
        web.close()
        frps.close()
        for connection in list(connections):
            connection.abort()
        await asyncio.to_thread(reaper.close)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    uvloop.run(serve(Options(**json.loads(sys.argv[1]))))
