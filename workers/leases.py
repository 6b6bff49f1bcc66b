"""Keeps this worker process's leases alive, in a thread and on a Redis connection of its own.

On the event loop, one user's blocking hook would cost every rollout of the process its lease. In a thread without a
limit, a hung loop would keep its leases for ever. So the thread renews while the loop makes progress, and stops when
the loop has made none for ``hang_limit`` seconds. What blocks it is told by `workers.loop_watch`.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping
from heapq import heappop, heappush
from typing import Any

import orjson
import redis

from producer import broker
from producer.server import what_redis_does
from workers.instruments import LEASE_LOSSES, LEASE_RENEWALS
from workers.jobs import JobStore, Renewal
from workers.loop_watch import LoopWatch

logger = logging.getLogger(__name__)

#: The thread waits for cancellations at most this long at a time (ms), so that it notices `stop` soon.
_WAIT_MS = 500
#: Seconds between two looks at the event loop.
_LOOK_INTERVAL = 0.25
#: A worker's report in Redis expires after this many seconds: a dead worker is off the list soon.
REPORT_TTL = 15
_REPORT_INTERVAL = 2.0
#: Seconds for which a worker is still listed whose last report has expired.
_FORGET_AFTER = 60


class LeaseKeeper(threading.Thread):
    """Renews held leases every quarter of their time to live, and tells which rollouts must end.

    ``on_lost(rollout_id, renewal)`` is called from this thread for a rollout whose lease was lost or whose cancellation
    was asked for. ``loop`` says when the event loop last moved, and is asked to look at it, in a thread of its own.
    ``on_hang(True)`` is called when it has hung for longer than ``hang_limit`` seconds and ``on_hang(False)`` when it
    moves again. ``report()`` is what this worker tells the fleet about itself. ``duties`` is called at every renewal;
    it must not block. ``runs()`` is what of its rollouts is told, and ``on_question(fields)`` is called with what
    somebody asks workers where they watch for cancellations.
    """

    def __init__(
        self,
        store: JobStore,
        worker: str,
        *,
        hang_limit: float,
        loop: LoopWatch,
        on_lost: Callable[[str, Renewal], None],
        on_hang: Callable[[bool], object],
        report: Callable[[], dict[str, Any]],
        duties: Callable[[], object],
        runs: Callable[[], dict[str, Any]] = dict,
        on_question: Callable[[Mapping[bytes, bytes]], object] = lambda _: None,
    ) -> None:
        super().__init__(name="lease-keeper", daemon=True)
        self.interval = store.lease_ttl / 4
        self._store = store
        self._worker = worker
        self._hang_limit = hang_limit
        self._loop = loop
        self._on_lost = on_lost
        self._on_hang = on_hang
        self._report = report
        self._duties = duties
        self._runs = runs
        self._on_question = on_question
        self._told = b""
        self._held: dict[str, int] = {}
        self._wakes: list[float] = []  # a heap of moments
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._hurried = threading.Event()
        self._last_contact = time.monotonic()
        self._trusted_from = 0.0
        self._seen_cancel: str | None = None
        self.hung = False  #: the loop has hung for so long that its leases are given up

    def hold(self, rollout_id: str, attempt: int) -> None:
        """Keep this attempt's lease alive from now on."""
        with self._lock:
            self._held[rollout_id] = attempt

    def drop(self, rollout_id: str) -> None:
        """Stop keeping this rollout's lease; dropping one that is not held is fine."""
        with self._lock:
            self._held.pop(rollout_id, None)

    def attempt_of(self, rollout_id: str) -> int | None:
        """Return the attempt that is held for this rollout, or None."""
        return self._held.get(rollout_id)

    def wake_in(self, seconds: float) -> None:
        """Wake delayed rollouts in so many seconds: the next sweep, which does so as well, may be far away."""
        with self._lock:
            heappush(self._wakes, time.monotonic() + seconds)

    def hurry(self) -> None:
        """Do the next round, and with it the duties, within half a second."""
        self._hurried.set()

    def held(self) -> list[tuple[str, int]]:
        """Return the held (rollout id, attempt) pairs."""
        with self._lock:
            return list(self._held.items())

    @property
    def trusts_leases(self) -> bool:
        """Whether a lapsed lease means a dead worker.

        Not until one TTL after Redis came back: until then, living workers could not renew theirs either. Nor before
        this thread has had an answer after a gap: the whole machine may have been stopped, and others ask this first.
        """
        now = time.monotonic()
        return now >= self._trusted_from and not self._is_gap(now)

    def stop(self) -> None:
        """End the thread; what is still held lapses. The worker's report is withdrawn."""
        self._stopping.set()
        if self.is_alive():
            self.join(timeout=_WAIT_MS / 1000 + 5)

    def run(self) -> None:
        """Renew, report, watch for cancellations, until stopped. Redis being away is waited out."""
        due = reported = 0.0
        # Not from here, where one call may wait many seconds for Redis.
        threading.Thread(target=self._watch_loop, name="loop-watch", daemon=True).start()
        while not self._stopping.is_set():
            try:
                now = time.monotonic()
                if now >= due or self._hurried.is_set():
                    self._hurried.clear()
                    self._renew()
                    self._note_contact()
                    self._duties()
                    due = now + self.interval
                if now >= reported + _REPORT_INTERVAL:
                    self._send_report()
                    reported = now
                self._watch_cancels(min(due, self._wake(now)))
            except redis.RedisError as error:
                # Redis is away, restarting, or loading. Leases lapse there and are simply renewed when it is back.
                logger.warning("leases wait, %s: %s", what_redis_does(error), error, extra={"stage": "lease_wait"})
                due = 0.0
                self._stopping.wait(min(1.0, self.interval))
            except Exception:
                # Without this thread every rollout would be run twice, so one bad round must not end it.
                logger.exception("lease keeper: unexpected error, going on", extra={"stage": "lease_error"})
                self._stopping.wait(min(1.0, self.interval))
        self._withdraw()

    def _wake(self, now: float) -> float:
        """Wake those whose time has come, and return when the next one's comes."""
        with self._lock:
            waiting = len(self._wakes)
            while self._wakes and self._wakes[0] <= now:
                heappop(self._wakes)
            due = len(self._wakes) < waiting
            following = self._wakes[0] if self._wakes else math.inf
        if due:
            self._store.wake_delayed()
        return following

    def _watch_loop(self) -> None:
        while not self._stopping.wait(_LOOK_INTERVAL):
            try:
                self._loop.look()
            except Exception:
                logger.exception("loop watch: unexpected error, going on", extra={"stage": "loop_watch"})

    def _renew(self) -> None:
        # A write, also when nothing is held: contact is noted after this, and a Redis that is full renews no lease.
        self._announce()
        if self._loop_hangs():
            return
        held = dict(self.held())
        for rollout_id, renewal in self._store.renew(held.items()).items():
            if renewal is Renewal.LOST and not self._lose(rollout_id, held[rollout_id]):
                continue
            (LEASE_LOSSES if renewal is Renewal.LOST else LEASE_RENEWALS).inc()
            if renewal is not Renewal.RENEWED:
                self._on_lost(rollout_id, renewal)

    def _lose(self, rollout_id: str, attempt: int) -> bool:
        """Stop keeping an attempt's lease; False when that was over before, and this worker may hold the next one."""
        with self._lock:
            if self._held.get(rollout_id) != attempt:
                return False
            del self._held[rollout_id]
            return True

    def _loop_hangs(self) -> bool:
        """Whether the event loop has hung for too long."""
        behind = self._loop.behind()
        hung = behind > self._hang_limit
        if hung:
            logger.error("event loop hung for %.0f s: its leases are given up", behind, extra={"stage": "loop_hung"})
        if hung is not self.hung:
            self.hung = hung
            self._on_hang(hung)
        return hung

    def _note_contact(self) -> None:
        now = time.monotonic()
        if self._is_gap(now):
            self._trusted_from = now + self._store.lease_ttl
        self._last_contact = now

    def _is_gap(self, now: float) -> bool:
        """Whether Redis has not been heard of for so long that leases may have lapsed for that."""
        return now - self._last_contact > self._store.lease_ttl / 2

    def _announce(self, report: bytes | None = None) -> None:
        """Say until when this worker lives, with its ``report`` or, without one, only where it has reported before."""
        now = self._store.now_ms()
        pipe = self._store.client.pipeline(transaction=False)
        pipe.zadd(broker.WORKERS, {self._worker: now + REPORT_TTL * 1000}, xx=report is None)
        if report is not None:
            pipe.set(broker.worker_key(self._worker), report, ex=REPORT_TTL)
            pipe.zremrangebyscore(broker.WORKERS, "-inf", now - _FORGET_AFTER * 1000)
        pipe.execute()

    def _send_report(self) -> None:
        self._announce(orjson.dumps(self._report() | {"name": self._worker}))
        self._tell_runs()

    def _tell_runs(self) -> None:
        """Tell what runs, where that has changed: agents run for hours, and there may be thousands."""
        key, runs = broker.worker_runs_key(self._worker), orjson.dumps(self._runs())
        if runs != self._told or not self._store.client.expire(key, REPORT_TTL):
            self._store.client.set(key, runs, ex=REPORT_TTL)
            self._told = runs

    def _watch_cancels(self, due: float) -> None:
        """Wait for cancellations and questions until the next renewal; a record's flag covers a missed cancellation."""
        if self._seen_cancel is None:  # "$" would miss what comes between two calls
            newest = self._store.client.xrevrange(broker.CANCELS, count=1)
            self._seen_cancel = newest[0][0].decode() if newest else "0-0"
        wait_ms = max(1, min(_WAIT_MS, int((due - time.monotonic()) * 1000)))
        streams = self._store.client.xread({broker.CANCELS: self._seen_cancel}, count=1000, block=wait_ms) or {}
        for _, messages in streams.items() if isinstance(streams, dict) else streams:
            for entry_id, fields in messages:
                self._seen_cancel = entry_id.decode()
                if b"ask" in fields:
                    self._on_question(fields)
                elif self.attempt_of(rollout_id := fields[b"id"].decode()) is not None:
                    self._on_lost(rollout_id, Renewal.CANCELLED)

    def _withdraw(self) -> None:
        try:
            self._store.client.delete(broker.worker_key(self._worker), broker.worker_runs_key(self._worker))
            self._store.client.zrem(broker.WORKERS, self._worker)
        except redis.RedisError as error:
            logger.info("the worker's report could not be withdrawn, it expires: %s", error)
