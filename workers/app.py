"""The composition root: settings -> Celery app + pool + fleet."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any

from celery import Celery, signals
from kombu import Exchange, Queue
from kombu.common import Broadcast

from producer import broker
from producer.queues import celery_name, rollout_queue
from workers import results, transport
from workers.fleet import Fleet
from workers.pool import AsyncioPool  # also for Celery: a dotted pool path must be importable before it looks for it
from workers.registry import ConfigurationError
from workers.settings import WorkerSettings
from workers.tasks import register_tasks
from workers.telemetry import configure_logging


def create_app(settings: WorkerSettings | None = None, environ: Mapping[str, str] | None = None) -> Celery:
    """Build the Celery app of workers and beat from ``settings``, by default from the environment."""
    settings = settings or WorkerSettings()
    app = Celery("rollouts")
    health = Exchange(broker.HEALTH_QUEUE, type="fanout")
    app.config_from_object(
        broker.celery_config(settings.redis_url)
        | {
            "task_queues": [
                *(Queue(celery_name(queue)) for queue in settings.queues),
                Queue(broker.MAINTENANCE_QUEUE),
                Broadcast(broker.HEALTH_QUEUE, exchange=health),
            ],
            # Only the queue: a route that names the exchange too loses the message, as its routing key is then empty.
            "task_routes": {
                broker.SWEEP: {"queue": broker.MAINTENANCE_QUEUE},
                broker.SWEEP_ORPHANS: {"queue": broker.MAINTENANCE_QUEUE},
                broker.CHECK_TUNNELS: {"queue": broker.HEALTH_QUEUE},
            },
            "broker_transport": transport.NAME,
            "result_backend": results.PREFIX + broker.verified(settings.redis_url),
            "worker_pool": "workers.pool:AsyncioPool",
            "worker_concurrency": settings.concurrency,
            "beat_schedule": {
                "sweep": {
                    "task": broker.SWEEP,
                    "schedule": settings.lease_ttl / 4,
                    # Every worker sweeps as well, so a late one is worth nothing.
                    "options": {"queue": broker.MAINTENANCE_QUEUE, "expires": settings.lease_ttl},
                },
                "sweep-orphans": {
                    "task": broker.SWEEP_ORPHANS,
                    "schedule": settings.orphan_interval,
                    "options": {"queue": broker.MAINTENANCE_QUEUE, "expires": settings.orphan_interval},
                },
                "check-tunnels": {
                    "task": broker.CHECK_TUNNELS,
                    "schedule": settings.tunnel_check_interval,
                    # Declared by the sender too: kombu drops what is published to a fanout that nobody declared.
                    "options": {
                        "queue": broker.HEALTH_QUEUE,
                        "declare": [health],
                        "expires": settings.tunnel_check_interval,
                    },
                },
            },
        }
    )
    fleet = Fleet(settings, app, os.environ if environ is None else environ)

    def lifespan(pool: AsyncioPool) -> AbstractAsyncContextManager[None]:
        _require_queues(app, settings)
        return fleet.lifespan(pool)

    app.pool_lifespan = lifespan
    app.pool_drain_timeout = settings.drain_timeout
    app.rollout_fleet = fleet
    register_tasks(app, fleet)
    _use_own_logging(settings)
    return app


def _require_queues(app: Celery, settings: WorkerSettings) -> None:
    """Refuse what celery's ``-Q`` and ``-X`` chose instead of the settings: others are told what these say."""
    others = {broker.MAINTENANCE_QUEUE, broker.HEALTH_QUEUE}
    chosen = {name: rollout_queue(name) for name in app.amqp.queues.consume_from if name not in others}
    if set(chosen.values()) != set(settings.queues):
        raise ConfigurationError(
            f"celery's -Q or -X chose the queues {', '.join(chosen) or '(none)'}, and ROLLOUTS_QUEUES is "
            f"{','.join(settings.queues)}: leave them out, and name in ROLLOUTS_QUEUES which queues this worker serves"
        )


def _use_own_logging(settings: WorkerSettings) -> None:
    """Replace Celery's logging set-up by ours."""

    def configure(loglevel: int | str | None = None, **_: Any) -> None:
        configure_logging(loglevel or "INFO", settings.log_format, recent=settings.recent_lines)

    signals.setup_logging.connect(configure, weak=False, dispatch_uid="rollouts")
