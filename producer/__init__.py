"""What a trainer or a batch job imports: requests, results, and the producer that sends one and receives the other.

A trainer asks for groups, and says which policy version it trains::

    async with Producer.from_settings() as producer:                          # reads ROLLOUTS_REDIS_URL
        await producer.set_policy_version(step, max_off_policy_steps=4)       # what is older is cancelled, fleet-wide
        terms = GroupTerms(size=8, min_usable=6, replace_failed=2)
        async for group in producer.groups(examples, terms, run_id="run-7", max_groups=64, consumer="trainer"):
            if group.dropped is None:
                train(group.results)

Groups
    are delivered whole or dropped whole, with a reason (``failed``, ``stale``, ``overload``, ``cancelled``). One is
    ready when ``min_usable`` of its rollouts are usable; the rest is then cancelled or kept. `Producer.submit_group`
    gives the handle of one. Cancelling a group, or a batch with `Producer.cancel_batch`, is for good: later
    submissions under its id are refused in the step that would write them.
Staleness
    Requests carry ``policy_version``. ``on_stale="cancel"`` ends those that wait without starting them and cancels
    those that run; ``"withhold"`` lets those that run end, and delivers them without their turns (the handle's
    ``result()`` still has all); ``"keep"`` runs all. Late results are marked ``stale``. Requests with
    ``purpose="eval"`` or ``"frozen"`` are exempt. `Producer.shed` cancels the youngest that train.
Delivery
    With ``consumer="NAME"``, ``results``, ``submit_many`` and ``groups`` go on where the last process of that name
    was. Asking for the next result acknowledges the one before, in Redis, before it is handed out. After a crash
    nothing is missing, and only the one that was in hand comes again, with ``redelivered`` true: whether it was dealt
    with, only the consumer knows (the last line of its file, say). A second process under the same name takes over;
    the first gets `ConsumerTakenError`. What nobody consumed is kept for seven days.
Flow
    ``batch.max_in_flight`` may be moved at any time (0 pauses); ``Pace(per_minute, burst)`` bounds how fast rollouts
    are submitted. `Producer.set_limit` of ``env:NAME`` or ``gateway:URL`` holds in the whole fleet: what is above it
    waits without a worker, in order. Of several ``gateway_urls`` the least loaded is taken, for all attempts, and
    with ``share_gateway`` for the whole group. Evaluation is served before training, which still gets every fourth
    place.
Progress
    `Producer.batch_progress` asks workers for phase, turns and tokens so far; nothing is told unasked.
Results
    A step of ``result.trajectory`` is ``{prompt, completion, tokens, reward, advantage, is_truncated, trajectory_id,
    extras}``; its ``tokens`` are ``{prompt_ids, prompt_mask, completion_ids, completion_mask, completion_logprobs,
    overlong_prompt, is_truncated, routed_experts}``: the format of the rollout gateway that prime-rl and verifiers
    0.1 used. ``result.integrity`` is what the bundled gateway checked of it: ``ok`` says that ids and logprobs match,
    that no call went past the gateway, and that each turn's prompt begins with the tokens of the turn before;
    ``problems`` say which does not hold, in which turn. `to_verifiers` returns verifiers 0.1's ``State``,
    `to_verifiers_trace` a v1 trace, which ``verifiers.v1.WireTrace`` of 0.4 validates.

Without this package
    a plain ``send_task("rollouts.run", [request], task_id=ID, queue="rollouts")`` of Celery works too. Its record is
    made when a worker claims it: one that is killed between taking it from the queue and that (milliseconds, or while
    Redis takes no writes) takes it along. A `Producer` writes the record first, and has no such gap.

`producer.contract` has every field of a request and of a result. The names are found when they are used first, so
that who needs a part alone (the gateway, ``rollouts --help``) does not wait for Celery.
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
        FailedAttempt,
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
    from producer.group import Drop, Group, GroupResult, GroupTerms, OnReady, is_usable
    from producer.groups import Groups
    from producer.pace import Pace
    from producer.policy import OnStale, Staled
    from producer.results import Results
    from producer.settings import ProducerSettings
    from producer.sync import SyncBatch, SyncGroup, SyncGroups, SyncHandle, SyncProducer, SyncResults
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
    "FailedAttempt",
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
    "SyncGroups",
    "SyncHandle",
    "SyncProducer",
    "SyncResults",
    "Timing",
    "is_usable",
    "to_verifiers",
    "to_verifiers_trace",
]

#: Where each of the names is at home.
_HOMES = {
    "producer.batch": "Batch Counts",
    "producer.broker": "JobState",
    "producer.client": "Producer RolloutHandle",
    "producer.connection": "CancelAnswer",
    "producer.contract": "Deadlines ErrorInfo ErrorKind FailedAttempt InvalidRequestError Phase Purpose Resources "
    "RolloutRequest RolloutResult StopCondition Timing",
    "producer.errors": "BatchCancelledError ConsumerTakenError FleetError FleetEvictsError FleetFullError "
    "FleetUnreachableError RolloutConflictError RunBrokenError",
    "producer.group": "Drop Group GroupResult GroupTerms OnReady is_usable",
    "producer.groups": "Groups",
    "producer.pace": "Pace",
    "producer.policy": "OnStale Staled",
    "producer.results": "Results",
    "producer.settings": "ProducerSettings",
    "producer.sync": "SyncBatch SyncGroup SyncGroups SyncHandle SyncProducer SyncResults",
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
