"""The composition root: settings -> Celery app + pool + fleet."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

from celery import Celery, signals
from kombu import Exchange, Queue
from kombu.common import Broadcast

import workers.pool  # noqa: F401  # a dotted pool path must be importable before Celery looks for it
from producer import broker
from producer.queues import celery_name
from workers import results, transport
from workers.fleet import Fleet
from workers.settings import WorkerSettings
from workers.tasks import register_tasks
from workers.telemetry import configure_logging, say


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
    app.pool_lifespan = fleet.lifespan
    app.pool_drain_timeout = settings.drain_timeout
    app.rollout_fleet = fleet
    register_tasks(app, fleet)
    _use_own_logging(settings)
    _require_own_queues(app, settings)
    return app


def _require_own_queues(app: Celery, settings: WorkerSettings) -> None:
    """Refuse what celery's ``-Q`` and ``-X`` chose instead of the settings: others go by what these say."""

    def require(instance: Any = None, **_: Any) -> None:
        chosen = instance.app.amqp.queues.consume_from.items() if instance.app is app else ()
        names = [n for n, queue in chosen if n != broker.MAINTENANCE_QUEUE and not isinstance(queue, Broadcast)]
        if chosen and set(names) != set(map(celery_name, settings.queues)):
            raise SystemExit(
                f"this worker would take from {', '.join(names) or 'no queue of rollouts'} by celery's -Q or -X, and "
                f"ROLLOUTS_QUEUES is {','.join(settings.queues)}: leave them out, and name in ROLLOUTS_QUEUES the "
                "queues whose rollouts it is to run"
            )

    signals.celeryd_after_setup.connect(require, weak=False, dispatch_uid="rollouts")


def _use_own_logging(settings: WorkerSettings) -> None:
    """Replace Celery's logging set-up by ours."""

    def configure(loglevel: int | str | None = None, **_: Any) -> None:
        configure_logging(loglevel or "INFO", settings.log_format, recent=settings.recent_lines)
        if celery_worker := sys.modules.get("celery.apps.worker"):  # not in beat
            vars(celery_worker)["safe_say"] = say

    signals.setup_logging.connect(configure, weak=False, dispatch_uid="rollouts")
