"""What a worker process counts where it happens, once for the whole process, for its ``/metrics``.

What can be read from the state of things at a scrape is not counted here: see `workers.metrics`. Counting takes about
a microsecond, from any thread. A request that got no answer has the status `NO_ANSWER`.
"""

from __future__ import annotations

from typing import Any

from prometheus_client import Counter, Histogram

from producer.contract import ErrorKind, Phase, StopCondition

NO_ANSWER = "none"
#: Seconds: a phase takes from some milliseconds (a registration) to six hours (an agent).
_PHASE_BUCKETS = (
    *(0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0),
    *(60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0, 7200.0, 21600.0),
)
#: Seconds: a tenth of a millisecond on the same host, until the client gives up.
_ROUND_TRIP_BUCKETS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)

ATTEMPTS = Counter("rollouts_attempts", "Attempts that this worker claimed.", registry=None)
FINISHED = Counter(
    "rollouts_finished",
    "Rollouts whose end this worker recorded, by the kind of their error.",
    ["outcome", "error"],
    registry=None,
)
RESULT_BYTES = Counter("rollouts_result_bytes", "Size of the results that it stored, compressed.", registry=None)
PHASE_SECONDS = Histogram(
    "rollouts_phase_seconds",
    "How long attempts were in a phase, however it ended.",
    ["phase"],
    buckets=_PHASE_BUCKETS,
    registry=None,
)
LEASE_RENEWALS = Counter("rollouts_lease_renewals", "Leases that were renewed.", registry=None)
LEASE_LOSSES = Counter("rollouts_lease_losses", "Leases that were found lost.", registry=None)
PLATFORM_REQUESTS = Counter(
    "rollouts_platform_requests",
    "Requests to the sandbox platform, by its API and the HTTP status of the answer.",
    ["api", "status"],
    registry=None,
)
GATEWAY_REQUESTS = Counter(
    "rollouts_gateway_requests",
    "Control requests to rollout gateways, by the HTTP status of the answer.",
    ["operation", "status"],
    registry=None,
)
REDIS_ROUND_TRIP = Histogram(
    "rollouts_redis_round_trip_seconds",
    "How long Redis took to tell its time, which is asked about once a second.",
    buckets=_ROUND_TRIP_BUCKETS,
    registry=None,
)

#: What a worker registers with its admin port.
ALL = (
    *(ATTEMPTS, FINISHED, RESULT_BYTES, PHASE_SECONDS, LEASE_RENEWALS, LEASE_LOSSES),
    *(PLATFORM_REQUESTS, GATEWAY_REQUESTS, REDIS_ROUND_TRIP),
)

_ENDS = [(StopCondition.COMPLETED, ""), (StopCondition.AGENT_TIMEOUT, ""), (StopCondition.CANCELLED, "cancelled")]
_ENDS += [(StopCondition.HAS_ERROR, kind) for kind in ErrorKind if kind is not ErrorKind.CANCELLED]


def totals() -> dict[str, Any]:
    """Return what this process has counted so far, ``{attempts, finished}``, the latter by outcome."""
    finished: dict[str, int] = {}
    for outcome, error in _ENDS:
        finished[outcome.value] = finished.get(outcome.value, 0) + _count(FINISHED.labels(outcome, error))
    return {"attempts": _count(ATTEMPTS), "finished": finished}


def _count(counter: Counter) -> int:
    return int(next(s.value for family in counter.collect() for s in family.samples if s.name.endswith("_total")))


def _begin_at_zero() -> None:
    """Show what may happen before it does: the first one would else be no increase to Prometheus."""
    for outcome, error in _ENDS:
        FINISHED.labels(outcome, error)
    for phase in Phase:
        PHASE_SECONDS.labels(phase)


_begin_at_zero()
