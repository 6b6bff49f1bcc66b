"""What a worker tells of itself in Redis, in words: its breaker, its event loop, its tunnels, and what is wrong there.

A report is JSON that any version of a worker wrote: what is missing or of another kind is passed over.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from producer.contract import Phase
from producer.queues import QUEUE

#: Milliseconds of the event loop's lag (p99 of a minute) from which on everything that a worker does is late.
_LATE_MS = 500.0
#: Seconds for which the event loop's last blocking is worth telling.
_RECENT = 900.0
_WORDS_LIMIT = 200
_ROW = 3  #: failures in a row of a system that are worth telling


def number(data: Mapping[str, Any], name: str) -> int:
    """Return a whole number of ``data``, 0 where it has none of that name."""
    value = data.get(name)
    return int(value) if isinstance(value, int | float) else 0


def listed(data: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    """Return the objects in a list of ``data``."""
    value = data.get(name)
    return [entry for entry in value if isinstance(entry, dict)] if isinstance(value, list) else []


def mapped(data: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return an object of ``data``, an empty one where it has none of that name."""
    value = data.get(name)
    return value if isinstance(value, dict) else {}


def phases(worker: Mapping[str, Any]) -> dict[str, int]:
    """Return how many of a worker's rollouts are in which phase."""
    found = mapped(worker, "phases")
    return {phase: number(found, phase) for phase in found}


def serves(worker: Mapping[str, Any]) -> list[str]:
    """Return the queues from which a worker takes rollouts: none while it shuts down.

    A worker that does not tell them is of a version that knew of one.
    """
    if worker.get("state") == "draining":
        return []
    found = worker.get("queues", [QUEUE])
    return [queue for queue in found if isinstance(queue, str)] if isinstance(found, list) else [QUEUE]


def by_phase(counts: Mapping[str, int]) -> list[tuple[str, int]]:
    """Return phases and counts in the order in which a rollout goes through them."""
    order = [phase.value for phase in Phase]
    return sorted(counts.items(), key=lambda item: order.index(item[0]) if item[0] in order else len(order))


def count(amount: int, what: str) -> str:
    """Return ``1 rollout`` or ``2 rollouts``."""
    return f"{amount:,} {what}{'' if amount == 1 else 's'}"


def span(seconds: float) -> str:
    """Return a length of time as a person says it: ``12 s``, ``5 min``, ``3.1 h``, ``2.0 d``."""
    if seconds < 120:
        return f"{max(0.0, seconds):.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 48 * 3600 else f"{seconds / 86400:.1f} d"


def lag_p99(worker: Mapping[str, Any]) -> str:
    """Return how late a worker's event loop is."""
    p99 = mapped(worker, "loop_lag_ms").get("p99")
    return f"{p99:.1f} ms" if isinstance(p99, int | float) else "-"


def breaker(worker: Mapping[str, Any]) -> str:
    """Return how a worker's circuit breaker stands: ``closed``, or for what it is open and when it tries again."""
    found = mapped(worker, "breaker")
    match found.get("state"):
        case None:
            return "-"
        case "closed":
            return "closed"
        case "open":
            return f"open for {found.get('kind')}, tries in {span(number(found, 'seconds'))}"
        case state:
            return f"{state} {found.get('kind')}"


def tunnel_state(tunnel: Mapping[str, Any]) -> str:
    """Return ``alive``, ``down``, or ``starting`` for one that has never been up and has not failed."""
    if tunnel.get("alive"):
        return "alive"
    return "down" if number(tunnel, "generation") or tunnel.get("last_error") else "starting"


def troubles(worker: Mapping[str, Any]) -> Iterator[str]:
    """Tell what is wrong with a worker, a sentence each."""
    name = worker.get("name", "?")
    if worker.get("state") == "hung":
        yield f"{name} hangs: it has given up what it ran and takes nothing new until its event loop moves; restart it"
    if trouble := _breaker_trouble(worker):
        yield f"{name} {trouble}"
    else:
        yield from (f"{name}: {trouble}" for trouble in _failing(worker))
    for tunnel in listed(worker, "tunnels"):
        if tunnel_state(tunnel) == "down":
            said = _words(tunnel.get("last_error")) or "no error was given"
            yield f"{name}: its tunnel to {tunnel.get('gateway_url')} is down: {said}"
    if trouble := _loop_trouble(worker):
        yield f"{name}: {trouble}"
    if worker.get("state") == "draining":
        yield f"{name} is shutting down and takes nothing new; {count(number(worker, 'running'), 'rollout')} left"


def _breaker_trouble(worker: Mapping[str, Any]) -> str:
    found = mapped(worker, "breaker")
    if found.get("state") in {None, "closed"}:
        return ""
    kind = str(found.get("kind"))
    system = mapped(mapped(found, "systems"), kind)
    now = f"tries one in {span(number(found, 'seconds'))}" if found["state"] == "open" else "is trying one now"
    failed = f"its {kind} failed {count(number(system, 'failures'), 'time')} in a row"
    last = f"; last: {_words(system.get('last_error'))}" if system.get("last_error") else ""
    return f"takes no rollouts, {now}: {failed}{last}"


def _failing(worker: Mapping[str, Any]) -> Iterator[str]:
    """Tell of systems that fail while the breaker still lets them be tried: a success in between ends a row."""
    systems = mapped(mapped(worker, "breaker"), "systems")
    for kind in systems:
        in_a_row = number(mapped(systems, kind), "failures")
        if in_a_row >= _ROW:
            last = _words(mapped(systems, kind).get("last_error"))
            yield f"its {kind} failed {count(in_a_row, 'time')} in a row, and is tried again; last: {last}"


def _loop_trouble(worker: Mapping[str, Any]) -> str:
    last = mapped(mapped(worker, "loop_blocked"), "last")
    ago = number(last, "ago")
    if last and ago < _RECENT:
        who = f"{last.get('hook')} of {last.get('rollout_id')}" if last.get("rollout_id") else str(last.get("hook"))
        how_often = count(number(mapped(worker, "loop_blocked"), "count"), "time")
        return f"its event loop was blocked for {last.get('seconds')} s by {who}, {span(ago)} ago ({how_often} so far)"
    p99 = mapped(worker, "loop_lag_ms").get("p99")
    if isinstance(p99, int | float) and p99 >= _LATE_MS:
        return f"its event loop is late by {p99:.0f} ms (p99): it has too little CPU, or too many rollouts"
    return ""


def _words(text: object) -> str:
    """Return a foreign text as one short line."""
    line = " ".join(str(text or "").split())
    return line if len(line) <= _WORDS_LIMIT else f"{line[: _WORDS_LIMIT - 3]}..."
