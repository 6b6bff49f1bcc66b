"""What the emulator's own tests share: how they drive the SDKs, and what they look at."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from prime_sandboxes import AsyncSandboxClient, BackgroundJob, CreateSandboxRequest, Sandbox
from prime_tunnel import Tunnel

from emulators.prime import PrimeEmulator

NOTHING: dict[str, list[Any]] = {"sandboxes": [], "tunnels": [], "processes": []}


def settle(monkeypatch: pytest.MonkeyPatch, emulator: PrimeEmulator) -> None:
    for name in list(os.environ):
        if name.startswith("PRIME_"):
            monkeypatch.delenv(name)
    for name, value in emulator.environ.items():
        monkeypatch.setenv(name, value)


def run(test: Callable[[AsyncSandboxClient], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(60), AsyncSandboxClient() as client:
            await test(client)

    asyncio.run(main())


def a_request(**changes: Any) -> CreateSandboxRequest:
    return CreateSandboxRequest(**{"name": "test", "docker_image": "python:3.11-slim", **changes})


@asynccontextmanager
async def running(client: AsyncSandboxClient, **changes: Any) -> AsyncIterator[Sandbox]:
    sandbox = await client.create(a_request(**changes))
    try:
        await client.wait_for_creation(sandbox.id)
        yield sandbox
    finally:
        await client.delete(sandbox.id)


def row(emulator: PrimeEmulator, sandbox_id: str) -> dict[str, Any]:
    return next(sandbox for sandbox in emulator.sandboxes() if sandbox["id"] == sandbox_id)


async def completed(client: AsyncSandboxClient, job: BackgroundJob) -> int:
    """Wait for a job's end by asking as often as the platform may be asked."""
    while True:
        (status,) = await client.get_background_job_statuses([job])
        if status.completed:
            assert status.exit_code is not None
            return status.exit_code
        await asyncio.sleep(0.01)


async def until(condition: Callable[[], Awaitable[object]]) -> None:
    async with asyncio.timeout(30):
        while not await condition():
            await asyncio.sleep(0.01)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in {"Z", "X"}
    except OSError:
        return False


def counted(emulator: PrimeEmulator, before: dict[str, int]) -> dict[str, int]:
    after = emulator.requests()
    return {name: count - before.get(name, 0) for name, count in after.items() if count > before.get(name, 0)}


@asynccontextmanager
async def local_server(handler: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Any]) -> AsyncIterator[int]:
    server = await asyncio.start_server(handler, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer with the request's line and body."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    length = next((int(line[15:]) for line in head.lower().split("\r\n") if line.startswith("content-length:")), 0)
    body = head.split("\r\n")[0].encode() + b"\n" + await reader.readexactly(length)
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%b" % (len(body), body))
    writer.close()


@asynccontextmanager
async def tunnel_to(port: int, **options: Any) -> AsyncIterator[Tunnel]:
    tunnel = Tunnel(port, **options)
    await tunnel.start()
    try:
        yield tunnel
    finally:
        await tunnel.stop()


def go(main: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(60):
            await main()

    asyncio.run(bounded())


async def create_and_delete(client: AsyncSandboxClient) -> None:
    await client.delete((await client.create(a_request())).id)
