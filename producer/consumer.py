"""A named consumer of a batch: what it has taken is kept in Redis, so that it goes on there when it is started again.

Asking for the next result acknowledges the one before, in the same step in which Redis notes which one is handed out
next. So after a crash nothing is missing, and the only result that can come again is the one that was in hand when the
process ended: whether it was dealt with by then only the consumer itself can tell.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from producer import broker
from producer.connection import FleetConnection, awaitable
from producer.contract import ID_PATTERN, InvalidRequestError
from producer.errors import ConsumerTakenError


@dataclass(frozen=True, slots=True)
class Taken:
    """What a consumer had taken when it was opened; ``hand`` is the rollout that was handed out last, if any.

    ``position`` is where in the batch's stream it goes on, None before the first acknowledgement.
    """

    position: str | None
    hand: str | None
    delivered: int


class Consumer:
    """Keeps what a named consumer of a batch has taken; of two processes that open one, the later one goes on.

    ``in_order`` says that results are taken in the order of the batch's stream, so that a position in it tells all;
    otherwise their ids are kept.
    """

    def __init__(self, connection: FleetConnection, batch_id: str, name: str, *, in_order: bool) -> None:
        if not re.match(ID_PATTERN, name):
            raise InvalidRequestError(f"consumer: {name!r} does not match {ID_PATTERN}")
        self.name = name
        self._connection = connection
        self._batch_id = batch_id
        self._in_order = in_order
        self._keys = [broker.consumer_key(batch_id, name), broker.taken_key(batch_id, name)]
        self._ttl = int(broker.RESULT_TTL.total_seconds())
        self._generation = 0
        self._unacknowledged: tuple[str, str] | None = None

    async def open(self) -> Taken:
        """Take over from whoever had it open, and tell what was taken."""
        self._generation, fields = await self._connection.call(self._open)
        position, hand, delivered = (field.decode() if field else None for field in fields)
        return Taken(position, hand, int(delivered or 0))

    async def _open(self) -> tuple[int, list[bytes | None]]:
        pipe = self._connection.redis.pipeline(transaction=True)
        pipe.hincrby(self._keys[0], "generation", 1)
        pipe.hmget(self._keys[0], ["position", "hand", "delivered"])
        pipe.expire(self._keys[0], self._ttl)
        generation, fields, _ = await pipe.execute()
        return int(generation), fields

    async def taken(self, rollout_ids: Sequence[str]) -> set[str]:
        """Return those of the rollouts that were acknowledged."""
        if not rollout_ids:
            return set()
        found: Any = await self._connection.call(
            lambda: awaitable(self._connection.redis.smismember(self._keys[1], list(rollout_ids)))
        )
        return {rollout_id for rollout_id, is_taken in zip(rollout_ids, found, strict=True) if is_taken}

    async def hand_out(self, rollout_id: str, position: str = "") -> None:
        """Acknowledge what was handed out before, and note that this is handed out; raises `ConsumerTakenError`."""
        await self._deliver(rollout_id)
        self._unacknowledged = rollout_id, position

    async def acknowledge(self) -> bool:
        """Acknowledge what was handed out; returns whether anything was in hand. Raises `ConsumerTakenError`."""
        if self._unacknowledged is None:
            return False
        await self._deliver("")
        self._unacknowledged = None
        return True

    async def _deliver(self, next_id: str) -> None:
        done, position = self._unacknowledged or ("", "")
        args: list[Any] = [self._generation, self._ttl, done, position if self._in_order else "", next_id]
        if not await self._connection.call(partial(self._connection.deliver, keys=self._keys, args=args)):
            raise ConsumerTakenError(
                f"another process has opened consumer {self.name!r} of {self._batch_id}, and goes on where this one was"
            )
