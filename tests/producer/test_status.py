"""``rollouts status``: what workers report, in one view that says what needs attention."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
import redis
from rich.console import Console
from typer.testing import CliRunner

from producer import broker
from producer.cli import app
from producer.counts import FleetCounts, QueueCounts
from producer.status import FleetStatus
from producer.worker_report import span

TUNNEL = {"gateway_url": "http://gw:8080", "tunnel_id": "t-1", "alive": True, "generation": 1, "rollouts": 9}


def worker(name: str = "w1@a", **fields: Any) -> dict[str, Any]:
    base = {"name": name, "concurrency": 100, "running": 98, "state": "running", "phases": {"agent": 90, "sandbox": 8}}
    return base | {"breaker": {"state": "closed", "kind": None, "seconds": 0, "systems": {}}} | fields


def opened(state: str = "open", seconds: float = 12.0, words: str | None = "cannot\nconnect") -> dict[str, Any]:
    system = {"state": state, "failures": 10, "opened": 1, "last_error": words, "last_error_at": time.time()}
    breaker = {"state": state, "kind": "gateway", "seconds": seconds, "systems": {"gateway": system}}
    return {"state": "paused", "running": 12, "breaker": breaker}


def shown(status: FleetStatus, width: int = 120) -> str:
    console = Console(width=width, record=True, file=None, force_terminal=False)
    with console.capture() as captured:
        status.show(console)
    return captured.get()


def status_of(
    *workers: dict[str, Any], queues: dict[str, QueueCounts] | None = None, parked: int = 0, **fields: Any
) -> FleetStatus:
    return FleetStatus("redis://r:6379/0", list(workers), FleetCounts(queues or {}, parked), **fields)


def row(text: str, first: str) -> list[str]:
    """Return the cells of the row that begins with ``first``."""
    line = next(line for line in text.splitlines() if line.split()[:1] == [first])
    return line.split()


def test_the_counts_are_in_one_place() -> None:
    queue = QueueCounts(pending=1203, delayed=40, running=196, messages=(3, 1200, 0, 0))
    status = status_of(worker(), worker("w2@b"), queues={"rollouts": queue}, maintenance=1, parked=7)
    text = shown(status)
    assert row(text, "running")[1:5] == ["196", "of", "200", "slots"]
    assert "16 in sandbox · 180 in agent" in text, "in the order of the phases, over all workers"
    assert "priority 0: 3 · priority 3: 1,200 · maintenance: 1" in text
    assert row(text, "queued")[1] == "1,203"
    assert row(text, "delayed")[1] == "40"
    assert row(text, "parked")[1] == "7"
    assert "!" not in text, "nothing needs attention"


def test_a_worker_is_a_row_with_state_slots_lag_and_breaker() -> None:
    now = time.time()
    lag = {"last": 1.0, "p50": 1.0, "p99": 3.21, "max": 9.0}
    text = shown(status_of(worker(loop_lag_ms=lag, started_at=now - 300), worker("w2@b", **opened()), now=now))
    assert row(text, "w1@a") == ["w1@a", "running", "98", "100", "3.2", "ms", "closed", "5", "min"]
    assert " ".join(row(text, "w2@b")) == "w2@b paused 12 100 - open for gateway, tries in 12 s -"


def test_an_open_breaker_says_why_and_when_it_tries_again() -> None:
    (line,) = status_of(worker(**opened())).attention
    assert line == (
        "w1@a takes no rollouts, tries one in 12 s: its gateway failed 10 times in a row; last: cannot connect"
    )
    (line,) = status_of(worker(**opened("probing", 0.0, None))).attention
    assert line == "w1@a takes no rollouts, is trying one now: its gateway failed 10 times in a row"


def test_tunnels_are_listed_and_one_that_is_down_is_told_first() -> None:
    down = TUNNEL | {"alive": False, "tunnel_id": None, "generation": 3, "last_error": "frpc:\n EOF"}
    starting = TUNNEL | {"alive": False, "tunnel_id": None, "generation": 0, "last_error": None}
    status = status_of(worker(tunnels=[TUNNEL]), worker("w2@b", tunnels=[down]), worker("w3@c", tunnels=[starting]))
    assert status.attention == ["w2@b: its tunnel to http://gw:8080 is down: frpc: EOF"]
    text = shown(status)
    assert text.startswith("! w2@b: its tunnel")
    states = [line.split()[-1] for line in text.splitlines() if "http://gw:8080" in line and not line.startswith("!")]
    assert states == ["alive", "down", "starting"]


def test_a_loop_that_was_blocked_is_told_with_who_did_it_while_it_is_fresh() -> None:
    last = {"hook": "Math.score", "rollout_id": "r-7", "seconds": 61.2, "ago": 40.0}
    blocked = {"count": 3, "seconds": 70.0, "last": last}
    (line,) = status_of(worker(loop_blocked=blocked)).attention
    assert line == "w1@a: its event loop was blocked for 61.2 s by Math.score of r-7, 40 s ago (3 times so far)"
    assert status_of(worker(loop_blocked=blocked | {"last": last | {"ago": 3600}})).attention == []
    (line,) = status_of(worker(loop_lag_ms={"p99": 912.0})).attention
    assert "is late by 912 ms" in line


def test_leaks_lapsed_leases_a_hung_worker_and_a_drain_are_told() -> None:
    assert status_of(worker(state="hung")).attention[0].startswith("w1@a hangs: it has given up what it ran")
    lapsed = {"rollouts": QueueCounts(lapsed=1)}
    lines = status_of(worker("w2@b"), worker(state="draining", running=7), queues=lapsed, leaked=2).attention
    assert lines[0] == "w1@a is shutting down and takes nothing new; 7 rollouts left"
    assert "1 rollout lost the worker" in lines[1]
    assert lines[2].endswith("rollouts leaks")


def test_each_queue_is_a_row_and_one_that_nobody_serves_is_told_first() -> None:
    queues = {
        "rollouts": QueueCounts(running=4, oldest=0.0),
        "gpu": QueueCounts(pending=12, delayed=1, oldest=300.0),
        "cpu": QueueCounts(pending=2, running=9),
    }
    serving = worker("w1@a", queues=["rollouts", "cpu"]), worker("w2@b", queues=["cpu"])
    status = status_of(*serving, worker("w3@c", queues=["gpu"], state="draining"), queues=queues)
    assert status.unserved == {"gpu": 13}, "one that shuts down takes nothing"
    assert status.attention[0] == (
        "13 rollouts wait in queue gpu, which no worker serves; start one with: ROLLOUTS_QUEUES=gpu rollouts worker"
    )
    text = shown(status)
    assert row(text, "gpu") == ["gpu", "0", "12", "1", "0", "0", "5", "min"]
    assert row(text, "cpu") == ["cpu", "2", "2", "0", "9", "0", "-"]
    told = status.as_dict()["queues"]["gpu"]
    assert (told["workers"], told["pending"], told["oldest_queued_seconds"]) == (0, 12, 300.0)


def test_a_queue_that_is_served_and_empty_is_shown_and_no_worker_at_all_is_told_once() -> None:
    queues = {"rollouts": QueueCounts(pending=3), "gpu": QueueCounts()}
    assert status_of(queues=queues).attention == ["no worker is alive; start one with: rollouts worker"]
    status = status_of(worker(), worker("w2@b", queues=["gpu"]), queues=queues)
    assert status.attention == [], "a worker that does not tell serves the default one"
    assert row(shown(status), "gpu")[:3] == ["gpu", "1", "0"]


def test_without_workers_it_says_how_to_start_one() -> None:
    assert shown(status_of()).startswith("! no worker is alive; start one with: rollouts worker")


@pytest.mark.parametrize(
    "report",
    [
        {
            "tunnels": "none",
            "phases": [1],
            "breaker": "open",
            "loop_lag_ms": {"p99": None},
            "loop_blocked": {"last": 3},
        },
        {"tunnels": [None, {}], "phases": {"agent": None, "odd": 2}, "breaker": {"state": "open"}, "concurrency": "x"},
        {"name": ["x"], "state": None, "started_at": "yesterday", "breaker": {"state": "half", "systems": [1]}},
        {"state": "[bold]", "breaker": {"state": "open", "kind": "[red]", "seconds": "x", "systems": {"[red]": {}}}},
    ],
)
def test_a_report_of_another_version_is_shown_as_far_as_it_can_be_read(report: dict[str, Any]) -> None:
    status = status_of({"name": "w1@a"} | report, now=time.time())
    assert "workers" in shown(status, width=60)
    assert json.dumps(status.as_dict())


def test_json_is_complete_and_a_worker_cannot_give_itself_another_name(redis_url: str) -> None:
    client = redis.Redis.from_url(redis_url)
    now = time.time() * 1000
    report = worker(tunnels=[TUNNEL], **opened()) | {"name": "else", "environments": ["command"]}
    client.zadd(broker.WORKERS, {"w1@a": now + 60_000})
    client.set(broker.worker_key("w1@a"), json.dumps(report))
    client.zadd(broker.PENDING, {"a": 1})
    ended = CliRunner().invoke(app, ["status", "--json", "--redis-url", redis_url])
    client.close()
    assert ended.exit_code == 0
    found = json.loads(ended.stdout)
    assert found["workers"] == [report | {"name": "w1@a"}]
    assert (found["pending"], found["running"], found["phases"]) == (1, 0, {"agent": 90, "sandbox": 8})
    assert found["attention"][0].startswith("w1@a takes no rollouts")


def test_lengths_of_time_are_said_as_a_person_says_them() -> None:
    assert [span(s) for s in (-1, 0.4, 119, 300, 7300, 200_000)] == ["0 s", "0 s", "119 s", "5 min", "2.0 h", "2.3 d"]
