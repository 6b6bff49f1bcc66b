"""What operators and the trainer ask: pause, resume, what the upstreams do, metrics; and who may reach these at all."""

from __future__ import annotations

import asyncio
import ipaddress
from typing import Any

from workers.gateway.server.errors import GatewayRefusal, invalid
from workers.gateway.server.exchange import Exchange
from workers.gateway.server.jsonio import parse_object
from workers.gateway.server.log import Kind

#: Ends of host names that exist inside a network alone.
_INNER = (".localhost", ".local", ".internal", ".svc", ".cluster.local")


def is_inner_host(host: str | None, named: frozenset[str]) -> bool:
    """Return whether a request's ``Host`` is one that no tunnel has.

    A tunnel's visitors are told apart by the host name that they ask for, which is a public one. So: an address, a
    name without a dot, one that is known inside a network alone, or one of ``named``.
    """
    name = _without_port(host or "").lower()
    if not name or name in named:
        return bool(name)
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return "." not in name or name.endswith(_INNER)
    return True


class Admin:
    """The admin calls; host and control key were checked before."""

    def __init__(self, state: Any) -> None:
        self._state = state

    async def pause(self, exchange: Exchange) -> None:
        """Hold new model calls; with ``?drain=SECONDS``, wait until those that run have ended, and tell how many do.

        Calls that come meanwhile are not refused: they are made after ``resume``.
        """
        self._state.gate.pause()
        limit = _seconds(exchange.query("drain"))
        loop = asyncio.get_running_loop()
        end = loop.time() + limit
        while self._state.upstreams.in_flight and loop.time() < end:  # noqa: ASYNC110 - asked for once in a weight update
            await asyncio.sleep(0.01)
        await exchange.json(self._standing())

    async def resume(self, exchange: Exchange) -> None:
        """Let model calls go on, under the body's ``policy_version`` (a string or a number) if it names one."""
        body = await self._state.read_body(exchange)
        told = parse_object(body) if body else {}
        version = told.get("policy_version")
        if version is not None:
            if isinstance(version, bool) or not isinstance(version, str | int | float):
                raise invalid("string_type", ["policy_version"], "Input should be a string or a number", version)
            self._state.gate.version = version
            self._state.recorder.log.write(Kind.POLICY, {"version": version})
        self._state.gate.resume()
        await exchange.json(self._standing())

    async def status(self, exchange: Exchange) -> None:
        """Answer what the model servers do."""
        servers = [
            {
                "upstream": server.name,
                "healthy": not server.ejected,
                "in_flight": server.in_flight,
                "calls": server.calls,
                "failed": server.failed,
            }
            for server in self._state.upstreams.servers
        ]
        await exchange.json(self._standing() | {"rollouts": len(self._state.recorder), "upstreams": servers})

    async def metrics(self, exchange: Exchange) -> None:
        """Answer Prometheus."""
        kind = {"content-type": "text/plain; version=0.0.4; charset=utf-8"}
        await exchange.answer(200, self._state.metrics.text(), kind)

    def _standing(self) -> dict[str, Any]:
        gate, upstreams = self._state.gate, self._state.upstreams
        return {
            "instance": self._state.instance,
            "paused": gate.is_paused,
            "policy_version": gate.version,
            "in_flight": upstreams.in_flight,
        }


def _seconds(given: str | None) -> float:
    try:
        return min(max(0.0, float(given or 0)), 3600.0)
    except ValueError:
        raise GatewayRefusal(400, f"drain is a number of seconds, not {given!r}.") from None


def _without_port(host: str) -> str:
    if host.startswith("["):
        return host[1:].partition("]")[0]
    name, _, port = host.rpartition(":")
    return name if name and port.isdecimal() else host
