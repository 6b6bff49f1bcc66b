"""The asyncio pool in real Celery workers, on a real server."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from celery import Celery
from celery.exceptions import SoftTimeLimitExceeded, TaskRevokedError, TimeLimitExceeded
from celery.states import READY_STATES
from support import RedisServer, wait_until

from producer import broker
from workers import transport

pytestmark = pytest.mark.xdist_group("pool-worker")

ROOT = Path(__file__).parents[2]

APP = '''
import asyncio, os, threading, time
from contextlib import asynccontextmanager
from pathlib import Path

from celery import Celery, signals
from celery.exceptions import Ignore

import workers.pool
from producer import broker
from workers.pool import AsyncTask, AsyncioPool, current_job

HERE = Path(os.environ["POOL_TEST_DIR"])
app = Celery("pool-test")
app.config_from_object(
    broker.celery_config(os.environ["POOL_TEST_URL"])
    | {"worker_pool": "workers.pool:AsyncioPool"}
    | ({"broker_transport": os.environ["POOL_TEST_TRANSPORT"]} if "POOL_TEST_TRANSPORT" in os.environ else {})
)
AsyncioPool.shutdown_grace = 40.0


def note(name, text="x"):
    with open(HERE / name, "a") as file:
        file.write(f"{text}\\n")


@asynccontextmanager
async def lifespan(pool):
    if os.environ.get("POOL_TEST_BROKEN"):
        raise ConnectionRefusedError("the gateway is not there")
    note("lifespan", "entered")
    yield
    note("lifespan", "exited")

app.pool_lifespan = lifespan


@app.task(base=AsyncTask)
async def add(x, y):
    await asyncio.sleep(0)
    return x + y

@app.task
def plain(x, y):
    return [x + y, threading.current_thread().name]

@app.task(base=AsyncTask)
async def fail():
    raise ValueError("on purpose")

@app.task(base=AsyncTask)
async def ignore():
    raise Ignore

@app.task(base=AsyncTask, bind=True, max_retries=2)
async def retry(self):
    if self.request.retries < 1:
        raise await asyncio.to_thread(self.retry, countdown=0)
    # Not before the first run's RETRY is stored, which would be written over the end of this one.
    while await asyncio.to_thread(lambda: app.AsyncResult(self.request.id).state) != "RETRY":
        await asyncio.sleep(0.01)
    return self.request.retries

async def gate(name):
    """Wait for the file ``name.go``; note the start, the end and why."""
    note(f"{name}.started", time.time())
    try:
        while not (HERE / f"{name}.go").exists():
            await asyncio.sleep(0.01)
    finally:
        await asyncio.sleep(0.05)
        note(f"{name}.left", current_job().cancel_reason)
    return name

@app.task(base=AsyncTask)
async def wait(name):
    return await gate(name)

@app.task(base=AsyncTask, acks_late=True)
async def wait_late(name):
    return await gate(name)

class Claiming(AsyncTask):
    abstract = True

    def admit(self, job):
        """Wait, on Celery's own thread, for the file ``name.claim``, whose text says what to do."""
        (name,) = job.request["args"]
        note(f"{name}.claiming", threading.current_thread() is threading.main_thread())
        while not (HERE / f"{name}.claim").exists():
            time.sleep(0.01)
        answer = (HERE / f"{name}.claim").read_text()
        if answer == "raise":
            raise ValueError("no claim")
        return answer != "nothing to do"

    def dropped(self, job):
        note(f"{job.request['args'][0]}.dropped", job.cancel_reason)

@app.task(base=Claiming)
async def claim(name):
    return await gate(name)

@app.task(base=AsyncTask)
async def keep(name):
    try:
        return await gate(name)
    except asyncio.CancelledError:
        return f"kept after {current_job().cancel_reason}"

running = peak = 0

@app.task(base=AsyncTask)
async def crowd():
    global running, peak
    running += 1
    peak = max(peak, running)
    while peak < 4:  # however slowly they come
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.02)
    running -= 1
    return peak

@signals.task_prerun.connect
def _prerun(task_id, **_):
    note(f"{task_id}.signals", "prerun")

@signals.task_postrun.connect
def _postrun(task_id, state, **_):
    note(f"{task_id}.signals", f"postrun {state}")

@signals.task_success.connect
def _success(sender, **_):
    note(f"{sender.request.id}.signals", "success")

@signals.task_failure.connect
def _failure(task_id, **_):
    note(f"{task_id}.signals", "failure")

@signals.task_revoked.connect
def _revoked(request, terminated, **_):
    note(f"{request.id}.signals", f"revoked {terminated}")
'''


class Sent:
    """A task that was sent. Celery's own handle subscribes to its result, and fails loudly when Redis goes away."""

    def __init__(self, app: Celery, task_id: str) -> None:
        self.app = app
        self.id = task_id

    @property
    def meta(self) -> dict[str, Any]:
        return dict(self.app.backend.get_task_meta(self.id, cache=False))

    @property
    def state(self) -> str:
        return str(self.meta["status"])

    def get(self, timeout: float = 20) -> Any:
        wait_until(lambda: self.state in READY_STATES, timeout=timeout, what=f"the result of {self.id}")
        result = self.meta["result"]
        if isinstance(result, BaseException):
            raise result
        return result


class Worker:
    """A ``celery worker`` process of the module above, and a client of it."""

    def __init__(self, directory: Path, url: str, concurrency: int = 4, **environ: str) -> None:
        self.directory = directory
        self.client = redis.Redis.from_url(url)
        self.app = Celery("client", set_as_current=False)
        self.app.config_from_object(broker.celery_config(url))
        self.sender = Celery("sender", set_as_current=False)
        self.sender.config_from_object(broker.celery_config(url) | {"result_backend": None})
        (directory / "pool_app.py").write_text(APP)
        self.log = directory / "worker.log"
        variables = {"PYTHONPATH": f"{directory}:{ROOT}", "POOL_TEST_DIR": str(directory), "POOL_TEST_URL": url}
        command = [sys.executable, "-m", "celery", "-A", "pool_app", "worker", "-l", "INFO", "-c", str(concurrency)]
        command += ["--without-mingle", "--without-gossip", "--without-heartbeat", "-Q", broker.QUEUE]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command, cwd=directory, env=os.environ | variables | environ, stdout=log, stderr=subprocess.STDOUT
            )

    def ready(self) -> Worker:
        def has_started() -> bool:
            return " ready." in self.log.read_text() or self.process.poll() is not None

        wait_until(has_started, timeout=60, what="the worker")
        assert self.process.poll() is None, self.log.read_text()
        return self

    def send(self, name: str, *args: object, **options: Any) -> Sent:
        return Sent(self.app, self.sender.send_task(f"pool_app.{name}", args, **options).id)

    def start(self, name: str, task: str = "wait", **options: Any) -> Sent:
        """Send a task that waits, and wait until it runs."""
        result = self.send(task, name, **options)
        self.until(f"{name}.started")
        return result

    def path(self, name: str) -> Path:
        return self.directory / name

    def until(self, name: str) -> None:
        wait_until(lambda: self.lines(name), what=name)

    def lines(self, name: str) -> list[str]:
        path = self.path(name)
        return path.read_text().split("\n")[:-1] if path.exists() else []

    def control(self, command: str, **arguments: Any) -> Any:
        replies = self.app.control.broadcast(command, arguments=arguments, reply=True, timeout=20, limit=1)
        (reply,) = replies[0].values()
        return reply

    def unacknowledged(self) -> int:
        return int(self.client.hlen("unacked"))

    def is_idle(self) -> bool:
        """Whether Celery knows of no task: it is told of the end of one a moment after its result is stored."""
        return bool(self.control("active") == self.control("reserved") == [])

    def end(self, timeout: float = 60) -> int:
        """Wait for the process to end and return its exit code."""
        return self.process.wait(timeout)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self.app.close()
        self.sender.close()
        self.client.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    server.start()
    yield server
    server.stop(signal.SIGKILL)


@pytest.fixture(scope="module")
def worker(server: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    """The worker that the tests share which do not stop it."""
    worker = Worker(tmp_path_factory.mktemp("worker"), server.url)
    yield worker.ready()
    worker.close()


@pytest.fixture
def new_worker(server: RedisServer, tmp_path: Path) -> Iterator[Callable[..., Worker]]:
    """Start a worker of the test's own, on an empty database of the shared server."""
    workers: list[Worker] = []
    url = server.url.removesuffix("/0") + "/1"
    with redis.Redis.from_url(url) as client:
        client.flushdb()

    def start(**options: Any) -> Worker:
        workers.append(Worker(tmp_path, url, **options))
        return workers[-1]

    yield start
    for worker in workers:
        worker.close()


# -- what Celery records -----------------------------------------------------------------------------------------------


def test_results_states_and_signals_are_celerys(worker: Worker) -> None:
    good, bad, ignored, retried = (
        worker.send(n, *a) for n, a in [("add", (1, 2)), ("fail", ()), ("ignore", ()), ("retry", ())]
    )
    assert good.get() == 3
    with pytest.raises(ValueError, match="on purpose"):
        bad.get()
    assert "on purpose" in bad.meta["traceback"]
    assert retried.get() == 1
    wait_until(lambda: worker.lines(f"{ignored.id}.signals") == ["prerun", "postrun IGNORED"])
    assert ignored.state == "PENDING"
    wait_until(lambda: worker.lines(f"{good.id}.signals") == ["prerun", "success", "postrun SUCCESS"])
    wait_until(lambda: worker.lines(f"{bad.id}.signals") == ["prerun", "failure", "postrun FAILURE"])
    runs = ["prerun", "prerun", "success", "postrun RETRY", "postrun SUCCESS"]
    wait_until(lambda: sorted(worker.lines(f"{retried.id}.signals")) == sorted(runs))


def test_ordinary_tasks_run_too(worker: Worker) -> None:
    total, thread = worker.send("plain", 2, 3).get()
    assert total == 5
    assert thread.startswith("tracer")


def test_no_more_jobs_than_the_limit_run_at_once(worker: Worker) -> None:
    results = [worker.send("crowd") for _ in range(30)]
    assert max(r.get() for r in results) == 4


def test_a_message_is_acknowledged_as_soon_as_its_task_is_accepted(worker: Worker) -> None:
    result = worker.start("acked")
    wait_until(lambda: worker.unacknowledged() == 0)
    assert result.state == "PENDING"
    worker.path("acked.go").touch()
    assert result.get() == "acked"


def test_a_message_is_held_until_its_task_was_admitted(worker: Worker) -> None:
    result = worker.send("claim", "claimed")
    wait_until(lambda: worker.lines("claimed.claiming") == ["True"])
    wait_until(lambda: worker.unacknowledged() == 1)
    assert worker.lines("claimed.started") == []
    worker.path("claimed.claim").touch()
    worker.until("claimed.started")
    wait_until(lambda: worker.unacknowledged() == 0)
    wait_until(lambda: [task["id"] for task in worker.control("active")] == [result.id])
    worker.path("claimed.go").touch()
    assert result.get() == "claimed"


def test_a_task_that_is_not_admitted_is_acknowledged_and_forgotten(worker: Worker) -> None:
    worker.path("twice.claim").write_text("nothing to do")
    results = [worker.send("claim", "twice") for _ in range(20)]  # more than there are slots: none is taken
    wait_until(lambda: len(worker.lines("twice.claiming")) == 20)
    wait_until(lambda: worker.unacknowledged() == 0)
    wait_until(worker.is_idle)
    assert worker.send("add", 1, 2).get() == 3
    assert {r.state for r in results} == {"PENDING"}
    assert worker.lines("twice.started") == worker.lines(f"{results[0].id}.signals") == []


def test_an_admit_that_raises_fails_the_task(worker: Worker) -> None:
    worker.path("raising.claim").write_text("raise")
    result = worker.send("claim", "raising")
    with pytest.raises(ValueError, match="no claim"):
        result.get()
    wait_until(worker.is_idle)
    assert worker.lines(f"{result.id}.signals") == ["failure"]
    assert worker.unacknowledged() == 0


# -- remote control ----------------------------------------------------------------------------------------------------


def test_inspect_shows_each_job_under_a_number_of_its_own(worker: Worker) -> None:
    results = [worker.start(f"seen{n}") for n in range(3)]
    wait_until(lambda: {task["id"] for task in worker.control("active")} == {r.id for r in results})
    active = worker.control("active")
    assert len({task["worker_pid"] for task in active}) == 3
    wait_until(lambda: worker.control("stats")["pool"]["in-flight"] == 3)
    pool = worker.control("stats")["pool"]
    assert pool["implementation"] == "workers.pool:AsyncioPool"
    assert (pool["max-concurrency"], pool["waiting"]) == (4, 0)
    for n in range(3):
        worker.path(f"seen{n}.go").touch()
    assert [r.get() for r in results] == ["seen0", "seen1", "seen2"]
    wait_until(lambda: worker.control("active") == [])


def test_revoking_cancels_the_coroutine_whose_clean_up_runs(worker: Worker) -> None:
    result = worker.start("revoked")
    worker.control("revoke", task_id=result.id, terminate=True)
    with pytest.raises(TaskRevokedError):
        result.get()
    wait_until(lambda: worker.lines("revoked.left") == ["revoked"])
    wait_until(lambda: worker.control("stats")["pool"]["in-flight"] == 0)
    assert result.state == "REVOKED"
    assert worker.lines(f"{result.id}.signals") == ["revoked True"]


def test_a_revoked_task_that_returns_a_value_succeeds(worker: Worker) -> None:
    result = worker.start("kept", task="keep")
    worker.control("revoke", task_id=result.id, terminate=True)
    wait_until(lambda: result.state == "SUCCESS")
    assert result.get() == "kept after revoked"
    wait_until(worker.is_idle)


def test_the_pool_grows_and_shrinks_by_remote_control(worker: Worker) -> None:
    results = [worker.start(f"sized{n}") for n in range(4)]
    fifth = worker.send("wait", "sized4")
    assert "busy" in worker.control("pool_shrink", n=1)["error"]
    assert "ok" in worker.control("pool_grow", n=1)
    worker.until("sized4.started")
    for n in range(5):
        worker.path(f"sized{n}.go").touch()
    assert [r.get() for r in [*results, fifth]] == [f"sized{n}" for n in range(5)]
    wait_until(lambda: worker.control("stats")["pool"]["in-flight"] == 0)
    assert "ok" in worker.control("pool_shrink", n=1)
    assert worker.control("stats")["pool"]["max-concurrency"] == 4


def test_time_limits(worker: Worker) -> None:
    soft = worker.send("wait", "soft", soft_time_limit=0.1)
    hard = worker.send("wait", "hard", time_limit=0.1)
    with pytest.raises(SoftTimeLimitExceeded):
        soft.get()
    with pytest.raises(TimeLimitExceeded):
        hard.get()
    wait_until(lambda: worker.lines("soft.left") == worker.lines("hard.left") == ["timeout"])
    wait_until(lambda: worker.control("active") == [])


def test_a_full_worker_takes_nothing_and_a_free_slot_is_filled_at_once(worker: Worker) -> None:
    """With prefetching disabled Celery looks for messages when its loop turns: the end of a job must turn it."""
    wait_until(worker.is_idle)
    results = [worker.start(f"full{n}") for n in range(4)]
    queue = broker.queue_key(0)
    wait_until(lambda: worker.unacknowledged() == 0)
    results += [worker.send("wait", f"full{n}") for n in range(4, 20)]
    assert worker.control("reserved") == []
    assert worker.client.llen(queue) == 16
    latencies = []
    for n in range(16):
        worker.path(f"full{n}.go").touch()
        worker.until(f"full{n}.left")
        ended = time.time()
        worker.until(f"full{n + 4}.started")
        latencies.append(float(worker.lines(f"full{n + 4}.started")[0]) - ended)
        results[n].get()
    # Else each would take any part of a second. The machine may be busy in a few of them.
    assert sorted(latencies)[10] < 0.3, latencies
    for n in range(16, 20):
        worker.path(f"full{n}.go").touch()
    assert [r.get() for r in results] == [f"full{n}" for n in range(20)]


# -- shutdown ----------------------------------------------------------------------------------------------------------


def test_a_warm_shutdown_waits_stores_results_and_acknowledges_meanwhile(new_worker: Callable[..., Worker]) -> None:
    worker = new_worker(concurrency=3).ready()
    short, long = worker.start("short", task="wait_late"), worker.start("long", task="wait_late")
    wait_until(lambda: worker.unacknowledged() == 2)
    worker.process.send_signal(signal.SIGTERM)
    wait_until(lambda: "Warm shutdown" in worker.log.read_text())
    worker.process.send_signal(signal.SIGTERM)  # a second one changes nothing
    worker.path("short.go").touch()
    assert short.get() == "short"
    wait_until(lambda: worker.unacknowledged() == 1)
    assert worker.process.poll() is None
    worker.path("long.go").touch()
    assert worker.end() == 0
    assert long.get() == "long"
    assert worker.unacknowledged() == 0
    assert worker.lines("long.left") == ["None"]
    assert worker.lines("lifespan") == ["entered", "exited"]


def test_a_cold_shutdown_cancels_and_cleans_up(new_worker: Callable[..., Worker]) -> None:
    worker = new_worker().ready()
    cold, kept = worker.start("cold"), worker.start("kept", task="keep")
    wait_until(lambda: worker.unacknowledged() == 0)
    began = time.monotonic()
    worker.process.send_signal(signal.SIGQUIT)
    worker.end()
    assert time.monotonic() - began < 20, "nobody ends them"
    assert worker.lines("cold.left") == worker.lines("kept.left") == ["shutdown"]
    assert kept.get() == "kept after shutdown"
    assert cold.state == "RETRY"  # Celery's word for what a cold shutdown cancelled
    assert worker.lines("lifespan") == ["entered", "exited"]
    assert "Traceback" not in worker.log.read_text()


def test_a_second_interrupt_turns_a_warm_shutdown_into_a_cold_one(new_worker: Callable[..., Worker]) -> None:
    worker = new_worker().ready()
    worker.start("interrupted")
    unclaimed = worker.send("claim", "unclaimed")
    worker.until("unclaimed.claiming")
    worker.process.send_signal(signal.SIGINT)
    wait_until(lambda: "Hitting Ctrl+C again" in worker.log.read_text())
    assert worker.lines("interrupted.left") == []
    worker.process.send_signal(signal.SIGINT)
    worker.path("unclaimed.claim").touch()
    worker.end()
    assert worker.lines("interrupted.left") == ["shutdown"]
    assert worker.lines("unclaimed.started") == []
    assert worker.lines("unclaimed.dropped") == ["shutdown"]
    assert worker.lines("lifespan") == ["entered", "exited"]
    # What had not been accepted went back to the queue, for another worker.
    assert worker.client.llen(broker.queue_key(0)) == 1
    assert unclaimed.state == "PENDING"


def test_sigquit_in_a_warm_shutdown_makes_it_cold(new_worker: Callable[..., Worker]) -> None:
    worker = new_worker().ready()
    worker.start("drained")
    worker.process.send_signal(signal.SIGTERM)
    wait_until(lambda: "Warm shutdown" in worker.log.read_text())
    worker.process.send_signal(signal.SIGQUIT)
    worker.end()
    assert worker.lines("drained.left") == ["shutdown"]
    assert worker.lines("lifespan") == ["entered", "exited"]


def test_a_lifespan_that_fails_keeps_the_worker_from_starting(new_worker: Callable[..., Worker]) -> None:
    worker = new_worker(POOL_TEST_BROKEN="1")
    assert worker.end() == 1
    assert "the gateway is not there" in worker.log.read_text()


# -- trouble with the broker -------------------------------------------------------------------------------------------


def test_a_restart_of_redis_under_running_jobs(own_redis: RedisServer, tmp_path: Path) -> None:
    """Twenty run, and one message is still unacknowledged: it is acknowledged late, after Redis has gone and come."""
    worker = Worker(tmp_path, own_redis.url, concurrency=30, POOL_TEST_TRANSPORT=transport.NAME)
    try:
        worker.ready()
        results = [worker.send("wait", f"job{n}") for n in range(20)]
        for n in range(20):
            worker.until(f"job{n}.started")
        late = worker.start("held", task="wait_late")
        own_redis.stop(signal.SIGKILL)
        wait_until(lambda: "Trying again" in worker.log.read_text())
        for n in range(10):
            worker.path(f"job{n}.go").touch()  # these end while Redis is away
            worker.until(f"job{n}.left")
        own_redis.start()
        for n in range(10, 20):
            worker.path(f"job{n}.go").touch()
        wait_until(lambda: all(r.state == "SUCCESS" for r in results), timeout=30)
        assert worker.send("add", 1, 1).get() == 2
        worker.path("held.go").touch()
        assert late.get() == "held"
        assert len(worker.lines("held.started")) == 1
        assert worker.send("add", 2, 2).get() == 4
        assert [len(worker.lines(f"job{n}.started")) for n in range(20)] == [1] * 20
        wait_until(worker.is_idle)
        assert worker.process.poll() is None
    finally:
        worker.close()
