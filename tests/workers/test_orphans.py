"""The orphan sweep: what is deleted, what is spared, and what is tried again. Real Redis; systems made of lists."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
import redis
from celery import Celery
from emulators.prime import PrimeEmulator
from prometheus_client import CollectorRegistry, generate_latest
from support import free_port, wait_until

from producer import broker
from producer.contract import RolloutRequest
from workers import orphans as module
from workers.cli import app as command_line
from workers.errors import GatewayError, InvalidRolloutError, SandboxError, TunnelError
from workers.history import HandBack
from workers.jobs import Claim, JobStore
from workers.leases import REPORT_TTL
from workers.ledger import Ledger, fleet_label
from workers.metrics import LeakCollector
from workers.orphans import Orphans
from workers.sandboxes.base import FoundSandbox
from workers.sandboxes.prime import PrimeSandboxes
from workers.tunnels.base import FoundTunnel

pytestmark = pytest.mark.xdist_group("orphans")

DIED = HandBack.over("its worker died", counts=True)
TTL = 0.2
FLEET = "0123456789ab"
OURS = fleet_label(FLEET)


@dataclass
class World:
    """The three systems, as lists; ``faults`` names calls that fail."""

    things: dict[str, FoundSandbox | FoundTunnel] = field(default_factory=dict)
    registered: set[tuple[str, str]] = field(default_factory=set)
    faults: set[str] = field(default_factory=set)
    deleted: list[str] = field(default_factory=list)
    lists: list[tuple[str, ...]] = field(default_factory=list)
    #: Called in the middle of a listing.
    meanwhile: Callable[[], Any] = lambda: None
    gateway: str | None = "http://gateway"
    forbidden: str = ""

    @property
    def sandboxes(self) -> Any:
        return Part(self, "sandbox", SandboxError)

    @property
    def tunnels(self) -> Any:
        return Part(self, "tunnel", TunnelError)

    def gateway_of(self, gateway_url: str | None, use_gateway: bool | None) -> tuple[str, Any] | None:
        if use_gateway is False or self.gateway is None:
            return None
        if gateway_url == self.forbidden:
            raise InvalidRolloutError(f"this worker may not use {gateway_url}")
        return gateway_url or self.gateway, self

    async def unregister(self, gateway_url: str, rollout_id: str) -> None:
        if gateway_url in self.faults:
            raise GatewayError("nobody is there")
        self.registered.discard((gateway_url, rollout_id))

    def sandbox(
        self, name: str, owner: str, attempt: int = 1, worker: str = "dead", *, age: float = 1000.0, **more: Any
    ) -> None:
        labels = (*more.get("labels", ()), more.get("fleet", OURS), f"worker:{worker}", f"rollout:{owner}")
        self.things[name] = FoundSandbox(name, (*labels, f"attempt:{attempt}"), time.time() - age)

    def tunnel(self, name: str, worker: str, *more: str, age: float = 1000.0, fleet: str = OURS) -> None:
        self.things[name] = FoundTunnel(name, (fleet, f"worker:{worker}", *more), time.time() - age)


@dataclass
class Part:
    world: World
    kind: str
    error: type[SandboxError] | type[TunnelError]

    async def find(self, labels: tuple[str, ...] | str, team_id: str | None = None) -> list[Any]:
        wanted = (labels,) if isinstance(labels, str) else labels
        self.world.lists.append(wanted)
        if f"find {self.kind}" in self.world.faults:
            raise self.error("the platform is down")
        self.world.meanwhile()
        await asyncio.sleep(0)
        of_kind = FoundSandbox if self.kind == "sandbox" else FoundTunnel
        return [t for t in self.world.things.values() if isinstance(t, of_kind) and set(wanted) <= set(t.labels)]

    async def delete(self, name: str) -> None:
        await asyncio.sleep(0)
        if f"delete {self.kind}" in self.world.faults or name in self.world.faults:
            raise self.error("HTTP 500")
        if self.world.things.pop(name, None):
            self.world.deleted.append(name)


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def client(redis_url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(redis_url) as client:
        client.set(broker.FLEET_ID, FLEET)
        yield client


@pytest.fixture
def ledger(client: redis.Redis) -> Ledger:
    return Ledger(client, lease_ttl=TTL)


@pytest.fixture
def store(client: redis.Redis, redis_url: str) -> Iterator[JobStore]:
    app = Celery("test", set_as_current=False)
    app.config_from_object(broker.celery_config(redis_url))
    # Leases that outlast the test: `killed` makes one lapse, and no other may on a slow machine.
    yield JobStore(client, app, lease_ttl=60.0)
    app.close()


Sweep = Callable[[Callable[[Orphans], Awaitable[Any]]], Any]


@pytest.fixture
def sweep(world: World, ledger: Ledger) -> Sweep:
    """Run something with the orphan sweep on an event loop of its own."""

    def sweep(work: Callable[[Orphans], Awaitable[Any]], systems: Any = world, **options: Any) -> Any:
        async def main() -> Any:
            with ThreadPoolExecutor(4) as threads:
                orphans = Orphans(ledger, systems, FLEET, threads=threads, **{"interval": 60.0} | options)
                return await work(orphans)

        return asyncio.run(main())

    return sweep


def claimed(store: JobStore, rollout_id: str, worker: str = "dead", **fields: Any) -> Claim:
    request = RolloutRequest.parse({"rollout_id": rollout_id, "model": "m", "batch_id": "b", **fields})
    claim = store.claim(rollout_id, worker, request)
    assert isinstance(claim, Claim)
    return claim


def killed(store: JobStore, rollout_id: str, **fields: Any) -> None:
    """Have a worker claim a rollout and die, and the sweep take it from that."""
    claimed(store, rollout_id, **fields)
    store.client.zadd(broker.RUNNING, {rollout_id: 1})
    (lapsed,) = store.lapsed()
    store.requeue_lapsed(lapsed, DIED)


def alive(
    client: redis.Redis, ledger: Ledger, worker: str, *tunnels: str, ago: float = 0.0, process: str = "now"
) -> None:
    client.zadd(broker.WORKERS, {worker: ledger.now_ms() + (REPORT_TTL - ago) * 1000 + 10})
    report = {"process": process, "tunnels": [{"tunnel_id": t} for t in tunnels]}
    client.set(broker.worker_key(worker), json.dumps(report))


def patient(ledger: Ledger) -> None:
    """Have workers live for as long as leases usually do after their last report: a slow machine may take its time."""
    ledger._lease_ttl = 60.0


# -- by the ledger -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [2, 30], ids=["each asked for", "all of its worker listed"])
def test_what_a_dead_workers_attempts_left_is_deleted_and_their_successors_are_spared(
    world: World, store: JobStore, ledger: Ledger, sweep: Sweep, count: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    for n in range(count):
        killed(store, f"r{n}")
        claimed(store, f"r{n}", "living")
        world.sandbox(f"old{n}", f"r{n}", 1)
        world.sandbox(f"new{n}", f"r{n}", 2, "living")
        world.registered |= {("http://gateway", f"r{n}"), ("http://gateway", f"r{n}~2")}
    world.tunnel("t-old", "dead")
    world.tunnel("t-new", "living")

    cleared = sweep(lambda orphans: orphans.clear_entries())

    assert sorted(world.things) == sorted(["t-new", *(f"new{n}" for n in range(count))])
    assert world.registered == {("http://gateway", f"r{n}~2") for n in range(count)}
    assert ledger.entries() == []
    assert cleared.left == []
    assert len(world.lists) == 1 + (1 if count > 5 else count), "few requests"
    (line,) = [r for r in caplog.records if "old1 " in r.message]
    said = r"sandbox old1 of r1 attempt 1, worker dead, 1\d+ s old was left over, and is deleted"
    assert re.fullmatch(said, line.message)
    assert (line.__dict__["stage"], line.__dict__["rollout_id"], line.__dict__["worker"]) == ("orphans", "r1", "dead")


def test_another_fleets_things_are_never_touched_whatever_their_names(
    world: World, store: JobStore, sweep: Sweep
) -> None:
    killed(store, "r1")
    foreign = fleet_label("ba9876543210")
    world.sandbox("theirs", "r1", 1, fleet=foreign)
    world.sandbox("theirs too", "unknown", 1, fleet=foreign)
    world.sandbox("nobody's", "r1", 1, fleet="fleet:fleet")
    world.tunnel("their tunnel", "dead", fleet=foreign)

    async def both(orphans: Orphans) -> None:
        await orphans.clear_entries()
        await orphans.clear_strays()

    sweep(both)
    assert world.deleted == []


def test_labels_of_a_request_that_look_like_ours_cost_nobody_a_sandbox(
    world: World, store: JobStore, sweep: Sweep
) -> None:
    killed(store, "victim")
    claimed(store, "other", "living")
    world.sandbox("other's", "other", 1, "living", labels=("rollout:victim", "attempt:1", "worker:dead"))
    world.sandbox("odd", "other", 1, "living", labels=("attempt:²", "attempt:" + "9" * 5000, "rollout:"))

    async def both(orphans: Orphans) -> None:
        await orphans.clear_entries()
        await orphans.clear_strays()

    sweep(both)
    assert world.deleted == []


def test_a_deletion_that_fails_keeps_the_entry_and_is_tried_again_later(
    world: World, store: JobStore, ledger: Ledger, client: redis.Redis, sweep: Sweep
) -> None:
    killed(store, "r1")
    world.sandbox("s1", "r1")
    world.faults.add("s1")

    cleared = sweep(lambda orphans: orphans.clear_entries())
    assert [leak.owner for leak in cleared.left] == ["r1 attempt 1, worker dead"]
    (entry,) = ledger.entries()
    assert (entry.tries, entry.due_ms > ledger.now_ms() + 50_000) == (1, True)
    assert ledger.leaked() == 1

    world.faults.clear()
    sweep(lambda orphans: orphans.clear_entries())
    assert world.deleted == [], "it is not due"
    sweep(lambda orphans: orphans.clear_entries(due_only=False))
    assert world.deleted == ["s1"]
    assert ledger.leaked() == 0


@pytest.mark.parametrize("fault", ["find sandbox", "find tunnel", "http://gateway"])
def test_a_system_that_is_down_keeps_entries_and_harms_nothing(
    world: World, store: JobStore, ledger: Ledger, sweep: Sweep, fault: str
) -> None:
    killed(store, "r1")
    claimed(store, "r2", "living")
    world.sandbox("s2", "r2", 1, "living")
    world.faults.add(fault)

    async def both(orphans: Orphans) -> None:
        await orphans.clear_entries()
        await orphans.clear_strays()

    sweep(both)
    assert [entry.tries for entry in ledger.entries()] == [1]
    assert world.deleted == []


def test_entries_are_given_up_when_nothing_of_them_can_live_any_more(
    world: World, ledger: Ledger, client: redis.Redis, sweep: Sweep, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger.note("r1", 1, "w1")
    ledger.note("r2", 1, "w1")
    world.faults |= {"http://gateway"}
    now = ledger.now_ms()
    monkeypatch.setattr(ledger, "now_ms", lambda: now + 2 * 3600 * 1000)
    sweep(lambda orphans: orphans.clear_entries())
    assert ledger.entries() == [], "a gateway that is away for hours has forgotten all it knew"

    ledger.note("r3", 1, "w1")
    world.faults |= {"find sandbox"}
    monkeypatch.setattr(ledger, "now_ms", lambda: now + 30 * 3600 * 1000)
    sweep(lambda orphans: orphans.clear_entries())
    assert ledger.entries() == [], "no sandbox lives longer than a day"


def test_registrations_are_looked_for_where_the_rollout_had_them(
    world: World, store: JobStore, ledger: Ledger, sweep: Sweep
) -> None:
    killed(store, "far", gateway_url="http://far:1")
    killed(store, "own", use_gateway=False)
    world.registered |= {("http://far:1", "far"), ("http://gateway", "own")}
    sweep(lambda orphans: orphans.clear_entries())
    assert world.registered == {("http://gateway", "own")}, "one in its worker's process ended with that"
    assert ledger.entries() == []


def test_a_dead_workers_attempt_is_forgotten_at_its_own_gateway(
    world: World, store: JobStore, ledger: Ledger, sweep: Sweep
) -> None:
    theirs = JobStore(store.client, Celery("test", set_as_current=False), lease_ttl=60.0, gateway_url="http://theirs:1")
    killed(theirs, "r1")
    world.registered = {("http://theirs:1", "r1"), ("http://gateway", "r1")}
    sweep(lambda orphans: orphans.clear_entries())
    assert world.registered == {("http://gateway", "r1")}
    assert ledger.entries() == []


def test_what_is_registered_where_this_worker_may_not_call_is_left_to_another(
    world: World, ledger: Ledger, sweep: Sweep, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger.note("r1", 1, "dead", "http://theirs:1")
    before = ledger.entries()
    world.registered, world.forbidden = {("http://theirs:1", "r1")}, "http://theirs:1"
    cleared = sweep(lambda orphans: orphans.clear_entries())
    assert [leak.rollout_id for leak in cleared.left] == ["r1"]
    assert ledger.entries() == before, "nor is it put off"
    world.forbidden = ""  # another worker has the turn
    sweep(lambda orphans: orphans.clear_entries())
    assert (world.registered, ledger.entries()) == (set(), [])

    ledger.note("r2", 1, "dead", "http://theirs:1")
    world.forbidden = "http://theirs:1"
    monkeypatch.setattr(module, "GATEWAY_PATIENCE", -1)
    sweep(lambda orphans: orphans.clear_entries())
    assert ledger.entries() == [], "nobody may"


def test_nothing_is_believed_left_until_redis_has_been_up_for_as_long_as_a_lease_lives(
    world: World, ledger: Ledger, sweep: Sweep
) -> None:
    ledger.note("r1", 1, "dead")
    ledger._lease_ttl = 1e9
    sweep(lambda orphans: orphans.take_turn())
    assert world.lists == []
    assert len(ledger.entries()) == 1


def test_an_attempt_of_a_rollout_that_no_record_tells_of_is_cleared_too(
    world: World, ledger: Ledger, sweep: Sweep
) -> None:
    ledger.note("gone", 3, "w1")
    world.sandbox("s1", "gone", 3, "w1")
    sweep(lambda orphans: orphans.clear_entries())
    assert world.deleted == ["s1"]


def test_an_id_that_is_used_once_more_keeps_its_new_sandbox(
    world: World, store: JobStore, ledger: Ledger, sweep: Sweep
) -> None:
    ledger.note("r1", 1, "w1")
    wait_until(lambda: ledger.now_ms() > ledger.entries()[0].since_ms)
    claimed(store, "r1", "w2")
    world.sandbox("s1", "r1", 1, "w2")
    sweep(lambda orphans: orphans.clear_entries())
    assert world.deleted == []
    assert ledger.entries() == []


def test_the_tunnel_of_a_worker_whose_clean_up_failed_is_its_own_affair(
    world: World, ledger: Ledger, client: redis.Redis, sweep: Sweep
) -> None:
    ledger.note("r1", 1, "w1")
    world.tunnel("t1", "w1")
    alive(client, ledger, "w1", "t1")
    sweep(lambda orphans: orphans.clear_entries())
    assert world.deleted == []
    assert ledger.entries() == []


def test_an_entry_waits_until_it_is_known_whether_its_worker_is_dead(
    world: World, store: JobStore, ledger: Ledger, client: redis.Redis, sweep: Sweep
) -> None:
    patient(ledger)
    alive(client, ledger, "dead", "t1", ago=30.0)
    killed(store, "r1")
    world.sandbox("s1", "r1")
    world.tunnel("t1", "dead")

    sweep(lambda orphans: orphans.clear_entries())
    assert world.deleted == ["s1"]
    assert [(entry.tries, entry.due_ms) for entry in ledger.entries()] == [(0, 0)], "it is looked at again next time"

    alive(client, ledger, "dead", "t1", ago=70.0)
    sweep(lambda orphans: orphans.clear_entries())
    assert world.deleted == ["s1", "t1"]
    assert ledger.entries() == []


# -- tunnels, in every turn --------------------------------------------------------------------------------------------


def test_the_tunnel_of_a_worker_that_died_idle_is_gone_in_the_next_turn(
    world: World, ledger: Ledger, client: redis.Redis, sweep: Sweep
) -> None:
    """It ran nothing, so that the ledger has no entry: and the look by label may be ten intervals away."""
    wait_until(ledger.is_settled)
    client.set(broker.LABELS_SWEPT, 1)
    world.tunnel("t-young", "dead", age=1)
    world.things["t-undated"] = FoundTunnel("t-undated", (OURS, "worker:dead"), None)
    world.tunnel("t-foreign", "dead", fleet=fleet_label("ba9876543210"))
    world.things["t-nobody"] = FoundTunnel("t-nobody", (OURS,), 0.0)
    sweep(lambda orphans: orphans.take_turn())
    assert sorted(world.deleted) == ["t-undated", "t-young"]


def test_a_worker_that_may_yet_live_keeps_its_tunnel(
    world: World, store: JobStore, ledger: Ledger, client: redis.Redis, sweep: Sweep
) -> None:
    patient(ledger)
    alive(client, ledger, "silent", "t-silent", ago=30.0)
    claimed(store, "r1", "busy")  # its first report is still on its way
    world.tunnel("t-silent", "silent")
    world.tunnel("t-busy", "busy")
    sweep(lambda orphans: orphans.clear_tunnels())
    assert world.deleted == []


def test_a_living_workers_tunnel_that_it_does_not_know_is_deleted_once_it_cannot_be_starting(
    world: World, ledger: Ledger, client: redis.Redis, sweep: Sweep
) -> None:
    """The answer to its registration was lost, or it is that of a dead process of the same name."""
    patient(ledger)
    alive(client, ledger, "w1", "t-used")
    world.tunnel("t-used", "w1", "process:now")
    world.tunnel("t-lost", "w1", "process:now", age=130)
    world.tunnel("t-starting", "w1", "process:now", age=60)
    world.tunnel("t-namesakes", "w1", "process:before", age=20)
    world.tunnel("t-just-made", "w1", "process:next", age=5)
    world.things["t-undated"] = FoundTunnel("t-undated", (OURS, "worker:w1"), None)
    sweep(lambda orphans: orphans.clear_tunnels())
    assert sorted(world.deleted) == ["t-lost", "t-namesakes"]


def test_what_a_worker_has_begun_since_its_last_report_is_not_taken_for_lost(
    world: World, ledger: Ledger, client: redis.Redis, sweep: Sweep
) -> None:
    """Redis did not hear of it for a while: by the time of that report, the tunnel may have been starting."""
    patient(ledger)
    alive(client, ledger, "w1", ago=30.0)
    world.tunnel("t1", "w1", "process:now", age=140)
    sweep(lambda orphans: orphans.clear_tunnels())
    assert world.deleted == []


def test_a_listing_of_tunnels_that_fails_or_comes_from_a_lost_fleet_deletes_nothing(
    world: World, client: redis.Redis, sweep: Sweep
) -> None:
    world.tunnel("t1", "dead")
    world.faults.add("find tunnel")
    assert sweep(lambda orphans: orphans.clear_tunnels()).deleted == []
    world.faults = {"t1"}
    assert [leak.id for leak in sweep(lambda orphans: orphans.clear_tunnels()).left] == ["t1"]
    world.faults.clear()
    client.flushall()
    sweep(lambda orphans: orphans.clear_tunnels())
    assert world.deleted == []


# -- by label ----------------------------------------------------------------------------------------------------------


def test_what_belongs_to_no_running_attempt_is_found_by_label(
    world: World, store: JobStore, ledger: Ledger, client: redis.Redis, sweep: Sweep
) -> None:
    claimed(store, "r1", "living")
    alive(client, ledger, "living", "t-used")
    world.sandbox("used", "r1", 1, "living")
    world.sandbox("earlier", "r1", 0, "living")
    world.sandbox("unknown", "unheard-of", 1)
    world.sandbox("young", "unheard-of", 2, age=60)
    world.things["ownerless"] = FoundSandbox("ownerless", (OURS,), 0.0)
    world.tunnel("t-used", "living")
    world.tunnel("t-namesake", "living")
    world.tunnel("t-dead", "dead")
    world.tunnel("t-young", "dead", age=60)
    world.things["t-undated"] = FoundTunnel("t-undated", (OURS, "worker:dead"), None)
    world.things["t-nobody"] = FoundTunnel("t-nobody", (OURS,), 0.0)

    cleared = sweep(lambda orphans: orphans.clear_strays())

    assert sorted(world.deleted) == ["earlier", "t-dead", "t-namesake", "unknown"]
    assert len(cleared.deleted) == 4


def test_a_just_claimed_attempt_is_never_taken_for_an_orphan(world: World, store: JobStore, sweep: Sweep) -> None:
    """It is claimed, and its sandbox created, while the platform still makes the list."""
    claims: list[Claim] = []

    def claim_and_create() -> None:
        if not claims:
            claims.append(claimed(store, "r1", "living"))
            world.sandbox("s1", "r1", 1, "living", age=0)

    world.meanwhile = claim_and_create
    sweep(lambda orphans: orphans.clear_strays(), grace=-60.0)
    assert claims
    assert world.deleted == []


def test_what_the_ledger_is_after_is_left_to_it(world: World, ledger: Ledger, sweep: Sweep) -> None:
    ledger.note("r1", 1, "w1")
    world.sandbox("s1", "r1", 1, "w1")
    sweep(lambda orphans: orphans.clear_strays())
    assert world.deleted == []


def test_strays_that_cannot_be_deleted_are_counted_until_they_are(world: World, ledger: Ledger, sweep: Sweep) -> None:
    world.sandbox("s1", "unheard-of")
    world.faults.add("s1")
    sweep(lambda orphans: orphans.clear_strays())
    assert ledger.leaked() == 1
    world.faults.clear()
    sweep(lambda orphans: orphans.clear_strays())
    assert (world.deleted, ledger.leaked()) == (["s1"], 0)


def test_tunnels_that_cannot_be_deleted_are_counted_until_they_are(world: World, ledger: Ledger, sweep: Sweep) -> None:
    world.tunnel("t1", "dead")
    world.faults.add("t1")
    sweep(lambda orphans: orphans.clear_strays())
    sweep(lambda orphans: orphans.clear_tunnels())
    assert ledger.leaked() == 1
    world.faults.clear()
    sweep(lambda orphans: orphans.clear_tunnels())
    assert (world.deleted, ledger.leaked()) == (["t1"], 0)


def test_a_fleet_whose_redis_lost_its_data_deletes_nothing_under_its_old_identity(
    world: World, client: redis.Redis, sweep: Sweep
) -> None:
    world.sandbox("s1", "r1", 1, "living")
    client.flushall()
    sweep(lambda orphans: orphans.clear_strays())
    assert world.deleted == []


# -- turns -------------------------------------------------------------------------------------------------------------


def test_two_sweeps_at_once_are_safe(world: World, store: JobStore, ledger: Ledger, sweep: Sweep) -> None:
    for n in range(20):
        killed(store, f"r{n}")
        world.sandbox(f"s{n}", f"r{n}")
    world.tunnel("t", "dead")

    async def twice(orphans: Orphans) -> None:
        await asyncio.gather(orphans.clear_entries(), orphans.clear_entries(), orphans.clear_strays())

    sweep(twice)
    assert sorted(world.deleted) == sorted(["t", *(f"s{n}" for n in range(20))])
    assert ledger.entries() == []


def test_the_fleet_takes_one_turn_in_an_interval_and_looks_by_label_in_every_tenth(
    world: World, store: JobStore, ledger: Ledger, client: redis.Redis, sweep: Sweep
) -> None:
    wait_until(ledger.is_settled)
    killed(store, "r1")

    async def turns(orphans: Orphans) -> list[int]:
        await orphans.take_turn(trusted=False)
        assert world.lists == [], "nothing is believed while leases may only seem lapsed"
        await orphans.take_turn()
        first = len(world.lists)
        await orphans.take_turn()
        assert len(world.lists) == first, "not due"
        ledger.note("r2", 1, "w1")
        client.delete(broker.ORPHANS_SWEPT)
        await orphans.take_turn()
        return [first, len(world.lists), orphans.leaked]

    assert sweep(turns) == [5, 8, 0]
    assert 0 < client.pttl(broker.ORPHANS_SWEPT) <= 48_000
    assert 540_000 < client.pttl(broker.LABELS_SWEPT) <= 588_000


def test_a_turn_ends_in_time_and_the_count_is_known_all_the_same(
    world: World, ledger: Ledger, sweep: Sweep, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    wait_until(ledger.is_settled)
    monkeypatch.setattr(module, "PART_LIMIT", 0.05)
    ledger.note("r1", 1, "w1")

    async def turn(orphans: Orphans) -> int:
        async def never(label: str) -> list[FoundTunnel]:
            await asyncio.get_running_loop().create_future()
            return []

        monkeypatch.setattr(Part, "find", lambda self, labels, team_id=None: never(""))
        await orphans.take_turn()
        return orphans.leaked

    assert sweep(turn) == 1
    assert "the next turn goes on" in caplog.text


def test_a_gateway_that_hangs_uses_up_nobody_elses_time(
    world: World, ledger: Ledger, sweep: Sweep, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait_until(ledger.is_settled)
    ledger.note("r1", 1, "another")
    world.tunnel("t", "dead")
    world.sandbox("s", "r2")
    hung: list[str] = []
    parts: list[asyncio.Timeout] = []
    bounded = asyncio.timeout

    def noted(seconds: float | None) -> asyncio.Timeout:
        parts.append(bounded(seconds))
        return parts[-1]

    async def hang(url: str, rollout_id: str) -> None:
        hung.append(rollout_id)
        parts[0].reschedule(asyncio.get_running_loop().time())  # only the part that hangs is out of time
        await asyncio.get_running_loop().create_future()

    monkeypatch.setattr(world, "unregister", hang)
    monkeypatch.setattr(module.asyncio, "timeout", noted)
    sweep(lambda orphans: orphans.take_turn())
    assert (hung, sorted(world.deleted)) == (["r1"], ["s", "t"])
    assert parts[0].expired()


def test_prometheus_is_told_what_may_be_left() -> None:
    registry = CollectorRegistry()
    registry.register(LeakCollector(lambda: 7))
    assert b"rollouts_leaked 7.0" in generate_latest(registry)


# -- the platform, and the command -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def emulator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrimeEmulator]:
    with PrimeEmulator(tmp_path_factory.mktemp("prime")) as emulator:
        yield emulator


@pytest.fixture
def platform(emulator: PrimeEmulator, monkeypatch: pytest.MonkeyPatch, redis_url: str) -> Iterator[PrimeEmulator]:
    """The platform, for this process and for commands that it runs."""
    for name, value in {
        **emulator.environ,
        "ROLLOUTS_REDIS_URL": redis_url,
        "ROLLOUTS_LEASE_TTL": "0.1",
        "ROLLOUTS_SANDBOX_PROVIDER": "prime",
        "ROLLOUTS_TUNNEL_PROVIDER": "prime",
        "ROLLOUTS_GATEWAY_URL": "http://127.0.0.1:9",
        "ROLLOUTS_USE_GATEWAY": "false",
        "ROLLOUTS_MODEL_URL": "http://127.0.0.1:9",
    }.items():
        monkeypatch.setenv(name, value)
    yield emulator
    emulator.clear_faults()
    for sandbox in emulator.leaked()["sandboxes"]:
        httpx.delete(f"{emulator.api_url}/api/v1/sandbox/{sandbox}", headers=key(emulator)).raise_for_status()


def key(emulator: PrimeEmulator) -> dict[str, str]:
    return {"Authorization": f"Bearer {emulator.api_key}"}


def create(emulator: PrimeEmulator, *labels: str) -> str:
    """Create a sandbox as a worker that was killed has left it."""
    body = {"name": "left", "docker_image": "python:3.11-slim", "labels": list(labels), "vm": True}
    created = httpx.post(f"{emulator.api_url}/api/v1/sandbox", json=body, headers=key(emulator))
    return str(created.raise_for_status().json()["id"])


def test_sandboxes_on_every_page_are_found_by_all_of_their_labels(
    platform: PrimeEmulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.sandboxes.prime_client.PAGE", 2)
    ids = {create(platform, OURS, "rollout:r1", f"attempt:{n % 2}") for n in range(5)}
    create(platform, "rollout:r1", "attempt:1")

    async def story() -> tuple[list[FoundSandbox], list[FoundSandbox], list[FoundSandbox]]:
        sandboxes = PrimeSandboxes()
        try:
            everything = await sandboxes.find((OURS,))
            some = await sandboxes.find((OURS, "rollout:r1", "attempt:1"))
            for found in everything:
                await sandboxes.delete(found.id)
                await sandboxes.delete(found.id)
            return everything, some, await sandboxes.find((OURS,))
        finally:
            await sandboxes.aclose()

    everything, some, left = asyncio.run(story())
    assert {found.id for found in everything} == ids
    assert len(some) == 2
    assert all(abs(time.time() - found.created_at) < 60 for found in everything)
    assert left == []


def leaks(*arguments: str) -> tuple[int, str]:
    from typer.testing import CliRunner

    result = CliRunner().invoke(command_line, ["leaks", *arguments])
    return result.exit_code, result.output


def test_rollouts_leaks_lists_deletes_and_says_what_is_left(
    platform: PrimeEmulator, store: JobStore, ledger: Ledger
) -> None:
    assert leaks() == (0, "nothing is left\n")
    killed(store, "r1")
    claimed(store, "r1", "living")
    of_entry = create(platform, OURS, "worker:dead", "rollout:r1", "attempt:1")
    running = create(platform, OURS, "worker:living", "rollout:r1", "attempt:2")
    stray = create(platform, OURS, "worker:dead", "rollout:unheard-of", "attempt:1")
    foreign = create(platform, fleet_label("ba9876543210"), "worker:dead", "rollout:r1", "attempt:1")

    (line,) = leaks("--older-than", "600")[1].splitlines()
    assert re.fullmatch(r"left     what r1 attempt 1, worker dead left \d+ s ago", line)
    code, shown = leaks("--older-than", "0")
    assert code == 1
    assert f"sandbox {stray} of unheard-of attempt 1, worker dead" in shown
    assert running not in shown

    platform.fault("delete_sandbox", status=500, times=None, sandbox_id=stray)
    code, shown = leaks("--delete", "--json", "--older-than", "0")
    found = json.loads(shown)
    assert code == 1
    assert [leak["id"] for leak in found["deleted"]] == [of_entry]
    assert [(leak["kind"], leak["id"], leak["worker"]) for leak in found["left"]] == [("sandbox", stray, "dead")]
    assert ledger.leaked() == 1

    platform.clear_faults()
    code, shown = leaks("--delete", "--older-than", "0")
    assert code == 0
    assert shown.startswith(f"deleted  sandbox {stray} of unheard-of attempt 1, worker dead, ")
    assert shown.endswith("nothing is left\n")
    assert sorted(platform.leaked()["sandboxes"]) == sorted([running, foreign])


def test_rollouts_leaks_deletes_nothing_until_leases_can_be_believed(
    platform: PrimeEmulator, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Redis has just come back, and who lives has not renewed its leases yet."""
    stray = create(platform, OURS, "worker:dead", "rollout:unheard-of", "attempt:1")
    looks: list[list[str]] = []

    def settled(_: Ledger) -> bool:
        looks.append(platform.leaked()["sandboxes"])
        return len(looks) == 2

    monkeypatch.setattr(Ledger, "is_settled", settled)
    code, shown = leaks("--delete", "--older-than", "0")
    assert looks == [[stray], [stray]]
    assert (code, shown.count("deleted  ")) == (0, 1)
    assert platform.leaked()["sandboxes"] == []


def test_rollouts_leaks_says_what_does_not_answer(
    platform: PrimeEmulator, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    platform.fault("list_sandboxes", status=500, times=None)
    code, shown = leaks()
    assert code == 1
    assert "could not list the sandboxes" in shown

    monkeypatch.setenv("ROLLOUTS_REDIS_URL", f"redis://127.0.0.1:{free_port()}/0")
    code, shown = leaks()
    assert code == 2
    assert "check ROLLOUTS_REDIS_URL" in shown
