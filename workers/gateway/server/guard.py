"""uvicorn's HTTP protocol with limits on a request's head, and a short way to write a stream's parts.

uvicorn has no limit on a head's size, nor on how long a client may take to send it: one that sends a header line a
minute keeps its connection for ever, and one that never ends its header fills the memory. Nor does it limit the time
that it reads, and throws away, the body of a request that was refused.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

#: Bytes of a request's line and headers, and seconds to send them in.
LARGEST_HEAD = 64 * 1024
HEAD_TIMEOUT = 20.0

_TOO_LARGE = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: application/json\r\ncontent-length: 44\r\n"
    b'connection: close\r\n\r\n{"detail": "Request Header Fields Too Large"}'
).replace(b"content-length: 44", b"content-length: 45")


_CYCLE = "rollouts.cycle"


class GuardedProtocol(HttpToolsProtocol):
    """Closes connections whose request's head is too large or takes too long, or a refused request's body does."""

    head_timeout = HEAD_TIMEOUT

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._timer: asyncio.TimerHandle | None = None
        self._head_bytes = 0
        self._in_head = True
        self._in_body = False

    def connection_made(self, transport: Any) -> None:  # noqa: D102
        super().connection_made(transport)
        self._expect_head()

    def data_received(self, data: bytes) -> None:  # noqa: D102
        if self._in_head:
            self._head_bytes += len(data)
        super().data_received(data)
        if self._in_head and self._head_bytes > LARGEST_HEAD and not self.transport.is_closing():
            self.transport.write(_TOO_LARGE)
            self.transport.close()

    def on_message_begin(self) -> None:  # noqa: D102
        super().on_message_begin()
        if not self._in_head:
            self._expect_head()

    def on_headers_complete(self) -> None:  # noqa: D102
        self._in_head, self._in_body, self._head_bytes = False, True, 0
        self._forget_timer()
        super().on_headers_complete()
        self.scope[_CYCLE] = self.cycle  # type: ignore[literal-required]

    def on_message_complete(self) -> None:  # noqa: D102
        super().on_message_complete()
        self._in_body = False
        self._forget_timer()

    def on_response_complete(self) -> None:  # noqa: D102
        super().on_response_complete()
        if self._in_body and self.cycle.response_complete:  # not of an earlier request of the same connection
            self._timer = self.loop.call_later(self.head_timeout, self._give_up)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: D102
        self._forget_timer()
        super().connection_lost(exc)

    def _expect_head(self) -> None:
        self._in_head, self._head_bytes = True, 0
        self._timer = self.loop.call_later(self.head_timeout, self._give_up)

    def _give_up(self) -> None:
        if (self._in_head or self._in_body) and not self.transport.is_closing():
            self.transport.close()

    def _forget_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def direct_writer(scope: Any) -> Callable[[bytes], bool] | None:
    """Return a function that writes a part of a begun stream at once, and False when it has to be sent in ASGI's way.

    It has to when the client is slow, or has left. None under a server that is not ours. What it saves is a third of
    the CPU of a thousand slow streams: a coroutine, a message and a look at each for every part.
    """
    cycle = scope.get(_CYCLE)
    if cycle is None:
        return None
    flow, transport = cycle.flow, cycle.transport

    def write(data: bytes) -> bool:
        if flow.write_paused or cycle.disconnected or not cycle.chunked_encoding or cycle.response_complete:
            return False
        if data:
            transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        return True

    return write
