"""The producer's settings, read once from the environment into one frozen object."""

from __future__ import annotations

from typing import Annotated

import redis
from pydantic import AfterValidator, AliasChoices, Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from producer import broker

DEFAULT_REDIS_URL = "redis://127.0.0.1:6379/0"
#: What ``ROLLOUTS_ALLOW_EVICTION`` does, for producers and workers.
ALLOW_EVICTION = "Use a Redis whose maxmemory-policy is not noeviction, which forgets rollouts when it is full."


def _redis_url(url: str) -> str:
    try:
        redis.ConnectionPool.from_url(url)
    except ValueError as error:
        raise ValueError(f"this is no Redis URL ({error}); give one such as {DEFAULT_REDIS_URL}") from None
    return url


RedisUrl = Annotated[str, AfterValidator(_redis_url)]


def variables(model: type[BaseSettings], name: str) -> list[str]:
    """Return the environment variables that a setting is read from; the first one wins."""
    alias = model.model_fields[name].validation_alias
    if isinstance(alias, AliasChoices):
        return [str(choice) for choice in alias.choices if str(choice).isupper()]
    return [f"{model.model_config['env_prefix']}{name}".upper()]


class ProducerSettings(BaseSettings):
    """Where the fleet is, from ``ROLLOUTS_*`` variables."""

    model_config = SettingsConfigDict(env_prefix="ROLLOUTS_", frozen=True, extra="ignore")

    redis_url: RedisUrl = Field(
        default=DEFAULT_REDIS_URL,
        validation_alias=AliasChoices("redis_url", "ROLLOUTS_REDIS_URL", "REDIS_URL"),
        description="URL of the Redis or Valkey server that holds queue, records and results.",
        repr=False,
    )
    max_in_flight: int = Field(
        default=1000, gt=0, description="How many of a batch's rollouts are in Redis, not yet delivered, at one time."
    )
    keep_consumed: float = Field(
        default=broker.KEEP_CONSUMED.total_seconds(),
        ge=60,
        le=broker.RESULT_TTL.total_seconds(),
        description="Seconds for which Redis keeps a rollout whose result was consumed; the same in all producers.",
    )
    tracing: bool = Field(
        default=False, description="True: a trace of each rollout goes to OTEL_EXPORTER_OTLP_ENDPOINT (extra otel)."
    )
    allow_eviction: bool = Field(default=False, description=ALLOW_EVICTION)
