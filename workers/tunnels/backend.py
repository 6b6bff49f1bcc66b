"""What the pool needs of a tunnel service: start a tunnel, restart it under the same URL, ask about it, stop it.

Failures are typed by what the pool does about them:

TunnelError                   try again, with backoff
├── RegistrationGoneError     only a new tunnel helps, and it has another URL
├── StartRefusedError         trying again at once is of no use: a key, a bill, a quota, this machine
└── RateLimitedError          the whole fleet starts no tunnel for a while
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

from workers.errors import TunnelError
from workers.tunnels.base import FoundTunnel


class RegistrationGoneError(TunnelError):
    """The service has forgotten the tunnel, or lets nobody connect to it any more."""


class StartRefusedError(TunnelError):
    """The service or this machine refuses to start tunnels, and will refuse the next one as well."""

    account = True


class RateLimitedError(TunnelError):
    """The service asks to start no tunnel for ``retry_after`` seconds."""

    def __init__(self, message: str, *, retry_after: float, **fields: Any) -> None:
        super().__init__(message, **fields)
        self.retry_after = retry_after


class Registration(StrEnum):
    """What the service's own record says about a tunnel. CONNECTED is no proof that its URL serves."""

    PENDING = "pending"
    CONNECTED = "connected"
    DISCONNECTED = "disconnected"
    GONE = "gone"


class TunnelProcess(Protocol):
    """One tunnel: a registration with a URL, and the process on this machine that serves it.

    Every call that waits raises `TunnelError` for whatever goes wrong, also when it takes longer than ``timeout``
    seconds, and may be cancelled: `stop` then clears up what it left half done.
    """

    @property
    def tunnel_id(self) -> str | None:
        """The service's id, once the tunnel has started."""
        ...

    @property
    def url(self) -> str:
        """URL of the started tunnel, without a trailing slash."""
        ...

    @property
    def running(self) -> bool:
        """Whether its process lives. Cheap: asked every half second."""
        ...

    @property
    def gone(self) -> bool:
        """Whether the process or an earlier `status` has learnt that the registration is gone. Cheap as well."""
        ...

    async def start(self, *, timeout: float) -> None:
        """Register the tunnel and connect it."""
        ...

    async def restart(self, *, timeout: float) -> None:
        """Replace its process; raises `RegistrationGoneError` when that cannot help."""
        ...

    async def status(self, *, timeout: float) -> Registration:
        """Ask the service for its record."""
        ...

    async def output(self) -> str:
        """Return the last lines that its process has printed, without secrets; never raises."""
        ...

    async def stop(self, *, timeout: float) -> None:
        """End the process and delete the registration. Whether that worked, a `TunnelBackend.sweep` tells."""
        ...


class TunnelBackend(Protocol):
    """A tunnel service."""

    def open(self, host: str, port: int, label: str) -> TunnelProcess:
        """Return a tunnel to ``host:port`` that has yet to be started; its registration will carry ``label``."""
        ...

    async def sweep(self, label: str, *, timeout: float) -> int:
        """Delete every registration that carries ``label`` and return their number; raises `TunnelError`."""
        ...

    async def find(self, label: str, *, timeout: float) -> list[FoundTunnel]:
        """Return every living registration that carries ``label``; raises `TunnelError`."""
        ...

    async def delete(self, tunnel_id: str, *, timeout: float) -> None:
        """Delete one registration, or find it gone; raises `TunnelError`."""
        ...

    async def aclose(self) -> None:
        """Release what the backend holds for itself."""
        ...


class StartLimit(Protocol):
    """The rate at which the whole fleet may start tunnels."""

    async def take(self) -> object:
        """Wait until one more start is allowed."""
        ...

    async def pause(self, seconds: float) -> object:
        """Allow none, to nobody, for ``seconds``."""
        ...


@dataclass(frozen=True)
class Limits:
    """Times in seconds, and numbers of tries. A rollout waits 60 s for its tunnel (`Deadlines.tunnel`)."""

    #: One try to register and connect, and all tries of one start together.
    start_timeout: float = 25.0
    start_budget: float = 50.0
    start_attempts: int = 3
    #: By how much an outage may have begun before the process or this pool hears of it.
    notice: float = 5.0
    #: How long the end of an agent waits for the service's word on its tunnel.
    confirm_patience: float = 5.0
    #: Delay before the second try; it doubles with each further one, up to the maximum, and is jittered.
    backoff: float = 0.5
    backoff_max: float = 15.0
    #: For how long a refused start is not tried again: callers get the same refusal.
    hold_off: float = 30.0
    #: One restart, and all tries to restart together; a tunnel that served for ``stable_after`` has all tries again.
    restart_timeout: float = 20.0
    restart_budget: float = 60.0
    restart_attempts: int = 5
    stable_after: float = 60.0
    #: How often the process is looked at.
    watch_interval: float = 0.5
    status_timeout: float = 20.0
    #: To end a process that ignores SIGTERM takes 5 s, to delete a registration at most as long.
    stop_timeout: float = 15.0
    sweep_timeout: float = 10.0
    #: All of that, at the end of the worker: with the backend's own end, less than `workers.systems.CLOSE_LIMIT`.
    close_timeout: float = 10.0
    #: For how long a tunnel that no rollout uses is kept.
    idle_timeout: float = 900.0
