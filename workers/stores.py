"""Job stores on connections of their own: a worker process has several, which wait for Redis differently."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import redis
from celery import Celery
from redis.backoff import NoBackoff
from redis.retry import Retry

from workers.jobs import JobStore
from workers.settings import WorkerSettings


@contextmanager
def connected(
    settings: WorkerSettings, app: Celery, *, patience: float = 10.0, once: bool = False
) -> Iterator[JobStore]:
    """Hold a job store on a Redis connection pool of its own, which waits ``patience`` seconds for an answer.

    With ``once`` nothing is tried a second time.
    """
    options: dict[str, Any] = {"retry": Retry(NoBackoff(), 0)} if once else {}
    client = redis.Redis.from_url(
        settings.redis_url,
        socket_timeout=patience,
        socket_connect_timeout=min(patience, 5),
        socket_keepalive=True,
        health_check_interval=25,
        **options,
    )
    with client:
        gateway_url, serves = settings.gateway_url, settings.queues
        yield JobStore(client, app, lease_ttl=settings.lease_ttl, gateway_url=gateway_url, serves=serves)
