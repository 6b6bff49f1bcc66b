"""How fast a producer collects small results, and in how much memory, against Celery's ``ResultSet.join_native``.

Both collect as many results of the same size that were stored before, each in a process of its own, in the same run.
"""

from __future__ import annotations

import asyncio
import json
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

import redis
from celery import Celery
from celery.result import AsyncResult, ResultSet
from harness import finish, report
from support import RedisServer

from producer import Producer, RolloutRequest, RolloutResult, StopCondition, broker
from producer.settings import ProducerSettings

COUNT = 50_000
ROUNDS = 3


def stored(url: str, count: int) -> None:
    """Have ``count`` rollouts submitted, claimed and ended by the scripts that workers use; and as many for Celery."""
    client = redis.Redis.from_url(url)
    asyncio.run(_submit(url, count))
    claim, commit = (client.register_script(broker.script("workers", name)) for name in ("claim", "commit"))
    ttl = int(broker.RESULT_TTL.total_seconds())
    plain = Celery(set_as_current=False)
    plain.config_from_object(broker.celery_config(url) | {"result_serializer": "json"})
    pipe = client.pipeline(transaction=False)
    for number in range(count):
        request = _request(number)
        result = RolloutResult.for_request(request, StopCondition.COMPLETED, reward=1.0)
        meta = {"status": "SUCCESS", "result": result, "traceback": None, "children": [], "task_id": request.rollout_id}
        job = broker.job_key(request.rollout_id)
        claim(keys=[job], args=[request.rollout_id, "w", 60_000, ttl, "", "", ""], client=pipe)
        keys = [job, broker.stream_key("b"), broker.result_key(request.rollout_id), broker.LEDGER]
        data = broker.encode_result(meta)
        commit(keys=keys, args=[request.rollout_id, 1, "completed", ttl, data, "owned"], client=pipe)
        same = meta | {"task_id": f"plain-{number}", "result": result.model_dump(mode="json")}
        pipe.set(f"celery-task-meta-plain-{number}", plain.backend.encode(same), ex=ttl)
        if number % 500 == 499:
            pipe.execute()
    pipe.execute()


async def _submit(url: str, count: int) -> None:
    async with Producer(ProducerSettings(redis_url=url)) as producer:
        await producer.connection.submit([_request(number) for number in range(count)])


def _request(number: int) -> RolloutRequest:
    return RolloutRequest(model="null", rollout_id=f"r-{number}", batch_id="b", example_id=number)


async def ours(url: str, count: int) -> float:
    """Return how long the results of the batch took, in seconds."""
    async with Producer(ProducerSettings(redis_url=url)) as producer:
        began = time.perf_counter()
        taken = 0
        async for result in producer.results("b", count=count):
            taken += result.completed
        assert taken == count
        return time.perf_counter() - began


def celerys(url: str, count: int) -> float:
    """Return how long ``join_native`` took, in seconds."""
    app = Celery(set_as_current=False)
    app.config_from_object(broker.celery_config(url) | {"result_serializer": "json"})
    results = ResultSet([AsyncResult(f"plain-{number}", app=app) for number in range(count)], app=app)
    began = time.perf_counter()
    assert len(results.join_native(timeout=600)) == count
    return time.perf_counter() - began


def in_its_own_process(who: str, url: str, count: int) -> tuple[float, float]:
    """Return seconds and the largest resident memory in MB."""
    command = [sys.executable, __file__, who, url, str(count)]
    found = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    return found["seconds"], found["rss_mb"]


def main(directory: str, count: int) -> None:
    """Alternate the two, on one server."""
    server = RedisServer(Path(directory))
    server.start()
    found: dict[str, list[tuple[float, float]]] = {"ours": [], "celerys": []}
    for _ in range(ROUNDS):
        server.client.flushall()
        stored(server.url, count)
        for who, times in found.items():
            times.append(in_its_own_process(who, server.url, count))
    server.stop()
    pairs = [theirs[0] / mine[0] for mine, theirs in zip(found["ours"], found["celerys"], strict=True)]
    report(
        "collect",
        required={"ratio": (">=", 3), "rss_mb": ("<=", 300)},
        results=count,
        ours_per_second=count / statistics.median(seconds for seconds, _ in found["ours"]),
        join_native_per_second=count / statistics.median(seconds for seconds, _ in found["celerys"]),
        ratio=statistics.median(pairs),
        ratio_min=min(pairs),
        ratio_max=max(pairs),
        rss_mb=max(rss for _, rss in found["ours"]),
        join_native_rss_mb=max(rss for _, rss in found["celerys"]),
    )


if __name__ == "__main__":
    if len(sys.argv) == 4:
        _, who, url, count = sys.argv
        seconds = asyncio.run(ours(url, int(count))) if who == "ours" else celerys(url, int(count))
        rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(json.dumps({"seconds": seconds, "rss_mb": rss}))
    else:
        import tempfile

        with tempfile.TemporaryDirectory() as directory:
            main(directory, COUNT)
        finish()
