"""Gateways that come with a request: which of them a worker may call, and how many at one time.

The address in a request decides whom the worker's process calls, and where its tunnel leads: into networks that whoever
wrote the request cannot reach. So no other gateway than the worker's own is used, unless the worker's settings name it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

from workers.errors import GatewayError, InvalidRolloutError
from workers.gateway.protocol import Gateway, Progress, Registration, Trajectory

_PATTERN = re.compile(r"(?P<host>\[[0-9a-f:.*]+\]|[a-z0-9._*-]+)(?::(?P<port>[0-9*]{1,5}))?")
_PORTS = {"http": 80, "https": 443}


def host_pattern(text: str) -> str:
    """Return ``text`` in the form in which it is compared; raises `ValueError` when it is not ``HOST[:PORT]``."""
    pattern = text.strip().lower()
    if not _PATTERN.fullmatch(pattern):
        raise ValueError(
            f"{text!r} is not HOST or HOST:PORT, in which * stands for anything; for example 10.0.0.7:8080, "
            "*.gateways.svc:8080, [fd00::7]:8080"
        )
    return pattern


class AllowedGateways:
    """The gateways beside its own that a worker may use, as patterns ``HOST[:PORT]``; without a port, any port."""

    def __init__(self, patterns: Iterable[str]) -> None:
        self._patterns = [re.compile(_expression(pattern)) for pattern in patterns]

    def allow(self, gateway_url: str) -> bool:
        """Whether a request may have a worker use the gateway at ``gateway_url``; what is no URL is not allowed."""
        try:
            address = address_of(gateway_url)
        except ValueError:
            return False
        return any(pattern.fullmatch(address) for pattern in self._patterns)

    def check(self, gateway_url: str) -> None:
        """Raise `InvalidRolloutError` unless the gateway is allowed."""
        if not self.allow(gateway_url):
            raise InvalidRolloutError(
                f"gateway_url: this worker may not use {gateway_url}; leave it out for the worker's own gateway, or "
                f"add {address_of(gateway_url)} to the worker's ROLLOUTS_GATEWAY_ALLOW"
            )


def address_of(gateway_url: str) -> str:
    """Return ``HOST:PORT`` of a gateway, in lower case and always with its port."""
    parts = urlsplit(gateway_url)
    host = (parts.hostname or "").rstrip(".")
    return f"{f'[{host}]' if ':' in host else host}:{parts.port or _PORTS.get(parts.scheme, 0)}"


def _expression(pattern: str) -> str:
    found = _PATTERN.fullmatch(host_pattern(pattern))
    assert found is not None  # noqa: S101 - `host_pattern` has raised
    host, port = found["host"], found["port"] or "*"
    # A * in an IP address must not stand for the rest of a name: 10.0.* is not 10.0.example.com.
    numeric = re.fullmatch(r"[0-9.*]*[0-9][0-9.*]*", host)
    anything = "[0-9.]*" if numeric else r"[0-9a-f:.]*" if host.startswith("[") else r"[^\[\]]*"
    if host == "*":
        anything = ".*"
    return f"{_with_stars(host, anything)}:{_with_stars(port, '[0-9]*')}"


def _with_stars(pattern: str, anything: str) -> str:
    return anything.join(map(re.escape, pattern.split("*")))


class ForeignGateways(Gateway):
    """A `Gateway` for addresses that come with requests: at most ``most`` of them are in use at one time.

    One is in use while a rollout is registered there, and while a tunnel leads there, which outlives its rollouts for a
    while; ``tunnels`` returns the URLs to which there are tunnels.
    """

    def __init__(self, gateway: Gateway, most: int, own: str, tunnels: Callable[[], Iterable[str]]) -> None:
        self._gateway = gateway
        self._most = most
        self._own = address_of(own)
        self._tunnels = tunnels
        self._users: Counter[str] = Counter()

    @asynccontextmanager
    async def registered(
        self, gateway_url: str, rollout_id: str, registration: Registration, *, api_key: str
    ) -> AsyncIterator[None]:
        """Hold a registration; raises `GatewayError`, retryable, when too many others are in use."""
        address = address_of(gateway_url)
        in_use = {*self._users, *map(address_of, self._tunnels())} - {self._own}
        if address not in in_use and len(in_use) >= self._most:
            raise GatewayError(
                f"gateway_url: this worker uses {len(in_use)} gateways that requests name, and takes no more "
                "(ROLLOUTS_FOREIGN_GATEWAYS)"
            )
        self._users[address] += 1
        try:
            async with self._gateway.registered(gateway_url, rollout_id, registration, api_key=api_key):
                yield
        finally:
            self._users[address] -= 1
            if not self._users[address]:
                del self._users[address]

    async def fetch_trajectory(self, gateway_url: str, rollout_id: str) -> Trajectory:
        """Return what was recorded so far."""
        return await self._gateway.fetch_trajectory(gateway_url, rollout_id)

    async def progress(self, gateway_url: str, rollout_id: str) -> Progress:
        """Return how far the rollout has come."""
        return await self._gateway.progress(gateway_url, rollout_id)

    async def cancel(self, gateway_url: str, rollout_id: str) -> None:
        """Refuse the rollout's further model calls."""
        await self._gateway.cancel(gateway_url, rollout_id)

    async def unregister(self, gateway_url: str, rollout_id: str) -> None:
        """Forget the rollout."""
        await self._gateway.unregister(gateway_url, rollout_id)

    async def aclose(self) -> None:
        """Close pooled connections."""
        await self._gateway.aclose()
