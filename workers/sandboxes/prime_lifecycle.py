"""From the wish for a Prime sandbox to its certain end: nothing that was asked for is left over, whatever happens.

A creation whose answer is lost may have taken place. It is asked for again under the same idempotency key, which makes
no second one; and where that is not possible any more, it is looked for by a label that only it carries, and deleted.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import uuid
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import dataclass

from prime_sandboxes import AdvancedConfigs, CreateSandboxRequest, StartCommand
from pydantic import ValidationError

from producer.contract import Phase
from workers.aio import queued, uninterrupted
from workers.errors import SandboxError
from workers.sandboxes.base import SandboxSpec
from workers.sandboxes.polls import Poller
from workers.sandboxes.prime_client import Platform
from workers.sandboxes.prime_errors import RateLimitError, validation_words, was_refused
from workers.throttle import Throttle

logger = logging.getLogger(__name__)

#: Times that a creation without a clear answer is asked for, and that one is sent away because of the rate.
CREATE_TRIES, RATE_TRIES = 4, 10
#: Seconds before each look for a sandbox of which we do not know whether it was created.
LOOKS = (0.0, 2.0, 10.0, 30.0)
#: Seconds in which a running sandbox must be reachable, and after which no further deletion of one is begun: the phase
#: in which it happens has 60 s by default.
REACH_LIMIT, DELETE_LIMIT = 120.0, 40.0
#: Deletions of one worker at one time.
CONCURRENT_DELETES = 20
#: Seconds after which a sandbox is looked for whose creation nobody waits for any more.
ANSWER_PATIENCE = 2.0
#: Seconds that closing waits for what is left to be cleared up.
CLOSE_LIMIT = 60.0
#: What the platform gives a sandbox at most.
LONGEST_MINUTES = 24 * 60


@dataclass(eq=False)
class _Birth:
    """One creation. ``failures`` had no clear answer; ``unsure`` is set when it may have made what we know not of."""

    spec: SandboxSpec
    request: CreateSandboxRequest
    label: str
    failures: int = 0
    unsure: bool = False
    asking: asyncio.Task[tuple[str, str]] | None = None


class Lifecycle:
    """Creates and deletes the sandboxes of one worker on one event loop; ``concurrent`` bounds its open requests."""

    def __init__(self, platform: Platform, throttle: Throttle, *, concurrent: int, poll_interval: float) -> None:
        self._platform = platform
        self._throttle = throttle
        self._births: Poller[str, None] = Poller(platform.states, first=0.1, share=0.2, longest=poll_interval)
        self._creating = asyncio.Semaphore(concurrent)
        self._deleting = asyncio.Semaphore(CONCURRENT_DELETES)
        self._background: set[asyncio.Task[None]] = set()
        self._closed = False
        self._in_progress: set[asyncio.Future[None]] = set()

    async def create(self, spec: SandboxSpec) -> str:
        """Return the id of a new sandbox that runs and can be reached; leaves nothing behind when it raises."""
        ended = asyncio.get_running_loop().create_future()
        self._in_progress.add(ended)
        try:
            return await self._create(spec)
        finally:
            self._in_progress.discard(ended)
            ended.set_result(None)

    async def _create(self, spec: SandboxSpec) -> str:
        birth = _birth(spec)
        sandbox_id, state = await self._ask(birth)
        try:
            # How long it may take, also when its image must be built first, is the request's own deadline; this one is
            # for callers without any.
            async with asyncio.timeout(spec.ttl):
                if state != "RUNNING":
                    await self._births.wait(sandbox_id)
                await self._reach(sandbox_id)
        except TimeoutError:
            await uninterrupted(self.delete_quietly(sandbox_id), timeout=None)
            raise SandboxError(
                f"sandbox {sandbox_id} was not ready within its time to live of {spec.ttl:g} s"
            ) from None
        except BaseException:
            await uninterrupted(self.delete_quietly(sandbox_id), timeout=None)
            raise
        return sandbox_id

    async def delete(self, sandbox_id: str) -> None:
        """Delete a sandbox, trying again for `DELETE_LIMIT` seconds; raises `SandboxError` when it may be left."""
        loop = asyncio.get_running_loop()
        async with queued(self._deleting):
            end, delay = loop.time() + DELETE_LIMIT, 0.5
            while True:
                try:
                    await self._platform.delete(sandbox_id)
                except SandboxError as error:
                    failure = error
                else:
                    return
                wait = delay * random.uniform(0.5, 1)  # noqa: S311 - not for secrets
                if isinstance(failure, RateLimitError):
                    wait = failure.pause(wait)
                delay *= 2
                if not failure.retryable or loop.time() + wait >= end:
                    raise SandboxError(
                        f"sandbox {sandbox_id} is not deleted: {failure.message}",
                        detail=failure.detail,
                        retryable=failure.retryable,
                        phase=Phase.CLEANUP,
                    ) from failure
                await asyncio.sleep(wait)

    async def delete_quietly(self, sandbox_id: str) -> None:
        """Delete a sandbox while another error is on its way already: a failure is only logged."""
        try:
            await self.delete(sandbox_id)
        except SandboxError as error:
            logger.warning(
                "%s", error, extra={"stage": "delete_sandbox", "sandbox_id": sandbox_id, "detail": error.detail}
            )

    async def aclose(self) -> None:
        """End what is being created and finish what is being cleared up, each within `CLOSE_LIMIT` seconds."""
        self._closed = True
        await self._births.aclose(_closed())
        if self._in_progress:
            await asyncio.wait(self._in_progress, timeout=CLOSE_LIMIT)
        if self._background:
            _, left = await asyncio.wait(self._background, timeout=CLOSE_LIMIT)
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)

    # -- asking for one ------------------------------------------------------------------------------------------------

    async def _ask(self, birth: _Birth) -> tuple[str, str]:
        """Ask for a sandbox until there is an answer; returns its id and state."""
        try:
            return await self._ask_repeatedly(birth)
        except BaseException:
            if birth.unsure:
                self._in_background(self._clear_up(birth))
            raise

    async def _ask_repeatedly(self, birth: _Birth) -> tuple[str, str]:
        limited = 0
        while not self._closed:
            try:
                async with queued(self._creating):
                    await self._throttle.take()
                    return await self._post(birth)
            except RateLimitError as error:
                await self._throttle.pause(error.retry_after)
                limited += 1
                if limited >= RATE_TRIES:
                    message = "could not create a sandbox: the platform's rate limit was met each time"
                    raise SandboxError(message, detail=error.detail) from error
            except SandboxError as error:
                if was_refused(error):
                    raise
                birth.unsure = True
                birth.failures += 1
                if birth.failures >= CREATE_TRIES:
                    raise
                await asyncio.sleep(random.uniform(0.25, 0.5) * 2**birth.failures)  # noqa: S311 - not for secrets
        raise _closed()

    async def _post(self, birth: _Birth) -> tuple[str, str]:
        """Send one request, which a cancellation does not break off: then nobody would know what it did."""
        birth.asking = asyncio.create_task(self._platform.create(birth.request, birth.spec))
        try:
            return await asyncio.shield(birth.asking)
        except asyncio.CancelledError:
            birth.unsure = True
            raise

    async def _clear_up(self, birth: _Birth) -> None:
        """Delete what a creation without an answer has made, if it has made anything."""
        found = await self._made_without_answer(birth) or await self._late_answer(birth)
        looked = found is not None
        for delay in () if looked else LOOKS:
            await asyncio.sleep(delay)
            with suppress(SandboxError):
                found = await self._platform.find(birth.label, birth.request.team_id)
                looked = True
            if found:  # there is one at most: all requests carried the same key
                break
        for sandbox_id in found or ():
            await self.delete_quietly(sandbox_id)
        if not looked:
            logger.error(
                "A sandbox with label %s may be left on the platform, which does not answer; it ends by itself.",
                birth.label,
                extra={"stage": "create_sandbox", "label": birth.label},
            )

    async def _made_without_answer(self, birth: _Birth) -> list[str]:
        """Look for the sandbox of a request without an answer: a hung one takes a minute, and it costs money."""
        if birth.asking is None or birth.asking.done():
            return []
        await asyncio.wait({birth.asking}, timeout=ANSWER_PATIENCE)
        found: list[str] = []
        if not birth.asking.done():
            with suppress(SandboxError):
                found = await self._platform.find(birth.label, birth.request.team_id)
        if found:
            birth.asking.cancel()
            await asyncio.wait({birth.asking})
        return found

    async def _late_answer(self, birth: _Birth) -> list[str] | None:
        """Return what the request that is still open has made, or None when that is not known."""
        try:
            return [(await birth.asking)[0]] if birth.asking else []
        except RateLimitError:
            refused = True
        except SandboxError as error:
            refused = was_refused(error)
        return [] if refused and not birth.failures else None

    def _in_background(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    # -- waiting for one -----------------------------------------------------------------------------------------------

    async def _reach(self, sandbox_id: str) -> None:
        """Wait until commands run in a sandbox: the platform may say so a little before its gateway knows it."""
        loop = asyncio.get_running_loop()
        end, delay = loop.time() + REACH_LIMIT, 0.25
        while True:
            try:
                await self._platform.execute(
                    sandbox_id, "echo 'sandbox ready'", what=f"sandbox {sandbox_id} cannot be reached", timeout=10
                )
            except SandboxError as error:
                if death := await self._platform.cause_of_death(sandbox_id):
                    raise death from error
                if self._closed:
                    raise _closed() from error
                if not error.retryable or loop.time() + delay >= end:
                    raise
            else:
                return
            await asyncio.sleep(delay)
            delay = min(delay * 1.5, 5.0)


def _closed() -> SandboxError:
    return SandboxError("the provider of Prime sandboxes is closed")


def _birth(spec: SandboxSpec) -> _Birth:
    key = uuid.uuid4().hex
    label = f"create:{key[:16]}"
    resources = spec.resources
    try:
        request = CreateSandboxRequest(
            name=spec.name,
            docker_image=spec.image,
            # The SDK takes no shell line.
            start_command=StartCommand(executable="/bin/sh", args=["-c", spec.start_command])
            if spec.start_command
            else None,
            cpu_cores=resources.cpu_cores,
            memory_gb=resources.memory_gb,
            disk_size_gb=resources.disk_gb,
            gpu_count=resources.gpu_count,
            gpu_type=resources.gpu_type,
            timeout_minutes=max(1, min(LONGEST_MINUTES, math.ceil(spec.ttl / 60))),
            environment_vars=spec.env or None,
            secrets=spec.secrets or None,
            labels=[*spec.labels, label],
            team_id=spec.team_id,
            advanced_configs=AdvancedConfigs(**spec.advanced) if spec.advanced else None,
            idempotency_key=key,
        )
    except ValidationError as error:
        message = f"the platform's SDK does not take this sandbox: {validation_words(error)}"
        raise SandboxError(message, retryable=False) from None
    return _Birth(spec, request, label)
