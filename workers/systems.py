"""The systems of one worker process, and which of them a rollout uses."""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import replace

from producer.contract import RolloutRequest
from workers.errors import InvalidRolloutError
from workers.gateway.client import HttpGateway
from workers.gateway.protocol import Gateway
from workers.interception import InterceptingGateway
from workers.ledger import fleet_label
from workers.registry import sandbox_provider, tunnel_provider
from workers.rollout import Systems
from workers.settings import WorkerSettings
from workers.upkeep import Upkeep


class WorkerSystems:
    """Holds providers and gateways while the worker runs: use it as an async context manager, on the worker's loop.

    ``fleet_id`` is the fleet's identity (`workers.ledger.Ledger.fleet_id`), for the labels of what is created.
    """

    def __init__(self, settings: WorkerSettings, worker: str, *, fleet_id: str = "") -> None:
        self._settings = settings
        identity = (fleet_label(fleet_id),) if fleet_id else ()
        self._labels = (f"fleet:{settings.fleet}", f"worker:{worker}", *identity)
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> WorkerSystems:
        settings = self._settings
        key = settings.gateway_control_key
        self.tunnels = tunnel_provider(settings, self._labels)
        self.sandboxes = sandbox_provider(settings)
        self._ours = Systems(
            gateway=HttpGateway(control_key=key.get_secret_value() if key else None),
            tunnels=self.tunnels,
            sandboxes=self.sandboxes,
            labels=self._labels,
        )
        # The control key is for our own gateway: it must not be sent to an address that came with a request.
        self._others = replace(self._ours, gateway=HttpGateway())
        self._intercepting: tuple[str, Systems] | None = None
        for system in (self._others.gateway, self._ours.gateway, self.tunnels, self.sandboxes):
            self._stack.push_async_callback(system.aclose)
        checks = Upkeep(self._check_tunnels, interval=settings.tunnel_check_interval, stage="tunnel_health")
        self.check_tunnels = await self._stack.enter_async_context(checks)
        return self

    async def _check_tunnels(self) -> None:
        await self.tunnels.check()

    async def __aexit__(self, *exc_info: object) -> None:
        await self._stack.aclose()

    def of(self, request: RolloutRequest) -> tuple[str, Systems]:
        """Return the URL of the gateway that ``request`` uses, and the systems to run it with.

        Raises `InvalidRolloutError` when it wants none, and this worker has no model server to pass its calls to.
        """
        if beside := self._beside(request.gateway_url, request.use_gateway):
            return beside
        if self._intercepting is None:
            self._intercepting = self._intercept()
        return self._intercepting

    def gateway_of(self, gateway_url: str | None, use_gateway: bool | None) -> tuple[str, Gateway] | None:
        """Return where a request with these fields was registered; None when that was its worker's own process."""
        beside = self._beside(gateway_url, use_gateway)
        return (beside[0], beside[1].gateway) if beside else None

    def _beside(self, gateway_url: str | None, use_gateway: bool | None) -> tuple[str, Systems] | None:
        settings = self._settings
        if gateway_url and gateway_url != settings.gateway_url:
            return gateway_url, self._others
        wants_gateway = settings.use_gateway if use_gateway is None else use_gateway
        return (settings.gateway_url, self._ours) if wants_gateway or gateway_url else None

    def _intercept(self) -> tuple[str, Systems]:
        settings = self._settings
        if not settings.model_url:
            raise InvalidRolloutError(
                "use_gateway: false, but this worker has no ROLLOUTS_MODEL_URL to pass the agent's model calls to"
            )
        key = settings.model_api_key
        served = InterceptingGateway(settings.model_url, key.get_secret_value() if key else None)
        served.start()
        gateway = HttpGateway(control_key=served.control_key)
        self._stack.push_async_callback(served.aclose)
        self._stack.push_async_callback(gateway.aclose)
        return served.url, replace(self._ours, gateway=gateway)
