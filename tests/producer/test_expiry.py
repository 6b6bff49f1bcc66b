"""What stays in Redis, and for how long: of what was consumed little, of what was not everything."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
import redis
from support import RedisServer, wait_until

from producer import FleetEvictsError, Producer, RolloutRequest, RolloutResult, StopCondition, broker
from producer.connection import FleetConnection, Submitted
from producer.settings import ProducerSettings

KEEP = 60
LONG = int(broker.RESULT_TTL.total_seconds())

Make = Callable[..., list[RolloutRequest]]


@pytest.fixture
def settings(redis_url: str) -> ProducerSettings:
    return ProducerSettings(redis_url=redis_url, keep_consumed=KEEP)


@pytest.fixture
def client(redis_url: str) -> redis.Redis:
    return redis.Redis.from_url(redis_url)


def ttls(client: redis.Redis, rollout_id: str) -> tuple[int, int]:
    return int(client.ttl(broker.job_key(rollout_id))), int(client.ttl(broker.result_key(rollout_id)))


def is_short(*left: int) -> bool:
    return all(0 < ttl <= KEEP for ttl in left)


def is_long(*left: int) -> bool:
    return all(ttl > LONG - 100 for ttl in left)


def end_it(worker, batch_id: str, request: RolloutRequest) -> None:
    result = RolloutResult.for_request(request, StopCondition.COMPLETED)
    worker.finish(result.model_copy(update={"batch_id": batch_id}))


def test_a_batch_that_was_consumed_expires_with_its_stream(settings, worker, make, client):
    async def main() -> list[str]:
        async with Producer(settings) as producer:
            batch = await producer.submit_many(make(100), batch_id="all")
            return [result.rollout_id async for result in batch]

    assert len(asyncio.run(main())) == 100
    assert all(is_short(*ttls(client, f"r-{n}")) for n in range(100))
    assert is_short(client.ttl(broker.stream_key("all")))
    left = {key for key in client.scan_iter() if client.ttl(key) < 0}
    assert left <= {b"_kombu.binding.rollouts", b"_kombu.binding_permanent.rollouts", b"_kombu.binding_deadlines"}


def test_what_was_not_consumed_stays(settings, worker, make, client):
    async def main() -> None:
        async with Producer(settings) as producer:
            batch = await producer.submit_many(make(80), batch_id="half", max_in_flight=80)
            taken = [(await anext(batch)).rollout_id for _ in range(40)]
            await batch.aclose()
            done, last = taken[:-1], taken[-1]
            assert all(is_short(*ttls(client, i)) for i in done)
            # Its consumer may have broken off while it handled this one.
            assert is_long(*ttls(client, last), client.ttl(broker.stream_key("half")))
            rest = {f"r-{n}" for n in range(80)} - set(done)
            async for result in producer.results("half", count=80):
                assert (result.rollout_id in rest) is (result.rollout_id not in done)
        assert all(is_short(*ttls(client, f"r-{n}")) for n in range(80))
        assert is_short(client.ttl(broker.stream_key("half")))

    asyncio.run(main())


def test_an_idle_consumer_keeps_nothing_back(settings, idle_worker, make, client):
    async def main() -> None:
        requests = make(2)
        async with Producer(settings) as producer:
            batch = await producer.submit_many(requests, batch_id="idle")
            end_it(idle_worker, "idle", requests[0])
            assert (await anext(batch)).rollout_id == "r-0"
            waiting = asyncio.create_task(anext(batch))
            async with asyncio.timeout(20):
                while not is_short(*ttls(client, "r-0")):
                    await asyncio.sleep(0.01)
            assert client.hget(broker.job_key("r-1"), "state") == b"pending"
            end_it(idle_worker, "idle", requests[1])
            await waiting
            assert is_long(*ttls(client, "r-1"), client.ttl(broker.stream_key("idle")))

    asyncio.run(main())


def test_a_single_rollout_is_consumed_by_its_handle(settings, worker, make, client):
    async def main() -> None:
        async with Producer(settings) as producer:
            one, other = make(2)
            handle = await producer.submit(one)
            await producer.submit(other)
            assert (await handle.result(20)).completed
            assert is_short(*ttls(client, "r-0"))
            assert (await handle.result(20)).completed, "it may be read again meanwhile"
            await producer.handle("r-1").result(20)
            assert is_short(client.ttl(broker.stream_key("default")))

    asyncio.run(main())


def test_reading_again_does_not_prolong(settings, worker, make, client):
    async def main() -> None:
        async with Producer(settings) as producer:
            handle = await producer.submit(make(1)[0])
            await handle.result(20)
            client.expire(broker.job_key("r-0"), KEEP // 2)
            client.expire(broker.result_key("r-0"), KEEP // 2)
            await handle.result(20)
        assert max(ttls(client, "r-0")) <= KEEP // 2

    asyncio.run(main())


def test_a_cancelled_batch_leaves_nothing_but_its_messages(settings, idle_worker, make, client):
    async def main() -> None:
        async with Producer(settings) as producer:
            batch = await producer.submit_many(make(10), batch_id="none")
            await batch.cancel()
            assert [result.stop_condition async for result in batch] == [StopCondition.CANCELLED] * 10

    asyncio.run(main())
    assert all(is_short(client.ttl(broker.job_key(f"r-{n}"))) for n in range(10))
    assert is_short(client.ttl(broker.stream_key("none")))
    assert client.zcard(broker.PENDING) == client.zcard(broker.DELAYED) == client.zcard(broker.RUNNING) == 0


def test_what_has_not_ended_is_left_alone(redis_url, make, client):
    async def main() -> None:
        connection = FleetConnection(redis_url, keep_consumed=1)
        await connection.submit(make(1))
        await connection.consumed("default", ["r-0", "nobody"])
        await connection.close()

    asyncio.run(main())
    assert is_long(client.ttl(broker.job_key("r-0")))


def test_everything_of_a_consumed_batch_is_gone_in_time(redis_url, worker, make, client):
    settings = ProducerSettings.model_construct(
        redis_url=redis_url, keep_consumed=1.0, max_in_flight=100, allow_eviction=False
    )

    async def main() -> None:
        async with Producer(settings) as producer:
            async for _ in await producer.submit_many(make(5), batch_id="brief"):
                pass
            async with asyncio.timeout(20):
                while list(client.scan_iter("rollouts:*")) or list(client.scan_iter("celery-task-meta-*")):
                    await asyncio.sleep(0.02)

    asyncio.run(main())


def test_entries_of_a_stream_that_is_always_in_use_go_with_what_they_announce(redis_url, idle_worker, make, client):
    """The default batch's stream gets new entries all the time, so that it never expires itself."""
    stream = broker.stream_key("default")

    async def main() -> None:
        connection = FleetConnection(redis_url, keep_consumed=KEEP)
        requests = make(6)
        await connection.submit(requests)
        for n in range(3):
            end_it(idle_worker, "default", requests[n])
        # As if an hour ago: r-0 is consumed and has expired since, r-1 was never consumed, r-2 has just ended.
        old = [(f"{n + 1}-0", entry) for n, (_, entry) in enumerate(client.xrange(stream))][:2]
        last = client.xrange(stream)[2]
        client.delete(stream, broker.job_key("r-0"), broker.result_key("r-0"))
        for position, entry in [*old, last]:
            client.xadd(stream, entry, id=position)

        await connection.consumed("default", ["r-2"])

        assert [entry[b"id"] for _, entry in client.xrange(stream)] == [b"r-1", b"r-2"]
        await connection.close()

    asyncio.run(main())


def test_the_record_of_a_message_that_carries_its_request_keeps_no_entry_of_the_stream(
    redis_url, idle_worker, make, client
):
    """Such a record stays for its full time; what was announced of it goes with its result all the same."""
    stream = broker.stream_key("default")

    async def main() -> None:
        connection = FleetConnection(redis_url, keep_consumed=KEEP)
        requests = make(2)
        await connection.submit(requests)
        for request in requests:
            client.hset(broker.job_key(request.rollout_id), "carried", 1)
            end_it(idle_worker, "default", request)
        await connection.consumed("default", ["r-0", "r-1"])
        for rollout_id in ("r-0", "r-1"):
            record, result = ttls(client, rollout_id)
            assert is_long(record)
            assert is_short(result)
        assert is_short(client.ttl(stream)), "all of it is consumed"
        entries = [entry for _, entry in client.xrange(stream)]
        client.delete(stream, broker.result_key("r-0"), broker.result_key("r-1"))
        for n, entry in enumerate(entries):
            client.xadd(stream, entry, id=f"{n + 1}-0")
        await connection.consumed("default", ["r-1"])
        assert client.xrange(stream) == [], "nothing is left of what they announce"
        await connection.close()

    asyncio.run(main())


def test_a_position_whose_entry_was_deleted_is_no_stream_that_was_lost(settings, idle_worker, make, client):
    async def main() -> None:
        requests = make(3)
        async with Producer(settings) as producer:
            await producer.connection.submit(requests)
            end_it(idle_worker, "default", requests[0])
            end_it(idle_worker, "default", requests[1])
            results = producer.results("default", count=2)
            assert [r.rollout_id async for r in results] == ["r-0", "r-1"]
            client.xdel(broker.stream_key("default"), results.position)

            follower = producer.results("default", after=results.position)
            follower._completions._quiet = 1000  # it looks for itself, as after a lost connection
            waiting = asyncio.create_task(anext(follower))
            await asyncio.sleep(0.01)
            end_it(idle_worker, "default", requests[2])
            assert (await asyncio.wait_for(waiting, 20)).rollout_id == "r-2"

    asyncio.run(main())


def test_a_full_redis_can_still_be_emptied(own_redis: RedisServer, start_worker, make):
    worker = start_worker(own_redis.url)
    settings = ProducerSettings(redis_url=own_redis.url, keep_consumed=KEEP)

    async def main() -> None:
        async with Producer(settings) as producer:
            batch = await producer.submit_many(make(40), batch_id="full")
            wait_until(lambda: own_redis.client.xlen(broker.stream_key("full")) == 40)
            await batch.aclose()
            worker.stop()
            own_redis.client.config_set("maxmemory", 1)
            with pytest.raises(redis.OutOfMemoryError):
                own_redis.client.set("more", "x")
            await producer.connection.consumed("full", [f"r-{n}" for n in range(40)])
        assert is_short(own_redis.client.ttl(broker.job_key("r-0")))

    asyncio.run(main())


def test_the_same_request_within_the_hour_finds_what_it_was_consumed_of(settings, worker, make):
    async def main() -> None:
        async with Producer(settings) as producer:
            for _ in range(2):
                batch = await producer.submit_many(make(3), batch_id="again")
                assert len([result async for result in batch]) == 3
            assert (
                await producer.connection.submit(
                    [request.model_copy(update={"batch_id": "again"}) for request in make(3)]
                )
                == [Submitted.FINISHED] * 3
            )

    asyncio.run(main())
    assert sorted(worker.started) == ["r-0", "r-1", "r-2"]


@pytest.mark.parametrize("seconds", [0, 59, LONG + 1, float("nan")])
def test_a_time_that_retries_would_outlive_is_refused(seconds):
    with pytest.raises(ValueError, match="keep_consumed"):
        ProducerSettings(keep_consumed=seconds)


# -- eviction ----------------------------------------------------------------------------------------------------------


async def opened(url: str, **fields: object) -> None:
    async with Producer(ProducerSettings(redis_url=url, **fields)):
        pass


@pytest.mark.parametrize("policy", ["allkeys-lru", "volatile-ttl"])
def test_a_producer_refuses_a_redis_that_evicts_unless_it_is_told_to_use_it(own_redis: RedisServer, policy: str):
    own_redis.client.config_set("maxmemory-policy", policy)
    with pytest.raises(FleetEvictsError, match=f"maxmemory-policy is {policy}.* set ROLLOUTS_ALLOW_EVICTION=1"):
        asyncio.run(opened(own_redis.url))
    asyncio.run(opened(own_redis.url, allow_eviction=True))


@pytest.mark.parametrize("forbidden", ["-info", "-config"])
def test_the_policy_is_found_where_one_of_two_commands_is_forbidden(own_redis: RedisServer, forbidden: str):
    own_redis.client.config_set("maxmemory-policy", "allkeys-lfu")
    own_redis.client.execute_command("ACL", "SETUSER", "some", "on", ">pw", "~*", "&*", "+@all", forbidden)
    with pytest.raises(FleetEvictsError, match="allkeys-lfu"):
        asyncio.run(opened(own_redis.url.replace("//", "//some:pw@")))


def test_a_policy_that_is_not_told_is_warned_of_once(
    own_redis: RedisServer, caplog: pytest.LogCaptureFixture, tmp_path: Path
):
    own_redis.client.execute_command("ACL", "SETUSER", "some", "on", ">pw", "~*", "&*", "+@all", "-info", "-config")
    for _ in range(2):
        asyncio.run(opened(own_redis.url.replace("//", "//some:pw@")))
    assert [r.getMessage() for r in caplog.records if "maxmemory-policy" in r.getMessage()] == [
        "Redis: the server tells neither by INFO nor by CONFIG GET what its maxmemory-policy is; see to it that it is "
        "noeviction, for a full server would forget rollouts otherwise"
    ]
