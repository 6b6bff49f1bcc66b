"""The sandbox as the flow sees it: create, run a background job, run commands, move files, delete."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from producer.contract import Resources
from workers.errors import SandboxError


@dataclass(frozen=True, kw_only=True)
class SandboxSpec:
    """What to create. ``ttl`` is in seconds: nothing lives longer, whoever dies. ``secrets`` must not be logged."""

    name: str
    image: str
    start_command: str | None = None
    resources: Resources = field(default_factory=Resources)
    env: dict[str, str] = field(default_factory=dict)
    secrets: dict[str, str] = field(default_factory=dict, repr=False)
    labels: tuple[str, ...] = ()
    ttl: float = 3600.0
    #: For the platform alone: whose account it is, and options that only it knows.
    team_id: str | None = None
    advanced: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class CommandResult:
    """How a command ended; long output keeps its head and tail with the cut marked. Killed by signal N is 128 + N."""

    exit_code: int
    stdout: str = ""
    stderr: str = ""


class BackgroundJob(Protocol):
    """A command that runs on in the sandbox while the worker waits."""

    async def ended(self) -> int:
        """Return the exit code as soon as it is known; raises `SandboxError` when the sandbox is gone."""
        ...

    async def wait(self) -> CommandResult:
        """Return how the command ended, with what it printed, which takes its time to read. May be called again."""
        ...

    async def output(self) -> CommandResult | None:
        """Return what the command has printed so far (exit code -1 while it runs), or None if that is not known."""
        ...


class Sandbox(Protocol):
    """One running sandbox. Every call raises `SandboxError`, retryable or not, with the platform's own words."""

    @property
    def id(self) -> str:
        """The provider's id of this sandbox."""
        ...

    @property
    def root(self) -> str:
        """Where commands see what is uploaded to ``/``: a folder, or "" for a sandbox with a file system of its own."""
        return ""

    async def start_job(
        self, command: str, *, env: dict[str, str] | None = None, working_dir: str | None = None
    ) -> BackgroundJob:
        """Start ``command`` (a shell line) in the background."""
        ...

    async def execute_command(
        self,
        command: str,
        *,
        env: dict[str, str] | None = None,
        working_dir: str | None = None,
        timeout: float = 300.0,
    ) -> CommandResult:
        """Run ``command`` (a shell line) to its end; one that exceeds ``timeout`` seconds raises `SandboxError`."""
        ...

    async def upload_bytes(self, path: str, data: bytes) -> None:
        """Write ``data`` to ``path`` in the sandbox, making its folders."""
        ...

    async def upload_file(self, path: str, source: Path) -> None:
        """Copy the local file ``source`` to ``path`` in the sandbox, with its permission bits."""
        ...

    async def download(self, path: str) -> bytes:
        """Return the content of ``path`` in the sandbox."""
        ...


@dataclass(frozen=True)
class FoundSandbox:
    """A sandbox that lives, whoever created it; ``created_at`` is in epoch seconds by the platform's clock."""

    id: str
    labels: tuple[str, ...]
    created_at: float


class SandboxProvider(Protocol):
    """Makes sandboxes."""

    def create(self, spec: SandboxSpec) -> AbstractAsyncContextManager[Sandbox]:
        """Create a sandbox on entry, ready to use; delete it on exit, shielded from cancellation."""
        ...

    async def find(self, labels: tuple[str, ...], team_id: str | None = None) -> list[FoundSandbox]:
        """Return the living sandboxes that carry all of ``labels``, also those of other processes.

        There are none where sandboxes end with the process that created them.
        """
        return []

    async def delete(self, sandbox_id: str) -> None:
        """Delete a sandbox that was found, in one try; one that is gone already is deleted."""
        raise SandboxError(f"no sandbox {sandbox_id!r} was found", retryable=False)

    async def aclose(self) -> None:
        """Release what the provider holds for itself."""
        ...
