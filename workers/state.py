"""One attempt in progress: what the flow fills in and what an environment's hooks see."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from producer.contract import (
    ErrorInfo,
    ErrorKind,
    FailedAttempt,
    Message,
    Phase,
    RolloutRequest,
    RolloutResult,
    Step,
    StopCondition,
    Timing,
)
from workers import redaction
from workers.sandboxes.base import Sandbox

#: The systems that a worker uses for its rollouts, by the kind of their errors.
SYSTEMS = frozenset({ErrorKind.GATEWAY, ErrorKind.TUNNEL, ErrorKind.SANDBOX})
#: What a result takes over as it is.
_COPIED = (
    *("gateway_url", "rollout_base_url", "tunnel_url", "tunnel_local_addr", "tunnel_id", "sandbox_id"),
    *("agent_completed", "agent_timed_out", "agent_exit_code"),
    *(
        "trajectory",
        "completion",
        "is_truncated",
        "integrity",
        "episode",
        "reward",
        "metrics",
        "error",
        "attempt",
        "worker",
        "durations",
    ),
)


def _is_number(value: object) -> bool:
    return isinstance(value, bool | int | float) and math.isfinite(value)


def _storable(text: str) -> str:
    return text.encode("utf-8", "replace").decode()  # lone surrogates cannot be stored


def gateway_id(rollout_id: str, attempt: int) -> str:
    """Return the id under which an attempt is registered; no rollout's own id has a tilde."""
    return rollout_id if attempt <= 1 else f"{rollout_id}~{attempt}"


@dataclass
class Rollout:
    """The state of one attempt at one rollout.

    Hooks read ``request``, ``sandbox``, and, from ``score`` on, ``trajectory``, ``prompt``, ``completion`` and the
    agent's exit code and output; they may add to ``metrics`` and ``warnings``.
    """

    request: RolloutRequest
    gateway_url: str
    attempt: int = 1
    worker: str = ""
    #: This rollout's own key to the gateway, new for each attempt: an agent left over from an earlier one is shut out.
    api_key: str = field(default_factory=lambda: secrets.token_urlsafe(24), repr=False)

    #: Values that must not be shown, by their names: the request's ``secret_env``.
    secrets: dict[str, str] = field(default_factory=dict, repr=False)

    rollout_base_url: str | None = None
    tunnel_url: str | None = None
    tunnel_local_addr: str | None = None
    tunnel_id: str | None = None
    sandbox: Sandbox | None = None
    sandbox_id: str | None = None

    agent_completed: bool = False
    agent_timed_out: bool = False
    agent_exit_code: int | None = None
    #: When the agent was started and when it had ended, in `time.monotonic` seconds.
    agent_started_at: float = 0.0
    agent_ended_at: float = 0.0
    agent_stdout: str = ""
    agent_stderr: str = ""

    trajectory: list[Step] = field(default_factory=list)
    prompt: list[Message] = field(default_factory=list)
    completion: list[Message] = field(default_factory=list)
    is_truncated: bool = False
    integrity: dict[str, Any] | None = None
    episode: dict[str, Any] | None = None
    reward: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    error: ErrorInfo | None = None
    #: Whether its outcome is known, so that all that is left to do is the clean-up.
    is_over: bool = False
    #: Whether the clean-up failed, so that a sandbox or a registration may be left over.
    leftovers: bool = False
    #: What the attempts before this one left in the record.
    failed_attempts: list[FailedAttempt] = field(default_factory=list)

    phase: Phase = Phase.REGISTER
    #: When it entered that phase, in Unix seconds.
    phase_since: float = field(default_factory=time.time)
    #: The phase before its clean-up: where it ended.
    last_phase: Phase = Phase.REGISTER
    durations: dict[str, float] = field(default_factory=dict)
    started_at: float = field(default_factory=time.time)
    on_phase: Callable[[Rollout, Phase], None] | None = field(default=None, repr=False)
    on_phase_end: Callable[[Phase, float], None] | None = field(default=None, repr=False)
    #: The systems of its worker that it uses: what it meets of a gateway that its request chose says nothing of them.
    meets: frozenset[ErrorKind] = SYSTEMS
    #: When it began, in `time.monotonic` seconds.
    began: float = field(default_factory=time.monotonic)

    @property
    def gateway_id(self) -> str:
        """The id under which the gateway knows this attempt.

        The first attempt uses the rollout's own id. A later one has another, so that a worker that was believed dead
        and cleans up late cannot unregister its successor.
        """
        return gateway_id(self.request.rollout_id, self.attempt)

    @property
    def earlier_gateway_id(self) -> str | None:
        """The id of the attempt before, which a dead worker may have left registered."""
        return gateway_id(self.request.rollout_id, self.attempt - 1) if self.attempt > 1 else None

    @property
    def rollout_id(self) -> str:
        """The rollout's id."""
        return self.request.rollout_id

    @property
    def stage(self) -> str:
        """Where the attempt stands, for log lines that name no stage of their own."""
        return self.phase.value

    def enter(self, phase: Phase) -> None:
        """Note that the attempt is now in ``phase``."""
        self.phase = phase
        if phase is not Phase.CLEANUP:
            self.last_phase = phase
        self.phase_since = time.time()
        if self.on_phase:
            self.on_phase(self, phase)

    def note_duration(self, phase: Phase, seconds: float) -> None:
        """Note for how long the attempt was in ``phase``, which has ended."""
        self.durations[phase.value] = seconds
        if self.on_phase_end:
            self.on_phase_end(phase, seconds)

    def fail(self, error: ErrorInfo) -> None:
        """Record ``error`` unless an earlier one is recorded: the first is the cause, later ones follow from it."""
        if self.error is None:
            self.error = self._redacted_error(error)

    def redacted(self, text: str) -> str:
        """Return ``text`` without the values of secrets. The attempt's own key opens nothing later, but is one too."""
        return redaction.redacted(_storable(text), self._hidden())

    def _redacted_output(self, text: str) -> str:
        return redaction.redacted_output(_storable(text), self._hidden(), unfinished=not self.agent_completed)

    def _hidden(self) -> dict[str, str]:
        return {**self.secrets, "OPENAI_API_KEY": self.api_key}

    def _redacted_error(self, error: ErrorInfo) -> ErrorInfo:
        detail = self.redacted(error.detail) if error.detail else error.detail
        return error.model_copy(update={"message": self.redacted(error.message), "detail": detail})

    def stop_condition(self) -> StopCondition:
        """Derive how the attempt ended from what was recorded."""
        if self.error is not None:
            return StopCondition.HAS_ERROR
        return StopCondition.AGENT_TIMEOUT if self.agent_timed_out else StopCondition.COMPLETED

    def result(self, stop_condition: StopCondition | None = None) -> RolloutResult:
        """Return the attempt as a result."""
        copied: dict[str, Any] = {name: getattr(self, name) for name in _COPIED}
        copied["metrics"] = {name: value for name, value in self.metrics.items() if _is_number(value)}
        if left_out := sorted(set(map(str, self.metrics)) - set(copied["metrics"])):
            self.warnings.append(f"metrics that are no finite numbers were left out: {', '.join(left_out)[:500]}")
        # Without any turn the gateway knows no prompt; the dataset's own must not be lost for that.
        copied["prompt"] = self.prompt or self.request.messages
        scoring = self.durations.get(Phase.SCORE, 0.0)
        total = time.monotonic() - self.began
        timing = Timing(
            start_time=self.started_at,
            generation_ms=(total - scoring) * 1000,
            scoring_ms=scoring * 1000,
            total_ms=total * 1000,
        )
        return RolloutResult.for_request(
            self.request,
            stop_condition or self.stop_condition(),
            timing=timing,
            agent_stdout=self._redacted_output(self.agent_stdout),
            agent_stderr=self._redacted_output(self.agent_stderr),
            warnings=tuple(map(self.redacted, self.warnings)),
            failed_attempts=tuple(self.failed_attempts),
            **copied,
        )
