"""The errors that end an attempt. Retryability is data, and foreign exceptions are mapped once, in the client.

RolloutError
├── GatewayError          the rollout gateway refused or could not be reached
├── TunnelError           the tunnel did not start, died, or was replaced
├── SandboxError          the sandbox was not created, died, or a command in it could not be run
├── AgentError            the agent could not be started, or exited with an error
│   └── AgentStalledError the agent ran, but made no model call for longer than its idle limit
├── ModelError            the model behind the gateway failed
├── EnvironmentHookError  a hook of the environment raised or took too long
├── PhaseDeadlineError    a phase took longer than its deadline; of the kind of whoever it waited for
├── RolloutLimitError     the whole attempt took longer than its hard limit
└── InvalidRolloutError   the request cannot be run here: unknown environment, missing secret, wrong type

What happens, and what is seen, when

- a worker is killed: its rollouts run again elsewhere within 1.5 lease times, as the next attempt; its local agents
  and frpc are ended at once, its sandboxes, registrations and tunnels are deleted by the sweep
- a worker is stopped with SIGTERM: it takes nothing new and lets what runs finish for ``ROLLOUTS_DRAIN_TIMEOUT``;
  then, or at a second SIGTERM or a SIGQUIT, what runs is handed over, without spending an attempt
- Redis restarts: rollouts go on; leases are renewed when it is back, and none is believed lapsed for one lease time
- beat dies: nothing, as every worker sweeps as well
- a rollout kills its worker each time: after ``max_attempts`` it ends with a ``lease`` error and its history
- gateway, tunnels or sandboxes fail time after time: the worker takes nothing new, and tries with one rollout after
  growing pauses
- frpc is killed: it is restarted under the same URL; rollouts whose agents retry go on
- a tunnel's registration is gone: its rollouts fail at once, keep their turns, and run again on the next tunnel
- the platform refuses the account: ``rollouts doctor`` and ``rollouts worker`` say so, and the worker takes nothing
- a creation, a poll, a deletion is answered 429, 5xx or not at all: it is repeated; what an unanswered creation made
  is found and deleted
- the gateway or a sandbox fails: a ``gateway`` or ``sandbox`` error; tried again with a growing delay while attempts
  are left
- the model server fails: the agent gets a typed answer; if it gives up, the result is a ``model`` error
- the agent exits with an error: an ``agent`` error with its stderr; not tried again (unless ``retry_agent``), and
  scored all the same
- the agent makes no model call for its ``idle`` limit, or an attempt takes longer than its ``rollout`` limit: an
  ``agent`` or a ``limit`` error with the turns so far; not tried again
- a hook blocks the event loop: it is named in the log and in ``rollouts_loop_blocked_total``; no lease is lost before
  ``ROLLOUTS_LOOP_HANG_LIMIT``
- the agent never calls the model: completed, ``metrics.model_calls`` 0, and a warning that names the likely cause
- a request is wrong: an ``invalid_request`` error that names the field
"""

from __future__ import annotations

from typing import ClassVar, Self

from producer.contract import ErrorInfo, ErrorKind, Phase

DETAIL_LIMIT = 4000


class RolloutError(Exception):
    """One attempt failed; ``detail`` holds the foreign system's own words, ``retryable`` whether to try again."""

    kind: ErrorKind
    default_retryable: ClassVar[bool] = False
    #: Set where a platform refuses the worker's own account, whatever the request asks for.
    account = False

    def __init__(
        self,
        message: str,
        *,
        detail: str | None = None,
        retryable: bool | None = None,
        phase: Phase | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.detail = keep_head_and_tail(detail, DETAIL_LIMIT) if detail else None
        self.retryable = self.default_retryable if retryable is None else retryable
        self.phase = phase

    def again(self) -> Self:
        """Return a copy to raise: several may get the same error, and each writes its own phase into its own."""
        copy = type(self).__new__(type(self), *self.args)  # a class of its own may want more to be constructed
        copy.__dict__.update(self.__dict__)
        copy.__cause__ = self.__cause__
        return copy

    def info(self, phase: Phase | None = None) -> ErrorInfo:
        """Return this error as data; ``phase`` is used where the error itself names none."""
        return ErrorInfo(
            kind=self.kind,
            type=type(self).__name__,
            message=self.message,
            retryable=self.retryable,
            account=self.account,
            phase=self.phase or phase,
            detail=self.detail,
        )


class GatewayError(RolloutError):
    """The rollout gateway refused a call or could not be reached."""

    kind = ErrorKind.GATEWAY
    default_retryable = True


class TunnelError(RolloutError):
    """The tunnel did not start, died, or was replaced while the rollout ran."""

    kind = ErrorKind.TUNNEL
    default_retryable = True


class SandboxError(RolloutError):
    """The sandbox was not created, died, or could not run a command."""

    kind = ErrorKind.SANDBOX
    default_retryable = True


class AgentError(RolloutError):
    """The agent could not be started, or exited with an error."""

    kind = ErrorKind.AGENT


class AgentStalledError(AgentError):
    """The agent ran, but made no model call for too long; not tried again, as no failure of an agent is."""


class ModelError(RolloutError):
    """The model behind the gateway failed."""

    kind = ErrorKind.MODEL
    default_retryable = True


class EnvironmentHookError(RolloutError):
    """A hook of the environment raised, or took longer than its phase's deadline."""

    kind = ErrorKind.ENVIRONMENT


class PhaseDeadlineError(RolloutError):
    """A phase took longer than its deadline of ``seconds``: a failure of ``owner``, tried again where such are.

    The agent's own deadline is none of these but an outcome, except for an episode that its environment runs by itself.
    """

    def __init__(self, phase: Phase, seconds: float | None, owner: type[RolloutError]) -> None:
        message = f"phase {phase} took longer than its deadline of {seconds} s"
        super().__init__(message, phase=phase, retryable=owner.default_retryable)
        self.kind = owner.kind


class RolloutLimitError(RolloutError):
    """The whole attempt took longer than its hard limit: it has had its time, so it is not tried again."""

    kind = ErrorKind.LIMIT


class InvalidRolloutError(RolloutError):
    """The request cannot be run by this worker, now or later."""

    kind = ErrorKind.INVALID_REQUEST


def keep_head_and_tail(text: str, limit: int) -> str:
    """Shorten ``text`` to about ``limit`` characters, keeping both ends and marking what was cut."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n... [{len(text) - 2 * half} characters cut] ...\n{text[-half:]}"
