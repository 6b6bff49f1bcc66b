"""A sandbox provider without sandboxes, for benchmarks: its agents only wait, or end at once.

A worker finds it by ``ROLLOUTS_SANDBOX_PROVIDER=null_provider:null_sandboxes``. Agents with the command ``wait`` end
when the file named by ``ROLLOUTS_BENCH_RELEASE`` appears, 500 of them a second; those with ``nap SECONDS`` after that
many seconds, and all others at once.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from workers.sandboxes.base import BackgroundJob, CommandResult, FoundSandbox, Sandbox, SandboxSpec

DONE = CommandResult(0)


class NullJob:
    def __init__(self, ends: asyncio.Event | None, after: float = 0.0) -> None:
        self._ends = ends
        self._after = after

    async def ended(self) -> int:
        if self._ends is not None:
            await self._ends.wait()
        await asyncio.sleep(self._after)
        self._ends, self._after = None, 0.0
        return DONE.exit_code

    async def wait(self) -> CommandResult:
        await self.ended()
        return DONE

    async def output(self) -> CommandResult | None:
        return None


class NullSandbox:
    def __init__(self, number: int, released: asyncio.Event) -> None:
        self.id = f"null-{number}"
        self._number = number
        self._released = released

    async def start_job(self, command: str, **_: Any) -> BackgroundJob:
        if command != "wait":
            nap = command.removeprefix("nap ")
            return NullJob(None, after=float(nap) if nap != command else 0.0)
        # 500 a second: faster than they can be ended, but not all in one turn of the event loop.
        return NullJob(self._released, after=self._number % 10_000 / 500)

    async def execute_command(self, command: str, **_: Any) -> CommandResult:
        return DONE

    async def upload_bytes(self, path: str, data: bytes) -> None: ...

    async def upload_file(self, path: str, source: Path) -> None: ...

    async def download(self, path: str) -> bytes:
        return b""


class NullSandboxes:
    def __init__(self, release: Path | None) -> None:
        self._numbers = itertools.count(1)
        self._release = release
        self._released = asyncio.Event()
        self._watcher: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def create(self, spec: SandboxSpec) -> AsyncIterator[Sandbox]:
        if self._watcher is None:
            self._watcher = asyncio.create_task(self._watch())
        yield NullSandbox(next(self._numbers), self._released)

    async def _watch(self) -> None:
        while self._release is not None and not self._release.exists():
            await asyncio.sleep(0.1)
        self._released.set()

    async def find(self, labels: tuple[str, ...], team_id: str | None = None) -> list[FoundSandbox]:
        return []

    async def delete(self, sandbox_id: str) -> None: ...

    async def aclose(self) -> None:
        if self._watcher is not None:
            self._watcher.cancel()


def null_sandboxes(settings: object) -> NullSandboxes:
    release = os.environ.get("ROLLOUTS_BENCH_RELEASE")
    return NullSandboxes(Path(release) if release else None)
