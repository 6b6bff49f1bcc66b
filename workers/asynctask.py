"""The task's side of the asyncio pool: `AsyncTask`, and the `Job` as which its coroutine runs."""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from billiard.einfo import ExceptionInfo, ExceptionWithTraceback
from celery import Celery, Task
from celery.app.task import Context
from celery.exceptions import Ignore, SoftTimeLimitExceeded, Terminated
from celery.utils import log as celery_log
from kombu import serialization

logger = logging.getLogger(__name__)


class RunState(StrEnum):
    """Where a job stands: its lifecycle, not its outcome."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class CancelReason(StrEnum):
    """Why a job's coroutine was cancelled. The first reason wins."""

    REVOKED = "revoked"  #: by remote control: ``revoke(terminate=True)``
    TIMEOUT = "timeout"  #: a time limit of the task
    SHUTDOWN = "shutdown"  #: a cold shutdown of the worker
    CANCELLED = "cancelled"  #: by whoever asked for the work
    LEASE_LOST = "lease_lost"  #: another worker owns the work now


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a coroutine returned, or raised."""

    value: object = None
    error: BaseException | None = None

    def unwrap(self) -> object:
        """Return the value, or raise the error."""
        if self.error is not None:
            raise self.error
        return self.value


class Runner(Protocol):
    """What a job asks of the pool that runs it, from any thread."""

    def post(self, job: Job, callback: Callable[..., object] | None, *args: object) -> None:
        """Have one of Celery's callbacks for ``job`` called, in the order of posting."""

    def cancel(self, job: Job, reason: CancelReason) -> None:
        """Cancel ``job`` unless it has ended or was cancelled before."""


@dataclass(slots=True, eq=False, repr=False, kw_only=True, weakref_slot=True)
class Job:
    """One task that the pool was given: its number, its request, and how far it got.

    Celery keeps only a weak reference to it; the pool holds it until the last callback is posted. Once it is admitted,
    only the pool's event loop changes it.
    """

    pid: int  #: unique in this process: what Celery takes for the process that runs the task
    id: str  #: the task's id
    request: dict[str, Any]  #: the message's headers with ``args`` and ``kwargs``
    task: Any  #: the registered `celery.Task`, None if this worker knows none
    runner: Runner
    target: Callable[..., Any]  #: Celery's tracer
    args: tuple[Any, ...]  #: the tracer's arguments
    on_accept: Callable[..., object] | None = None
    on_result: Callable[..., object] | None = None
    on_error: Callable[..., object] | None = None
    on_timeout: Callable[..., object] | None = None
    soft_timeout: float | None = None  #: seconds
    timeout: float | None = None  #: seconds

    state: RunState = RunState.WAITING
    cancel_reason: CancelReason | None = None
    accepted: bool = False
    begun: bool = False  #: the coroutine has made its first step
    abandoned: bool = False  #: the hard time limit was reported; whatever the coroutine does now is of no interest
    outcome: Outcome | None = None  #: between the coroutine's end and the tracer's call
    coroutine: asyncio.Task[Any] | None = None
    timers: list[asyncio.TimerHandle] = field(default_factory=list)
    _context: Any = None

    @classmethod
    def of(cls, pid: int, pool: Any, target: Callable[..., Any], args: tuple[Any, ...], given: dict[str, Any]) -> Job:
        """Make the job that Celery hands to ``pool``; ``given`` are its callbacks and time limits by Celery's names."""
        name, task_id, request, *_rest = args
        return cls(
            pid=pid,
            id=task_id,
            request=request,
            task=pool.app.tasks.get(name),
            runner=pool,
            target=target,
            args=tuple(args),
            on_accept=given.get("accept_callback"),
            on_result=given.get("callback"),
            on_error=given.get("error_callback"),
            on_timeout=given.get("timeout_callback"),
            soft_timeout=given.get("soft_timeout") or pool.options.get("soft_timeout"),
            timeout=given.get("timeout") or pool.options.get("timeout"),
        )

    def __repr__(self) -> str:
        # Without the request: its arguments may hold secrets.
        return f"<Job {self.pid} {self.id} {self.state}>"

    def mark_accepted(self) -> None:
        """Have Celery told that the task has begun, which acknowledges its message; only the first call counts."""
        if not self.accepted:
            self.accepted = True
            self.runner.post(self, self.on_accept, self.pid, time.monotonic())

    def cancel(self, reason: CancelReason) -> None:
        """Cancel the coroutine; the first call counts. From any thread.

        The coroutine sees `asyncio.CancelledError` and may read `cancel_reason`. What it then returns or raises is the
        task's outcome as ever; see `outcome_of` for what becomes of a cancellation that it lets pass.
        """
        self.runner.cancel(self, reason)

    def terminate(self, signal: int | str | None = None) -> None:
        """Cancel the coroutine: Celery calls this to terminate a task. ``signal`` means nothing here."""
        # Celery does so from within a signal handler only in a cold shutdown; a revocation comes as a message.
        self.cancel(CancelReason.SHUTDOWN if in_signal_handler() else CancelReason.REVOKED)

    def limit_time(self, softly: Callable[[Job], object], hard: Callable[[Job], object]) -> None:
        """Have these called with this job at its time limits, as far as it has any; on the event loop.

        The time between the two begins at the first one, however late the loop is: of two cancellations in one turn of
        the loop, a coroutine that catches the first never sees the second.
        """
        loop, soft_timeout, timeout = asyncio.get_running_loop(), self.soft_timeout, self.timeout

        def exceeded_softly(seconds: float) -> None:
            if timeout and timeout > seconds:
                self.timers.append(loop.call_later(timeout - seconds, hard, self))
            softly(self)

        if soft_timeout:
            self.timers.append(loop.call_later(soft_timeout, exceeded_softly, soft_timeout))
        if timeout and not (soft_timeout and timeout > soft_timeout):
            self.timers.append(loop.call_later(timeout, hard, self))

    def trace(self) -> Any:
        """Have Celery's tracer run or conclude the task, and return what it tells, with errors `without_frames`."""
        told = self.target(*self.args)
        for each in told:
            if isinstance(each, ExceptionInfo):
                without_frames(each)
        return told

    @property
    def awaits_coroutine(self) -> bool:
        """Whether the task is an `AsyncTask`; others run on the tracers' threads."""
        return isinstance(self.task, AsyncTask)

    @property
    def context(self) -> Any:
        """The request as Celery's `Context`, what a bound task sees as ``self.request``."""
        if self._context is None:
            _, _, _, body, content_type, encoding = self.args
            if content_type:
                accepted = serialization.prepare_accept_content(self.task.app.conf.accept_content)
                body = serialization.loads(body, content_type, encoding, accept=accepted)
            embedded = body[2] or {}
            self._context = Context(self.request, called_directly=False, is_eager=False, **embedded)
        return self._context


_current: ContextVar[Job] = ContextVar("current_job")


def current_job() -> Job:
    """Return the job that is running here: in its coroutine, or in a hook that Celery's tracer calls for it.

    Raises `LookupError` outside of the pool, for example in a task that is called directly.
    """
    return _current.get()


def enter(job: Job) -> Callable[[], None]:
    """Make ``job`` the current one; returns what undoes that."""
    token = _current.set(job)
    return lambda: _current.reset(token)


def refusal_of(job: Job) -> ExceptionInfo | None:
    """Ask the task whether it admits ``job``; returns what to tell Celery's error callback if it does not."""
    try:
        admitted = not job.awaits_coroutine or job.task.admit(job)
    except Exception:
        logger.exception("Task %s could not be admitted", job.id)
        job.mark_accepted()  # Celery does not acknowledge the message of a task that fails before it began
        return caught()
    return None if admitted else exception_info(Ignore("there is nothing to do"))


async def run_coroutine(job: Job) -> object:
    """Run the task's own coroutine as ``job``."""
    job.begun = True
    _current.set(job)
    try:
        return await job.task.run(*job.request["args"], **job.request["kwargs"])
    except (SystemExit, KeyboardInterrupt) as error:
        # asyncio would end the event loop with it, and with the loop every other job.
        raise RuntimeError(f"the task's coroutine raised {error!r}") from error


def outcome_of(job: Job, coroutine: asyncio.Task[Any]) -> Outcome | ExceptionInfo:
    """Return how ``job`` ended: an `Outcome` is for Celery's tracer, an `ExceptionInfo` for its error callback.

    What the coroutine itself returned or raised counts, also after a cancellation that it caught. That holds for a
    revoked task too: Celery has announced it as revoked by then, and ranks SUCCESS and FAILURE above REVOKED
    (`celery.states.PRECEDENCE`), so the later result and event replace that. A cancellation that passes through becomes

    - REVOKED: `Terminated` for the error callback, which announces the task as revoked unless that was done already;
    - TIMEOUT: `SoftTimeLimitExceeded`, a failure;
    - SHUTDOWN, CANCELLED, LEASE_LOST: `Ignore`, so that nothing is stored;
    - no reason, when the task cancelled itself or what it awaited was cancelled: a failure that says so.

    A coroutine that was cancelled before its first step never has an `Outcome`: Celery's tracer would run the task's
    hooks for what did not begin.
    """
    if not coroutine.cancelled():
        error = coroutine.exception()
        if isinstance(error, Ignore):
            forget_frames(error)  # else Celery's tracer copies them all, half a megabyte, to tell nobody
        return Outcome(error=error) if error is not None else Outcome(coroutine.result())
    match job.cancel_reason:
        case CancelReason.REVOKED:
            return terminated()
        case CancelReason.TIMEOUT:
            passed: Exception = SoftTimeLimitExceeded(job.soft_timeout)
        case None:
            passed = RuntimeError("the coroutine was cancelled, but nobody asked the pool to cancel it")
        case reason:
            passed = Ignore(f"cancelled: {reason}")
    return Outcome(error=passed) if job.begun else exception_info(passed)


def end_of_waiting(job: Job) -> ExceptionInfo | None:
    """Return what to tell Celery's error callback of a job that is dropped while it waits.

    None when nothing is to be told: the broker still holds the message, and gives it to another worker.
    """
    if job.cancel_reason is CancelReason.REVOKED:
        return terminated()
    if job.accepted or job.cancel_reason not in {None, CancelReason.SHUTDOWN}:
        return exception_info(Ignore(f"dropped: {job.cancel_reason}"))
    return None


def in_signal_handler() -> bool:
    """Whether Celery is handling a signal, on its main thread."""
    return bool(celery_log._in_sighandler)


def terminated() -> ExceptionInfo:
    """Return what tells Celery's error callback that a task was terminated on request."""
    return exception_info(Terminated("terminated by the asyncio pool"))


def exception_info(error: Exception) -> ExceptionInfo:
    """Return ``error`` as Celery's error callback takes it."""
    try:
        raise error  # for a traceback, without which there is no ExceptionInfo
    except type(error):
        return caught()


def caught() -> ExceptionInfo:
    """Return the error that is being handled as Celery's error callback takes it."""
    return without_frames(ExceptionInfo())


def without_frames(info: ExceptionInfo) -> ExceptionInfo:
    """Return ``info`` once its error has let go of the frames that it came through; their text stays in ``info``.

    One of them is that of whoever made ``info``, and holds it: a cycle, and in it all that the frames worked on. Full
    collections are rare (`workers.garbage`), so the jobs of an hour would wait for one.
    """
    error = info.exception
    forget_frames(error.exc if isinstance(error, ExceptionWithTraceback) else error)
    return info


def forget_frames(error: BaseException) -> None:
    """Have ``error``, and what it was raised from or while handling, let go of the frames that they came through."""
    errors: list[BaseException | None] = [error]
    seen = set()
    while errors:
        each = errors.pop()
        if each is not None and id(each) not in seen:
            seen.add(id(each))
            each.__traceback__ = None
            errors += each.__cause__, each.__context__


class AsyncTask(Task):
    """Base of tasks whose ``run`` is an ``async def``: ``@app.task(base=AsyncTask)``.

    The pool awaits ``run`` first and keeps its outcome, then calls Celery's tracer, for which calling the task returns
    or raises that outcome. So ``before_start``, ``task_prerun`` and the task's runtime belong to the storing of the
    result, not to the run. Called directly or eagerly, the task runs its coroutine in an event loop of its own.

    ``self.request`` is right within the coroutine and in threads that it starts with `asyncio.to_thread`;
    `celery.current_task` is not set there. ``self.retry`` and ``apply_async`` talk to the broker: call them in a
    thread.
    """

    abstract = True

    @classmethod
    def on_bound(cls, app: Celery) -> None:
        """Refuse, when the task is registered, what would not run as meant; raises `TypeError`."""
        if cls.run is Task.run:
            return
        if not inspect.iscoroutinefunction(cls.run):
            raise TypeError(f"{cls.name}: a task with base=AsyncTask must be an `async def`")
        if getattr(cls, "autoretry_for", ()):
            raise TypeError(f"{cls.name}: autoretry_for does not see what a coroutine raises; use self.retry")

    def admit(self, job: Job) -> bool:
        """Say whether there is anything to do for ``job``; if not, its message is acknowledged and nothing is stored.

        Called on Celery's own thread before the job enters the pool. That thread also serves signals and remote
        control, so this must be short. What it raises fails the task. A task that takes its work over here, for example
        by a lock elsewhere, calls ``job.mark_accepted()``: then a lost broker connection does not drop the job while it
        waits. Every job that was admitted ends in Celery's tracer or in `dropped`.
        """
        return True

    def dropped(self, job: Job) -> None:
        """Undo what `admit` did for a job that ends without Celery's tracer; on one of its threads, so it may wait.

        ``job.cancel_reason`` says why; None when the broker connection was lost, whose message another worker gets.
        Most such jobs never began. Others were revoked, or ran out of their hard time limit; their coroutine has ended.
        """

    def __call__(self, *args: Any, **kwargs: Any) -> object:
        """Hand over the outcome of the job whose tracer calls; without one, run the coroutine to its end."""
        job = _current.get(None)
        if job is None or job.task is not self or job.outcome is None:
            return asyncio.run(self.run(*args, **kwargs))
        # Handed over once: a hook of the tracer may well call the task again, and means another run.
        outcome, job.outcome = job.outcome, None
        return outcome.unwrap()

    @property
    def request(self) -> Any:
        """The request of the running job, or the tracer's when it calls."""
        job = _current.get(None)
        if job is None or job.task is not self or self.request_stack.top is not None:
            return super().request
        return job.context
