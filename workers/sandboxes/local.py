"""Sandboxes for development on one machine: process groups in a directory of their own. They isolate nothing.

An agent runs as the worker's user, sees the machine's files, network and processes, and could read the worker's own
memory. Use it for agents that you would start in a terminal yourself.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import ParamSpec, TypeVar

from producer.contract import Phase
from workers.aio import in_own_thread, uninterrupted
from workers.errors import SandboxError
from workers.reaper import SANDBOX_VARIABLE, Reaper, remove_tree
from workers.sandboxes import files
from workers.sandboxes.base import BackgroundJob, CommandResult, Sandbox, SandboxProvider, SandboxSpec
from workers.sandboxes.process import Census, OutputFiles, ProcessGroup, headline, kill_all, shell_line

P = ParamSpec("P")
T = TypeVar("T")

#: Seconds that deleting one sandbox may take, killing and removing together.
DELETE_LIMIT = 20.0
#: Threads that start processes and move files, and those that clean up. They are the provider's own, and apart from
#: each other: neither a hook that blocks nor a queue of uploads may delay a clean-up.
WORK_THREADS, CLEANUP_THREADS = 8, 2

logger = logging.getLogger(__name__)


class LocalSandboxes(SandboxProvider):
    """Makes sandboxes that are mere process groups in directories of their own: for development, isolating nothing.

    ``root`` is where the directories are made (a temporary directory if None); ``output_limit`` is how many bytes of
    a command's stdout and of its stderr are kept. All sandboxes end with this process, even when it is killed by
    SIGKILL: a `Reaper` sees to it. ``spec.image``, ``cpu_cores`` and ``gpu_count`` are ignored; ``memory_gb`` and
    ``disk_gb`` limit each single process and file (see `shell_line`).

    A command's environment holds PATH (this process's, then the directory of its Python, so that ``python`` is found),
    HOME and TMPDIR inside the sandbox, LANG, what the spec and the call give, and two marker variables.
    """

    def __init__(self, *, root: Path | None = None, output_limit: int = 65536) -> None:
        self._root = root
        self._output_limit = output_limit
        self._path = os.pathsep.join([os.environ.get("PATH", os.defpath), str(Path(sys.executable).parent)])
        self._executor = ThreadPoolExecutor(WORK_THREADS, thread_name_prefix="sandbox")
        self._cleaners = ThreadPoolExecutor(CLEANUP_THREADS, thread_name_prefix="sandbox-cleanup")
        self._census = Census(self._cleaners, SANDBOX_VARIABLE)
        self._base: Path | None = None
        self._reaper: Reaper | None = None
        self._has_directory = False
        self._open: set[LocalSandbox] = set()
        self._closed = False

    @asynccontextmanager
    async def create(self, spec: SandboxSpec) -> AsyncIterator[Sandbox]:
        """Create a sandbox on entry; on exit kill its processes and remove its directory, shielded and bounded.

        ``spec.start_command`` is started as a container's main process would be, but its end does not end the sandbox.
        Raises `SandboxError` on entry when it cannot be made, and on exit when something of it is left.
        """
        sandbox = self._make(spec)
        try:
            if spec.start_command:
                await sandbox.start_job(spec.start_command)
            yield sandbox
        except BaseException:
            await self._delete_after_failure(sandbox)
            raise
        await uninterrupted(sandbox.delete(), timeout=None)

    async def aclose(self) -> None:
        """Delete what is left of all sandboxes, then the directory of this provider."""
        self._closed = True
        await uninterrupted(self._aclose(), timeout=None)

    async def _aclose(self) -> None:
        try:
            await asyncio.gather(*[self._delete_after_failure(sandbox) for sandbox in list(self._open)])
        finally:
            if self._reaper:
                await in_own_thread(self._reaper.close, name="reaper-end")
            self._executor.shutdown(wait=False)
            self._cleaners.shutdown(wait=False)

    async def _delete_after_failure(self, sandbox: LocalSandbox) -> None:
        """Delete ``sandbox``; a failure is logged only, for another error is on its way already."""
        try:
            await uninterrupted(sandbox.delete(), timeout=None)
        except SandboxError as error:
            logger.warning(
                "Sandbox %s is not deleted: %s",
                sandbox.id,
                error.message,
                extra={"stage": "delete_sandbox", "sandbox_id": sandbox.id},
            )

    def _make(self, spec: SandboxSpec) -> LocalSandbox:
        if self._closed:
            raise SandboxError("the provider of local sandboxes is closed")
        try:
            base, reaper = self._started()
            sandbox = LocalSandbox(
                spec,
                base,
                environment={"PATH": self._path, "LANG": "C.UTF-8"},
                markers=reaper.environment(),
                executor=self._executor,
                cleaners=self._cleaners,
                census=self._census,
                output_limit=self._output_limit,
                on_deleted=self._open.discard,
            )
        except OSError as error:
            raise files.sandbox_error("could not create a sandbox", error) from error
        self._open.add(sandbox)
        return sandbox

    def _started(self) -> tuple[Path, Reaper]:
        """Return this provider's directory and its reaper, made at the first sandbox."""
        if self._base is None or self._reaper is None:
            base = (self._root or Path(tempfile.gettempdir())).resolve() / f"rollouts-{secrets.token_hex(8)}"
            # Before the directory, which nobody would remove if this process were killed in between.
            self._base, self._reaper = base, Reaper.start([base])
        if not self._has_directory:
            self._base.mkdir(mode=0o700, parents=True)
            self._has_directory = True
        return self._base, self._reaper


class LocalSandbox(Sandbox):
    """One sandbox: a directory, and whatever processes carry its id in their environment.

    Paths: its working directory is also its root, so that ``/app/x`` and ``app/x`` are both ``<directory>/app/x``, in
    uploads, downloads and ``working_dir`` (which is made if missing: there is no image that could bring it). Commands
    themselves see the machine's own file system.
    """

    def __init__(
        self,
        spec: SandboxSpec,
        base: Path,
        *,
        environment: dict[str, str],
        markers: dict[str, str],
        executor: ThreadPoolExecutor,
        cleaners: ThreadPoolExecutor,
        census: Census,
        output_limit: int,
        on_deleted: Callable[[LocalSandbox], None],
    ) -> None:
        self._id = f"local-{secrets.token_hex(6)}"
        self._home = base / self._id
        self.directory = self._home / "files"
        self._outputs = self._home / "output"
        for folder in (self._home, self.directory, self.directory / "tmp", self._outputs):
            folder.mkdir(mode=0o700)

        places = {"HOME": str(self.directory), "TMPDIR": str(self.directory / "tmp")}
        self._environment = environment | places | spec.env | spec.secrets
        self._markers = markers | {SANDBOX_VARIABLE: self._id}
        self._resources = spec.resources
        self._executor = executor
        self._cleaners = cleaners
        self._census = census
        self._output_limit = output_limit
        self._on_deleted = on_deleted

        self._groups: set[ProcessGroup] = set()
        self._used = False
        self._busy: set[asyncio.Future[object]] = set()
        self._gone: str | None = None
        self._deleting: asyncio.Task[None] | None = None
        self._timer = asyncio.get_running_loop().call_later(spec.ttl, self._expire, spec.ttl)

    @property
    def id(self) -> str:
        """The id, which is also the value of the marker variable of its processes."""
        return self._id

    @property
    def root(self) -> str:
        """The directory, for commands see the machine's own file system."""
        return str(self.directory)

    async def start_job(
        self, command: str, *, env: dict[str, str] | None = None, working_dir: str | None = None
    ) -> BackgroundJob:
        """Start ``command`` in the background, in bash where there is one; see `Sandbox.start_job`."""
        return _Job(self, await self._start(command, env, working_dir))

    async def execute_command(
        self,
        command: str,
        *,
        env: dict[str, str] | None = None,
        working_dir: str | None = None,
        timeout: float = 300.0,
    ) -> CommandResult:
        """Run ``command`` to its end; a timeout (`SandboxError`) or a cancellation kills its process group."""
        group = await self._start(command, env, working_dir)
        try:
            async with asyncio.timeout(timeout):
                code = await asyncio.shield(group.ended)
            return await self.read_output(group, code)
        except TimeoutError:
            group.kill()
            printed = await self.read_output(group, -1)
            raise SandboxError(
                f"the command {headline(command)!r} exceeded its timeout of {timeout:g} s",
                detail=f"{printed.stdout}\n{printed.stderr}".strip(),
            ) from None
        except BaseException:
            group.kill()
            raise
        finally:
            if not self._gone:  # thousands of commands may run here before the directory is removed
                asyncio.get_running_loop().run_in_executor(self._executor, group.output.remove)

    async def upload_bytes(self, path: str, data: bytes) -> None:
        """Write ``data`` to ``path``, making its folders; the file is replaced as a whole."""
        await self._move("write", path, files.write, path, lambda target: target.write_bytes(data))

    async def upload_file(self, path: str, source: Path) -> None:
        """Copy the local file ``source`` to ``path`` with its permission bits; the file is replaced as a whole."""
        await self._move("write", path, files.write, path, lambda target: shutil.copy(source, target))

    async def download(self, path: str) -> bytes:
        """Return the content of ``path``, an ordinary file of at most `files.FETCH_LIMIT` bytes."""
        return await self._move("read", path, files.read, path)

    async def delete(self) -> None:
        """Kill what carries this sandbox's id and remove its directory; may be called again.

        Raises `SandboxError` when that takes longer than `DELETE_LIMIT` seconds or something is left.
        """
        if self._deleting is None:
            self._gone = self._gone or "was deleted"
            self._timer.cancel()
            self._deleting = asyncio.create_task(self._delete())
        await asyncio.shield(self._deleting)

    def check(self) -> None:
        """Raise `SandboxError` when this sandbox is no more."""
        if self._gone:
            raise SandboxError(f"sandbox {self._id} {self._gone}")

    async def in_thread(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run ``function`` on a thread; if this is cancelled, deletion still waits until the function has ended."""
        self.check()
        work = asyncio.get_running_loop().run_in_executor(self._executor, lambda: function(*args, **kwargs))
        return await asyncio.shield(self._tracked(work))

    async def read_output(self, group: ProcessGroup, exit_code: int) -> CommandResult:
        """Return what ``group`` has printed, each stream's head and tail."""
        try:
            return await self.in_thread(group.output.read, exit_code, self._output_limit)
        except OSError as error:
            raise files.sandbox_error("could not read a command's output", error) from error

    def _tracked(self, work: asyncio.Future[T]) -> asyncio.Future[T]:
        self._busy.add(work)  # type: ignore[arg-type]
        work.add_done_callback(self._busy.discard)
        return work

    async def _start(self, command: str, env: dict[str, str] | None, working_dir: str | None) -> ProcessGroup:
        self.check()
        starting = self._tracked(asyncio.create_task(self._start_group(command, env or {}, working_dir)))
        try:
            group = await asyncio.shield(starting)
        except asyncio.CancelledError:
            starting.add_done_callback(_kill_unwanted)
            raise
        except (OSError, ValueError) as error:
            raise files.sandbox_error(f"could not start the command {headline(command)!r}", error) from None
        self.check()
        return group

    async def _start_group(self, command: str, env: dict[str, str], working_dir: str | None) -> ProcessGroup:
        cwd = self.directory
        if working_dir:
            cwd = await self.in_thread(files.make_folder, self.directory, working_dir)
        name = secrets.token_hex(8)  # one that can be guessed could be a pipe already, which blocks whoever opens it
        group = await ProcessGroup.start(
            self._executor,
            shell_line(command, self._resources),
            env=self._environment | env | self._markers,
            cwd=cwd,
            output=OutputFiles(self._outputs / f"{name}.out", self._outputs / f"{name}.err"),
        )
        self._used = True
        self._groups.add(group)
        group.ended.add_done_callback(lambda _: self._forget_if_empty(group))
        if self._gone:  # it expired while this was started
            group.kill()
        return group

    def _forget_if_empty(self, group: ProcessGroup) -> None:
        if not group.is_alive:
            self._groups.discard(group)

    async def _move(self, verb: str, shown: str, function: Callable[..., T], *args: object) -> T:
        try:
            return await self.in_thread(function, self.directory, *args)
        except (OSError, ValueError) as error:
            raise files.sandbox_error(f"could not {verb} {shown!r}", error) from error

    def _expire(self, ttl: float) -> None:
        self._gone = f"exceeded its time to live of {ttl:g} s"
        logger.warning(
            "Sandbox %s %s.", self._id, self._gone, extra={"stage": "expire_sandbox", "sandbox_id": self._id}
        )
        self._tracked(asyncio.create_task(self._kill_all()))

    async def _delete(self) -> None:
        try:
            async with asyncio.timeout(DELETE_LIMIT):
                await self._kill_all()
                if self._busy:  # among them a start, which may add a process
                    await asyncio.wait(self._busy)
                    await self._kill_all()
                loop = asyncio.get_running_loop()
                removed = await loop.run_in_executor(self._cleaners, remove_tree, self._home)
        except TimeoutError:
            message = f"deleting sandbox {self._id} took longer than {DELETE_LIMIT:g} s"
            raise SandboxError(message, phase=Phase.CLEANUP) from None
        finally:
            self._on_deleted(self)
        if not removed:
            raise SandboxError(f"directory {self._home} could not be removed", phase=Phase.CLEANUP)

    async def _kill_all(self) -> None:
        if self._used:
            await kill_all(self._census, self._id, self._groups)


class _Job(BackgroundJob):
    """A command in the background; its end is that of the started shell, whoever still holds its output files."""

    def __init__(self, sandbox: LocalSandbox, group: ProcessGroup) -> None:
        self._sandbox = sandbox
        self._group = group
        self._result: CommandResult | None = None

    async def ended(self) -> int:
        """Return the exit code; raises `SandboxError` when the sandbox was deleted or expired before that."""
        code = await asyncio.shield(self._group.ended)
        if self._result is None:
            self._sandbox.check()
        return code

    async def wait(self) -> CommandResult:
        """Return how the command ended, with what it printed; raises what `ended` raises."""
        if self._result is None:
            self._result = await self._sandbox.read_output(self._group, await self.ended())
        return self._result

    async def output(self) -> CommandResult | None:
        """Return what the command has printed so far, with exit code -1 while it runs."""
        if self._result is not None or self._group.ended.done():
            return await self.wait()
        return await self._sandbox.read_output(self._group, -1)


def _kill_unwanted(starting: asyncio.Future[ProcessGroup]) -> None:
    """Kill what was started for a caller that was cancelled meanwhile."""
    if not starting.cancelled() and starting.exception() is None:
        starting.result().kill()
