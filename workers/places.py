"""Limited places: what holds one, or waits for one, without cause is taken off, and whoever there is room for is woken.

Each script that ends or moves a rollout lets go of its places in the same step. What is left over is what a server that
lost its last second has undone by half, and records that expired.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from producer import broker, queues

_AT_ONCE = 500


class Places:
    """Mends the places of the whole fleet; synchronous, raises `redis.RedisError`."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self._limit = client.register_script(broker.script("producer", "limit"))

    def mend(self) -> int:
        """Take off what has no cause to be there, and wake who may run; returns how many were taken off."""
        known = {place.decode(errors="replace") for place in self._client.smembers(broker.PLACES)}
        limited = {place.decode(errors="replace") for place in self._client.hkeys(broker.LIMITS)}
        return sum(self._mend(place) for place in sorted(known | limited))

    def _mend(self, place: str) -> int:
        taken_off = 0
        for ids in self._suspects(place):
            taken_off += int(self._limit(keys=[broker.LIMITS], args=[place, "same", *ids]))
        return taken_off

    def _suspects(self, place: str) -> Iterator[list[str]]:
        """Yield, some at a time, those whose record does not say that they run or are parked; at last none."""
        # Of thousands that run nearly all hold one with cause, which the server tells a hundred times as fast.
        running = [queues.running_key(queue) for queue in queues.queues_in(self._client.smembers(queues.QUEUES))]
        holders = self._client.zdiff([broker.place_key(place), *running])
        parked = [i for i, _ in self._client.zscan_iter(broker.parked_key(place), count=_AT_ONCE)]
        for ids, right in ((holders, (b"running", False)), (parked, (b"pending", True))):
            for start in range(0, len(ids), _AT_ONCE):
                some = [i.decode(errors="replace") for i in ids[start : start + _AT_ONCE]]
                pipe = self._client.pipeline(transaction=False)
                for rollout_id in some:
                    pipe.hmget(broker.job_key(rollout_id), "state", "parked")
                found = zip(some, pipe.execute(), strict=True)
                yield [i for i, (state, message) in found if (state, message is not None) != right]
        yield []
