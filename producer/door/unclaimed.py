"""Answers whose client was not there: of episodes that an earlier door took in, or whose client lost its connection.

Which connection is their client's is not known. They are offered to every one, for a client does nothing with an answer
that it does not wait for. Their ids are kept in Redis until they were taken, so that the next door has them too.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from producer import broker
from producer.connection import FleetConnection, awaitable

#: Seconds for which an answer is offered to those who connect, once somebody was there, and if nobody ever is.
OFFERED, KEPT = 60.0, 3600.0


@dataclass
class Answer:
    """What ends an episode: its deltas, and the reply."""

    request_id: bytes
    attempt: int
    deltas: list[bytes]
    reply: bytes
    traces: list[str]
    offered_to: set[bytes] = field(default_factory=set)
    since: float = field(default_factory=time.monotonic)


Send = Callable[[bytes, Answer], Awaitable[bool]]  #: to a peer; False when it is gone


class Unclaimed:
    """The answers of one door that nobody has taken yet."""

    def __init__(self, connection: FleetConnection, batch_id: str) -> None:
        self._connection = connection.lasting()
        self._key = broker.UNCLAIMED + batch_id
        self._answers: dict[str, Answer] = {}

    def __len__(self) -> int:
        return len(self._answers)

    async def earlier(self) -> list[str]:
        """Return the rollouts that an earlier door could not answer."""
        redis = self._connection.redis
        found = await self._connection.call(lambda: awaitable(redis.smembers(self._key)))
        return [rollout_id.decode() for rollout_id in found]

    async def add(self, rollout_id: str, answer: Answer) -> None:
        """Keep an answer until it is taken."""
        await self._connection.call(lambda: self._note(rollout_id))
        self._answers[rollout_id] = answer

    async def _note(self, rollout_id: str) -> None:
        pipe = self._connection.redis.pipeline(transaction=True)
        pipe.sadd(self._key, rollout_id)
        pipe.expire(self._key, int(broker.RESULT_TTL.total_seconds()))
        await pipe.execute()

    async def offer(self, peers: set[bytes], send: Send) -> None:
        """Send every answer to those of ``peers`` who have not been sent it, and forget those that are old enough."""
        now, over = time.monotonic(), []
        for rollout_id, answer in list(self._answers.items()):
            for peer in peers - answer.offered_to:
                if await send(peer, answer):
                    answer.offered_to.add(peer)
            if now - answer.since > (OFFERED if answer.offered_to else KEPT):
                over.append(rollout_id)
        if over:
            await self.drop(over)

    async def drop(self, rollout_ids: list[str]) -> None:
        """Forget answers."""
        for rollout_id in rollout_ids:
            self._answers.pop(rollout_id, None)
        await self._connection.call(lambda: awaitable(self._connection.redis.srem(self._key, *rollout_ids)))
