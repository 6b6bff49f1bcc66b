"""What a trainer or a batch job imports: requests, results, and the producer that sends one and receives the other.

The names are found when they are used first, so that who needs a part alone (the gateway, `rollouts --help`) does not
wait for Celery.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from producer.batch import Batch, Counts
    from producer.broker import JobState
    from producer.client import Producer, RolloutHandle
    from producer.connection import CancelAnswer
    from producer.contract import (
        Deadlines,
        ErrorInfo,
        ErrorKind,
        InvalidRequestError,
        Phase,
        Purpose,
        Resources,
        RolloutRequest,
        RolloutResult,
        StopCondition,
        Timing,
    )
    from producer.errors import (
        BatchCancelledError,
        ConsumerTakenError,
        FleetError,
        FleetEvictsError,
        FleetFullError,
        FleetUnreachableError,
        RolloutConflictError,
        RunBrokenError,
    )
    from producer.group import Drop, Group, GroupResult, GroupTerms, OnReady
    from producer.groups import Groups
    from producer.pace import Pace
    from producer.policy import OnStale, Staled
    from producer.results import Results
    from producer.settings import ProducerSettings
    from producer.sync import SyncBatch, SyncGroup, SyncHandle, SyncProducer
    from producer.verifiers import to_verifiers, to_verifiers_trace
    from producer.watching import RolloutProgress

__all__ = [
    "Batch",
    "BatchCancelledError",
    "CancelAnswer",
    "ConsumerTakenError",
    "Counts",
    "Deadlines",
    "Drop",
    "ErrorInfo",
    "ErrorKind",
    "FleetError",
    "FleetEvictsError",
    "FleetFullError",
    "FleetUnreachableError",
    "Group",
    "GroupResult",
    "GroupTerms",
    "Groups",
    "InvalidRequestError",
    "JobState",
    "OnReady",
    "OnStale",
    "Pace",
    "Phase",
    "Producer",
    "ProducerSettings",
    "Purpose",
    "Resources",
    "Results",
    "RolloutConflictError",
    "RolloutHandle",
    "RolloutProgress",
    "RolloutRequest",
    "RolloutResult",
    "RunBrokenError",
    "Staled",
    "StopCondition",
    "SyncBatch",
    "SyncGroup",
    "SyncHandle",
    "SyncProducer",
    "Timing",
    "to_verifiers",
    "to_verifiers_trace",
]

#: Where each of the names is at home.
_HOMES = {
    "producer.batch": "Batch Counts",
    "producer.broker": "JobState",
    "producer.client": "Producer RolloutHandle",
    "producer.connection": "CancelAnswer",
    "producer.contract": "Deadlines ErrorInfo ErrorKind InvalidRequestError Phase Purpose Resources RolloutRequest "
    "RolloutResult StopCondition Timing",
    "producer.errors": "BatchCancelledError ConsumerTakenError FleetError FleetEvictsError FleetFullError "
    "FleetUnreachableError RolloutConflictError RunBrokenError",
    "producer.group": "Drop Group GroupResult GroupTerms OnReady",
    "producer.groups": "Groups",
    "producer.pace": "Pace",
    "producer.policy": "OnStale Staled",
    "producer.results": "Results",
    "producer.settings": "ProducerSettings",
    "producer.sync": "SyncBatch SyncGroup SyncHandle SyncProducer",
    "producer.verifiers": "to_verifiers to_verifiers_trace",
    "producer.watching": "RolloutProgress",
}


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names.split():
            found = globals()[name] = getattr(import_module(module), name)
            return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
