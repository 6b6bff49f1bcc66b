"""10,000 rollouts in flight in one worker process: its memory, its event loop's lag, and whether all are delivered."""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import orjson
import psutil
import redis
from harness import finish, null_fleet, null_requests, report

from producer import Producer, broker
from producer.settings import ProducerSettings
from workers.local import LocalStack

COUNT = 10_000


def worker_report(client: redis.Redis) -> dict[str, Any]:
    """Return what the one worker last told about itself."""
    names = client.zrange(broker.WORKERS, 0, -1)
    raw = client.get(broker.worker_key(names[0].decode())) if names else None
    return orjson.loads(raw) if raw else {}


async def measure(stack: LocalStack, release: Path) -> dict[str, Any]:
    """Submit, wait until all run at once, let them end, and collect."""
    client = redis.Redis.from_url(stack.redis_url)
    pid = worker_report(client)["pid"]
    process = psutil.Process(pid)
    peak, lags, most = 0, [], 0
    done = asyncio.Event()

    async def watch() -> None:
        nonlocal peak, most
        while not done.is_set():
            peak = max(peak, process.memory_info().rss)
            told = worker_report(client)
            most = max(most, told.get("running", 0))
            lags.append(told["loop_lag_ms"])
            if told.get("phases", {}).get("agent", 0) >= COUNT and not release.exists():
                print(f"all {COUNT} run at once; releasing them", file=sys.stderr)
                release.touch()
            await asyncio.sleep(0.25)

    async with Producer(ProducerSettings(redis_url=stack.redis_url)) as producer:
        began = time.perf_counter()
        batch = await producer.submit_many(null_requests(COUNT, "wait"), max_in_flight=COUNT)
        watching = asyncio.create_task(watch())
        delivered, failed = set(), None
        async for result in batch:
            failed = failed or result.error
            delivered.add(result.rollout_id)
        seconds = time.perf_counter() - began
        done.set()
        await watching
    return {
        "in_flight": most,
        "delivered": len(delivered),
        "completed": batch.counts.completed,
        "first_error": str(failed) if failed else None,
        "seconds": seconds,
        "peak_rss_mb": peak / 1e6,
        # Each report covers the minute before it, in samples of 100 ms; the first ones hold too few for a p99.
        "loop_lag_p99_ms": max(lag["p99"] for lag in lags[60:]),
        "loop_lag_max_ms": max(lag["max"] for lag in lags),
    }


def main() -> None:
    """Run it once; it takes about a minute."""
    with TemporaryDirectory() as directory:
        release = Path(directory) / "release"
        with null_fleet(concurrency=COUNT, ROLLOUTS_BENCH_RELEASE=str(release)) as stack:
            numbers = asyncio.run(measure(stack, release))
    required = {"peak_rss_mb": ("<=", 600), "loop_lag_p99_ms": ("<=", 100), "delivered": ("==", COUNT)}
    report("in_flight", required, **numbers)


if __name__ == "__main__":
    main()
    finish()
