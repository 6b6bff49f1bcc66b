"""The systems of one worker process, and which of them a rollout uses."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import AsyncExitStack
from dataclasses import replace

from producer.contract import RolloutRequest
from workers.errors import InvalidRolloutError
from workers.gateway.client import HttpGateway
from workers.interception import InterceptingGateway
from workers.registry import ConfigurationError, sandbox_provider, tunnel_provider
from workers.rollout import Systems
from workers.settings import WorkerSettings

logger = logging.getLogger(__name__)

#: Health checks are beat's to order. One that is this many intervals late is done without: beat may be gone, and a
#: worker whose slots are all taken is sent no task of any kind.
_LATE = 1.5


class WorkerSystems:
    """Holds providers and gateways while the worker runs: use it as an async context manager, on the worker's loop."""

    def __init__(self, settings: WorkerSettings, worker: str) -> None:
        if not settings.use_gateway and not settings.model_url:
            raise ConfigurationError(
                "ROLLOUTS_USE_GATEWAY is false, and there is no ROLLOUTS_MODEL_URL: name the model server to which "
                "this worker passes model calls, such as http://host:8000/v1"
            )
        self._settings = settings
        self._labels = (f"fleet:{settings.fleet}", f"worker:{worker}")
        self._stack = AsyncExitStack()
        self._checked = time.monotonic()

    async def __aenter__(self) -> WorkerSystems:
        settings = self._settings
        key = settings.gateway_control_key
        self.tunnels = tunnel_provider(settings, self._labels)
        self._ours = Systems(
            gateway=HttpGateway(control_key=key.get_secret_value() if key else None),
            tunnels=self.tunnels,
            sandboxes=sandbox_provider(settings),
            labels=self._labels,
        )
        # The control key is for our own gateway: it must not be sent to an address that came with a request.
        self._others = replace(self._ours, gateway=HttpGateway())
        self._intercepting: tuple[str, Systems] | None = None
        for system in (self._others.gateway, self._ours.gateway, self.tunnels, self._ours.sandboxes):
            self._stack.push_async_callback(system.aclose)
        self._watch = asyncio.create_task(self._check_when_beat_is_late(), name="tunnel-watch")
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._watch.cancel()
        await asyncio.gather(self._watch, return_exceptions=True)
        await self._stack.aclose()

    def of(self, request: RolloutRequest) -> tuple[str, Systems]:
        """Return the URL of the gateway that ``request`` uses, and the systems to run it with.

        Raises `InvalidRolloutError` when it wants none, and this worker has no model server to pass its calls to.
        """
        settings = self._settings
        if request.gateway_url and request.gateway_url != settings.gateway_url:
            return request.gateway_url, self._others
        wants_gateway = settings.use_gateway if request.use_gateway is None else request.use_gateway
        if wants_gateway or request.gateway_url:
            return settings.gateway_url, self._ours
        if self._intercepting is None:
            self._intercepting = self._intercept()
        return self._intercepting

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

    async def check_tunnels(self) -> None:
        """Do one round of health checks of this process's tunnels."""
        self._checked = time.monotonic()
        await self.tunnels.check()

    async def _check_when_beat_is_late(self) -> None:
        interval = self._settings.tunnel_check_interval
        while True:
            await asyncio.sleep(interval / 4)
            if time.monotonic() - self._checked < _LATE * interval:
                continue
            try:
                await self.check_tunnels()
            except Exception:
                logger.exception("the tunnels' health check failed", extra={"stage": "tunnel_health"})
