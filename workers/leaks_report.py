"""What is behind ``rollouts leaks``: the orphan sweep without a worker, from the settings alone."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack

import redis

from workers.leaks import Cleared
from workers.ledger import Ledger
from workers.orphans import Orphans
from workers.settings import WorkerSettings
from workers.systems import WorkerSystems

#: Seconds that Redis may take to answer.
_PATIENCE = 10.0


async def find_leaks(settings: WorkerSettings, *, delete: bool, grace: float) -> Cleared:
    """List what was left behind, or delete it; sandboxes and tunnels younger than ``grace`` seconds are spared.

    A deletion waits until Redis has been up for as long as a lease lives.
    Raises `redis.RedisError`, and `RolloutError` when the platform does not answer.
    """
    async with AsyncExitStack() as stack:
        client = redis.Redis.from_url(
            settings.redis_url, socket_timeout=_PATIENCE, socket_connect_timeout=_PATIENCE / 2
        )
        stack.callback(client.close)
        threads = stack.enter_context(ThreadPoolExecutor(4, thread_name_prefix="redis"))
        ledger = Ledger(client, lease_ttl=settings.lease_ttl)
        fleet_id = ledger.fleet_id()
        systems = await stack.enter_async_context(WorkerSystems(settings, "rollouts-leaks", fleet_id=fleet_id))
        orphans = Orphans(ledger, systems, fleet_id, threads=threads, grace=grace)
        if not delete:
            return Cleared(left=[*await orphans.open_entries(), *await orphans.strays()])
        # Redis has just come back: who lives has not renewed its leases yet, and would lose what it uses.
        while not await asyncio.to_thread(ledger.is_settled):  # noqa: ASYNC110 - Redis tells nobody
            await asyncio.sleep(0.2)
        by_entry = await orphans.clear_entries(due_only=False)
        by_label = await orphans.clear_strays()
        return Cleared(by_entry.deleted + by_label.deleted, by_entry.left + by_label.left)
