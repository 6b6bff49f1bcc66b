"""kombu's Redis transport, without its emulation of acknowledgements.

A message of ours is only a wake-up call, and the job record tells whether anybody answered it. So nothing has to be
kept for redelivery, and keeping it does harm: a worker that holds an unacknowledged message when Redis goes away exits
with an AttributeError (kombu restores it over the connection that was just lost), messages come back after an arbitrary
time-out, and each costs four more commands. A wake-up call that is lost with its worker is sent again by the sweep.

A message that carries its own request is known to its worker alone from when Redis hands it out until its claim has
made its record. Kept for redelivery, it would be lost there as well: the claim is the first thing that Redis is asked
then, and kombu's own note of it would come no earlier. `workers.claims.Claims.settle_unsure` looks after a claim that
got no answer.
"""

from __future__ import annotations

import base64
import logging
import time
from queue import Empty
from typing import Any

from kombu.transport import redis
from kombu.utils.json import loads

from producer import broker

logger = logging.getLogger(__name__)

#: For Celery's ``broker_transport``; it goes with a ``redis://`` or ``rediss://`` URL.
NAME = "workers.transport:Transport"


#: What kombu and Celery raise for a list entry that is no message. Errors of the connection are none of these.
_MALFORMED = (TypeError, ValueError, AttributeError, LookupError)


#: The body of a task whose request is a text that is no JSON.
_UNREADABLE = base64.b64encode(b'[["the message could not be decoded"], {}, {}]').decode()


def _is_ours(message: Any) -> bool:
    try:
        return bool(message["headers"]["task"] == broker.RUN_ROLLOUT and isinstance(message["headers"]["id"], str))
    except (TypeError, LookupError):
        return False


def _is_readable(message: Any) -> bool:
    """Whether the body has arguments that Celery can read: its own reader is asked, whose recursion has an end."""
    try:
        body = message["body"]
        if message["properties"].get("body_encoding") == "base64":
            body = base64.b64decode(body)
        args, kwargs, _ = loads(body)
        return isinstance(args, list) and isinstance(kwargs, dict)
    except (*_MALFORMED, RecursionError):
        return False


class Channel(redis.Channel):
    """A channel that files nothing of what it delivers, and gives back what it can when it closes."""

    ack_emulation = False

    def _brpop_start(self, timeout: float | None = None) -> None:
        """Ask for the next message: of each queue in turn, and of a queue by priority.

        kombu asks for all queues' first lists before any second one: a queue whose rollouts have a lower priority than
        those of another would not be served at all.
        """
        queues = self._queue_cycle.consume(len(self.active_queues))
        if not queues:
            return
        keys = [self._q_for_pri(queue, step) for queue in queues for step in self.priority_steps]
        self._in_poll = self.client.connection
        self._brpop_sent_at = time.monotonic()
        seconds = self.brpop_timeout if timeout is None else timeout
        self.client.connection.send_command("BRPOP", *keys, seconds or 0)

    def _brpop_read(self, **options: Any) -> Any:
        """Read one entry of a queue; one that is no message is dropped, as it would end every worker that takes it."""
        try:
            return super()._brpop_read(**options)
        except _MALFORMED:
            logger.exception("an entry of a queue is no message, and was dropped")
            raise Empty from None

    def _unsubscribe_from(self, queue: str) -> None:
        """Unsubscribe, if anything was subscribed: kombu would make a client for it, of a connection that is gone."""
        if "subclient" in self.__dict__:
            super()._unsubscribe_from(queue)

    def _restore(self, message: Any, leftmost: bool = False) -> None:
        """Put a message back that was delivered and not taken up, unless the connection is gone."""
        try:
            super()._restore(message, leftmost)
        except Exception as error:  # noqa: BLE001 - whatever a half-closed connection raises; kombu would dump to a file
            logger.info("a wake-up call was not given back, the sweep sends it again: %r", error)


class Transport(redis.Transport):
    """The Redis transport over such channels."""

    Channel = Channel

    def _deliver(self, message: Any, queue: str) -> None:
        """Deliver a message; one that Celery cannot take is not given back either."""
        if _is_ours(message) and not _is_readable(message):
            # Celery would drop it. So it ends as a request that is none, for whoever waits for its result.
            message["body"] = _UNREADABLE
            message["properties"]["body_encoding"] = "base64"
            message["content-encoding"] = "utf-8"
        try:
            super()._deliver(message, queue)
        except _MALFORMED:
            if isinstance(message, dict) and isinstance(message.get("properties"), dict):
                for channel in self.channels:
                    channel.qos.ack(message["properties"].get("delivery_tag"))
            raise
