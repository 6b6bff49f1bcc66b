"""The same tasks in the platform's sandboxes, which have a file system of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fleets import fleet_on

from producer import RolloutResult
from producer.contract import StopCondition
from workers.local import LocalStack

pytestmark = pytest.mark.xdist_group("harbor-prime")

RunOn = Callable[..., list[RolloutResult]]


@pytest.fixture(scope="module")
def stack(stack_model: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    environments = {"harbor": "workers.harbor.environment:HarborEnvironment"}
    directory = tmp_path_factory.mktemp("prime")
    settings = {"ROLLOUTS_LEASE_TTL": "30"}  # none lapses here, whatever stops the worker for a moment
    options: dict[str, Any] = {"upstream": stack_model.url, "environments": environments, "settings": settings}
    with fleet_on("prime", directory, **options) as (stack, _):
        yield stack


@pytest.mark.parametrize(("agent", "reward"), [("shell", 1.0), ("oracle", 1.0), ("nop", 0.0)])
def test_the_tasks_are_run_in_the_platforms_sandboxes(
    stack: LocalStack, run_on: RunOn, tasks: Path, agent: str, reward: float
) -> None:
    results = run_on(stack, tasks, agent)

    assert [(r.error, r.agent_stderr) for r in results if r.error] == []
    assert {r.example_id: r.reward for r in results} == dict.fromkeys(("count-words", "fix-bug", "make-file"), reward)


def test_an_agent_out_of_time_is_ended_there_too(stack: LocalStack, run_on: RunOn, overtime: Path) -> None:
    (result,) = run_on(stack, overtime, "oracle")

    assert result.stop_condition is StopCondition.AGENT_TIMEOUT, result.error
    assert result.reward == 1.0
