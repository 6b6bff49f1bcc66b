"""The operators' commands on real records: ``rollouts ps``, ``cancel``, ``retry``, ``logs``, and the live view."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import orjson
import pytest
import redis
from typer.testing import CliRunner

from producer import Producer, RolloutRequest, StopCondition, broker
from producer import operator_cli as _commands  # noqa: F401 - registers them
from producer.cli import app
from producer.counts import FleetCounts, QueueCounts
from producer.settings import ProducerSettings
from producer.status import FleetStatus
from producer.watch import Rates


class Fleet:
    """Records in every state, without a worker."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.client = redis.Redis.from_url(url)
        self.claim_script = self.client.register_script(broker.script("workers", "claim"))
        self.commit_script = self.client.register_script(broker.script("workers", "commit"))

    def submit(self, *rollout_ids: str, **fields: Any) -> None:
        async def act() -> None:
            async with Producer(ProducerSettings(redis_url=self.url)) as producer:
                requests = [RolloutRequest(rollout_id=i, model="m", **fields) for i in rollout_ids]
                await producer.connection.submit(requests)

        asyncio.run(act())

    def claim(self, rollout_id: str, worker: str = "w1@a", lease_ms: int = 60_000) -> int:
        args = [rollout_id, worker, lease_ms, 1000, "", b"message", ""]
        return int(self.claim_script(keys=[broker.job_key(rollout_id)], args=args)[1])

    def end(self, rollout_id: str, attempt: int, batch: str = "default", outcome: str = "has_error") -> None:
        keys = [broker.job_key(rollout_id), broker.stream_key(batch), broker.result_key(rollout_id)]
        args = [rollout_id, attempt, outcome, 1000, b"the result", "owned"]
        assert self.commit_script(keys=[*keys, broker.LEDGER], args=args) == 1

    def delay(self, rollout_id: str) -> None:
        self.client.zrem(broker.PENDING, rollout_id)
        self.client.zadd(broker.DELAYED, {rollout_id: 10**14})

    def report(self, worker: str, **runs: Any) -> None:
        self.client.zadd(broker.WORKERS, {worker: 10**14})
        self.client.set(broker.worker_key(worker), orjson.dumps({"name": worker}))
        self.client.set(broker.worker_runs_key(worker), orjson.dumps(runs))

    def run(self, *arguments: str) -> Any:
        return CliRunner().invoke(app, [*arguments, "--redis-url", self.url])

    def json(self, *arguments: str) -> Any:
        return json.loads(self.run(*arguments, "--json").stdout)

    def queued(self) -> int:
        return sum(self.client.llen(key) for key in broker.queue_keys())

    def state(self, rollout_id: str) -> str:
        return (self.client.hget(broker.job_key(rollout_id), "state") or b"").decode()


@pytest.fixture
def fleet(redis_url: str) -> Iterator[Fleet]:
    fleet = Fleet(redis_url)
    yield fleet
    fleet.client.close()


# -- ps ----------------------------------------------------------------------------------------------------------------


def test_ps_lists_what_has_not_ended_with_phase_and_worker(fleet: Fleet) -> None:
    fleet.submit("runs", "lost", "later", "waits", "over", batch_id="b1", group_id="g1")
    fleet.claim("runs")
    fleet.claim("lost", "w2@a", lease_ms=-1000)
    fleet.end("over", fleet.claim("over"), "b1")
    fleet.delay("later")
    fleet.report("w1@a", runs=[1, "agent", 0])

    found = {one["rollout_id"]: one for one in fleet.json("ps")["rollouts"]}

    states = {rollout_id: one["where"] for rollout_id, one in found.items()}
    assert states == {"runs": "running", "lost": "lapsed", "later": "delayed", "waits": "pending"}
    assert (found["runs"]["phase"], found["runs"]["worker"], found["runs"]["attempt"]) == ("agent", "w1@a", 1)
    assert found["runs"]["phase_age"] > 1e9
    assert (found["waits"]["phase"], found["waits"]["worker"], found["waits"]["attempt"]) == (None, "", 0)
    shown = fleet.run("ps").stdout
    assert all(rollout_id in shown for rollout_id in found)
    assert "over" not in shown


def test_ps_takes_what_is_asked_for_and_says_when_there_are_more(fleet: Fleet) -> None:
    fleet.submit("a1", "a2", batch_id="a", group_id="g1")
    fleet.submit("b1", batch_id="b", group_id="g2")
    fleet.claim("a1")

    def ids(*options: str) -> list[str]:
        return [one["rollout_id"] for one in fleet.json("ps", *options)["rollouts"]]

    assert ids("--batch", "a") == ["a1", "a2"]
    assert ids("--group", "g2") == ["b1"]
    assert ids("--worker", "w1") == ids("--worker", "w1@a") == ids("--state", "running") == ["a1"]
    assert fleet.json("ps", "--limit", "1")["more"]
    assert not fleet.json("ps", "--limit", "3")["more"]
    assert fleet.run("ps", "--state", "wrong").exit_code == 2


def test_ps_lists_what_waits_for_something_limited(fleet: Fleet) -> None:
    fleet.submit("r1", "r2")
    fleet.client.zrem(broker.PENDING, "r1")
    fleet.client.sadd(broker.PLACES, "env:math")
    fleet.client.zadd(broker.parked_key("env:math"), {"r1": 1})

    found = fleet.json("ps")["rollouts"]
    assert [(one["rollout_id"], one["where"]) for one in found] == [("r1", "parked"), ("r2", "pending")]


# -- cancel and retry --------------------------------------------------------------------------------------------------


def test_cancel_ends_a_batch_or_a_group_and_what_is_named(fleet: Fleet) -> None:
    fleet.submit("a1", "a2", batch_id="a", group_id="g1")
    fleet.submit("b1", "b2", batch_id="b", group_id="g2")
    fleet.claim("a1")

    assert fleet.json("cancel", "--batch", "a")["rollouts"] == {"a1": "requested", "a2": "cancelled"}
    assert fleet.json("cancel", "b1")["rollouts"] == {"b1": "cancelled"}
    assert fleet.json("cancel", "--group", "g2")["rollouts"] == {"b2": "cancelled"}
    again = fleet.run("cancel", "b1", "unknown")
    assert (again.exit_code, again.stdout) == (1, "done       b1\nunknown    unknown\n")
    assert fleet.run("cancel").exit_code == fleet.run("cancel", "x", "--batch", "a").exit_code == 2


def test_retry_runs_what_has_ended_again_with_all_its_attempts(fleet: Fleet) -> None:
    fleet.submit("failed", "other", batch_id="b", priority=3, max_attempts=2)
    for rollout_id in ("failed", "other"):
        fleet.end(rollout_id, fleet.claim(rollout_id), "b")
    fleet.client.delete(*broker.queue_keys())

    assert fleet.json("retry", "failed")["rollouts"] == {"failed": "retried"}

    record = fleet.client.hgetall(broker.job_key("failed"))
    assert (record[b"state"], record[b"spent"], record[b"attempt"]) == (b"pending", b"0", b"1")
    assert b"outcome" not in record
    assert fleet.client.llen(broker.queue_key(3)) == 1
    assert not fleet.client.exists(broker.result_key("failed"))
    announced = [entry[b"id"] for _, entry in fleet.client.xrange(broker.stream_key("b"))]
    assert announced == [b"other"], "who reads the batch from its beginning waits for the new end"
    assert fleet.claim("failed") == 2, "attempt numbers go on: what is late of the first one cannot end the second"


def test_retry_wakes_what_waits_for_a_delay_and_leaves_the_rest_alone(fleet: Fleet) -> None:
    fleet.submit("later", "waits", "runs")
    fleet.claim("runs")
    fleet.delay("later")
    before = fleet.queued()

    ended = fleet.run("retry", "later", "waits", "runs", "unknown", "--json")

    answers = {"later": "retried", "waits": "pending", "runs": "running", "unknown": "unknown"}
    assert (ended.exit_code, json.loads(ended.stdout)["rollouts"]) == (1, answers)
    assert fleet.queued() == before + 1
    assert fleet.client.zcard(broker.DELAYED) == 0
    assert fleet.client.zscore(broker.PENDING, "later") > 0
    assert fleet.state("runs") == "running"


def test_a_batch_that_was_cancelled_for_good_is_not_retried(fleet: Fleet) -> None:
    fleet.submit("r1", batch_id="b")
    fleet.end("r1", fleet.claim("r1"), "b")
    fleet.client.set(broker.tombstone_key("b"), 1)

    ended = fleet.run("retry", "r1")
    assert (ended.exit_code, ended.stdout, fleet.state("r1")) == (1, "closed     r1\n", "done")


def test_a_cancelled_rollout_that_is_retried_is_not_cancelled_again(fleet: Fleet) -> None:
    fleet.submit("c", batch_id="b")
    attempt = fleet.claim("c")
    fleet.run("cancel", "c")
    fleet.end("c", attempt, "b", StopCondition.CANCELLED)

    assert fleet.json("retry", "c")["rollouts"] == {"c": "retried"}
    assert not fleet.client.hexists(broker.job_key("c"), "cancel")


# -- logs and drain, without a worker that answers ---------------------------------------------------------------------


def test_logs_tell_the_record_where_no_worker_is_left(fleet: Fleet) -> None:
    fleet.submit("r1")
    line = {"attempt": 1, "worker": "w1@a", "error": {"kind": "sandbox", "message": "it died"}}
    fleet.client.hset(broker.job_key("r1"), "history", orjson.dumps(line))

    shown = fleet.run("logs", "r1")
    unknown = fleet.run("logs", "r2")

    assert shown.stdout == "r1: pending, attempt 0\n  attempt 1 on w1@a: sandbox: it died\n"
    assert fleet.json("logs", "r1")["record"]["history"] == [line]
    assert (unknown.exit_code, "no record of r2" in unknown.output) == (1, True)


def test_a_worker_that_is_not_there_cannot_drain(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("producer.operating.PATIENCE", 0.1)
    fleet.report("w1@a")
    fleet.report("w1@b")
    for name in ("nobody@a", "w1", "w1@a"):  # unknown; one of two; silent
        ended = fleet.run("drain", name)
        assert ended.exit_code == 1
        assert f"no living worker named {name} answers; there are: w1@a, w1@b" in ended.output


# -- the live view -----------------------------------------------------------------------------------------------------


def test_rates_are_what_the_counters_of_living_processes_grew_by() -> None:
    def look(now: float, **workers: tuple[str, int, int]) -> FleetStatus:
        reports = [
            {"name": name, "process": process, "attempts": begun, "finished": {"completed": completed}}
            for name, (process, begun, completed) in workers.items()
        ]
        return FleetStatus("redis://r", reports, now=now)

    rates = Rates()
    assert rates.of(look(100, a=("p1", 50, 40))) == {}
    assert rates.of(look(110, a=("p1", 70, 50), b=("p2", 900, 900))) == {"attempts": 2, "completed": 1}
    assert rates.of(look(120, a=("p3", 5, 5))) == {}, "a restart is no leap"


def test_the_view_shows_pools_rates_and_the_oldest() -> None:
    from rich.console import Console

    workers = [{"name": name, "running": 3, "concurrency": 10} for name in ("gpu@a", "gpu@b", "cpu@c")]
    status = FleetStatus("redis://r", workers, FleetCounts({"rollouts": QueueCounts(pending=5, oldest=300)}))
    console = Console(width=120)
    with console.capture() as captured:
        console.print(status.view({"attempts": 2.0, "completed": 1.5, "has_error": 0.0}))
    shown = captured.get()

    assert status.pools == {
        "cpu": {"workers": 1, "running": 3, "slots": 10},
        "gpu": {"workers": 2, "running": 6, "slots": 20},
    }
    assert "the oldest for 5 min" in shown
    assert "queues" not in shown, "there is one"
    assert "2.0 begun" in shown
    assert "1.5 completed" in shown
    assert "has_error" not in shown


def test_watching_prints_an_object_a_line_where_nobody_looks(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = []

    async def sleep(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 2:
            raise KeyboardInterrupt

    fleet.submit("r1")
    monkeypatch.setattr("producer.watch.pause", sleep)
    ended = fleet.run("status", "--watch", "--interval", "0.5", "--json")

    lines = [json.loads(line) for line in ended.stdout.splitlines()]
    assert [line["pending"] for line in lines] == [1, 1]
    assert lines[0]["oldest_queued_seconds"] >= 0
    assert looks == [0.5, 0.5]
    assert ended.exit_code == 0


def test_completion_knows_the_commands_and_the_names_of_workers(fleet: Fleet) -> None:
    fleet.report("w1@a")
    variables = {"_ROLLOUTS_COMPLETE": "complete_bash", "ROLLOUTS_REDIS_URL": fleet.url}

    def complete(*words: str) -> list[str]:
        line = {"COMP_WORDS": " ".join(("rollouts", *words)), "COMP_CWORD": str(len(words))}
        return str(CliRunner().invoke(app, prog_name="rollouts", env=variables | line).stdout).split()

    assert {"drain"} == set(complete("dra"))
    assert complete("drain", "w") == ["w1@a"]
