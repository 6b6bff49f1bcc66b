"""The gateway as a process of its own: its settings, its socket, its server."""

from __future__ import annotations

import contextlib
import logging
import socket
from pathlib import Path

import uvicorn
from pydantic import AliasChoices, Field, SecretStr
from pydantic_settings import BaseSettings, SettingsConfigDict

from producer.addresses import is_loopback
from workers.garbage import calm_garbage_collector
from workers.gateway.server.app import MAX_BODY_BYTES, GatewayApp, create_app
from workers.gateway.server.guard import GuardedProtocol
from workers.gateway.server.peers import Peers
from workers.gateway.server.recorder import REGISTRATION_TTL
from workers.gateway.server.upstream import base_url
from workers.gateway.server.upstreams import UpstreamLimits
from workers.telemetry import LogFormat, configure_logging

logger = logging.getLogger(__name__)

#: Seconds that an idle connection is kept; well above the 15 s of `HttpGateway`, so that it is the client who closes.
KEEPALIVE_TIMEOUT = 75
BACKLOG = 2048


class GatewaySettings(BaseSettings):
    """How the bundled gateway runs, from ``ROLLOUTS_GATEWAY_*`` variables; lists are separated by commas."""

    model_config = SettingsConfigDict(env_prefix="ROLLOUTS_GATEWAY_", frozen=True, extra="ignore")

    upstream: str = Field(description="Base URLs of OpenAI-compatible model servers, such as http://host:8000/v1.")
    upstream_api_key: SecretStr | None = Field(default=None, description="Key that the model servers want.")
    upstream_timeout: float = Field(default=600.0, gt=0, description="Seconds without a byte that end a model call.")
    upstream_connections: int = Field(default=2048, ge=1, description="Model calls at one time at each model server.")
    data_parallel_size: int = Field(default=1, ge=1, description="Ranks of each model server (X-data-parallel-rank).")
    native: str = Field(default="", description="Dialects that the model servers speak too, or DIALECT@URL for one.")
    ask_tokens: bool = Field(default=True, description="Ask the model server for token ids and logprobs.")
    control_key: SecretStr | None = Field(default=None, description="Key of all but the model calls.")
    host: str = Field(default="127.0.0.1", description="Address to listen on.")
    port: int = Field(default=8080, ge=0, le=65535, description="Port to listen on; 0 takes any free one.")
    insecure: bool = Field(default=False, description="Listen on other than loopback addresses without a control key.")
    inner_hosts: str = Field(default="", description="Host names, not of tunnels, under which admin calls answer too.")
    max_body_bytes: int = Field(default=MAX_BODY_BYTES, gt=0, description="Largest request body that is read.")
    journal: Path | None = Field(default=None, description="Directory in which registrations and calls are kept.")
    instance: str | None = Field(default=None, description="Name of this process, in health and in every answer.")
    peers: str = Field(default="", description="URLs of all gateway processes that serve side by side, this one too.")
    own_url: str | None = Field(default=None, description="This process's own among them.")
    registration_ttl: float = Field(default=REGISTRATION_TTL, gt=0, description="Idle seconds of a registration.")
    pause_limit: float = Field(default=600.0, gt=0, description="Seconds that a pause may hold a model call.")
    log_format: LogFormat = Field(
        default=LogFormat.AUTO,
        validation_alias=AliasChoices("log_format", "ROLLOUTS_LOG_FORMAT"),
        description="As the workers': auto, human or json.",
    )
    shutdown_grace: float = Field(default=30.0, ge=0, description="Seconds that calls in flight have at a shutdown.")

    @property
    def control_key_value(self) -> str | None:
        """The control key, or None when it is unset or empty."""
        return (self.control_key.get_secret_value() or None) if self.control_key else None

    @property
    def upstreams(self) -> list[str]:
        """The model servers' URLs."""
        return _listed(self.upstream) or [self.upstream]


def run_gateway(settings: GatewaySettings) -> None:
    """Serve until SIGINT or SIGTERM; calls in flight then have ``shutdown_grace`` seconds to end.

    Raises:
        ValueError: an upstream is no URL, or the address is not loopback and there is no control key.
        OSError: the address cannot be listened on, or the journal's directory cannot be used.
    """
    check_exposure(settings)
    with listen(settings.host, settings.port) as listener:
        configure_logging(form=settings.log_format)  # before the journal is read, which may have something to say
        app = gateway_app(settings)
        logger.info("%s", _startup_line(settings, listener, app))
        with contextlib.suppress(KeyboardInterrupt):  # uvicorn raises it again after its own orderly shutdown
            # All streams stand still for it: half a millisecond for the youngest 2,000 objects, 6 ms for 20,000. By the
            # usual thresholds all objects would be looked at again and again, for a tenth of the CPU.
            calm_garbage_collector(2_000, 20)
            uvicorn.Server(server_config(app, settings.shutdown_grace)).run(sockets=[listener])


def gateway_app(settings: GatewaySettings) -> GatewayApp:
    """Build the application from the settings."""
    return create_app(
        upstream=settings.upstreams,
        upstream_api_key=settings.upstream_api_key.get_secret_value() if settings.upstream_api_key else None,
        control_key=settings.control_key_value,
        upstream_timeout=settings.upstream_timeout,
        max_body_bytes=settings.max_body_bytes,
        ask_tokens=settings.ask_tokens,
        journal=settings.journal,
        data_parallel_size=settings.data_parallel_size,
        limits=UpstreamLimits(per_server=settings.upstream_connections),
        native=_listed(settings.native),
        pause_limit=settings.pause_limit,
        registration_ttl=settings.registration_ttl,
        inner_hosts=frozenset(_listed(settings.inner_hosts)),
        instance=settings.instance,
        peers=_peers(settings),
    )


def server_config(app: object, shutdown_grace: float = 30.0) -> uvicorn.Config:
    """Return how uvicorn serves the gateway."""
    return uvicorn.Config(
        app,  # type: ignore[arg-type]
        loop="auto",  # uvloop, except where there is none
        http=GuardedProtocol,
        ws="none",
        timeout_keep_alive=KEEPALIVE_TIMEOUT,
        timeout_graceful_shutdown=max(1, round(shutdown_grace)),
        access_log=False,
        log_level="warning",
        log_config=None,
        server_header=False,
        proxy_headers=False,
    )


def check_exposure(settings: GatewaySettings) -> None:
    """Raise `ValueError` when anyone on the network could read and end rollouts."""
    if is_loopback(settings.host) or settings.control_key_value or settings.insecure:
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


def _startup_line(settings: GatewaySettings, listener: socket.socket, app: GatewayApp) -> str:
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    control = "with a control key" if settings.control_key_value else "without a control key"
    journal = f", journal {settings.journal} ({len(app.state.recorder)} rollouts)" if settings.journal else ""
    return (
        f"rollout gateway {app.state.instance} on http://{shown}:{port} {control}, "
        f"upstream {', '.join(map(base_url, settings.upstreams))}{journal}; "
        f"routes: POST /v1/rollouts/ID/{{register,cancel,unregister,{','.join(app.call_paths)}}}, "
        "GET /v1/rollouts/ID/{trajectory,progress,models}, POST /admin/{pause,resume}, "
        "GET /{admin/status,healthz,readyz,metrics,openapi.json}"
    )


def _peers(settings: GatewaySettings) -> Peers | None:
    urls = _listed(settings.peers)
    if not urls:
        return None
    if settings.own_url is None:
        raise ValueError("ROLLOUTS_GATEWAY_OWN_URL is not set: which of ROLLOUTS_GATEWAY_PEERS is this process?")
    return Peers(settings.own_url, urls, settings.upstream_timeout + settings.pause_limit + 60)


def _listed(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]
