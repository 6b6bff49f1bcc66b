"""The fleet's queues: their names, and where in Redis each keeps its messages, and what waits and runs of it.

A pool of workers serves one queue or several. A rollout is of one queue for all of its life: wherever it waits, is
tried again or handed over, it comes back to that one. Each queue has lists of its own, one for each priority step, in
which kombu's transport keeps the messages, and sorted sets of its own, so that what is queued and runs of it can be
counted without looking at a record, also by an autoscaler that knows nothing of us.

Which queues there are is told by Redis (`QUEUES`), and not by anybody's settings: what waits in a queue that no worker
serves is seen and told by all.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

#: The queue of requests that name none. Its keys are those that have no queue's name in them.
QUEUE = "rollouts"
#: A queue's name is part of Redis keys, of Celery's queue names, of labels of metrics and of commands.
QUEUE_PATTERN = r"^[a-z0-9][a-z0-9_-]{0,62}$"

PREFIX = "rollouts:"
_CELERY_PREFIX = QUEUE + ".q."

#: kombu's Redis transport keeps one list per priority step; 0 is served first.
PRIORITY_STEPS = (0, 3, 6, 9)
_PRIORITY_SEPARATOR = "\x06\x16"
#: Distance between the scores in `pending_key` of two of a queue's lists: the n-th list's rollouts are scored
#: ``n * LIST_SPAN + milliseconds``, so that those of one list are a range, in the order in which they are served. One
#: that was put to the front of its list has no time.
LIST_SPAN = 10**14

QUEUES = PREFIX + "queues"  #: set of the queues beside `QUEUE` of which rollouts wait or run, or did so a moment ago


def named(text: str) -> str:
    """Return the name of a queue; raises `ValueError` for what is none."""
    if not re.fullmatch(QUEUE_PATTERN, text):
        raise ValueError(
            f"{text!r} is no queue's name: lower-case letters, digits, - and _, at most 63 of them, and none of the "
            "last two at the beginning; such as gpu"
        )
    return text


def queues_in(members: Iterable[bytes]) -> list[str]:
    """Return all queues, the default one first, by the members of `QUEUES`; what is no name there is passed over."""
    names = {member.decode(errors="replace") for member in members}
    return [QUEUE, *sorted(name for name in names if name != QUEUE and re.fullmatch(QUEUE_PATTERN, name))]


def pending_key(queue: str = QUEUE) -> str:
    """Key of the sorted set of rollout ids that wait for a worker, scored by list and time (ms)."""
    return _of(PREFIX + "pending", queue)


def delayed_key(queue: str = QUEUE) -> str:
    """Key of the sorted set of rollout ids that wait for a due time (ms) before they are sent again."""
    return _of(PREFIX + "delayed", queue)


def running_key(queue: str = QUEUE) -> str:
    """Key of the sorted set of rollout ids that hold a lease, scored by when it lapses (ms)."""
    return _of(PREFIX + "running", queue)


def _of(key: str, queue: str) -> str:
    return key if queue == QUEUE else f"{key}:{queue}"


def celery_name(queue: str = QUEUE) -> str:
    """Return the name under which Celery knows a queue: that of its first list in Redis."""
    return queue if queue == QUEUE else _CELERY_PREFIX + queue


def rollout_queue(name: str) -> str | None:
    """Return the queue that Celery knows by ``name``; None for one that is not for rollouts."""
    if name == QUEUE:
        return QUEUE
    queue = name.removeprefix(_CELERY_PREFIX)
    return queue if queue not in {name, QUEUE} and re.fullmatch(QUEUE_PATTERN, queue) else None


def step_of(priority: int) -> int:
    """Return the one of `PRIORITY_STEPS` under which a priority (0 to 9) is queued."""
    return max(step for step in PRIORITY_STEPS if step <= priority)


def queue_key(priority: int, queue: str = QUEUE) -> str:
    """Key of the Redis list in which kombu's transport keeps a queue's messages of ``priority`` (0 to 9)."""
    return celery_name(queue) + _suffix(step_of(priority))


def queue_keys(queue: str = QUEUE) -> list[str]:
    """Return the keys of all of a queue's lists, the first served first."""
    return [queue_key(step, queue) for step in PRIORITY_STEPS]


def pending_base(priority: int) -> int:
    """Return the score in `pending_key` with which the rollouts of the list for ``priority`` begin."""
    return PRIORITY_STEPS.index(step_of(priority)) * LIST_SPAN


def _suffix(step: int) -> str:
    return f"{_PRIORITY_SEPARATOR}{step}" if step else ""


def lua_tables() -> str:
    """Return this module for Lua: ``QUEUE_KEYS``, the keys of the default queue; ``LISTS``, a queue's lists.

    Another queue's keys are made of the default one's: `queue_of` in ``moves.lua``.
    """
    names = {"pending": pending_key(), "delayed": delayed_key(), "running": running_key(), "all": QUEUES}
    keys = ", ".join(f"{name} = {lua_string(key)}" for name, key in names.items())
    lists = ", ".join(f"{{{step}, {lua_string(_suffix(step))}, {pending_base(step)}}}" for step in PRIORITY_STEPS)
    celery = f"celery = {lua_string(QUEUE)}, celery_prefix = {lua_string(_CELERY_PREFIX)}"
    return f"local QUEUE_KEYS = {{{keys}, {celery}}}\nlocal LISTS = {{{lists}}}\n"


def lua_string(text: str) -> str:
    """Return ``text`` as a literal of Lua."""
    return '"' + "".join(f"\\{ord(c):03d}" if c in '"\\' or ord(c) < ord(" ") else c for c in text) + '"'
