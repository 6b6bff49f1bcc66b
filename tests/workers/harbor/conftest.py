"""A scripted model server that calls tools, the whole fleet behind it, and small tasks in Harbor's format."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from producer import Producer, RolloutRequest, RolloutResult
from producer.harbor import read_tasks
from producer.settings import ProducerSettings
from workers.local import LocalStack, StackOptions

TASKS = Path(__file__).parent / "tasks"

#: What solves each task: a shell command with the path that the instruction names in its place.
SOLUTIONS = {
    "hello.txt": "echo 'Hello, harbor!' > {path}",
    "stats.py": "sed -i 's|len(values)$|len(values) if values else 0.0|' {path}",
    "poem.txt": "wc -w < {path} > $(dirname {path})/../count.txt",
}

#: The message with which the model answers a chat request's body, or a status with a body.
Reply = Callable[[dict[str, Any]], dict[str, Any] | tuple[int, str, str]]


def tool_call(name: str, arguments: dict[str, Any] | str, call_id: str = "call_1") -> dict[str, Any]:
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": text}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def solve(body: dict[str, Any]) -> dict[str, Any]:
    """Look around, solve the task, say that it is done."""
    instruction = next(m["content"] for m in body["messages"] if m["role"] == "user")
    turn = sum(message["role"] == "assistant" for message in body["messages"])
    if turn == 0:
        return tool_call("shell", {"command": "pwd; ls"})
    if turn == 1:
        path = next(p for p in re.findall(r"`(/[^`]*)`", instruction) if Path(p).name in SOLUTIONS)
        return tool_call("shell", {"command": SOLUTIONS[Path(path).name].format(path=path)})
    return tool_call("done", {"summary": "solved"})


@dataclass
class ScriptedModel:
    """An OpenAI-compatible server; ``bodies`` are the requests it was sent."""

    reply: Reply = solve
    bodies: list[dict[str, Any]] = field(default_factory=list)
    server: ThreadingHTTPServer | None = None

    @property
    def url(self) -> str:
        assert self.server is not None
        return f"http://127.0.0.1:{self.server.server_address[1]}/v1"

    def __enter__(self) -> ScriptedModel:
        model = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._answer(200, "application/json", json.dumps({"object": "list", "data": []}))

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                model.bodies.append(body)
                reply = model.reply(body)
                if isinstance(reply, tuple):
                    self._answer(*reply)
                    return
                finish = "tool_calls" if reply.get("tool_calls") else "stop"
                choice = {"index": 0, "message": reply, "finish_reason": finish}
                completion = {"id": "c", "object": "chat.completion", "created": 0, "model": body.get("model", "")}
                self._answer(200, "application/json", json.dumps(completion | {"choices": [choice]}))

            def _answer(self, status: int, content_type: str, text: str) -> None:
                self.send_response(status)
                self.send_header("content-type", content_type)
                self.send_header("content-length", str(len(text.encode())))
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        assert self.server is not None
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def model() -> Iterator[ScriptedModel]:
    with ScriptedModel() as model:
        yield model


@pytest.fixture(scope="session")
def stack_model() -> Iterator[ScriptedModel]:
    """The model behind `stack`; it solves the tasks."""
    with ScriptedModel() as model:
        yield model


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory, stack_model: ScriptedModel) -> Iterator[LocalStack]:
    options = StackOptions(
        upstream=stack_model.url,
        beat=False,
        environments={"harbor": "workers.harbor.environment:HarborEnvironment"},
        log_dir=tmp_path_factory.mktemp("logs"),
    )
    with LocalStack(options) as stack:
        yield stack


@pytest.fixture
def run_on() -> Callable[..., list[RolloutResult]]:
    """Run every task below a folder on a fleet to its end."""

    def run_on(stack: LocalStack, folder: Path, agent: str, **fields: Any) -> list[RolloutResult]:
        tasks = [json.loads(task.line) for task in read_tasks(folder, agent)]
        wanted = [RolloutRequest.parse({"model": "scripted"} | task | fields) for task in tasks]
        return asyncio.run(collect(stack.redis_url, wanted))

    return run_on


async def collect(redis_url: str, wanted: list[RolloutRequest]) -> list[RolloutResult]:
    async with Producer(ProducerSettings(redis_url=redis_url)) as producer, asyncio.timeout(60):
        return [result async for result in await producer.submit_many(wanted)]


@pytest.fixture
def tasks() -> Path:
    return TASKS


@pytest.fixture
def make_task(tmp_path: Path) -> Callable[..., Path]:
    """Write a task that needs no agent: its test writes the reward 1, unless ``test`` says otherwise."""

    def make(
        name: str = "task", test: str = "echo 1 > /logs/verifier/reward.txt", toml: str = "", **files: str
    ) -> Path:
        folder = tmp_path / "tasks" / name
        written = {
            "task.toml": toml or '[environment]\ndocker_image = "debian"\n',
            "instruction.md": "Do nothing.",
            "tests/test.sh": f"#!/bin/sh\n{test}\n",
        } | {name.replace("__", "/"): text for name, text in files.items()}
        for path, text in written.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text)
        return folder

    return make


@pytest.fixture
def overtime(make_task: Callable[..., Path]) -> Path:
    """A task whose solution leaves a service, then looks for the tests until its time is up, in a process of its own.

    It has time to leave the service also where something stops it for a moment. The reward is 1 when the agent is gone
    before the tests are there, and the service is not.
    """
    solution = """#!/bin/sh
(setsid sleep 50 & echo $! > /app/service.pid)
sh -c 'while :; do test -e /tests/test.sh && touch /app/seen; sleep 0.01; done' &
wait
"""
    test = """sleep 0.3
test -e /app/seen && echo 0 > /logs/verifier/reward.txt && exit
kill -0 $(cat /app/service.pid) && echo 1 > /logs/verifier/reward.txt"""
    toml = '[environment]\ndocker_image = "debian"\nworkdir = "/app"\n[agent]\ntimeout_sec = 3\n'
    return make_task(test=test, toml=toml, **{"solution__solve.sh": solution})


@pytest.fixture
def calls_tool() -> Callable[..., dict[str, Any]]:
    return tool_call
