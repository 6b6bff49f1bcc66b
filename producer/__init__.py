"""What a trainer or a batch job imports: requests, results, and the producer that sends one and receives the other."""

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
