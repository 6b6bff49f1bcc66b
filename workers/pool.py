"""The asyncio execution pool for Celery: ``worker_pool = "workers.pool:AsyncioPool"``.

    Celery's main thread              the event loop's thread             a tracer's thread
    ────────────────────              ───────────────────────             ─────────────────
    message ──▶ task.admit(...)
                on_apply ───────────▶ start when a slot is free
    on_accepted (acknowledges) ◀───── accept
                                      await task.run(...)
                                      keep its outcome ─────────────────▶ Celery's own tracer calls the task,
                                                                          which hands over the outcome: state,
                                                                          result, signals and hooks are Celery's
    on_success / on_failure ◀──────────────────────────────────────────── its return value
                                      the slot is free ◀──────────────────

Celery's callbacks run on Celery's thread, in order, as they do for prefork: the sets of a worker's requests are made
for one thread, and are iterated when the broker connection breaks. It also wakes Celery's event loop when a job has
ended. With ``worker_disable_prefetch`` that loop asks for the next message only when it turns, which is else once a
second.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
import math
import signal
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any

from billiard.einfo import ExceptionInfo
from celery.concurrency.base import BasePool
from celery.exceptions import WorkerLostError
from celery.platforms import EX_FAILURE
from celery.worker import state as worker_state

from workers.asynctask import (
    AsyncTask,
    CancelReason,
    Job,
    Outcome,
    RunState,
    current_job,
    end_of_waiting,
    enter,
    exception_info,
    in_signal_handler,
    outcome_of,
    refusal_of,
    run_coroutine,
)
from workers.garbage import calm_garbage_collector
from workers.threads import LoopLag, LoopThread, Mailbox, Tracers, signal_handled

__all__ = ["AsyncTask", "AsyncioPool", "CancelReason", "Job", "LoopLag", "RunState", "current_job"]

logger = logging.getLogger(__name__)


class AsyncioPool(BasePool):
    """Runs the coroutines of `AsyncTask` on one event loop, at most ``limit`` jobs at once; other tasks in threads.

    A job keeps its slot until Celery's tracer has stored its result. Jobs beyond the limit wait; the broker still holds
    their messages, unless the task accepted them when it admitted them. Ordinary tasks share the few threads of the
    tracers, so they should be short; neither time limits nor cancelling reach them.

    Time limits of coroutines: at the soft one the coroutine is cancelled with `CancelReason.TIMEOUT`, for a coroutine
    cannot be thrown into safely, and becomes `SoftTimeLimitExceeded` unless it catches that. At the hard one Celery
    records `TimeLimitExceeded`, the coroutine is cancelled (again), and its outcome is dropped; the slot is free when
    it has really ended.

    ``app.pool_lifespan``, if there is one, takes the pool and returns an async context manager. It is entered on the
    loop before the first job, and exited after the last one. What entering raises ends the worker.
    """

    limit: int
    signal_safe = False
    is_green = False
    uses_semaphore = False
    task_join_will_block = True
    body_can_be_buffer = True

    #: Seconds that jobs have to end in a warm shutdown, before it becomes a cold one; ``app.pool_drain_timeout``.
    drain_timeout: float = math.inf
    #: Threads on which tracers store results and ordinary tasks run.
    tracer_threads = 4
    #: Seconds that coroutines have for their clean-up in a cold shutdown.
    shutdown_grace = 60.0
    #: Seconds after which a thread that computes lets another one compute.
    switch_interval = 0.001
    #: Seconds that the lifespan has to exit.
    lifespan_grace = 24.0

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._numbers = itertools.count(1)
        self._jobs: dict[int, Job] = {}  # waiting and running, by number
        self._waiting: deque[Job] = deque()
        self._running = 0
        self._cap: int | None = None
        self.closing = False  # shutting down: what runs may end, and nothing new is taken
        self._deadline: float | None = None  # of a cold shutdown
        self._loop = LoopThread(self._lifespan, self._on_loop_lost, self.lifespan_grace)
        self._tracers = Tracers()
        self._mailbox = Mailbox(self._tracers.submit)

    # -- what others read ----------------------------------------------------------------------------------------------

    @property
    def hostname(self) -> str | None:
        """The worker's node name."""
        return (self.options.get("initargs") or (None, None))[1]

    @property
    def num_processes(self) -> int:
        """How many jobs Celery may hand over before it takes no more messages."""
        return self.limit if self._cap is None else min(self.limit, self._cap)

    def cap(self, jobs: int | None) -> None:
        """Have Celery take messages only while fewer than ``jobs`` are held; None for as many as there are slots."""
        self._cap = jobs
        self._mailbox.wake()

    @property
    def loop_progress(self) -> float:
        """When the event loop last made progress, in `time.monotonic` seconds."""
        return self._loop.lag.progress

    @property
    def loop_thread_id(self) -> int | None:
        """Identifier of the event loop's thread, as in `sys._current_frames`."""
        return self._loop.thread.ident

    def _get_info(self) -> dict[str, Any]:
        milliseconds = {name: round(value * 1000, 1) for name, value in self._loop.lag.summary().items()}
        return {
            **super()._get_info(),
            "in-flight": self._running,
            "waiting": len(self._waiting),
            "loop-lag-ms": milliseconds,
            "threads": self.tracer_threads,
        }

    # -- starting, growing and shrinking -------------------------------------------------------------------------------

    def on_start(self) -> None:
        """Start the event loop and enter the lifespan; raises what entering raised."""
        # The loop's thread computes; the others wait on sockets, and then on it. With Python's 5 ms they, and what they
        # bring, would wait that long each time.
        sys.setswitchinterval(self.switch_interval)
        self.drain_timeout = getattr(self.app, "pool_drain_timeout", self.drain_timeout)
        self._loop.start()
        self._tracers.start(self.tracer_threads)

    def did_start_ok(self) -> bool:
        """Whether the event loop runs."""
        return self._loop.thread.is_alive()

    def register_with_event_loop(self, hub: Any) -> None:
        """Have callbacks run by Celery's event loop from now on; called again after each reconnection."""
        if self._mailbox.hub is None:
            # With 10,000 jobs a full collection stops every thread for 0.2 to 0.4 s (CPython 3.11, 2 cores), and by the
            # usual thresholds there is one every two seconds while they arrive.
            calm_garbage_collector(10_000, 1_000)
        self._mailbox.hub = hub

    def grow(self, n: int = 1) -> None:
        """Run ``n`` more jobs at once."""
        self.limit += n
        self._loop.call(self._start_waiting)

    def shrink(self, n: int = 1) -> None:
        """Run ``n`` fewer jobs at once; raises `ValueError` when that leaves none, or fewer than run now."""
        remaining = self.limit - n
        if remaining < max(1, self._running):
            raise ValueError(f"cannot shrink the pool by {n}: {self._running} of its {self.limit} slots are busy")
        self.limit = remaining

    def _lifespan(self) -> AbstractAsyncContextManager[None]:
        lifespan = getattr(self.app, "pool_lifespan", None)
        return lifespan(self) if lifespan else nullcontext()

    def _on_loop_lost(self) -> None:
        # Without its loop it would go on taking messages. Celery reads this flag whenever its own loop turns.
        worker_state.should_terminate = EX_FAILURE
        self._mailbox.wake()

    # -- a job's way, on the event loop except where it says otherwise -------------------------------------------------

    def on_apply(
        self,
        target: Callable[..., Any],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        **given: Any,
    ) -> Job:
        """Take a task from Celery, on Celery's thread; ``given`` are its callbacks and time limits.

        Of ``callback`` and ``error_callback`` one will be called.

        Exceptions are a job that is never accepted because the worker shuts down or loses its connection, whose message
        the broker restores, and one that exceeds its hard time limit, of which ``timeout_callback`` tells.
        """
        tracer = functools.partial(target, **kwargs) if kwargs else target
        job = Job.of(next(self._numbers), self, tracer, args, given)
        if self.closing:
            return job
        if (refusal := refusal_of(job)) is not None:
            self.post(job, job.on_error, refusal)
            return job
        self._jobs[job.pid] = job
        self._loop.call(self._enqueue, job)
        return job

    def _enqueue(self, job: Job) -> None:
        self._waiting.append(job)
        if self.closing or job.cancel_reason is not None:  # since it was admitted
            self._drop(job)
        self._start_waiting()

    def _start_waiting(self) -> None:
        while self._waiting and self._running < self.limit and not self.closing:
            self._start(self._waiting.popleft())

    def _start(self, job: Job) -> None:
        self._running += 1
        job.state = RunState.RUNNING
        job.mark_accepted()
        if not job.awaits_coroutine:
            self._tracers.submit(self._trace, job)
            return
        loop = asyncio.get_running_loop()
        job.coroutine = loop.create_task(run_coroutine(job), name=job.id)
        job.coroutine.add_done_callback(functools.partial(self._ended, job))
        job.limit_time(self._exceeded_softly, self._exceeded)

    def _ended(self, job: Job, coroutine: asyncio.Task[Any]) -> None:
        for timer in job.timers:
            timer.cancel()
        outcome = outcome_of(job, coroutine)
        if job.abandoned:
            self._tracers.submit(self._let_go, job, None)
        elif isinstance(outcome, Outcome):
            job.outcome = outcome
            self._tracers.submit(self._trace, job)
        else:
            self._tracers.submit(self._let_go, job, outcome)

    def _trace(self, job: Job) -> None:
        """Have Celery's tracer run or conclude the task, on a tracer's thread."""
        leave = enter(job)
        try:
            result = job.trace()
        except Exception as error:
            logger.exception("Task %s: its outcome could not be recorded", job.id)
            self.post(job, job.on_error, exception_info(error))
        except BaseException as error:  # SystemExit of an ordinary task: the thread serves the next one
            logger.exception("Task %s ended its thread", job.id)
            self.post(job, job.on_error, exception_info(WorkerLostError(f"the task raised {error!r}")))
        else:
            self.post(job, job.on_result, result)
        finally:
            leave()
            self._loop.call(self._finish, job)

    def _let_go(self, job: Job, ending: ExceptionInfo | None) -> None:
        """Tell the task and then Celery of a job that ends without Celery's tracer, on a tracer's thread."""
        try:
            if job.awaits_coroutine:
                job.task.dropped(job)
        except Exception:
            logger.exception("Task %s: what it was admitted for could not be undone", job.id)
        finally:
            if ending is not None:
                self.post(job, job.on_error, ending)
            self._loop.call(self._finish, job)

    def _finish(self, job: Job) -> None:
        self._jobs.pop(job.pid, None)
        if job.state is RunState.RUNNING:  # not one that was dropped while it waited
            self._running -= 1
        job.state = RunState.FINISHED
        job.coroutine = None  # its error's traceback leads back to the job: a cycle
        self._start_waiting()
        if self.closing:
            self._mailbox.wake()

    def post(self, job: Job, callback: Callable[..., object] | None, *args: object) -> None:
        """Have one of Celery's callbacks called on Celery's thread, in the order of posting. From any thread."""
        if callback is not None:
            self._mailbox.post(job.id, callback, *args)

    # -- cancelling ----------------------------------------------------------------------------------------------------

    def terminate_job(self, pid: int, signal: int | str | None = None) -> None:
        """Cancel the job with the number ``pid``; one that is unknown has ended."""
        job = self._jobs.get(pid)
        if job is not None:
            job.terminate(signal)

    def cancel(self, job: Job, reason: CancelReason) -> None:
        """Cancel ``job`` unless it has ended or was cancelled before. From any thread and from signal handlers."""
        self._loop.call(self._cancel, job, reason)

    def _cancel(self, job: Job, reason: CancelReason) -> None:
        if job.state is RunState.WAITING:
            job.cancel_reason = job.cancel_reason or reason
            if job in self._waiting:  # else it is still being admitted, and dropped when it arrives
                self._drop(job)
        elif job.coroutine is None:
            if job.state is RunState.RUNNING:
                logger.warning("Task %s cannot be cancelled (%s): it runs in a thread", job.id, reason)
        elif job.cancel_reason is None and not job.coroutine.done():
            # Once only: a second cancellation would interrupt the clean-up that the first one began.
            job.cancel_reason = reason
            job.coroutine.cancel()

    def _drop(self, job: Job) -> None:
        self._waiting.remove(job)
        job.state = RunState.FINISHED
        if self.closing:
            job.cancel_reason = job.cancel_reason or CancelReason.SHUTDOWN
        self._tracers.submit(self._let_go, job, end_of_waiting(job))

    def _exceeded_softly(self, job: Job) -> None:
        self.post(job, job.on_timeout, True, job.soft_timeout)
        self._cancel(job, CancelReason.TIMEOUT)

    def _exceeded(self, job: Job) -> None:
        self.post(job, job.on_timeout, False, job.timeout)
        job.abandoned = True
        job.cancel_reason = job.cancel_reason or CancelReason.TIMEOUT
        if job.coroutine is not None:
            job.coroutine.cancel()

    # -- stopping, on Celery's thread ----------------------------------------------------------------------------------

    def flush(self) -> None:
        """Drop what waits unaccepted: the broker connection is lost or closed, which restores its messages."""
        self._loop.call(self._drop_waiting)

    def on_stop(self) -> None:
        """Shut down warmly: drop what waits, and return when every running job has ended and Celery was told.

        SIGQUIT or a second SIGINT or SIGTERM makes it a cold shutdown, and so does the end of `drain_timeout`: what
        still runs is cancelled. Celery calls this also from within its signal handler, which must not wait, for the
        thread that it interrupted may hold any lock. Whoever it interrupted does.
        """
        if in_signal_handler() or worker_state.should_terminate:
            self._begin_cold_shutdown()
        if not in_signal_handler():
            # Celery's own handler does nothing about a second SIGTERM.
            with signal_handled(signal.SIGTERM, self._begin_cold_shutdown):
                self._shut_down()

    def on_terminate(self) -> None:
        """Shut down coldly: cancel every coroutine, and give their clean-up `shutdown_grace` seconds."""
        self._begin_cold_shutdown()
        self._shut_down()

    def _begin_cold_shutdown(self) -> None:
        if self._deadline is None:
            self.closing = True
            self._deadline = time.monotonic() + self.shutdown_grace
            self._loop.call(self._cancel_all)

    def _cancel_all(self) -> None:
        self._drop_waiting()
        for job in list(self._jobs.values()):
            self._cancel(job, CancelReason.SHUTDOWN)

    def _drop_waiting(self) -> None:
        for job in list(self._waiting):
            if self.closing or not job.accepted:
                self._drop(job)

    def _shut_down(self) -> None:
        self.closing = True
        self.flush()
        drained_by = time.monotonic() + self.drain_timeout
        while self._jobs and self._loop.thread.is_alive():
            if self._deadline is None and time.monotonic() > drained_by:
                logger.warning(
                    "%d tasks still run after %.0f s: they are cancelled", len(self._jobs), self.drain_timeout
                )
                self._begin_cold_shutdown()
            if self._deadline is not None and time.monotonic() > self._deadline:
                left = ", ".join(job.id for job in list(self._jobs.values()))
                logger.error("Shut down without these tasks, %s s after cancelling them: %s", self.shutdown_grace, left)
                break
            self._mailbox.serve(timeout=0.1)
        self._mailbox.serve(timeout=0)
        self._loop.stop()
        self._tracers.stop()
