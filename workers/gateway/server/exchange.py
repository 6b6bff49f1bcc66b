"""One HTTP request and its answer, as bare ASGI: nothing is made that a model call does not need."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import parse_qsl

import orjson

from workers.gateway.server.errors import GatewayRefusal, too_large

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

#: Seconds that a request's body may take in all: 100 kB/s for the largest.
BODY_DEADLINE = 300.0
_JSON = (b"content-type", b"application/json")


class ClientGoneError(Exception):
    """The client left before its request was whole."""


class Exchange:
    """A request, and the way to answer it."""

    __slots__ = ("headers", "method", "path", "receive", "scope", "send", "started")

    def __init__(self, scope: Scope, receive: Receive, send: Send, headers: list[tuple[bytes, bytes]]) -> None:
        self.scope = scope
        self.receive = receive
        self.send = send
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.headers = headers  # those that every answer has
        self.started = False

    def header(self, name: bytes) -> str | None:
        """Return a request's header; ``name`` in lower case."""
        for known, value in self.scope["headers"]:
            if known == name:
                return str(value, "latin-1")
        return None

    def query(self, name: str) -> str | None:
        """Return a query parameter."""
        pairs = parse_qsl(self.scope["query_string"].decode("latin-1"), keep_blank_values=True)
        return next((value for known, value in pairs if known == name), None)

    @property
    def bearer(self) -> str | None:
        """The bearer token."""
        scheme, _, token = (self.header(b"authorization") or "").partition(" ")
        return token.strip() if scheme.lower() == "bearer" else None

    async def body(self, limit: int, timeout: float) -> bytes:
        """Read the request's body.

        Raises `GatewayRefusal`: 413 as soon as it is known to exceed ``limit`` bytes, 408 when nothing of it came for
        ``timeout`` seconds, or not all of it in ``BODY_DEADLINE``. Raises `ClientGoneError`.
        """
        declared = self.header(b"content-length") or ""
        if declared.isdecimal() and int(declared) > limit:
            raise too_large(limit)
        message = await self._part(timeout)
        if not message.get("more_body"):
            whole: bytes = message.get("body", b"")
            if len(whole) > limit:
                raise too_large(limit)
            return whole
        parts, end = bytearray(message.get("body", b"")), time.monotonic() + BODY_DEADLINE
        while message.get("more_body"):
            message = await self._part(timeout)
            parts += message.get("body", b"")
            if len(parts) > limit:
                raise too_large(limit)
            if time.monotonic() > end:
                raise _too_slow(f"The request's body did not come within {BODY_DEADLINE:g} s.")
        return bytes(parts)

    async def is_gone(self) -> bool:
        """Return whether the client has left, after the request was read; waits for nothing."""
        asking = asyncio.ensure_future(self.receive())
        try:
            await asyncio.sleep(0)
            return asking.done() and asking.result()["type"] == "http.disconnect"
        finally:
            asking.cancel()

    async def gone(self) -> None:
        """Return when the client has left, after the request was read."""
        while (await self.receive())["type"] != "http.disconnect":
            pass

    async def answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        """Answer with JSON bytes."""
        own = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in (headers or {}).items()]
        if "content-type" not in (headers or {}):
            own.append(_JSON)
        own.append((b"content-length", b"%d" % len(body)))
        self.started = True
        await self.send({"type": "http.response.start", "status": status, "headers": self.headers + own})
        await self.send({"type": "http.response.body", "body": body})

    async def json(self, value: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        """Answer with a JSON value."""
        await self.answer(status, orjson.dumps(value), headers)

    async def begin_stream(self) -> None:
        """Begin an event stream."""
        kind = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        self.started = True
        await self.send({"type": "http.response.start", "status": 200, "headers": self.headers + kind})

    async def part(self, data: bytes) -> None:
        """Send a part of a stream."""
        await self.send({"type": "http.response.body", "body": data, "more_body": True})

    async def end_stream(self) -> None:
        """End a stream."""
        await self.send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _part(self, timeout: float) -> MutableMapping[str, Any]:
        try:
            async with asyncio.timeout(timeout):
                message = await self.receive()
        except TimeoutError:
            raise _too_slow(f"Nothing of the request's body came for {timeout:g} s.") from None
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        return message


def _too_slow(reason: str) -> GatewayRefusal:
    return GatewayRefusal(408, reason, headers={"connection": "close"})
