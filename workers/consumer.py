"""A Celery consumer that outlives its broker connection: ``worker_consumer = "workers.consumer:Consumer"``.

Celery 5.7 with kombu 5.7 on Redis ends the worker ("Unrecoverable error: AttributeError ... 'hostname'") when the
connection breaks while a message is unacknowledged, be it for the milliseconds of a claim. Closing the broken channel
gives its messages back over a connection that is gone already, and acknowledging one later does the same.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from celery.worker.consumer import Consumer as CeleryConsumer

logger = logging.getLogger(__name__)


class Consumer(CeleryConsumer):  # type: ignore[misc]  # Celery is not typed
    """Leaves the messages of a broken connection to the broker, which gives them out again by itself.

    It does so after the transport's ``visibility_timeout``; whatever else watches over the work may be faster.
    """

    def on_connection_error_after_connected(self, exc: Exception) -> None:
        """Close the broken connection without giving messages back over it."""
        consumer = self.task_consumer
        if consumer is not None and consumer.channel is not None:
            consumer.channel.do_restore = False
        super().on_connection_error_after_connected(exc)

    def call_soon_ack(self, p: Callable[..., object], *args: Any, **kwargs: Any) -> Any:
        """Have a message acknowledged or rejected soon, if its channel is still open by then."""
        return super().call_soon_ack(_settle, p, *args, **kwargs)


def _settle(settle: Callable[..., object], *args: Any, **kwargs: Any) -> None:
    message = getattr(settle, "__self__", None)
    channel = getattr(message, "channel", None)
    if channel is not None and channel.closed:
        logger.warning("A message cannot be acknowledged: the connection that brought it is gone")
        return
    settle(*args, **kwargs)
