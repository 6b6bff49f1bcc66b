"""A stream on its way to an agent that is slow, or while the model's server says nothing that the agent could use."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import orjson

from workers.gateway.protocol import Registration
from workers.gateway.server.calls import CallSettings, ModelCalls
from workers.gateway.server.dialects.table import DIALECTS
from workers.gateway.server.exchange import Exchange
from workers.gateway.server.gate import Gate
from workers.gateway.server.metrics import Metrics
from workers.gateway.server.recorder import Recorder
from workers.gateway.server.relay import Relay
from workers.gateway.server.upstreams import Opened

#: Seconds of silence after which an agent is told that its stream goes on.
SILENCE = 0.05
CHUNK = b'data: {"choices": [{"delta": {"content": "a"}}]}\n\n'
END = b'data: {"choices": [{"delta": {}, "finish_reason": "stop"}]}\n\ndata: [DONE]\n\n'


class Agent:
    """Takes what is sent as uvicorn does: nothing while it is slow, and nothing after the end."""

    def __init__(self) -> None:
        self.got = b""
        self.ended = False
        self.waiting = 0
        self.ready = asyncio.Event()
        self.ready.set()

    async def send(self, message: Any) -> None:
        self.waiting += 1
        if not self.ready.is_set():
            await self.ready.wait()
        self.waiting -= 1
        if self.ended:
            raise RuntimeError("sent after the response was complete")
        self.got += message.get("body", b"")
        self.ended = message["type"] == "http.response.body" and not message["more_body"]

    async def receive(self) -> Any:
        await asyncio.get_running_loop().create_future()


class Upstream:
    """A model server that says what it is told to."""

    def __init__(self) -> None:
        self.native: dict[str, Any] = {}
        self.parts: asyncio.Queue[bytes] = asyncio.Queue()
        self.sink: Callable[[bytes], bool] | None = None

    async def open(self, rollout: Any, request: Any) -> Opened:
        request(self)
        return Opened(self, SimpleNamespace(whole=False, flow=self.flow))  # type: ignore[arg-type]

    def close(self, opened: Opened, failure: Any) -> None:
        pass

    async def next(self, answer: Any) -> bytes:
        return await self.parts.get()

    async def flow(self, sink: Callable[[bytes], bool]) -> None:
        while sink(await self.parts.get()):
            pass


def run(body: Callable[[Upstream, Agent], Awaitable[None]], dialect: str = "chat", *, native: bool = False) -> None:
    """Relay a streamed call while ``body`` says what the two ends do; it ends well."""

    async def main() -> None:
        upstream, agent = Upstream(), Agent()
        spoken = next(each for each in DIALECTS if each.name == dialect)
        if native:
            upstream.native = {dialect: spoken.native}
        calls = ModelCalls(upstream, Gate(60), CallSettings(keep_alive=SILENCE))  # type: ignore[arg-type]
        calls.metrics = Metrics(SimpleNamespace())
        rollout = Recorder().register("r", Registration(model="m"), None)
        asked = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "x"}], "stream": True}
        scope = {"method": "POST", "path": "/"}
        relay = Relay(calls.read(rollout, spoken, orjson.dumps(asked)), Exchange(scope, agent.receive, agent.send, []))
        relay._write = (lambda data: True) if dialect == "messages" and not native else None
        async with asyncio.timeout(20):
            running = asyncio.create_task(relay.run())
            await body(upstream, agent)
            await running
        assert agent.ended

    asyncio.run(main())


async def until(there: Callable[[], bool]) -> None:
    while not there():
        await asyncio.sleep(0.001)


def test_a_keep_alive_that_a_slow_agent_takes_after_the_end_is_no_failure() -> None:
    async def body(upstream: Upstream, agent: Agent) -> None:
        upstream.parts.put_nowait(CHUNK)
        await until(lambda: agent.got == CHUNK)
        agent.ready.clear()
        upstream.parts.put_nowait(CHUNK)
        await until(lambda: agent.waiting == 2)  # one is the keep-alive
        upstream.parts.put_nowait(END)
        upstream.parts.put_nowait(b"")
        agent.ready.set()

    run(body)


def test_no_keep_alive_comes_in_the_middle_of_an_event() -> None:
    event = b'event: content_block_delta\ndata: {"type": "content_block_delta", "delta": {}}\n\n'
    last = b'event: message_stop\ndata: {"type": "message_stop"}\n\n'

    async def body(upstream: Upstream, agent: Agent) -> None:
        upstream.parts.put_nowait(event + event[:40])
        await until(lambda: b"ping" in agent.got)
        upstream.parts.put_nowait(event[40:] + last)
        upstream.parts.put_nowait(b"")
        await until(lambda: agent.ended)
        assert agent.got.count(event) == 2

    run(body, "messages", native=True)


def test_an_agent_is_told_that_its_stream_goes_on_while_the_upstream_says_nothing_for_it() -> None:
    async def body(upstream: Upstream, agent: Agent) -> None:
        upstream.parts.put_nowait(CHUNK)
        await until(lambda: b"text_delta" in agent.got)
        before = agent.got.count(b"ping")
        while agent.got.count(b"ping") == before:
            upstream.parts.put_nowait(b": still thinking\n\n")
            await asyncio.sleep(0.001)
        upstream.parts.put_nowait(END)
        upstream.parts.put_nowait(b"")

    run(body, "messages")
