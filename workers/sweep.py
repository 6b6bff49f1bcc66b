"""The sweep: what no worker holds any more is run again, or ended with the reason.

Beat schedules it, and every worker's lease keeper does it too, because a fleet whose slots are all taken runs no tasks,
and beat may be dead. One turn per interval is taken fleet-wide; two sweeps at once are safe.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import redis
from celery import Celery, states

from producer import broker
from producer.contract import (
    ErrorInfo,
    ErrorKind,
    FailedAttempt,
    InvalidRequestError,
    RolloutRequest,
    RolloutResult,
    StopCondition,
)
from producer.policy import cancelled_error
from producer.server import is_about_the_data
from workers.history import HandBack
from workers.jobs import JobStore, Lapsed, Requeue
from workers.places import Places

logger = logging.getLogger(__name__)

#: Lapsed leases that one sweep deals with: those of several machines, in a second or two.
_MOST = 10_000


def sweep(store: JobStore, app: Celery, *, trusted: bool = True) -> dict[str, int]:
    """Requeue lapsed leases, send what is due, and end what has no attempt left; returns how many of each.

    ``trusted`` is False while leases may have lapsed only because Redis was away: then none is believed lapsed. A
    record that cannot be dealt with is logged and holds up no other.
    """
    began = time.monotonic()
    if not store.take_turn(broker.SWEPT, store.lease_ttl / 4):
        return {}
    counts: Counter[str] = Counter()
    if trusted and store.uptime() >= store.lease_ttl:
        found = store.lapsed(limit=_MOST)
        # Where this had to wait for Redis, others could not renew meanwhile.
        waited = time.monotonic() - began > store.lease_ttl / 4
        for lapsed in found if not waited else ():
            try:
                counts[_requeue_or_end(store, app, lapsed)] += 1
            except (ValueError, TypeError, redis.ResponseError) as error:
                logger.exception("sweep: %s cannot be dealt with", lapsed.rollout_id)
                if is_about_the_data(error) or not isinstance(error, redis.RedisError):
                    _end_unreadable(store, app, lapsed)
    steps: dict[str, Callable[[], int]] = {
        "stale": store.end_stale,
        "woken": store.wake_delayed,
        "places": Places(store.client).mend,
        "resent": lambda: store.resend_missing(age=store.lease_ttl),
        "queues": store.forget_queues,
    }
    for what, step in steps.items():
        try:
            counts[what] += step()
        except (ValueError, TypeError, redis.ResponseError):  # what stands there that should not holds up no other step
            logger.exception("sweep: the step %r failed, going on", what, extra={"stage": "sweep"})
    return {what: count for what, count in counts.items() if count}


def _requeue_or_end(store: JobStore, app: Celery, lapsed: Lapsed) -> str:
    how = HandBack.over(f"worker {lapsed.worker or '?'} stopped renewing its lease", counts=True)
    what, why = store.requeue_lapsed(lapsed, how), how.error.message
    about = _about(lapsed)
    if what is Requeue.REQUEUED:
        logger.warning("%s: %s, requeued", lapsed.rollout_id, why, extra=about)
    elif what in {Requeue.EXHAUSTED, Requeue.CANCELLED}:
        failed = FailedAttempt(attempt=lapsed.attempt, worker=lapsed.worker, error=how.error)
        attempts = [*store.failed_attempts(lapsed.rollout_id), failed]
        request, reason = store.request_of(lapsed.rollout_id), store.cancel_reason(lapsed.rollout_id)
        result = _last_result(lapsed, what, attempts, request, reason)
        encoded = app.backend.encoded(lapsed.rollout_id, result, states.SUCCESS)
        outcome = result.stop_condition
        kind = result.error.kind.value if result.error else ""
        if store.commit(lapsed.rollout_id, lapsed.attempt, lapsed.batch_id, outcome, encoded, error=kind, lapsed=True):
            logger.error("%s: %s, ended as %s", lapsed.rollout_id, why, outcome, extra=about)
    return what.value


def _end_unreadable(store: JobStore, app: Celery, lapsed: Lapsed) -> None:
    """End a rollout whose record the scripts cannot read: nobody can run it, and each sweep would meet it again."""
    error = ErrorInfo(kind=ErrorKind.LEASE, message="its worker died, and its record cannot be read")
    fields = {"error": error, "attempt": lapsed.attempt, "worker": lapsed.worker}
    condition = StopCondition.HAS_ERROR
    try:
        result = RolloutResult(
            rollout_id=lapsed.rollout_id, batch_id=lapsed.batch_id, stop_condition=condition, **fields
        )
        encoded = app.backend.encoded(lapsed.rollout_id, result, states.SUCCESS)
        store.commit(
            lapsed.rollout_id, lapsed.attempt, lapsed.batch_id, condition, encoded, error=error.kind.value, lapsed=True
        )
    except (ValueError, TypeError, redis.ResponseError):
        logger.exception("sweep: %s cannot be ended either", lapsed.rollout_id, extra=_about(lapsed))


def _about(lapsed: Lapsed) -> dict[str, Any]:
    return {"rollout_id": lapsed.rollout_id, "attempt": lapsed.attempt, "worker": lapsed.worker, "stage": "sweep"}


def _last_result(
    lapsed: Lapsed, what: Requeue, attempts: list[FailedAttempt], request: bytes, reason: str | None
) -> RolloutResult:
    """Build the result of a rollout that no worker will run again."""
    history = "\n".join(f"attempt {attempt.attempt}: {attempt.error}" for attempt in attempts)
    if what is Requeue.CANCELLED:
        condition = StopCondition.CANCELLED
        error = cancelled_error(reason, "cancelled; its worker died meanwhile").model_copy(update={"detail": history})
    else:
        condition = StopCondition.HAS_ERROR
        message = f"no attempt is left after {lapsed.attempt}: each time, its worker died or lost its lease"
        error = ErrorInfo(kind=ErrorKind.LEASE, message=message, detail=history)
    fields = {"error": error, "attempt": lapsed.attempt, "worker": lapsed.worker, "failed_attempts": tuple(attempts)}
    try:
        return RolloutResult.for_request(RolloutRequest.parse(request), condition, **fields)
    except InvalidRequestError:
        return RolloutResult(rollout_id=lapsed.rollout_id, batch_id=lapsed.batch_id, stop_condition=condition, **fields)
