"""Keeping CPython's full garbage collections rare, and what they would find from being kept for days."""

from __future__ import annotations

import asyncio
import gc
import time


def calm_garbage_collector(youngest: int, oldest: int) -> None:
    """Keep full collections rare, and what is loaded by now out of them; once per process, when it is about to work.

    ``youngest`` objects are looked at when they are as many, ten times as many then, and all at most once for every
    ``oldest`` looks at those. For what has cycles and grows old, see `collect_garbage`.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(youngest, 10, oldest)


async def collect_garbage(interval: float = 60.0, share: float = 0.001) -> None:
    """Do a full collection every ``interval`` seconds until cancelled; less often if that takes too great a ``share``.

    Cycles of long jobs and long requests, of hooks and of foreign clients grow old, and would be kept for days. With
    little in flight this takes milliseconds; with 10,000 jobs it comes every five minutes or so. On the event loop, for
    what is found may be a transport, which must be finalized there.
    """
    pause = interval
    while True:
        await asyncio.sleep(pause)
        began = time.monotonic()
        gc.collect()
        pause = max(interval, (time.monotonic() - began) / share)
