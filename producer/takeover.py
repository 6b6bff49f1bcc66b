"""What a trainer that is started again submits once more: with the policy version of now, where it was one before."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from producer.connection import FleetConnection
from producer.contract import InvalidRequestError, RolloutRequest


async def as_submitted(
    connection: FleetConnection, requests: Sequence[RolloutRequest], conflicting: Sequence[str]
) -> list[RolloutRequest] | None:
    """Return ``requests`` with the policy versions under which the ``conflicting`` ids were submitted.

    None when one of these was submitted as something else: another version is the same task, tried earlier.
    """
    records = await connection.fields(conflicting, ["request"])
    versions: dict[str, int | None] = {}
    for rollout_id, (stored,) in zip(conflicting, records, strict=True):
        with suppress(InvalidRequestError):
            if stored is not None:
                versions[rollout_id] = RolloutRequest.parse(stored).policy_version
    found = [
        request.model_copy(update={"policy_version": versions[request.rollout_id]})
        if request.rollout_id in versions
        else request
        for request in requests
    ]
    same = {request.rollout_id: request.to_json() for request in found}
    told = zip(conflicting, records, strict=True)
    return found if all(same[rollout_id] == stored for rollout_id, (stored,) in told) else None
