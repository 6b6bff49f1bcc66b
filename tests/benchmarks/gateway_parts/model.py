"""A model server for `bench_gateway`: a bare protocol on uvloop that answers canned bytes, whole or as a slow stream.

A whole answer costs it one write. Of a stream, one chunk is due every ``1 / --rate`` seconds; the streams are spread
evenly over that time. Each chunk's content is the time at which it was written (``@`` and `time.monotonic` seconds,
the same clock in all processes of a machine), so whoever reads it knows how long it was on its way.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from typing import Any

import orjson
import uvloop

PROMPT, COMPLETION = 1000, 200


def answer() -> bytes:
    """A chat completion of 1,000 prompt ids and 200 completion tokens with logprobs, as vLLM gives it."""
    numbers = random.Random(0)
    ids = [numbers.randrange(150_000) for _ in range(COMPLETION)]
    entries = [
        {"token": f" t{n}", "logprob": -numbers.random(), "bytes": list(f" t{n}".encode()), "top_logprobs": []}
        for n in range(COMPLETION)
    ]
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": " word" * COMPLETION, "tool_calls": None},
        "logprobs": {"content": entries},
        "finish_reason": "stop",
        "token_ids": ids,
    }
    usage = {"prompt_tokens": PROMPT, "completion_tokens": COMPLETION, "total_tokens": PROMPT + COMPLETION}
    prompt = [numbers.randrange(150_000) for _ in range(PROMPT)]
    top = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "m", "usage": usage}
    return orjson.dumps(top | {"choices": [choice], "prompt_token_ids": prompt})


BODY = answer()
WHOLE = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s" % (len(BODY), BODY)
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
CHUNK = (
    b'data: {"id":"c","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,'
    b'"delta":{"content":"@%017.6f"},'
    b'"logprobs":{"content":[{"token":" t","logprob":-0.12345678,"bytes":[32,116],"top_logprobs":[]}]},'
    b'"finish_reason":%s,"token_ids":[1234]}]}\n\n'
)
FIRST = (
    b'data: {"id":"c","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,'
    b'"delta":{"role":"assistant","content":""}}],"prompt_token_ids":%s}\n\n' % orjson.dumps(list(range(PROMPT)))
)
USAGE = b'data: {"id":"c","choices":[],"usage":{"prompt_tokens":1000,"completion_tokens":200}}\n\ndata: [DONE]\n\n'


def framed(data: bytes) -> bytes:
    """Return one chunk of a chunked body."""
    return b"%x\r\n%s\r\n" % (len(data), data)


class Streams:
    """Writes the chunks of all streams when they are due: a wheel that turns once in a stream's period."""

    def __init__(self, rate: float, tokens: int) -> None:
        self.period = 1 / rate
        self.tokens = tokens
        self.spokes: list[list[list[Any]]] = [[] for _ in range(max(1, round(self.period / 0.001)))]
        self.added = 0

    def add(self, transport: asyncio.Transport) -> None:
        transport.write(HEAD + framed(FIRST))
        self.spokes[self.added % len(self.spokes)].append([transport, 0])
        self.added += 1

    async def run(self) -> None:
        step = self.period / len(self.spokes)
        due, turn = time.monotonic(), 0
        while True:
            while due <= time.monotonic():
                spoke = self.spokes[turn % len(self.spokes)]
                spoke[:] = [stream for stream in spoke if self._write(stream)]
                due, turn = due + step, turn + 1
            await asyncio.sleep(max(0.0005, due - time.monotonic()))

    def _write(self, stream: list[Any]) -> bool:
        transport, count = stream
        if transport.is_closing():
            return False
        stream[1] = count + 1
        last = count + 1 == self.tokens
        data = framed(CHUNK % (time.monotonic(), b'"stop"' if last else b"null"))
        transport.write(data + framed(USAGE) + b"0\r\n\r\n" if last else data)
        return not last


class Model(asyncio.Protocol):
    """One connection."""

    streams: Streams

    def __init__(self) -> None:
        self.buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: asyncio.Transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        while (end := self.buffer.find(b"\r\n\r\n")) >= 0:
            head = self.buffer[:end].lower()
            at = head.find(b"content-length:")
            length = int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
            if len(self.buffer) < end + 4 + length:
                return
            body, self.buffer = self.buffer[end + 4 : end + 4 + length], self.buffer[end + 4 + length :]
            if b'"stream":true' in body.replace(b" ", b""):
                self.streams.add(self.transport)
            else:
                self.transport.write(WHOLE)


async def serve(port: int, rate: float, tokens: int) -> None:
    Model.streams = Streams(rate, tokens)
    server = await asyncio.get_running_loop().create_server(Model, "127.0.0.1", port, backlog=4096)
    async with server:
        await Model.streams.run()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--rate", type=float, default=50.0)
    parser.add_argument("--tokens", type=int, default=200)
    given = parser.parse_args()
    uvloop.run(serve(given.port, given.rate, given.tokens))
