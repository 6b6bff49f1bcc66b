"""The composition root: settings -> Celery app + pool + fleet."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from celery import Celery, signals

import workers.pool  # noqa: F401  # a dotted pool path must be importable before Celery looks for it
from producer import broker
from workers import results, transport
from workers.fleet import Fleet
from workers.settings import WorkerSettings
from workers.tasks import register_tasks
from workers.telemetry import configure_logging


def create_app(settings: WorkerSettings | None = None, environ: Mapping[str, str] | None = None) -> Celery:
    """Build the Celery app of workers and beat from ``settings``, by default from the environment."""
    settings = settings or WorkerSettings()
    app = Celery("rollouts")
    app.config_from_object(
        broker.celery_config(settings.redis_url)
        | {
            "broker_transport": transport.NAME,
            "result_backend": results.PREFIX + settings.redis_url,
            "worker_pool": "workers.pool:AsyncioPool",
            "worker_concurrency": settings.concurrency,
            "beat_schedule": {
                "sweep": {
                    "task": broker.SWEEP,
                    "schedule": settings.lease_ttl / 4,
                    # Every worker sweeps as well, so a late one is worth nothing.
                    "options": {"queue": broker.MAINTENANCE_QUEUE, "expires": settings.lease_ttl},
                },
            },
        }
    )
    fleet = Fleet(settings, app, os.environ if environ is None else environ)
    app.pool_lifespan = fleet.lifespan
    app.rollout_records = fleet
    register_tasks(app, fleet)
    signals.setup_logging.connect(_own_logging)
    return app


def _own_logging(loglevel: int | str | None = None, **_: Any) -> None:
    """Replace Celery's logging set-up by ours."""
    configure_logging(loglevel or "INFO")
