"""How many bytes a rollout takes in Redis: queued, running, ended and not consumed, and after it was consumed.

Producer and scripts are the real ones. What a request and a result hold is small here, so that the numbers are what the
fleet adds: ``request_bytes`` and ``result_bytes`` are in them, and a larger request or result adds its own size.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import redis
from celery import Celery, states
from harness import null_requests, report
from support import RedisServer

from producer import Producer, RolloutRequest, RolloutResult, StopCondition, broker
from producer.settings import ProducerSettings
from workers import results
from workers.jobs import Claim, JobStore

COUNT = 10_000
KEEP = 1.0  # seconds; not what the settings allow, but what is measured does not depend on it
TURN = {
    "prompt": [{"role": "user", "content": "What is 6 times 7?"}],
    "completion": [{"role": "assistant", "content": "6 times 7 is 42."}],
    "tokens": {
        "prompt_ids": list(range(1000, 1016)),
        "completion_ids": list(range(2000, 2016)),
        "completion_logprobs": [-0.25] * 16,
    },
}


def used(server: RedisServer) -> int:
    return int(server.client.info("memory")["used_memory"])


def claim_all(store: JobStore, requests: list[RolloutRequest]) -> list[Claim]:
    """Take every rollout and its message, as workers do."""
    claims = [store.claim(request.rollout_id, "worker") for request in requests]
    store.client.delete(*broker.queue_keys())
    return [claim for claim in claims if isinstance(claim, Claim)]


def end_all(store: JobStore, app: Celery, claims: list[Claim]) -> int:
    """End every rollout with a result of one turn; returns the bytes of the results."""
    size = 0
    for claim in claims:
        result = RolloutResult.for_request(
            RolloutRequest.parse(claim.request), StopCondition.COMPLETED, trajectory=[TURN], reward=1.0
        )
        encoded = app.backend.encoded(claim.rollout_id, result, states.SUCCESS)
        size += len(encoded)
        assert store.commit(claim.rollout_id, claim.attempt, claim.batch_id, result.stop_condition, encoded)
    return size


async def measure(server: RedisServer, store: JobStore, app: Celery) -> None:
    """Take one batch through all states, and print the numbers."""
    settings = ProducerSettings.model_construct(
        redis_url=server.url, keep_consumed=KEEP, max_in_flight=COUNT, allow_eviction=False
    )
    requests = null_requests(COUNT)
    async with Producer(settings) as producer:
        empty = used(server)
        batch = await producer.submit_many(requests, max_in_flight=COUNT)
        queued = used(server) - empty
        claims = claim_all(store, requests)
        assert len(claims) == COUNT
        running = used(server) - empty
        result_bytes = end_all(store, app, claims)
        ended = used(server) - empty
        began = time.perf_counter()
        assert len([result async for result in batch]) == COUNT
        consuming = time.perf_counter() - began
        while server.client.dbsize() > 1:  # the fleet's id, or one of kombu's sets
            await asyncio.sleep(0.05)
        consumed = used(server) - empty
    request_bytes = sum(len(request.to_json()) for request in requests)
    report(
        "redis_memory",
        rollouts=COUNT,
        queued_bytes=queued / COUNT,
        running_bytes=running / COUNT,
        ended_bytes=ended / COUNT,
        consumed_bytes=consumed / COUNT,
        request_bytes=request_bytes / COUNT,
        result_bytes=result_bytes / COUNT,
        consumed_per_second=COUNT / consuming,
        server=str(server.client.info("server").get("valkey_version") or "redis"),
    )


def main(directory: str) -> None:
    server = RedisServer(Path(directory))
    server.start()
    app = Celery("benchmark", set_as_current=False)
    app.config_from_object(broker.celery_config(server.url) | {"result_backend": results.PREFIX + server.url})
    with redis.Redis.from_url(server.url) as client:
        store = JobStore(client, app, lease_ttl=60)
        # What the server and the scripts take once is none of a rollout's.
        warm = RolloutRequest(model="null", rollout_id="warm")
        claim = store.claim("warm", "worker", warm)
        assert isinstance(claim, Claim)
        end_all(store, app, [claim])
        client.flushall()
        asyncio.run(measure(server, store, app))
    app.close()
    server.stop()


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as directory:
        main(directory)
