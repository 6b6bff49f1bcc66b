"""The gateway as a process of its own: its settings, its socket, its server."""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import socket

import uvicorn
from pydantic import Field, SecretStr
from pydantic_settings import BaseSettings, SettingsConfigDict

from workers.gateway.server.app import MAX_BODY_BYTES, create_app
from workers.gateway.server.upstream import base_url
from workers.telemetry import configure_logging

logger = logging.getLogger(__name__)

#: Seconds that an idle connection is kept; well above the 15 s of `HttpGateway`, so that it is the client who closes.
KEEPALIVE_TIMEOUT = 75
BACKLOG = 2048


class GatewaySettings(BaseSettings):
    """How the bundled gateway runs, from ``ROLLOUTS_GATEWAY_*`` variables."""

    model_config = SettingsConfigDict(env_prefix="ROLLOUTS_GATEWAY_", frozen=True, extra="ignore")

    upstream: str = Field(description="Base URL of the OpenAI-compatible model server, such as http://host:8000/v1.")
    upstream_api_key: SecretStr | None = Field(default=None, description="Key that the model server wants.")
    upstream_timeout: float = Field(default=600.0, gt=0, description="Seconds without a byte that end a model call.")
    ask_tokens: bool = Field(default=True, description="Ask the model server for token ids and logprobs.")
    control_key: SecretStr | None = Field(default=None, description="Key of register, cancel, unregister, trajectory.")
    host: str = Field(default="127.0.0.1", description="Address to listen on.")
    port: int = Field(default=8080, ge=0, le=65535, description="Port to listen on; 0 takes any free one.")
    insecure: bool = Field(default=False, description="Listen on other than loopback addresses without a control key.")
    max_body_bytes: int = Field(default=MAX_BODY_BYTES, gt=0, description="Largest request body that is read.")
    shutdown_grace: float = Field(default=30.0, ge=0, description="Seconds that calls in flight have at a shutdown.")

    @property
    def control_key_value(self) -> str | None:
        """The control key, or None when it is unset or empty."""
        return (self.control_key.get_secret_value() or None) if self.control_key else None


def run_gateway(settings: GatewaySettings) -> None:
    """Serve until SIGINT or SIGTERM; calls in flight then have ``shutdown_grace`` seconds to end.

    Raises:
        ValueError: the upstream is no URL, or the address is not loopback and there is no control key.
        OSError: the address cannot be listened on.
    """
    check_exposure(settings)
    app = create_app(
        upstream=settings.upstream,
        upstream_api_key=settings.upstream_api_key.get_secret_value() if settings.upstream_api_key else None,
        control_key=settings.control_key_value,
        upstream_timeout=settings.upstream_timeout,
        max_body_bytes=settings.max_body_bytes,
        ask_tokens=settings.ask_tokens,
    )
    with listen(settings.host, settings.port) as listener:
        logging.getLogger("httpx").setLevel(logging.WARNING)  # it would log a line for each model call
        configure_logging()
        logger.info("%s", _startup_line(settings, listener))
        with contextlib.suppress(KeyboardInterrupt):  # uvicorn raises it again after its own orderly shutdown
            uvicorn.Server(server_config(app, settings.shutdown_grace)).run(sockets=[listener])


def server_config(app: object, shutdown_grace: float = 30.0) -> uvicorn.Config:
    """Return how uvicorn serves the gateway."""
    return uvicorn.Config(
        app,  # type: ignore[arg-type]
        loop="auto",  # uvloop, except where there is none
        http="httptools",
        ws="none",
        timeout_keep_alive=KEEPALIVE_TIMEOUT,
        timeout_graceful_shutdown=max(1, round(shutdown_grace)),
        access_log=False,
        log_level="warning",
        log_config=None,
        server_header=False,
    )


def check_exposure(settings: GatewaySettings) -> None:
    """Raise `ValueError` when anyone on the network could read and end rollouts."""
    if _is_loopback(settings.host) or settings.control_key_value or settings.insecure:
        return
    raise ValueError(
        f"refusing to listen on {settings.host} without a control key: anyone who reaches this address could read and "
        "end rollouts. Set ROLLOUTS_GATEWAY_CONTROL_KEY (the same for the workers), or listen on 127.0.0.1, or set "
        "ROLLOUTS_GATEWAY_INSECURE=true if the network itself keeps others out"
    )


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket; raises `OSError` that names the address."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        reason = error.strerror or str(error)
        raise OSError(error.errno, f"cannot listen on {host}:{port}: {reason}; choose another host or port") from None


def _startup_line(settings: GatewaySettings, listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    control = "with a control key" if settings.control_key_value else "without a control key"
    return (
        f"rollout gateway on http://{shown}:{port} {control}, upstream {base_url(settings.upstream)}; "
        "routes: POST /v1/rollouts/ID/{register,cancel,unregister,chat/completions}, "
        "GET /v1/rollouts/ID/{trajectory,models}, GET /healthz, GET /readyz"
    )


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
