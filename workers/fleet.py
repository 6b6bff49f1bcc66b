"""One worker process's part of the fleet: claims rollouts, runs them, keeps their leases, ends their records."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import redis
from celery import Celery, states
from celery.exceptions import Ignore
from redis.backoff import NoBackoff
from redis.retry import Retry

from producer.contract import (
    ErrorInfo,
    ErrorKind,
    InvalidRequestError,
    RolloutRequest,
    RolloutResult,
    StopCondition,
)
from workers.errors import RolloutError
from workers.gateway.client import HttpGateway
from workers.jobs import Claim, JobStore, Renewal, Requeue
from workers.leases import LeaseKeeper
from workers.pool import AsyncioPool, CancelReason, Job, current_job
from workers.registry import Environments, Secrets, sandbox_provider, tunnel_provider
from workers.rollout import Systems, run_rollout
from workers.settings import WorkerSettings
from workers.state import Rollout
from workers.sweep import sweep

logger = logging.getLogger(__name__)

#: Threads for calls to Redis: they wait on the network, not on each other.
_REDIS_THREADS = 4
_RETRY_DELAY_MAX = 60.0
#: Seconds that a claim may wait for Redis: it holds Celery's own thread, which serves signals and remote control.
CLAIM_PATIENCE = 5.0

T = TypeVar("T")

_REASONS = {Renewal.LOST: CancelReason.LEASE_LOST, Renewal.CANCELLED: CancelReason.CANCELLED}


class Fleet:
    """What the worker's tasks share. It lives on the pool's event loop, from the pool's start to its stop."""

    def __init__(self, settings: WorkerSettings, app: Celery, environ: Mapping[str, str]) -> None:
        self.settings = settings
        self.app = app
        self.environments = Environments(settings.environments)
        self._secrets = Secrets(settings.secret_env, environ)
        self._held: dict[str, tuple[Job, Claim]] = {}
        self._running: dict[str, Rollout] = {}
        self._unsure: set[str] = set()  # rollouts whose claim got no answer
        self._started_at = time.time()

    @asynccontextmanager
    async def lifespan(self, pool: AsyncioPool) -> AsyncIterator[None]:
        """Hold everything that a worker process needs while its pool runs."""
        self.pool = pool
        self.worker = pool.hostname or f"worker@{socket.gethostname()}"
        async with AsyncExitStack() as stack:
            self.store = stack.enter_context(connected(self.settings, self.app))
            impatient = connected(self.settings, self.app, patience=CLAIM_PATIENCE, retry=Retry(NoBackoff(), 0))
            self._claims = stack.enter_context(impatient)
            self._threads = ThreadPoolExecutor(_REDIS_THREADS, thread_name_prefix="redis")
            stack.callback(self._threads.shutdown, wait=False, cancel_futures=True)
            hooks = ThreadPoolExecutor(self.settings.hook_threads, thread_name_prefix="hook")
            asyncio.get_running_loop().set_default_executor(hooks)  # where `asyncio.to_thread` runs plain hooks
            self._systems, self._keyless = await self._connect_systems(stack)
            # A connection of its own: renewals must not queue behind anything else.
            self.keeper = self._keeper(stack.enter_context(connected(self.settings, self.app)))
            self.keeper.start()
            stack.push_async_callback(self._in_thread, self.keeper.stop)
            yield

    async def _connect_systems(self, stack: AsyncExitStack) -> tuple[Systems, Systems]:
        """Return the systems for our own gateway, and for any other one that a request names.

        The control key is for our own: it must not be sent to an address that came with a request.
        """
        key = self.settings.gateway_control_key
        systems = Systems(
            gateway=HttpGateway(control_key=key.get_secret_value() if key else None),
            tunnels=tunnel_provider(self.settings),
            sandboxes=sandbox_provider(self.settings),
            labels=(f"fleet:{self.settings.fleet}", f"worker:{self.worker}"),
        )
        keyless = replace(systems, gateway=HttpGateway())
        for system in (keyless.gateway, systems.gateway, systems.tunnels, systems.sandboxes):
            stack.push_async_callback(system.aclose)
        return systems, keyless

    def _keeper(self, store: JobStore) -> LeaseKeeper:
        return LeaseKeeper(
            store,
            self.worker,
            hang_limit=self.settings.loop_hang_limit,
            progress=lambda: self.pool.loop_progress,
            loop_thread=lambda: self.pool.loop_thread_id,
            on_lost=self._end_early,
            report=self._report,
            # Not on the keeper's own thread: a sweep of thousands must not hold up renewals.
            duties=lambda: self._threads.submit(self.sweep),
        )

    # -- claiming, on Celery's own thread -----------------------------------------------------------------------------

    def claim(self, job: Job, carried: object = None) -> bool:
        """Claim the rollout that ``job`` wakes us for, and keep its lease; False when there is nothing to do.

        ``carried`` is the request of a message that carries its own. True also for an invalid one, of which there is no
        record: `run` tells what is wrong with it.
        """
        if job.id in self._held:
            # A duplicate, or its last attempt lost the lease and still cleans up, which will end what is held under
            # this id. Then the sweep sends it again.
            logger.info("%s: held by this worker, nothing to do", job.id, extra=_about(job.id))
            return False
        try:
            claim = self._claim_or_refuse(job.id, carried)
        except redis.RedisError as error:
            # Redis is away. The sweep sends the wake-up call again, or, if only the answer to the claim was lost, the
            # rollout is given back when Redis answers.
            logger.warning("%s: not claimed, Redis does not answer: %s", job.id, error, extra=_about(job.id))
            self._unsure.add(job.id)
            return False
        if claim == "invalid":
            return True
        if isinstance(claim, Claim):
            self._held[job.id] = job, claim
            self.keeper.hold(job.id, claim.attempt)
            return True
        if claim == "unknown":
            logger.error("%s: a message without a record; the record expired or Redis lost it", job.id)
        else:
            logger.info("%s: already %s, nothing to do", job.id, claim, extra=_about(job.id))
        return False

    def _claim_or_refuse(self, rollout_id: str, carried: object) -> Claim | str:
        try:
            return self._claims.claim(rollout_id, self.worker, _offered(rollout_id, carried))
        except InvalidRequestError:
            # Only a rollout of which nothing is known may end by a message that is wrong.
            return "done" if self._claims.exists(rollout_id) else "invalid"

    def _settle_unsure(self) -> None:
        """Give back what was claimed for this worker without its learning so; it spends no attempt."""
        for rollout_id in list(self._unsure):
            claimed = self.store.claimed_by(rollout_id)
            if claimed and claimed[1] == self.worker and rollout_id not in self._held:
                request = RolloutRequest.parse(self.store.request_of(rollout_id))
                why = "the answer to the claim was lost"
                self.store.release(request, claimed[0], why=why, counts=False, front=True)
            self._unsure.discard(rollout_id)

    def hand_back(self, job: Job) -> None:
        """Give up the claim of a job that will not run: end what was cancelled, let another worker run the rest.

        For the tracers' threads. Where Redis does not answer the lease lapses, and the sweep does the same.
        """
        held = self._held.get(job.id)
        if held is None or held[0] is not job:
            return
        try:
            if job.cancel_reason is not CancelReason.LEASE_LOST:
                self._give_up(job, held[1])
        except (redis.RedisError, InvalidRequestError) as error:
            logger.warning("%s: not handed back, its lease lapses: %s", job.id, error, extra=_about(job.id))
        finally:
            self.release(job)

    def _give_up(self, job: Job, claim: Claim) -> None:
        request = RolloutRequest.parse(claim.request)
        if job.cancel_reason not in {CancelReason.CANCELLED, CancelReason.REVOKED}:
            counts = job.cancel_reason is not CancelReason.SHUTDOWN
            why = f"worker {self.worker} did not start it: {job.cancel_reason}"
            if self._claims.release(request, claim.attempt, why=why, counts=counts, front=True) != Requeue.CANCELLED:
                return
        error = ErrorInfo(kind=ErrorKind.CANCELLED, message="cancelled before it began")
        about = {"error": error, "attempt": claim.attempt, "worker": self.worker}
        result = RolloutResult.for_request(request, StopCondition.CANCELLED, **about)
        encoded = self.app.backend.encoded(job.id, result, states.SUCCESS)
        self._claims.commit(job.id, claim.attempt, claim.batch_id, result.stop_condition, encoded)

    # -- running one rollout ------------------------------------------------------------------------------------------

    async def run(self, job: Job, carried: object = None) -> RolloutResult:
        """Run one attempt of the rollout that was claimed for ``job``.

        ``carried`` is the request of a message that carries its own. Raises `Ignore` when there is nothing to report:
        a lost lease, or a rollout that was given back to run again.
        """
        held = self._held.get(job.id)
        if held is None or held[0] is not job:
            return _refused(job.id, carried)
        try:
            return await self._attempt(job, held[1])
        finally:
            self._running.pop(job.id, None)

    async def _attempt(self, job: Job, claim: Claim) -> RolloutResult:
        about = {"attempt": claim.attempt, "worker": self.worker, "batch_id": claim.batch_id}
        try:
            request = RolloutRequest.parse(claim.request)
            environment = self.environments.get(request.environment)
            secrets = self._secrets.of(request)
        except InvalidRequestError as error:
            return RolloutResult(rollout_id=claim.rollout_id, **about, **_invalid(str(error)))
        except RolloutError as error:
            del about["batch_id"]
            return RolloutResult.for_request(request, StopCondition.HAS_ERROR, error=error.info(), **about)

        gateway_url = request.gateway_url or self.settings.gateway_url
        rollout = Rollout(request, gateway_url, attempt=claim.attempt, worker=self.worker, secrets=secrets)
        self._running[claim.rollout_id] = rollout
        systems = self._systems if gateway_url == self.settings.gateway_url else self._keyless
        try:
            await run_rollout(rollout, environment, systems)
        except asyncio.CancelledError:
            return await self._cancelled(job, claim, rollout)
        result = rollout.result()
        if result.error and result.error.retryable and not claim.last:
            await self._retry(claim, rollout, result.error)
        return result

    async def _cancelled(self, job: Job, claim: Claim, rollout: Rollout) -> RolloutResult:
        """Decide what a cancelled attempt leaves behind, by who cancelled it."""
        reason = job.cancel_reason
        if reason is CancelReason.SHUTDOWN:
            why = f"worker {self.worker} shut down"
            if await self._release(claim, rollout.request, why=why, counts=False, front=True) is not Requeue.CANCELLED:
                raise Ignore
            reason = CancelReason.CANCELLED
        if reason in {CancelReason.CANCELLED, CancelReason.REVOKED}:
            rollout.error = ErrorInfo(
                kind=ErrorKind.CANCELLED, message="cancelled while it ran", phase=rollout.last_phase
            )
            return rollout.result(StopCondition.CANCELLED)
        raise Ignore if reason is CancelReason.LEASE_LOST else asyncio.CancelledError

    async def _retry(self, claim: Claim, rollout: Rollout, error: ErrorInfo) -> None:
        """Give the rollout back to run again after a while; raises `Ignore` when that was done."""
        delay = min(_RETRY_DELAY_MAX, 2.0 ** (claim.attempt - 1)) * random.uniform(0.5, 1.0)  # noqa: S311
        why = f"{error} ({error.detail})" if error.detail else str(error)
        outcome = await self._release(claim, rollout.request, why=why[:500], delay=delay)
        if outcome in {Requeue.REQUEUED, Requeue.STALE}:
            about = _about(claim.rollout_id)
            logger.warning("%s: runs again in %.1f s or more: %s", claim.rollout_id, delay, error, extra=about)
            raise Ignore

    async def _release(self, claim: Claim, request: RolloutRequest, **how: Any) -> Requeue:
        """Give a rollout back, waiting for Redis if it is away: its lease lapses meanwhile, or is renewed."""
        while True:
            try:
                what = await self._in_thread(lambda: self.store.release(request, claim.attempt, **how))
            except (redis.ConnectionError, redis.TimeoutError) as error:
                logger.warning("%s: not given back yet: %s", claim.rollout_id, error, extra=_about(claim.rollout_id))
                await asyncio.sleep(0.5)
            else:
                if what in {Requeue.REQUEUED, Requeue.STALE}:
                    self.keeper.drop(claim.rollout_id)
                return what

    # -- ending its record, on the threads on which Celery stores results ----------------------------------------------

    def holds(self, rollout_id: str) -> bool:
        """Whether the job that is being ended here is the one for which this worker claimed the rollout."""
        held = self._held.get(rollout_id)
        return held is not None and held[0] is _job_here()

    def commit(self, rollout_id: str, outcome: StopCondition, result: bytes) -> None:
        """Store the result, end the record and announce it; dropped when another attempt owns the rollout by now.

        Raises `redis.RedisError`; Celery's backend tries again until Redis answers.
        """
        _, claim = self._held[rollout_id]
        try:
            committed = self.store.commit(rollout_id, claim.attempt, claim.batch_id, outcome, result)
        except (redis.OutOfMemoryError, redis.ReadOnlyError) as error:
            # Redis is full, or fails over. The lease is kept meanwhile, so nobody runs the rollout again.
            raise redis.ConnectionError(f"Redis takes no writes: {type(error).__name__}") from None
        if not committed:
            logger.warning("%s: its lease was lost, the result is dropped", rollout_id, extra=_about(rollout_id))

    def cancel(self, rollout_id: str) -> None:
        """Cancel a rollout, whoever holds it."""
        self.store.cancel(rollout_id)

    def release(self, job: Job) -> None:
        """Stop keeping the lease of what was claimed for ``job``; by then its record has ended or was given back."""
        held = self._held.get(job.id)
        if held is not None and held[0] is job:
            self.keeper.drop(job.id)
            del self._held[job.id]

    # -- what the lease keeper's thread calls ------------------------------------------------------------------------

    def _end_early(self, rollout_id: str, renewal: Renewal) -> None:
        held = self._held.get(rollout_id)
        if held is not None:
            logger.warning("%s: %s, ending it", rollout_id, renewal, extra=_about(rollout_id))
            held[0].cancel(_REASONS[renewal])

    def sweep(self) -> None:
        """Do the sweep if it is due; Redis being away is no error, the next one comes soon."""
        try:
            self._settle_unsure()
            counts = sweep(self.store, self.app, trusted=self.keeper.trusts_leases)
        except (redis.ConnectionError, redis.TimeoutError) as error:
            logger.warning("no sweep, Redis does not answer: %s", error, extra={"stage": "sweep"})
        except Exception:
            logger.exception("the sweep failed", extra={"stage": "sweep"})
        else:
            if counts:
                logger.info("sweep: %s", counts, extra={"stage": "sweep"})

    def _report(self) -> dict[str, Any]:
        phases = Counter(rollout.phase.value for rollout in list(self._running.values()))
        return {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "concurrency": self.pool.num_processes,
            "running": len(self._held),
            "phases": dict(phases),
            "loop_lag_ms": self.pool.info["loop-lag-ms"],
            "environments": self.environments.names(),
            "started_at": self._started_at,
            "state": "running",
        }

    async def _in_thread(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)


@contextmanager
def connected(settings: WorkerSettings, app: Celery, *, patience: float = 10.0, **options: Any) -> Iterator[JobStore]:
    """Hold a job store on a Redis connection pool of its own, which waits ``patience`` seconds for an answer.

    ``options`` are more of redis-py's.
    """
    client = redis.Redis.from_url(
        settings.redis_url,
        socket_timeout=patience,
        socket_connect_timeout=min(patience, 5),
        socket_keepalive=True,
        health_check_interval=25,
        **options,
    )
    with client:
        yield JobStore(client, app, lease_ttl=settings.lease_ttl)


def _job_here() -> Job | None:
    try:
        return current_job()
    except LookupError:
        return None


def _offered(task_id: str, carried: object) -> RolloutRequest | None:
    """Validate a message's own request: it runs under the task's id, so that Celery's result is found under it too."""
    if carried is None:
        return None
    if isinstance(carried, dict):
        if carried.get("rollout_id", task_id) != task_id:
            raise InvalidRequestError("rollout_id: differs from the message's task id; send it with task_id=rollout_id")
        carried = {**carried, "rollout_id": task_id}
    return RolloutRequest.parse(carried)


def _refused(task_id: str, carried: object) -> RolloutResult:
    """Tell what is wrong with a message's own request; raises `Ignore` when nothing is: then its claim is gone."""
    try:
        _offered(task_id, carried)
    except InvalidRequestError as error:
        return RolloutResult(rollout_id=task_id, **_invalid(str(error)))
    raise Ignore


def _invalid(message: str) -> dict[str, Any]:
    error = ErrorInfo(kind=ErrorKind.INVALID_REQUEST, message=message)
    return {"stop_condition": StopCondition.HAS_ERROR, "error": error}


def _about(rollout_id: str) -> dict[str, str]:
    return {"rollout_id": rollout_id}
