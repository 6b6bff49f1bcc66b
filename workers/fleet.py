"""One worker process's part of the fleet: claims rollouts, runs them, keeps their leases, ends their records."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
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
from workers.pool import AsyncioPool, CancelReason, Job
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
        self._started_at = time.time()

    @asynccontextmanager
    async def lifespan(self, pool: AsyncioPool) -> AsyncIterator[None]:
        """Hold everything that a worker process needs while its pool runs."""
        self.pool = pool
        self.worker = pool.hostname or f"worker@{socket.gethostname()}"
        self.store = connect(self.settings, self.app)
        self._claims = connect(self.settings, self.app, patience=CLAIM_PATIENCE, retry=Retry(NoBackoff(), 0))
        key = self.settings.gateway_control_key
        self._systems = Systems(
            gateway=HttpGateway(control_key=key.get_secret_value() if key else None),
            tunnels=tunnel_provider(self.settings),
            sandboxes=sandbox_provider(self.settings),
        )
        # The control key is for our own gateway. A request may name any other, and must not have the key sent there.
        self._keyless = replace(self._systems, gateway=HttpGateway())
        self._threads = ThreadPoolExecutor(_REDIS_THREADS, thread_name_prefix="redis")
        # A connection of its own: renewals must not queue behind anything else.
        keeper_store = connect(self.settings, self.app)
        self.keeper = LeaseKeeper(
            keeper_store,
            self.worker,
            hang_limit=self.settings.loop_hang_limit,
            progress=lambda: pool.loop_progress,
            loop_thread=lambda: pool.loop_thread_id,
            on_lost=self._end_early,
            report=self._report,
            duties=lambda: self._sweep(keeper_store),
        )
        self.keeper.start()
        try:
            yield
        finally:
            await asyncio.to_thread(self.keeper.stop)
            await self._systems.sandboxes.aclose()
            await self._systems.tunnels.aclose()
            await self._systems.gateway.aclose()
            await self._keyless.gateway.aclose()
            self._threads.shutdown(wait=False)
            self.store.client.close()
            self._claims.client.close()
            keeper_store.client.close()

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
            claim = self._claims.claim(job.id, self.worker, _offered(job.id, carried))
        except InvalidRequestError:
            return True
        except redis.RedisError as error:
            # Redis is away. Holding the message would end the worker; the sweep sends it again.
            logger.warning("%s: not claimed, Redis does not answer: %s", job.id, error, extra=_about(job.id))
            return False
        if isinstance(claim, Claim):
            self._held[job.id] = job, claim
            self.keeper.hold(job.id, claim.attempt)
            return True
        if claim == "unknown":
            logger.error("%s: a message without a record; the record expired or Redis lost it", job.id)
        else:
            logger.info("%s: already %s, nothing to do", job.id, claim, extra=_about(job.id))
        return False

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
            self.release(job.id)

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
        except BaseException:
            self.release(job.id)
            raise
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
        rollout = Rollout(request, gateway_url, attempt=claim.attempt, worker=self.worker)
        self._running[claim.rollout_id] = rollout
        systems = self._systems if gateway_url == self.settings.gateway_url else self._keyless
        try:
            await run_rollout(rollout, environment, systems, secrets)
        except asyncio.CancelledError:
            return await self._cancelled(job, claim, rollout)
        _redact(rollout, secrets)
        result = rollout.result()
        if result.error and result.error.retryable and not claim.last:
            await self._retry(claim, rollout, result.error)
        return result

    async def _cancelled(self, job: Job, claim: Claim, rollout: Rollout) -> RolloutResult:
        """Decide what a cancelled attempt leaves behind, by who cancelled it."""
        if job.cancel_reason is CancelReason.SHUTDOWN:
            why = f"worker {self.worker} shut down"
            await self._in_thread(
                lambda: self.store.release(rollout.request, claim.attempt, why=why, counts=False, front=True)
            )
            raise Ignore
        if job.cancel_reason in {CancelReason.CANCELLED, CancelReason.REVOKED}:
            error = ErrorInfo(kind=ErrorKind.CANCELLED, message="cancelled while it ran", phase=rollout.last_phase)
            rollout.error = error
            return rollout.result(StopCondition.CANCELLED)
        raise Ignore if job.cancel_reason is CancelReason.LEASE_LOST else asyncio.CancelledError

    async def _retry(self, claim: Claim, rollout: Rollout, error: ErrorInfo) -> None:
        """Give the rollout back to run again after a while; raises `Ignore` when that was done."""
        delay = min(_RETRY_DELAY_MAX, 2.0 ** (claim.attempt - 1)) * random.uniform(0.5, 1.0)  # noqa: S311
        why = f"{error} ({error.detail})" if error.detail else str(error)
        outcome = await self._in_thread(
            lambda: self.store.release(rollout.request, claim.attempt, why=why[:500], delay=delay)
        )
        if outcome in {Requeue.REQUEUED, Requeue.STALE}:
            about = _about(claim.rollout_id)
            logger.warning("%s: runs again in %.1f s: %s", claim.rollout_id, delay, error, extra=about)
            raise Ignore

    # -- ending its record, on the threads on which Celery stores results ----------------------------------------------

    def holds(self, rollout_id: str) -> bool:
        """Whether this worker has claimed the rollout and not ended it yet."""
        return rollout_id in self._held

    def commit(self, rollout_id: str, outcome: StopCondition, result: bytes) -> None:
        """Store the result, end the record and announce it; dropped when another attempt owns the rollout by now.

        Raises `redis.RedisError`; Celery's backend tries again until Redis answers.
        """
        _, claim = self._held[rollout_id]
        if not self.store.commit(rollout_id, claim.attempt, claim.batch_id, outcome, result):
            logger.warning("%s: its lease was lost, the result is dropped", rollout_id, extra=_about(rollout_id))

    def cancel(self, rollout_id: str) -> None:
        """Cancel a rollout, whoever holds it."""
        self.store.cancel(rollout_id)

    def release(self, rollout_id: str) -> None:
        """Stop keeping the rollout's lease; releasing one that is not held is fine."""
        self.keeper.drop(rollout_id)
        self._held.pop(rollout_id, None)

    # -- what the lease keeper's thread calls ------------------------------------------------------------------------

    def _end_early(self, rollout_id: str, renewal: Renewal) -> None:
        held = self._held.get(rollout_id)
        if held is not None:
            logger.warning("%s: %s, ending it", rollout_id, renewal, extra=_about(rollout_id))
            held[0].cancel(_REASONS[renewal])

    def sweep(self) -> None:
        """Do the sweep if it is due, for beat; Redis being away is no error, the next one comes soon."""
        try:
            self._sweep(self.store)
        except (redis.ConnectionError, redis.TimeoutError) as error:
            logger.warning("no sweep, Redis does not answer: %s", error, extra={"stage": "sweep"})

    def _sweep(self, store: JobStore) -> None:
        counts = sweep(store, self.app, trusted=self.keeper.trusts_leases)
        if any(counts.values()):
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


def connect(settings: WorkerSettings, app: Celery, *, patience: float = 10.0, **options: Any) -> JobStore:
    """Return a job store on a Redis connection pool of its own, which waits ``patience`` seconds for an answer.

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
    return JobStore(client, app, lease_ttl=settings.lease_ttl)


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


def _redact(rollout: Rollout, secrets: Mapping[str, str]) -> None:
    """Take secrets out of what the agent printed; its own key opens nothing any more, but is nobody's business."""
    for name, value in (*secrets.items(), ("OPENAI_API_KEY", rollout.api_key)):
        if value:
            rollout.agent_stdout = rollout.agent_stdout.replace(value, f"[redacted {name}]")
            rollout.agent_stderr = rollout.agent_stderr.replace(value, f"[redacted {name}]")


def _about(rollout_id: str) -> dict[str, str]:
    return {"rollout_id": rollout_id}
