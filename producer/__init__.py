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
]
