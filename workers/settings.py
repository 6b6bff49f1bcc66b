"""The worker's settings, read once at the composition root into one frozen object."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import AliasChoices, Field, SecretStr, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from producer.contract import GatewayUrl
from producer.queues import QUEUE, named
from producer.settings import ALLOW_EVICTION, DEFAULT_REDIS_URL, RedisUrl
from workers.foreign import host_pattern
from workers.telemetry import LogFormat


class WorkerSettings(BaseSettings):
    """How this worker process runs rollouts, from ``ROLLOUTS_*`` variables."""

    model_config = SettingsConfigDict(env_prefix="ROLLOUTS_", frozen=True, extra="ignore")

    redis_url: RedisUrl = Field(
        default=DEFAULT_REDIS_URL,
        validation_alias=AliasChoices("redis_url", "ROLLOUTS_REDIS_URL", "REDIS_URL"),
        description="URL of the Redis or Valkey server that holds queue, records and results.",
        repr=False,
    )
    allow_eviction: bool = Field(default=False, description=ALLOW_EVICTION)
    fleet: str = Field(default="fleet", description="Name of the fleet, for labels of what it creates.")
    concurrency: int = Field(default=100, gt=0, description="Rollouts that one worker process runs at one time.")

    queues: Annotated[tuple[str, ...], NoDecode] = Field(
        default=(QUEUE,),
        description="Queues whose rollouts this worker runs, by commas; it takes from each in turn.",
    )

    gateway_url: GatewayUrl = Field(
        default="http://127.0.0.1:8080", description="Rollout gateway for requests that name none."
    )
    gateway_control_key: SecretStr | None = Field(default=None, description="Key of the gateway's control endpoints.")
    gateway_allow: Annotated[tuple[str, ...], NoDecode] = Field(
        default=(),
        description="Other gateways that requests may name, as HOST[:PORT] with *, by commas; by default none.",
    )
    foreign_gateways: int = Field(
        default=16, ge=0, description="Gateways of requests that one worker process uses at one time."
    )

    environments: Annotated[dict[str, str], NoDecode] = Field(
        default_factory=dict,
        description="Allow-list of environments, as NAME=MODULE:CLASS or MODULE:CLASS (named by its class), by commas.",
    )
    verifiers: Annotated[tuple[Path, ...], NoDecode] = Field(
        default=(),
        description="Configurations of verifiers' environments that this worker serves to `rollouts env-server`, each "
        "a JSON or TOML file that gives its name, by commas (extra verifiers).",
    )
    secret_env: Annotated[tuple[str, ...], NoDecode] = Field(
        default=(),
        description="Names of this worker's variables that requests may pass on to agents, by commas.",
    )

    use_gateway: bool = Field(
        default=True,
        description="False: this worker serves the agents' model calls itself, without a gateway beside it.",
    )
    model_url: str | None = Field(
        default=None, description="Model server of rollouts without a gateway, such as http://host:8000/v1."
    )
    model_api_key: SecretStr | None = Field(default=None, description="Key that this model server wants.")

    sandbox_provider: str = Field(default="local", description="'local', 'prime', or MODULE:FACTORY of another one.")
    tunnel_provider: str = Field(default="direct", description="'direct', 'prime', or MODULE:FACTORY of another one.")
    sandbox_concurrent_creates: int = Field(
        default=50, gt=0, description="Sandboxes that one worker process has created at one time."
    )
    sandbox_creates_per_minute: float = Field(
        default=3000.0, gt=0, description="Sandboxes that the whole fleet has created in a minute."
    )
    tunnel_starts_per_minute: float = Field(
        default=512.0,
        gt=0,
        description="Tunnels that the whole fleet starts in a minute; the platform's limit for a key.",
    )
    tunnel_check_interval: float = Field(
        default=30.0, gt=0, description="Seconds between health checks of a worker's tunnels."
    )
    orphan_interval: float = Field(
        default=60.0,
        gt=0,
        description="Seconds between sweeps for what dead workers and failed clean-ups have left on the platform.",
    )
    poll_interval: float = Field(
        default=5.0, gt=0, description="Longest seconds between two looks at whether an agent has ended."
    )
    sandbox_dir: Path | None = Field(
        default=None, description="Where local sandboxes live; a temporary folder if unset."
    )
    output_limit: int = Field(
        default=64 * 1024,
        ge=1024,
        description="Bytes of an agent's stdout and of its stderr kept in a result.",
    )

    hook_threads: int = Field(
        default=64, gt=0, description="Plain (not async) hooks of environments that run at one time, each in a thread."
    )

    breaker_failures: int = Field(
        default=10, gt=0, description="Failures in a row of gateway, tunnels or sandboxes that stop taking rollouts."
    )
    breaker_pause: float = Field(
        default=5.0, gt=0, description="Seconds before the first rollout is tried after that; doubled each time."
    )
    breaker_longest_pause: float = Field(default=300.0, gt=0, description="Longest of these pauses, in seconds.")
    infrastructure_retries: int = Field(
        default=5,
        ge=0,
        description="Attempts that gateway, tunnel and sandbox each fail before the agent runs: not charged.",
    )
    idle_limit: float | None = Field(
        default=None,
        gt=0,
        description="Seconds without a model call that end an agent, for requests that set no deadlines.idle.",
    )
    rollout_limit: float | None = Field(
        default=None,
        gt=0,
        description="Seconds that an attempt may take in all, for requests that set no deadlines.rollout.",
    )
    drain_timeout: float = Field(
        default=300.0, ge=0, description="Seconds that rollouts have to end at a SIGTERM, before they are handed over."
    )
    admin_host: str = Field(default="127.0.0.1", description="Address of the admin port.")
    admin_port: int = Field(
        default=0, ge=0, le=65535, description="Port that serves /livez, /readyz and /metrics; 0 for none."
    )
    admin_token: SecretStr | None = Field(
        default=None,
        description="What /metrics wants there as a bearer token; needed on other addresses than loopback.",
    )
    tracing: bool = Field(
        default=False, description="True: a trace of each rollout goes to OTEL_EXPORTER_OTLP_ENDPOINT (extra otel)."
    )
    log_format: LogFormat = Field(
        default=LogFormat.AUTO, description="auto: log lines for people in a terminal, else JSON; or human, or json."
    )
    recent_lines: int = Field(
        default=20_000, ge=0, description="Log lines of rollouts kept in memory for `rollouts logs`, the latest."
    )
    lease_ttl: float = Field(default=60.0, gt=0, description="Seconds after which a dead worker's rollouts run again.")
    loop_hang_limit: float = Field(
        default=300.0,
        gt=0,
        description="Seconds without progress of the event loop after which leases are given up.",
    )

    @field_validator("environments", mode="before")
    @classmethod
    def _parse_environments(cls, value: object) -> object:
        if not isinstance(value, str):
            return value
        entries = [entry.strip() for entry in value.split(",") if entry.strip()]
        parsed = {}
        for entry in entries:
            name, _, target = entry.rpartition("=")
            module, _, attribute = target.partition(":")
            if not module or not attribute:
                raise ValueError(f"{entry!r} is not NAME=MODULE:CLASS; for example math=my_tasks.math:MathEnvironment")
            parsed[name or attribute] = target
        return parsed

    @field_validator("secret_env", "gateway_allow", "verifiers", "queues", mode="before")
    @classmethod
    def _split_names(cls, value: object) -> object:
        return tuple(n.strip() for n in value.split(",") if n.strip()) if isinstance(value, str) else value

    @field_validator("queues")
    @classmethod
    def _queue_names(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if not value:
            raise ValueError(f"it names no queue; {QUEUE} is that of requests that name none")
        return tuple(dict.fromkeys(map(named, value)))

    @field_validator("gateway_allow")
    @classmethod
    def _host_patterns(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(map(host_pattern, value))
