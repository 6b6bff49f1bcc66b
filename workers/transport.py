"""kombu's Redis transport, without its emulation of acknowledgements.

A message of ours is only a wake-up call, and the job record tells whether anybody answered it. So nothing has to be
kept for redelivery, and keeping it does harm: a worker that holds an unacknowledged message when Redis goes away exits
with an AttributeError (kombu restores it over the connection that was just lost), messages come back after an arbitrary
time-out, and each costs four more commands. A wake-up call that is lost with its worker is sent again by the sweep.
"""

from __future__ import annotations

import logging
from typing import Any

from kombu.transport import redis

logger = logging.getLogger(__name__)

#: For Celery's ``broker_transport``; it goes with a ``redis://`` or ``rediss://`` URL.
NAME = "workers.transport:Transport"


class Channel(redis.Channel):
    """A channel that files nothing of what it delivers, and gives back what it can when it closes."""

    ack_emulation = False

    def _restore(self, message: Any, leftmost: bool = False) -> None:
        """Put a message back that was delivered and not taken up, unless the connection is gone."""
        try:
            super()._restore(message, leftmost)
        except Exception as error:  # noqa: BLE001 - whatever a half-closed connection raises; kombu would dump to a file
            logger.info("a wake-up call was not given back, the sweep sends it again: %r", error)


class Transport(redis.Transport):
    """The Redis transport over such channels."""

    Channel = Channel
