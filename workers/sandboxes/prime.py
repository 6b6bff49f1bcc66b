"""Sandboxes on the Prime platform, through its own SDK.

What a rollout costs there: one request each to create, to see it run (shared by those that are created together), to
reach it, to start the agent, for what it has printed, and to delete; and the looks at whether the agent has ended,
which all running agents of a worker share.
"""

from __future__ import annotations

import asyncio
import logging
import posixpath
import re
import secrets
import shlex
import shutil
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from producer import broker
from workers.aio import uninterrupted
from workers.errors import SandboxError
from workers.prime import credentials, private_folder
from workers.sandboxes import files
from workers.sandboxes.base import BackgroundJob, CommandResult, FoundSandbox, Sandbox, SandboxProvider, SandboxSpec
from workers.sandboxes.polls import Poller
from workers.sandboxes.prime_client import JobKey, Platform
from workers.sandboxes.prime_lifecycle import Lifecycle
from workers.sandboxes.prime_output import Record, keep_ends, new_record, read_output
from workers.throttle import Throttle

if TYPE_CHECKING:
    from workers.settings import WorkerSettings

#: Bytes of a command line, quoted as the SDK quotes it, beyond which it goes as a file: Linux takes 128 KiB.
LONGEST_COMMAND = 96 * 1024
#: Seconds that closing waits for sandboxes to be deleted, and for connections.
DELETE_LIMIT, CLOSE_LIMIT = 60.0, 10.0

logger = logging.getLogger(__name__)

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
#: What a file has after an upload, so that `chmod` is not needed.
_USUAL_MODE = 0o644


@dataclass(frozen=True, kw_only=True)
class Options:
    """How a worker uses the platform.

    ``concurrent_creates`` bounds the creations that this worker asks for at one time, ``creates_per_minute`` those of
    the whole fleet, through a token bucket named ``bucket`` in the Redis at ``redis_url`` (of this process alone, with
    None). ``poll_interval`` is the longest time in seconds between two looks at whether a command has ended, and
    ``output_limit`` how many bytes of a command's stdout and of its stderr are kept.
    """

    redis_url: str | None = None
    bucket: str = "sandbox-creates"
    creates_per_minute: float = 3000.0
    concurrent_creates: int = 50
    poll_interval: float = 5.0
    output_limit: int = 65536


class PrimeSandboxes(SandboxProvider):
    """Makes sandboxes on the Prime platform, with the credentials that its SDK finds (`workers.prime.credentials`).

    ``options`` are those of `Options`. There is one SDK client for each event loop, made when the first sandbox is; the
    thread that closes must run that loop.
    """

    def __init__(self, **options: Any) -> None:
        self._options = Options(**options)
        self._on_loops: dict[asyncio.AbstractEventLoop, _OnLoop] = {}
        self._closed = False

    @asynccontextmanager
    async def create(self, spec: SandboxSpec) -> AsyncIterator[Sandbox]:
        """Create a sandbox on entry, ready to use; on exit delete it, shielded and bounded.

        Raises `SandboxError` on entry when it cannot be made, and on exit when it may be left on the platform.
        """
        here = self._here()
        sandbox = PrimeSandbox(await here.lifecycle.create(spec), here)
        here.open.add(sandbox)
        try:
            yield sandbox
        except BaseException:
            await sandbox.delete_quietly()
            raise
        # A deletion that outlasts the clean-up's deadline goes on behind it: a slot of the worker is not held for it.
        await sandbox.delete()

    async def find(self, labels: tuple[str, ...], team_id: str | None = None) -> list[FoundSandbox]:
        """Return the living sandboxes of the account, or of ``team_id``, that carry all of ``labels``."""
        return await self._here().platform.living(labels, team_id)

    async def delete(self, sandbox_id: str) -> None:
        """Delete a sandbox in one try; raises `SandboxError` when it may be left."""
        await self._here().platform.delete(sandbox_id)

    async def aclose(self) -> None:
        """Delete what is left of all sandboxes that were made on this event loop, then close its connections."""
        self._closed = True
        if here := self._on_loops.pop(asyncio.get_running_loop(), None):
            await uninterrupted(here.aclose(), timeout=None)

    def _here(self) -> _OnLoop:
        if self._closed:
            raise SandboxError("the provider of Prime sandboxes is closed")
        loop = asyncio.get_running_loop()
        if loop not in self._on_loops:
            if problem := credentials().problem:
                raise SandboxError(f"no sandbox can be created: {problem}", retryable=False)
            self._on_loops[loop] = _OnLoop(self._options)
        return self._on_loops[loop]


def prime_sandboxes(settings: WorkerSettings) -> PrimeSandboxes:
    """Make the provider that a worker's settings describe."""
    return PrimeSandboxes(
        redis_url=settings.redis_url,
        creates_per_minute=settings.sandbox_creates_per_minute,
        concurrent_creates=settings.sandbox_concurrent_creates,
        poll_interval=settings.poll_interval,
        output_limit=settings.output_limit,
    )


class _OnLoop:
    """What belongs to one event loop."""

    def __init__(self, options: Options) -> None:
        self.output_limit = options.output_limit
        self.folder = private_folder()
        # Not the default one, which hooks may fill.
        self.executor = ThreadPoolExecutor(4, thread_name_prefix="sandbox")
        self.redis = _redis(options.redis_url) if options.redis_url else None
        self.platform = Platform(self.folder)
        creates, longest = options.concurrent_creates, options.poll_interval
        self.throttle = Throttle(
            self.redis, broker.throttle_key(options.bucket), per_minute=options.creates_per_minute, burst=creates
        )
        self.lifecycle = Lifecycle(self.platform, self.throttle, concurrent=creates, poll_interval=longest)
        self.polls: Poller[JobKey, int] = Poller(self.platform.jobs, longest=longest)
        self.open: set[PrimeSandbox] = set()
        self.deletions: set[asyncio.Task[None]] = set()

    def deletion_ended(self, deletion: asyncio.Task[None]) -> None:
        """Forget a deletion; whoever waits for it gets its failure, and the ledger's sweep sees to the rest."""
        self.deletions.discard(deletion)
        if not deletion.cancelled():
            deletion.exception()

    async def aclose(self) -> None:
        """Delete, finish, disconnect; everything is bounded."""
        try:
            await self.lifecycle.aclose()  # first: what it creates meanwhile is open then
            await self._delete_all()
            await self.polls.aclose(SandboxError("the provider of Prime sandboxes is closed"))
            async with asyncio.timeout(CLOSE_LIMIT):
                await self.throttle.aclose()
                await self.platform.aclose()
                if self.redis:
                    await self.redis.aclose()
        except TimeoutError:
            logger.warning("Connections to the platform did not close within %g s.", CLOSE_LIMIT)
        finally:
            self.executor.shutdown(wait=False)
            shutil.rmtree(self.folder, ignore_errors=True)

    async def _delete_all(self) -> None:
        for sandbox in list(self.open):
            sandbox.begin_deletion()
        deletions = list(self.deletions)
        if not deletions:
            return
        _, late = await asyncio.wait(deletions, timeout=DELETE_LIMIT)
        if late:
            logger.error("%d sandboxes are not deleted within %g s; they end by themselves.", len(late), DELETE_LIMIT)


class PrimeSandbox(Sandbox):
    """One sandbox. A path ``app/x`` is ``/app/x``, in uploads and downloads."""

    def __init__(self, sandbox_id: str, here: _OnLoop) -> None:
        self._id = sandbox_id
        self._here = here
        self._platform = here.platform
        self._folders = {"/", "/tmp"}  # noqa: S108 - those that are in every sandbox
        self._deleting: asyncio.Task[None] | None = None

    @property
    def id(self) -> str:
        """The platform's id."""
        return self._id

    async def start_job(
        self, command: str, *, env: dict[str, str] | None = None, working_dir: str | None = None
    ) -> BackgroundJob:
        """Start ``command`` in the background, in bash.

        When this fails or is cancelled, the command may run all the same: the sandbox is of no more use then. ``env``
        goes by a file, so that the sandbox's process list does not show it.
        """
        self.check()
        _check_command(command, env or {})
        line = f"/bin/bash -c {shlex.quote(command)}"
        # The SDK puts it into a shell line of its own, once more quoted.
        if env or _size(shlex.quote(line)) > LONGEST_COMMAND:
            line = f"/bin/bash {await self._script(command, env or {})}"
        record = new_record(self._here.output_limit)
        job = await self._platform.launch(self._id, record.of(line), working_dir)
        return PrimeJob(self, self._here, job.job_id, record)

    async def execute_command(
        self,
        command: str,
        *,
        env: dict[str, str] | None = None,
        working_dir: str | None = None,
        timeout: float = 300.0,
    ) -> CommandResult:
        """Run ``command`` to its end; the platform counts ``timeout`` in whole seconds."""
        self.check()
        line = command
        _check_command(command, env or {})
        if _size(command) > LONGEST_COMMAND:
            line = f"/bin/bash {await self._script(command, {})}"
        what = f"could not run {_head(command)!r} (timeout {timeout:g} s)"
        result = await self._platform.execute(
            self._id, line, what=what, timeout=timeout, env=env, working_dir=working_dir
        )
        limit = self._here.output_limit
        return CommandResult(result.exit_code, keep_ends(result.stdout, limit), keep_ends(result.stderr, limit))

    async def upload_bytes(self, path: str, data: bytes) -> None:
        """Write ``data`` to ``path``, making its folders."""
        self.check()
        target = _absolute(path)
        folder = posixpath.dirname(target)
        if folder not in self._folders:
            await self._must(f"mkdir -p -- {shlex.quote(folder)}", f"could not make the folder {folder!r}")
            self._folders.add(folder)
        await self._platform.upload(self._id, target, data)

    async def upload_file(self, path: str, source: Path) -> None:
        """Copy the local file ``source`` to ``path`` with its permission bits."""
        loop = asyncio.get_running_loop()
        try:
            data, mode = await loop.run_in_executor(self._here.executor, _read_file, source)
        except (OSError, ValueError) as error:
            raise files.sandbox_error(f"could not read {str(source)!r}", error) from error
        await self.upload_bytes(path, data)
        if mode != _USUAL_MODE:
            target = shlex.quote(_absolute(path))
            await self._must(f"chmod {mode:o} -- {target}", f"could not change the mode of {path!r}")

    async def download(self, path: str) -> bytes:
        """Return the content of ``path``, an ordinary file of at most `files.FETCH_LIMIT` bytes."""
        self.check()
        target = _absolute(path)
        quoted = shlex.quote(target)
        size = await self._must(f"[ -f {quoted} ] && wc -c < {quoted}", f"{path!r} is not an ordinary file to read")
        if size.strip().isdigit() and int(size) > files.FETCH_LIMIT:
            message = f"{path!r} has {size.strip()} bytes; no more than {files.FETCH_LIMIT} are fetched"
            raise SandboxError(message, retryable=False)
        local = self._here.folder / secrets.token_hex(8)
        try:
            await self._platform.download(self._id, target, local)
            return await asyncio.get_running_loop().run_in_executor(self._here.executor, local.read_bytes)
        finally:
            local.unlink(missing_ok=True)

    async def delete(self) -> None:
        """Delete the sandbox; who waits for a job in it gets `SandboxError` first. May be called again."""
        await asyncio.shield(self._begin_deletion(self._here.lifecycle.delete))

    async def delete_quietly(self) -> None:
        """Delete the sandbox; a failure is logged only, for another error is on its way already."""
        await asyncio.shield(self._begin_deletion(self._here.lifecycle.delete_quietly))

    def begin_deletion(self) -> None:
        """Begin to delete the sandbox, without waiting for it."""
        self._begin_deletion(self._here.lifecycle.delete_quietly)

    def check(self) -> None:
        """Raise `SandboxError` when this sandbox is no more."""
        if self._deleting is not None:
            raise SandboxError(f"sandbox {self._id} was deleted")

    def _begin_deletion(self, delete: Callable[[str], Coroutine[None, None, None]]) -> asyncio.Task[None]:
        if self._deleting is None:
            # First, so that nothing waits for a look at a job of this sandbox.
            self._here.polls.drop(lambda key: key[0] == self._id, SandboxError(f"sandbox {self._id} was deleted"))
            self._here.open.discard(self)
            self._deleting = asyncio.create_task(delete(self._id))
            self._here.deletions.add(self._deleting)
            self._deleting.add_done_callback(self._here.deletion_ended)
        return self._deleting

    async def _must(self, command: str, what: str) -> str:
        """Run a command of our own and return what it prints; raises `SandboxError` when it fails."""
        result = await self._platform.execute(self._id, command, what=what, timeout=60)
        if result.exit_code:
            raise SandboxError(what, detail=result.stderr or None, retryable=False)
        return result.stdout

    async def _script(self, command: str, env: dict[str, str]) -> str:
        """Write ``command`` to a file that removes itself when it is run; returns its path."""
        path = f"/tmp/.rollouts-{secrets.token_hex(8)}.sh"  # noqa: S108 - in the sandbox
        exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in env.items())
        text = f'rm -f -- "$0"\n{exports}{command}\n'
        await self.upload_bytes(path, text.encode())
        return path


class PrimeJob(BackgroundJob):
    """A command in the background of a sandbox."""

    def __init__(self, sandbox: PrimeSandbox, here: _OnLoop, job_id: str, record: Record) -> None:
        self._key: JobKey = (sandbox.id, job_id)
        self._record = record
        self._sandbox = sandbox
        self._here = here
        self._exit_code: int | None = None
        self._result: CommandResult | None = None

    async def ended(self) -> int:
        """Return the exit code; raises `SandboxError` when the sandbox was deleted or died before that."""
        if self._exit_code is None:
            self._sandbox.check()
            self._exit_code = await self._here.polls.wait(self._key)
        return self._exit_code

    async def wait(self) -> CommandResult:
        """Return how the command ended, with what it printed."""
        if self._result is None:
            code = await self.ended()
            self._result = await self._read(code, self._record)
        return self._result

    async def output(self) -> CommandResult | None:
        """Return what the command has printed so far, with exit code -1 unless its end has been seen."""
        if self._result is not None:
            return self._result
        self._sandbox.check()
        return await self._read(-1, None)

    async def _read(self, exit_code: int, record: Record | None) -> CommandResult:
        return await read_output(self._here.platform, self._key, exit_code, self._here.output_limit, record)


def _redis(url: str) -> Redis:
    # The throttle has a patience of its own, and something to fall back to.
    return Redis.from_url(url, socket_timeout=2, socket_connect_timeout=2, retry=Retry(NoBackoff(), 0))


def _absolute(path: str) -> str:
    if "\x00" in path:
        raise SandboxError(f"{path!r} is not a path", retryable=False)
    return posixpath.normpath("/" + path.lstrip("/"))


def _check_command(command: str, env: dict[str, str]) -> None:
    """Refuse what no process can be given, without showing a value, which may be a secret."""
    for name, value in env.items():
        if not _VARIABLE.fullmatch(name):
            raise SandboxError(f"{name!r} is not the name of a variable", retryable=False)
        if "\x00" in value:
            raise SandboxError(f"the value of variable {name} has a null byte", retryable=False)
    if "\x00" in command:
        raise SandboxError("a command has a null byte", retryable=False)


def _size(text: str) -> int:
    return len(text.encode(errors="replace"))


def _head(command: str) -> str:
    line = command.strip().partition("\n")[0]
    return line if len(line) <= 80 else f"{line[:80]}..."


def _read_file(source: Path) -> tuple[bytes, int]:
    with source.open("rb") as file:
        return file.read(), source.stat().st_mode & 0o7777
