"""HTTP/1.1 on raw sockets: small, quick, and able to be as rude as a test wishes.

An ASGI server cannot drop a connection in the middle of an answer, which is half of what is to be emulated here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Protocol
from urllib.parse import parse_qs, unquote

import httptools
import orjson

REASONS = {status.value: status.phrase for status in HTTPStatus}


@dataclass(slots=True)
class Request:
    """One request, its body read whole."""

    method: str
    path: str
    raw_query: str
    headers: dict[str, str]
    body: bytes
    connection: Connection

    @property
    def query(self) -> dict[str, list[str]]:
        return parse_qs(self.raw_query, keep_blank_values=True)

    @property
    def bearer(self) -> str | None:
        scheme, _, token = self.headers.get("authorization", "").partition(" ")
        return token if scheme.lower() == "bearer" and token else None


@dataclass(slots=True)
class Answer:
    status: int = 200
    body: bytes = b""
    content_type: str = "application/json"
    headers: dict[str, str] = field(default_factory=dict)


def json_answer(value: Any, status: int = 200, **headers: str) -> Answer:
    return Answer(status, orjson.dumps(value), headers=headers)


#: None: the handler writes to the connection itself.
Outcome = Answer | None
Handler = Callable[[Request], Outcome | Awaitable[Outcome]]


class BodySink(Protocol):
    """Takes a request's body as it comes, instead of having it collected."""

    def feed(self, data: bytes) -> None: ...

    def finish(self) -> None: ...

    def client_gone(self) -> None: ...

    def client_writable(self, writable: bool) -> None: ...


class Service(Protocol):
    def handle(self, request: Request) -> None: ...

    def stream(self, request: Request) -> BodySink | None:
        """Take over a request whose headers have been read, or return None to have its body collected."""
        ...


def encode_head(status: int, headers: dict[str, str]) -> bytes:
    lines = [f"HTTP/1.1 {status} {REASONS.get(status, 'Status')}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


class Connection(asyncio.Protocol):
    """One client's connection; answers one request after the other."""

    def __init__(self, service: Service, connections: set[Connection]) -> None:
        self._service = service
        self._connections = connections
        self._parser = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport | None = None
        self._target = b""
        self._headers: dict[str, str] = {}
        self._body: list[bytes] = []
        self._sink: BodySink | None = None
        self._keep_alive = True
        self._held: list[bytes] | None = None
        self._close_later = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]
        self._connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._connections.discard(self)
        if self._sink:
            self._sink.client_gone()

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self.abort()
        except httptools.HttpParserError:
            self.answer(json_answer({"detail": "not HTTP"}, 400))
            self.close()

    def pause_writing(self) -> None:
        if self._sink:
            self._sink.client_writable(False)

    def resume_writing(self) -> None:
        if self._sink:
            self._sink.client_writable(True)

    # The parser's callbacks.

    def on_message_begin(self) -> None:
        self._target, self._headers, self._body, self._sink = b"", {}, [], None

    def on_url(self, url: bytes) -> None:
        self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self._keep_alive = self._parser.should_keep_alive()
        if self._headers.get("expect", "").lower() == "100-continue":
            self.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self._sink = self._service.stream(self._request())

    def on_body(self, body: bytes) -> None:
        if self._sink:
            self._sink.feed(body)
        else:
            self._body.append(body)

    def on_message_complete(self) -> None:
        if self._sink:
            self._sink.finish()
        else:
            self._service.handle(self._request())

    def _request(self) -> Request:
        path, _, query = self._target.decode("latin-1").partition("?")
        method = self._parser.get_method().decode("latin-1")
        return Request(method, unquote(path), query, self._headers, b"".join(self._body), self)

    # What handlers do with the connection.

    @property
    def open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    @property
    def target(self) -> str:
        """The request's target exactly as it was sent."""
        return self._target.decode("latin-1")

    def answer(self, answer: Answer) -> None:
        head = {"content-type": answer.content_type, "content-length": str(len(answer.body)), **answer.headers}
        if not self._keep_alive:
            head["connection"] = "close"
        self.write(encode_head(answer.status, head) + answer.body)
        self._finish()

    def start(self, status: int, content_type: str) -> None:
        """Begin an answer of unknown length."""
        self.write(encode_head(status, {"content-type": content_type, "transfer-encoding": "chunked"}))

    def chunk(self, data: bytes) -> None:
        self.write(b"%x\r\n%b\r\n" % (len(data), data))

    def end(self) -> None:
        self.write(b"0\r\n\r\n")
        self._finish()

    def write(self, data: bytes) -> None:
        if self._held is not None:
            self._held.append(data)
        elif self.open:
            self._transport.write(data)  # type: ignore[union-attr]

    def hold(self) -> None:
        """Keep back what is written from now on, until `release`."""
        self._held = []

    def release(self) -> None:
        held, self._held = self._held or [], None
        self.write(b"".join(held))
        if self._close_later:
            self.close()

    def pause_reading(self) -> None:
        if self.open:
            self._transport.pause_reading()  # type: ignore[union-attr]

    def resume_reading(self) -> None:
        if self.open:
            self._transport.resume_reading()  # type: ignore[union-attr]

    def abort(self) -> None:
        """Drop the connection without a further byte."""
        if self._transport:
            self._transport.abort()

    def close(self) -> None:
        """Close the connection after what has been written."""
        if self._held is not None:
            self._close_later = True
        elif self._transport:
            self._transport.close()

    def _finish(self) -> None:
        if not self._keep_alive:
            self.close()
