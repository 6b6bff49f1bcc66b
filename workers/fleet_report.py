"""What a worker process tells the fleet about itself every few seconds: `rollouts status` and `rollouts ps` show it."""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from workers import instruments
from workers.state import Rollout

if TYPE_CHECKING:
    from workers.fleet import Fleet

#: Rollouts of a worker of which each one's phase is told.
_RUNS_TOLD = 1000


def report(fleet: Fleet, running: Mapping[str, Rollout], started_at: float, state: str) -> dict[str, Any]:
    """Return the report; from any thread."""
    phases = Counter(rollout.phase.value for rollout in list(running.values()))
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "process": fleet.systems.process,
        "concurrency": fleet.pool.limit,
        "breaker": fleet.breaker.report(),
        "queues": list(fleet.settings.queues),
        "running": len(fleet.claims),
        "phases": dict(phases),
        "loop_lag_ms": fleet.pool.info["loop-lag-ms"],
        "loop_blocked": fleet.loop_watch.report(),
        "environments": fleet.environments.names(),
        "tunnels": fleet.systems.tunnels.report(),
        "leaked": fleet.orphans.leaked,
        "started_at": started_at,
        "state": state,
        **instruments.totals(),
    }


def runs(running: Mapping[str, Rollout]) -> dict[str, Any]:
    """Return attempt, phase and the phase's beginning (s) of each rollout, of the longest if there are many."""
    first = list(running.items())[:_RUNS_TOLD]
    return {i: [rollout.attempt, rollout.phase, round(rollout.phase_since)] for i, rollout in first}
