"""The demo's tasks, and its environment in a real local sandbox."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import orjson
import pytest

from producer.contract import RolloutRequest
from workers.demo.agent import evaluate
from workers.demo.environment import TASKS, DemoEnvironment, demo_requests, grade, llm_requests
from workers.environment import reward_and_metrics
from workers.errors import SandboxError
from workers.sandboxes.base import SandboxSpec
from workers.sandboxes.local import LocalSandboxes
from workers.state import Rollout


def test_sixty_four_requests_in_groups_of_four() -> None:
    requests = demo_requests()

    assert len(requests) == 64
    assert set(Counter(request.group_id for request in requests).values()) == {4}
    assert len({request.rollout_id for request in requests}) == 64
    assert {request.sampling_params["seed"] for request in requests} == {0, 1, 2, 3}
    assert Counter(request.env.get("DEMO_STREAM") for request in requests) == {None: 32, "1": 32}


def test_the_requests_are_the_same_each_time_but_for_their_ids() -> None:
    def comparable(request: RolloutRequest) -> dict[str, Any]:
        return request.model_dump(exclude={"rollout_id"})

    assert [comparable(r) for r in demo_requests(2)] == [comparable(r) for r in demo_requests(2)]


def test_every_task_has_a_whole_answer() -> None:
    assert len(TASKS) >= 16
    assert all(evaluate(formula).lstrip("-").isdigit() for _, formula in TASKS)


def test_fields_of_the_caller_win() -> None:
    request = demo_requests(1, batch_id="b7", gateway_url="http://gw/v1", stream=True, model_name="big")[0]

    assert (request.batch_id, request.gateway_url, request.model) == ("b7", "http://gw", "big")
    assert request.env == {"DEMO_STREAM": "1"}


def test_the_small_model_is_asked_for_short_unstreamed_answers() -> None:
    request = llm_requests(2)[1]

    assert request.env == {}
    assert request.sampling_params == {
        "temperature": 0.8,
        "max_tokens": 32,
        "stop": ["\n"],
        "top_logprobs": 1,
        "seed": 1,
    }


@pytest.mark.parametrize(
    ("written", "reward", "form"),
    [
        ("ANSWER: 81", 1, 1),
        ("So 12 * 6 + 9 is 81.\nANSWER: 81.0\n", 1, 1),
        ("ANSWER: 7\nno, ANSWER: 81", 1, 1),
        ("ANSWER: 82", 0, 1),
        ("81", 0, 0),
        ("ANSWER: eighty-one", 0, 0),
        ("", 0, 0),
    ],
)
def test_grades(written: str, reward: float, form: float) -> None:
    assert grade(written, "81") == {"reward": reward, "format": form}
    assert grade("ANSWER: 1,250", 1250)["reward"] == 1


def play(root: Path, model_url: str, command: str | None = None) -> tuple[dict[str, float], int, str]:
    """Run a demo request's agent in a local sandbox, as the flow does; returns score, exit code and stderr."""

    async def run() -> tuple[dict[str, float], int, str]:
        request = demo_requests(1, run_command=command)[0]
        rollout = Rollout(request, "http://unused", rollout_base_url=model_url)
        environment = DemoEnvironment()
        sandboxes = LocalSandboxes(root=root)
        async with sandboxes.create(SandboxSpec(name="s", image=environment.docker_image(request))) as sandbox:
            rollout.sandbox = sandbox
            await environment.setup(rollout)
            variables = environment.build_env_vars(request, rollout)
            job = await sandbox.start_job(environment.run_command(request), env=variables)
            ended = await job.wait()
            score = await environment.score(rollout)
        await sandboxes.aclose()
        return score, ended.exit_code, ended.stderr

    return asyncio.run(run())


def test_the_agent_is_set_up_run_and_scored_in_a_sandbox(tmp_path: Path, model_url: str) -> None:
    # Without a gateway the stand-in sees no sampling parameters; this task it then gets right.
    score, code, stderr = play(tmp_path, model_url)

    assert (code, stderr) == (0, "")
    assert score == {"reward": 1.0, "format": 1.0}
    assert reward_and_metrics(score)[0] == 1.0


def test_an_agent_without_an_answer_scores_nothing(tmp_path: Path, model_url: str) -> None:
    assert play(tmp_path, model_url, "exit 3") == ({"reward": 0.0, "format": 0.0}, 3, "")


def test_a_sandbox_that_is_gone_is_an_error_and_no_score(tmp_path: Path) -> None:
    async def run() -> None:
        rollout = Rollout(demo_requests(1)[0], "http://unused")
        sandboxes = LocalSandboxes(root=tmp_path)
        async with sandboxes.create(SandboxSpec(name="s", image="any")) as sandbox:
            rollout.sandbox = sandbox
            await DemoEnvironment().setup(rollout)
            task = orjson.loads(await sandbox.download("task.json"))
        assert task["messages"] == rollout.request.messages
        with pytest.raises(SandboxError):
            await DemoEnvironment().score(rollout)
        await sandboxes.aclose()

    asyncio.run(run())
