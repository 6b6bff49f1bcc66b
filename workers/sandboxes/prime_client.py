"""The Prime platform's API over the SDK's own client, for one event loop: each call bounded, each error ours.

Three things are asked through the SDK's HTTP client directly, for its methods fail for all of a batch when one of it is
wrong: the states of sandboxes and of jobs, and why a sandbox died. `SandboxError` is raised everywhere.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import httpx
from prime_sandboxes import AsyncSandboxClient, BackgroundJob, CommandResponse, CreateSandboxRequest, ReadFileResponse
from prime_sandboxes.sandbox import AsyncSandboxAuthCache

from workers.aio import Turnstile, queued
from workers.connections import PlainClient
from workers.errors import SandboxError
from workers.instruments import PLATFORM_REQUESTS
from workers.prime import many_connections
from workers.sandboxes.base import FoundSandbox, SandboxSpec
from workers.sandboxes.polls import Answer, Ended, Failed, Unclear
from workers.sandboxes.prime_errors import (
    ENDED_STATES,
    SHORTEST_PAUSE,
    RateLimitError,
    UnansweredError,
    died,
    http_status,
    platform_call,
    retry_after,
    sandbox_error,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")
#: A background job: the ids of its sandbox and of itself.
JobKey = tuple[str, str]

#: Seconds for one call of each kind.
CREATE_LIMIT, STATUS_LIMIT, CONTEXT_LIMIT, DELETE_LIMIT = 60.0, 30.0, 10.0, 15.0
#: The SDK tries a launch three times, 30 s each.
LAUNCH_LIMIT = 100.0
#: What a command may take beyond its own timeout: the SDK then asks what became of the sandbox.
COMMAND_GRACE = 15.0
TRANSFER_LIMIT = 300.0
#: Seconds to wait after a 429 that does not say for how long.
RATE_LIMIT_DELAY = 10.0
#: Sandboxes in one page of a list; the platform's limit.
PAGE = 100
#: Files that are moved at one time.
TRANSFERS = 32
#: Files that are read at one time: small ones, and those of which a sandbox without windows sends up to 10 MiB.
READS, WHOLE_READS = 16, 2
#: Calls that begin in one turn of the event loop: the SDK takes half a millisecond for each.
PER_TURN = 4

#: What a look at a job may find that is no answer of the sandbox itself, and may change.
_UNCLEAR_CODES = {"RUNTIME_ERROR", "NOT_FOUND", "NOT_RUNNING"}


class Platform:
    """One SDK client, made on the event loop that uses it.

    ``folder`` is private to this process. The SDK would keep the sandboxes' tokens in a file below the user's home,
    readable by everybody, rewritten whole at every creation and shared by all processes; here they stay in memory.
    """

    def __init__(self, folder: Path, *, rate_limit_delay: float = RATE_LIMIT_DELAY) -> None:
        self._folder = folder
        self._rate_limit_delay = rate_limit_delay
        self._specs: dict[str, SandboxSpec] = {}
        self._transfers = asyncio.Semaphore(TRANSFERS)
        self._reads, self._whole_reads = asyncio.Semaphore(READS), asyncio.Semaphore(WHOLE_READS)
        self._turnstile = Turnstile(PER_TURN)
        self._sdk = AsyncSandboxClient(max_connections=2 * TRANSFERS, max_keepalive_connections=TRANSFERS)
        if not (hasattr(self._sdk, "_auth_cache") and hasattr(self._sdk, "_gateway_client")):
            raise RuntimeError("this version of prime-sandboxes is not made as 0.5 is, on which this code relies")
        self._tokens = _TokensInMemory(folder / "sandbox_auth_cache.json", self._sdk.client)
        self._sdk._auth_cache = self._tokens
        api = self._sdk.client
        if transport := many_connections(api.base_url):
            self._sdk._gateway_client = PlainClient(timeout=None, transport=transport)
            own = api.client
            api.client = PlainClient(
                headers=own.headers, follow_redirects=own.follow_redirects, timeout=own.timeout, transport=transport
            )
        for client in (api.client, self._sdk._get_gateway_client()):
            client.event_hooks = {"response": [_count, self._refuse_to_wait]}

    async def aclose(self) -> None:
        """Close all connections."""
        await self._sdk.aclose()

    # -- sandboxes -----------------------------------------------------------------------------------------------------

    async def create(self, request: CreateSandboxRequest, spec: SandboxSpec) -> tuple[str, str]:
        """Create a sandbox; returns its id and state. Raises also `RateLimitError`, for the caller to wait."""
        await self._turnstile()
        async with platform_call("could not create a sandbox", CREATE_LIMIT, spec=spec):
            sandbox = await self._sdk.create(request)
        self._specs[sandbox.id] = spec
        return sandbox.id, sandbox.status

    async def states(self, ids: Sequence[str]) -> Mapping[str, Answer[None]]:
        """Look at sandboxes that are being created: `Ended` when they run, `Failed` when they never will."""
        answers: dict[str, Answer[None]] = {}
        async with platform_call("could not ask for the state of sandboxes", STATUS_LIMIT):
            body = await self._batch("/sandbox/status:batchGet", {"sandbox_ids": list(ids)})
            if body is None:
                return await self._states_one_by_one(ids)
            for entry in body["statuses"]:
                answers[entry["sandbox_id"]] = self._state(entry["sandbox_id"], entry)
            for entry in body["errors"]:
                sandbox_id = entry["sandbox_id"]
                detail = f"{entry['code']}: {entry['message']}"
                error = SandboxError(f"sandbox {sandbox_id} is not known to the platform", detail=detail)
                # One that was created a moment ago may not be known everywhere yet.
                answers[sandbox_id] = Unclear(error) if entry["code"] == "NOT_FOUND" else Failed(error)
        return answers

    def _state(self, sandbox_id: str, entry: Mapping[str, Any]) -> Answer[None]:
        status = entry["status"]
        if status == "RUNNING":
            return Ended(None)
        if status in ENDED_STATES:
            return Failed(self._died(sandbox_id, entry))
        if entry.get("pending_image_build_id"):
            logger.debug("Sandbox %s waits for its image to be built.", sandbox_id)
        return None  # any other state, known today or not, is on the way

    async def _states_one_by_one(self, ids: Sequence[str]) -> Mapping[str, Answer[None]]:
        """Look at each with a request of its own, for a platform that has no batches of them."""
        found = await asyncio.gather(*map(self._sdk.get, ids), return_exceptions=True)
        return {
            sandbox_id: Unclear(sandbox_error("could not ask for the state of a sandbox", _exception(sandbox)))
            if isinstance(sandbox, BaseException)
            else self._state(sandbox_id, sandbox.model_dump())
            for sandbox_id, sandbox in zip(ids, found, strict=True)
        }

    async def find(self, label: str, team_id: str | None) -> list[str]:
        """Return the ids of the living sandboxes that carry ``label``."""
        return [sandbox.id for sandbox in await self.living((label,), team_id)]

    async def living(self, labels: tuple[str, ...], team_id: str | None) -> list[FoundSandbox]:
        """Return the living sandboxes that carry all of ``labels``."""
        found: dict[str, FoundSandbox] = {}
        page, more = 1, True
        while more:
            async with platform_call(f"could not list the sandboxes of {' '.join(labels)}", STATUS_LIMIT):
                answer = await self._sdk.list(
                    team_id=team_id, labels=list(labels), page=page, per_page=PAGE, exclude_terminated=True
                )
            for sandbox in answer.sandboxes:
                found[sandbox.id] = FoundSandbox(sandbox.id, tuple(sandbox.labels), _epoch(sandbox.created_at))
            page, more = page + 1, answer.has_next and bool(answer.sandboxes)
        # What the platform means by a filter of labels is its own affair: what lacks one of them was not asked for.
        return [sandbox for sandbox in found.values() if set(labels) <= set(sandbox.labels)]

    async def delete(self, sandbox_id: str) -> None:
        """Delete a sandbox; one that is gone already is deleted."""
        await self._turnstile()
        try:
            async with platform_call("could not delete a sandbox", DELETE_LIMIT):
                await self._sdk.delete(sandbox_id)
        except SandboxError as error:
            if http_status(error.__cause__) not in {404, 410}:
                raise
        finally:
            self._specs.pop(sandbox_id, None)  # it holds secrets
        await self._tokens.invalidate(sandbox_id)

    async def cause_of_death(self, sandbox_id: str) -> SandboxError | None:
        """Return why ``sandbox_id`` is no more, or None when the platform says that it lives."""
        try:
            async with platform_call("could not ask what became of a sandbox", CONTEXT_LIMIT, sandbox_id=sandbox_id):
                request = self._sdk.client.request("GET", f"/sandbox/{sandbox_id}/error-context", timeout=CONTEXT_LIMIT)
                context = await request
        except SandboxError as error:
            return error if http_status(error.__cause__) in {404, 410} else None
        return self._died(sandbox_id, context) if context.get("status") in ENDED_STATES else None

    def _died(self, sandbox_id: str, entry: Mapping[str, Any]) -> SandboxError:
        return died(
            sandbox_id,
            status=entry.get("status"),
            error_type=entry.get("error_type") or entry.get("errorType"),
            said=entry.get("error_message") or entry.get("errorMessage"),
            spec=self._specs.get(sandbox_id),
        )

    # -- commands and jobs ---------------------------------------------------------------------------------------------

    async def execute(
        self,
        sandbox_id: str,
        command: str,
        *,
        what: str,
        timeout: float,
        env: dict[str, str] | None = None,
        working_dir: str | None = None,
    ) -> CommandResponse:
        """Run ``command`` to its end; ``what`` begins the message of the error."""
        seconds = math.ceil(timeout)
        return await self._call(
            what,
            seconds + COMMAND_GRACE,
            sandbox_id,
            lambda: self._sdk.execute_command(sandbox_id, command, working_dir=working_dir, env=env, timeout=seconds),
        )

    async def launch(self, sandbox_id: str, command: str, working_dir: str | None) -> BackgroundJob:
        """Start ``command`` in the background. When this fails, it may run all the same: discard the sandbox."""
        return await self._call(
            "could not start a command in the background",
            LAUNCH_LIMIT,
            sandbox_id,
            lambda: self._sdk.start_background_job(sandbox_id, command, working_dir=working_dir),
        )

    async def jobs(self, keys: Sequence[JobKey]) -> Mapping[JobKey, Answer[int]]:
        """Look at background jobs: `Ended` with the exit code, `Failed` when the sandbox is no more."""
        found: dict[JobKey, Answer[int]] = {}
        troubled: dict[JobKey, Mapping[str, Any]] = {}
        async with platform_call("could not ask for the state of jobs", STATUS_LIMIT):
            jobs = [{"sandbox_id": sandbox_id, "job_id": job_id} for sandbox_id, job_id in keys]
            body = await self._batch("/sandbox/background-jobs/status:batchGet", {"jobs": jobs})
            if body is not None:
                troubled = {(entry["sandbox_id"], entry["job_id"]): entry for entry in body["errors"]}
                for entry in body["statuses"]:
                    key = entry["sandbox_id"], entry["job_id"]
                    if not entry["completed"]:
                        found[key] = None
                    elif entry["exit_code"] is not None:  # without one it is left out, which is unclear
                        found[key] = Ended(int(entry["exit_code"]))
        if body is None:
            answers = await asyncio.gather(*map(self._job_alone, keys))
            return dict(zip(keys, answers, strict=True))
        judged = await asyncio.gather(*(self._judge(key, entry) for key, entry in troubled.items()))
        return found | dict(zip(troubled, judged, strict=True))

    async def _judge(self, key: JobKey, entry: Mapping[str, Any]) -> Answer[int]:
        sandbox_id, job_id = key
        if death := await self.cause_of_death(sandbox_id):
            return Failed(death)
        detail = f"{entry['code']}: {entry['message']}"
        error = SandboxError(f"job {job_id} of sandbox {sandbox_id} cannot be looked at", detail=detail)
        return Unclear(error) if entry["code"] in _UNCLEAR_CODES else Failed(error)

    async def _job_alone(self, key: JobKey) -> Answer[int]:
        """Look at one job in its sandbox, for a platform that has no batches of them."""
        sandbox_id = key[0]
        try:
            async with platform_call("could not ask for the state of a job", STATUS_LIMIT, sandbox_id=sandbox_id):
                snapshot = await self._sdk.get_background_job_status(sandbox_id, _job(key), timeout=int(STATUS_LIMIT))
        except SandboxError as error:
            return await self._judge(key, {"code": "RUNTIME_ERROR", "message": error.detail or error.message})
        return Ended(snapshot.exit_code) if snapshot.completed and snapshot.exit_code is not None else None

    # -- files ---------------------------------------------------------------------------------------------------------

    async def upload(self, sandbox_id: str, path: str, data: bytes) -> None:
        """Write ``data`` to the absolute ``path``, whose folder must exist."""
        name = path.rpartition("/")[2]
        async with queued(self._transfers):
            await self._call(
                f"could not write {path!r}",
                TRANSFER_LIMIT,
                sandbox_id,
                lambda: self._sdk.upload_bytes(sandbox_id, path, data, name, timeout=int(TRANSFER_LIMIT)),
            )

    async def download(self, sandbox_id: str, path: str, target: Path) -> None:
        """Copy the absolute ``path`` to the local file ``target``."""
        async with queued(self._transfers):
            await self._call(
                f"could not read {path!r}",
                TRANSFER_LIMIT,
                sandbox_id,
                lambda: self._sdk.download_file(sandbox_id, path, str(target), timeout=int(TRANSFER_LIMIT)),
            )

    async def read(
        self, sandbox_id: str, path: str, *, offset: int, length: int, whole: bool = False
    ) -> ReadFileResponse:
        """Return a window of a text file, or, from a sandbox that has no windows, all of it, which may be ``whole``."""
        async with queued(self._whole_reads if whole else self._reads):
            return await self._call(
                f"could not read {path!r}",
                STATUS_LIMIT,
                sandbox_id,
                lambda: self._sdk.read_file(sandbox_id, path, offset=offset, length=length),
            )

    # -- below ---------------------------------------------------------------------------------------------------------

    async def _call(self, what: str, limit: float, sandbox_id: str, call: Callable[[], Awaitable[T]]) -> T:
        """Do ``call``, again after each 429 as far as ``limit`` goes: those are refused before anything is done."""
        loop = asyncio.get_running_loop()
        end, limited, delay = loop.time() + limit, None, SHORTEST_PAUSE
        while True:
            await self._turnstile()
            left = end - loop.time()
            if limited and left <= 0:
                raise _told_to_wait(what, limited) from limited
            try:
                async with platform_call(what, left, sandbox_id=sandbox_id, spec=self._specs.get(sandbox_id)):
                    return await call()
            except RateLimitError as error:
                limited = error
            except UnansweredError as error:
                if limited is None:
                    raise
                # What was left of the time after the last 429 may be too short for any answer.
                raise _told_to_wait(what, limited) from error
            wait, delay = limited.pause(delay), min(2 * delay, RATE_LIMIT_DELAY)
            if wait > end - loop.time():
                raise _told_to_wait(what, limited) from limited
            await asyncio.sleep(wait)

    async def _batch(self, endpoint: str, body: dict[str, Any]) -> Mapping[str, list[Mapping[str, Any]]] | None:
        """Ask for a batch; None from a platform that has no such endpoint."""
        try:
            return await self._sdk.client.request(
                "POST", endpoint, json=body, timeout=STATUS_LIMIT, idempotent_post=True
            )
        except Exception as error:
            if http_status(error) in {404, 405}:
                return None
            raise

    async def _refuse_to_wait(self, response: httpx.Response) -> None:
        """Raise on 429: the SDK would wait 10 s and then 30 s, whatever the platform asks for."""
        if response.status_code == 429:
            await response.aread()
            raise RateLimitError(retry_after(response, self._rate_limit_delay), response.text)


async def _count(response: httpx.Response) -> None:
    PLATFORM_REQUESTS.labels("sandboxes", response.status_code).inc()


class _TokensInMemory(AsyncSandboxAuthCache):
    """The SDK's cache of sandbox tokens without its file."""

    def __init__(self, cache_file_path: Path, client: Any) -> None:
        super().__init__(cache_file_path, client)
        self._loaded = True

    async def _save_cache(self) -> None:
        """Write nothing."""


def _epoch(moment: datetime) -> float:
    """Return a time of the platform in epoch seconds; one that does not say where is meant in UTC."""
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _job(key: JobKey) -> BackgroundJob:
    sandbox_id, job_id = key
    stdout, stderr = output_paths(job_id)
    return BackgroundJob(
        job_id=job_id,
        sandbox_id=sandbox_id,
        stdout_log_file=stdout,
        stderr_log_file=stderr,
        exit_file=f"/tmp/job_{job_id}.exit",  # noqa: S108 - where the SDK puts it, in the sandbox
    )


def output_paths(job_id: str) -> tuple[str, str]:
    """Return where the SDK keeps what a job prints, in the sandbox."""
    return f"/tmp/job_{job_id}.stdout.log", f"/tmp/job_{job_id}.stderr.log"  # noqa: S108


def _told_to_wait(what: str, limited: RateLimitError) -> SandboxError:
    return SandboxError(f"{what}: the platform wants us to wait", detail=str(limited))


def _exception(error: BaseException) -> Exception:
    return error if isinstance(error, Exception) else RuntimeError(repr(error))
