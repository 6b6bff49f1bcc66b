"""The server's end of the handle's channel: one line of JSON for each call, and its end is the end of the server."""

from __future__ import annotations

import asyncio
import socket
import traceback
from collections.abc import Awaitable
from typing import Any

import orjson

from emulators.prime.faults import Fault
from emulators.prime.sandboxes import ACTIVE, Image, Sandbox, Sandboxes
from emulators.prime.server import Server
from emulators.prime.tunnels import Tunnel, Tunnels


class Commands:
    """What the handle may ask; each public method is one call."""

    def __init__(self, server: Server, sandboxes: Sandboxes, tunnels: Tunnels) -> None:
        self._server = server
        self._sandboxes = sandboxes
        self._tunnels = tunnels

    def fault(self, **arguments: Any) -> None:
        self._server.faults.add(Fault(**arguments))

    def clear_faults(self) -> None:
        self._server.faults.clear()

    def requests(self) -> dict[str, int]:
        return dict(self._server.counts)

    def refused(self) -> list[tuple[str, str]]:
        return self._server.refused

    def sandboxes(self) -> list[dict[str, Any]]:
        return [_sandbox_row(sandbox) for sandbox in self._sandboxes.all.values()]

    def tunnels(self) -> list[dict[str, Any]]:
        return [_tunnel_row(tunnel) for tunnel in self._tunnels.all.values()]

    async def leaked(self) -> dict[str, list[Any]]:
        await self._sandboxes.swept()
        kept = [s.id for s in self._sandboxes.all.values() if not s.deleted and s.status in ACTIVE | {"ERROR"}]
        tunnels = [t.tunnel_id for t in self._tunnels.all.values() if not t.terminated_at]
        return {"sandboxes": kept, "tunnels": tunnels, "processes": await self._sandboxes.strays()}

    def image(self, name: str, **behaviour: Any) -> None:
        self._sandboxes.images[name] = Image(**behaviour)

    def end_sandbox(self, sandbox_id: str | None, status: str, error_type: str | None, message: str | None) -> None:
        for sandbox in self._chosen(sandbox_id):
            self._sandboxes.end(sandbox, status, error_type, message)

    def expire_tokens(self, sandbox_id: str | None) -> None:
        for sandbox in self._chosen(sandbox_id):
            self._sandboxes.expire_tokens(sandbox)

    def limit_tunnels(self, count: int | None) -> None:
        self._tunnels.limit = count

    async def kill_frpc(self, tunnel_id: str | None) -> list[int]:
        chosen = self._tunnels_chosen(tunnel_id)
        killed = [pid for tunnel in chosen for pid in tunnel.kill_frpc()]
        while any(tunnel.control for tunnel in chosen if tunnel.frpc_pids and tunnel.frpc_pids[-1] in killed):
            await asyncio.sleep(0.001)  # the kernel closes its connection a moment later
        return killed

    def delete_tunnel(self, tunnel_id: str | None, status: str | None) -> None:
        for tunnel in self._tunnels_chosen(tunnel_id):
            self._tunnels.remove(tunnel, by_client=False, status=status)

    def cut_tunnel(self, tunnel_id: str | None) -> None:
        for tunnel in self._tunnels_chosen(tunnel_id):
            if tunnel.control:
                tunnel.control.close()
                tunnel.detach("disconnected")

    def disconnect_tunnel(self, tunnel_id: str | None) -> None:
        for tunnel in self._tunnels_chosen(tunnel_id):
            self._tunnels.disconnect(tunnel)

    def _chosen(self, sandbox_id: str | None) -> list[Sandbox]:
        if sandbox_id is not None:
            return [self._sandboxes.all[sandbox_id]]
        return [sandbox for sandbox in self._sandboxes.all.values() if sandbox.status in ACTIVE]

    def _tunnels_chosen(self, tunnel_id: str | None) -> list[Tunnel]:
        if tunnel_id is not None:
            return [self._tunnels.all[tunnel_id]]
        return [tunnel for tunnel in self._tunnels.all.values() if not tunnel.terminated_at]


class Channel(asyncio.Protocol):
    """Runs the handle's calls one after the other."""

    def __init__(self, commands: Commands, stopped: asyncio.Event) -> None:
        self._commands = commands
        self._stopped = stopped
        self._buffer = b""
        self._transport: asyncio.Transport | None = None
        self._lock = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    @classmethod
    async def open(cls, descriptor: int, commands: Commands, stopped: asyncio.Event) -> Channel:
        connection = socket.socket(fileno=descriptor)
        connection.setblocking(False)
        loop = asyncio.get_running_loop()
        _, channel = await loop.create_connection(lambda: cls(commands, stopped), sock=connection)
        return channel

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]

    def connection_lost(self, exc: Exception | None) -> None:
        self._stopped.set()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while b"\n" in self._buffer:
            line, _, self._buffer = self._buffer.partition(b"\n")
            task = asyncio.get_running_loop().create_task(self._run(orjson.loads(line)))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def say(self, message: dict[str, Any]) -> None:
        if self._transport:
            self._transport.write(orjson.dumps(message) + b"\n")

    async def _run(self, call: dict[str, Any]) -> None:
        async with self._lock:
            try:
                result = getattr(self._commands, call["name"])(**call["arguments"])
                if isinstance(result, Awaitable):
                    result = await result
            except Exception as error:
                traceback.print_exc()
                self.say({"error": f"{type(error).__name__}: {error}"})
            else:
                self.say({"result": result})


def _sandbox_row(sandbox: Sandbox) -> dict[str, Any]:
    request = sandbox.request.model_dump()
    resources = {name: request[name] for name in ("cpu_cores", "memory_gb", "disk_size_gb", "gpu_count", "gpu_type")}
    names = "name labels environment_vars secrets docker_image timeout_minutes idempotency_key team_id advanced_configs"
    return {
        "id": sandbox.id,
        **{name: request[name] for name in names.split()},
        "resources": resources,
        "start_command": request["start_command"],
        "status": sandbox.status,
        "created_at": sandbox.created_at.isoformat(),
        "deleted": sandbox.deleted,
        "directory": sandbox.paths.root,
        "processes": sorted(child.pid for child in sandbox.children if child.alive),
    }


def _tunnel_row(tunnel: Tunnel) -> dict[str, Any]:
    return {
        "tunnel_id": tunnel.tunnel_id,
        "url": tunnel.url,
        "status": tunnel.status,
        "labels": tunnel.request.labels,
        "name": tunnel.request.name,
        "team_id": tunnel.request.team_id,
        "local_port": tunnel.request.local_port,
        "deleted": tunnel.deleted,
        "frpc_pid": tunnel.frpc_pid,
    }
