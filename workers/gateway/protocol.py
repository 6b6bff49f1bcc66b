"""What the worker and the rollout gateway say to each other.

Source: the protocol of prime-rl's rollout gateway as the verifiers 0.1.11 mixin speaks it; bodies and answers are the
same JSON, so either side works with the other's counterpart. Ours adds one header at registration, and ``progress``.
"""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from enum import StrEnum
from typing import Any, Protocol

from pydantic import BaseModel, ConfigDict, Field

#: Header of a registration: the key that this rollout's model calls must carry as their bearer token.
ROLLOUT_KEY_HEADER = "X-Rollout-Key"
WORKER_HEADER = "X-Rollout-Worker"  #: whose rollout it is, for the bundled gateway's log lines


class RolloutStatus(StrEnum):
    """Where the gateway stands with a rollout."""

    ACTIVE = "active"
    COMPLETED = "completed"
    CANCELLED = "cancelled"


class Registration(BaseModel):
    """Body of ``register``: the model and the limits of one rollout; unknown fields are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore", protected_namespaces=())

    model: str
    sampling_params: dict[str, Any] = Field(default_factory=dict)
    max_turns: int = -1
    max_seq_len: int | None = None


class Trajectory(BaseModel):
    """Answer of ``trajectory``: everything the gateway recorded of one rollout; see `producer.contract` for a step.

    The last five are the bundled gateway's own: ``failures`` are the latest model calls that failed, at most 20, each
    ``{status, message, turns}`` with what the agent was answered (they are no turns) and how many turns there were by
    then; ``failed_calls`` counts all of them; ``in_flight`` says that a model call was still running, whose turn is
    therefore missing; ``idle_seconds`` is how long ago the last call ended, by the gateway's own clock;
    ``integrity`` says what was checked, and whether a trainer can trust it (``ok``, ``problems``, ``branches``).
    """

    model_config = ConfigDict(frozen=True, extra="ignore", protected_namespaces=())

    rollout_id: str
    status: RolloutStatus
    num_turns: int
    model: str = ""
    prompt: list[dict[str, Any]] = Field(default_factory=list)
    completion: list[dict[str, Any]] = Field(default_factory=list)
    is_truncated: bool = False
    trajectory: list[dict[str, Any]] = Field(default_factory=list)
    failures: list[dict[str, Any]] = Field(default_factory=list)
    failed_calls: int = 0
    in_flight: bool = False
    idle_seconds: float | None = None
    integrity: dict[str, Any] = Field(default_factory=dict)


class Progress(BaseModel):
    """Answer of ``progress``: how far a running rollout has come, cheap enough to be asked for often.

    ``in_flight`` says that a model call is running. ``idle_seconds`` is how long ago the last call ended, by the
    gateway's own clock; None before the first one, and from a gateway that does not tell. ``failed_calls`` are no
    ``turns``. The tokens are summed over the turns as the model's server counted them: a prompt counts at each turn.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", protected_namespaces=())

    rollout_id: str
    status: RolloutStatus
    turns: int
    failed_calls: int = 0
    in_flight: bool = False
    idle_seconds: float | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0

    @classmethod
    def of(cls, trajectory: Trajectory) -> Progress:
        """Return what a trajectory tells of it, for a gateway that has no ``progress``."""
        tokens = [step.get("tokens") or {} for step in trajectory.trajectory]
        return cls(
            rollout_id=trajectory.rollout_id,
            status=trajectory.status,
            turns=trajectory.num_turns,
            failed_calls=trajectory.failed_calls,
            in_flight=trajectory.in_flight,
            idle_seconds=trajectory.idle_seconds,
            prompt_tokens=sum(len(of_step.get("prompt_ids") or ()) for of_step in tokens),
            completion_tokens=sum(len(of_step.get("completion_ids") or ()) for of_step in tokens),
        )


def rollout_path(rollout_id: str) -> str:
    """Return the path of a rollout's own base on the gateway; an OpenAI client appends ``/chat/completions``."""
    return f"/v1/rollouts/{rollout_id}"


class Gateway(Protocol):
    """The worker's view of any rollout gateway. Every call raises `GatewayError`, with the gateway's own words."""

    def registered(
        self, gateway_url: str, rollout_id: str, registration: Registration, *, api_key: str
    ) -> AbstractAsyncContextManager[None]:
        """Hold a registration: registers on entry, unregisters on exit (an id already forgotten is fine)."""
        ...

    async def fetch_trajectory(self, gateway_url: str, rollout_id: str) -> Trajectory:
        """Return what was recorded so far."""
        ...

    async def progress(self, gateway_url: str, rollout_id: str) -> Progress:
        """Return how far the rollout has come, without its trajectory where the gateway can tell."""
        ...

    async def cancel(self, gateway_url: str, rollout_id: str) -> None:
        """Refuse the rollout's further model calls; its trajectory stays readable."""
        ...

    async def unregister(self, gateway_url: str, rollout_id: str) -> None:
        """Forget the rollout; forgetting an unknown one is fine."""
        ...

    async def aclose(self) -> None:
        """Close pooled connections."""
        ...
