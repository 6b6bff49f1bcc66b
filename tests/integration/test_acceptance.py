"""What a user does: the commands, in processes of their own, on a whole fleet."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from support import wait_until

from workers.local import LocalStack

pytestmark = pytest.mark.acceptance

ROLLOUTS = [sys.executable, "-m", "workers.cli"]
AGENT = """\
import json, os, urllib.request
body = {"messages": [{"role": "user", "content": "hello"}]}
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions",
    json.dumps(body).encode(),
    {"content-type": "application/json", "authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
)
print(json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"])
"""


def rollouts(*arguments: str, redis_url: str | None = None, **options: Any) -> subprocess.CompletedProcess[str]:
    environ = os.environ | ({"ROLLOUTS_REDIS_URL": redis_url} if redis_url else {})
    return subprocess.run(
        [*ROLLOUTS, *arguments], env=environ, capture_output=True, text=True, timeout=80, check=False, **options
    )


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_demo_completes_64_rollouts_with_tokens(tmp_path: Path) -> None:
    out = tmp_path / "results.jsonl"
    ended = rollouts("demo", "--out", str(out), cwd=tmp_path)

    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.strip().splitlines()[-1] == "64 rollouts: 64 completed, 0 failed"
    assert "a deterministic stand-in and not a language model" in ended.stderr
    results = lines(out)
    assert len({(r["example_id"], r["sample_index"]) for r in results}) == len(results) == 64
    for result in results:
        assert result["trajectory"]
        for step in result["trajectory"]:
            tokens = step["tokens"]
            assert len(tokens["completion_ids"]) == len(tokens["completion_logprobs"]) > 0
            assert tokens["prompt_ids"]
    assert 0 < sum(r["reward"] for r in results) < 64, "some samples are right and some are not"


@pytest.mark.xdist_group("acceptance")
@pytest.mark.parametrize("systems", ["local"], indirect=True)
def test_a_file_of_tasks_runs_from_the_command_line(stack: LocalStack, tmp_path: Path) -> None:
    agent = tmp_path / "agent.py"
    agent.write_text(AGENT)
    tasks, out = tmp_path / "tasks.jsonl", tmp_path / "results.jsonl"
    tasks.write_text("".join(json.dumps({"prompt": f"task {n}", "answer": n}) + "\n" for n in range(5)))
    command = ["run", str(tasks), "--out", str(out), "--model", "stand-in", "--samples", "2", "--json"]
    command += ["--run-command", f"{sys.executable} {agent}"]

    ended = rollouts(*command, redis_url=stack.redis_url)

    assert ended.returncode == 0, ended.stderr
    summary = json.loads(ended.stdout)
    assert summary["stop_conditions"] == {"completed": 10}
    assert summary["turns"]["total"] == 10
    results = lines(out)
    assert sorted((r["answer"], r["sample_index"]) for r in results) == [(n, s) for n in range(5) for s in range(2)]
    assert all(r["metrics"]["model_calls"] == 1 and r["agent_stdout"].strip() for r in results)

    tasks.write_text(tasks.read_text() + '{"prompt": "fails", "run_command": "exit 3"}\n')
    again = rollouts(*command, "--resume", redis_url=stack.redis_url)
    assert again.returncode == 1, again.stderr
    assert len(lines(out)) == 12
    assert json.loads(again.stdout)["errors"]["agent"]["count"] == 2


@pytest.mark.xdist_group("acceptance")
@pytest.mark.parametrize("systems", ["local"], indirect=True)
def test_status_shows_the_worker(stack: LocalStack) -> None:
    def worker() -> dict[str, Any]:
        (only,) = json.loads(rollouts("status", "--json", redis_url=stack.redis_url).stdout)["workers"]
        return dict(only)

    assert worker()["concurrency"] == 50
    # A worker reports what it runs at intervals: an earlier test's rollouts may still be in its last report.
    wait_until(lambda: worker()["running"] == 0)


def test_the_worker_says_what_is_wrong_with_its_settings() -> None:
    environ = {"ROLLOUTS_ENVIRONMENTS": "nowhere:Nothing"}
    ended = subprocess.run(
        [*ROLLOUTS, "worker"], env=os.environ | environ, capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 2
    assert "ROLLOUTS_ENVIRONMENTS: cannot import 'nowhere'" in ended.stderr


def test_up_runs_a_fleet_until_it_is_killed_and_leaves_nothing(tmp_path: Path) -> None:
    log = tmp_path / "up.log"
    with log.open("w") as output:
        up = subprocess.Popen([*ROLLOUTS, "up"], stdout=output, stderr=output, start_new_session=True)
    children: list[psutil.Process] = []
    try:
        wait_until(lambda: "The fleet is up" in log.read_text() or up.poll() is not None, timeout=60)
        assert up.poll() is None, log.read_text()
        url = next(
            line.split("=", 1)[1] for line in log.read_text().splitlines() if "export ROLLOUTS_REDIS_URL=" in line
        )
        assert json.loads(rollouts("status", "--json", redis_url=url).stdout)["workers"]
        children = psutil.Process(up.pid).children(recursive=True)
        assert len(children) >= 5
    finally:
        up.send_signal(signal.SIGKILL)
        up.wait()
    wait_until(lambda: not any(map(lives, children)))


def lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
