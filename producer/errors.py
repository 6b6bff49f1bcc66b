"""The errors of the producer's side.

    FleetError
    ├── FleetUnreachableError   Redis cannot be reached, or refuses the connection
    ├── FleetFullError          Redis has no memory left for what is sent
    └── RolloutConflictError    an id was submitted before with another request

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


class RolloutConflictError(FleetError):
    """A rollout id was submitted before with another request; ``rollout_ids`` holds the ids."""

    def __init__(self, rollout_ids: Sequence[str]) -> None:
        self.rollout_ids = tuple(rollout_ids)
        shown = ", ".join(rollout_ids[:5]) + (", ..." if len(rollout_ids) > 5 else "")
        super().__init__(
            f"rollout id already in use for another request: {shown}; an id names one request for as long as "
            "its record is kept: give the new request a new id"
        )
