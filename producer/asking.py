"""Questions to the workers of a fleet, put where they watch for cancellations anyway, and what they answer."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from typing import Any

import orjson
from redis.exceptions import RedisError

from producer import broker
from producer.connection import FleetConnection, awaitable


async def ask(
    connection: FleetConnection, questions: Sequence[dict[str, str]], *, answers: int, timeout: float
) -> list[dict[str, Any]]:
    """Put ``questions``; returns when there are so many ``answers`` to them, or after ``timeout`` seconds.

    Raises `FleetUnreachableError` when they cannot be put. What is not answered then is not known, whatever the reason.
    """
    token = uuid.uuid4().hex

    async def put() -> None:
        pipe = connection.redis.pipeline(transaction=False)
        for question in questions:
            entry: dict[Any, Any] = {"id": "", "ask": token} | question
            pipe.xadd(broker.CANCELS, entry, maxlen=broker.EVENTS_KEPT, approximate=True)
        pipe.expire(broker.CANCELS, int(broker.RESULT_TTL.total_seconds()))
        await pipe.execute()

    await connection.call(put)
    found: list[dict[str, Any]] = []
    try:
        async with asyncio.timeout(timeout):
            while len(found) < answers:
                answer: Any = await awaitable(connection.redis.blpop([broker.answer_key(token)], timeout=timeout))
                if answer:
                    found.append(orjson.loads(answer[1]))
    except (TimeoutError, RedisError):
        pass
    return found
