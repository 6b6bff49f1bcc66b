"""What a job has worked on is freed when it ends: nothing waits for a full collection, of which there are few."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from celery import Celery
from celery.app.trace import build_tracer, fast_trace_task
from celery.exceptions import Ignore
from support import wait_until

from producer import RolloutRequest
from producer.contract import Phase
from workers import asynctask
from workers.asynctask import AsyncTask, Job, exception_info
from workers.breaker import Breaker
from workers.garbage import collect_garbage
from workers.gateway.server import app as gateway
from workers.pool import AsyncioPool
from workers.state import Rollout


class Held:
    """Something large that a job works on."""


@pytest.fixture(autouse=True)
def no_collections() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def app() -> Iterator[Celery]:
    app = Celery("test", broker="memory://", backend="cache+memory://", set_as_current=False)
    yield app
    app.close()


@pytest.fixture
def pool(app: Celery) -> Iterator[AsyncioPool]:
    pool = AsyncioPool(10, app=app)
    pool.start()
    yield pool
    pool.terminate()


def apply(pool: AsyncioPool, task: Any, told: list[str]) -> weakref.ref[Job]:
    """Hand ``task`` to ``pool`` with Celery's own tracer; ``told`` gets the texts of the errors that Celery is told."""
    task.__trace__ = build_tracer(task.name, task, app=pool.app)
    target = partial(fast_trace_task, _loc=(pool.app.tasks, {}, "here"))
    request: dict[str, Any] = {"id": "an-id", "task": task.name, "args": (), "kwargs": {}}
    job = pool.apply_async(
        target,
        (task.name, "an-id", request, ((), {}, {}), None, None),
        callback=lambda result: told.append(result[1].traceback),
        error_callback=lambda info: told.append(info.traceback),
    )
    return weakref.ref(job)


def failing(app: Celery, error: Callable[[], Exception], held: list[weakref.ref[Held]], base: type | None) -> Any:
    """Register a task that fails while it works on something, and while it handles another error."""

    def work() -> None:
        thing = Held()
        held.append(weakref.ref(thing))
        try:
            raise OSError("the cause")
        except OSError as cause:
            kept = cause  # its frame holds it, as `logger.exception` and retries of clients do
            raise error() from kept

    async def fail() -> None:
        await asyncio.sleep(0)
        work()

    app.task(name="fail", shared=False, **({"base": base} if base else {}))(fail if base else work)
    app.finalize()
    return app.tasks["fail"]


@pytest.mark.parametrize("error", [Ignore, partial(ValueError, "no")], ids=["given back", "failed"])
@pytest.mark.parametrize("base", [AsyncTask, None], ids=["coroutine", "thread"])
def test_a_job_whose_error_holds_its_frames_is_freed_when_it_ends(
    app: Celery, pool: AsyncioPool, error: Callable[[], Exception], base: type | None
) -> None:
    told: list[str] = []
    held: list[weakref.ref[Held]] = []
    job = apply(pool, failing(app, error, held, base), told)
    wait_until(lambda: told)
    wait_until(lambda: job() is None, what="the job to be freed")
    wait_until(lambda: [ref() for ref in held] == [None], what="what it worked on to be freed")


def test_the_traceback_of_an_error_is_still_told(app: Celery, pool: AsyncioPool) -> None:
    told: list[str] = []
    apply(pool, failing(app, partial(ValueError, "no"), [], AsyncTask), told)
    wait_until(lambda: told)
    assert "in work" in told[0]
    assert "the cause" in told[0]


@pytest.mark.parametrize("admits", [False, None], ids=["nothing to do", "admission fails"])
def test_a_job_that_is_not_admitted_is_freed(
    app: Celery, pool: AsyncioPool, admits: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asynctask.logger, "disabled", True)  # pytest keeps what is logged, and so its traceback

    class Refusing(AsyncTask):
        abstract = True

        def admit(self, job: Job) -> bool:
            if admits is None:
                raise ValueError("cannot tell")
            return admits

    told: list[str] = []
    job = apply(pool, failing(app, Ignore, [], Refusing), told)
    wait_until(lambda: told)
    wait_until(lambda: job() is None, what="the job to be freed")


def test_errors_that_lead_to_each_other_let_go_of_their_frames() -> None:
    first, second = ValueError("first"), OSError("second")
    first.__context__, second.__context__ = second, first
    info = exception_info(first)
    assert (first.__traceback__, second.__traceback__) == (None, None)
    assert "first" in info.traceback


def test_a_rollout_that_the_breaker_has_watched_is_freed() -> None:
    breaker = Breaker(failures=3, pause=1, longest=1, limit=lambda jobs: None, running=lambda: 0)
    rollout = Rollout(RolloutRequest(model="m"), "http://g")
    breaker.watch(rollout, 0.0)
    rollout.enter(Phase.TUNNEL)
    ref = weakref.ref(rollout)
    del rollout
    assert ref() is None


def old_cycle() -> weakref.ref[Any]:
    thing: Any = Held()
    thing.itself = thing
    gc.collect(1)  # it is in the oldest generation from now on
    return weakref.ref(thing)


async def until_gone(ref: weakref.ref[Any]) -> None:
    async with asyncio.timeout(30):
        while ref() is not None:
            await asyncio.sleep(0.005)


def test_cycles_that_grew_old_are_collected_now_and_then() -> None:
    async def run() -> None:
        collecting = asyncio.create_task(collect_garbage(interval=0.001))
        await until_gone(old_cycle())
        collecting.cancel()

    asyncio.run(run())


def test_a_gateway_collects_cycles_that_grew_old(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each long request of uvicorn's is one."""
    monkeypatch.setattr(gateway, "collect_garbage", partial(collect_garbage, interval=0.001))
    steps = iter(["startup", "shutdown"])
    sent: list[str] = []

    async def receive() -> dict[str, Any]:
        if sent:
            await until_gone(old_cycle())
        return {"type": f"lifespan.{next(steps)}"}

    async def send(message: Any) -> None:
        sent.append(message["type"])

    asyncio.run(gateway.create_app(upstream="http://127.0.0.1:9/v1")({"type": "lifespan"}, receive, send))
    assert sent == ["lifespan.startup.complete", "lifespan.shutdown.complete"]
