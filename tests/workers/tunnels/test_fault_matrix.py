"""Every fault of every endpoint that a tunnel needs: what becomes of it, how often it was asked for, nothing is left.

One line of `TABLE` is one fault at one *site*, a moment in the life of a tunnel at which one endpoint is asked. What
a start makes of each of the platform's refusals in words is in ``test_prime.py``.

A test holds that no fault of any endpoint is missing, but for those of `LEFT_OUT`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from emulators.prime.faults import ENDPOINTS
from fault_rows import FAULTS, Fails, Works, final, gaps, is_of_tunnels, retryable
from prime_tunnel.core.client import TunnelClient

from workers.errors import TunnelError
from workers.tunnels.backend import Limits
from workers.tunnels.pool import TunnelPool
from workers.tunnels.prime import PrimeBackend

pytestmark = pytest.mark.xdist_group("tunnel-matrix")

GATEWAY = "http://127.0.0.1:8080"
LABELS = ("fleet:test", "worker:celery@w1")
NOTHING: dict[str, list[Any]] = {"sandboxes": [], "tunnels": [], "processes": []}

TABLE: list[tuple[str, str, Works | Fails]] = [
    # A start: asked for again, except where the account has to be put right first.
    ("start", "500", Works(2)),
    ("start", "503", Works(2)),
    ("start", "429", Works(2)),
    ("start", "401", final(1, "PRIME_API_KEY")),
    ("start", "402", final(1, "billing")),
    ("start", "404", final(1, "PRIME_API_BASE_URL")),
    ("start", "delay", Works(1)),
    ("start", "hang", Works(2)),
    ("start", "hang after", Works(2)),
    ("start", "drop before", Works(2)),
    ("start", "drop after", Works(2)),
    ("start", "500 for ever", retryable(2, "HTTP 500")),
    ("start", "429 for ever", retryable(2, "HTTP 429")),
    ("start", "drop after for ever", retryable(6, "Failed to connect")),  # the SDK itself asks three times
    # Two looks at a tunnel that serves: the first, which fails, is no verdict.
    ("look", "500", Works(2)),
    ("look", "503", Works(2)),
    ("look", "429", Works(2)),
    ("look", "401", Works(2)),
    ("look", "delay", Works(2)),
    ("look", "hang", Works(2)),
    ("look", "drop before", Works(3)),
    ("look", "500 for ever", Works(2)),
    ("look", "hang for ever", Works(2)),
    # What the sweep for orphans asks; it comes again by itself.
    ("find", "500", retryable(1, "HTTP 500")),
    ("find", "503", retryable(1, "HTTP 503")),
    ("find", "429", retryable(1, "HTTP 429")),
    ("find", "401", final(1, "PRIME_API_KEY")),
    ("find", "404", final(1, "PRIME_API_BASE_URL")),
    ("find", "delay", Works(1)),
    ("find", "hang", retryable(1, "could not look for registrations within")),
    ("find", "drop before", Works(2)),
    # Its deletions, of which one that is gone is one.
    ("delete", "500", retryable(1, "HTTP 500")),
    ("delete", "503", retryable(1, "HTTP 503")),
    ("delete", "429", retryable(1, "HTTP 429")),
    ("delete", "401", final(1, "PRIME_API_KEY")),
    ("delete", "404", Works(1)),
    ("delete", "delay", Works(1)),
    ("delete", "hang", retryable(1, "could not delete a registration within")),
    ("delete", "drop before", Works(2)),
    ("delete", "drop after", Works(2)),
    ("delete", "hang after", retryable(1, "could not delete a registration within")),
    # The end of a worker: it stops its tunnel, then looks for it by its label, and deletes it once more if it is there.
    ("stop", "500", Works(2)),
    ("stop", "503", Works(2)),
    ("stop", "429", Works(2)),
    ("stop", "401", Works(2)),
    ("stop", "delay", Works(1)),
    ("stop", "hang", Works(2)),
    ("stop", "drop before", Works(2)),
    ("stop", "drop after", Works(1)),
    # The same, when it is the list that fails: the deletion has worked.
    ("sweep", "500", Works(1)),
    ("sweep", "429", Works(1)),
    ("sweep", "hang", Works(1)),
    ("sweep", "drop before", Works(2)),
]


FREE = "it costs nothing, and the platform wants payment for what it is to do"
LOOK = "it has no effect, so that the fault before it is the same for who asks"

#: What is in no row, by endpoint: the faults, and why.
LEFT_OUT: dict[str, dict[str, str]] = {
    "get_tunnel": {
        **{"402": FREE, "drop after": LOOK, "hang after": LOOK},
        "404": "the registration is gone then, which has tests of its own",
    },
    "list_tunnels": {"402": FREE, "drop after": LOOK, "hang after": LOOK},
    "delete_tunnel": {"402": FREE},
    "bulk_delete_tunnels": dict.fromkeys(FAULTS, "it is never asked for"),
    "forwarded": dict.fromkeys(FAULTS, "what agents make of it is in tests/integration/test_fault_matrix.py"),
}


def test_no_fault_of_any_endpoint_is_missing() -> None:
    endpoints = {name for name in ENDPOINTS if is_of_tunnels(name)}
    rows = {(SITES[site][0], fault) for site, fault, _ in TABLE}
    assert gaps(endpoints, rows, LEFT_OUT) == set()


# -- what is done at each site -----------------------------------------------------------------------------------------


async def start(pool: TunnelPool, arm: Callable[[], None]) -> None:
    arm()
    async with pool.lease(GATEWAY):
        pass


async def look(pool: TunnelPool, arm: Callable[[], None]) -> None:
    """No failed look ends a tunnel, and none holds up whoever asks whether his agent had one."""
    async with pool.lease(GATEWAY) as lease:
        arm()
        async with asyncio.timeout(15):
            await lease.confirm(since=0, until=0)
        assert pool.report()[0]["alive"]
        broken = asyncio.create_task(lease.broken())
        await pool.check()
        broken.cancel()
        (ending,) = await asyncio.gather(broken, return_exceptions=True)
        assert isinstance(ending, asyncio.CancelledError)


async def find(pool: TunnelPool, arm: Callable[[], None]) -> None:
    arm()
    assert await pool.find("worker:nobody") == []


async def delete(pool: TunnelPool, arm: Callable[[], None]) -> None:
    client = TunnelClient()  # a registration that a dead worker has left
    left = await client.create_tunnel(8080, labels=["worker:dead"])
    await client.close()
    arm()
    await pool.delete(left.tunnel_id)


async def stop(pool: TunnelPool, arm: Callable[[], None]) -> None:
    async with pool.lease(GATEWAY):
        arm()
    await pool.aclose()


Site = tuple[str, Callable[[TunnelPool, Callable[[], None]], Awaitable[None]]]
SITES: dict[str, Site] = {
    "start": ("create_tunnel", start),
    "look": ("get_tunnel", look),
    "find": ("list_tunnels", find),
    "delete": ("delete_tunnel", delete),
    "stop": ("delete_tunnel", stop),
    "sweep": ("list_tunnels", stop),
}


def limits_of(quick: Callable[..., Limits], site: str, fault: str) -> Limits:
    """Return limits of which only that of what hangs is short; that of a start is shortened for its first try alone."""
    short = {"find": {"sweep_timeout": 3.0}, "delete": {"sweep_timeout": 3.0}, "sweep": {"sweep_timeout": 3.0}}
    short |= {"stop": {"stop_timeout": 9.0}}  # a third of it for the deletion
    return quick(status_timeout=2.0, start_attempts=2, **(short.get(site, {}) if "hang" in fault else {}))


class Row:
    """One row under way: what it asks for is counted from the moment at which its fault waits."""

    def __init__(self, emulator: Any, quick: Callable[..., Limits], site: str, fault: str) -> None:
        self.emulator = emulator
        self.endpoint, self.doing = SITES[site]
        name, _, _ = fault.partition(" for ever")
        self.limits = limits_of(quick, site, name)
        self.fault = FAULTS[name] | ({"times": None} if fault != name else {})
        self.before = 0

    def arm(self) -> None:
        self.before = self._requests()
        self.emulator.fault(self.endpoint, **self.fault)

    async def run(self, pool: TunnelPool) -> Works | Fails:
        pool._limits = self.limits  # else all would be as short of time as what hangs
        try:
            await self.doing(pool, self.arm)
        except TunnelError as error:
            return Fails(self._requests() - self.before, error.retryable, f"{error.message} | {error.detail}")
        else:
            return Works(self._requests() - self.before)
        finally:
            self.emulator.clear_faults()

    def _requests(self) -> int:
        return int(self.emulator.requests().get(self.endpoint, 0))


def shown(outcome: Works | Fails, expected: Works | Fails) -> Works | Fails:
    """Return ``outcome`` for comparison: with the expected words only, where it has them among others."""
    if isinstance(expected, Fails) and isinstance(outcome, Fails) and expected.words in outcome.words:
        return Fails(outcome.asked, outcome.again, expected.words)
    return outcome


LIVES = [row for row in TABLE if row[0] in {"start", "stop", "sweep"}]
CALLS = [row for row in TABLE if row not in LIVES]


def names(rows: list[tuple[str, str, Works | Fails]]) -> list[str]:
    return [f"{site}: {fault}" for site, fault, _ in rows]


@pytest.mark.parametrize(("site", "fault", "expected"), LIVES, ids=names(LIVES))
def test_a_fault_at_the_start_or_the_end(
    emulator: Any, scenario: Any, quick: Any, impatient_at_first: Any, site: str, fault: str, expected: Works | Fails
) -> None:
    if site == "start" and "hang" in fault:
        impatient_at_first()
    row = Row(emulator, quick, site, fault)
    outcome = scenario(PrimeBackend("celery@w1", LABELS), row.run, row.limits)
    assert shown(outcome, expected) == expected
    assert emulator.leaked() == NOTHING


def test_faults_while_a_tunnel_serves(emulator: Any, scenario: Any, quick: Any) -> None:
    """All on one tunnel, which outlives them."""
    outcomes: dict[tuple[str, str], Works | Fails] = {}

    async def story(pool: TunnelPool) -> None:
        async with pool.lease(GATEWAY) as lease:
            for site, fault, expected in CALLS:
                outcomes[site, fault] = shown(await Row(emulator, quick, site, fault).run(pool), expected)
                client = TunnelClient()
                for tunnel_id in set(emulator.leaked()["tunnels"]) - {lease.tunnel_id}:
                    assert isinstance(expected, Fails) or fault == "404", "a deletion that works leaves nothing"
                    await client.delete_tunnel(tunnel_id)
                await client.close()
            assert pool.report()[0]["tunnel_id"] == lease.tunnel_id

    scenario(PrimeBackend("celery@w1", LABELS), story, limits_of(quick, "look", "hang"))
    assert outcomes == {(site, fault): expected for site, fault, expected in CALLS}
    assert emulator.leaked() == NOTHING


def test_a_deletion_that_fails_until_the_end_is_named_and_found_by_the_next_worker(
    emulator: Any, scenario: Any, quick: Any, caplog: pytest.LogCaptureFixture
) -> None:
    emulator.fault("delete_tunnel", status=500, times=None)

    async def life(pool: TunnelPool) -> None:
        async with pool.lease(GATEWAY):
            pass

    with caplog.at_level(logging.ERROR):
        scenario(PrimeBackend("celery@w1", LABELS), life, quick())
    assert [message for message in caplog.messages if "may be left" in message and "start:" in message]
    emulator.clear_faults()
    (left,) = emulator.leaked()["tunnels"]

    async def sweep(pool: TunnelPool) -> None:
        assert [tunnel.id for tunnel in await pool.find("worker:celery@w1")] == [left]
        await pool.delete(left)

    scenario(PrimeBackend("celery@w2", ("fleet:test", "worker:celery@w2")), sweep)
    assert emulator.leaked() == NOTHING
