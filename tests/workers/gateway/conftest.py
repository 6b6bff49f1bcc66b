"""A real gateway and a scripted model server, each a uvicorn server of its own on a free port of loopback."""

from __future__ import annotations

import asyncio
import itertools
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import orjson
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from support import wait_until

from workers.errors import GatewayError
from workers.gateway.client import HttpGateway
from workers.gateway.protocol import Registration
from workers.gateway.server import create_app
from workers.gateway.server.serve import server_config

Body = dict[str, Any]


class Served:
    """An ASGI application served by uvicorn in a thread, with the settings of the real gateway."""

    def __init__(self, app: Any) -> None:
        self.app = app
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        self.server = uvicorn.Server(server_config(app, shutdown_grace=1))
        self.thread = threading.Thread(target=self.server.run, args=([self.listener],), daemon=True)
        self.thread.start()
        wait_until(lambda: self.server.started, what="uvicorn")

    def begin_stop(self) -> None:
        self.server.should_exit = True

    def stop(self) -> None:
        self.begin_stop()
        self.thread.join(30)
        assert not self.thread.is_alive()


def completion(content: str | None = "hello", *, prompt: int = 3, **fields: Any) -> Body:
    """A chat completion as vLLM answers it, with one token per character."""
    ids = [ord(c) for c in content or "x"]
    message = {"role": "assistant", "content": content} | fields.pop("message", {})
    choice = {
        "index": 0,
        "message": message,
        "finish_reason": "stop",
        "token_ids": ids,
        "logprobs": {"content": [{"token": chr(i), "logprob": -i / 1000, "top_logprobs": []} for i in ids]},
    } | fields.pop("choice", {})
    usage = {"prompt_tokens": prompt, "completion_tokens": len(ids), "total_tokens": prompt + len(ids)}
    top = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "m", "usage": usage}
    return top | {"choices": [choice], "prompt_token_ids": list(range(prompt))} | fields


def chunks_of(answer: Body, *, usage: bool = True) -> list[bytes]:
    """The events in which vLLM streams ``answer``: role, one per token, finish reason, usage, ``[DONE]``."""
    choice = answer["choices"][0]
    message = choice["message"]
    top = {k: answer[k] for k in ("id", "created", "model") if k in answer} | {"object": "chat.completion.chunk"}

    def event(delta: Body, **more: Any) -> Body:
        entry = {"index": 0, "delta": delta, "finish_reason": None, "logprobs": None} | more
        return top | {"choices": [entry]}

    events = [event({"role": "assistant", "content": ""})]
    if answer.get("prompt_token_ids") is not None:
        events[0]["prompt_token_ids"] = answer["prompt_token_ids"]
    for name in ("reasoning_content", "reasoning"):
        events += [event({name: character}) for character in message.get(name) or ""]
    entries = (choice.get("logprobs") or {}).get("content")
    ids = choice.get("token_ids")
    parts = list(message.get("content") or "")
    count = max(len(entries or ()), len(ids or ()), len(parts))
    text = parts + [""] * (count - len(parts))
    for i in range(count):
        more: Body = {}
        if entries is not None:
            more["logprobs"] = {"content": entries[i : i + 1]}
        if ids is not None:
            more["token_ids"] = ids[i : i + 1]
        events.append(event({"content": text[i]} if text[i] else {}, **more))
    for index, call in enumerate(message.get("tool_calls") or ()):
        half = len(call["function"]["arguments"]) // 2
        head = {"index": index, "id": call["id"], "type": "function"}
        start = head | {"function": {"name": call["function"]["name"], "arguments": ""}}
        events.append(event({"tool_calls": [start]}))
        for part in (call["function"]["arguments"][:half], call["function"]["arguments"][half:]):
            events.append(event({"tool_calls": [{"index": index, "function": {"arguments": part}}]}))
    events.append(event({}, finish_reason=choice["finish_reason"]))
    if usage:
        events.append(top | {"choices": [], "usage": answer.get("usage")})
    return [b"data: " + orjson.dumps(e) + b"\n\n" for e in events] + [b"data: [DONE]\n\n"]


@dataclass
class Counts:
    """How many calls a model server answers now, and did at most; how many were ended while it streamed."""

    running: int = 0
    most_running: int = 0
    left_early: int = 0


class ModelServer:
    """A scripted OpenAI-compatible server: it notes what it is asked, and answers what the test says."""

    def __init__(self) -> None:
        self.reset()
        self.app = Starlette(
            routes=[
                Route("/v1/chat/completions", self._chat, methods=["POST"]),
                Route("/v1/models", self._models, methods=["GET"]),
            ]
        )

    def reset(self) -> None:
        """Forget all; a call whose end comes later counts no more."""
        self.requests: list[Body] = []
        self.headers: list[dict[str, str]] = []
        self.answers: list[Any] = []
        self._counts = Counts()

    @property
    def running(self) -> int:
        return self._counts.running

    @property
    def most_running(self) -> int:
        return self._counts.most_running

    @property
    def left_early(self) -> int:
        return self._counts.left_early

    def will(self, *answers: Any) -> None:
        """Script the next answers: a body, a Response, or a function of the request's body that returns either."""
        self.answers += answers

    async def _models(self, request: Request) -> Response:
        return Response(b'{"object":"list","data":[]}', media_type="application/json")

    async def _chat(self, request: Request) -> Response:
        body = await request.json()
        self.requests.append(body)
        self.headers.append(dict(request.headers) | {"x-client-port": str(request.client and request.client.port)})
        answer = self.answers.pop(0) if self.answers else completion()
        counts = self._counts
        counts.running += 1
        counts.most_running = max(counts.most_running, counts.running)
        try:
            if callable(answer) and not isinstance(answer, Response):
                answer = await asyncio.to_thread(answer, body)
        finally:
            counts.running -= 1
        if isinstance(answer, Response):
            return answer
        if body.get("stream"):
            return self.events(chunks_of(answer))
        return Response(orjson.dumps(answer), media_type="application/json")

    def events(self, parts: list[Any]) -> StreamingResponse:
        """An event stream of ``parts``: bytes are sent, functions are called (they may wait), exceptions are raised."""
        counts = self._counts

        async def body() -> AsyncIterator[bytes]:
            try:
                for part in parts:
                    if isinstance(part, Exception):
                        raise part
                    if callable(part):
                        await asyncio.to_thread(part)
                    else:
                        yield part
            except asyncio.CancelledError:
                counts.left_early += 1
                raise

        return StreamingResponse(body(), media_type="text/event-stream")


class Client(httpx.Client):
    """A test's view of a gateway: it registers rollouts and speaks as their agents."""

    ids = itertools.count()
    served: Served  #: the gateway, where it is the test's own

    def register(self, rollout_id: str | None = None, *, key: str | None = None, **body: Any) -> str:
        rollout_id = rollout_id or f"r-{next(self.ids)}"
        headers = {"X-Rollout-Key": key} if key else {}
        answer = self.post(f"/v1/rollouts/{rollout_id}/register", json={"model": "m"} | body, headers=headers)
        assert answer.status_code == 200, answer.text
        return rollout_id

    def chat(self, rollout_id: str, text: str = "hi", **body: Any) -> httpx.Response:
        fields = {"messages": [{"role": "user", "content": text}]} | body
        return self.post(f"/v1/rollouts/{rollout_id}/chat/completions", json=fields)

    def trajectory(self, rollout_id: str, **params: Any) -> Body:
        answer = self.get(f"/v1/rollouts/{rollout_id}/trajectory", params=params)
        assert answer.status_code == 200, answer.text
        body: Body = answer.json()
        return body


@pytest.fixture(scope="session")
def shared() -> Iterator[tuple[ModelServer, Served, Served]]:
    model = ModelServer()
    upstream = Served(model.app)
    gateway = Served(create_app(upstream=upstream.url, upstream_api_key="upstream-key"))
    yield model, upstream, gateway
    upstream.begin_stop()
    gateway.stop()
    upstream.stop()


@pytest.fixture
def model(shared: tuple[ModelServer, Served, Served]) -> ModelServer:
    """The scripted model server behind `gateway`."""
    shared[0].reset()
    return shared[0]


@pytest.fixture
def model_url(shared: tuple[ModelServer, Served, Served]) -> str:
    return shared[1].url


@pytest.fixture
def gateway(shared: tuple[ModelServer, Served, Served], model: ModelServer) -> Iterator[Client]:
    """A client of a running gateway without a control key."""
    with Client(base_url=shared[2].url, timeout=20) as client:
        yield client


@pytest.fixture
def serve() -> Iterator[Callable[[Any], Served]]:
    """Serve an application of the test's own until the test ends."""
    served: list[Served] = []

    def start(app: Any) -> Served:
        served.append(Served(app))
        return served[-1]

    yield start
    for one in served:
        one.begin_stop()
    for one in served:
        one.stop()


@pytest.fixture
def gateway_with(serve: Callable[[Any], Served]) -> Iterator[Callable[..., Client]]:
    """Serve a gateway with settings of the test's own, and return a client of it."""
    clients: list[Client] = []

    def start(**settings: Any) -> Client:
        served = serve(create_app(**settings))
        clients.append(Client(base_url=served.url, timeout=20))
        clients[-1].served = served
        return clients[-1]

    yield start
    for client in clients:
        client.close()


@pytest.fixture
def answer_of() -> Callable[..., Body]:
    return completion


@pytest.fixture
def events_of() -> Callable[..., list[bytes]]:
    return chunks_of


def answer_raw(answers: list[bytes]) -> tuple[socket.socket, threading.Thread]:
    """Answer one connection after the other with raw bytes, then close it; an empty answer only closes."""
    listener = socket.create_server(("127.0.0.1", 0))

    def run() -> None:
        for answer in answers:
            connection, _ = listener.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(answer)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return listener, thread


@pytest.fixture
def serve_raw() -> Callable[[list[bytes]], tuple[socket.socket, threading.Thread]]:
    """A model server of raw bytes, one connection after the other."""
    return answer_raw


class ScriptedGateway:
    """A server of raw HTTP that notes each request, and answers or drops it as scripted.

    A script's entry is ``(status, body)``, "drop" to close the connection unanswered, or a coroutine function that
    returns one of these. Without a script it answers 200 with the request's own rollout id.
    """

    def __init__(self) -> None:
        self.requests: list[tuple[str, str, dict[str, str], bytes]] = []
        self.script: list[Any] = []
        self.connections = 0

    @property
    def calls(self) -> list[str]:
        return [f"{method} {path.partition('?')[0].rpartition('/')[2]}" for method, path, _, _ in self.requests]

    @asynccontextmanager
    async def run(self) -> AsyncIterator[str]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        async with server:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while line := await reader.readline():
                method, path, _ = line.decode().split()
                headers = {}
                while header := (await reader.readline()).decode().strip():
                    name, _, value = header.partition(": ")
                    headers[name.lower()] = value
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                self.requests.append((method, path, headers, body))
                answer = self.script.pop(0) if self.script else (200, {"rollout_id": path.split("/")[3]})
                if callable(answer):
                    answer = await answer()
                if answer == "drop":
                    return
                status, content = answer
                raw = content if isinstance(content, bytes) else orjson.dumps(content)
                writer.write(b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n%s" % (status, len(raw), raw))
                await writer.drain()
        finally:
            writer.close()


Act = Callable[[HttpGateway, str, ScriptedGateway], Awaitable[Any]]


def run_against(script: list[Any], act: Act, **settings: Any) -> tuple[Any, ScriptedGateway]:
    """Run ``act`` against a scripted gateway."""

    async def body() -> Any:
        client = HttpGateway(retry_delay=0.001, **settings)
        try:
            async with scripted.run() as url:
                return await act(client, url, scripted)
        finally:
            await client.aclose()

    scripted = ScriptedGateway()
    scripted.script = script
    return asyncio.run(asyncio.wait_for(body(), 60)), scripted


async def hold(client: HttpGateway, url: str, _: ScriptedGateway) -> None:
    async with client.registered(url, "r-1", Registration(model="m"), api_key="agent-key"):
        pass


def run_failing(script: list[Any], act: Act = hold, **settings: Any) -> tuple[GatewayError, ScriptedGateway]:
    """Run ``act``, which must raise a GatewayError."""

    async def caught(client: HttpGateway, url: str, scripted: ScriptedGateway) -> GatewayError:
        with pytest.raises(GatewayError) as caught:
            await act(client, url, scripted)
        return caught.value

    return run_against(script, caught, **settings)


@pytest.fixture
def against() -> Callable[..., Any]:
    """Run a coroutine function with a client and a gateway that answers a script."""
    return run_against


@pytest.fixture
def failing() -> Callable[..., Any]:
    """As ``against``, for one that must raise a GatewayError, which is returned."""
    return run_failing
