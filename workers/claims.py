"""The rollouts that one worker process holds: claimed on Celery's own thread, given up by whatever ends them.

A claim is held for one `Job`, not for a rollout's id alone: a message may come twice, and an attempt that has lost its
lease may still be cleaning up when its rollout is claimed again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import redis
from celery import Celery, states
from celery.exceptions import Ignore
from kombu.exceptions import OperationalError

from producer import broker
from producer.contract import (
    ErrorInfo,
    ErrorKind,
    InvalidRequestError,
    RolloutRequest,
    RolloutResult,
    StopCondition,
)
from producer.policy import cancelled_error
from producer.server import is_about_the_data, what_redis_does
from workers.history import HandBack
from workers.jobs import Claim, JobStore, Renewal, Requeue
from workers.leases import LeaseKeeper
from workers.pool import CancelReason, Job, current_job

logger = logging.getLogger(__name__)

#: Seconds that a claim may wait for Redis: it holds Celery's own thread, which serves signals and remote control.
CLAIM_PATIENCE = 5.0

_REASONS = {Renewal.LOST: CancelReason.LEASE_LOST, Renewal.CANCELLED: CancelReason.CANCELLED}


class Claims:
    """Takes and gives up claims, and ends the records of what is held; ``keeper`` keeps their leases.

    ``impatient`` is the same store, but waits no longer than `CLAIM_PATIENCE` for Redis. Celery's result backend sees
    this as its `Records`. ``on_release`` is told of each claim just before it is held no more, and ``on_unsure`` when
    `unsure` changes; both on whichever thread.
    """

    def __init__(
        self,
        app: Celery,
        store: JobStore,
        keeper: LeaseKeeper,
        worker: str,
        *,
        impatient: JobStore,
        on_release: Callable[[Claim], object] = lambda claim: None,
        on_unsure: Callable[[], object] = lambda: None,
    ) -> None:
        self._app = app
        self._store = store
        self._impatient = impatient
        self._keeper = keeper
        self._worker = worker
        self._held: dict[str, tuple[Job, Claim]] = {}
        self._on_release = on_release
        self._on_unsure = on_unsure
        self._unsure: dict[str, object] = {}  # rollouts whose claim got no answer: the requests that messages carried
        self._early: dict[str, dict[str, Any]] = {}  # of held rollouts: where a message came from meanwhile
        self._claiming: set[str] = set()  # rollouts that are being claimed, until they are held or not

    def __len__(self) -> int:
        return len(self._held)

    def held(self) -> list[str]:
        """Return the ids of the rollouts that are held."""
        return list(self._held)

    @property
    def unsure(self) -> bool:
        """Whether a claim got no answer, and it is not settled yet what became of its rollout.

        Meanwhile no message should be taken: each that carries its request would be kept by this process alone.
        """
        return bool(self._unsure)

    def of(self, job: Job) -> Claim | None:
        """Return what was claimed for ``job``, or None."""
        held = self._held.get(job.id)
        return held[1] if held is not None and held[0] is job else None

    # -- claiming, on Celery's own thread -----------------------------------------------------------------------------

    def claim(self, job: Job, carried: object = None) -> bool:
        """Claim the rollout that ``job`` wakes us for, and keep its lease; False when there is nothing to do.

        ``carried`` is the request of a message that carries its own. True also for an invalid one, of which there is no
        record: `refused` tells what is wrong with it.
        """
        if job.id in self._held and self._is_too_early(job):
            logger.info("%s: held by this worker, nothing to do", job.id, extra=self._about(job.id))
            return False
        # First, and until it is held: what `settle_unsure` finds claimed meanwhile may be this claim.
        self._claiming.add(job.id)
        try:
            return self._claim(job, carried)
        finally:
            self._claiming.discard(job.id)

    def _is_too_early(self, job: Job) -> bool:
        """Note that a message came for what is held, for it to be sent again; False when it is held no more by now.

        It may be a duplicate. But it may also be that the attempt that is held has lost its lease and still cleans up,
        or has just ended and was retried, which will end what is held under this id.
        """
        self._early[job.id] = job.request.get("delivery_info") or {}
        if job.id in self._held:  # so `release` has yet to look at what was noted
            return True
        self._early.pop(job.id, None)
        return False

    def _claim(self, job: Job, carried: object) -> bool:
        try:
            claim = self._claim_or_refuse(job.id, carried)
        except redis.RedisError as error:
            # Redis is away, or full. The sweep sends the wake-up call again. If only the answer to the claim was lost,
            # or the message carried its request, so that nobody else knows of it, `settle_unsure` does.
            said = what_redis_does(error)
            logger.warning("%s: not claimed, %s: %s", job.id, said, error, extra=self._about(job.id))
            self._unsure[job.id] = carried
            self._on_unsure()
            self._keeper.hurry()
            return False
        if claim == "invalid":
            return True
        if isinstance(claim, Claim):
            self._held[job.id] = job, claim
            self._keeper.hold(job.id, claim.attempt)
            return True
        if claim == "unknown":
            logger.error(
                "%s: a message without a record; the record expired or Redis lost it", job.id, extra=self._about(job.id)
            )
        elif claim == "elsewhere":
            said = "%s: of a queue that this worker does not serve, left to one that does"
            logger.warning(said, job.id, extra=self._about(job.id))
        else:
            logger.info("%s: already %s, nothing to do", job.id, claim, extra=self._about(job.id))
        return False

    def _claim_or_refuse(self, rollout_id: str, carried: object) -> Claim | str:
        try:
            return self._impatient.claim(rollout_id, self._worker, _offered(rollout_id, carried))
        except InvalidRequestError:
            # Only a rollout of which nothing is known may end by a message that is wrong.
            return "done" if self._impatient.exists(rollout_id) else "invalid"

    # -- giving up ----------------------------------------------------------------------------------------------------

    def settle_unsure(self) -> None:
        """Give back what was claimed for this worker without its learning so; it spends no attempt.

        What was not claimed, and only its message carried, gets its record. Raises `redis.RedisError` while Redis is
        away or full; then it is settled another time.
        """
        if not self._unsure:
            return
        try:
            for rollout_id in list(self._unsure):
                # First: another claim that gets no answer meanwhile adds it again.
                carried = self._unsure.pop(rollout_id, None)
                try:
                    self._settle(rollout_id, carried)
                except redis.RedisError as error:
                    if not is_about_the_data(error):
                        self._unsure.setdefault(rollout_id, carried)
                        raise
                    logger.warning("%s: cannot be settled: %s", rollout_id, error, extra=self._about(rollout_id))
        finally:
            self._on_unsure()

    def _settle(self, rollout_id: str, carried: object) -> None:
        claimed = self._store.claimed_by(rollout_id)
        if rollout_id in self._claiming:  # before the next line: a claim is held first, and then not being made
            self._unsure.setdefault(rollout_id, carried)
        elif claimed:
            if claimed[1] == self._worker and rollout_id not in self._held:
                self._give_back(rollout_id, claimed[0])
        elif carried is not None and not self._store.exists(rollout_id):
            self._bring(rollout_id, carried)

    def _give_back(self, rollout_id: str, attempt: int) -> None:
        """Let another worker run what ``attempt`` has claimed: a claim that came since is another one."""
        try:
            request = RolloutRequest.parse(self._store.request_of(rollout_id))
        except InvalidRequestError as error:
            logger.warning("%s: not given back, its lease lapses: %s", rollout_id, error, extra=self._about(rollout_id))
        else:
            self._store.release(request, attempt, self._worker, HandBack.over("the answer to the claim was lost"))

    def _bring(self, rollout_id: str, carried: object) -> None:
        """Give a rollout that Redis knows nothing of its record: by a claim, and by giving that back.

        Should this worker die between the two, the lease lapses, as any other.
        """
        try:
            offered = _offered(rollout_id, carried)
            claim = self._store.claim(rollout_id, self._worker, offered)
        except InvalidRequestError as error:
            self._app.backend.store_result(rollout_id, invalid(rollout_id, str(error)), states.SUCCESS)
            return
        if isinstance(claim, Claim):
            self._give_back(rollout_id, claim.attempt)

    def hand_back(self, job: Job) -> None:
        """Give up the claim of a job that will not run: end what was cancelled, let another worker run the rest.

        For the tracers' threads. Where Redis does not answer the lease lapses, and the sweep does the same.
        """
        claim = self.of(job)
        if claim is None:
            return
        try:
            if job.cancel_reason is not CancelReason.LEASE_LOST:
                self._give_up(job, claim)
        except (redis.RedisError, InvalidRequestError) as error:
            logger.warning("%s: not handed back, its lease lapses: %s", job.id, error, extra=self._about(job.id))
        finally:
            self.release(job)

    def _give_up(self, job: Job, claim: Claim) -> None:
        request = claim.parsed()
        if job.cancel_reason not in {CancelReason.CANCELLED, CancelReason.REVOKED}:
            counts = job.cancel_reason is not CancelReason.SHUTDOWN
            how = HandBack.over(f"worker {self._worker} did not start it: {job.cancel_reason}", counts=counts)
            if self._impatient.release(request, claim.attempt, self._worker, how) is not Requeue.CANCELLED:
                return
        result = RolloutResult.for_request(
            request,
            StopCondition.CANCELLED,
            error=cancelled_error(self._impatient.cancel_reason(job.id), "cancelled before it began"),
            attempt=claim.attempt,
            worker=self._worker,
            failed_attempts=tuple(self._impatient.failed_attempts(job.id)),
        )
        encoded = self._app.backend.encoded(job.id, result, states.SUCCESS)
        kind = ErrorKind.CANCELLED.value
        self._impatient.commit(job.id, claim.attempt, claim.batch_id, result.stop_condition, encoded, error=kind)

    def end_early(self, rollout_id: str, renewal: Renewal) -> None:
        """Cancel the job of a rollout whose lease was lost, or whose cancellation was asked for."""
        held = self._held.get(rollout_id)
        if held is not None:
            logger.warning("%s: %s, ending it", rollout_id, renewal, extra=self._about(rollout_id))
            held[0].cancel(_REASONS[renewal])

    # -- ending its record, on the threads on which Celery stores results ----------------------------------------------

    def holds(self, rollout_id: str) -> bool:
        """Whether the job that is being ended here is the one for which this worker claimed the rollout."""
        held = self._held.get(rollout_id)
        return held is not None and held[0] is _job_here()

    def commit(self, rollout_id: str, outcome: StopCondition, result: bytes, *, error: str = "") -> None:
        """Store the result, end the record and announce it; dropped when another attempt owns the rollout by now.

        Raises `redis.RedisError`; Celery's backend tries again until Redis answers and takes writes. The lease is kept
        meanwhile, so nobody runs the rollout again.
        """
        _, claim = self._held[rollout_id]
        committed = self._store.commit(rollout_id, claim.attempt, claim.batch_id, outcome, result, error=error)
        if not committed:
            logger.warning("%s: its lease was lost, the result is dropped", rollout_id, extra=self._about(rollout_id))

    def cancel(self, rollout_id: str) -> None:
        """Cancel a rollout, whoever holds it."""
        self._store.cancel(rollout_id)

    def _about(self, rollout_id: str) -> dict[str, Any]:
        held = self._held.get(rollout_id)
        return about(rollout_id, held[1].attempt if held else None, self._worker)

    def release(self, job: Job) -> None:
        """Stop keeping the lease of what was claimed for ``job``; by then its record has ended or was given back."""
        if (claim := self.of(job)) is not None:
            self._keeper.drop(job.id)
            self._on_release(claim)
            del self._held[job.id]
            if (where := self._early.pop(job.id, None)) is not None:
                self._send_again(job.id, where)

    def _send_again(self, rollout_id: str, where: dict[str, Any]) -> None:
        """Send the message again that came too early; where nothing waits for it, whoever takes it drops it."""
        to = {"queue": where.get("routing_key") or None, "priority": where.get("priority") or 0}
        try:
            self._app.send_task(broker.RUN_ROLLOUT, task_id=rollout_id, retry=False, **to)
        except (OperationalError, redis.RedisError) as error:
            logger.info("%s: the sweep wakes it, %s", rollout_id, error, extra=self._about(rollout_id))


def about(
    rollout_id: str, attempt: int | None = None, worker: str | None = None, stage: str = "claim"
) -> dict[str, Any]:
    """Return the structured fields of a log line about a rollout."""
    return {"rollout_id": rollout_id, "attempt": attempt, "worker": worker, "stage": stage}


def refused(task_id: str, carried: object) -> RolloutResult:
    """Tell what is wrong with a message's own request; raises `Ignore` when nothing is: then its claim is gone."""
    try:
        if offered := _offered(task_id, carried):
            offered.to_json()  # as for its record: it may be too large, or nested too deeply
    except InvalidRequestError as error:
        return invalid(task_id, str(error))
    raise Ignore


def invalid(rollout_id: str, message: str, **fields: object) -> RolloutResult:
    """Return the result of a request that cannot be run."""
    error = ErrorInfo(kind=ErrorKind.INVALID_REQUEST, message=message)
    return RolloutResult.parse(
        {"rollout_id": rollout_id, "stop_condition": StopCondition.HAS_ERROR, "error": error, **fields}
    )


def _offered(task_id: str, carried: object) -> RolloutRequest | None:
    """Validate a message's own request: it runs under the task's id, so that Celery's result is found under it too."""
    if carried is None:
        return None
    if isinstance(carried, dict):
        if carried.get("rollout_id", task_id) != task_id:
            raise InvalidRequestError("rollout_id: differs from the message's task id; send it with task_id=rollout_id")
        carried = {**carried, "rollout_id": task_id}
    return RolloutRequest.parse(carried)


def _job_here() -> Job | None:
    try:
        return current_job()
    except LookupError:
        return None
