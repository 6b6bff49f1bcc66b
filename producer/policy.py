"""Which policy version is trained now, and what becomes of rollouts that are too old for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

from producer.contract import ErrorInfo, ErrorKind, Purpose, RolloutResult, StopCondition

STALE, OVERLOAD = "stale", "overload"
_MESSAGES = {
    STALE: "the rollout's policy version is too old for what is trained now",
    OVERLOAD: "the rollout was cancelled to shed load",
}


class OnStale(StrEnum):
    """What becomes of rollouts whose policy version is more than ``max_off_policy_steps`` behind."""

    CANCEL = "cancel"  #: those that wait never start, those that run are cancelled; a late result is marked stale
    WITHHOLD = "withhold"  #: those that wait never start, those that run end; their turns are not handed out
    KEEP = "keep"  #: all run, and their results are marked stale


@dataclass(frozen=True, slots=True)
class Staled:
    """What a new policy version did: rollouts ended while they waited, asked to end, and left to run on."""

    ended: int = 0
    asked: int = 0
    left: int = 0


def cancelled_error(reason: str | None, message: str = "the rollout was cancelled") -> ErrorInfo:
    """Return why a rollout was cancelled, from its record's ``reason``."""
    return ErrorInfo(kind=ErrorKind.CANCELLED, message=_MESSAGES.get(reason or "", message), reason=reason or None)


class PolicyView:
    """What a producer last saw of the policy in Redis; it looks whenever it fetches results."""

    FIELDS: ClassVar[tuple[str, ...]] = ("version", "steps", "on_stale")

    def __init__(self) -> None:
        self.version: int | None = None
        self._steps = 0
        self._on_stale = OnStale.KEEP

    def saw(self, fields: Sequence[bytes | None]) -> None:
        """Take over what the policy's hash holds under `FIELDS`."""
        version, steps, on_stale = fields
        if version is None or steps is None or on_stale is None:
            self.version = None
            return
        self.version, self._steps, self._on_stale = int(version), int(steps), OnStale(on_stale.decode())

    @property
    def keeps_stale(self) -> bool:
        """Whether what is too old is wanted all the same."""
        return self._on_stale is OnStale.KEEP

    def is_stale(self, result: RolloutResult) -> bool:
        """Whether the result is too old for what is trained now."""
        if self.version is None or result.policy_version is None or result.purpose is not Purpose.TRAIN:
            return False
        return self.version - result.policy_version > self._steps

    def delivered(self, result: RolloutResult) -> RolloutResult:
        """Return the result as it is handed out: marked where it is stale, and without its turns where withheld."""
        if not self.is_stale(result):
            return result
        if self._on_stale is not OnStale.WITHHOLD or result.stop_condition is StopCondition.CANCELLED:
            return result.model_copy(update={"stale": True})
        return result.model_copy(
            update={
                "stale": True,
                "trajectory": [],
                "completion": [],
                "stop_condition": StopCondition.CANCELLED,
                "error": cancelled_error(STALE),
            }
        )
