"""The load generator of `bench_gateway`: bare protocols on uvloop, one connection a client; prints one JSON line.

``calls``: each client makes its next call when the one before is answered. ``first``: each client reads streams one
after the other; what is measured is the time from its request to the first event.

``streams``: each client reads one stream; the latency of a chunk is the time since the model server wrote it (see
``model``). Every tenth stream is measured, each chunk of it; the others are read ten times a second and counted. To
wake up for 50,000 chunks a second would take two thirds of a core, and who measures must not hold up what is measured.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import socket
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import uvloop

#: One stream of so many is measured; the others are read once in ``DRAIN`` seconds, a few of them every ``TICK``.
MEASURED, DRAIN, TICK = 10, 0.1, 0.002
STAMP = re.compile(rb'"@([0-9.]+)"')


class Client(asyncio.Protocol):
    """One connection; ``done`` is set when all its calls are answered."""

    def __init__(self, request: bytes, calls: int, found: list[float], mode: str) -> None:
        self.request, self.calls, self.found = request, calls, found
        self.take = {"calls": self._call, "streams": self._stream, "first": self._first}[mode]
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.buffer, self.wanted, self.errors = b"", -1, 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: asyncio.Transport = transport  # type: ignore[assignment]

    def start(self) -> None:
        self.sent = time.monotonic()
        self.transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        self.take(data)

    def _first(self, data: bytes) -> None:
        if self.wanted < 0 and b"data: " in data:
            self.found.append(time.monotonic() - self.sent)
            self.wanted = 0
        self.buffer = self.buffer[-64:] + data
        if self.buffer.endswith(b"0\r\n\r\n") and b"data: [DONE]" in self.buffer:
            self.buffer, self.wanted = b"", -1
            self._next()

    def _stream(self, data: bytes) -> None:
        now = time.monotonic()
        for stamp in STAMP.findall(data):
            self.found.append(now - float(stamp))
        if b"data: [DONE]" in data or (not self.buffer and b" 200 " not in data[:16]):
            self.errors += b"[DONE]" not in data
            self._end()
        self.buffer = b"x"

    def _call(self, data: bytes) -> None:
        self.buffer = self.buffer + data if self.buffer else data
        if self.wanted < 0:
            end = self.buffer.find(b"\r\n\r\n")
            if end < 0:
                return
            head = self.buffer[:end].lower()
            self.errors += b" 200 " not in head[:16]
            self.wanted = end + 4 + int(head.split(b"content-length:", 1)[1].split(b"\r\n", 1)[0])
        if len(self.buffer) < self.wanted:
            return
        self.found.append(time.monotonic() - self.sent)
        self.buffer, self.wanted = b"", -1
        self._next()

    def _next(self) -> None:
        self.calls -= 1
        if self.calls:
            self.start()
        else:
            self._end()

    def connection_lost(self, error: Exception | None) -> None:
        self.errors += not self.done.done()
        self._end()

    def _end(self) -> None:
        if not self.done.done():
            self.done.set_result(None)


class Drained:
    """Streams that are only counted."""

    def __init__(self) -> None:
        self.streams: list[tuple[socket.socket, bytes]] = []
        self.running: dict[socket.socket, bytes] = {}  # with the end of what was read last
        self.count = self.errors = 0

    def add(self, port: int, content: bytes) -> int:
        """Connect, and return the number by which `start` knows the stream."""
        sock = socket.create_connection(("127.0.0.1", port))
        sock.setblocking(False)
        self.streams.append((sock, content))
        return len(self.streams) - 1

    def start(self, number: int) -> None:
        sock, content = self.streams[number]
        sock.send(content)
        self.running[sock] = b""

    async def run(self) -> None:
        """Read all of them, again and again, until they have ended."""
        parts = round(DRAIN / TICK)
        turn, ended = 0, 0
        while ended < len(self.streams):
            for sock, _ in self.streams[turn % parts :: parts]:
                if sock in self.running and self._read(sock):
                    del self.running[sock]
                    sock.close()
                    ended += 1
            turn += 1
            await asyncio.sleep(TICK)

    def _read(self, sock: socket.socket) -> bool:
        """Read what is there; return whether the stream has ended."""
        try:
            data = sock.recv(1024 * 1024)
        except BlockingIOError:
            return False
        self.count += data.count(b"@")
        tail = self.running[sock] = self.running[sock][-64:] + data[-64:]
        if data and b"data: [DONE]" not in tail:
            return False
        self.errors += not data
        return True


def request(host: str, path: str, stream: bool, key: str) -> bytes:
    """Return a chat request as bytes."""
    body: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "Say a word. " * 20}]}
    if stream:
        body["stream"] = True
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\nauthorization: Bearer {key}\r\n"
    return f"{head}content-length: {len(content)}\r\n\r\n".encode() + content


async def run(given: argparse.Namespace) -> dict[str, Any]:
    loop, found, drained = asyncio.get_running_loop(), list[float](), Drained()
    clients: list[Client] = []
    starts: list[Callable[[], None]] = []
    for n in range(given.clients):
        path = given.path.replace("{n}", str(n))
        content = request(f"127.0.0.1:{given.port}", path, given.mode != "calls", given.key)
        if given.mode == "streams" and n % MEASURED:
            starts.append(partial(drained.start, drained.add(given.port, content)))
        else:
            make = partial(Client, content, given.calls, found, given.mode)
            clients.append((await loop.create_connection(make, "127.0.0.1", given.port))[1])
            starts.append(clients[-1].start)
    began, cpu = time.monotonic(), time.process_time()
    draining = asyncio.ensure_future(drained.run())
    for n, start in enumerate(starts):
        if (early := began + n * given.spread / len(starts) - time.monotonic()) > 0:
            await asyncio.sleep(early)
        start()
    await asyncio.gather(draining, *(client.done for client in clients))
    took = time.monotonic() - began
    found.sort()

    def at(share: float) -> float:
        return round(found[min(len(found) - 1, int(len(found) * share))] * 1000, 3) if found else -1.0

    return {
        "count": len(found) + drained.count,
        "seconds": round(took, 3),
        "per_second": round((len(found) + drained.count) / took, 1),
        "p50_ms": at(0.5),
        "p90_ms": at(0.9),
        "p99_ms": at(0.99),
        "max_ms": at(1),
        "errors": drained.errors + sum(client.errors for client in clients),
        "load_cpu_share": round((time.process_time() - cpu) / took, 3),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("mode", choices=["calls", "streams", "first"])
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--path", default="/v1/chat/completions", help="{n} is the client's number")
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--calls", type=int, default=100, help="of each client")
    parser.add_argument("--spread", type=float, default=0.0, help="seconds from the first client's start to the last's")
    parser.add_argument("--key", default="none")
    print(json.dumps(uvloop.run(run(parser.parse_args()))), flush=True)
