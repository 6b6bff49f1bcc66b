"""No tunnel at all: sandboxes reach the gateway under its own address, as they do on one machine or in one network."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from workers.tunnels.base import TunnelLease, TunnelProvider


@dataclass(frozen=True)
class DirectLease:
    """The gateway's own address; there is nothing in between that could break."""

    url: str
    local_addr: str
    tunnel_id: str | None = None

    async def confirm(self, since: float, until: float) -> None:
        """Do nothing: it always serves."""

    async def broken(self) -> None:
        """Wait for ever: only a cancellation ends this."""
        await asyncio.get_running_loop().create_future()


class DirectTunnels(TunnelProvider):
    """Hands out the gateway's own address, without starting or holding anything."""

    @asynccontextmanager
    async def lease(self, gateway_url: str) -> AsyncIterator[TunnelLease]:
        """Yield a lease whose ``url`` is ``gateway_url`` without a trailing slash and ``local_addr`` its host."""
        yield DirectLease(url=gateway_url.rstrip("/"), local_addr=urlsplit(gateway_url).hostname or "")

    async def check(self) -> None:
        """Do nothing: there is nothing that could be ill."""

    def report(self) -> list[dict[str, Any]]:
        """Return nothing: there are no tunnels."""
        return []

    async def aclose(self) -> None:
        """Do nothing: there is nothing to close."""
