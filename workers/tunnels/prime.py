"""Tunnels of the Prime platform, on the unmodified ``prime-tunnel`` SDK: ``ROLLOUTS_TUNNEL_PROVIDER=prime``.

Every call of the SDK is made in one thread of its own (`SdkThread`), and every one has a deadline. The platform's words
are kept, secrets never: the token and the binding secret of a tunnel are cut out of all that its frpc prints.

Sources: the SDK's ``tunnel.py``, ``frpc.py`` and ``core/client.py``, 0.1.15. Credentials are found by the SDK itself:
``PRIME_API_KEY``, ``PRIME_TEAM_ID`` and ``PRIME_API_BASE_URL``, then ``~/.prime/config.json``.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import httpx
import prime_tunnel.exceptions as sdk
from prime_tunnel import Tunnel
from prime_tunnel.binary import get_frpc_path
from prime_tunnel.core.client import TunnelClient
from prime_tunnel.models import TunnelInfo
from redis.asyncio import Redis

from producer import broker
from workers.instruments import NO_ANSWER, PLATFORM_REQUESTS
from workers.reaper import REAP_VARIABLE, Reaper
from workers.settings import WorkerSettings
from workers.throttle import Throttle
from workers.tunnels.backend import Limits, Registration
from workers.tunnels.base import FoundTunnel
from workers.tunnels.pool import TunnelPool
from workers.tunnels.prime_errors import annotate, mapped
from workers.tunnels.sdk_thread import SdkThread, in_daemon_thread

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: The service allows 512 starts a minute for one key; that many of them may come at once.
_STARTS_AT_ONCE = 32
_TERMINAL_STATUSES = frozenset({"expired", "terminated"})
_OUTPUT_TIMEOUT = 1.0
_REAPER_TIMEOUT = 2.0
#: Part of a start's time after which the SDK itself gives frpc up: it then tells what frpc has printed.
_CONNECT_SHARE = 0.7
_PAGE = 100


def prime_tunnels(
    settings: WorkerSettings, labels: tuple[str, ...] = (), *, limits: Limits | None = None
) -> TunnelPool:
    """Make the worker's tunnel pool on the Prime platform; ``labels`` are those of all that this worker creates.

    Call it on the worker's event loop, while the process has few threads: it sets one variable of the environment.
    """
    worker = next((label.partition(":")[2] for label in labels if label.startswith("worker:")), socket.gethostname())
    redis = Redis.from_url(settings.redis_url, socket_timeout=10, socket_connect_timeout=5, socket_keepalive=True)
    throttle = Throttle(
        redis,
        broker.throttle_key("tunnel-starts"),
        # A full bucket comes on top in the first minute.
        per_minute=max(1.0, settings.tunnel_starts_per_minute - _STARTS_AT_ONCE),
        burst=_STARTS_AT_ONCE,
    )
    backend = PrimeBackend(worker, labels or (f"fleet:{settings.fleet}",))
    return TunnelPool(backend, limits=limits, throttle=throttle, on_close=redis.aclose)


class PrimeBackend:
    """The Prime platform's tunnel service, for one worker process.

    No handler runs on SIGKILL, and a frpc whose worker was killed lives on for ever. So a `Reaper` watches this
    process: what was started with its marker ends with it.
    """

    def __init__(self, name: str, labels: tuple[str, ...]) -> None:
        self.name = name
        self.labels = labels
        self.sdk = SdkThread("prime-tunnel")
        self._frpc: Future[Path] | None = None
        self._outer_marker = os.environ.get(REAP_VARIABLE)
        self._reaper = Reaper.start()
        # The SDK gives its frpc this process's own environment. Set once, and early: C code in other threads reads the
        # environment without a lock.
        os.environ.update(self._reaper.environment())
        self._redactor = Redactor()
        logging.getLogger("prime_tunnel.frpc").addFilter(self._redactor)

    def open(self, host: str, port: int, label: str) -> PrimeTunnel:
        """Return a tunnel to ``host:port`` that has yet to be started."""
        return PrimeTunnel(self, host, port, label, self._redactor)

    def frpc(self) -> Future[Path]:
        """Find frpc, or download it, once for all who ask; a download that failed is begun again."""
        if self._frpc is None or (self._frpc.done() and self._frpc.exception() is not None):
            self._frpc = in_daemon_thread(get_frpc_path, "prime-tunnel-frpc")
        return self._frpc

    async def sweep(self, label: str, *, timeout: float) -> int:
        """Delete every registration that carries ``label`` and return their number."""
        return await self.call("look for registrations", lambda: self._sweep(label), timeout)

    async def find(self, label: str, *, timeout: float) -> list[FoundTunnel]:
        """Return every living registration that carries ``label``."""
        return await self.call("look for registrations", lambda: self._find(label), timeout)

    async def delete(self, tunnel_id: str, *, timeout: float) -> None:
        """Delete one registration, or find it gone."""
        await self.call("delete a registration", lambda: self._delete(tunnel_id), timeout)

    async def _delete(self, tunnel_id: str) -> None:
        async with _Client() as client:
            await client.delete_tunnel(tunnel_id)

    async def _sweep(self, label: str) -> int:
        ids = [tunnel.id for tunnel in await self._find(label)]
        async with _Client() as client:
            return sum(await asyncio.gather(*map(client.delete_tunnel, ids)))

    async def _find(self, label: str) -> list[FoundTunnel]:
        async with _Client() as client:
            found: list[TunnelInfo] = []
            page, more = 1, True
            while more:
                answer = await client.list_tunnels_page(labels=[label], page=page, per_page=_PAGE)
                found += answer.tunnels
                page, more = page + 1, answer.has_next and bool(answer.tunnels)
            # What the service means by a filter of labels is its own affair: what lacks the label is not ours.
            return [
                FoundTunnel(t.tunnel_id, tuple(t.labels), _epoch(t.created_at))
                for t in found
                if label in t.labels and (t.status or "").lower() not in _TERMINAL_STATUSES
            ]

    async def call(self, doing: str, work: Callable[[], Coroutine[Any, Any, T]], timeout: float) -> T:
        """Run a coroutine of the SDK on its thread, bounded; raises `TunnelError`, saying what could not be done."""
        return await self.bounded(doing, self.sdk.run(work, timeout=timeout), timeout)

    async def bounded(self, doing: str, work: Coroutine[Any, Any, T], timeout: float) -> T:
        """Await ``work``, which calls the SDK; raises `TunnelError`, saying what could not be done."""
        try:
            async with asyncio.timeout(timeout):
                return await work
        except Exception as error:  # noqa: BLE001 - whatever it is, it is mapped
            if isinstance(error.__cause__, httpx.RequestError) or isinstance(error, TimeoutError):
                PLATFORM_REQUESTS.labels("tunnels", NO_ANSWER).inc()
            words = self._redactor.redact(str(error))
            raise mapped(error, words, doing, timeout) from None  # its cause may show an answer, with its secrets

    async def aclose(self) -> None:
        """End the SDK's thread, and with the reaper's help every frpc that is left."""
        await self.sdk.aclose()
        if os.environ.get(REAP_VARIABLE) == self._reaper.token:
            if self._outer_marker is None:
                del os.environ[REAP_VARIABLE]
            else:
                os.environ[REAP_VARIABLE] = self._outer_marker
        logging.getLogger("prime_tunnel.frpc").removeFilter(self._redactor)
        await self.sdk.blocking(self._reaper.close, timeout=_REAPER_TIMEOUT)


class PrimeTunnel:
    """One `prime_tunnel.Tunnel`, driven on the SDK's thread."""

    def __init__(self, backend: PrimeBackend, host: str, port: int, label: str, redactor: Redactor) -> None:
        self._backend = backend
        self._host = host
        self._port = port
        self._label = label
        self._redactor = redactor
        self._tunnel: Tunnel | None = None
        self._client: _Client | None = None
        self._operation: asyncio.Task[Any] | None = None  # start or restart, on the SDK's loop
        self._url = ""
        self._id: str | None = None

    @property
    def tunnel_id(self) -> str | None:
        """The service's id; kept when the tunnel has ended."""
        return self._id

    @property
    def url(self) -> str:
        """URL of the started tunnel, without a trailing slash."""
        return self._url

    @property
    def running(self) -> bool:
        """Whether its frpc lives."""
        return self._tunnel is not None and self._tunnel.is_running

    @property
    def gone(self) -> bool:
        """Whether frpc was told, or `status` has found, that the registration is gone."""
        return self._tunnel is not None and self._tunnel.is_gone

    async def start(self, *, timeout: float) -> None:
        """Register the tunnel, start frpc, and wait until it is connected."""
        await self._backend.call("start a tunnel", lambda: self._start(timeout), timeout)

    async def _start(self, timeout: float) -> None:
        self._operation = asyncio.current_task()
        await asyncio.wrap_future(self._backend.frpc())
        self._client = _Client(self._redactor)
        self._tunnel = Tunnel(
            self._port,
            local_addr=self._host,
            name=self._backend.name,
            labels=[*self._backend.labels, self._label],
            connection_timeout=_CONNECT_SHARE * timeout,
        )
        self._tunnel._client = self._client
        self._url = (await self._tunnel.start()).rstrip("/")
        self._id = self._tunnel.tunnel_id

    async def restart(self, *, timeout: float) -> None:
        """Replace frpc under the same registration."""
        await self._backend.call("restart the tunnel", self._restart, timeout)

    async def _restart(self) -> None:
        self._operation = asyncio.current_task()
        await self._started().restart()

    async def status(self, *, timeout: float) -> Registration:
        """Ask the service for its record; one that it has no record of is GONE."""
        status = await self._backend.call("ask for its status", lambda: self._started().status(), timeout)
        if status.gone:
            return Registration.GONE
        known = {registration.value for registration in Registration}
        return Registration(status.registration) if status.registration in known else Registration.PENDING

    async def output(self) -> str:
        """Return frpc's last 50 lines, without secrets."""
        tunnel = self._tunnel
        if tunnel is None:
            return ""
        try:  # it waits for the readers of a frpc that has ended
            lines = await self._backend.sdk.blocking(lambda: tunnel.recent_output, timeout=_OUTPUT_TIMEOUT)
        except TimeoutError:
            return ""
        return self._redactor.redact("\n".join(lines))

    async def stop(self, *, timeout: float) -> None:
        """End frpc, delete its registration, and remove its configuration with the token in it."""
        await self._backend.bounded("stop the tunnel", self._stop(timeout), timeout)

    async def _stop(self, timeout: float) -> None:
        sdk, operation, share = self._backend.sdk, self._operation, timeout / 3
        try:
            if operation is not None and not operation.done():  # cancelled by now: the SDK clears up after itself
                await sdk.run(lambda: _ended(operation), timeout=share)
        finally:
            try:
                if self._tunnel is not None:
                    # In a thread, for it waits for frpc; not through the SDK's loop, which may wait for another one
                    # just now. It does not say whether the deletion worked: the pool sweeps.
                    await sdk.blocking(self._tunnel.sync_stop, timeout=share)
            finally:
                if self._client is not None:
                    await sdk.run(self._client.close, timeout=share)

    def _started(self) -> Tunnel:
        if self._tunnel is None:
            raise sdk.TunnelError("the tunnel is not started")
        return self._tunnel


def _epoch(moment: datetime | None) -> float | None:
    """Return a time of the service in epoch seconds; one that does not say where is meant in UTC."""
    if moment is None:
        return None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


async def _ended(task: asyncio.Task[Any]) -> None:
    await asyncio.wait({task})


class _Client(TunnelClient):
    """The SDK's HTTP client, whose errors keep the status and `Retry-After` that the SDK drops.

    With a ``redactor``, it is told every secret that is received.
    """

    def __init__(self, redactor: Redactor | None = None) -> None:
        super().__init__()
        self._redactor = redactor
        if redactor is not None:
            redactor.add(self.api_key)

    async def create_tunnel(self, *args: Any, **fields: Any) -> TunnelInfo:
        """Register a tunnel."""
        info = await super().create_tunnel(*args, **fields)
        if self._redactor is not None:
            self._redactor.add(info.frp_token, info.binding_secret, info.http_password or "")
        return info

    async def _handle_response(self, response: httpx.Response, operation: str) -> dict[str, Any]:
        PLATFORM_REQUESTS.labels("tunnels", response.status_code).inc()
        try:
            answer = await super()._handle_response(response, operation)
            _require_found(response, operation)
        except sdk.TunnelError as error:
            annotate(error, response.status_code, response.headers.get("retry-after"))
            raise
        return answer


def _require_found(response: httpx.Response, operation: str) -> None:
    """Refuse the 404 that the SDK takes for an empty answer: there is no tunnel service at that address."""
    if response.status_code == 404 and operation in {"create tunnel", "list tunnels"}:
        raise sdk.TunnelError(f"Failed to {operation}: not found")


class Redactor(logging.Filter):
    """Cuts the secrets of tunnels out of the lines that frpc prints."""

    def __init__(self) -> None:
        super().__init__()
        self._secrets: tuple[str, ...] = ()

    def add(self, *secrets: str) -> None:
        """Cut these out from now on."""
        # A new tuple each time: the threads that read frpc's output read this.
        self._secrets = tuple(dict.fromkeys((*self._secrets, *filter(None, secrets))))

    def redact(self, text: str) -> str:
        """Return ``text`` without secrets."""
        for secret in self._secrets:
            text = text.replace(secret, "[redacted]")
        return text

    def filter(self, record: logging.LogRecord) -> bool:
        """Change the record, and let it pass."""
        message = record.getMessage()
        redacted = self.redact(message)
        if redacted != message:
            record.msg, record.args = redacted, None
        return True
