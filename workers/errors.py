"""The errors that end an attempt. Retryability is data, and foreign exceptions are mapped once, in the client.

RolloutError
├── GatewayError          the rollout gateway refused or could not be reached
├── TunnelError           the tunnel did not start, died, or was replaced
├── SandboxError          the sandbox was not created, died, or a command in it could not be run
├── AgentError            the agent could not be started, or exited with an error
├── ModelError            the model behind the gateway failed
├── EnvironmentHookError  a hook of the environment raised or took too long
└── InvalidRolloutError   the request cannot be run here: unknown environment, missing secret, wrong type
"""

from __future__ import annotations

from typing import ClassVar

from producer.contract import ErrorInfo, ErrorKind, Phase

DETAIL_LIMIT = 4000


class RolloutError(Exception):
    """One attempt failed; ``detail`` holds the foreign system's own words, ``retryable`` whether to try again."""

    kind: ClassVar[ErrorKind]
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

    def info(self, phase: Phase | None = None) -> ErrorInfo:
        """Return this error as data; ``phase`` is used where the error itself names none."""
        return ErrorInfo(
            kind=self.kind,
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


class ModelError(RolloutError):
    """The model behind the gateway failed."""

    kind = ErrorKind.MODEL
    default_retryable = True


class EnvironmentHookError(RolloutError):
    """A hook of the environment raised, or took longer than its phase's deadline."""

    kind = ErrorKind.ENVIRONMENT


class InvalidRolloutError(RolloutError):
    """The request cannot be run by this worker, now or later."""

    kind = ErrorKind.INVALID_REQUEST


def keep_head_and_tail(text: str, limit: int) -> str:
    """Shorten ``text`` to about ``limit`` characters, keeping both ends and marking what was cut."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n... [{len(text) - 2 * half} characters cut] ...\n{text[-half:]}"
