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
        Resources,
        RolloutRequest,
        RolloutResult,
        StopCondition,
        Timing,
    )
    from producer.errors import (
        FleetError,
        FleetEvictsError,
        FleetFullError,
        FleetUnreachableError,
        RolloutConflictError,
        RunBrokenError,
    )
    from producer.results import Results
    from producer.settings import ProducerSettings
    from producer.sync import SyncBatch, SyncHandle, SyncProducer

__all__ = [
    "Batch",
    "CancelAnswer",
    "Counts",
    "Deadlines",
    "ErrorInfo",
    "ErrorKind",
    "FleetError",
    "FleetEvictsError",
    "FleetFullError",
    "FleetUnreachableError",
    "InvalidRequestError",
    "JobState",
    "Phase",
    "Producer",
    "ProducerSettings",
    "Resources",
    "Results",
    "RolloutConflictError",
    "RolloutHandle",
    "RolloutRequest",
    "RolloutResult",
    "RunBrokenError",
    "StopCondition",
    "SyncBatch",
    "SyncHandle",
    "SyncProducer",
    "Timing",
]

#: Where each of the names is at home.
_HOMES = {
    "producer.batch": "Batch Counts",
    "producer.broker": "JobState",
    "producer.client": "Producer RolloutHandle",
    "producer.connection": "CancelAnswer",
    "producer.contract": "Deadlines ErrorInfo ErrorKind InvalidRequestError Phase Resources RolloutRequest "
    "RolloutResult StopCondition Timing",
    "producer.errors": "FleetError FleetEvictsError FleetFullError FleetUnreachableError RolloutConflictError "
    "RunBrokenError",
    "producer.results": "Results",
    "producer.settings": "ProducerSettings",
    "producer.sync": "SyncBatch SyncHandle SyncProducer",
}


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names.split():
            found = globals()[name] = getattr(import_module(module), name)
            return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
