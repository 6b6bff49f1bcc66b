"""Several gateway processes as one: each rollout belongs to one of them, and the others pass its calls on.

They share nothing. Who owns a rollout follows from its id and the list of all processes alone (rendezvous hashing: of
all, the one whose URL hashes highest together with the id), so whichever of them a load balancer or a shared port
leads to finds the owner without asking. A process that joins or leaves moves only the rollouts that become or were its
own; those that run while the list changes are lost to the process that no longer finds them, so change it when drained.
"""

from __future__ import annotations

import asyncio
import hashlib
import ssl
from urllib.parse import urlsplit

from workers.gateway.server.connection import Answer, ConnectFailedError, Connections, DroppedError, SilentError
from workers.gateway.server.errors import GatewayRefusal
from workers.gateway.server.exchange import Exchange

#: Marks a call that another process has passed on: whoever gets it answers, so that no call can go in circles.
FORWARDED = b"x-gateway-forwarded"

_CONNECT_TIMEOUT = 5.0
_KEEPALIVE = 15.0  # below the 75 s of `serve.KEEPALIVE_TIMEOUT`
#: Headers that mean something to the owner, and to the agent or worker. ``connection`` and the like do not travel.
_ASKED = frozenset(
    {b"authorization", b"x-api-key", b"x-rollout-key", b"x-rollout-worker", b"content-type", b"accept", b"host"}
)
_ANSWERED = ("content-type", "retry-after", "x-should-retry", "www-authenticate", "allow")


class Peers:
    """The other processes; ``own`` is this one's URL as it stands in ``urls``.

    Raises `ValueError` when it does not stand there, or one is no http(s) URL. ``timeout`` is longer than any call may
    be silent, so that the owner's own word for a failure comes first.
    """

    def __init__(self, own: str, urls: list[str], timeout: float) -> None:
        self._own = own.rstrip("/")
        self._urls = [url.rstrip("/") for url in urls]
        if self._own not in self._urls:
            raise ValueError(f"this gateway's own URL {own!r} is none of the peers {', '.join(urls)}")
        self._connections = {url: _connections(url, timeout) for url in self._urls if url != self._own}

    def owner(self, rollout_id: str) -> str | None:
        """Return the URL of the process that a rollout belongs to; None when it is this one."""
        owner = max(self._urls, key=lambda url: hashlib.blake2b(f"{url} {rollout_id}".encode()).digest())
        return None if owner == self._own else owner

    async def pass_on(self, exchange: Exchange, owner: str, body: bytes) -> None:
        """Have ``owner`` answer; raises `GatewayRefusal` (502) when it is away."""
        relay = asyncio.ensure_future(self._relay(exchange, owner, body))
        gone = asyncio.ensure_future(exchange.gone())
        try:
            await asyncio.wait({relay, gone}, return_when=asyncio.FIRST_COMPLETED)
            if _is_whole_call(exchange, body):
                await asyncio.wait({relay})  # a whole call is made and recorded, whether or not its agent is there
        finally:
            gone.cancel()
            relay.cancel()
            await asyncio.wait({relay, gone})
        if not relay.cancelled() and (error := relay.exception()):
            raise error

    def close(self) -> None:
        """Close idle connections."""
        for connections in self._connections.values():
            connections.close()

    async def _relay(self, exchange: Exchange, owner: str, body: bytes) -> None:
        connections = self._connections[owner]
        try:
            answer = await connections.send(_request(exchange, body))
            try:
                await answer.head()
                await _answer(exchange, answer)
            finally:
                connections.release(answer)
        except (ConnectFailedError, DroppedError, SilentError) as error:
            if exchange.started:
                return  # a stream that ends without its end: the agent sees that it broke
            message = f"The gateway process that owns this rollout does not answer: {error}."
            told = {"message": message, "type": "gateway_error", "param": None, "code": 502}
            raise GatewayRefusal(502, message, error=told) from None


async def _answer(exchange: Exchange, answer: Answer) -> None:
    if answer.whole:
        headers = {name: answer.headers[name] for name in _ANSWERED if name in answer.headers}
        await exchange.answer(answer.status, answer.body(), headers)
        return
    await exchange.begin_stream()
    while data := await answer.next():
        await exchange.part(data)
    await exchange.end_stream()


def _request(exchange: Exchange, body: bytes) -> bytes:
    scope = exchange.scope
    query = b"?" + scope["query_string"] if scope["query_string"] else b""
    method = "GET" if exchange.method == "HEAD" else exchange.method  # its answer's body is left out on the way out
    lines = [b"%s %s%s HTTP/1.1\r\n" % (method.encode(), scope["raw_path"], query)]
    lines += [b"%s: %s\r\n" % (name, value) for name, value in scope["headers"] if name in _ASKED]
    lines.append(b"%s: 1\r\ncontent-length: %d\r\n\r\n" % (FORWARDED, len(body)))
    return b"".join(lines) + body


def _is_whole_call(exchange: Exchange, body: bytes) -> bool:
    return exchange.method == "POST" and b'"stream"' not in body


def _connections(url: str, timeout: float) -> Connections:
    parts = urlsplit(url)
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise ValueError(f"{url!r} is not an http(s) URL of a gateway")
    secure = parts.scheme == "https"
    tls = ssl.create_default_context() if secure else None
    port = parts.port or (443 if secure else 80)
    times = {"timeout": timeout, "connect": _CONNECT_TIMEOUT, "keepalive": _KEEPALIVE}
    return Connections(parts.hostname, port, tls, **times)
