"""Sandboxes: folders and real processes, from creation to the last of their processes' end."""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from subprocess import DEVNULL
from typing import Any

from emulators.prime.models import CreateSandbox
from emulators.prime.paths import PathView
from emulators.prime.processes import SANDBOX_VARIABLE, Child, start
from workers.reaper import KILL_LIMIT, carriers, kill_each, remove_tree

ACTIVE = frozenset({"PENDING", "PROVISIONING", "RUNNING", "PAUSED"})
#: Seconds between two looks at the process table for what deleted sandboxes have left.
SWEEP_INTERVAL = 0.25


@dataclass
class Image:
    """How sandboxes of one image fare."""

    pull_fails: bool = False
    build_seconds: float = 0.0
    oom_at_start: bool = False
    built_at: float | None = None
    build_id: str = field(default_factory=lambda: f"build-{secrets.token_hex(4)}")


@dataclass(eq=False)
class Job:
    """A background job; ``exit_code`` is None while it runs."""

    job_id: str
    child: Child | None = None
    exit_code: int | None = None


@dataclass(eq=False)
class Sandbox:
    """One sandbox, as the platform knows it."""

    id: str
    request: CreateSandbox
    paths: PathView
    base_environment: dict[str, str]
    created_at: datetime = field(default_factory=lambda: datetime.now(UTC))
    updated_at: datetime = field(default_factory=lambda: datetime.now(UTC))
    status: str = "PENDING"
    error_type: str | None = None
    error_message: str | None = None
    termination_reason: str | None = None
    pending_image_build_id: str | None = None
    deleted: bool = False
    used: bool = False
    tokens: set[str] = field(default_factory=set)
    children: set[Child] = field(default_factory=set)
    jobs: dict[str, Job] = field(default_factory=dict)
    timers: list[asyncio.TimerHandle] = field(default_factory=list)
    #: Called when the sandbox dies, to cut the streams of its running commands.
    on_death: set[Callable[[], None]] = field(default_factory=set)

    @property
    def job_name(self) -> str:
        """The last part of the sandbox's gateway address."""
        return f"job-{self.id}"

    def adopt(self, child: Child) -> None:
        self.children.add(child)
        child.on_exit(lambda _: self.children.discard(child))

    def environment(self, extra: Iterable[tuple[str, str]] = ()) -> dict[str, str]:
        """Return the variables of one process; what the request and the command give may name sandbox paths."""
        given = {**(self.request.environment_vars or {}), **(self.request.secrets or {}), **dict(extra)}
        own = {name: self.paths.enter(value) for name, value in given.items()}
        return {**self.base_environment, **own, SANDBOX_VARIABLE: self.id}

    def prepare(self) -> None:
        """Make the folders on first use: many a sandbox is deleted without one."""
        if not self.used:
            self.used = True
            self.paths.create()

    def become(self, status: str, error_type: str | None = None, message: str | None = None) -> None:
        self.status = status
        self.error_type, self.error_message = error_type, message
        self.updated_at = datetime.now(UTC)
        self.pending_image_build_id = None


class Sandboxes:
    """All sandboxes that were ever created."""

    def __init__(self, directory: Path, kept: tuple[str, ...], minute_seconds: float, start_seconds: float) -> None:
        self.all: dict[str, Sandbox] = {}
        self.by_token: dict[str, Sandbox] = {}
        self.by_job_name: dict[str, Sandbox] = {}
        self.images: dict[str, Image] = {}
        self._by_key: dict[str, Sandbox] = {}
        self._directory = directory
        self._kept = kept
        self._minute = minute_seconds
        self._start_seconds = start_seconds
        self._environment = {"PATH": os.environ.get("PATH", os.defpath), "LANG": "C.UTF-8"}
        self._reap_variable: dict[str, str] = {}
        self._sweeper = Sweeper()

    def mark_processes(self, variable: dict[str, str]) -> None:
        """Give every process these variables."""
        self._reap_variable = variable

    def create(self, request: CreateSandbox) -> Sandbox:
        """Create a sandbox, or return the one that was created with the same idempotency key."""
        if request.idempotency_key and request.idempotency_key in self._by_key:
            return self._by_key[request.idempotency_key]
        sandbox_id = f"sb{secrets.token_hex(10)}"
        root = self._directory / sandbox_id
        base = {**self._environment, "HOME": f"{root}/root", "TMPDIR": f"{root}/tmp", **self._reap_variable}
        sandbox = Sandbox(sandbox_id, request, PathView(root, self._kept), base)
        self.all[sandbox_id] = sandbox
        self.by_job_name[sandbox.job_name] = sandbox
        if request.idempotency_key:
            self._by_key[request.idempotency_key] = sandbox
        self._schedule(sandbox)
        return sandbox

    def _schedule(self, sandbox: Sandbox) -> None:
        image = self.images.get(sandbox.request.docker_image or "", Image())
        now = time.monotonic()
        if image.built_at is None:
            image.built_at = now + image.build_seconds
        wait = max(0.0, image.built_at - now)
        if wait:
            sandbox.pending_image_build_id = image.build_id
        loop = asyncio.get_running_loop()
        lifetime = sandbox.request.timeout_minutes * self._minute
        sandbox.timers.append(loop.call_later(wait + self._start_seconds, self._start, sandbox, image))
        sandbox.timers.append(loop.call_later(wait + lifetime, self._expire, sandbox))

    def _start(self, sandbox: Sandbox, image: Image) -> None:
        if sandbox.status != "PENDING":
            return
        if image.pull_fails:
            message = f"Failed to pull image {sandbox.request.docker_image}: not found"
            self.end(sandbox, "ERROR", "IMAGE_PULL_FAILED", message)
        elif image.oom_at_start:
            self.end(sandbox, "ERROR", "OOM_KILLED", "The sandbox ran out of memory while it started")
        else:
            sandbox.become("RUNNING")
            self._run_start_command(sandbox)

    def _run_start_command(self, sandbox: Sandbox) -> None:
        command = sandbox.request.start_command
        if command is None:
            return
        sandbox.prepare()
        argv = [sandbox.paths.enter(argument) for argument in (command.executable, *command.args)]
        where = Path(sandbox.paths.root)
        try:
            sandbox.adopt(start(argv, env=sandbox.environment(), cwd=where, stdout=DEVNULL, stderr=DEVNULL))
        except OSError as error:
            self.end(sandbox, "ERROR", "START_COMMAND_FAILED", f"cannot start {command.executable}: {error.strerror}")

    def _expire(self, sandbox: Sandbox) -> None:
        if sandbox.status in ACTIVE:
            minutes = sandbox.request.timeout_minutes
            self.end(sandbox, "TIMEOUT", "TIMEOUT", f"The sandbox exceeded its lifetime of {minutes} minutes")

    def end(self, sandbox: Sandbox, status: str, error_type: str | None, message: str | None) -> None:
        """Let a sandbox die, and all that runs in it."""
        sandbox.become(status, error_type, message)
        for timer in sandbox.timers:
            timer.cancel()
        for callback in list(sandbox.on_death):
            callback()
        sandbox.on_death.clear()
        for child in list(sandbox.children):
            child.kill()
        self._sweeper.add(sandbox)

    def delete(self, sandbox: Sandbox) -> None:
        sandbox.deleted = True
        sandbox.termination_reason = "deleted"
        self.end(sandbox, "TERMINATED", sandbox.error_type, sandbox.error_message)

    def mint_token(self, sandbox: Sandbox) -> str:
        token = f"sbt-{secrets.token_hex(16)}"
        sandbox.tokens.add(token)
        self.by_token[token] = sandbox
        return token

    def expire_tokens(self, sandbox: Sandbox) -> None:
        for token in sandbox.tokens:
            self.by_token.pop(token, None)
        sandbox.tokens.clear()

    async def swept(self) -> None:
        """Wait until nothing of deleted sandboxes is waiting to be killed."""
        await self._sweeper.idle()

    async def strays(self) -> list[int]:
        """Return the living processes of sandboxes that have ended."""
        found = await asyncio.to_thread(carriers, SANDBOX_VARIABLE)
        ended = {sandbox.id for sandbox in self.all.values() if sandbox.status not in ACTIVE}
        return sorted(pid for value, pids in found.items() if value in ended for pid in pids)


class Sweeper:
    """Kills what has left its process group, and removes folders: one look at the process table for many sandboxes."""

    def __init__(self) -> None:
        self._waiting: list[Sandbox] = []
        self._task: asyncio.Task[None] | None = None

    def add(self, sandbox: Sandbox) -> None:
        if not sandbox.used:
            return
        self._waiting.append(sandbox)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())

    async def idle(self) -> None:
        while self._task and not self._task.done():
            await asyncio.shield(self._task)

    async def _run(self) -> None:
        while self._waiting:
            await asyncio.sleep(0)
            batch, self._waiting = self._waiting, []
            await asyncio.to_thread(self._sweep, batch)
            if self._waiting:
                await asyncio.sleep(SWEEP_INTERVAL)

    @staticmethod
    def _sweep(batch: list[Sandbox]) -> None:
        ids = {sandbox.id for sandbox in batch}
        end = time.monotonic() + KILL_LIMIT
        while time.monotonic() < end:
            pids = {pid for value, found in carriers(SANDBOX_VARIABLE).items() if value in ids for pid in found}
            if not pids:
                break
            kill_each(pids)
            time.sleep(0.005)
        for sandbox in batch:
            if sandbox.deleted:
                remove_tree(sandbox.paths.root)


def describe(sandbox: Sandbox) -> dict[str, Any]:
    """Return the platform's full record of a sandbox."""
    request = sandbox.request
    return {
        "id": sandbox.id,
        "name": request.name,
        "dockerImage": request.docker_image or "checkpoint",
        "startCommand": request.start_command.model_dump() if request.start_command else None,
        "cpuCores": request.cpu_cores,
        "memoryGB": request.memory_gb,
        "diskSizeGB": request.disk_size_gb if request.disk_size_gb is not None else 5.0,
        "diskMountPath": "/",
        "gpuCount": request.gpu_count,
        "gpuType": request.gpu_type,
        "vm": True,
        "networkAllowlist": request.network_allowlist,
        "networkDenylist": request.network_denylist,
        "status": sandbox.status,
        "timeoutMinutes": request.timeout_minutes,
        "idleTimeoutMinutes": request.idle_timeout_minutes,
        "terminationReason": sandbox.termination_reason,
        "environmentVars": request.environment_vars,
        "secrets": dict.fromkeys(request.secrets, "***") if request.secrets else None,
        "advancedConfigs": request.advanced_configs,
        "labels": request.labels,
        "createdAt": sandbox.created_at.isoformat(),
        "updatedAt": sandbox.updated_at.isoformat(),
        "errorType": sandbox.error_type,
        "errorMessage": sandbox.error_message,
        "userId": "user-emulated",
        "teamId": request.team_id,
        "pendingImageBuildId": sandbox.pending_image_build_id,
    }


def far_ahead() -> str:
    """Return a time at which a token may expire: less than a minute ahead, the SDK would fetch a new one each time."""
    return (datetime.now(UTC) + timedelta(hours=24)).isoformat()
