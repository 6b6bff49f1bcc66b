"""What surrounds the steps of an attempt: phases with deadlines, guaranteed clean-up, and keeping its turns."""

from __future__ import annotations

import asyncio
import logging
import time
import traceback
from collections.abc import AsyncIterator, Awaitable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from types import TracebackType
from typing import Any, Self, TypeVar

from producer.contract import ErrorInfo, Phase
from workers.aio import deadline, uninterrupted
from workers.errors import (
    AgentError,
    EnvironmentHookError,
    GatewayError,
    ModelError,
    PhaseDeadlineError,
    RolloutError,
    SandboxError,
    TunnelError,
)
from workers.gateway.protocol import Gateway, Trajectory
from workers.instruments import PHASE_SECONDS
from workers.state import Rollout

logger = logging.getLogger(__name__)

#: Seconds for the calls made on the way out of a failed or cancelled attempt, each.
_SALVAGE_TIMEOUT = 10.0

#: Whose error it is when a phase exceeds its deadline.
_OWNER: dict[Phase, type[RolloutError]] = {
    Phase.REGISTER: GatewayError,
    Phase.TUNNEL: TunnelError,
    Phase.SANDBOX: SandboxError,
    Phase.SETUP: EnvironmentHookError,
    Phase.AGENT: AgentError,
    Phase.TRAJECTORY: GatewayError,
    Phase.SCORE: EnvironmentHookError,
    Phase.CLEANUP: SandboxError,
}

ValueT = TypeVar("ValueT")


def log(
    rollout: Rollout,
    stage: str,
    message: str,
    *args: object,
    level: int = logging.INFO,
    error: BaseException | None = None,
) -> None:
    """Log one sentence about ``rollout`` with its structured fields, and the traceback of ``error``.

    Both without the rollout's secrets: errors quote what hooks, agents and platforms have said.
    """
    if not logger.isEnabledFor(level):
        return
    text = f"{stage}: {message % args if args else message}"
    if error is not None:  # not as ``exc_info``, which a handler would format as it is
        text += "\n" + "".join(traceback.format_exception(error)).rstrip()
    fields = {
        "stage": stage,
        "rollout_id": rollout.request.rollout_id,
        "attempt": rollout.attempt,
        "worker": rollout.worker,
    }
    logger.log(level, "%s", rollout.redacted(text), extra=fields)


@asynccontextmanager
async def recorded(rollout: Rollout) -> AsyncIterator[None]:
    """One attempt: its beginning and its end are logged, and a `RolloutError` becomes ``rollout.error``."""
    log(rollout, "start", "attempt %d of %s begins", rollout.attempt, rollout.rollout_id)
    try:
        yield
    except RolloutError as error:
        rollout.fail(error.info(rollout.phase))
    except asyncio.CancelledError:
        log(rollout, "finish", "cancelled in phase %s", rollout.phase)
        raise
    log(rollout, "finish", "%s%s", rollout.stop_condition(), f": {rollout.error}" if rollout.error else "")


@asynccontextmanager
async def in_phase(rollout: Rollout, phase: Phase, *, bounded: bool = True) -> AsyncIterator[None]:
    """Enter ``phase`` under its deadline, note how long it took, and turn lateness and surprises into typed errors."""
    limit = rollout.request.deadlines.of(phase) if bounded else None
    rollout.enter(phase)
    began = time.monotonic()
    try:
        async with deadline(limit) as scope:
            yield
    except RolloutError as error:
        error.phase = error.phase or phase
        raise
    except Exception as error:
        if scope.expired():
            raise PhaseDeadlineError(phase, limit, _OWNER[phase]) from None
        log(rollout, phase, "unexpected error", level=logging.ERROR, error=error)
        raise _OWNER[phase](f"unexpected {type(error).__name__}: {error}", phase=phase) from error
    finally:
        _note_duration(rollout, phase, time.monotonic() - began)


def _note_duration(rollout: Rollout, phase: Phase, seconds: float) -> None:
    rollout.note_duration(phase, seconds)
    PHASE_SECONDS.labels(phase).observe(seconds)


@asynccontextmanager
async def salvaged(rollout: Rollout, gateway: Gateway) -> AsyncIterator[None]:
    """On the way out of a failed or cancelled attempt, keep the turns it made so far.

    A cancelled one is first cancelled at the gateway, so that its agent stops spending the model.
    """
    where = rollout.gateway_url, rollout.gateway_id
    try:
        yield
    except BaseException as error:
        if isinstance(error, asyncio.CancelledError):
            await quietly(rollout, "cancel", gateway.cancel(*where))
        if not rollout.trajectory:
            fetched = await quietly(rollout, "fetch_trajectory", gateway.fetch_trajectory(*where))
            if fetched is not None:
                record_trajectory(rollout, fetched)
        raise


async def quietly(rollout: Rollout, what: str, call: Awaitable[ValueT]) -> ValueT | None:
    """Await ``call`` on the way out: bounded, not interrupted by a further cancellation, failures only logged."""
    try:
        return await uninterrupted(call, _SALVAGE_TIMEOUT)
    except Exception as error:  # noqa: BLE001 - the failure that led here is the one to report
        log(rollout, what, "%s failed on the way out: %r", what, error, level=logging.WARNING)
        return None


class Cleanup:
    """A stack of what an attempt holds. Releasing always runs, shielded and bounded, is logged, and never raises.

    A failed release becomes the attempt's error when it has no earlier one; it is no reason for another attempt.
    """

    def __init__(self, rollout: Rollout) -> None:
        self._rollout = rollout
        self._stack = AsyncExitStack()

    async def enter(self, resource: AbstractAsyncContextManager[ValueT]) -> ValueT:
        """Acquire ``resource`` now and release it at the end."""
        value = await resource.__aenter__()
        self._stack.push_async_callback(self._release, resource)
        return value

    async def _release(self, resource: AbstractAsyncContextManager[Any]) -> None:
        limit = self._rollout.request.deadlines.of(Phase.CLEANUP)
        try:
            async with deadline(limit):
                await resource.__aexit__(None, None, None)
        except RolloutError as error:
            self._failed(error)
        except TimeoutError:
            self._failed(PhaseDeadlineError(Phase.CLEANUP, limit, _OWNER[Phase.CLEANUP]))
        except Exception as error:  # noqa: BLE001 - logged, with its traceback
            log(self._rollout, "cleanup", "unexpected error", level=logging.ERROR, error=error)
            self._failed(SandboxError(f"clean-up failed: {error!r}"))

    def _failed(self, error: RolloutError) -> None:
        error.retryable = False
        self._rollout.leftovers = True
        log(self._rollout, "cleanup", "%s", error, level=logging.ERROR)
        self._rollout.fail(error.info(Phase.CLEANUP))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, RolloutError):
            self._rollout.fail(error.info(self._rollout.phase))  # first: a failed release must not hide the cause
        self._rollout.is_over = error is None or isinstance(error, RolloutError)
        self._rollout.enter(Phase.CLEANUP)
        began = time.monotonic()
        try:
            await uninterrupted(self._stack.aclose(), timeout=None)  # each release has a deadline of its own
        finally:
            self._rollout.sandbox = None
            _note_duration(self._rollout, Phase.CLEANUP, time.monotonic() - began)


def record_trajectory(rollout: Rollout, trajectory: Trajectory) -> None:
    """Keep what the gateway recorded."""
    rollout.trajectory = trajectory.trajectory
    rollout.prompt = trajectory.prompt
    rollout.completion = trajectory.completion
    rollout.is_truncated = trajectory.is_truncated
    rollout.integrity = trajectory.integrity or None
    rollout.metrics["model_calls"] = float(trajectory.num_turns)
    rollout.metrics["failed_model_calls"] = float(trajectory.failed_calls)


def judge(rollout: Rollout, trajectory: Trajectory) -> None:
    """Name what is wrong with what an agent has done."""
    agent_ended = rollout.agent_completed or rollout.agent_timed_out
    if agent_ended and not (trajectory.num_turns or trajectory.failed_calls or trajectory.in_flight):
        rollout.warnings.append(f"the agent made no model call: {_why_silent(rollout)}; see agent_stderr")
    if rollout.agent_completed and rollout.agent_exit_code != 0:
        rollout.fail(_failed_agent(rollout, trajectory))


def _why_silent(rollout: Rollout) -> str:
    if rollout.agent_timed_out:
        return "it hung, or worked without one, until its deadline"
    if rollout.agent_exit_code == 0:
        return "it probably ignores OPENAI_BASE_URL"
    return f"it ended before its first one (exit code {rollout.agent_exit_code})"


def _failed_agent(rollout: Rollout, trajectory: Trajectory) -> ErrorInfo:
    """Say why the agent exited with an error: its model failed it, or it failed by itself."""
    said = rollout.agent_stderr.strip() or rollout.agent_stdout.strip()
    code = rollout.agent_exit_code
    last = trajectory.failures[-1] if trajectory.failures else None
    error: RolloutError
    if last is not None and last.get("turns", trajectory.num_turns) == trajectory.num_turns:  # no turn came after it
        status, message = last.get("status", 0), last.get("message", "")
        retryable = status == 429 or status >= 500
        error = ModelError(
            f"the agent exited with {code} after its model call failed: {message}",
            detail=f"HTTP {status}\n{said}",
            retryable=retryable,
        )
    else:
        again = rollout.request.retry_agent
        error = AgentError(f"the agent exited with {code}", detail=said or None, retryable=again)
    return error.info(Phase.AGENT)
