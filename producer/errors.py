"""The errors of the producer's side.

    FleetError
    ├── FleetUnreachableError   Redis cannot be reached, or refuses the connection
    ├── FleetFullError          Redis has no memory left for what is sent
    ├── FleetEvictsError        Redis would forget rollouts when it is full
    ├── RolloutConflictError    an id was submitted before with another request
    ├── BatchCancelledError     a batch or group was cancelled for good, and takes no more
    ├── ConsumerTakenError      another process goes on as this named consumer
    └── RunBrokenError          a run ended early, after it had submitted rollouts

A request or a task that does not fit the contract is a `producer.contract.InvalidRequestError`.
"""

from __future__ import annotations

from collections.abc import Sequence


class FleetError(Exception):
    """The fleet could not do what was asked of it; the message says what to do."""


class FleetUnreachableError(FleetError):
    """Redis cannot be reached or refuses the connection; the message names the URL, without its password."""


class FleetFullError(FleetError):
    """Redis refuses to store more; nothing of what was being sent has been stored."""


class FleetEvictsError(FleetError):
    """Redis evicts keys when it is full, and would forget rollouts; the message says what to set."""


class RolloutConflictError(FleetError):
    """A rollout id was submitted before with another request; ``rollout_ids`` holds the ids."""

    def __init__(self, rollout_ids: Sequence[str]) -> None:
        self.rollout_ids = tuple(rollout_ids)
        super().__init__(
            f"rollout id already in use for another request: {first_of(rollout_ids)}; an id names one request for as "
            "long as its record is kept: give the new request a new id"
        )


class BatchCancelledError(FleetError):
    """The batch or group was cancelled for good: nothing of what was being sent has been stored."""


class ConsumerTakenError(FleetError):
    """Another process has opened this named consumer since, and goes on where this one was."""


class RunBrokenError(FleetError):
    """A run ended early, after it had submitted rollouts; what was in flight is cancelled, and the cause says why."""


def first_of(rollout_ids: Sequence[str], count: int = 5) -> str:
    """Return the first few ids as text, for messages."""
    return ", ".join(rollout_ids[:count]) + (", ..." if len(rollout_ids) > count else "")
