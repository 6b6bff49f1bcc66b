"""The worker's part of a rollout's trace (`producer.tracing`): its time in the queue, its attempts, its phases.

Spans are made when what they tell of has ended. A phase is sent then, so that of an attempt whose worker dies all is
seen but its last phase.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager

from producer.contract import Phase, StopCondition
from producer.tracing import Traces, TracingUnavailableError, identity
from workers.jobs import Claim
from workers.registry import ConfigurationError
from workers.settings import WorkerSettings
from workers.state import Rollout


class Spans:
    """Makes the spans of a worker's attempts; without ``traces``, none."""

    def __init__(self, traces: Traces | None) -> None:
        self._traces = traces

    @contextmanager
    def attempt(self, rollout: Rollout, claim: Claim) -> Iterator[None]:
        """Follow an attempt: its phases while it runs, itself at its end."""
        traces = self._traces
        if traces is None:
            yield
            return
        about = identity(rollout.request) | {"rollout.attempt": rollout.attempt, "rollout.worker": rollout.worker}
        own = secrets.randbits(63) | 1

        def phase_ended(phase: Phase, seconds: float) -> None:
            now = time.time()
            traces.span(phase.value, claim.rollout_id, now - seconds, now, parent=own, attributes=about)

        if claim.attempt == 1 and claim.submitted_at:
            traces.span("queue", claim.rollout_id, claim.submitted_at, rollout.started_at, attributes=about)
        rollout.on_phase_end = phase_ended
        try:
            yield
        finally:
            rollout.on_phase_end = None
            error = str(rollout.error) if rollout.error else None
            began = rollout.started_at
            traces.span("attempt", claim.rollout_id, began, span_id=own, kind="CONSUMER", attributes=about, error=error)

    def ended(self, rollout: Rollout, claim: Claim, outcome: StopCondition) -> None:
        """Make the root of a rollout that ends with this attempt."""
        if self._traces is not None:
            about = identity(rollout.request) | {"rollout.attempts": rollout.attempt, "rollout.outcome": outcome.value}
            error = str(rollout.error) if rollout.error else None
            self._traces.ended(claim.rollout_id, claim.submitted_at or rollout.started_at, about, error)


@contextmanager
def tracing(settings: WorkerSettings, worker: str) -> Iterator[Spans]:
    """Hold what makes the worker's spans, if the settings ask for it; raises `ConfigurationError` where it cannot."""
    if not settings.tracing:
        yield Spans(None)
        return
    try:
        traces = Traces("rollouts-worker", **{"service.instance.id": worker, "rollout.fleet": settings.fleet})
    except TracingUnavailableError as error:
        raise ConfigurationError(str(error)) from None
    try:
        yield Spans(traces)
    finally:
        traces.close()
