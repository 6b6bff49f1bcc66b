"""The systems of one worker process, and which of them a rollout uses."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from contextvars import Context
from dataclasses import replace

from producer.contract import ErrorKind, RolloutRequest
from workers.errors import InvalidRolloutError
from workers.foreign import AllowedGateways, ForeignGateways
from workers.gateway.client import HttpGateway
from workers.gateway.protocol import Gateway
from workers.leaks import PROCESS
from workers.ledger import fleet_label
from workers.registry import sandbox_provider, tunnel_provider
from workers.rollout import Systems
from workers.settings import WorkerSettings
from workers.state import SYSTEMS
from workers.upkeep import Upkeep
from workers.watchdog import Limits

logger = logging.getLogger(__name__)

#: Seconds in which all of them close, side by side: what hangs must not use up the others' time. The worker's lease
#: keeper and this have to end within `workers.pool.AsyncioPool.lifespan_grace`.
CLOSE_LIMIT = 16.0

Close = Callable[[], Awaitable[object]]


class WorkerSystems:
    """Holds providers and gateways while the worker runs: use it as an async context manager, on the worker's loop.

    ``fleet_id`` is the fleet's identity (`workers.ledger.Ledger.fleet_id`), for the labels of what is created;
    ``beside`` is what else ends with the worker, at the same time.
    """

    def __init__(
        self, settings: WorkerSettings, worker: str, *, fleet_id: str = "", beside: Mapping[str, Close] | None = None
    ) -> None:
        self._settings = settings
        self._worker = worker
        self._allowed = AllowedGateways(settings.gateway_allow)
        identity = (fleet_label(fleet_id),) if fleet_id else ()
        self._labels = (f"fleet:{settings.fleet}", f"worker:{worker}", *identity)
        #: Tells this process from the next one of this name, for the labels of tunnels.
        self.process = secrets.token_hex(6)
        self._closing = dict(beside or {})
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> WorkerSystems:
        settings = self._settings
        key = settings.gateway_control_key
        self.tunnels = tunnel_provider(settings, (*self._labels, f"{PROCESS}:{self.process}"))
        self.sandboxes = sandbox_provider(settings)
        self._ours = Systems(
            gateway=HttpGateway(control_key=key.get_secret_value() if key else None, worker=self._worker),
            tunnels=self.tunnels,
            sandboxes=self.sandboxes,
            labels=self._labels,
            limits=Limits(settings.idle_limit, settings.rollout_limit),
        )
        # The control key is for our own gateway: it must not be sent to an address that came with a request.
        others = ForeignGateways(HttpGateway(), settings.foreign_gateways, settings.gateway_url, self._tunnels_lead_to)
        self._others = replace(self._ours, gateway=others)
        self._intercepting: tuple[str, Systems] | None = None
        self._closing |= {"sandboxes": self.sandboxes.aclose, "tunnels": self.tunnels.aclose}
        self._closing |= {"gateway": self._ours.gateway.aclose, "gateways": self._others.gateway.aclose}
        checks = Upkeep(self._check_tunnels, interval=settings.tunnel_check_interval, stage="tunnel_health", late=3.0)
        self.check_tunnels = await self._stack.enter_async_context(checks)
        return self

    async def _check_tunnels(self) -> None:
        await self.tunnels.check()

    async def __aexit__(self, *exc_info: object) -> None:
        await self._stack.aclose()
        await close_together(self._closing)

    def of(self, request: RolloutRequest) -> tuple[str, Systems]:
        """Return the URL of the gateway that ``request`` uses, and the systems to run it with.

        Raises `InvalidRolloutError` when it names one that this worker may not use, or wants none, and this worker has
        no model server to pass its calls to.
        """
        if self._is_foreign(request.gateway_url):
            self._allowed.check(request.gateway_url or "")
        if beside := self._beside(request.gateway_url, request.use_gateway):
            return beside
        if self._intercepting is None:
            self._intercepting = self._intercept()
        return self._intercepting

    def none(self) -> tuple[str, Systems]:
        """Return what `of` does, for an attempt that uses no gateway, no tunnel and no sandbox."""
        return "", self._ours

    def met_at(self, gateway_url: str) -> frozenset[ErrorKind]:
        """Return which of this worker's own systems an attempt meets that runs with this gateway, as `of` returned it.

        Of a gateway that only its request chose, and of the tunnel to that, this worker's others learn nothing.
        """
        usual = self._settings.gateway_url if self._settings.use_gateway else (self._intercepting or ("",))[0]
        if not gateway_url:
            return frozenset()
        return SYSTEMS if gateway_url == usual else frozenset({ErrorKind.SANDBOX})

    def gateway_of(self, gateway_url: str | None, use_gateway: bool | None) -> tuple[str, Gateway] | None:
        """Return where a request with these fields was registered; None when that was its worker's own process.

        Raises `InvalidRolloutError` for a gateway that this worker may not call: others of its fleet may.
        """
        if gateway_url and self._is_foreign(gateway_url):
            self._allowed.check(gateway_url)
        beside = self._beside(gateway_url, use_gateway)
        return (beside[0], beside[1].gateway) if beside else None

    def _beside(self, gateway_url: str | None, use_gateway: bool | None) -> tuple[str, Systems] | None:
        settings = self._settings
        if gateway_url and self._is_foreign(gateway_url):
            return gateway_url, self._others
        wants_gateway = settings.use_gateway if use_gateway is None else use_gateway
        return (settings.gateway_url, self._ours) if wants_gateway or gateway_url else None

    def _is_foreign(self, gateway_url: str | None) -> bool:
        return gateway_url not in {None, self._settings.gateway_url}

    def _tunnels_lead_to(self) -> list[str]:
        return [str(tunnel["gateway_url"]) for tunnel in self.tunnels.report()]

    def _intercept(self) -> tuple[str, Systems]:
        settings = self._settings
        if not settings.model_url:
            raise InvalidRolloutError(
                "use_gateway: false, but this worker has no ROLLOUTS_MODEL_URL to pass the agent's model calls to"
            )
        from workers.interception import InterceptingGateway  # a whole gateway, which few workers need

        key = settings.model_api_key
        served = InterceptingGateway(settings.model_url, key.get_secret_value() if key else None)
        served.start()
        gateway = HttpGateway(control_key=served.control_key, worker=self._worker)
        self._closing |= {"interception": served.aclose, "intercepted": gateway.aclose}
        return served.url, replace(self._ours, gateway=gateway)


async def close_together(closing: Mapping[str, Close]) -> None:
    """Close systems side by side, for `CLOSE_LIMIT` seconds; failures are logged, and so is what is left open."""
    # In contexts of their own: whose time-out surrounds this must not be theirs.
    tasks = {name: asyncio.create_task(_closed(close), name=name, context=Context()) for name, close in closing.items()}
    if not tasks:
        return
    _, late = await asyncio.wait(tasks.values(), timeout=CLOSE_LIMIT)
    for name, task in tasks.items():
        if task in late:
            # Not waited for: those that finish their work in spite of a cancellation are the ones that are late.
            task.cancel()
            logger.error("%s did not close within %g s, and are left behind", name, CLOSE_LIMIT, extra=_STAGE)
        elif not task.cancelled() and (error := task.exception()):
            logger.error("%s did not close cleanly: %r", name, error, exc_info=error, extra=_STAGE)


async def _closed(close: Close) -> None:
    await close()


_STAGE = {"stage": "close"}
