"""The tunnels API, and the frps that frpc holds a control connection to.

The wire between the stand-in frpc and this frps is lines of JSON, not frp's own protocol: what matters to the tested
program is the SDK's side (the process, its output, its config) and that the public URL works exactly for as long as the
control connection lives.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import orjson

from emulators.prime.models import BulkDeleteTunnels, CreateTunnel
from emulators.prime.refusals import AnswerError, Query, parse
from emulators.prime.sandboxes import far_ahead
from emulators.prime.web import Answer, Connection, Request, json_answer

LIVE = frozenset({"pending", "connected", "disconnected"})
NOT_REGISTERED = "tunnel not registered"
INACTIVE = "tunnel is inactive"
BAD_TOKEN = "invalid authentication token"
BAD_SECRET = "invalid binding secret"


@dataclass(eq=False)
class Tunnel:
    """One registration."""

    tunnel_id: str
    request: CreateTunnel
    url: str
    frp_token: str = field(default_factory=lambda: secrets.token_hex(16))
    binding_secret: str = field(default_factory=lambda: secrets.token_hex(16))
    http_password: str | None = None
    status: str = "pending"
    created_at: datetime = field(default_factory=lambda: datetime.now(UTC))
    connected_at: datetime | None = None
    terminated_at: datetime | None = None
    expires_at: str = field(default_factory=far_ahead)
    deleted: bool = False
    deleted_by_client: bool = False
    frpc_pids: list[int] = field(default_factory=list)
    control: Control | None = None
    #: Clients whose requests are being forwarded; they are cut off when frpc dies.
    clients: set[Connection] = field(default_factory=set)

    @property
    def frpc_pid(self) -> int | None:
        """The frpc that lives, which is not to say that it is connected."""
        return next((pid for pid in reversed(self.frpc_pids) if self._is_frpc(pid)), None)

    def _is_frpc(self, pid: int) -> bool:
        """Return whether a process is still this tunnel's frpc: its config file is in its command line."""
        try:
            os.kill(pid, 0)
            line = Path(f"/proc/{pid}/cmdline").read_bytes() if sys.platform == "linux" else None
        except OSError:
            return False
        return line is None or f"{self.tunnel_id}.toml".encode() in line

    def kill_frpc(self) -> list[int]:
        """SIGKILL every frpc of this tunnel; returns their ids."""
        killed = [pid for pid in self.frpc_pids if self._is_frpc(pid)]
        for pid in killed:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return killed

    def attach(self, control: Control) -> None:
        if self.control:
            self.control.close()
        self.control = control
        self.status = "connected"
        self.connected_at = datetime.now(UTC)

    def detach(self, status: str) -> None:
        """Stop serving the URL, and cut off whoever uses it."""
        self.control = None
        if self.status in LIVE:
            self.status = status
        for client in list(self.clients):
            client.abort()
        self.clients.clear()


class Control(asyncio.Protocol):
    """One frpc's control connection."""

    def __init__(self, tunnels: Tunnels) -> None:
        self._tunnels = tunnels
        self._transport: asyncio.Transport | None = None
        self._buffer = b""
        self._tunnel: Tunnel | None = None
        self.local_addr = ("127.0.0.1", 0)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]
        self._tunnels.controls.add(self)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while b"\n" in self._buffer:
            line, _, self._buffer = self._buffer.partition(b"\n")
            self._login(orjson.loads(line))

    def connection_lost(self, exc: Exception | None) -> None:
        self._tunnels.controls.discard(self)
        self._transport = None
        if self._tunnel and self._tunnel.control is self:
            self._tunnel.detach("disconnected")

    def _login(self, login: dict[str, Any]) -> None:
        tunnel = self._tunnels.all.get(login["user"])
        if tunnel:
            tunnel.frpc_pids.append(login["pid"])
        error = self._tunnels.refuse_login(tunnel, login)
        if error is None and tunnel:
            self._tunnel = tunnel
            self.local_addr = (login["local_ip"], login["local_port"])
            tunnel.attach(self)
        self._say({"error": error} if error else {"run_id": secrets.token_hex(8)})
        if error:
            self.close()

    def _say(self, message: dict[str, Any]) -> None:
        if self._transport:
            self._transport.write(orjson.dumps(message) + b"\n")

    def close(self) -> None:
        if self._transport:
            self._transport.close()


class Tunnels:
    """All tunnels that were ever registered, and the handlers of ``/api/v1/tunnel``."""

    def __init__(self) -> None:
        self.all: dict[str, Tunnel] = {}
        self.controls: set[Control] = set()
        self.limit: int | None = None
        self.api_url = ""
        self.frps_port = 0

    def refuse_login(self, tunnel: Tunnel | None, login: dict[str, Any]) -> str | None:
        """Return why an frpc may not log in, in frps's words."""
        if tunnel is None or tunnel.deleted:
            return NOT_REGISTERED
        if tunnel.status not in LIVE:
            return INACTIVE
        if login["token"] != tunnel.frp_token:
            return BAD_TOKEN
        return BAD_SECRET if login["binding_secret"] != tunnel.binding_secret else None

    def create(self, request: Request) -> Answer:
        body = parse(CreateTunnel, request)
        live = sum(tunnel.status in LIVE and not tunnel.deleted for tunnel in self.all.values())
        if self.limit is not None and live >= self.limit:
            raise AnswerError(400, f"You have reached the maximum number of active tunnels ({self.limit})")
        tunnel_id = f"t{secrets.token_hex(8)}"
        tunnel = self.all[tunnel_id] = Tunnel(tunnel_id, body, f"{self.api_url}/t/{tunnel_id}")
        if body.http_user:
            tunnel.http_password = secrets.token_urlsafe(12)
        record = _describe(tunnel)
        for private in ("status", "user_id", "connected_at", "terminated_at"):
            del record[private]
        return json_answer(
            {
                **record,
                "frp_token": tunnel.frp_token,
                "binding_secret": tunnel.binding_secret,
                "server_host": "127.0.0.1",
                "server_port": self.frps_port,
                "http_password": tunnel.http_password,
            }
        )

    def get(self, _: Request, tunnel_id: str) -> Answer:
        return json_answer(_describe(self._one(tunnel_id)))

    def list(self, request: Request) -> Answer:
        query = Query(request, "page", "perPage", "sortBy", "sortOrder", "labels", "status", "teamId")
        page, size = query.number("page", 1, 1_000_000), query.number("perPage", 50, 100)
        labels, status, team = set(query.many("labels")), query.one("status"), query.one("teamId")
        chosen = [
            tunnel
            for tunnel in self.all.values()
            if not tunnel.deleted
            and labels <= set(tunnel.request.labels)
            and (status is None or tunnel.status == status)
            and (team is None or tunnel.request.team_id == team)
        ]
        if (query.one("sortOrder") or "desc") == "desc":
            chosen.reverse()
        begin = (page - 1) * size
        return json_answer(
            {
                "tunnels": [_describe(tunnel) for tunnel in chosen[begin : begin + size]],
                "total": len(chosen),
                "page": page,
                "per_page": size,
                "has_next": begin + size < len(chosen),
            }
        )

    def delete(self, _: Request, tunnel_id: str) -> Answer:
        self.remove(self._one(tunnel_id), by_client=True)
        return Answer(204, b"")

    def bulk_delete(self, request: Request) -> Answer:
        body = parse(BulkDeleteTunnels, request)
        succeeded, failed = [], []
        for tunnel_id in body.tunnel_ids if body.tunnel_ids is not None else list(self.all):
            tunnel = self.all.get(tunnel_id)
            if tunnel is None or tunnel.deleted:
                if body.tunnel_ids is not None:
                    failed.append({"tunnel_id": tunnel_id, "error": "Tunnel not found"})
            elif _selected(tunnel, body):
                self.remove(tunnel, by_client=True)
                succeeded.append(tunnel_id)
        message = f"{len(succeeded)} tunnels deleted, {len(failed)} failed"
        return json_answer({"succeeded": succeeded, "failed": failed, "message": message})

    def remove(self, tunnel: Tunnel, *, by_client: bool, status: str | None = None) -> None:
        """End a registration; with ``status`` its record stays, as that of an expired or terminated one does."""
        tunnel.terminated_at = datetime.now(UTC)
        tunnel.deleted_by_client = by_client
        tunnel.deleted = status is None
        control = tunnel.control
        tunnel.detach("terminated")
        tunnel.status = status or "terminated"
        if control:
            control.close()

    def disconnect(self, tunnel: Tunnel) -> None:
        """Stop serving a tunnel whose frpc lives, and believes itself connected."""
        tunnel.detach("disconnected")

    def _one(self, tunnel_id: str) -> Tunnel:
        tunnel = self.all.get(tunnel_id)
        if tunnel is None or tunnel.deleted:
            raise AnswerError(404, f"Tunnel {tunnel_id} not found")
        return tunnel


def _selected(tunnel: Tunnel, body: BulkDeleteTunnels) -> bool:
    labels = set(body.labels or []) <= set(tunnel.request.labels)
    team = body.team_id is None or tunnel.request.team_id == body.team_id
    return labels and team and (body.status is None or tunnel.status == body.status)


def _describe(tunnel: Tunnel) -> dict[str, Any]:
    return {
        "tunnel_id": tunnel.tunnel_id,
        "name": tunnel.request.name,
        "hostname": tunnel.url.removeprefix("http://"),
        "url": tunnel.url,
        "local_port": tunnel.request.local_port,
        "labels": tunnel.request.labels,
        "http_user": tunnel.request.http_user,
        "expires_at": tunnel.expires_at,
        "user_id": "user-emulated",
        "team_id": tunnel.request.team_id,
        "status": tunnel.status,
        "created_at": tunnel.created_at.isoformat(),
        "connected_at": tunnel.connected_at.isoformat() if tunnel.connected_at else None,
        "terminated_at": tunnel.terminated_at.isoformat() if tunnel.terminated_at else None,
    }
