"""The tunnel as the flow sees it: a public URL for a gateway, held for the length of one rollout."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from workers.errors import TunnelError


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

    async def confirm(self, since: float, until: float) -> None:
        """Raise `TunnelError` unless the tunnel served all the time from ``since`` until ``until`` (`time.monotonic`).

        For when an agent has ended: one that does not try a failed call again ends before anybody hears of the outage.
        """
        ...

    async def broken(self) -> None:
        """Wait until this tunnel is dead, gone or replaced, then raise `TunnelError`; never returns otherwise."""
        ...


@dataclass(frozen=True)
class FoundTunnel:
    """A registration that lives, whoever made it; ``created_at`` is in epoch seconds, None if it is not known."""

    id: str
    labels: tuple[str, ...]
    created_at: float | None


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

    async def find(self, label: str) -> list[FoundTunnel]:
        """Return the living registrations that carry ``label``, also those of other processes; raises `TunnelError`."""
        return []

    async def delete(self, tunnel_id: str) -> None:
        """Delete a registration that was found; one that is gone already is deleted. Raises `TunnelError`."""
        raise TunnelError(f"no registration {tunnel_id!r} was found", retryable=False)

    async def aclose(self) -> None:
        """Close every tunnel."""
        ...
