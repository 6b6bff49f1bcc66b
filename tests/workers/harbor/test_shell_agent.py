"""The small agent, as the process that it is in a sandbox, against a real HTTP server."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from support import wait_until

from workers.harbor import shell_agent

Call = Callable[..., dict[str, Any]]
PAGE = (404, "text/html", "<html>tunnel not found</html>")


@pytest.fixture
def run(model: Any, tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    (tmp_path / "instruction.md").write_text("Do it, 'quoted' and \"quoted\" and $HOME.")

    def run(**variables: str) -> subprocess.CompletedProcess[str]:
        environ = {"PATH": os.environ["PATH"], "OPENAI_BASE_URL": model.url, "OPENAI_MODEL": "m", "OPENAI_API_KEY": "k"}
        line = [sys.executable, "-I", "-S", shell_agent.__file__, str(tmp_path / "instruction.md")]
        return subprocess.run(
            line, env=environ | variables, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
        )

    return run


def replies(model: Any, *wanted: Any) -> None:
    """Let the model give these answers one after the other, and then end the work."""
    left = list(wanted)
    model.reply = lambda _: left.pop(0) if left else {"role": "assistant", "content": "That is all."}


def results(model: Any) -> list[str]:
    return [m["content"] for m in model.bodies[-1]["messages"] if m["role"] == "tool"]


def test_it_runs_commands_until_the_model_calls_no_tool(run: Any, model: Any, calls_tool: Call, tmp_path: Path) -> None:
    replies(model, calls_tool("shell", {"command": "echo made > made.txt; echo seen; exit 4"}))
    ended = run()

    assert (ended.returncode, ended.stderr) == (0, "")
    assert (tmp_path / "made.txt").read_text() == "made\n"
    assert results(model) == ["exit status 4\nseen\n"]
    assert model.bodies[0]["messages"][1]["content"] == "Do it, 'quoted' and \"quoted\" and $HOME."
    assert ended.stdout.splitlines()[0] == "[1] $ echo made > made.txt; echo seen; exit 4"
    assert ended.stdout.splitlines()[-1] == "[2] That is all."


def test_it_ends_when_the_model_says_that_it_is_done(run: Any, model: Any, calls_tool: Call) -> None:
    model.reply = lambda _: calls_tool("done", {"summary": "wrote it"})
    ended = run()

    assert (ended.returncode, len(model.bodies)) == (0, 1)
    assert "[1] done: wrote it" in ended.stdout


def test_it_ends_after_its_turns(run: Any, model: Any, calls_tool: Call) -> None:
    model.reply = lambda _: calls_tool("shell", {"command": "true"})
    ended = run(SHELL_AGENT_TURNS="3")

    assert (ended.returncode, len(model.bodies)) == (0, 3)
    assert ended.stdout.splitlines()[-1] == "ended after 3 turns"


def test_it_ends_well_when_the_rollouts_turns_are_spent(run: Any, model: Any) -> None:
    replies(model, (409, "application/json", '{"detail": "completed"}'))
    ended = run()

    assert (ended.returncode, len(model.bodies)) == (0, 1)
    assert "the gateway takes no more calls" in ended.stdout


@pytest.mark.parametrize(
    ("name", "arguments", "told"),
    [
        ("shell", "{no json", "error: the arguments of 'shell' do not fit: "),
        ("shell", "[1]", "error: the arguments of 'shell' do not fit: "),
        ("shell", {"command": ""}, "command: expected a non-empty string"),
        ("shell", {"command": "true", "timeout": "soon"}, "error: the arguments of 'shell' do not fit: "),
        ("python", {"code": "1"}, "error: there is no tool 'python'; there are shell and done"),
        ("shell", {"command": "x" * 200_000}, "error: the command cannot be started: Argument list too long"),
    ],
)
def test_the_model_is_told_what_it_got_wrong(
    run: Any, model: Any, calls_tool: Call, name: str, arguments: Any, told: str
) -> None:
    replies(model, calls_tool(name, arguments))
    assert run().returncode == 0
    assert told in results(model)[0]


@pytest.mark.parametrize(
    "failure",
    [(500, "text/plain", "oops"), (503, "application/json", "{}"), (429, "application/json", "{}"), PAGE],
    ids=["500", "503", "429", "tunnel-page"],
)
def test_a_failure_that_may_pass_is_tried_again(run: Any, model: Any, failure: Any) -> None:
    replies(model, failure)
    ended = run()

    assert (ended.returncode, len(model.bodies)) == (0, 2)
    assert f"HTTP {failure[0]}: {failure[2]}; trying again" in ended.stderr


def test_a_server_that_is_away_for_a_while_does_not_end_it(model: Any, tmp_path: Path) -> None:
    (tmp_path / "instruction.md").write_text("Do it.")
    replies(model)
    server = ThreadingHTTPServer(("127.0.0.1", 0), model.server.RequestHandlerClass, bind_and_activate=False)
    server.server_bind()  # nobody else gets its port, and connections are refused until it listens
    url = f"http://127.0.0.1:{server.server_port}/v1"
    environ = {"PATH": os.environ["PATH"], "OPENAI_BASE_URL": url, "OPENAI_MODEL": "m"}
    line = [sys.executable, shell_agent.__file__, str(tmp_path / "instruction.md")]
    with open(tmp_path / "err", "w") as errors, subprocess.Popen(line, env=environ, stderr=errors) as process, server:
        try:
            wait_until(lambda: "trying again" in (tmp_path / "err").read_text(), what="a failed call")
            server.server_activate()
            threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
            assert process.wait(60) == 0
            server.shutdown()
        finally:
            process.kill()
    assert len(model.bodies) == 1


@pytest.mark.parametrize(
    ("failure", "variables", "said"),
    [
        ((400, "application/json", '{"error": "too long"}'), {}, 'HTTP 400: {"error": "too long"}'),
        ((404, "application/json", '{"detail": "Rollout not found"}'), {}, "HTTP 404: "),
        ((500, "text/plain", "oops"), {"SHELL_AGENT_PATIENCE": "0.1"}, "HTTP 500: oops; no more tries after 0.1 s"),
        ((200, "text/html", "<p>"), {"SHELL_AGENT_PATIENCE": "0.1"}, "the answer is no chat completion: b'<p>'"),
    ],
)
def test_a_failure_that_stays_ends_it_with_status_1(
    run: Any, model: Any, failure: Any, variables: dict[str, str], said: str
) -> None:
    model.reply = lambda _: failure
    ended = run(**variables)

    assert ended.returncode == 1
    assert said in ended.stderr.splitlines()[-1]
    assert "Traceback" not in ended.stderr


def test_a_bad_start_is_status_2(run: Any, tmp_path: Path) -> None:
    assert run(SHELL_AGENT_TURNS="many").returncode == 2
    (tmp_path / "instruction.md").unlink()
    ended = run()
    assert (ended.returncode, ended.stderr.startswith("shell_agent: cannot start: FileNotFoundError")) == (2, True)


def test_a_command_that_takes_too_long_is_killed_with_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid_file = tmp_path / "pid"

    class Begun(subprocess.Popen):  # type: ignore[type-arg]
        """A process whose time is counted from its last word on."""

        def wait(self, timeout: float | None = None) -> int:
            wait_until(lambda: pid_file.exists() and pid_file.read_text().endswith("\n"), what="the command to begin")
            return super().wait(timeout)

    monkeypatch.setattr(shell_agent.subprocess, "Popen", Begun)
    began = time.monotonic()
    answer = shell_agent.run_command(f"echo before; sleep 300 & echo $! > {pid_file}; wait", 0.2, 1000)

    assert answer == "killed after 0.2 seconds\nbefore\n"
    assert time.monotonic() - began < 60
    stat = Path("/proc", pid_file.read_text().strip(), "stat")
    wait_until(lambda: not stat.exists() or ") Z " in stat.read_text(), what="the command's child to end")


def test_what_runs_on_in_the_background_is_not_waited_for() -> None:
    began = time.monotonic()
    answer = shell_agent.run_command("sleep 300 & echo $!", 60, 1000)
    os.kill(int(answer.split()[-1]), 9)
    assert time.monotonic() - began < 30


def test_long_output_keeps_its_head_and_its_tail() -> None:
    answer = shell_agent.run_command("echo first; head -c 100000 /dev/zero | tr '\\0' x; echo last", 10, 100)
    head, cut, tail = answer.split("\n... ")[0], "[99911 bytes cut]", answer.split("] ...\n")[1]
    assert head.startswith("exit status 0\nfirst\nxxx")
    assert cut in answer
    assert tail.endswith("xxxlast\n")
    assert len(answer) < 200


def test_the_file_stands_alone_and_suits_python_3_8() -> None:
    source = Path(shell_agent.__file__).read_text()
    tree = ast.parse(source, feature_version=(3, 8))
    imported = {n.names[0].name for n in ast.walk(tree) if isinstance(n, ast.Import)}
    imported |= {str(n.module) for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    assert {name.partition(".")[0] for name in imported} <= sys.stdlib_module_names
    assert json.dumps(shell_agent.TOOLS)
