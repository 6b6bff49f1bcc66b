"""What dies and comes back: workers killed and stopped, Redis restarted, no beat at all."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import redis
from chaos.proxy import Proxy
from fleets import lean
from submitting import requests, results_of
from support import RedisServer, wait_until

from producer import RolloutRequest, RolloutResult, broker
from producer.contract import ErrorKind, StopCondition
from workers.local import LocalStack, StackOptions

TTL = 3.0  #: longer than a busy machine stops a worker: where nobody dies, none may lapse
#: Seconds that may be added to a recovery where a machine is busy.
BUSY = 6.0


@contextmanager
def fleet(tmp_path: Path, **options: Any) -> Iterator[LocalStack]:
    settings = {"ROLLOUTS_LEASE_TTL": str(TTL), **options.pop("more_settings", {})}
    options = lean() | options
    with LocalStack(StackOptions(log_dir=tmp_path / "logs", settings=settings, **options)) as stack:
        yield stack


def worker_pid(stack: LocalStack, name: str) -> int:
    return next(child.process.pid for child in stack._children if child.name == name)


def announced(url: str, results: list[RolloutResult]) -> Counter[str]:
    client = redis.Redis.from_url(url)
    entries = client.xrange(broker.stream_key(results[0].batch_id))
    return Counter(fields[b"id"].decode() for _, fields in entries)


def test_a_sigkilled_workers_20_rollouts_start_again_within_one_and_a_half_ttls(tmp_path: Path, agents: Any) -> None:
    with fleet(tmp_path, workers=1, concurrency=40) as stack:
        restarted: list[float] = []
        orphans: list[psutil.Process] = []

        def kill_it() -> None:
            wait_until(lambda: len(agents.starts()) == 20)
            client = redis.Redis.from_url(stack.redis_url)
            stack._start_workers()
            wait_until(lambda: client.zcard(broker.WORKERS) == 2, what="a second worker")
            process = psutil.Process(worker_pid(stack, "worker1"))
            orphans.extend(p for p in process.children(recursive=True) if "reaper" not in " ".join(p.cmdline()))
            killed = time.monotonic()
            os.kill(process.pid, signal.SIGKILL)
            process.wait(20)
            wait_until(lambda: len(agents.starts()) == 40, what="the 20 rollouts to start again")
            restarted.append(time.monotonic() - killed)
            agents.release()

        results = results_of(stack.redis_url, requests(20, run_command=agents.command()), kill_it)

        assert len({r.rollout_id for r in results}) == len(results) == 20
        assert {r.stop_condition for r in results} == {StopCondition.COMPLETED}
        assert set(announced(stack.redis_url, results).values()) == {1}
        assert {r.attempt for r in results} == {2}
        assert restarted[0] < 1.5 * TTL + BUSY, f"recovery took {restarted[0]:.2f} s"
        assert orphans
        wait_until(lambda: not any(p.is_running() for p in orphans), what="the dead worker's agents to be ended")


def test_redis_restarts_under_100_running_rollouts_and_each_runs_once(
    tmp_path: Path, own_redis: RedisServer, agents: Any
) -> None:
    with fleet(tmp_path, concurrency=120, redis_url=own_redis.url) as stack:

        def restart() -> None:
            wait_until(lambda: len(agents.starts()) == 100, timeout=80, what="100 running agents")
            client = redis.Redis.from_url(own_redis.url)
            wait_until(lambda: client.zcard(broker.RUNNING) == 100)
            own_redis.stop(signal.SIGTERM)
            own_redis.start()
            # One whole lease later, the leases must have been renewed and not been taken for lapsed.
            back = client.time()[0]
            wait_until(lambda: client.time()[0] >= back + TTL + 1)
            agents.release()

        results = results_of(stack.redis_url, requests(100, run_command=agents.command()), restart)

        assert len({r.rollout_id for r in results}) == len(results) == 100
        assert {(r.stop_condition, r.attempt) for r in results} == {(StopCondition.COMPLETED, 1)}
        assert set(Counter(agents.starts()).values()) == {1}, "each ran once"

        after = results_of(stack.redis_url, requests(5, run_command="true"))
        assert len(after) == 5, "the worker goes on consuming"


def test_a_redis_outage_of_more_than_a_ttl_costs_no_running_rollout_and_the_worker_goes_on_consuming(
    tmp_path: Path, own_redis: RedisServer, agents: Any
) -> None:
    """Every lease has lapsed when Redis is back: they are renewed, for nobody may believe it for one TTL more."""
    with fleet(tmp_path, concurrency=30, redis_url=own_redis.url) as stack:

        def outage() -> None:
            wait_until(lambda: len(agents.starts()) == 20, timeout=80, what="20 running agents")
            client = redis.Redis.from_url(own_redis.url)
            wait_until(lambda: client.zcard(broker.RUNNING) == 20)
            own_redis.stop(signal.SIGTERM)
            over = time.monotonic() + 1.2 * TTL
            wait_until(lambda: time.monotonic() > over, what="the end of the outage")
            own_redis.start()
            back = client.time()[0]
            wait_until(lambda: client.time()[0] >= back + 1.5 * TTL, what="the time in which they might be taken away")
            agents.release()

        results = results_of(stack.redis_url, requests(20, run_command=agents.command()), outage)

        assert len({r.rollout_id for r in results}) == len(results) == 20
        assert {(r.stop_condition, r.attempt) for r in results} == {(StopCondition.COMPLETED, 1)}
        assert set(Counter(agents.starts()).values()) == {1}, "each ran once"

        after = results_of(stack.redis_url, requests(5, run_command="true"))
        assert {r.stop_condition for r in after} == {StopCondition.COMPLETED}
        assert len(after) == 5, "the worker goes on consuming"


#: How a server that answers takes no writes, and how it does again.
REFUSALS = {
    "full": ("CONFIG SET maxmemory 1", "CONFIG SET maxmemory 0"),
    "too few replicas": ("CONFIG SET min-replicas-to-write 1", "CONFIG SET min-replicas-to-write 0"),
    "fails over": ("REPLICAOF 127.0.0.1 1", "REPLICAOF NO ONE"),
}


@pytest.mark.parametrize("refusal", REFUSALS)
def test_a_redis_that_takes_no_writes_for_more_than_a_ttl_costs_no_rollout_and_no_result(
    tmp_path: Path, own_redis: RedisServer, agents: Any, refusal: str
) -> None:
    """Leases lapse meanwhile, and results wait: those of what ends then, and whoever waits for them."""
    refuse, take = REFUSALS[refusal]
    ends_now = agents.directory / "now"
    ends = f"echo x >> {agents.directory}/started; until [ -e {ends_now} ]; do sleep 0.05; done"
    with fleet(tmp_path, workers=2, concurrency=20, redis_url=own_redis.url, beat=True) as stack:
        wanted = requests(15, run_command=agents.command()) + requests(10, run_command=ends)

        def outage() -> None:
            client = redis.Redis.from_url(own_redis.url)
            wait_until(lambda: len(agents.starts()) == 25, timeout=80, what="25 running agents")
            client.execute_command(*refuse.split())
            ends_now.touch()
            over = time.monotonic() + 1.2 * TTL
            wait_until(lambda: time.monotonic() > over, what="the end of the outage")
            client.execute_command(*take.split())
            back = time.monotonic() + 1.4 * TTL
            wait_until(lambda: time.monotonic() > back, what="the time in which they might be taken away")
            agents.release()

        results = results_of(stack.redis_url, wanted, outage)
        assert {(r.stop_condition, r.attempt) for r in results} == {(StopCondition.COMPLETED, 1)}
        assert len({r.rollout_id for r in results}) == len(results) == len(agents.starts()) == 25
        after = results_of(stack.redis_url, requests(20, run_command="true"))
        assert len(after) == 20, "the workers go on consuming"
        stack.check()


def test_a_worker_whose_connection_is_cut_while_it_waits_for_messages_is_not_deaf_afterwards(
    tmp_path: Path, own_redis: RedisServer
) -> None:
    """redis-py must not reconnect behind kombu's back: then nobody would ask for messages on the new connection."""
    proxy = Proxy(own_redis.port)
    proxy.start()
    try:
        with fleet(tmp_path, concurrency=10, redis_url=f"redis://127.0.0.1:{proxy.port}/0") as stack:
            cut: set[str] = set()
            for _ in range(3):
                wait_until(lambda: asking(own_redis) - cut, timeout=30, what="it to ask for messages again")
                cut.update(asking(own_redis))
                proxy.cut()
            results = results_of(own_redis.url, requests(3, run_command="true"))
            assert {r.stop_condition for r in results} == {StopCondition.COMPLETED}
            stack.check()
    finally:
        proxy.stop()


def asking(server: RedisServer) -> set[str]:
    """Return the ids of the connections on which somebody waits for messages now."""
    clients = server.client.client_list()
    return {client["id"] for client in clients if client["cmd"] == "brpop" and "b" in client["flags"]}


def test_a_rollout_that_kills_its_worker_every_time_ends_and_harms_no_other(tmp_path: Path) -> None:
    """Its agent kills the worker; each death spends an attempt, and somebody starts the worker again."""
    with fleet(tmp_path, workers=1, concurrency=10) as stack:
        pid_file = tmp_path / "pid"
        pid_file.write_text(str(worker_pid(stack, "worker1")))
        # It may be there before the next worker's number is.
        kill = f"until kill -9 $(cat {pid_file}); do sleep 0.05; done; sleep 60"
        killer = RolloutRequest.parse({"model": "m", "example_id": "killer", "max_attempts": 2, "run_command": kill})
        others = requests(3, run_command="sleep 0.2")

        def restart() -> None:
            for _ in range(2):
                child = [child for child in stack._children if child.name.startswith("worker")][-1]
                child.process.wait(30)
                before = len(stack._children)
                stack._start_workers()
                pid_file.write_text(str(stack._children[before].process.pid))

        results = results_of(stack.redis_url, [killer, *others], restart)

        by_example = {r.example_id: r for r in results}
        error = by_example["killer"].error
        assert error is not None
        assert error.kind is ErrorKind.LEASE
        assert (error.detail or "").count("stopped renewing its lease") == 2
        assert [by_example[n].stop_condition for n in range(3)] == [StopCondition.COMPLETED] * 3


def test_a_worker_that_was_stopped_for_longer_than_its_lease_gives_its_rollouts_up(tmp_path: Path, agents: Any) -> None:
    with fleet(tmp_path, workers=1, concurrency=10) as stack:

        def stop_it() -> None:
            wait_until(lambda: len(agents.starts()) == 6)
            stack._start_workers()
            client = redis.Redis.from_url(stack.redis_url)
            wait_until(lambda: client.zcard(broker.WORKERS) == 2, what="a second worker")
            os.kill(worker_pid(stack, "worker1"), signal.SIGSTOP)
            wait_until(lambda: len(agents.starts()) == 12, what="its rollouts to start elsewhere")
            os.kill(worker_pid(stack, "worker1"), signal.SIGCONT)
            log = tmp_path / "worker1-first.log"
            wait_until(lambda: log.read_text().count("lost, ending it") == 6, what="it to notice")
            agents.release()

        # The second worker logs to a file of the same name.
        first = stack.logs["worker1"]
        first.rename(tmp_path / "worker1-first.log")
        results = results_of(stack.redis_url, requests(6, run_command=agents.command()), stop_it)

        assert len({r.rollout_id for r in results}) == len(results) == 6
        assert {r.attempt for r in results} == {2}
        assert set(announced(stack.redis_url, results).values()) == {1}


def test_a_cold_shutdown_hands_running_rollouts_over_without_spending_an_attempt(tmp_path: Path, agents: Any) -> None:
    with fleet(tmp_path, workers=2, concurrency=10) as stack:

        def quit_one() -> None:
            wait_until(lambda: len(agents.starts()) == 6)
            process = psutil.Process(worker_pid(stack, "worker1"))
            os.kill(process.pid, signal.SIGQUIT)
            process.wait(20)
            agents.release()

        once = requests(6, run_command=agents.command(), max_attempts=1)
        results = results_of(stack.redis_url, once, quit_one)

        assert {r.stop_condition for r in results} == {StopCondition.COMPLETED}
        assert len(results) == 6


def test_a_warm_shutdown_lets_running_rollouts_finish(tmp_path: Path, agents: Any) -> None:
    with fleet(tmp_path, workers=1, concurrency=10) as stack:

        def terminate() -> None:
            wait_until(lambda: len(agents.starts()) == 3)
            process = psutil.Process(worker_pid(stack, "worker1"))
            os.kill(process.pid, signal.SIGTERM)
            log = stack.logs["worker1"]
            wait_until(lambda: "Warm shutdown" in log.read_text())
            assert process.is_running()
            agents.release()
            process.wait(20)

        results = results_of(stack.redis_url, requests(3, run_command=agents.command()), terminate)
        assert {(r.stop_condition, r.attempt) for r in results} == {(StopCondition.COMPLETED, 1)}


@pytest.mark.parametrize("signals", [1, 2])
def test_a_drain_that_takes_too_long_hands_over_without_spending_an_attempt_and_exits_0(
    tmp_path: Path, agents: Any, signals: int
) -> None:
    """With one SIGTERM after `drain_timeout`, with a second one at once."""
    timeout = {"ROLLOUTS_DRAIN_TIMEOUT": "5" if signals == 1 else "60"}
    with fleet(tmp_path, workers=1, concurrency=10, more_settings=timeout) as stack:
        codes: list[int] = []

        def drain_one() -> None:
            wait_until(lambda: len(agents.starts()) == 6)
            child = next(child for child in stack._children if child.name == "worker1")
            client = redis.Redis.from_url(stack.redis_url)
            stack._start_workers()
            wait_until(lambda: client.zcard(broker.WORKERS) == 2, what="a second worker")
            status = broker.worker_key(psutil.Process(child.process.pid).cmdline()[5])
            os.kill(child.process.pid, signal.SIGTERM)
            if signals == 2:
                wait_until(lambda: b'"draining"' in (client.get(status) or b""), what="the report to say so")
                os.kill(child.process.pid, signal.SIGTERM)
            codes.append(child.process.wait(40))
            agents.release()

        once = requests(6, run_command=agents.command(), max_attempts=1)
        results = results_of(stack.redis_url, once, drain_one)

        assert codes == [0]
        assert {r.stop_condition for r in results} == {StopCondition.COMPLETED}
        assert len(results) == 6
        handed_over = [attempt for r in results for attempt in r.failed_attempts]
        assert len(handed_over) == 6
        assert {(a.counted, a.error.kind) for a in handed_over} == {(False, ErrorKind.LEASE)}


def test_lapsed_leases_are_requeued_without_beat_and_while_every_slot_is_taken(tmp_path: Path, agents: Any) -> None:
    with fleet(tmp_path, workers=1, concurrency=3) as stack:
        assert "beat" not in stack.logs

        def lose_one() -> None:
            wait_until(lambda: len(agents.starts()) == 3)
            client = redis.Redis.from_url(stack.redis_url)
            # A rollout of a worker that is gone: the record says running, and nobody renews it.
            request = requests(1, run_command="true")[0].model_copy(update={"rollout_id": "lost", "batch_id": "lost"})
            record = {"request": request.to_json(), "state": "running", "attempt": 1, "spent": 1, "max_attempts": 3}
            record |= {"batch": "lost", "priority": 0, "worker": "gone@host"}
            client.hset(broker.job_key("lost"), mapping=record)
            client.zadd(broker.RUNNING, {"lost": 1})
            wait_until(lambda: client.hget(broker.job_key("lost"), "state") == b"pending")
            assert client.llen(broker.queue_key(0)) == 1
            agents.release()
            wait_until(lambda: client.hget(broker.job_key("lost"), "state") == b"done")

        results = results_of(stack.redis_url, requests(3, run_command=agents.command()), lose_one)
        assert len(results) == 3
