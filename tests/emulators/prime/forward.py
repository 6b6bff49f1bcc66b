"""The public edge of the tunnels: passes ``/t/<id>/...`` on to the local port while frpc's control connection lives.

Each request gets a connection of its own to the local port and is asked to close it, so that the answer can be passed
on byte by byte, as it comes, without being understood.
"""

from __future__ import annotations

import asyncio
import base64

from emulators.prime.faults import Fault
from emulators.prime.tunnels import Control, Tunnel
from emulators.prime.web import Answer, Request, json_answer

_NOT_PASSED_ON = frozenset({"connection", "keep-alive", "proxy-connection", "transfer-encoding", "expect", "upgrade"})
#: What frps serves for a host that no frpc has registered.
_NOT_FOUND = b"<!DOCTYPE html><html><body><h1>The page you requested was not found.</h1></body></html>"


class Forwarder(asyncio.Protocol):
    """One request on its way through a tunnel; also the upstream connection's protocol."""

    def __init__(self, request: Request, control: Control, tunnel: Tunnel, fault: Fault | None) -> None:
        self._client = request.connection
        self._tunnel = tunnel
        self._fault = fault
        self._transport: asyncio.Transport | None = None
        self._chunked = "chunked" in request.headers.get("transfer-encoding", "").lower()
        self._waiting: list[bytes] = [self._head(request, control)]
        self._answered = False
        self._tunnel.clients.add(self._client)
        self._task = asyncio.get_running_loop().create_task(self._connect(*control.local_addr))

    def _head(self, request: Request, control: Control) -> bytes:
        """Return the request's head, with the path that the local server knows."""
        target = self._client.target.removeprefix(f"/t/{self._tunnel.tunnel_id}")
        lines = [f"{request.method} {target if target.startswith('/') else '/' + target} HTTP/1.1"]
        lines += [f"{name}: {value}" for name, value in request.headers.items() if name not in _NOT_PASSED_ON]
        lines += [
            "connection: close",
            f"x-forwarded-host: {request.headers.get('host', '')}",
            "x-forwarded-for: 127.0.0.1",
        ]
        if self._chunked:
            lines.append("transfer-encoding: chunked")
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")

    async def _connect(self, host: str, port: int) -> None:
        if self._fault and self._fault.delay:
            await asyncio.sleep(self._fault.delay)
        try:
            await asyncio.get_running_loop().create_connection(lambda: self, host, port)
        except OSError:
            self._refuse()

    def _refuse(self) -> None:
        self._tunnel.clients.discard(self._client)
        self._client.answer(Answer(502, b"Bad Gateway", "text/plain", {"connection": "close"}))
        self._client.close()

    # The local server's side.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]
        if not self._client.open:
            transport.close()
            return
        self._transport.write(b"".join(self._waiting))  # type: ignore[union-attr]
        self._waiting.clear()

    def data_received(self, data: bytes) -> None:
        if self._fault and self._fault.drop == "after":
            self._client.abort()
        elif not (self._fault and self._fault.hang):
            self._answered = True
            self._client.write(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._tunnel.clients.discard(self._client)
        if self._fault and self._fault.hang:
            return
        if exc or not self._client.open:
            self._client.abort()
        elif self._answered:
            self._client.close()
        else:
            self._refuse()

    def pause_writing(self) -> None:
        self._client.pause_reading()

    def resume_writing(self) -> None:
        self._client.resume_reading()

    # The client's side.

    def feed(self, data: bytes) -> None:
        self._write(b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data)

    def finish(self) -> None:
        if self._chunked:
            self._write(b"0\r\n\r\n")

    def client_gone(self) -> None:
        self._tunnel.clients.discard(self._client)
        if self._transport:
            self._transport.abort()

    def client_writable(self, writable: bool) -> None:
        if self._transport and not self._transport.is_closing():
            (self._transport.resume_reading if writable else self._transport.pause_reading)()

    def _write(self, data: bytes) -> None:
        if self._transport:
            self._transport.write(data)
        else:
            self._waiting.append(data)


def refuse(tunnel: Tunnel | None, request: Request) -> Answer | None:
    """Return the edge's own answer when a request cannot be passed on."""
    if tunnel is None or tunnel.deleted or tunnel.status not in {"connected", "disconnected"}:
        return Answer(404, _NOT_FOUND, "text/html")
    if tunnel.control is None:
        return Answer(502, b"Bad Gateway: the tunnel is not connected", "text/plain")
    if tunnel.request.http_user:
        wanted = base64.b64encode(f"{tunnel.request.http_user}:{tunnel.http_password}".encode()).decode()
        if request.headers.get("authorization") != f"Basic {wanted}":
            return json_answer({"detail": "Unauthorized"}, 401, **{"www-authenticate": 'Basic realm="Restricted"'})
    return None
