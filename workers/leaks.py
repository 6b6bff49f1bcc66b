"""What was left behind, as data: whose it was, and how old it is."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from typing import Any

from workers.ledger import Entry, Workers
from workers.sandboxes.base import FoundSandbox
from workers.tunnels.base import FoundTunnel

#: Label of a tunnel that tells processes apart which have one name, one after the other.
PROCESS = "process"
#: Seconds that a new process has for its first report before what is not its namesake's may be taken for that.
NAMESAKE_GRACE = 10.0


@dataclass(frozen=True, kw_only=True)
class Leak:
    """Something that was left behind: ``kind`` is ``sandbox``, ``tunnel``, or ``attempt`` for an entry of the ledger.

    ``age`` is in seconds.
    """

    kind: str
    id: str
    rollout_id: str = ""
    attempt: int = 0
    worker: str = ""
    age: float = 0.0

    @property
    def owner(self) -> str:
        """Who left it, in words."""
        worker = f"worker {self.worker or '?'}"
        return f"{self.rollout_id} attempt {self.attempt}, {worker}" if self.rollout_id else worker

    def as_dict(self) -> dict[str, Any]:
        """Return it as plain data."""
        return asdict(self) | {"age": round(self.age, 1)}

    def __str__(self) -> str:
        if self.kind == "attempt":
            return f"what {self.owner} left {self.age:.0f} s ago"
        return f"{self.kind} {self.id} of {self.owner}, {self.age:.0f} s old"


@dataclass
class Cleared:
    """What clearing up has deleted, and what it could not."""

    deleted: list[Leak] = field(default_factory=list)
    left: list[Leak] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Return it as plain data: ``{deleted, left}``."""
        return {name: [leak.as_dict() for leak in getattr(self, name)] for name in ("deleted", "left")}

    def __str__(self) -> str:
        lines = [f"deleted  {leak}" for leak in self.deleted] + [f"left     {leak}" for leak in self.left]
        return "\n".join(lines if self.left else [*lines, "nothing is left"])


def leak_of_entry(entry: Entry, now_ms: int) -> Leak:
    """Describe an open entry of the ledger."""
    return Leak(
        kind="attempt",
        id=entry.field,
        rollout_id=entry.rollout_id,
        attempt=entry.attempt,
        worker=entry.worker,
        age=entry.age(now_ms),
    )


def leak_of(thing: FoundSandbox | FoundTunnel) -> Leak:
    """Describe a sandbox or tunnel by its labels."""
    rollout_id, attempt = max(owners(thing), default=("", 0))
    return Leak(
        kind="sandbox" if isinstance(thing, FoundSandbox) else "tunnel",
        id=thing.id,
        rollout_id=rollout_id,
        attempt=attempt,
        worker=worker_of(thing),
        age=age_of(thing),
    )


def owners(thing: FoundSandbox | FoundTunnel) -> set[tuple[str, int]]:
    """Return every (rollout id, attempt) that may own a thing: one, unless its request has labels like ours."""
    attempts = [int(n) for n in _values(thing.labels, "attempt") if n.isdecimal() and len(n) < 10]
    return {(rollout_id, attempt) for rollout_id in _values(thing.labels, "rollout") for attempt in attempts}


def worker_of(thing: FoundSandbox | FoundTunnel) -> str:
    """Return the name of the worker that created a thing; ours is the last of its labels, after its request's."""
    return next(reversed(_values(thing.labels, "worker")), "")


def age_of(thing: FoundSandbox | FoundTunnel) -> float:
    """Return for how many seconds a thing has been there; 0 where the platform does not say."""
    return 0.0 if thing.created_at is None else max(0.0, time.time() - thing.created_at)


def is_stray(tunnel: FoundTunnel, known: Workers, grace: float) -> bool:
    """Whether a tunnel is that of a dead worker, or one that a living worker does not know to be its own.

    A living worker names a tunnel once it serves, which is a while after its registration: one that was younger than
    ``grace`` seconds when the worker last reported may be starting. The others are of starts whose answer was lost, and
    of a dead process whose name a living one has now; these show it by their label, and are not spared for so long.
    """
    worker = worker_of(tunnel)
    if not worker:
        return False
    if not known.lives(worker):
        return known.is_dead(worker)
    if tunnel.id in known.tunnels[worker]:
        return False
    process = next(reversed(_values(tunnel.labels, PROCESS)), "")
    is_namesakes = process not in {"", known.processes[worker]}
    return age_of(tunnel) - known.silence(worker) > (min(grace, NAMESAKE_GRACE) if is_namesakes else grace)


def _values(labels: tuple[str, ...], name: str) -> list[str]:
    return [value for key, _, value in (label.partition(":") for label in labels) if key == name]
