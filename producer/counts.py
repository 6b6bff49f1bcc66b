"""How many rollouts of each queue wait, are delayed, run and have lapsed, and for how long the oldest has waited.

`rollouts status` and each worker's metrics ask Redis the same: the first look tells what there is
(`ask_what_there_is`), the second counts it (`Counting`). Both fill a pipeline, of redis-py's synchronous or
asynchronous client, and read the answers to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from producer import broker, queues

_STEPS = len(queues.PRIORITY_STEPS)
#: Commands that count one queue: four numbers, its lists, and the first of each list's rollouts.
_WIDTH = 4 + 2 * _STEPS


@dataclass(frozen=True)
class QueueCounts:
    """A queue at one moment. ``running`` rollouts hold a lease, ``lapsed`` ones have lost it and await the sweep.

    ``oldest`` is for how many seconds the first of those that are queued has waited. ``messages`` is how many lie in
    the list of each priority step.
    """

    pending: int = 0
    delayed: int = 0
    running: int = 0
    lapsed: int = 0
    oldest: float = 0.0
    messages: tuple[int, ...] = (0,) * _STEPS


@dataclass(frozen=True)
class FleetCounts:
    """All of the fleet; ``parked`` rollouts wait for what is limited, whatever queue they are of."""

    queues: dict[str, QueueCounts] = field(default_factory=dict)
    parked: int = 0


def ask_what_there_is(pipe: Any) -> None:
    """Ask for the time, the queues and the places: what `Counting` is made of."""
    pipe.time()
    pipe.smembers(queues.QUEUES)
    pipe.smembers(broker.PLACES)


class Counting:
    """Counts what `ask_what_there_is` found, and the queues ``besides``: those that somebody serves."""

    def __init__(self, answers: Sequence[Any], besides: Sequence[str] = ()) -> None:
        now, named, places = answers
        self.now_ms = broker.clock_ms(now)
        found = queues.queues_in(named)
        self._queues = [*found, *(queue for queue in dict.fromkeys(besides) if queue not in found)]
        self._places = [place.decode(errors="replace") for place in places]

    def ask(self, pipe: Any) -> None:
        """Put the questions into a pipeline."""
        for queue in self._queues:
            self._ask_of(pipe, queue)
        for place in self._places:
            pipe.zcard(broker.parked_key(place))

    def _ask_of(self, pipe: Any, queue: str) -> None:
        pending, running = queues.pending_key(queue), queues.running_key(queue)
        pipe.zcard(pending)
        pipe.zcard(queues.delayed_key(queue))
        pipe.zcount(running, f"({self.now_ms}", "+inf")
        pipe.zcount(running, "-inf", self.now_ms)
        for key in queues.queue_keys(queue):
            pipe.llen(key)
        for step in queues.PRIORITY_STEPS:  # what was put to the front of its list has no time
            base = queues.pending_base(step)
            limits = f"({base}", f"({base + queues.LIST_SPAN}"
            pipe.zrangebyscore(pending, *limits, start=0, num=1, withscores=True)

    def read(self, answers: Sequence[Any]) -> FleetCounts:
        """Read the answers to `ask`."""
        found = {}
        for index, queue in enumerate(self._queues):
            found[queue] = self._read_of(answers[index * _WIDTH : (index + 1) * _WIDTH])
        return FleetCounts(found, sum(answers[len(self._queues) * _WIDTH :]))

    def _read_of(self, answers: Sequence[Any]) -> QueueCounts:
        bases = map(queues.pending_base, queues.PRIORITY_STEPS)
        times = [at - base for base, first in zip(bases, answers[4 + _STEPS :], strict=True) for _, at in first]
        oldest = max(0.0, (self.now_ms - min(times)) / 1000) if times else 0.0
        pending, delayed, running, lapsed, *messages = answers[: 4 + _STEPS]
        return QueueCounts(pending, delayed, running, lapsed, oldest, tuple(messages))
