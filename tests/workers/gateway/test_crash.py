"""A gateway that is killed while rollouts run: started again on the same journal, it knows every answered call."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from support import free_port, wait_until

from workers.gateway.server.journal import Journal

AGENTS = 4
KEY = {"authorization": "Bearer agent-key"}


@contextmanager
def gateway_process(port: int, upstream: str, journal: Path) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "workers.cli", "gateway", "--port", str(port), "--upstream", upstream]
    command += ["--journal", str(journal)]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL, env=os.environ.copy()) as process:
        try:
            wait_until(lambda: process.poll() is not None or answers(port), timeout=60, what="the gateway")
            assert process.poll() is None
            yield process
        finally:
            process.kill()


def answers(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/healthz").status_code == 200
    except httpx.HTTPError:
        return False


class Agent(threading.Thread):
    """Makes call after call, streamed and not, through the gateway's death; counts those that were answered."""

    def __init__(self, url: str, number: int) -> None:
        super().__init__(daemon=True)
        self.url, self.number = f"{url}/v1/rollouts/r-{number}/chat/completions", number
        self.answered: list[str] = []
        self.ended = threading.Event()

    def run(self) -> None:
        with httpx.Client(timeout=20) as client:
            while not self.ended.is_set():
                text = f"{self.number}: call {len(self.answered)}"
                body = {"messages": [{"role": "user", "content": text}], "stream": bool(len(self.answered) % 2)}
                try:
                    answer = client.post(self.url, json=body, headers=KEY)
                except httpx.HTTPError:
                    time.sleep(0.05)  # it is away, and what starts needs the CPU
                    continue
                if answer.status_code == 200 and (not body["stream"] or b"[DONE]" in answer.content):
                    self.answered.append(text)


def test_every_answered_call_survives_a_kill_under_load_and_rollouts_go_on(
    model: Any, model_url: str, tmp_path: Path
) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    agents = [Agent(url, n) for n in range(AGENTS)]
    with gateway_process(port, model_url, tmp_path) as process:
        for n in range(AGENTS):
            asked, headers = {"model": "m"}, {"x-rollout-key": "agent-key"}
            assert httpx.post(f"{url}/v1/rollouts/r-{n}/register", json=asked, headers=headers, timeout=20).is_success
        for agent in agents:
            agent.start()
        wait_until(lambda: all(len(agent.answered) >= 5 for agent in agents), what="calls before the kill")
        process.send_signal(signal.SIGKILL)
        process.wait()
    before = [len(agent.answered) for agent in agents]
    with gateway_process(port, model_url, tmp_path):
        wait_until(
            lambda: all(len(agent.answered) >= n + 3 for agent, n in zip(agents, before, strict=True)),
            what="the rollouts to go on",
        )
        for agent in agents:
            agent.ended.set()
            agent.join(40)
            assert not agent.is_alive()
        for agent in agents:
            trajectory = httpx.get(f"{url}/v1/rollouts/r-{agent.number}/trajectory", timeout=20).json()
            recorded = [step["prompt"][0]["content"] for step in trajectory["trajectory"]]
            missing = set(agent.answered) - set(recorded)
            assert not missing
            assert trajectory["integrity"]["problems"] == []
        wrong = {"authorization": "Bearer other"}
        body = {"messages": [{"role": "user", "content": "x"}]}
        assert httpx.post(agents[0].url, json=body, headers=wrong, timeout=20).status_code == 401


def test_a_second_gateway_on_the_same_journal_says_so_and_ends(model_url: str, tmp_path: Path) -> None:
    journal = Journal(tmp_path)  # as the first has it
    try:
        command = [sys.executable, "-m", "workers.cli", "gateway", "--port", "0", "--upstream", model_url]
        command += ["--journal", str(tmp_path)]
        second = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    finally:
        journal.close()
    assert second.returncode == 2
    assert "another gateway writes its journal" in second.stderr
