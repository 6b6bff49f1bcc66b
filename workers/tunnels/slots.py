"""The places of a worker's tunnels: which gateway each leads to, what it remembers, and a rollout's hold on one."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from workers.errors import TunnelError
from workers.tunnels.backend import Limits, StartRefusedError, TunnelProcess
from workers.tunnels.generation import Generation, State
from workers.tunnels.start import Start

_HOST = re.compile(r"[A-Za-z0-9._:-]+")


@dataclass(frozen=True)
class Address:
    """Where a gateway listens; ``path`` is what its URL has beyond that, without a trailing slash."""

    host: str
    port: int
    path: str

    @classmethod
    def of(cls, gateway_url: str) -> Address:
        """Parse ``gateway_url``; raises a `TunnelError` that says what to do about one that no tunnel can lead to."""
        parts = urlsplit(gateway_url)
        try:
            host, port = parts.hostname or "", parts.port or 80
        except ValueError as error:
            raise TunnelError(f"gateway_url: {error}", retryable=False) from None
        if parts.scheme == "https":
            raise TunnelError(
                f"gateway_url: no tunnel leads to https://{host}, because it would speak plain HTTP to it; give the "
                "gateway's http:// address, or use ROLLOUTS_TUNNEL_PROVIDER=direct if sandboxes can reach it",
                retryable=False,
            )
        if parts.scheme != "http" or parts.query or parts.username or not _HOST.fullmatch(host):
            # The host is written into frpc's configuration: it must be nothing but a host.
            raise TunnelError(
                "gateway_url: expected http://HOST:PORT, for example http://127.0.0.1:8080", retryable=False
            )
        return cls(host, port, parts.path.rstrip("/"))


@dataclass(frozen=True)
class PooledLease:
    """A rollout's hold on one generation."""

    url: str
    tunnel_id: str | None
    local_addr: str
    generation: int
    _held: Generation = field(repr=False)

    async def confirm(self, since: float, until: float) -> None:
        """Raise `TunnelError` unless this generation served all the time from ``since`` until ``until``."""
        await self._held.confirm(since, until)

    async def broken(self) -> None:
        """Wait until this generation has ended, then raise `TunnelError` with frpc's last output in ``detail``."""
        await self._held.broken()


class Slot:
    """The place of one gateway's tunnel, and what is remembered from one generation to the next."""

    def __init__(self, host: str, port: int, clock: Callable[[], float]) -> None:
        self.host = host
        self.port = port
        self.generation: Generation | None = None
        self.starting: Start | None = None
        self.number = 0  # of the last generation
        self.users = 0  # rollouts that hold a generation or wait for one
        self.failures = 0  # starts that failed, one after the other
        self.last_error: str | None = None
        self._restarts = 0  # of the generations before
        self._refused: TunnelError | None = None
        self._refused_until = 0.0
        self._clock = clock
        self.last_used = clock()

    def enter(self) -> None:
        """Count one user more."""
        self.users += 1

    def leave(self) -> None:
        """Count one user less."""
        self.users -= 1
        self.last_used = self._clock()

    def refusal(self) -> TunnelError | None:
        """Return why no start is tried for now."""
        return self._refused if self._refused is not None and self._clock() < self._refused_until else None

    def started(self, process: TunnelProcess, label: str, limits: Limits) -> Generation:
        """Take the tunnel that has started as the next generation."""
        self.starting, self.failures, self._refused = None, 0, None
        self.number += 1
        self.generation = Generation(self.number, process, label, limits)
        return self.generation

    def not_started(self, error: TunnelError, hold_off: float) -> None:
        """Note that the start failed."""
        self.starting, self.last_error = None, error.message
        self.failures += 1
        if isinstance(error, StartRefusedError):
            self._refused, self._refused_until = error, self._clock() + hold_off

    def ended(self, generation: Generation, error: TunnelError) -> None:
        """Break every hold on ``generation``, and make room for the next one."""
        generation.end(error)
        if self.generation is generation:
            self.generation, self.last_error = None, error.message
            self._restarts += generation.restarts

    def idle(self) -> float:
        """Return for how many seconds nobody has used the tunnel; 0 while somebody does."""
        return 0.0 if self.users or self.starting else self._clock() - self.last_used

    def report(self) -> dict[str, Any]:
        """Return the state of this slot, for logs, gauges and `rollouts status`."""
        generation = self.generation
        return {
            "gateway_url": f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}",
            "tunnel_id": generation.process.tunnel_id if generation else None,
            "url": generation.process.url if generation else None,
            "alive": generation is not None and generation.state is State.SERVING and generation.process.running,
            "generation": self.number,
            "restarts": self._restarts + (generation.restarts if generation else 0),
            "rollouts": generation.holders if generation else 0,
            "last_error": (generation.last_error if generation else None) or self.last_error,
        }
