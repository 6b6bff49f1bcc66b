"""One worker process's part of the fleet: runs the rollouts that it claims, and holds what they need meanwhile."""

from __future__ import annotations

import asyncio
import logging
import random
import socket
import time
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from typing import Any, TypeVar

import redis
from celery import Celery
from celery.exceptions import Ignore
from prometheus_client.registry import Collector

from producer.contract import (
    ErrorInfo,
    InvalidRequestError,
    Phase,
    RolloutRequest,
    RolloutResult,
    StopCondition,
)
from producer.policy import cancelled_error
from producer.server import passes, redact, what_redis_does
from workers import access, claims, fleet_report, instruments, metrics
from workers.admin import AdminServer, Health
from workers.aio import too_late_to_cancel
from workers.breaker import Breaker, State, is_infrastructure, is_ours
from workers.claims import about, invalid, refused
from workers.environment import Environment, EpisodeEnvironment
from workers.episode import run_attempt
from workers.errors import RolloutError
from workers.gateway.protocol import Gateway
from workers.history import HandBack
from workers.intake import Intake
from workers.jobs import Claim, JobStore, Renewal, Requeue
from workers.leases import LeaseKeeper
from workers.ledger import Ledger
from workers.loop_watch import LoopWatch
from workers.orphans import Orphans
from workers.pool import AsyncioPool, CancelReason, Job
from workers.progress import ProgressTeller
from workers.questions import Questions, drain_this_process
from workers.registry import Secrets, check
from workers.rollout import Systems
from workers.settings import WorkerSettings
from workers.state import Rollout
from workers.stores import connected
from workers.sweep import sweep
from workers.systems import WorkerSystems
from workers.telemetry import about_attempt, recent_lines
from workers.tracing import tracing
from workers.upkeep import Upkeep

logger = logging.getLogger(__name__)

#: Threads for calls to Redis: they wait on the network, not on each other.
_REDIS_THREADS = 4
_RETRY_DELAY_MAX = 60.0
#: Longest seconds between two looks whether Redis is back.
_REDIS_DELAY_MAX = 8.0
#: Seconds that the lease keeper has to end; it bounds itself, once it is told.
_KEEPER_LIMIT = 6.0

T = TypeVar("T")


class Fleet:
    """What the worker's tasks share. It lives on the pool's event loop, from the pool's start to its stop."""

    def __init__(self, settings: WorkerSettings, app: Celery, environ: Mapping[str, str]) -> None:
        self.settings = settings
        self.app = app
        self._secrets = Secrets(settings.secret_env, environ)
        self._running: dict[str, Rollout] = {}
        self._started_at = time.time()
        self._serving = False

    @asynccontextmanager
    async def lifespan(self, pool: AsyncioPool) -> AsyncIterator[None]:
        """Hold everything that a worker process needs while its pool runs."""
        self.pool = pool
        self.loop_watch = LoopWatch(lambda: pool.loop_progress, lambda: pool.loop_thread_id)
        self.worker = pool.hostname or f"worker@{socket.gethostname()}"
        self.environments = check(self.settings)  # not earlier: beat needs none of it
        async with AsyncExitStack() as stack:
            admin = stack.enter_context(self._admin())  # first: while Redis is waited for, it tells that this starts
            self.store = stack.enter_context(connected(self.settings, self.app))
            self._threads = ThreadPoolExecutor(_REDIS_THREADS, thread_name_prefix="redis")
            stack.callback(self._threads.shutdown, wait=False, cancel_futures=True)
            hooks = ThreadPoolExecutor(self.settings.hook_threads, thread_name_prefix="hook")
            asyncio.get_running_loop().set_default_executor(hooks)  # where `asyncio.to_thread` runs plain hooks
            self.ledger = Ledger(self.store.client, lease_ttl=self.settings.lease_ttl)
            self.spans = stack.enter_context(tracing(self.settings, self.worker))
            await self._when_redis_answers(None, self._require_redis)
            fleet_id = await self._when_redis_answers(None, self.ledger.fleet_id)
            await self._when_redis_answers(None, self.store.uptime)  # what its clock tells now, to notice a jump
            beside = {"environments": self.environments.aclose}
            systems = WorkerSystems(self.settings, self.worker, fleet_id=fleet_id, beside=beside)
            self.systems = await stack.enter_async_context(systems)
            self.orphans = Orphans(
                self.ledger, self.systems, fleet_id, threads=self._threads, interval=self.settings.orphan_interval
            )
            # A connection of its own: renewals must not queue behind anything else.
            self.keeper = self._keeper(stack.enter_context(connected(self.settings, self.app)))
            self.store.on_delay = self.keeper.wake_in
            # Nothing while the loop hangs, it would lapse like the rest; nor while Redis takes no claim.
            self.intake = Intake(pool.cap, lambda: self.keeper.hung, lambda: self.claims.unsure)
            impatient = connected(self.settings, self.app, patience=claims.CLAIM_PATIENCE, once=True)
            self.claims = self.app.rollout_records = claims.Claims(
                self.app,
                self.store,
                self.keeper,
                self.worker,
                impatient=stack.enter_context(impatient),
                on_release=lambda claim: self.breaker.released(claim.at),
                on_unsure=self.intake.look,
            )
            self.breaker = Breaker(
                failures=self.settings.breaker_failures,
                pause=self.settings.breaker_pause,
                longest=self.settings.breaker_longest_pause,
                limit=self.intake.allow,
                running=lambda: len(self.claims),
            )
            scraped = stack.enter_context(
                connected(self.settings, self.app, patience=metrics.SCRAPE_PATIENCE, once=True)
            )
            admin.collect(metrics.QueueCollector(scraped, self.settings.queues), *self._collectors())
            self.keeper.start()
            stack.push_async_callback(self._stop_keeper)
            sweeps = Upkeep(self._sweep_orphans, interval=self.settings.orphan_interval, stage="orphans")
            self.sweep_orphans = await stack.enter_async_context(sweeps)
            self._serving = True
            yield

    def _admin(self) -> AdminServer:
        settings = self.settings
        token = settings.admin_token.get_secret_value() if settings.admin_token else None
        return AdminServer(settings.admin_host, settings.admin_port, token, live=self._live, ready=self._ready)

    def _live(self) -> Health:
        """Fail when the leases are given up: nothing is lost any more by starting this process again."""
        behind = self.loop_watch.behind()
        return Health(behind <= self.settings.loop_hang_limit, f"event loop {behind:.1f} s behind")

    def _ready(self) -> Health:
        state = self._state() if self._serving else "starting"
        return Health(state == "running", f"{state}: {self.breaker.kind} fails" if state == "paused" else state)

    def _collectors(self) -> tuple[Collector, ...]:
        return (
            *instruments.ALL,
            metrics.RolloutCollector(lambda: list(self._running.values()), lambda: self.pool.limit),
            metrics.TunnelCollector(self.systems.tunnels.report),
            metrics.LeakCollector(lambda: self.orphans.leaked),
            metrics.BreakerCollector(self.breaker.report),
            metrics.LoopCollector(self.loop_watch, lambda: self.pool.info["loop-lag-ms"]),
        )

    def _require_redis(self) -> None:
        settings = self.settings
        access.require(self.store.client, settings.redis_url, allow_eviction=settings.allow_eviction)

    def _progress_teller(self) -> ProgressTeller:
        def gateway_of(rollout: Rollout) -> Gateway:
            return self.systems.of(rollout.request)[1].gateway

        loop = asyncio.get_running_loop()
        return ProgressTeller(self._running, gateway_of, self.store.client, self._threads, loop)

    def _keeper(self, store: JobStore) -> LeaseKeeper:
        return LeaseKeeper(
            store,
            self.worker,
            hang_limit=self.settings.loop_hang_limit,
            loop=self.loop_watch,
            on_lost=self._end_early,
            on_hang=lambda _: self.intake.look(),
            report=self._report,
            # Not on the keeper's own thread: a sweep of thousands must not hold up renewals.
            duties=lambda: self._threads.submit(self.sweep),
            runs=lambda: fleet_report.runs(self._running),
            on_question=self._questions().answer,
        )

    def _questions(self) -> Questions:
        return Questions(
            self.store.client,
            self.worker,
            recent=recent_lines(),
            drain=drain_this_process,
            progress=self._progress_teller().asked,
        )

    async def _stop_keeper(self) -> None:
        """Stop renewing and reporting; bounded, for the threads may all wait for a Redis that does not answer."""
        with suppress(TimeoutError, redis.RedisError):
            async with asyncio.timeout(_KEEPER_LIMIT):
                for last in (self.keeper.stop, self.claims.settle_unsure):
                    await asyncio.get_running_loop().run_in_executor(self._threads, last)

    # -- running one rollout ------------------------------------------------------------------------------------------

    async def run(self, job: Job, carried: object = None) -> RolloutResult:
        """Run one attempt of the rollout that was claimed for ``job``.

        ``carried`` is the request of a message that carries its own. Raises `Ignore` when there is nothing to report:
        a lost lease, or a rollout that was given back to run again.
        """
        claim = self.claims.of(job)
        if claim is None:
            return refused(job.id, carried)
        try:
            return await self._attempt(job, claim)
        finally:
            self._running.pop(job.id, None)

    async def _attempt(self, job: Job, claim: Claim) -> RolloutResult:
        here: dict[str, Any] = {"attempt": claim.attempt, "worker": self.worker}
        try:
            request = claim.parsed()
        except InvalidRequestError as error:
            return invalid(claim.rollout_id, str(error), batch_id=claim.batch_id, **here)
        try:
            environment = self.environments.get(request.environment)
            secrets = self._secrets.of(request)
            alone = isinstance(environment, EpisodeEnvironment)
            gateway_url, systems = self.systems.none() if alone else self.systems.of(request)
        except RolloutError as error:
            return RolloutResult.for_request(request, StopCondition.HAS_ERROR, error=error.info(), **here)

        met = self.systems.met_at(gateway_url)
        rollout = Rollout(request, gateway_url, secrets=secrets, meets=met, **here)
        self.breaker.watch(rollout, claim.at)
        self._running[claim.rollout_id] = rollout
        try:
            with about_attempt(rollout), self.spans.attempt(rollout, claim):
                await self._run_on_ledger(rollout, environment, systems)
        except asyncio.CancelledError:
            # A shutdown that comes while a finished attempt is cleaned up has ended nothing: its result counts.
            if not (rollout.is_over and job.cancel_reason is CancelReason.SHUTDOWN):
                return await self._result(claim, rollout, await self._cancelled(job, claim, rollout))
        return await too_late_to_cancel(self._ended(claim, rollout))  # Redis may be away, for as long as it likes

    async def _ended(self, claim: Claim, rollout: Rollout) -> RolloutResult:
        if rollout.error:
            self.breaker.record(rollout, rollout.error)
        if rollout.error and (rollout.error.retryable or is_ours(rollout, rollout.error)):
            await self._retry(claim, rollout, rollout.error)
        return await self._result(claim, rollout, rollout.stop_condition())

    async def _result(self, claim: Claim, rollout: Rollout, condition: StopCondition) -> RolloutResult:
        if claim.attempt > 1:
            rollout.failed_attempts = await self._when_redis_answers(
                claim.rollout_id, lambda: self.store.failed_attempts(claim.rollout_id)
            )
        self.spans.ended(rollout, claim, condition)
        return rollout.result(condition)

    async def _run_on_ledger(self, rollout: Rollout, environment: Environment, systems: Systems) -> None:
        """Run the attempt; the ledger is told where its clean-up failed, or may not come to its end."""
        try:
            await run_attempt(rollout, environment, systems)
        finally:
            # A creation that was broken off is cleared up behind the attempt: not for long, when the worker shuts down.
            broken_off = self.pool.closing and rollout.last_phase is Phase.SANDBOX
            if rollout.leftovers or broken_off:
                rollout_id, gateway_url = rollout.request.rollout_id, rollout.request.gateway_url
                noted = rollout_id, rollout.attempt, self.worker, gateway_url or self.settings.gateway_url
                await self._when_redis_answers(rollout_id, lambda: self.ledger.note(*noted))

    async def _cancelled(self, job: Job, claim: Claim, rollout: Rollout) -> StopCondition:
        """Decide what a cancelled attempt leaves behind, by who cancelled it; raises `Ignore` where that is nothing."""
        reason = job.cancel_reason
        if reason is CancelReason.SHUTDOWN:
            how = replace(HandBack.over(f"worker {self.worker} shut down"), turns=rollout.trajectory)
            if await self._release(claim, rollout.request, how) is not Requeue.CANCELLED:
                raise Ignore
            reason = CancelReason.CANCELLED
        if reason in {CancelReason.CANCELLED, CancelReason.REVOKED}:
            why = await self._when_redis_answers(claim.rollout_id, lambda: self.store.cancel_reason(claim.rollout_id))
            error = cancelled_error(why, "cancelled while it ran")
            rollout.error = error.model_copy(update={"phase": rollout.last_phase})
            return StopCondition.CANCELLED
        raise Ignore if reason is CancelReason.LEASE_LOST else asyncio.CancelledError

    async def _retry(self, claim: Claim, rollout: Rollout, error: ErrorInfo) -> None:
        """Give the rollout back to run again after a while; raises `Ignore` when that was done.

        The first failures of what is not its own fault are not charged to it: a gateway that restarts must not end
        everything that begins meanwhile.
        """
        counts = (
            not is_ours(rollout, error) or await self._excused(claim, error) >= self.settings.infrastructure_retries
        )
        if counts and (claim.last or not error.retryable):
            return
        delay = min(_RETRY_DELAY_MAX, 2.0 ** (claim.attempt - 1)) * random.uniform(0.5, 1.0)  # noqa: S311
        how = HandBack(error=error, delay=delay, turns=rollout.trajectory, counts=counts)
        if await self._release(claim, rollout.request, how) in {Requeue.REQUEUED, Requeue.STALE}:
            logger.warning(
                "%s: runs again in %.1f s or more: %s",
                claim.rollout_id,
                delay,
                error,
                extra=about(claim.rollout_id, claim.attempt, self.worker, "retry"),
            )
            raise Ignore

    async def _excused(self, claim: Claim, error: ErrorInfo) -> int:
        """Return how many failures of this kind, in earlier attempts, the rollout was not charged for."""
        if claim.attempt == 1:
            return 0
        earlier = await self._when_redis_answers(claim.rollout_id, lambda: self.store.failed_attempts(claim.rollout_id))
        same = (attempt for attempt in earlier if attempt.error.kind is error.kind and is_infrastructure(attempt.error))
        return sum(not attempt.counted for attempt in same)

    async def _release(self, claim: Claim, request: RolloutRequest, how: HandBack) -> Requeue:
        what = await self._when_redis_answers(
            claim.rollout_id, lambda: self.store.release(request, claim.attempt, self.worker, how)
        )
        if what in {Requeue.REQUEUED, Requeue.STALE}:
            self.keeper.drop(claim.rollout_id)
        return what

    async def _when_redis_answers(self, rollout_id: str | None, call: Callable[[], T]) -> T:
        """Make ``call`` in a thread, waiting for Redis if it is away: the lease lapses meanwhile, or is renewed.

        ``rollout_id`` is None while the worker starts, when the address may be wrong as well.
        """
        delay = 0.5
        while True:
            try:
                return await asyncio.get_running_loop().run_in_executor(self._threads, call)
            except redis.RedisError as error:
                if not passes(error):
                    raise
                if rollout_id is None:
                    url = redact(self.settings.redis_url)
                    said = "the worker's start waits for Redis at %s, check ROLLOUTS_REDIS_URL if it is up: %s"
                    logger.warning(said, url, error, extra={"stage": "start"})
                else:
                    logger.warning(
                        "%s: waits for Redis: %s", rollout_id, error, extra=about(rollout_id, None, self.worker, "wait")
                    )
                await asyncio.sleep(delay)
                delay = min(2 * delay, _REDIS_DELAY_MAX)

    # -- what beat orders, and the lease keeper's thread --------------------------------------------------------------

    async def check_tunnels(self) -> None:
        """Do one round of health checks of this process's tunnels."""
        await self.systems.check_tunnels()

    async def _sweep_orphans(self) -> None:
        try:
            await self.orphans.take_turn(trusted=self.keeper.trusts_leases)
        except redis.RedisError as error:
            logger.warning("no sweep for orphans, %s: %s", what_redis_does(error), error, extra={"stage": "orphans"})

    def _end_early(self, rollout_id: str, renewal: Renewal) -> None:
        self.claims.end_early(rollout_id, renewal)

    def sweep(self) -> None:
        """Do the sweep if it is due; Redis being away is no error, the next one comes soon."""
        for duty in (self.claims.settle_unsure, self._sweep):  # neither may keep the other from its turn
            try:
                duty()
            except redis.RedisError as error:
                logger.warning("no sweep, %s: %s", what_redis_does(error), error, extra={"stage": "sweep"})
            except Exception:
                logger.exception("the sweep failed", extra={"stage": "sweep"})

    def _sweep(self) -> None:
        if counts := sweep(self.store, self.app, trusted=self.keeper.trusts_leases):
            logger.info("sweep: %s", counts, extra={"stage": "sweep"})

    def _report(self) -> dict[str, Any]:
        return fleet_report.report(self, self._running, self._started_at, self._state())

    def _state(self) -> str:
        """Return ``running``, ``paused`` (the breaker lets it take nothing, or one), ``hung``, or ``draining``."""
        if self.pool.closing:
            return "draining"
        if self.keeper.hung:
            return "hung"
        return "running" if self.breaker.state is State.CLOSED else "paused"
