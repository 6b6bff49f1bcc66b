"""The chaos suite's short version, with a fixed seed; `make chaos` is the long one."""

from __future__ import annotations

import itertools
import json

import pytest

from chaos import agents
from chaos.scenario import FAULTS, Options, quick, report, run
from chaos.script import ACTIONS, PLATFORM_ACTIONS, steps

SEED = 7

pytestmark = [pytest.mark.chaos, pytest.mark.xdist_group("chaos")]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("systems", ["local", "prime"])
def test_50_rollouts_survive_half_a_minute_of_chaos(systems: str) -> None:
    options = quick(Options(seed=SEED, systems=(systems,)))
    numbers = report(options, run(options))
    print(json.dumps(numbers))
    assert {fault: numbers[fault] for fault in FAULTS if numbers[fault]} == {}, f"seed {SEED}"
    assert numbers["results"] == numbers["submitted"] == options.rollouts
    assert numbers["lease_errors"] == []
    assert numbers["actions"], "something was broken"


def test_a_seed_fixes_the_script_and_the_agents() -> None:
    def first(seed: str) -> list[object]:
        return list(itertools.islice(steps(seed, platform=True), 300))

    assert first("1") == first("1") != first("2")
    assert {step.action for step in first("1")} == {*ACTIONS, *PLATFORM_ACTIONS}  # type: ignore[attr-defined]
    commands = [[r.run_command for r in agents.requests(300, seed, "agent", "token")] for seed in ("1", "1", "2")]
    assert commands[0] == commands[1] != commands[2]
    assert {r.info["kind"] for r in agents.requests(300, "1", "agent", "token")} == set(agents.KINDS)
