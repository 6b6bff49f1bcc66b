"""The tunnel as the flow sees it: a public URL for a gateway, held for the length of one rollout."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol


class TunnelLease(Protocol):
    """A rollout's hold on the tunnel it started with. It never moves to another one: the URL would change."""

    @property
    def url(self) -> str:
        """URL under which sandboxes reach the gateway, without a trailing slash."""
        ...

    @property
    def tunnel_id(self) -> str | None:
        """The provider's id, or None where there is no tunnel."""
        ...

    @property
    def local_addr(self) -> str:
        """Host of the gateway that the tunnel leads to."""
        ...

    async def broken(self) -> None:
        """Wait until this tunnel is dead, gone or replaced, then raise `TunnelError`; never returns otherwise."""
        ...


class TunnelProvider(Protocol):
    """Hands out the worker process's pooled tunnels."""

    def lease(self, gateway_url: str) -> AbstractAsyncContextManager[TunnelLease]:
        """Hold the tunnel to ``gateway_url`` for one rollout, starting it on first use."""
        ...

    async def check(self) -> None:
        """Do one round of health checks: restart what died, replace what is gone. Raises nothing of its own."""
        ...

    def report(self) -> list[dict[str, Any]]:
        """Return how each tunnel is.

        Each is ``{gateway_url, tunnel_id, url, alive, generation, restarts, rollouts, last_error}``.
        """
        ...

    async def aclose(self) -> None:
        """Close every tunnel."""
        ...
