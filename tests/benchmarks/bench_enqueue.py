"""How fast rollouts are enqueued, against plain ``apply_async`` calls of the same requests in the same run."""

from __future__ import annotations

import asyncio
import statistics
import time

from celery import Celery
from harness import finish, null_requests, report
from support import RedisServer

from producer import Producer, broker
from producer.settings import ProducerSettings

COUNT = 50_000
ROUNDS = 3


def plain(url: str, count: int) -> float:
    """Return the rollouts a second of one ``apply_async`` each, with the request as its argument."""
    app = Celery(set_as_current=False)
    app.config_from_object(broker.celery_config(url))

    @app.task(name=broker.RUN_ROLLOUT)
    def task(request: object) -> None: ...

    bodies = [request.model_dump(mode="json", exclude_defaults=True) for request in null_requests(count)]
    began = time.perf_counter()
    for body in bodies:
        task.apply_async(args=[body])
    rate = count / (time.perf_counter() - began)
    app.close()
    return rate


async def ours(url: str, count: int) -> float:
    """Return the rollouts a second of one batch: records written and messages sent."""
    requests = null_requests(count)
    async with Producer(ProducerSettings(redis_url=url)) as producer:
        began = time.perf_counter()
        batch = await producer.submit_many(requests, max_in_flight=count)
        rate = count / (time.perf_counter() - began)
        assert batch.counts.submitted == count
        await batch.aclose()
    return rate


def main(directory: str) -> None:
    """Alternate the two, on one server."""
    from pathlib import Path

    server = RedisServer(Path(directory))
    server.start()
    rates: dict[str, list[float]] = {"plain": [], "ours": []}
    for _ in range(ROUNDS):
        server.client.flushall()
        rates["plain"].append(plain(server.url, COUNT // 10))
        server.client.flushall()
        rates["ours"].append(asyncio.run(ours(server.url, COUNT)))
    server.stop()
    fast, slow = statistics.median(rates["ours"]), statistics.median(rates["plain"])
    pairs = [a / b for a, b in zip(rates["ours"], rates["plain"], strict=True)]
    report(
        "enqueue",
        required={"ratio": (">=", 3)},
        ours_per_second=fast,
        apply_async_per_second=slow,
        ratio=statistics.median(pairs),
        ratio_min=min(pairs),
        ratio_max=max(pairs),
    )


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as directory:
        main(directory)
    finish()
