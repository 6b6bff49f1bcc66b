"""The presets of well-known agents: their scripts as a sandbox runs them, with stand-ins for the agents themselves."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from workers.harbor import scripts
from workers.harbor.agents import BY_NAME
from workers.harbor.scripts import Place

#: The agents by the names of their presets, and the programs that they are.
PROGRAMS = {"mini-swe-agent": "mini", "codex": "codex", "claude-code": "claude", "opencode": "opencode"}
#: What a shell would change if it were not quoted everywhere.
TASK = "Mend 'it' and \"that\": $HOME `id` $(id)\n\n- one\n- two \\n * ?\n"
BASE_URL, KEY, MODEL = "https://t-1.tunnels.test/v1/rollouts/r1", "r1-secret-key", "org/model-1"

#: Notes how it was called, and what it was given, as JSON.
STAND_IN = """#!{python} -IS
import json, os, sys
with open(os.environ["NOTED"], "w") as file:
    json.dump({{"argv": sys.argv[1:], "env": dict(os.environ), "cwd": os.getcwd(), "stdin": sys.stdin.read()}}, file)
sys.exit(5)
"""


@dataclass
class Called:
    """How an agent was called."""

    argv: list[str]
    env: dict[str, str]
    cwd: str
    stdin: str

    def after(self, option: str) -> str:
        """Return the value of an option."""
        return self.argv[self.argv.index(option) + 1]


@dataclass
class Run:
    """Where one agent runs."""

    agent_dir: Path
    workdir: Path
    called: Called


@pytest.fixture
def start(tmp_path: Path) -> Callable[..., Run]:
    """Run a preset's scripts as a sandbox does, with its program's stand-in on PATH."""

    def start(name: str, task: str = TASK) -> Run:
        agent_dir, workdir, programs = (tmp_path / part for part in ("root/logs/agent", "root/app", "programs"))
        for folder in (agent_dir, workdir, programs):
            folder.mkdir(parents=True)
        program = programs / PROGRAMS[name]
        program.write_text(STAND_IN.format(python=sys.executable))
        program.chmod(0o755)
        place = Place(str(tmp_path / "root"))
        (agent_dir / "instruction.md").write_text(task)
        (agent_dir / "run.sh").write_text(scripts.run_script(place, BY_NAME[name].command, "/app", {}))
        env = {
            "PATH": f"{programs}:/usr/bin:/bin",
            "HOME": str(tmp_path / "home"),
            "NOTED": str(tmp_path / "noted"),
            "OPENAI_BASE_URL": BASE_URL,
            "OPENAI_API_KEY": KEY,
            "OPENAI_MODEL": MODEL,
        }
        line = ["sh", "-c", scripts.RUN_AGENT]
        ended = subprocess.run(line, env=env, cwd=tmp_path / "root", capture_output=True, timeout=60, check=False)
        assert (ended.returncode, ended.stderr) == (5, b""), "the agent's exit status is the script's"
        return Run(agent_dir, workdir, Called(**json.loads((tmp_path / "noted").read_text())))

    return start


@pytest.mark.parametrize("shell", ["sh", "dash", "bash"])
@pytest.mark.parametrize("name", sorted(BY_NAME))
def test_the_scripts_parse(shell: str, name: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"there is no {shell}")
    agent, place = BY_NAME[name], Place("")
    for text in (
        agent.install,
        agent.command,
        scripts.install_script(place, agent.install, "/app"),
        scripts.run_script(place, agent.command, "/app", {"A": "it's"}),
    ):
        ended = subprocess.run([shell, "-n"], input=text, capture_output=True, text=True, check=False)
        assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.parametrize("name", sorted(PROGRAMS))
def test_an_image_that_has_the_agent_installs_nothing(name: str, tmp_path: Path) -> None:
    programs = tmp_path / "programs"
    programs.mkdir()
    for program in (PROGRAMS[name], "python3"):
        (programs / program).write_text(f"#!/bin/sh\necho run > {tmp_path}/touched\nexit 1\n")
        (programs / program).chmod(0o755)
    for forbidden in ("npm", "pip", "apt-get", "apk", "dnf"):
        (programs / forbidden).write_text(f"#!/bin/sh\necho {forbidden} > {tmp_path}/touched\nexit 1\n")
        (programs / forbidden).chmod(0o755)
    script = tmp_path / "install.sh"
    script.write_text(scripts.install_script(Place(""), BY_NAME[name].install, None))
    env = {"PATH": f"{programs}:/usr/bin:/bin", "HOME": str(tmp_path)}
    ended = subprocess.run(["sh", script], env=env, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stderr
    assert not (tmp_path / "touched").exists()


@pytest.mark.parametrize("name", sorted(PROGRAMS))
def test_what_all_presets_share(start: Callable[..., Run], name: str) -> None:
    run = start(name)
    called = run.called
    assert called.cwd == str(run.workdir)
    assert not [word for word in called.argv if KEY in word], "everybody may read a command line"
    assert any(MODEL in word for word in called.argv)
    assert called.env["OPENAI_API_KEY"] == KEY
    assert called.env["HOME"] == str(run.agent_dir.parents[2] / "home"), "the sandbox's own"
    settings = [v for v in called.env.values() if v.startswith(f"{run.agent_dir}/")]
    assert len(settings) >= 2, "its settings are in a folder of its own, as the instruction is"


@pytest.mark.parametrize("name", ["codex", "claude-code", "opencode"])
def test_the_task_is_read_from_stdin_whatever_its_length(start: Callable[..., Run], name: str) -> None:
    task = TASK + "x" * 300_000
    called = start(name, task).called
    assert called.stdin == task
    assert not [word for word in called.argv if "Mend" in word]


def test_mini_swe_agent(start: Callable[..., Run]) -> None:
    run = start("mini-swe-agent")
    called = run.called
    assert called.argv == [
        *("-m", f"openai/{MODEL}", "-t", TASK.rstrip("\n"), "-y", "--exit-immediately"),
        *("-l", "0", "-o", f"{run.agent_dir}/trajectory.json"),
    ]
    assert called.env["OPENAI_BASE_URL"] == BASE_URL
    assert called.env["MSWEA_CONFIGURED"] == "true"
    assert called.env["MSWEA_COST_TRACKING"] == "ignore_errors"
    assert called.env["MSWEA_GLOBAL_CONFIG_DIR"] == f"{run.agent_dir}/settings"


@pytest.mark.parametrize(("size", "named"), [(90_000, False), (200_000, True)])
def test_mini_swe_agent_is_told_where_a_task_is_that_is_too_long_for_an_argument(
    start: Callable[..., Run], size: int, named: bool
) -> None:
    run = start("mini-swe-agent", "x" * size)
    told = run.called.after("-t")
    assert told == (f"Do the task that the file {run.agent_dir}/instruction.md describes." if named else "x" * size)


def test_codex(start: Callable[..., Run]) -> None:
    run = start("codex")
    called = run.called
    assert called.argv[0] == "exec"
    assert {"--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "--ephemeral"} <= set(called.argv)
    assert called.argv[-1] == "-", "the task is on stdin"
    assert called.after("-m") == MODEL
    settings = [called.argv[n + 1] for n, word in enumerate(called.argv) if word == "-c"]
    assert settings[:2] == ["analytics.enabled=false", "model_provider=gateway"]
    assert settings[2] == (
        f'model_providers.gateway={{name="gateway",base_url="{BASE_URL}",'
        'env_key="OPENAI_API_KEY",wire_api="responses"}'
    )
    assert called.env["CODEX_HOME"] == f"{run.agent_dir}/settings"
    assert (run.agent_dir / "settings").is_dir(), "codex wants it to exist"


def test_claude_code(start: Callable[..., Run]) -> None:
    run = start("claude-code")
    called = run.called
    assert called.argv[:2] == ["--bare", "-p"]
    assert (called.after("--model"), called.after("--output-format")) == (MODEL, "json")
    assert called.after("--allowedTools") == "Bash"
    assert (called.env["ANTHROPIC_BASE_URL"], called.env["ANTHROPIC_API_KEY"]) == (BASE_URL, KEY)
    assert called.env["CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC"] == "1"
    assert called.env["CLAUDE_CONFIG_DIR"] == f"{run.agent_dir}/settings"


def test_opencode(start: Callable[..., Run]) -> None:
    run = start("opencode")
    called = run.called
    assert called.argv == ["run", "--title", "task", "--model", f"gateway/{MODEL}"]
    config: dict[str, Any] = json.loads(Path(called.env["OPENCODE_CONFIG"]).read_text())
    (provider,) = config["provider"].values()
    assert provider["npm"] == "@ai-sdk/openai-compatible"
    assert provider["options"] == {"baseURL": "{env:OPENAI_BASE_URL}", "apiKey": "{env:OPENAI_API_KEY}"}
    assert list(provider["models"]) == [MODEL]
    assert called.env["OPENAI_BASE_URL"] == BASE_URL
    assert KEY not in json.dumps(config), "it stays in the environment"
    for variable in ("OPENCODE_CONFIG", "XDG_DATA_HOME", "XDG_CONFIG_HOME"):
        assert called.env[variable].startswith(f"{run.agent_dir}{os.sep}")
