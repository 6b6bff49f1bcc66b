"""Takes over what an earlier process of a run had submitted: resuming it runs nothing twice, and misses nothing.

A process that is killed leaves rollouts in the fleet, which run on and end. Each process of a run names what it submits
by the run's batch, the task, and a suffix of its own; so the next one can look for all of them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from itertools import islice

from producer import broker
from producer.connection import FleetConnection
from producer.contract import InvalidRequestError, RolloutRequest, StopCondition
from producer.files.record import Run, digest
from producer.ids import safe_id

_AT_ONCE = 100  # records, each with its request, in one look
_FIELDS = ("state", "outcome", "cancel", "request")


class Resumption:
    """Names the requests of a run that goes on: as they were submitted where that still counts, and else anew.

    What waits or runs is waited for, and what has ended in a way that is kept is taken, also with ``keep_failed`` an
    error. What failed or was cancelled runs again under a new id. So does what is asked for in another way by now (a
    timeout was mended, say); what still runs of that is cancelled.
    """

    def __init__(self, run: Run, *, keep_failed: bool) -> None:
        self._earlier, self._suffix = run.suffixes[:-1], run.suffixes[-1]
        self._kept = {StopCondition.COMPLETED, StopCondition.AGENT_TIMEOUT}
        if keep_failed:
            self._kept.add(StopCondition.HAS_ERROR)
        self.taken_over = 0

    async def requests(
        self, connection: FleetConnection, requests: Iterable[RolloutRequest]
    ) -> AsyncIterator[RolloutRequest]:
        """Name ``requests``, as the tasks give them, one after the other."""
        some = iter(requests)
        while chunk := list(islice(some, _AT_ONCE)):
            found = await self._found(connection, chunk)
            gone = await _without_result(connection, [request.rollout_id for request in found if request])
            for request, earlier in zip(chunk, found, strict=True):
                if earlier is None or earlier.rollout_id in gone:
                    yield _named(request, self._suffix)
                else:
                    self.taken_over += 1
                    yield earlier

    async def _found(
        self, connection: FleetConnection, requests: Sequence[RolloutRequest]
    ) -> list[RolloutRequest | None]:
        """Return what each was submitted as last, None where that is of no use or was never done."""
        found: list[RolloutRequest | None] = [None] * len(requests)
        left, unwanted = list(range(len(requests))), []
        for suffix in reversed(self._earlier):
            named = [_named(requests[i], suffix) for i in left]
            records = await connection.fields([request.rollout_id for request in named], _FIELDS)
            unknown = []
            for i, request, (state, outcome, cancel, submitted) in zip(left, named, records, strict=True):
                if state is None or submitted is None:
                    unknown.append(i)
                elif state == broker.JobState.DONE.value.encode():
                    found[i] = self._ended(request, outcome, submitted)
                elif not cancel and submitted == request.to_json():
                    found[i] = request
                else:
                    unwanted.append(request.rollout_id)
            left = unknown
        await connection.cancel(unwanted)
        return found

    def _ended(self, request: RolloutRequest, outcome: bytes | None, submitted: bytes) -> RolloutRequest | None:
        if outcome is None or outcome.decode() not in self._kept:
            return None
        try:
            as_it_was = RolloutRequest.parse(submitted)
        except InvalidRequestError:
            return None
        return as_it_was if digest(as_it_was) == digest(request) else None


def _named(request: RolloutRequest, suffix: str) -> RolloutRequest:
    return request.model_copy(update={"rollout_id": safe_id(request.rollout_id + suffix)}) if suffix else request


async def _without_result(connection: FleetConnection, rollout_ids: Sequence[str]) -> set[str]:
    """Return those that have ended and whose result is gone."""
    if not rollout_ids:
        return set()

    async def look() -> list[object]:
        pipe = connection.redis.pipeline(transaction=True)  # in one moment: what runs may end in between
        for rollout_id in rollout_ids:
            pipe.hget(broker.job_key(rollout_id), "state")
            pipe.exists(broker.result_key(rollout_id))
        return list(await pipe.execute())

    answers = await connection.call(look)
    pairs = zip(rollout_ids, answers[::2], answers[1::2], strict=True)
    return {i for i, state, stored in pairs if not stored and state not in {b"pending", b"running"}}
