"""A real stand-in model in a process of its own, a scripted one for what a real model gets wrong, and the agent."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from support import free_port, wait_until

from workers.demo import agent

Message = dict[str, Any]


@pytest.fixture(scope="session")
def model_url() -> Iterator[str]:
    """Base URL, with ``/v1``, of the stand-in."""
    port = free_port()
    process = subprocess.Popen([sys.executable, "-m", "workers.demo.model", "--port", str(port)])

    def answers() -> bool:
        assert process.poll() is None, "the stand-in has ended"
        try:
            return httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200
        except httpx.TransportError:
            return False

    wait_until(answers, what="the stand-in")
    yield f"http://127.0.0.1:{port}/v1"
    process.kill()
    process.wait()


@dataclass
class ScriptedModel:
    """Answers each request with the next of ``replies``: ``(status, content type, body)``."""

    url: str
    replies: list[tuple[int, str, bytes]] = field(default_factory=list)
    requests: list[dict[str, Any]] = field(default_factory=list)

    def say(self, message: Message) -> None:
        body = {"choices": [{"index": 0, "message": {"role": "assistant"} | message, "finish_reason": "stop"}]}
        self.replies.append((200, "application/json", json.dumps(body).encode()))

    def call(self, name: str, arguments: str) -> None:
        function = {"name": name, "arguments": arguments}
        self.say({"content": None, "tool_calls": [{"id": "c1", "type": "function", "function": function}]})

    def fail(self, status: int, words: str = "no") -> None:
        self.replies.append((status, "application/json", json.dumps({"detail": words}).encode()))

    def events(self, *events: str) -> None:
        self.replies.append((200, "text/event-stream", "".join(f"data: {event}\n\n" for event in events).encode()))


@pytest.fixture
def scripted() -> Iterator[ScriptedModel]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            raw = self.rfile.read(int(self.headers["Content-Length"]))
            model.requests.append(json.loads(raw) | {"key": self.headers["Authorization"], "path": self.path})
            status, kind, body = model.replies.pop(0)
            if status == 0:
                self.close_connection = True
                self.connection.shutdown(socket.SHUT_RDWR)
                return
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.handle_error = lambda *args: None  # type: ignore[method-assign]
    model = ScriptedModel(f"http://127.0.0.1:{server.server_port}/v1/rollouts/r1")
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield model
    server.shutdown()
    server.server_close()


@dataclass(frozen=True)
class Ran:
    code: int
    stdout: str
    stderr: str
    answer: str | None


RunAgent = Callable[..., Ran]


@pytest.fixture
def run_agent(tmp_path: Path) -> RunAgent:
    """Run the agent as a sandbox does: the file alone, in its own directory, without site-packages."""

    def run(url: str, task: str = "Formula: 12 * 6 + 9", max_turns: int = 8, **env: str) -> Ran:
        (tmp_path / "agent.py").write_bytes(Path(agent.__file__).read_bytes())
        messages = [{"role": "user", "content": task}]
        (tmp_path / "task.json").write_text(json.dumps({"messages": messages, "max_turns": max_turns}))
        variables = {"OPENAI_BASE_URL": url, "OPENAI_MODEL": "m", "OPENAI_API_KEY": "k1", "DEMO_BACKOFF": "0.001"}
        done = subprocess.run(
            [sys.executable, "-I", "-S", "agent.py"],
            cwd=tmp_path,
            env={"PATH": os.environ["PATH"]} | variables | env,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        written = tmp_path / "answer.txt"
        return Ran(done.returncode, done.stdout, done.stderr, written.read_text() if written.exists() else None)

    return run
