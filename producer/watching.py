"""How far rollouts have come: asked of the workers that run them when somebody wants to know, and else not told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from producer import broker
from producer.asking import ask
from producer.connection import CHUNK, FleetConnection
from producer.kinds import Phase


@dataclass(frozen=True, slots=True)
class RolloutProgress:
    """How far one rollout has come; ``state`` is None when Redis has no record of it.

    The rest is known of one that runs and whose worker answered in time. ``turns`` and the tokens are what the gateway
    has seen so far, None while it knows nothing of the rollout; a prompt's tokens count at each turn.
    """

    rollout_id: str
    state: broker.JobState | None
    attempt: int = 0
    worker: str | None = None
    phase: Phase | None = None
    turns: int | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    in_flight: bool = False


async def progress_of(
    connection: FleetConnection, rollout_ids: Sequence[str], *, timeout: float = 5.0
) -> dict[str, RolloutProgress]:
    """Ask how far rollouts have come, waiting ``timeout`` seconds at most for the workers that run them."""
    found: dict[str, RolloutProgress] = {}
    by_worker: dict[str, list[str]] = {}
    for start in range(0, len(rollout_ids), CHUNK):
        ids = rollout_ids[start : start + CHUNK]
        for rollout_id, record in zip(ids, await connection.fields(ids, ["state", "attempt", "worker"]), strict=True):
            state, attempt, worker = (value.decode() if value else None for value in record)
            known = broker.JobState(state) if state else None
            found[rollout_id] = RolloutProgress(rollout_id, known, int(attempt or 0), worker)
            if known is broker.JobState.RUNNING and worker:
                by_worker.setdefault(worker, []).append(rollout_id)
    if by_worker:
        questions = [{"worker": worker, "rollouts": " ".join(ids)} for worker, ids in by_worker.items()]
        for answer in await ask(connection, questions, answers=len(by_worker), timeout=timeout):
            for rollout_id, told in answer.items():
                if rollout_id in found:
                    found[rollout_id] = _with(found[rollout_id], told)
    return found


def _with(known: RolloutProgress, told: dict[str, Any]) -> RolloutProgress:
    phase = told.get("phase")
    return replace(
        known,
        phase=Phase(phase) if phase in set(Phase) else None,
        turns=told.get("turns"),
        prompt_tokens=told.get("prompt_tokens"),
        completion_tokens=told.get("completion_tokens"),
        in_flight=bool(told.get("in_flight")),
    )
