"""kombu's Redis transport, without its emulation of acknowledgements.

A message of ours is only a wake-up call, and the job record tells whether anybody answered it. So nothing has to be
kept for redelivery, and keeping it does harm: a worker that holds an unacknowledged message when Redis goes away exits
with an AttributeError (kombu restores it over the connection that was just lost), messages come back after an arbitrary
time-out, and each costs four more commands. A wake-up call that is lost with its worker is sent again by the sweep.
"""

from __future__ import annotations

from kombu.transport import redis

#: For Celery's ``broker_transport``; it goes with a ``redis://`` or ``rediss://`` URL.
NAME = "workers.transport:Transport"


class Channel(redis.Channel):
    """A channel that neither files what it delivered nor restores it when it closes."""

    ack_emulation = False
    do_restore = False


class Transport(redis.Transport):
    """The Redis transport over such channels."""

    Channel = Channel
