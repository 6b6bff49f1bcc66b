"""HTTP/1.1 to a model server, by httptools and nothing else: what every model call costs, twice.

Chosen by numbers. One pass-through of a call (1,000 prompt ids and 200 completion tokens with logprobs, 26 KB), CPU
microseconds of the gateway's process for each, 32 clients, two cores, one run (CPython 3.11, uvloop):

    ===================  =======================  =======  =======  ========================
    server               this module              aiohttp  httpx    httpx on aiohttp
    ===================  =======================  =======  =======  ========================
    uvicorn, httptools   51                       126      1,093    253
    granian (ASGI)       90                       159      -        -
    a bare protocol      28                       93       1,781    318
    ===================  =======================  =======  =======  ========================

The client is what counts. A server of one's own would save 23 us more, but uvicorn's is one that others keep.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import Callable
from typing import Any, cast

import httptools

#: Bytes of a stream that wait for a slow agent before the model server is slowed down too.
HIGH_WATER = 256 * 1024
#: Bytes of an answer's head, and of an answer that is read whole.
LARGEST_HEAD, LARGEST_ANSWER = 64 * 1024, 512 * 1024 * 1024


#: Takes a part of a stream at once; returns False when it wants no more of them in this way.
Sink = Callable[[bytes], bool]


class ConnectFailedError(Exception):
    """No connection: nothing was sent, so the call may be sent elsewhere."""


class DroppedError(Exception):
    """The connection broke; ``unanswered`` when not one byte of an answer had come."""

    def __init__(self, message: str, *, unanswered: bool) -> None:
        super().__init__(message)
        self.unanswered = unanswered


class StrayError(Exception):
    """An answer came that nobody asked for."""


class SilentError(Exception):
    """Nothing came for as long as the caller wanted to wait."""


class Answer:
    """One answer: its head, then its body, whole (`read`) or as it comes (`next`)."""

    __slots__ = (
        *("_ended", "_error", "_loop", "_parts", "_sink", "_size", "_waiter"),
        *("connection", "headers", "status", "whole"),
    )

    def __init__(self, connection: Connection, loop: asyncio.AbstractEventLoop) -> None:
        self.connection = connection
        self.status = 0
        self.headers: dict[str, str] = {}
        self.whole = True  # until the head says that it is a stream
        self._loop = loop
        self._parts: list[bytes] = []
        self._sink: Sink | None = None
        self._size = 0
        self._waiter: asyncio.Future[None] | None = None
        self._ended = False
        self._error: Exception | None = None

    async def head(self) -> None:
        """Wait for the head; of an answer that is no event stream, for all of it."""
        while not (self._ended or (self.status and not self.whole)):
            await self._wait()
        self._raise()

    def body(self) -> bytes:
        """Return a whole answer's body, after `head`."""
        return b"".join(self._parts) if len(self._parts) != 1 else self._parts[0]

    async def next(self) -> bytes:
        """Return what has come since the last call, waiting for it; b"" when the stream has ended."""
        while not self._parts:
            if self._ended:
                self._raise()
                return b""
            await self._wait()
        data = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        self._parts.clear()
        if self._size > HIGH_WATER:
            self.connection.resume_reading()
        self._size = 0
        return data

    async def flow(self, sink: Sink) -> None:
        """Give each part to ``sink`` the moment it comes, with no task in between; until it returns False, or the end.

        That is a third of what a part of a slow stream costs. What came before is to be taken with `next` first.
        """
        if self._parts:
            return
        self._sink = sink
        try:
            while self._sink is not None and not self._ended:
                await self._wait()
        finally:
            self._sink = None

    @property
    def ended(self) -> bool:
        """Whether all of it has come."""
        return self._ended

    def feed(self, data: bytes) -> None:
        """Take in a part of the body."""
        if self._sink is not None:
            if not self._sink(data):
                self._sink = None
                self.wake()
            return
        self._parts.append(data)
        self._size += len(data)
        if not self.whole:
            if self._size > HIGH_WATER:
                self.connection.pause_reading()
            self.wake()
        elif self._size > LARGEST_ANSWER:
            self.connection.abort(DroppedError(f"its answer exceeds {LARGEST_ANSWER} bytes", unanswered=False))

    def end(self, error: Exception | None = None) -> None:
        """Note that nothing more will come, and why."""
        self._ended, self._error = True, error
        self.wake()

    def wake(self) -> None:
        """Let whoever waits look again."""
        if self._waiter is not None:
            if not self._waiter.done():
                self._waiter.set_result(None)
            self._waiter = None

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    async def _wait(self) -> None:
        self._waiter = self._loop.create_future()
        await self._waiter


class Connection(asyncio.Protocol):
    """One connection, which carries one call at a time and is kept for the next."""

    def __init__(self, loop: asyncio.AbstractEventLoop, timeout: float) -> None:
        self._loop = loop
        self._timeout = timeout
        self._parser: Any = httptools.HttpResponseParser(self)
        self._answer: Answer | None = None
        self._transport: asyncio.Transport
        self._heard = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._got_bytes = False
        self._head = 0
        self._keeps = False
        self._between = False  # chunks of a stream: the parser expects the head of one
        self._bodies: list[bytes] = []  # the chunks of what is being read
        self.closed = False
        self.idle_since = 0.0

    def send(self, request: bytes) -> Answer:
        """Send a whole request and return its answer, which is yet to come."""
        answer = self._answer = Answer(self, self._loop)
        self._got_bytes, self._keeps, self._between, self._head = False, False, False, 0
        self._heard = self._loop.time()
        if self._timer is None:
            self._timer = self._loop.call_later(self._timeout, self._look)
        self._transport.write(request)
        return answer

    def release(self) -> bool:
        """End the call; return whether the connection can carry another."""
        answer = self._answer
        reusable = answer is not None and answer.ended and not self.closed and self._keeps
        if not reusable:
            self.close()  # as that of a call that runs: a server that hangs would never take the rest of the request
        self._answer, self.idle_since = None, self._loop.time()
        return reusable

    def close(self) -> None:
        """Close the connection, and with it a call that is running."""
        self.closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._answer is not None:
            self._transport.abort()
        else:
            self._transport.close()

    def abort(self, error: Exception) -> None:
        """Close the connection and fail its call with ``error``."""
        answer = self._answer
        self.close()
        self._answer = None
        if answer is not None and not answer.ended:
            answer.end(error)

    def pause_reading(self) -> None:
        """Take nothing more from the model server for now."""
        if not self.closed:
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Go on taking."""
        if not self.closed:
            self._heard = self._loop.time()
            self._transport.resume_reading()

    # -- what asyncio calls ----------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:  # noqa: D102
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:  # noqa: D102
        self._heard = self._loop.time()
        self._got_bytes = True
        if self._between and self._answer is not None and (body := _one_chunk(data)):
            self._answer.feed(body)
            return
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._pass_bodies()
            is_upgrade = isinstance(error, httptools.HttpParserUpgrade)
            reason = "it switches to another protocol" if is_upgrade else f"its answer is no HTTP: {error}"
            self.abort(DroppedError(reason, unanswered=False))
        else:
            self._pass_bodies()

    def eof_received(self) -> None:  # noqa: D102
        answer = self._answer
        if answer is not None and answer.status and not answer.ended and _is_until_eof(answer):
            answer.end()  # an HTTP/1.0 answer: the connection's end is its end

    def connection_lost(self, error: Exception | None) -> None:  # noqa: D102
        reason = str(error or "") or "the server closed the connection"
        self.abort(DroppedError(reason, unanswered=not self._got_bytes))

    def _look(self) -> None:
        """Look whether the server has been silent too long; the timer is set again, not at each byte."""
        self._timer = None
        if self._answer is None or self.closed:
            return
        left = self._heard + self._timeout - self._loop.time()
        if left <= 0:
            self.abort(SilentError(f"nothing for {self._timeout:g} s"))
        else:
            self._timer = self._loop.call_later(left, self._look)

    # -- what httptools calls --------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:  # noqa: D102
        if self._answer is None or self._answer.ended:
            raise StrayError  # it would be taken for the next call's answer, or for more of this one's

    def on_status(self, status: bytes) -> None:  # noqa: D102
        self._count(status)

    def on_header(self, name: bytes, value: bytes) -> None:  # noqa: D102
        self._count(name, value)
        if self._answer is not None:
            self._answer.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:  # noqa: D102
        answer = self._answer
        if answer is None:
            return
        status = self._parser.get_status_code()
        if status < 200:  # 100 Continue and the like come before the answer
            answer.headers.clear()
            return
        answer.status = status
        if status == 200 and answer.headers.get("content-type", "").startswith("text/event-stream"):
            answer.whole = False
            self._between = "chunked" in answer.headers.get("transfer-encoding", "")
            answer.wake()

    def on_chunk_header(self) -> None:  # noqa: D102
        self._between = False

    def on_chunk_complete(self) -> None:  # noqa: D102
        self._between = self._answer is not None and not self._answer.whole

    def on_body(self, data: bytes) -> None:  # noqa: D102
        self._bodies.append(data)

    def on_message_complete(self) -> None:  # noqa: D102
        self._pass_bodies()
        self._between = False
        if self._answer is not None and self._answer.status:
            self._keeps = self._parser.should_keep_alive()  # afterwards the parser knows no more
            self._answer.end()

    def _pass_bodies(self) -> None:
        """Pass all chunks of one read on as one part: a stream that lags behind is written with one call, not many."""
        if self._bodies:
            data = self._bodies[0] if len(self._bodies) == 1 else b"".join(self._bodies)
            self._bodies.clear()
            if self._answer is not None:
                self._answer.feed(data)

    def _count(self, *parts: bytes) -> None:
        self._head += sum(map(len, parts))
        if self._head > LARGEST_HEAD:
            self.abort(DroppedError(f"its answer's head exceeds {LARGEST_HEAD} bytes", unanswered=False))


class Connections:
    """The connections to one server: as many as are needed at once, kept ``keepalive`` seconds when idle.

    The youngest idle one is taken first, so that after a peak the others grow old and are closed.
    """

    def __init__(
        self, host: str, port: int, tls: ssl.SSLContext | None, *, timeout: float, connect: float, keepalive: float
    ) -> None:
        self._address = (host, port)
        self._tls = tls
        self._timeout = timeout
        self._connect_timeout = connect
        self._keepalive = keepalive
        self._idle: deque[Connection] = deque()

    async def send(self, request: bytes, *, fresh: bool = False) -> Answer:
        """Send a request over an idle connection, or a new one; raises `ConnectFailedError`.

        Every answer must be given back with `release`.
        """
        connection = None if fresh else self._take()
        return (connection or await self._connect()).send(request)

    def release(self, answer: Answer) -> None:
        """Keep an answer's connection for the next call if all of the answer has come, else close it."""
        if answer.connection.release():
            self._idle.append(answer.connection)

    def close(self) -> None:
        """Close the idle connections."""
        while self._idle:
            self._idle.pop().close()

    def _take(self) -> Connection | None:
        now = asyncio.get_running_loop().time()
        while self._idle and (self._idle[0].closed or now - self._idle[0].idle_since > self._keepalive):
            self._idle.popleft().close()
        while self._idle:
            connection = self._idle.pop()
            if not connection.closed:
                return connection
        return None

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        host, port = self._address
        make: Callable[[], Connection] = lambda: Connection(loop, self._timeout)  # noqa: E731
        try:
            async with asyncio.timeout(self._connect_timeout):
                _, connection = await loop.create_connection(make, host, port, ssl=self._tls)
        except TimeoutError:
            raise SilentError("connect") from None
        except (OSError, ssl.SSLError) as error:
            raise ConnectFailedError(str(error) or type(error).__name__) from None
        return connection


def _one_chunk(data: bytes) -> bytes | None:
    """Return what is in ``data`` if that is one whole chunk, as the parts of a slow stream are; None otherwise.

    The parser takes a fifth of such a part's time to come to the same.
    """
    end = data.find(b"\r\n", 1, 10)
    if end < 0 or not data.endswith(b"\r\n") or not data[:end].isalnum():
        return None
    try:
        size = int(data[:end], 16)
    except ValueError:
        return None
    return data[end + 2 : -2] if size and len(data) == end + size + 4 else None


def _is_until_eof(answer: Answer) -> bool:
    return "content-length" not in answer.headers and "chunked" not in answer.headers.get("transfer-encoding", "")
