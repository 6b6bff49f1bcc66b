"""A gateway inside the worker process, for fleets that have none beside them.

It is the bundled gateway, in a thread with an event loop of its own: a hook that blocks the worker's loop must not
stall the model calls of all its agents. Agents reach it as they reach any gateway, through the worker's tunnel.
"""

from __future__ import annotations

import logging
import secrets
import socket
import threading
from functools import partial

import uvicorn

from workers.aio import in_own_thread
from workers.gateway.server import create_app
from workers.gateway.server.serve import listen, server_config

logger = logging.getLogger(__name__)

HOST = "127.0.0.1"
#: Seconds that model calls in flight have when the worker ends; by then no rollout waits for one.
_GRACE = 1.0
#: Seconds after which a server that does not end is left to the process's end.
_STOP_LIMIT = 5.0


class InterceptingGateway:
    """Serves rollouts whose worker is their gateway: model calls go from here to ``model_url``.

    ``url`` is on loopback, a free port that accepts connections from the moment this object exists; ``control_key`` is
    new for each process.
    """

    def __init__(self, model_url: str, model_api_key: str | None = None) -> None:
        self.control_key = secrets.token_urlsafe(24)
        app = create_app(upstream=model_url, upstream_api_key=model_api_key, control_key=self.control_key)
        self._listener: socket.socket = listen(HOST, 0)
        self.url = f"http://{HOST}:{self._listener.getsockname()[1]}"
        self._server = uvicorn.Server(server_config(app, _GRACE))
        self._thread = threading.Thread(target=self._serve, name="gateway", daemon=True)
        self._model_url = model_url

    def start(self) -> None:
        """Begin to serve; whoever connects before is served then."""
        self._thread.start()
        logger.info("this worker serves model calls itself at %s, model server %s", self.url, self._model_url)

    async def aclose(self) -> None:
        """End the server, and wait for it."""
        self._server.should_exit = True
        await in_own_thread(partial(self._thread.join, _STOP_LIMIT), name="gateway-end")
        self._listener.close()

    def _serve(self) -> None:
        try:
            self._server.run(sockets=[self._listener])
        except Exception:
            logger.exception("the worker's own gateway ended", extra={"stage": "gateway"})
