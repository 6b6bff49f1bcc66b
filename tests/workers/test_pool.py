"""The asyncio pool, driven as a Celery worker drives it: a stand-in for the tracer, and callbacks that take notes."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from celery import Celery
from celery.exceptions import Ignore, Reject, Retry, SoftTimeLimitExceeded, Terminated, WorkerLostError, WorkerShutdown
from celery.utils.log import in_sighandler
from celery.worker import state as worker_state
from kombu.asynchronous import Hub
from support import wait_until

from workers.pool import AsyncioPool, AsyncTask, CancelReason, Job, RunState, current_job
from workers.threads import LoopLag


@dataclass
class Notes:
    """What Celery's request would be told, in order."""

    told: list[tuple[Any, ...]] = field(default_factory=list)

    def handlers(self) -> dict[str, Callable[..., None]]:
        return {
            "accept_callback": lambda pid, at: self.told.append(("accepted", pid)),
            "callback": lambda result: self.told.append(("result", *result)),
            "error_callback": lambda info: self.told.append(("error", getattr(info.exception, "exc", info.exception))),
            "timeout_callback": lambda soft, limit: self.told.append(("timeout", soft, limit)),
        }

    def names(self) -> list[str]:
        return [entry[0] for entry in self.told]

    def ending(self) -> tuple[Any, ...]:
        """Wait for the end of the job and return what was told last."""
        wait_until(lambda: {"result", "error"} & set(self.names()), what="the end of the job")
        return self.told[-1]


class Driver:
    """Hands tasks to a pool as Celery's worker does."""

    def __init__(self, app: Celery, limit: int = 10, **options: Any) -> None:
        self.app = app
        self.pool = AsyncioPool(limit, app=app, **options)
        self.tracer_threads: set[str] = set()

    def trace(self, name: str, task_id: str, request: dict[str, Any], *_: object) -> tuple[int, Any]:
        """Do what Celery's tracer does with a task, as far as the pool can tell."""
        self.tracer_threads.add(threading.current_thread().name)
        try:
            return 0, self.app.tasks[name](*request["args"], **request["kwargs"])
        except Exception as error:
            return 1, error

    def apply(self, task: Any, *args: Any, notes: Notes | None = None, target: Any = None, **options: Any) -> Job:
        request = {"id": f"id-{task.name}", "task": task.name, "args": args, "kwargs": {}}
        message = (task.name, request["id"], request, (args, {}, {}), None, None)
        handlers = (notes or Notes()).handlers()
        job: Job = self.pool.apply_async(target or self.trace, message, **handlers, **options)
        return job

    def run(self, task: Any, *args: Any, **options: Any) -> tuple[Any, ...]:
        notes = Notes()
        self.apply(task, *args, notes=notes, **options)
        return notes.ending()


@pytest.fixture
def app() -> Iterator[Celery]:
    app = Celery("test", broker="memory://", backend="cache+memory://", set_as_current=False)
    yield app
    app.close()


@pytest.fixture
def hub() -> Iterator[Hub]:
    """Celery's event loop; a pool that has one also tunes this process's garbage collector."""
    thresholds = gc.get_threshold()
    yield Hub()
    gc.unfreeze()
    gc.set_threshold(*thresholds)


@pytest.fixture
def driver(app: Celery) -> Iterator[Driver]:
    driver = Driver(app)
    driver.pool.start()
    yield driver
    driver.pool.terminate()
    wait_until(lambda: not driver.pool.did_start_ok(), what="the end of the loop's thread")


def registered(app: Celery, function: Callable[..., Any], **options: Any) -> Any:
    task = app.task(base=AsyncTask, name=function.__name__, shared=False, **options)(function)
    app.finalize()
    return app.tasks[task.name]


class Gate:
    """A coroutine that waits until it is let go or cancelled, and says how it fared."""

    def __init__(self) -> None:
        self.entered: list[str] = []
        self.left: list[CancelReason | None] = []
        self.open = threading.Event()

    async def wait(self, *_: object) -> str:
        job = current_job()
        self.entered.append(job.id)
        try:
            while not self.open.is_set():
                await asyncio.sleep(0.002)
        finally:
            self.left.append(job.cancel_reason)
        return "through"

    def task(self, app: Celery, name: str = "wait", **options: Any) -> Any:
        async def wait(*args: object) -> str:
            return await self.wait(*args)

        wait.__name__ = name
        return registered(app, wait, **options)


# -- outcomes ----------------------------------------------------------------------------------------------------------


def test_what_the_coroutine_returns_goes_through_the_tracer(app: Celery, driver: Driver) -> None:
    async def add(x: int, y: int) -> tuple[int, str]:
        await asyncio.sleep(0)
        return x + y, threading.current_thread().name

    notes = Notes()
    job = driver.apply(registered(app, add), 2, 3, notes=notes)
    assert notes.ending() == ("result", 0, (5, "event-loop"))
    assert notes.told[0] == ("accepted", job.pid)
    assert notes.names() == ["accepted", "result"]
    assert all(name.startswith("tracer") for name in driver.tracer_threads)
    wait_until(lambda: job.state is RunState.FINISHED)


@pytest.mark.parametrize(
    "error", [ValueError("no"), Ignore(), Reject("no"), Retry("later"), BaseExceptionGroup("g", [ValueError()])]
)
def test_what_the_coroutine_raises_the_tracer_raises(app: Celery, driver: Driver, error: Exception) -> None:
    async def fail() -> None:
        raise error

    assert driver.run(registered(app, fail)) == ("result", 1, error)


def test_wrong_arguments_fail_the_task(app: Celery, driver: Driver) -> None:
    async def none() -> None: ...

    kind, failed, error = driver.run(registered(app, none), "surplus")
    assert (kind, failed, type(error)) == ("result", 1, TypeError)


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()])
def test_a_coroutine_that_exits_does_not_end_the_loop(app: Celery, driver: Driver, error: BaseException) -> None:
    async def leave() -> None:
        raise error

    kind, failed, seen = driver.run(registered(app, leave))
    assert (kind, failed, type(seen), seen.__cause__) == ("result", 1, RuntimeError, error)
    assert driver.pool.did_start_ok()


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()])
def test_a_task_that_a_coroutine_began_and_that_exits_does_not_end_the_loop(
    app: Celery, driver: Driver, error: BaseException
) -> None:
    async def leave() -> None:
        raise error

    async def gather() -> None:
        await asyncio.gather(leave())

    async def fine() -> int:
        return 1

    kind, failed, seen = driver.run(registered(app, gather))
    assert (kind, failed, type(seen), seen.__cause__) == ("result", 1, RuntimeError, error)
    assert driver.run(registered(app, fine)) == ("result", 0, 1)


def test_a_coroutine_that_stops_the_loop_stops_nobody(app: Celery, driver: Driver) -> None:
    async def stop() -> int:
        asyncio.get_running_loop().stop()
        await asyncio.sleep(0.01)
        return 1

    assert driver.run(registered(app, stop)) == ("result", 0, 1)
    assert driver.pool.did_start_ok()


def test_a_cancellation_that_nobody_asked_for_fails_the_task(app: Celery, driver: Driver) -> None:
    async def cancel_itself() -> None:
        raise asyncio.CancelledError

    kind, failed, error = driver.run(registered(app, cancel_itself))
    assert (kind, failed) == ("result", 1)
    assert "nobody asked" in str(error)


def test_a_tracer_that_raises_because_the_backend_failed_is_reported(app: Celery, driver: Driver) -> None:
    async def fine() -> int:
        return 1

    def broken(*_: object) -> None:
        raise ConnectionError("no backend")

    notes = Notes()
    driver.apply(registered(app, fine), notes=notes, target=broken)
    kind, error = notes.ending()
    assert (kind, str(error)) == ("error", "no backend")
    assert notes.names() == ["accepted", "error"]
    assert driver.run(app.tasks["fine"]) == ("result", 0, 1)


def test_an_ordinary_task_that_exits_is_a_lost_worker(app: Celery, driver: Driver) -> None:
    def leave(*_: object) -> None:
        raise SystemExit(3)

    async def fine() -> None: ...

    kind, error = driver.run(registered(app, fine), target=leave)
    assert kind == "error"
    assert isinstance(error, WorkerLostError)


def test_exceptions_in_callbacks_are_logged_with_the_task(
    app: Celery, driver: Driver, caplog: pytest.LogCaptureFixture
) -> None:
    async def fine() -> int:
        return 1

    def broken(*_: object) -> None:
        raise ZeroDivisionError

    task = registered(app, fine)
    request = {"id": "id-broken", "args": (), "kwargs": {}}
    message = (task.name, "id-broken", request, ((), {}, {}), None, None)
    driver.pool.apply_async(driver.trace, message, accept_callback=broken, callback=broken, error_callback=broken)
    wait_until(lambda: len([r for r in caplog.records if "id-broken" in r.getMessage() and r.exc_info]) == 2)
    assert driver.run(task) == ("result", 0, 1)


# -- tasks that are not coroutines, and coroutines outside of the pool -------------------------------------------------


def test_an_ordinary_task_runs_on_a_tracers_thread(app: Celery, driver: Driver) -> None:
    @app.task(name="plain", shared=False)
    def plain() -> str:
        return threading.current_thread().name

    app.finalize()
    kind, failed, thread = driver.run(app.tasks["plain"])
    assert (kind, failed) == ("result", 0)
    assert thread.startswith("tracer")


def test_called_directly_or_eagerly_the_task_runs_its_coroutine(app: Celery) -> None:
    async def ident(self: Any, x: int) -> tuple[int, bool]:
        return x, self.request.called_directly

    task = registered(app, ident, bind=True)
    assert task(4) == (4, True)
    assert task.apply((5,)).get() == (5, False)
    with pytest.raises(LookupError):
        current_job()


def test_a_hook_that_calls_the_task_again_gets_another_run(app: Celery, driver: Driver) -> None:
    runs: list[int] = []

    async def count() -> int:
        runs.append(1)
        return len(runs)

    task = registered(app, count)

    def trace_twice(*_: object) -> tuple[int, list[int]]:
        return 0, [task(), task()]

    assert driver.run(task, target=trace_twice) == ("result", 0, [1, 2])


def test_a_bound_task_sees_its_request_in_the_coroutine_and_its_threads(app: Celery, driver: Driver) -> None:
    async def who(self: Any) -> list[tuple[str, bool]]:
        here = (self.request.id, self.request.called_directly)
        return [here, await asyncio.to_thread(lambda: (self.request.id, self.request.called_directly))]

    assert driver.run(registered(app, who, bind=True)) == ("result", 0, [("id-who", False)] * 2)


def test_a_task_that_would_not_run_as_meant_is_refused(app: Celery) -> None:
    def plain() -> None: ...

    async def retried() -> None: ...

    with pytest.raises(TypeError, match="async def"):
        registered(app, plain)
    with pytest.raises(TypeError, match="autoretry_for"):
        registered(app, retried, autoretry_for=(ValueError,))


# -- admitting and accepting -------------------------------------------------------------------------------------------


class Door:
    """An `AsyncTask.admit` that says what it is told to, and a `AsyncTask.dropped` that takes notes."""

    def __init__(self, answer: Any = True, accepts: bool = False) -> None:
        self.answer = answer
        self.accepts = accepts
        self.asked: list[tuple[RunState, str]] = []
        self.dropped: list[tuple[CancelReason | None, str]] = []
        self.then: Callable[[Job], object] = lambda _: None

    def hooks(self) -> dict[str, Callable[[Any, Job], Any]]:
        return {"admit": lambda _, job: self._admit(job), "dropped": lambda _, job: self._drop(job)}

    def _admit(self, job: Job) -> bool:
        self.asked.append((job.state, threading.current_thread().name))
        if isinstance(self.answer, Exception):
            raise self.answer
        if self.accepts:
            job.mark_accepted()
        self.then(job)
        return bool(self.answer)

    def _drop(self, job: Job) -> None:
        self.dropped.append((job.cancel_reason, threading.current_thread().name.split("-")[0]))


def test_a_job_is_admitted_on_celerys_thread_before_it_enters_the_pool(app: Celery, driver: Driver) -> None:
    gate, door, notes = Gate(), Door(), Notes()
    seen: list[tuple[int, list[str]]] = []
    door.then = lambda _: seen.append((len(driver.pool._jobs), notes.names()))
    driver.apply(gate.task(app, **door.hooks()), notes=notes)
    assert door.asked == [(RunState.WAITING, threading.current_thread().name)]
    assert seen == [(0, [])]
    gate.open.set()
    assert notes.ending() == ("result", 0, "through")
    assert notes.names() == ["accepted", "result"]
    assert door.dropped == []


def test_an_admit_that_blocks_holds_up_nothing_that_runs(app: Celery, driver: Driver) -> None:
    """Celery's thread waits; the loop goes on."""
    gate, door, running = Gate(), Door(), Notes()
    driver.apply(gate.task(app), notes=running)
    wait_until(lambda: gate.entered)

    def let_the_other_end(_: Job) -> None:
        gate.open.set()
        running.ending()

    async def admitted() -> None: ...

    door.then = let_the_other_end
    assert driver.run(registered(app, admitted, **door.hooks())) == ("result", 0, None)
    assert running.names() == ["accepted", "result"]


def test_a_job_that_is_not_admitted_never_enters_the_pool(app: Celery, driver: Driver) -> None:
    gate, door, notes = Gate(), Door(answer=False), Notes()
    job = driver.apply(gate.task(app, **door.hooks()), notes=notes)
    assert driver.pool._jobs == {}
    kind, error = notes.ending()
    assert (kind, type(error), notes.names()) == ("error", Ignore, ["error"])
    job.cancel(CancelReason.CANCELLED)
    driver.pool.stop()
    assert (gate.entered, driver.tracer_threads, door.dropped) == ([], set(), [])


def test_an_admit_that_raises_fails_the_task(app: Celery, driver: Driver, caplog: pytest.LogCaptureFixture) -> None:
    gate, door, notes = Gate(), Door(answer=ZeroDivisionError("no")), Notes()
    driver.apply(gate.task(app, **door.hooks()), notes=notes)
    kind, error = notes.ending()
    assert (kind, type(error), notes.names()) == ("error", ZeroDivisionError, ["accepted", "error"])
    assert "id-wait could not be admitted" in caplog.text
    assert (driver.pool._jobs, door.dropped) == ({}, [])


def test_a_task_may_accept_what_it_admits_while_the_job_waits(app: Celery) -> None:
    driver = Driver(app, limit=1)
    driver.pool.start()
    gate, notes = Gate(), Notes()
    task = gate.task(app, **Door(accepts=True).hooks())
    driver.apply(task)
    driver.apply(task, notes=notes)
    wait_until(lambda: notes.names() == ["accepted"])
    wait_until(lambda: driver.pool.info["waiting"] == 1, what="it to wait behind the other")
    gate.open.set()
    notes.ending()
    driver.pool.stop()
    assert notes.names() == ["accepted", "result"]


@pytest.mark.parametrize("accepts", [True, False])
@pytest.mark.parametrize("reason", [CancelReason.REVOKED, CancelReason.CANCELLED, CancelReason.LEASE_LOST])
def test_a_waiting_job_that_is_cancelled_is_told_to_its_task_and_to_celery(
    app: Celery, reason: CancelReason, accepts: bool
) -> None:
    driver = Driver(app, limit=1)
    driver.pool.start()
    gate, door, notes = Gate(), Door(accepts=accepts), Notes()
    driver.apply(gate.task(app, name="first"))
    job = driver.apply(gate.task(app, **door.hooks()), notes=notes)
    job.cancel(reason)
    job.cancel(CancelReason.SHUTDOWN)  # the first one counts
    kind, error = notes.ending()
    assert (kind, type(error)) == ("error", Terminated if reason is CancelReason.REVOKED else Ignore)
    assert notes.names() == ["accepted"] * accepts + ["error"]
    assert door.dropped == [(reason, "tracer")]
    gate.open.set()
    driver.pool.stop()
    assert gate.entered == ["id-first"]


def test_a_job_that_is_cancelled_while_it_is_being_admitted(app: Celery, driver: Driver) -> None:
    """Whoever was told of the claim may cancel it before it has reached the event loop."""
    gate, door, notes = Gate(), Door(accepts=True), Notes()

    def cancel_and_let_the_loop_see_it(job: Job) -> None:
        job.cancel(CancelReason.LEASE_LOST)
        wait_until(lambda: job.cancel_reason)

    door.then = cancel_and_let_the_loop_see_it
    driver.apply(gate.task(app, **door.hooks()), notes=notes)
    kind, error = notes.ending()
    assert (kind, type(error)) == ("error", Ignore)
    assert door.dropped == [(CancelReason.LEASE_LOST, "tracer")]
    assert gate.entered == []
    wait_until(lambda: driver.pool._jobs == {})
    assert driver.pool.info["in-flight"] == 0


@pytest.mark.parametrize("accepts", [True, False])
def test_a_shutdown_tells_the_task_of_what_it_drops(app: Celery, accepts: bool) -> None:
    driver = Driver(app, limit=1)
    driver.pool.start()
    gate, door, notes = Gate(), Door(accepts=accepts), Notes()
    driver.apply(gate.task(app, name="first"))
    driver.apply(gate.task(app, **door.hooks()), notes=notes)
    driver.pool.terminate()
    assert door.dropped == [(CancelReason.SHUTDOWN, "tracer")]
    # What was not accepted the broker gives to another worker.
    assert notes.names() == (["accepted", "error"] if accepts else [])
    late = Notes()
    driver.apply(gate.task(app, name="late", **door.hooks()), notes=late)
    assert (len(door.asked), late.told) == (1, []), "a pool that closes asks for nothing more"


def test_a_shutdown_waits_until_the_task_was_told(app: Celery) -> None:
    driver = Driver(app, limit=1)
    driver.pool.start()
    gate = Gate()
    entered, told = threading.Event(), threading.Event()

    def dropped(_: object, __: Job) -> None:
        entered.set()
        told.wait(20)

    driver.apply(gate.task(app, name="first"))
    driver.apply(gate.task(app, dropped=dropped))
    wait_until(lambda: gate.entered)
    stopping = threading.Thread(target=driver.pool.terminate)
    stopping.start()
    assert entered.wait(20)
    wait_until(lambda: len(driver.pool._jobs) == 1)
    assert stopping.is_alive()
    told.set()
    stopping.join(20)
    assert not stopping.is_alive()


def test_a_dropped_that_raises_is_logged(app: Celery, caplog: pytest.LogCaptureFixture) -> None:
    def dropped(_: object, __: Job) -> None:
        raise ZeroDivisionError

    driver = Driver(app, limit=1)
    driver.pool.start()
    gate, notes = Gate(), Notes()
    driver.apply(gate.task(app, name="first"))
    driver.apply(gate.task(app, dropped=dropped), notes=notes).cancel(CancelReason.CANCELLED)
    assert notes.ending()[0] == "error"
    assert "could not be undone" in caplog.text
    driver.pool.terminate()


@pytest.mark.parametrize("reason", [CancelReason.REVOKED, CancelReason.SHUTDOWN])
def test_a_task_is_told_of_every_job_that_ends_without_the_tracer(
    app: Celery, driver: Driver, reason: CancelReason
) -> None:
    """It runs when it is revoked, or is given up at its hard time limit; the other endings are the tracer's."""
    gate, door, notes = Gate(), Door(), Notes()
    job = driver.apply(gate.task(app, **door.hooks()), notes=notes)
    wait_until(lambda: gate.entered)
    job.cancel(reason)
    notes.ending()
    assert door.dropped == ([(reason, "tracer")] if reason is CancelReason.REVOKED else [])


def test_a_task_is_told_of_a_job_over_its_hard_time_limit(app: Celery, driver: Driver) -> None:
    gate, door, notes = Gate(), Door(), Notes()
    driver.apply(gate.task(app, **door.hooks()), notes=notes, timeout=0.05)
    wait_until(lambda: door.dropped == [(CancelReason.TIMEOUT, "tracer")])
    wait_until(lambda: notes.names() == ["accepted", "timeout"])


def test_accepting_does_not_block_the_loop(app: Celery, driver: Driver) -> None:
    """Celery's callback may wait for the broker."""
    release = threading.Event()
    order: list[str] = []

    async def quick() -> None:
        order.append("ran")

    task = registered(app, quick)
    request = {"id": "q", "args": (), "kwargs": {}}
    driver.pool.apply_async(
        driver.trace,
        (task.name, "q", request, ((), {}, {}), None, None),
        accept_callback=lambda *_: (release.wait(20), order.append("accepted")),
        callback=lambda _: order.append("result"),
    )
    wait_until(lambda: order == ["ran"])
    release.set()
    wait_until(lambda: order == ["ran", "accepted", "result"])


# -- the limit ---------------------------------------------------------------------------------------------------------


def test_jobs_beyond_the_limit_wait_unaccepted(app: Celery, driver: Driver) -> None:
    gate = Gate()
    task = gate.task(app)
    notes = [Notes() for _ in range(13)]
    jobs = [driver.apply(task, notes=n) for n in notes]
    wait_until(lambda: len(gate.entered) == 10)
    assert len({job.pid for job in jobs}) == 13
    wait_until(lambda: driver.pool.info["waiting"] == 3, what="the others, which are on their way to the loop")
    assert [n.names() for n in notes[10:]] == [[], [], []]
    info = driver.pool.info
    assert (info["max-concurrency"], info["in-flight"]) == (10, 10)
    assert set(info["loop-lag-ms"]) == {"last", "p50", "p99", "max"}
    gate.open.set()
    assert {n.ending() for n in notes} == {("result", 0, "through")}
    wait_until(lambda: driver.pool.info["in-flight"] == 0)


def test_growing_starts_what_waits_and_shrinking_never_stops_what_runs(app: Celery, driver: Driver) -> None:
    gate = Gate()
    task = gate.task(app)
    for _ in range(12):
        driver.apply(task)
    wait_until(lambda: len(gate.entered) == 10)
    driver.pool.grow(2)
    assert driver.pool.num_processes == 12
    wait_until(lambda: len(gate.entered) == 12)
    with pytest.raises(ValueError, match="busy"):
        driver.pool.shrink(1)
    gate.open.set()
    wait_until(lambda: driver.pool.info["in-flight"] == 0)
    driver.pool.shrink(11)
    assert driver.pool.num_processes == 1
    with pytest.raises(ValueError, match="cannot shrink"):
        driver.pool.shrink(1)


def test_a_slot_is_held_until_the_result_is_stored(app: Celery) -> None:
    driver = Driver(app, limit=1)
    driver.pool.start()
    storing, stored = threading.Event(), threading.Event()
    ran: list[int] = []

    async def number(n: int) -> None:
        ran.append(n)

    def slow_backend(*message: Any) -> Any:
        storing.set()
        stored.wait(20)
        return driver.trace(*message)

    task = registered(app, number)
    first, second = Notes(), Notes()
    driver.apply(task, 1, notes=first, target=slow_backend)
    driver.apply(task, 2, notes=second)
    assert storing.wait(20)
    assert ran == [1]
    stored.set()
    second.ending()
    assert ran == [1, 2]
    driver.pool.stop()


def test_the_pool_keeps_the_job_alive_until_it_is_done(app: Celery, driver: Driver) -> None:
    """Celery holds it weakly."""
    gate = Gate()
    notes = Notes()
    job = weakref.ref(driver.apply(gate.task(app), notes=notes))
    wait_until(lambda: gate.entered)
    gc.collect()
    assert job() is not None
    gate.open.set()
    notes.ending()
    wait_until(lambda: gc.collect() >= 0 and job() is None, what="the job to be freed")


# -- cancelling --------------------------------------------------------------------------------------------------------


def test_a_revoked_job_ends_with_terminated(app: Celery, driver: Driver) -> None:
    gate, notes = Gate(), Notes()
    job = driver.apply(gate.task(app), notes=notes)
    wait_until(lambda: gate.entered)
    driver.pool.terminate_job(job.pid, 15)
    kind, error = notes.ending()
    assert (kind, type(error)) == ("error", Terminated)
    assert gate.left == [CancelReason.REVOKED]
    assert driver.tracer_threads == set()


def test_terminating_never_raises(app: Celery, driver: Driver) -> None:
    driver.pool.terminate_job(4711, 15)
    driver.pool.terminate_job(4711)
    gate, notes = Gate(), Notes()
    job = driver.apply(gate.task(app), notes=notes)
    gate.open.set()
    notes.ending()
    job.terminate(15)
    driver.pool.stop()
    driver.pool.terminate_job(job.pid, 15)
    assert notes.names() == ["accepted", "result"]


def test_a_waiting_job_that_is_revoked_never_starts(app: Celery) -> None:
    driver = Driver(app, limit=1)
    driver.pool.start()
    gate, running, waiting = Gate(), Notes(), Notes()
    task = gate.task(app)
    driver.apply(task, notes=running)
    job = driver.apply(task, notes=waiting)
    job.terminate(15)
    kind, error = waiting.ending()
    assert (kind, type(error), waiting.names()) == ("error", Terminated, ["error"])
    gate.open.set()
    driver.pool.stop()
    assert len(gate.entered) == 1
    assert running.names() == ["accepted", "result"]


@pytest.mark.parametrize("reason", [CancelReason.SHUTDOWN, CancelReason.CANCELLED, CancelReason.LEASE_LOST])
def test_a_cancellation_that_passes_through_is_ignored(app: Celery, driver: Driver, reason: CancelReason) -> None:
    gate, notes = Gate(), Notes()
    job = driver.apply(gate.task(app), notes=notes)
    wait_until(lambda: gate.entered)
    job.cancel(reason)
    kind, failed, error = notes.ending()
    assert (kind, failed, type(error)) == ("result", 1, Ignore)
    assert gate.left == [reason]


@pytest.mark.parametrize("reason", list(CancelReason))
def test_what_a_coroutine_makes_of_its_cancellation_counts(app: Celery, driver: Driver, reason: CancelReason) -> None:
    entered = threading.Event()

    async def catch() -> str:
        try:
            entered.set()
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return f"caught {current_job().cancel_reason}"
        return "never"

    notes = Notes()
    job = driver.apply(registered(app, catch), notes=notes)
    assert entered.wait(20)
    job.cancel(reason)
    assert notes.ending() == ("result", 0, f"caught {reason}")


def test_the_first_reason_wins_and_clean_up_is_not_interrupted(app: Celery, driver: Driver) -> None:
    entered, cleaning, clean = threading.Event(), threading.Event(), threading.Event()
    seen: list[CancelReason | None] = []

    async def tidy() -> None:
        try:
            entered.set()
            await asyncio.Event().wait()
        finally:
            cleaning.set()
            while not clean.is_set():
                await asyncio.sleep(0.002)
            seen.append(current_job().cancel_reason)

    notes = Notes()
    job = driver.apply(registered(app, tidy), notes=notes)
    assert entered.wait(20)
    job.cancel(CancelReason.LEASE_LOST)
    assert cleaning.wait(20)
    job.cancel(CancelReason.CANCELLED)
    job.terminate(15)
    clean.set()
    kind, _, error = notes.ending()
    assert (kind, type(error), seen) == ("result", Ignore, [CancelReason.LEASE_LOST])


def test_a_job_that_is_cancelled_before_its_first_step(app: Celery, driver: Driver) -> None:
    ran: list[int] = []

    async def late() -> None:
        ran.append(1)

    door, notes = Door(), Notes()
    task = registered(app, late, **door.hooks())

    def at_once() -> None:
        job = driver.apply(task, notes=notes)
        job.cancel(CancelReason.CANCELLED)

    driver.pool._loop.call(at_once)
    kind, error = notes.ending()
    assert (kind, type(error), ran) == ("error", Ignore, [])
    assert door.dropped == [(CancelReason.CANCELLED, "tracer")]
    wait_until(lambda: driver.pool.info["in-flight"] == 0)


def test_an_ordinary_task_that_cannot_be_cancelled_says_so(
    app: Celery, driver: Driver, caplog: pytest.LogCaptureFixture
) -> None:
    entered, go = threading.Event(), threading.Event()

    @app.task(name="blocking", shared=False)
    def blocking() -> str:
        entered.set()
        go.wait(20)
        return "done"

    app.finalize()
    notes = Notes()
    job = driver.apply(app.tasks["blocking"], notes=notes)
    assert entered.wait(20)
    with caplog.at_level(logging.WARNING):
        job.terminate(15)
        wait_until(lambda: "cannot be cancelled" in caplog.text)
    go.set()
    assert notes.ending() == ("result", 0, "done")


# -- time limits -------------------------------------------------------------------------------------------------------


def test_the_soft_time_limit_fails_the_task(app: Celery, driver: Driver) -> None:
    gate, notes = Gate(), Notes()
    driver.apply(gate.task(app), notes=notes, soft_timeout=0.05)
    kind, failed, error = notes.ending()
    assert (kind, failed, type(error)) == ("result", 1, SoftTimeLimitExceeded)
    assert notes.told[1] == ("timeout", True, 0.05)
    assert gate.left == [CancelReason.TIMEOUT]


@pytest.mark.parametrize("late", [False, True], ids=["in time", "a loop that stands still over both limits"])
def test_the_hard_time_limit_abandons_the_outcome(app: Celery, driver: Driver, late: bool) -> None:
    notes = Notes()
    begun = threading.Event()
    ended: list[int] = []

    async def stubborn() -> str:
        begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            try:
                await asyncio.Event().wait()  # goes on after the soft limit
            finally:
                ended.append(1)
        return "never"

    job = driver.apply(registered(app, stubborn), notes=notes, soft_timeout=0.03, timeout=0.08)
    if late:
        assert begun.wait(20)
        driver.pool._loop.call(time.sleep, 0.2)
    wait_until(lambda: job.state is RunState.FINISHED and len(notes.told) == 3)
    assert notes.told[1:] == [("timeout", True, 0.03), ("timeout", False, 0.08)]
    assert ended == [1]
    wait_until(lambda: driver.pool.info["in-flight"] == 0)


def test_the_workers_own_time_limit_is_the_default(app: Celery) -> None:
    driver = Driver(app, soft_timeout=0.05, timeout=None)
    driver.pool.start()
    kind, _, error = driver.run(Gate().task(app))
    assert (kind, type(error)) == ("result", SoftTimeLimitExceeded)
    driver.pool.stop()


# -- the loop and its lifespan -----------------------------------------------------------------------------------------


def test_the_lifespan_surrounds_all_jobs_on_the_loop(app: Celery) -> None:
    order: list[str] = []

    @asynccontextmanager
    async def lifespan(pool: AsyncioPool) -> AsyncIterator[None]:
        order.append(f"enter {pool.hostname} {threading.get_ident() == pool.loop_thread_id}")
        yield
        order.append("exit")

    async def work() -> None:
        order.append("job")

    app.pool_lifespan = lifespan
    driver = Driver(app, initargs=(app, "worker@here"))
    driver.pool.start()
    driver.run(registered(app, work))
    driver.pool.stop()
    driver.pool.stop()
    driver.pool.terminate()
    assert order == ["enter worker@here True", "job", "exit"]


def test_a_lifespan_that_cannot_be_entered_fails_the_start(app: Celery) -> None:
    @asynccontextmanager
    async def lifespan(_: AsyncioPool) -> AsyncIterator[None]:
        raise ConnectionRefusedError("no gateway")
        yield

    app.pool_lifespan = lifespan
    pool = AsyncioPool(1, app=app)
    with pytest.raises(ConnectionRefusedError, match="no gateway"):
        pool.start()
    pool.stop()


def test_a_lifespan_that_takes_long_does_not_delay_a_shutdown(app: Celery, monkeypatch: pytest.MonkeyPatch) -> None:
    @asynccontextmanager
    async def lifespan(_: AsyncioPool) -> AsyncIterator[None]:
        try:
            await asyncio.Event().wait()
        finally:
            left.append(1)
        yield

    left: list[int] = []
    app.pool_lifespan = lifespan
    pool = AsyncioPool(1, app=app)
    monkeypatch.setattr(worker_state, "should_stop", 0)
    with pytest.raises(WorkerShutdown):
        pool.start()
    assert left == [1]
    wait_until(lambda: not pool.did_start_ok())


def test_a_lifespan_that_does_not_exit_is_bounded(app: Celery, caplog: pytest.LogCaptureFixture) -> None:
    @asynccontextmanager
    async def lifespan(_: AsyncioPool) -> AsyncIterator[None]:
        yield
        await asyncio.Event().wait()

    class Impatient(AsyncioPool):
        lifespan_grace = 0.05

    app.pool_lifespan = lifespan
    pool = Impatient(1, app=app)
    pool.start()
    pool.stop()
    wait_until(lambda: not pool.did_start_ok())
    assert "TimeoutError" in caplog.text


def test_a_lost_loop_ends_the_worker(app: Celery, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_state, "should_terminate", None)

    @asynccontextmanager
    async def lifespan(_: AsyncioPool) -> AsyncIterator[None]:
        async with asyncio.TaskGroup() as group:
            group.create_task(fail())
            yield

    async def fail() -> None:
        await asyncio.sleep(0.01)
        raise OSError("the background work of the lifespan failed")

    app.pool_lifespan = lifespan
    pool = AsyncioPool(1, app=app)
    pool.start()
    wait_until(lambda: worker_state.should_terminate)
    wait_until(lambda: not pool.did_start_ok())
    pool.terminate()


def test_the_lag_of_a_blocked_loop_is_measured(app: Celery, driver: Driver) -> None:
    async def block() -> None:
        time.sleep(0.25)  # the very thing that is measured

    before = driver.pool.loop_progress
    driver.run(registered(app, block))
    wait_until(lambda: driver.pool._loop.lag.max > 0.1)
    assert driver.pool.loop_progress > before


def test_percentiles_of_the_lag() -> None:
    lag = LoopLag(interval=1.0, window=100.0)
    assert (lag.max, lag.percentile(99)) == (0.0, 0.0)
    lag._samples.extend(range(200))
    assert (lag.percentile(50), lag.percentile(99), lag.max) == (150, 199, 199)


# -- stopping ----------------------------------------------------------------------------------------------------------


@contextmanager
def opened_when_it_closes(pool: AsyncioPool, gate: threading.Event) -> Iterator[None]:
    """Open ``gate`` once a shutdown of ``pool`` has begun."""

    def open_it() -> None:
        wait_until(lambda: pool.closing)
        gate.set()

    opening = threading.Thread(target=open_it)
    opening.start()
    yield
    opening.join()


def test_a_warm_shutdown_waits_for_what_runs_and_drops_what_waits(app: Celery) -> None:
    driver = Driver(app, limit=2)
    driver.pool.start()
    gate = Gate()
    task = gate.task(app)
    notes = [Notes() for _ in range(4)]
    for n in notes:
        driver.apply(task, notes=n)
    wait_until(lambda: len(gate.entered) == 2)
    with opened_when_it_closes(driver.pool, gate.open):
        driver.pool.stop()
    assert [n.names() for n in notes] == [["accepted", "result"]] * 2 + [[]] * 2
    late = Notes()
    driver.apply(task, notes=late)
    assert late.told == []


def test_a_warm_shutdown_runs_what_the_hub_was_told_to_call(app: Celery, hub: Hub) -> None:
    """Acknowledgements are queued on Celery's event loop, whose thread is the one that waits here."""
    driver = Driver(app)
    driver.pool.start()
    driver.pool.register_with_event_loop(hub)
    gate = Gate()
    acknowledged: list[float] = []
    threads: set[int] = set()

    async def short() -> None: ...

    def on_result(_: object) -> None:
        threads.add(threading.get_ident())
        hub.call_soon(lambda: (acknowledged.append(1), gate.open.set()))

    driver.apply(gate.task(app))
    wait_until(lambda: gate.entered)
    request = {"id": "s", "args": (), "kwargs": {}}
    task = registered(app, short)
    driver.pool.apply_async(driver.trace, (task.name, "s", request, ((), {}, {}), None, None), callback=on_result)
    wait_until(lambda: driver.tracer_threads)
    driver.pool.stop()  # would last for ever if the acknowledgement did not open the gate
    assert acknowledged == [1]
    assert threads == {threading.get_ident()}


def test_callbacks_run_on_the_hubs_thread_and_wake_it(app: Celery, driver: Driver, hub: Hub) -> None:
    driver.pool.register_with_event_loop(hub)
    notes = Notes()

    async def fine() -> int:
        return 1

    driver.apply(registered(app, fine), notes=notes)
    wait_until(lambda: driver.pool.info["in-flight"] == 0 and driver.tracer_threads)
    assert notes.told == []
    for call in hub._pop_ready():
        call()
    assert notes.names() == ["accepted", "result"]


def test_full_garbage_collections_are_rare_in_a_worker(driver: Driver, hub: Hub) -> None:
    """One of them stops the loop for longer than everything else."""
    driver.pool.register_with_event_loop(hub)
    assert gc.get_threshold()[2] >= 1000
    assert gc.get_freeze_count() > 0


def test_a_cold_shutdown_runs_every_clean_up(app: Celery) -> None:
    driver = Driver(app, limit=5)
    driver.pool.start()
    gate = Gate()
    task = gate.task(app)
    notes = [Notes() for _ in range(7)]
    for n in notes:
        driver.apply(task, notes=n)
    wait_until(lambda: len(gate.entered) == 5)
    driver.pool.terminate()
    assert gate.left == [CancelReason.SHUTDOWN] * 5
    assert [n.names() for n in notes] == [["accepted", "result"]] * 5 + [[]] * 2
    driver.pool.terminate()
    driver.pool.stop()


def test_a_cold_shutdown_does_not_wait_for_ever(app: Celery, caplog: pytest.LogCaptureFixture) -> None:
    class Impatient(AsyncioPool):
        shutdown_grace = 0.1
        lifespan_grace = 0.1

    entered, give_up = threading.Event(), threading.Event()

    async def hang() -> None:
        entered.set()
        while not give_up.is_set():
            try:
                await asyncio.sleep(0.005)
            except asyncio.CancelledError:
                continue  # the fault that is tested

    driver = Driver(app)
    driver.pool = Impatient(1, app=app)
    driver.pool.start()
    driver.apply(registered(app, hang))
    assert entered.wait(20)
    began = time.monotonic()
    driver.pool.terminate()
    assert time.monotonic() - began < 20, "it hangs for ever"
    assert "id-hang" in caplog.text
    give_up.set()
    wait_until(lambda: not driver.pool.did_start_ok())


def test_a_signal_handler_turns_a_warm_shutdown_into_a_cold_one_without_waiting(app: Celery) -> None:
    """SIGQUIT while the main thread waits in a warm shutdown: the handler runs on that thread, in the midst of it."""
    driver = Driver(app)
    driver.pool.start()
    gate, notes = Gate(), Notes()
    job = driver.apply(gate.task(app), notes=notes)
    wait_until(lambda: gate.entered)
    with in_sighandler():
        driver.pool.terminate_job(job.pid, 15)
        driver.pool.stop()
    driver.pool.terminate()
    assert gate.left == [CancelReason.SHUTDOWN]
    kind, _, error = notes.ending()
    assert (kind, type(error)) == ("result", Ignore)


def test_a_lost_connection_keeps_what_was_accepted(app: Celery) -> None:
    """Its message was acknowledged: nobody else will run it."""
    driver = Driver(app, limit=1)
    driver.pool.start()
    gate, door, waiting = Gate(), Door(accepts=True), Notes()
    driver.apply(gate.task(app, name="first"))
    driver.apply(gate.task(app, **door.hooks()), notes=waiting)
    wait_until(lambda: gate.entered)
    driver.pool.flush()
    gate.open.set()
    assert waiting.ending() == ("result", 0, "through")
    driver.pool.stop()
    assert door.dropped == []


def test_a_lost_connection_drops_what_waits_unaccepted(app: Celery) -> None:
    driver = Driver(app, limit=1)
    driver.pool.start()
    gate, door, waiting = Gate(), Door(), Notes()
    driver.apply(gate.task(app, name="first"))
    job = driver.apply(gate.task(app, **door.hooks()), notes=waiting)
    wait_until(lambda: gate.entered)
    driver.pool.flush()
    wait_until(lambda: job.state is RunState.FINISHED)
    gate.open.set()
    driver.pool.stop()
    assert waiting.told == []
    assert door.dropped == [(None, "tracer")]


def test_ten_thousand_jobs_at_once_need_no_threads_of_their_own(app: Celery) -> None:
    driver = Driver(app, limit=10_000)
    driver.pool.start()
    go: list[asyncio.Event] = []
    entered: list[int] = []

    async def wait() -> None:
        if not go:
            go.append(asyncio.Event())
        entered.append(1)
        await go[0].wait()

    task, notes = registered(app, wait), Notes()
    threads = threading.active_count()
    for _ in range(10_000):
        driver.apply(task, notes=notes)
    wait_until(lambda: len(entered) == 10_000)
    assert threading.active_count() <= threads
    driver.pool._loop.call(go[0].set)
    driver.pool.stop()
    assert notes.names().count("result") == 10_000
