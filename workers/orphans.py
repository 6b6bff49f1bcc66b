"""The orphan sweep: deletes what attempts have left behind, and says whose it was and how old.

Three ways lead to it. The ledger (`workers.ledger`) knows of every attempt that ended badly, so what a dead worker left
is gone within an interval. Tunnels belong to workers and not to attempts, and one may be left by a worker that ran
nothing when it died: each turn lists them all, of which there are few. Now and then everything that carries this
fleet's identity is listed too: what belongs to no attempt that runs, for whatever reason, is deleted then.

One turn per interval is taken fleet-wide, but two sweeps at once are safe: all that they do may be done twice.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import Executor
from typing import Protocol, TypeVar

from producer import broker
from workers.errors import GatewayError, InvalidRolloutError, RolloutError
from workers.gateway.protocol import Gateway
from workers.leaks import Cleared, Leak, is_stray, leak_of, leak_of_entry, owners, worker_of
from workers.ledger import Entry, Ledger, Origin, SupersededError, by_worker, fleet_label
from workers.sandboxes.base import FoundSandbox, SandboxProvider
from workers.tunnels.base import FoundTunnel, TunnelProvider

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: Seconds for which what was created a moment ago is spared, should Redis have lost the claim that it belongs to.
GRACE = 120.0
#: Seconds that each of a turn's three parts may take, and that a gateway may take to forget one attempt.
PART_LIMIT, GATEWAY_LIMIT = 40.0, 20.0
#: Seconds after which a gateway that cannot be reached is believed to be gone, and with it what it knew.
GATEWAY_PATIENCE = 3600.0
#: Calls at one time.
_AT_ONCE = 10
#: Attempts of one worker up to which each one's sandboxes are asked for; else all of that worker's are listed.
_FEW = 5
#: A turn is due this many intervals after the last one, so that beat's next tick is not a little too early.
_TURN = 0.8
#: Intervals from one look by label to the next.
_LABELS_EVERY = 10
_STAGE = {"stage": "orphans"}


class OrphanSystems(Protocol):
    """Where attempts leave something: `workers.systems.WorkerSystems`."""

    @property
    def sandboxes(self) -> SandboxProvider:
        """Lists and deletes sandboxes, whoever created them."""
        ...

    @property
    def tunnels(self) -> TunnelProvider:
        """Lists and deletes registrations, whoever made them."""
        ...

    def gateway_of(self, gateway_url: str | None, use_gateway: bool | None) -> tuple[str, Gateway] | None:
        """Return where a request with these fields was registered; None when that was its worker's own process.

        Raises `InvalidRolloutError` for a gateway that this worker may not call.
        """
        ...


class Orphans:
    """Finds and deletes what attempts have left. Lives on one event loop; Redis is asked on ``threads``.

    ``interval`` and ``grace`` are in seconds. ``leaked`` is how many attempts and things may be left over by what this
    process knew last. Everything raises `redis.RedisError`; failures of the other systems are logged, and tried again.
    """

    def __init__(
        self,
        ledger: Ledger,
        systems: OrphanSystems,
        fleet_id: str,
        *,
        threads: Executor,
        interval: float = 60.0,
        grace: float = GRACE,
    ) -> None:
        self.leaked = 0
        self._ledger = ledger
        self._systems = systems
        self._fleet_id = fleet_id
        self._label = fleet_label(fleet_id)
        self._threads = threads
        self._interval = interval
        self._grace = grace
        self._places = asyncio.Semaphore(_AT_ONCE)

    async def take_turn(self, *, trusted: bool = True) -> None:
        """Clear up if that is due in the fleet.

        ``trusted`` is False while workers may seem dead only because Redis was away: then nothing is done.
        """
        if not trusted or not await self._redis(self._ledger.is_settled):
            return
        if await self._is_due(broker.ORPHANS_SWEPT, _TURN):
            # Limits of their own: a gateway that hangs must not use up the time of the others.
            await self._in_time(self.clear_entries)
            await self._in_time(self.clear_tunnels)
            if await self._is_due(broker.LABELS_SWEPT, _LABELS_EVERY - 1 + _TURN):
                await self._in_time(self.clear_strays)
        self.leaked = await self._redis(self._ledger.leaked)

    async def _in_time(self, part: Callable[[], Awaitable[object]]) -> None:
        try:
            async with asyncio.timeout(PART_LIMIT):
                await part()
        except TimeoutError:
            logger.warning("not all was cleared up within %g s, the next turn goes on", PART_LIMIT, extra=_STAGE)

    async def _is_due(self, key: str, intervals: float) -> bool:
        return await self._redis(lambda: self._ledger.take_turn(key, intervals * self._interval))

    # -- by the ledger -------------------------------------------------------------------------------------------------

    async def clear_entries(self, *, due_only: bool = True) -> Cleared:
        """Delete what the attempts in the ledger have left; an entry goes when nothing of its attempt is left."""
        cleared = Cleared()
        now = await self._redis(self._ledger.now_ms)
        entries = [e for e in await self._redis(self._ledger.entries) if e.due_ms <= now or not due_only]
        workers = by_worker(entries)
        tunnels = await self._clear_tunnels(workers, cleared) if entries else {}
        clearing = (
            self._clear_worker(worker, theirs, tunnels.get(worker, True), now, cleared)
            for worker, theirs in workers.items()
        )
        await asyncio.gather(*clearing)
        return cleared

    async def _clear_worker(
        self, worker: str, entries: list[Entry], tunnels_gone: bool | None, now: int, cleared: Cleared
    ) -> None:
        origins = await self._origins(entries)
        listed = await self._list_theirs(worker, origins)

        async def clear(entry: Entry) -> None:
            left = leak_of_entry(entry, now)
            gone = await self._clear_sandboxes(entry, listed[entry], cleared)
            forgotten = await self._unregister(entry, origins[entry], left)
            if gone and forgotten and tunnels_gone:
                await self._redis(lambda: self._ledger.settle(entry))
                return
            cleared.left.append(left)
            if False not in {gone, forgotten, tunnels_gone}:
                return  # soon it is known whether the worker is dead, or another one has the turn that may call there
            await self._postpone(entry, left)

        await asyncio.gather(*map(clear, origins))

    async def _origins(self, entries: Iterable[Entry]) -> dict[Entry, Origin]:
        """Return what is known of each entry's rollout; entries of ids that were used once more are dropped.

        What they have left cannot be told from what the new rollout has, until that one has ended.
        """
        origins = {}
        for entry in entries:
            try:
                origins[entry] = await self._redis(lambda entry=entry: self._ledger.origin(entry))  # type: ignore[misc]
            except SupersededError:
                await self._redis(lambda entry=entry: self._ledger.settle(entry))  # type: ignore[misc]
        return origins

    async def _list_theirs(self, worker: str, origins: dict[Entry, Origin]) -> dict[Entry, list[FoundSandbox] | None]:
        """List, for each entry, sandboxes of which its attempt's are some; None where the platform does not answer."""
        if worker and len(origins) > _FEW:
            teams = {origin.team_id for origin in origins.values()}
            all_of_it = {team: await self._find((f"worker:{worker}",), team) for team in teams}
            return {entry: all_of_it[origin.team_id] for entry, origin in origins.items()}
        return {
            entry: await self._find((f"rollout:{entry.rollout_id}", f"attempt:{entry.attempt}"), origin.team_id)
            for entry, origin in origins.items()
        }

    async def _clear_sandboxes(self, entry: Entry, found: list[FoundSandbox] | None, cleared: Cleared) -> bool:
        """Delete those among ``found`` that an attempt left; False when one may be left."""
        if found is None:
            return False
        # A request has labels of its own, which may look like ours: only what can be no other's is deleted for this.
        theirs = [sandbox for sandbox in found if owners(sandbox) == {(entry.rollout_id, entry.attempt)}]
        return all(await asyncio.gather(*(self._delete(leak_of(sandbox), cleared) for sandbox in theirs)))

    async def _unregister(self, entry: Entry, origin: Origin, left: Leak) -> bool | None:
        """Have the gateway forget an attempt; False when it may still know it, None when it is not ours to call."""
        try:
            where = self._systems.gateway_of(origin.gateway_url, origin.use_gateway)
        except InvalidRolloutError as error:
            gone = left.age > GATEWAY_PATIENCE
            what = "and nobody else did: it is given up" if gone else "left to another worker"
            logger.info("%s: %s; %s", entry.gateway_id, error, what, extra=_about(left))
            return True if gone else None
        if where is None:
            return True  # it was in the worker's own process, and has ended with it
        url, gateway = where
        try:
            async with self._places, asyncio.timeout(GATEWAY_LIMIT):
                await gateway.unregister(url, entry.gateway_id)
        except (GatewayError, TimeoutError) as error:
            gone = left.age > GATEWAY_PATIENCE
            what = "is believed to have ended with its gateway" if gone else "may be left registered"
            logger.warning("%s %s: %s", entry.gateway_id, what, error or "no answer", extra=_about(left))
            return gone
        return True

    async def _postpone(self, entry: Entry, left: Leak) -> None:
        if left.age > broker.LEDGER_LIFE.total_seconds():
            logger.error("%s is given up: nothing of it can live any more", left, extra=_about(left))
            await self._redis(lambda: self._ledger.settle(entry))
        else:
            await self._redis(lambda: self._ledger.postpone(entry, self._interval))

    async def _clear_tunnels(self, workers: dict[str, list[Entry]], cleared: Cleared) -> dict[str, bool | None]:
        """Delete the tunnels of those of ``workers`` that are dead.

        Returns whether they are gone, for each worker that has any: False when one may be left, None when it is not
        known yet whether the worker is dead. The tunnels of a living one are its own affair.
        """
        try:
            found = await self._systems.tunnels.find(self._label)
        except RolloutError as error:
            logger.warning("tunnels cannot be listed: %s", error, extra=_STAGE)
            return dict.fromkeys(workers, False)
        of_whom = {worker: [tunnel for tunnel in found if worker_of(tunnel) == worker] for worker in workers}
        known = await self._redis(lambda: self._ledger.workers([worker for worker in of_whom if of_whom[worker]]))
        gone: dict[str, bool | None] = {}
        for worker, tunnels in of_whom.items():
            if not tunnels or known.lives(worker, max(entry.since_ms for entry in workers[worker])):
                gone[worker] = True
            elif known.is_dead(worker):
                gone[worker] = all(await asyncio.gather(*(self._delete(leak_of(t), cleared) for t in tunnels)))
            else:
                gone[worker] = None
        return gone

    # -- by label ------------------------------------------------------------------------------------------------------

    async def clear_tunnels(self) -> Cleared:
        """Delete the tunnels of this fleet that no living worker has: see `workers.leaks.is_stray`."""
        cleared = Cleared()
        try:
            found = await self._systems.tunnels.find(self._label)
        except RolloutError as error:
            logger.warning("tunnels cannot be listed: %s", error, extra=_STAGE)
            return cleared
        if found and await self._is_our_fleet():
            strays = [leak_of(tunnel) for tunnel in await self._stray_tunnels(found)]
            deleted = await asyncio.gather(*(self._delete(leak, cleared) for leak in strays))
            cleared.left = [leak for leak, gone in zip(strays, deleted, strict=True) if not gone]
        await self._redis(lambda: self._ledger.note_strays(tunnel=len(cleared.left)))
        return cleared

    async def clear_strays(self) -> Cleared:
        """Delete everything of this fleet that belongs to no running attempt and no living worker."""
        cleared = Cleared()
        try:
            strays = await self.strays()
        except RolloutError as error:
            logger.warning("what the fleet has created cannot be listed: %s", error, extra=_STAGE)
            return cleared
        deleted = await asyncio.gather(*(self._delete(leak, cleared) for leak in strays))
        cleared.left = [leak for leak, gone in zip(strays, deleted, strict=True) if not gone]
        left = Counter(leak.kind for leak in cleared.left)
        await self._redis(lambda: self._ledger.note_strays(sandbox=left["sandbox"], tunnel=left["tunnel"]))
        return cleared

    async def strays(self) -> list[Leak]:
        """List what carries this fleet's identity but belongs to no running attempt and no living worker.

        Raises `RolloutError`. What the ledger has an entry for is left to it.
        """
        before = time.time() - self._grace
        sandboxes = await self._systems.sandboxes.find((self._label,))
        tunnels = await self._systems.tunnels.find(self._label)
        # Only now: what has been listed was claimed before, and is found to run unless it has ended meanwhile.
        if not await self._is_our_fleet():
            return []
        whose = {sandbox: owners(sandbox) for sandbox in sandboxes if sandbox.created_at < before}
        spared = await self._redis(lambda: self._ledger.running(set().union(*whose.values())))
        spared |= {(entry.rollout_id, entry.attempt) for entry in await self._redis(self._ledger.entries)}
        orphaned = [sandbox for sandbox, its in whose.items() if its and not its & spared]
        old = [tunnel for tunnel in tunnels if tunnel.created_at is not None and tunnel.created_at < before]
        return [*map(leak_of, orphaned), *map(leak_of, await self._stray_tunnels(old))]

    async def _stray_tunnels(self, tunnels: list[FoundTunnel]) -> list[FoundTunnel]:
        # Asked after the listing: a worker that has one of these by now has reported, or holds a rollout.
        names = sorted({worker_of(tunnel) for tunnel in tunnels})
        known = await self._redis(lambda: self._ledger.workers(names))
        return [tunnel for tunnel in tunnels if is_stray(tunnel, known, self._grace)]

    async def _is_our_fleet(self) -> bool:
        if await self._redis(self._ledger.fleet_id) == self._fleet_id:
            return True
        logger.error("Redis has lost this fleet's identity: nothing is deleted for the old one", extra=_STAGE)
        return False

    async def open_entries(self) -> list[Leak]:
        """List the attempts in the ledger."""
        now = await self._redis(self._ledger.now_ms)
        return [leak_of_entry(entry, now) for entry in await self._redis(self._ledger.entries)]

    # -- below ---------------------------------------------------------------------------------------------------------

    async def _find(self, labels: tuple[str, ...], team_id: str | None) -> list[FoundSandbox] | None:
        try:
            async with self._places:
                return await self._systems.sandboxes.find((self._label, *labels), team_id)
        except RolloutError as error:
            logger.warning("sandboxes cannot be listed: %s", error, extra=_STAGE)
            return None

    async def _delete(self, leak: Leak, cleared: Cleared) -> bool:
        systems = self._systems
        delete: Callable[[str], Awaitable[None]]
        delete = systems.sandboxes.delete if leak.kind == "sandbox" else systems.tunnels.delete
        try:
            async with self._places:
                await delete(leak.id)
        except RolloutError as error:
            logger.warning("%s was left over, and is not deleted: %s", leak, error, extra=_about(leak))
            return False
        logger.warning("%s was left over, and is deleted", leak, extra=_about(leak))
        cleared.deleted.append(leak)
        return True

    async def _redis(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)


def _about(leak: Leak) -> dict[str, object]:
    """Return the structured fields of a log line about what a worker has left, which is not the one that logs it."""
    return {**_STAGE, "rollout_id": leak.rollout_id, "attempt": leak.attempt, "worker": leak.worker}
