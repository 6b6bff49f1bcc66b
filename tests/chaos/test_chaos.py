"""One round of chaos with a fixed seed, in which everything is broken once; `make chaos` goes on for ten minutes."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from dataclasses import replace

import pytest

from chaos import agents
from chaos.scenario import FAULTS, Options, Outcome, brief, passed, report, run
from chaos.script import ACTIONS, PLATFORM_ACTIONS, steps
from producer import RolloutResult
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
    return Outcome("local", submitted=["one"], results=[ended()], announced=Counter(["one"]), recovery=[1.0])


@pytest.mark.parametrize(
    ("fault", "difference"),
    [
        ("lost", {"submitted": ["one", "two"]}),
        ("duplicates", {"results": [ended(), ended()]}),
        ("announced_twice", {"announced": Counter(["one", "one"])}),
        ("unknown", {"submitted": []}),
        ("leaked", {"leaked": {"sandboxes": ["sbx"]}}),
        ("recovered_late", {"recovery": [1.0, 100.0]}),
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
