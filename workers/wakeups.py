"""The wake-up messages of rollouts that wait: sent when a delay is over, and again when they were lost.

Each worker sees to all queues that Redis knows of, also to those that it does not serve itself: the workers of a queue
may all be gone, and its rollouts are to be found where they belong when the next one comes.
"""

from __future__ import annotations

from typing import Any

from celery import Celery

from producer import broker, queues
from workers import records

#: Records per script call: a script blocks Redis while it runs, about 2 microseconds a record.
_CHUNK = 500


class WakeUps:
    """Renders and sends the messages; synchronous, raises `redis.RedisError`."""

    def __init__(self, client: Any, app: Celery) -> None:
        self._client = client
        self._messages = {step: broker.WakeUp.for_app(app, step) for step in queues.PRIORITY_STEPS}
        self._wake = client.register_script(broker.script("workers", "wake"))
        self._forget = client.register_script(broker.script("workers", "forget"))

    def message(self, rollout_id: str, priority: int, queue: str | None) -> bytes:
        """Return the message that wakes a worker for a rollout of ``queue``; None leaves it to a script to name it."""
        return self._messages[queues.step_of(priority)].render(rollout_id, queue)

    def queues(self) -> list[str]:
        """Return all queues of which anything waits or runs, and the default one."""
        return queues.queues_in(self._client.smembers(queues.QUEUES))

    def forget_empty(self) -> int:
        """Forget the queues of which nothing is left; returns how many."""
        known = self.queues()[1:]
        return int(self._forget(keys=[], args=known)) if known else 0

    def wake_delayed(self, now: int) -> int:
        """Send the messages of rollouts whose delay is over at ``now`` (ms); returns how many."""
        woken = 0
        for queue in self.queues():
            while found := self._up_to(queue, queues.delayed_key(queue), 0, now):
                woken += found
        return woken

    def resend_missing(self, now: int, age: float) -> int:
        """Send the messages of rollouts that wait but are in no list of their queue; returns how many.

        A list is served in order, so whatever should have been served ``age`` seconds before the message that is next
        has no message any more.
        """
        return sum(self._resend(queue, step, now, age) for queue in self.queues() for step in queues.PRIORITY_STEPS)

    def _resend(self, queue: str, step: int, now: int, age: float) -> int:
        key, pending, base = queues.queue_key(step, queue), queues.pending_key(queue), queues.pending_base(step)
        upcoming = self._client.lindex(key, -1)
        if upcoming is None:
            limit: float = base + now
        else:
            score = self._client.zscore(pending, records.woken_by(upcoming))
            if score is None:  # a duplicate or not one of ours: the next free worker drops it
                return 0
            limit = score
        return self._up_to(queue, pending, base, limit - age * 1000, judged=(key, upcoming or b""))

    def _up_to(self, queue: str, key: str, low: float, high: float, judged: tuple[str, bytes] | None = None) -> int:
        members = self._client.zrangebyscore(key, low, high, start=0, num=_CHUNK)
        by_step: dict[int, list[Any]] = {}
        for member, record in records.fields_of(self._client, members, "priority"):
            rollout_id = records.id_in(member)
            if rollout_id is None or not record or record[0] is None:  # it expired: nothing is left to run
                self._client.zrem(key, member)
                continue
            step = queues.step_of(records.priority(record[0]))
            by_step.setdefault(step, []).extend((rollout_id, self.message(rollout_id, step, queue)))
        woken = 0
        how = ("any", b"") if judged is None else ("next", judged[1])
        for step, pairs in by_step.items():
            own = queues.queue_key(step, queue)
            keys = [key, queues.pending_key(queue), own, judged[0] if judged else own]
            woken += int(self._wake(keys=keys, args=[high, queues.pending_base(step), *how, *pairs]))
        return woken
