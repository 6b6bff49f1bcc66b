"""One round of chaos with a fixed seed, in which everything is broken once; `make chaos` goes on for ten minutes."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import redis

from chaos import agents
from chaos.recovery import Recoveries, Recovery
from chaos.scenario import FAULTS, Options, Outcome, brief, passed, report, run
from chaos.script import ACTIONS, PLATFORM_ACTIONS, steps
from producer import RolloutResult, broker
from producer.contract import StopCondition

SEED = 7

pytestmark = [pytest.mark.chaos, pytest.mark.xdist_group("heavy")]


@pytest.mark.timeout(400)  # its own limits are stricter, and say what is late
def test_a_round_of_everything_that_breaks_loses_nothing_and_leaves_nothing() -> None:
    options = brief(SEED)
    numbers = report(options, run(options))
    print(json.dumps(numbers))
    assert {fault: numbers[fault] for fault in FAULTS if numbers[fault]} == {}, f"seed {SEED}"
    assert numbers["results"] == numbers["submitted"] > 20
    assert numbers["scrapes"] > 20
    restarts, done = {"term_redis", "kill_redis"}, numbers["actions"]
    assert {*done} | restarts == {*ACTIONS, *PLATFORM_ACTIONS}
    assert {done[action] for action in {*ACTIONS} - restarts} == {2}, "on each of the systems"
    assert numbers["failed_attempts"]["lease"] > 0
    assert numbers["recovery"]["count"] > 0, "a worker was killed that ran something"


def test_a_seed_fixes_the_script_and_the_agents() -> None:
    def first(seed: str) -> list[object]:
        return list(itertools.islice(steps(seed, platform=True), 300))

    assert first("1") == first("1") != first("2")
    assert {step.action for step in first("1")} == {*ACTIONS, *PLATFORM_ACTIONS}  # type: ignore[attr-defined]
    wanted = [list(itertools.islice(agents.requests(seed, "agent", "token", 1.0), 300)) for seed in ("1", "1", "2")]
    commands = [[request.run_command for request in requests] for requests in wanted]
    assert commands[0] == commands[1] != commands[2]
    assert {request.info["kind"] for request in wanted[0]} == set(agents.KINDS)


def ended(*, attempt: int = 1, kind: str = "quick") -> RolloutResult:
    return RolloutResult(
        rollout_id="one",
        batch_id="batch",
        stop_condition=StopCondition.COMPLETED,
        attempt=attempt,
        worker="worker1",
        info={"kind": kind},
    )


def whole() -> Outcome:
    return Outcome("local", submitted=["one"], results=[ended()], announced=Counter(["one"]), recovery=[Recovery(1.0)])


@pytest.mark.parametrize(
    ("fault", "difference"),
    [
        ("lost", {"submitted": ["one", "two"]}),
        ("duplicates", {"results": [ended(), ended()]}),
        ("announced_twice", {"announced": Counter(["one", "one"])}),
        ("unknown", {"submitted": []}),
        ("leaked", {"leaked": {"sandboxes": ["sbx"]}}),
        ("recovered_late", {"recovery": [Recovery(1.0), Recovery(6.01)]}),
        ("deaf_workers", {"deaf": ["worker1"]}),
        ("crashes", {"crashes": ["worker1 (life 1): ended by itself with 1"]}),
        ("late_exits", {"late_exits": ["worker1 (life 1): not ended 60 s after SIGTERM"]}),
        ("bad_scrapes", {"bad_scrapes": ["a scrape: HTTP 500, without nothing"]}),
        ("errors", {"errors": ["the script stopped"]}),
    ],
)
def test_a_run_with_one_fault_has_not_passed(fault: str, difference: dict[str, object]) -> None:
    assert passed(report(Options(), [whole()]))

    numbers = report(Options(), [replace(whole(), **difference)])  # type: ignore[arg-type]

    assert not passed(numbers)
    assert [name for name in FAULTS if numbers[name]] == [fault]


@pytest.mark.parametrize(
    ("took", "sweeps", "load", "late"),
    [
        (6.0, 1, 0.0, False),
        (6.01, 1, 0.0, True),
        (6.01, 1, 4.0, True),  # as busy as it makes itself
        (6.5, 1, 6.0, False),  # half a crowd more
        (6.51, 1, 6.0, True),
        (6.01, 2, 6.0, True),  # a sweep had passed it by
    ],
)
def test_only_a_crowded_machine_excuses_a_late_recovery_that_no_sweep_has_passed_by(
    took: float, sweeps: int, load: float, late: bool
) -> None:
    outcome = replace(whole(), recovery=[Recovery(took, took - 4, sweeps)], load=load)
    numbers = report(Options(lease_ttl=4.0), [outcome])
    assert numbers["recovered_late"] == late
    assert (numbers["recovery_bound"], numbers["recovery"]["max"]) == (6.0, took)
    assert numbers["recovery_slack"] == {"local": 0.5 if load > 4 else 0}
    assert numbers["recovery_sweeps"] == {str(sweeps): 1}


def test_a_recovery_is_timed_by_the_server(redis_url: str) -> None:
    """However late the watcher looks: it finds the moments in what the server keeps."""
    with redis.Redis.from_url(redis_url) as client:
        fleet = SimpleNamespace(lease_ttl=4.0, redis=client, worker_name=lambda part: "w1")
        recoveries = Recoveries(fleet)  # type: ignore[arg-type]

        def now() -> int:
            seconds, micros = client.time()
            return int(seconds) * 1000 + int(micros) // 1000

        lapse = now() + 60_000  # far away, for a machine that is slow
        client.hset(broker.job_key("r1"), mapping={"state": "running", "attempt": 1, "worker": "w1", "claimed_ms": 1})
        client.zadd(broker.RUNNING, {"r1": lapse})
        before = now()
        assert recoveries.watch(SimpleNamespace(alive=True), quiet=True) == 1  # type: ignore[arg-type]
        killed = now()
        recoveries._look()
        assert not recoveries.settled
        for moment in (lapse - 300, lapse + 700, lapse + 1700):  # of the sweeps' turns
            client.set(broker.SWEPT, 1, px=max(1, moment + 1000 - now()))
            recoveries._look()
        client.hset(broker.job_key("r1"), mapping={"attempt": 2, "claimed_ms": lapse + 1900})
        client.hset(broker.LEDGER, "r1 1", json.dumps({"since_ms": lapse + 1800}))
        recoveries._look()
        (found,) = recoveries.found(quiet=True)
    assert recoveries.settled
    assert (found.after_lapse, found.sweeps) == (1.9, 2)
    assert (lapse + 1900 - killed) / 1000 <= found.took <= (lapse + 1900 - before) / 1000
