"""Whole tasks through the whole fleet: the command in a process of its own, a worker, the bundled gateway, a model."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from producer import RolloutResult
from producer.contract import ErrorKind, StopCondition
from producer.harbor import AGENTS, read_tasks
from workers.errors import EnvironmentHookError
from workers.harbor.agents import BY_NAME
from workers.harbor.environment import _check_gateway
from workers.local import LocalStack

pytestmark = pytest.mark.xdist_group("harbor")

MakeTask = Callable[..., Path]
Run = Callable[..., list[RolloutResult]]


def command(*arguments: str, redis_url: str = "redis://127.0.0.1:1/0") -> subprocess.CompletedProcess[str]:
    environ = os.environ | {"ROLLOUTS_REDIS_URL": redis_url}
    line = [sys.executable, "-m", "workers.cli", "run", *arguments]
    return subprocess.run(line, env=environ, capture_output=True, text=True, timeout=80, check=False)


@pytest.fixture
def run(stack: LocalStack, run_on: Run) -> Run:
    return partial(run_on, stack)


def test_the_command_runs_a_folder_of_tasks_with_the_shell_agent(
    stack: LocalStack, tasks: Path, tmp_path: Path
) -> None:
    out = tmp_path / "results.jsonl"
    arguments = ["--harbor", str(tasks), "--agent", "shell", "--model", "scripted", "--samples", "2"]
    ended = command(*arguments, "--out", str(out), "--json", redis_url=stack.redis_url)

    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout)["completed"] == 6
    results = [json.loads(line) for line in out.read_text().splitlines()]
    assert sorted(r["example_id"] for r in results) == sorted(["count-words", "fix-bug", "make-file"] * 2)
    assert [r["reward"] for r in results] == [1.0] * 6, [r["agent_stdout"] for r in results]
    assert all(len(r["trajectory"]) == 3 for r in results), "look, solve, done"
    fixed = next(r for r in results if r["example_id"] == "fix-bug")
    assert fixed["metrics"]["cases_passed"] == 3.0
    assert fixed["info"] == {"difficulty": "easy", "category": "debugging", "tags": ["python"]}
    made = next(r for r in results if r["example_id"] == "make-file")
    assert made["info"]["task_name"] == "examples/make-file"
    assert "hello.txt" in made["agent_stdout"]


def test_the_oracle_is_right_and_doing_nothing_is_wrong(run: Run, tasks: Path) -> None:
    right, wrong = run(tasks, "oracle"), run(tasks, "nop")

    assert {r.example_id: (r.stop_condition, r.reward) for r in right} == {
        name: (StopCondition.COMPLETED, 1.0) for name in ("count-words", "fix-bug", "make-file")
    }, [r.error for r in right]
    assert {r.example_id: r.reward for r in wrong} == {"count-words": 0.0, "fix-bug": 0.0, "make-file": 0.0}
    assert all(r.trajectory == [] for r in [*right, *wrong])


@pytest.mark.parametrize(
    ("test", "message", "detail"),
    [
        ("echo broken; exit 3", "it wrote no reward file (exit status 3)", "broken"),
        ("echo high > /logs/verifier/reward.txt; echo why", "its reward.txt is 'high', not a number", "why"),
        ("echo nan > /logs/verifier/reward.txt", "not a finite number", ""),
        (": > /logs/verifier/reward.txt", "its reward.txt is '', not a number", ""),
        ("echo '[1]' > /logs/verifier/reward.json", "holds list, not an object", ""),
        ("echo '{' > /logs/verifier/reward.json", "its reward.json is not JSON", ""),
        ("echo '{\"speed\": 2}' > /logs/verifier/reward.json", "names speed, but no reward", ""),
    ],
)
def test_a_broken_verifier_is_an_error_and_no_reward(
    run: Run, make_task: MakeTask, test: str, message: str, detail: str
) -> None:
    (result,) = run(make_task(test=test), "nop")

    assert (result.stop_condition, result.reward) == (StopCondition.HAS_ERROR, None)
    assert result.error is not None
    assert (result.error.kind, result.error.retryable) == (ErrorKind.ENVIRONMENT, False)
    assert message in result.error.message
    assert detail in (result.error.detail or "")


def test_a_verifier_that_takes_too_long_is_an_error_with_its_output(run: Run, make_task: MakeTask) -> None:
    toml = '[environment]\ndocker_image = "debian"\n[verifier]\ntimeout_sec = 3\n'  # to begin in, on any machine
    (result,) = run(make_task(test="echo began; exec sleep 60", toml=toml), "nop")

    assert result.error is not None
    assert "the verifier took longer than its 3 s" in result.error.message
    assert result.error.detail == "began\n"


def test_metrics_come_from_reward_json_and_the_reward_from_reward_txt_if_need_be(run: Run, make_task: MakeTask) -> None:
    test = """echo '{"speed": 2, "ok": true, "why": {}}' > /logs/verifier/reward.json
echo 0.25 > /logs/verifier/reward.txt
exit 7"""
    (result,) = run(make_task(test=test), "nop")

    assert result.reward == 0.25
    assert result.metrics["speed"] == 2.0
    assert "reward.json: ok, why are no numbers and are left out" in result.warnings


def test_an_agent_neither_sees_the_tests_nor_keeps_a_reward_that_it_wrote(run: Run, make_task: MakeTask) -> None:
    solution = """#!/bin/sh
test -e /tests && exit 9
mkdir -p /tests /logs/verifier
echo 'echo 1 > /logs/verifier/reward.txt' > /tests/test.sh
ln -s /nowhere /tests/link
echo 1 > /logs/verifier/reward.json
"""
    test = "ls /tests /logs/verifier; echo 0 > /logs/verifier/reward.txt"
    (result,) = run(make_task(test=test, **{"solution__solve.sh": solution}), "oracle")

    assert result.error is None, result.error
    assert result.reward == 0.0


def test_an_agent_out_of_time_is_ended_before_the_tests_arrive(run: Run, overtime: Path) -> None:
    (result,) = run(overtime, "oracle")

    assert result.stop_condition is StopCondition.AGENT_TIMEOUT, result.error
    assert result.reward == 1.0, "the agent is gone, and the service that it left running is not"


def test_an_agent_that_cannot_be_installed_says_why(run: Run, make_task: MakeTask, tmp_path: Path) -> None:
    for name in ("sh", "bash", "mkdir", "dirname"):
        (tmp_path / name).symlink_to(str(shutil.which(name)))
    (result,) = run(make_task(), "shell", env={"PATH": str(tmp_path)}, max_attempts=1)

    assert result.error is not None
    assert (result.error.kind, result.error.retryable) == (ErrorKind.ENVIRONMENT, True)
    assert "the agent 'shell' cannot be installed (exit status 1)" in result.error.message
    assert "the image has none of python3, and no apt-get, apk or dnf" in str(result.error.detail)


def test_variables_reach_solution_and_verifier(run: Run, make_task: MakeTask) -> None:
    toml = """[environment]
docker_image = "debian"
workdir = "/app"
[environment.env]
SHARED = "every where"
[verifier.env]
WANTED = "/app/it's here"
[solution.env]
GIVEN = "/app/it's here"
"""
    solution = '#!/bin/sh\necho "$SHARED" > "$GIVEN"\n'
    test = (
        '[ "$(cat "$WANTED")" = "every where" ] && [ "$(basename "$PWD")" = app ] && echo 1 > /logs/verifier/reward.txt'
    )
    (result,) = run(make_task(test=test, toml=toml, **{"solution__solve.sh": solution}), "oracle")

    assert result.reward == 1.0, result.error


@pytest.mark.parametrize("agent", ["codex", "claude-code"])
def test_an_agent_that_the_gateway_cannot_serve_is_named_with_what_to_do(agent: str, tmp_path: Path) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=tmp_path)) as nothing:
        threading.Thread(target=nothing.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{nothing.server_address[1]}"
        rollout: Any = SimpleNamespace(gateway_url=url, gateway_id="r", api_key="k")
        with pytest.raises(EnvironmentHookError, match="which this gateway does not serve") as caught:
            asyncio.run(_check_gateway(rollout, BY_NAME[agent]))
        nothing.shutdown()
    assert f"the agent {agent!r} calls /" in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"agent": "emacs"}, "environment_args.agent: 'emacs' is not known; there are shell, "),
        ({"tests": "no base64"}, "environment_args.tests: cannot be unpacked"),
        ({"verifier": {"timeout": -1}}, "verifier.timeout: "),
        ({"color": "red"}, "color: "),
    ],
)
def test_a_request_made_elsewhere_is_checked(
    run: Run, make_task: MakeTask, change: dict[str, Any], message: str
) -> None:
    folder = make_task()
    arguments = json.loads(read_tasks(folder, "nop")[0].line)["environment_args"]
    (result,) = run(folder, "nop", environment_args=arguments | change)

    assert result.error is not None
    assert result.error.kind is ErrorKind.INVALID_REQUEST
    assert message in result.error.message


def test_both_sides_name_the_same_agents() -> None:
    assert tuple(BY_NAME) == AGENTS


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--harbor", "{tasks}", "--agent", "emacs"], "--agent 'emacs' is not known; there are shell, mini-swe-agent"),
        (["--harbor", "{tasks}"], "--harbor needs --agent; there are shell"),
        (["--agent", "shell"], "give either a file of tasks, or --harbor TASKS_DIR"),
        (["tasks.jsonl", "--harbor", "{tasks}", "--agent", "shell"], "give either a file of tasks, or --harbor"),
        (["tasks.jsonl", "--agent", "shell"], "--agent is for --harbor"),
        (["--harbor", "{tasks}", "--agent", "shell", "--run-command", "x"], "--run-command and --harbor exclude"),
        (["--harbor", "{tasks}", "--agent", "shell"], "model: missing; give it in the line, or for all lines with"),
        (["--harbor", "{tasks}/none", "--agent", "shell"], "is no folder"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_enqueued(
    tasks: Path, tmp_path: Path, arguments: list[str], message: str
) -> None:
    from typer.testing import CliRunner

    from producer.cli import app

    filled = [argument.format(tasks=tasks) for argument in arguments]
    ended = CliRunner().invoke(app, ["run", *filled, "--out", str(tmp_path / "out.jsonl")])

    assert ended.exit_code == 2
    assert message in ended.output
    assert not (tmp_path / "out.jsonl").exists()


def test_all_broken_tasks_are_listed_at_once_and_nothing_is_enqueued(make_task: MakeTask, tmp_path: Path) -> None:
    make_task("good")
    make_task("builds", toml="version = '1.0'", environment__Dockerfile="FROM debian\nRUN make\n")
    make_task("several", toml="[[steps]]\nname = 'one'")
    (make_task("bare") / "instruction.md").unlink()
    ended = command(
        *["--harbor", str(tmp_path / "tasks"), "--agent", "nop", "--model", "m", "--out", str(tmp_path / "out.jsonl")]
    )

    assert ended.returncode == 2, ended.stderr
    lines = ended.stderr.splitlines()
    assert f"{tmp_path}/tasks/bare: has no instruction.md" in lines
    assert any("builds: environment/Dockerfile needs a build (line 2: RUN changes the image)" in s for s in lines)
    assert any("several: task.toml: [[steps]] (a task of several steps) cannot be had here" in s for s in lines)
    assert lines[-1] == "error: 3 problem(s) in the tasks; nothing was submitted"
