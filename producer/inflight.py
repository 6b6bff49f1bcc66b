"""Finds rollouts among those that have not ended, for what is asked seldom and of all of the fleet."""

from __future__ import annotations

from typing import Any

from producer import broker, queues
from producer.connection import FleetConnection, awaitable
from producer.contract import RolloutRequest
from producer.kinds import Purpose
from producer.validation import InvalidRequestError

_AT_ONCE = 1000


async def unfinished(connection: FleetConnection, batch_id: str) -> list[str]:
    """Return the ids of a batch's rollouts that have not ended; it looks at all that the fleet has."""
    found: list[str] = []
    for key in await _waiting_and_running(connection):
        ids = await _members(connection, key)
        records = await _fields(connection, ids, ["batch"])
        found += [rollout_id for rollout_id, (batch,) in zip(ids, records, strict=True) if batch == batch_id.encode()]
    return list(dict.fromkeys(found))


async def youngest(connection: FleetConnection, count: int) -> list[str]:
    """Return the ids of the ``count`` running rollouts that began last, of those that train."""
    ids = [i for queue in await connection.queues() for i in await _members(connection, queues.running_key(queue))]
    records = await _fields(connection, ids, ["claimed_ms", "cancel"])
    began = {i: int(at) for i, (at, cancel) in zip(ids, records, strict=True) if at and not cancel}
    found: list[str] = []
    for rollout_id in sorted(began, key=lambda i: began[i], reverse=True):
        if len(found) >= count:
            break
        if await _trains(connection, rollout_id):
            found.append(rollout_id)
    return found


async def _trains(connection: FleetConnection, rollout_id: str) -> bool:
    request = (await connection.record(rollout_id)).request
    try:
        return request is not None and RolloutRequest.parse(request).purpose is Purpose.TRAIN
    except InvalidRequestError:
        return False


async def _waiting_and_running(connection: FleetConnection) -> list[str]:
    parked = [key.decode() async for key in connection.redis.scan_iter(match=f"{broker.parked_key('')}*", count=1000)]
    # Running last: what is claimed meanwhile is found there.
    named = await connection.queues()
    sets = (queues.delayed_key, queues.pending_key, queues.running_key)
    return [*parked, *(key(queue) for key in sets for queue in named)]


async def _members(connection: FleetConnection, key: str) -> list[str]:
    found: Any = await connection.call(lambda: awaitable(connection.redis.zrange(key, 0, -1)))
    return [rollout_id.decode() for rollout_id in found]


async def _fields(connection: FleetConnection, ids: list[str], names: list[str]) -> list[list[bytes | None]]:
    records: list[list[bytes | None]] = []
    for start in range(0, len(ids), _AT_ONCE):
        records += await connection.fields(ids[start : start + _AT_ONCE], names)
    return records
