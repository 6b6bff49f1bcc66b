"""Real agents through the gateway: each does a task with a tool call, and the trajectory holds every call.

They are programs of their own, found on PATH or in the folders that ``AGENTS_BIN`` names: ``npm install --prefix DIR
@openai/codex @anthropic-ai/claude-code opencode-ai`` (``DIR/node_modules/.bin``), ``pip install mini-swe-agent``. They
take seconds each, so only ``-m agents`` runs them (``make test-agents`` installs them first); what is not installed is
skipped.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from workers.harbor import scripts
from workers.harbor.agents import BY_NAME
from workers.harbor.scripts import Place

pytestmark = [pytest.mark.agents, pytest.mark.timeout(240), pytest.mark.xdist_group("agents")]

TASK = "Write the word hello into the file greeting.txt."
COMMAND = "echo hello > greeting.txt && echo written"
#: By preset: the program, the tool that runs a command, its argument, the dialect, and the command that ends it.
AGENTS = {
    "codex": ("codex", "exec_command", "cmd", "responses", None),
    "claude-code": ("claude", "Bash", "command", "messages", None),
    "opencode": ("opencode", "bash", "command", None, None),
    "mini-swe-agent": ("mini", "bash", "command", None, "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"),
}


@dataclass
class Worker:
    """The model behind the agents: it runs one command, and then says that it is done."""

    answer_of: Callable[..., Any]
    tool: str
    argument: str
    end: str | None

    def __call__(self, body: dict[str, Any]) -> Any:
        results = [message for message in body["messages"] if message["role"] == "tool"]
        tools = {tool["function"]["name"]: tool["function"] for tool in body.get("tools") or []}
        if self.tool not in tools:
            return self.answer_of("A title")
        commands = [COMMAND, self.end] if self.end else [COMMAND]
        if len(results) >= len(commands):
            return self.answer_of("It is done.")
        arguments = {self.argument: commands[len(results)]}
        if "description" in tools[self.tool]["parameters"].get("required", ()):
            arguments["description"] = "write it"
        function = {"name": self.tool, "arguments": json.dumps(arguments)}  # with spaces, as models write it
        call = {"id": f"call_{len(results)}", "type": "function", "function": function}
        return self.answer_of("I do it. ", message={"tool_calls": [call]}, choice={"finish_reason": "tool_calls"})


def search_path() -> str:
    return os.pathsep.join(filter(None, [os.environ.get("AGENTS_BIN"), os.environ["PATH"]]))


@pytest.fixture(params=sorted(AGENTS))
def agent(request: pytest.FixtureRequest) -> str:
    preset: str = request.param
    if "agents" not in request.config.option.markexpr:
        pytest.skip("only -m agents runs it")
    if shutil.which(AGENTS[preset][0], path=search_path()) is None:
        pytest.skip(f"{AGENTS[preset][0]} is not installed")
    return preset


def test_a_real_agent_does_its_task(
    agent: str, gateway: Any, model: Any, answer_of: Callable[..., Any], tmp_path: Path
) -> None:
    check_task(agent, gateway, model, answer_of, tmp_path)


@pytest.mark.parametrize("agent", ["codex", "claude-code"], indirect=True)
def test_its_calls_pass_to_a_model_server_that_speaks_its_dialect(
    agent: str,
    gateway: Any,
    gateway_with: Callable[..., Any],
    model: Any,
    answer_of: Callable[..., Any],
    tmp_path: Path,
) -> None:
    inner = str(gateway.base_url.join(f"/v1/rollouts/{gateway.register()}"))  # it speaks every dialect
    passing = gateway_with(upstream=inner, native=["responses", "messages"], ask_tokens=False)
    rollout = check_task(agent, passing, model, answer_of, tmp_path)
    assert all(step["extras"]["native"] for step in passing.trajectory(rollout)["trajectory"])


def check_task(agent: str, gateway: Any, model: Any, answer_of: Callable[..., Any], tmp_path: Path) -> str:
    _, tool, argument, dialect, end = AGENTS[agent]
    model.will(*[Worker(answer_of, tool, argument, end)] * 20)
    rollout = gateway.register(key="agent-key")
    ended, workdir = run(agent, str(gateway.base_url.join(f"/v1/rollouts/{rollout}")), tmp_path)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert (workdir / "greeting.txt").read_text() == "hello\n"

    steps = gateway.trajectory(rollout)["trajectory"]
    assert len(steps) == len(model.requests), "every call is recorded"
    task = [step for step in steps if step["completion"][0]["content"] != "A title"]
    assert len(task) == 2
    assert {step["extras"].get("dialect") for step in steps} == {dialect}
    (call,) = task[0]["completion"][0]["tool_calls"]
    assert json.loads(call["arguments"])[argument] == COMMAND
    before, after = [*task[0]["prompt"], *task[0]["completion"]], task[1]["prompt"]
    same = ("role", "content") if agent == "opencode" else ("role", "content", "tool_calls")  # it writes JSON anew
    assert [[message.get(key) for key in same] for message in after[: len(before)]] == [
        [message.get(key) for key in same] for message in before
    ], "the second call continues the first"
    assert "written" in json.dumps(after[len(before) :])
    return str(rollout)


def run(agent: str, base_url: str, tmp_path: Path) -> tuple[subprocess.CompletedProcess[str], Path]:
    """Run an agent by its preset's script, as a sandbox does."""
    agent_dir, workdir, home = (tmp_path / part for part in ("root/logs/agent", "root/app", "home"))
    for folder in (agent_dir, workdir, home):
        folder.mkdir(parents=True)
    (agent_dir / "instruction.md").write_text(TASK)
    script = scripts.run_script(Place(str(tmp_path / "root")), BY_NAME[agent].command, "/app", {})
    (agent_dir / "run.sh").write_text(script)
    env = {"PATH": search_path(), "HOME": str(home), "IS_SANDBOX": "1"}
    env |= {"OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": "agent-key", "OPENAI_MODEL": "gpt-mine"}
    line = ["sh", "-c", scripts.RUN_AGENT]
    ended = subprocess.run(
        line,
        env=env,
        cwd=tmp_path / "root",
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    return ended, workdir
