"""The door on a real server, with workers that are only scripts: what it does when clients, doors or Redis go away."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any
from unittest.mock import patch

import pytest
import redis
from support import RedisServer

pytest.importorskip("zmq")
pytest.importorskip("msgpack")

import msgpack
import zmq
import zmq.asyncio

from producer import Producer, ProducerSettings, RolloutResult, StopCondition, broker
from producer.connection import FleetConnection, Submitted
from producer.contract import RolloutRequest
from producer.door.door import Door, DoorOptions
from producer.door.episode import EpisodeAnswer, EpisodeCall, pack, unpack
from producer.door.socket import DoorSocket
from producer.door.wire import Wire
from producer.errors import ConsumerTakenError
from producer.ids import safe_id
from producer.queues import running_key

NAME = "door-alone"
TTL = int(broker.RESULT_TTL.total_seconds())
RUN = {"task_data": {}, "client": {}, "model": "m", "sampling": {}}


class Workers:
    """Claims rollouts and ends them by the scripts with which workers do."""

    def __init__(self, url: str) -> None:
        self._client = redis.Redis.from_url(url)
        self._claim, self._commit = (
            self._client.register_script(broker.script("workers", name)) for name in ("claim", "commit")
        )

    def request(self, request_id: str) -> RolloutRequest | None:
        data = self._client.hget(broker.job_key(safe_id(f"{NAME}-{request_id}")), "request")
        return RolloutRequest.parse(data) if data else None

    def state(self, request_id: str) -> str | None:
        state = self._client.hget(broker.job_key(safe_id(f"{NAME}-{request_id}")), "state")
        return state.decode() if state else None

    def cancelling(self, request_id: str) -> bool:
        return bool(self._client.hget(broker.job_key(safe_id(f"{NAME}-{request_id}")), "cancel"))

    def claim(self, request_id: str) -> RolloutRequest:
        request = self.request(request_id)
        assert request is not None
        job = broker.job_key(request.rollout_id)
        self._claim(keys=[job], args=[request.rollout_id, "w", 60_000, TTL, "", "", ""])
        return request

    def end(self, request: RolloutRequest, *deltas: bytes) -> None:
        answer = EpisodeAnswer(wire=Wire.DELTAS, deltas=[pack(delta) for delta in deltas], reply=pack(b"the end"))
        result = RolloutResult.for_request(
            request, StopCondition.COMPLETED, attempt=1, episode=answer.model_dump(mode="json")
        )
        data = broker.encode_result({"status": "SUCCESS", "result": result, "task_id": request.rollout_id})
        keys = [broker.job_key(request.rollout_id), broker.stream_key(request.batch_id)]
        keys += [broker.result_key(request.rollout_id), broker.LEDGER]
        self._commit(keys=keys, args=[request.rollout_id, 1, "completed", TTL, data, "owned"])


class Client:
    """A raw client: it sends what it is told, and collects what comes."""

    def __init__(self, address: str) -> None:
        self._context = zmq.asyncio.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(address)

    async def send(self, asked: str, method: str, **fields: Any) -> None:
        await self.socket.send_multipart([asked.encode(), method.encode(), msgpack.packb(fields)])

    async def next(self, request_id: str) -> tuple[bytes, bytes]:
        """Return kind and data of the next answer to this request; others are dropped, as verifiers' client does."""
        async with asyncio.timeout(20):
            while True:
                answered, kind, data = await self.socket.recv_multipart()
                if answered == request_id.encode():
                    return kind, data

    async def said(self, request_id: str) -> dict[str, Any]:
        return dict(msgpack.unpackb((await self.next(request_id))[1]))

    async def all_said(self, *request_ids: str) -> dict[str, dict[str, Any]]:
        """Return the next answer to each of these requests, in whatever order they come."""
        said: dict[str, dict[str, Any]] = {}
        async with asyncio.timeout(20):
            while said.keys() != set(request_ids):
                answered, *_, data = await self.socket.recv_multipart()
                if answered.decode() in request_ids:  # else it is what tells whether the client is there
                    said[answered.decode()] = dict(msgpack.unpackb(data))
        return said

    async def reach(self) -> None:
        """Return once the door answers: what is sent while a connection breaks is lost."""
        async with asyncio.timeout(20):
            while True:
                await self.send("reach", "health")
                with suppress(TimeoutError):
                    async with asyncio.timeout(0.5):
                        await self.said("reach")
                        return

    def close(self) -> None:
        self.socket.close()
        self._context.term()


@asynccontextmanager
async def serving(
    url: str, address: str = "tcp://127.0.0.1:*", **options: Any
) -> AsyncIterator[tuple[str, asyncio.Task[None]]]:
    async with Producer(ProducerSettings(redis_url=url)) as producer, DoorSocket(address) as socket:
        door = Door(producer, socket, DoorOptions(env="e", name=NAME, **options))
        task = asyncio.create_task(door.serve())
        try:
            yield socket.address, task
        finally:
            task.cancel()
            await asyncio.wait({task})


async def until(predicate: Callable[[], object]) -> None:
    async with asyncio.timeout(30):
        while not predicate():
            await asyncio.sleep(0.01)


def scenario(test: Callable[[RedisServer, Workers], Awaitable[None]]) -> Callable[[RedisServer], None]:
    def run(own_redis: RedisServer) -> None:
        asyncio.run(test(own_redis, Workers(own_redis.url)))

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


@scenario
async def test_a_run_is_a_rollout_and_its_end_the_answer(server: RedisServer, workers: Workers) -> None:
    async with serving(server.url) as (address, _):
        client = Client(address)
        await client.send("a", "run", **RUN)
        await until(lambda: workers.request("a"))
        request = workers.claim("a")
        call = EpisodeCall.model_validate(request.environment_args)
        assert (request.environment, request.model, msgpack.unpackb(unpack(call.run))) == ("verifiers", "m", RUN)
        workers.end(request, b"one", b"two")
        found = [await client.next("a") for _ in range(3)]
        assert found == [(b"delta", b"one"), (b"delta", b"two"), (b"reply", b"the end")]
        client.close()


@scenario
async def test_episodes_are_of_the_doors_queue(server: RedisServer, workers: Workers) -> None:
    async with serving(server.url, queue="gpu") as (address, _):
        client = Client(address)
        await client.send("a", "run", **RUN)
        await until(lambda: workers.request("a"))
        assert workers.claim("a").queue == "gpu"
        assert server.client.zcard(running_key("gpu")) == 1
        client.close()


@scenario
async def test_clients_of_a_door_that_is_started_again_are_answered(server: RedisServer, workers: Workers) -> None:
    async with serving(server.url) as (address, _):
        clients = {name: Client(address) for name in "abc"}
        for name, client in clients.items():
            await client.send(name, "run", **RUN)
            await until(lambda name=name: workers.request(name))
        ended, running, late = (workers.claim(name) for name in "abc")
    workers.end(ended)  # while there is no door
    async with serving(server.url, address):
        workers.end(running)
        assert await clients["a"].next("a") == (b"reply", b"the end")
        assert await clients["b"].next("b") == (b"reply", b"the end")
    async with serving(server.url, address):  # and once more
        workers.end(late)
        assert await clients["c"].next("c") == (b"reply", b"the end")
    for client in clients.values():
        client.close()


@scenario
async def test_an_answer_waits_in_redis_while_neither_client_nor_door_is_there(
    server: RedisServer, workers: Workers
) -> None:
    async with serving(server.url) as (address, _):
        client = Client(address)
        await client.send("a", "run", **RUN)
        await until(lambda: workers.request("a"))
        request = workers.claim("a")
        client.close()
    workers.end(request)
    unclaimed = redis.Redis.from_url(server.url)
    async with serving(server.url, address):
        await until(lambda: unclaimed.smembers(broker.UNCLAIMED + NAME))
    async with serving(server.url, address):
        again = Client(address)
        assert await again.next("a") == (b"reply", b"the end")
        again.close()


@scenario
async def test_a_run_that_is_sent_again_over_another_connection_is_the_same_rollout(
    server: RedisServer, workers: Workers
) -> None:
    async with serving(server.url) as (address, _):
        first, second = Client(address), Client(address)
        await first.send("a", "run", **RUN)
        await until(lambda: workers.request("a"))
        request = workers.claim("a")
        first.close()
        await second.send("a", "run", **RUN)
        await second.send("h", "health")
        assert await second.said("h") == {"success": True, "error": None}
        workers.end(request)
        assert await second.next("a") == (b"reply", b"the end")
        await second.send("a", "run", **RUN)  # and after its end
        assert await second.next("a") == (b"reply", b"the end")
        second.close()


@scenario
async def test_a_cancelled_run_is_cancelled_also_by_the_next_door(server: RedisServer, workers: Workers) -> None:
    async with serving(server.url) as (address, _):
        client = Client(address)
        for name in "ab":
            await client.send(name, "run", **RUN)
        await client.send("c", "cancel", request_id="a")  # at once
        said = await client.all_said("c", "a")
        assert said["c"] == {"success": True, "error": None, "cancelled": True}
        assert said["a"] == {"success": False, "error": "Cancelled: rollout aborted"}
        await until(lambda: workers.request("b"))
        workers.claim("b")
    async with serving(server.url, address):
        await client.reach()
        await client.send("d", "cancel", request_id="b")
        assert (await client.said("d"))["cancelled"]
        assert workers.cancelling("b")
        await client.send("e", "cancel", request_id="nobody")
        assert not (await client.said("e"))["cancelled"]
    client.close()


@scenario
async def test_the_episodes_of_a_client_that_is_gone_are_cancelled(server: RedisServer, workers: Workers) -> None:
    async with serving(server.url, patience=0.5, look=0.1) as (address, _):
        gone, there = Client(address), Client(address)
        await gone.send("a", "run", **RUN)
        await there.send("b", "run", **RUN)
        await until(lambda: workers.request("a") and workers.request("b"))
        for name in "ab":
            workers.claim(name)
        gone.close()
        await until(lambda: workers.cancelling("a"))
        assert not workers.cancelling("b")
        there.close()


@scenario
async def test_what_redis_forgot_is_submitted_again(server: RedisServer, workers: Workers) -> None:
    async with serving(server.url, check=0.2) as (address, _):
        client = Client(address)
        await client.send("a", "run", **RUN)
        await until(lambda: workers.request("a"))
        redis.Redis.from_url(server.url).flushall()
        await until(lambda: workers.request("a"))
        workers.end(workers.claim("a"))
        assert await client.next("a") == (b"reply", b"the end")
        client.close()


@scenario
async def test_while_redis_is_away_the_door_is_well_and_what_comes_is_run_later(
    server: RedisServer, workers: Workers
) -> None:
    async with serving(server.url) as (address, _):
        client = Client(address)
        await client.send("a", "run", **RUN)
        await until(lambda: workers.request("a"))
        request = workers.claim("a")
        server.stop(signal.SIGTERM)
        await client.send("b", "run", **RUN)
        await client.send("h", "health")
        assert await client.said("h") == {"success": True, "error": None}
        await asyncio.to_thread(server.start)
        workers.end(request)
        assert await client.next("a") == (b"reply", b"the end")
        await until(lambda: workers.request("b"))
        client.close()


@scenario
async def test_a_run_that_a_door_could_not_submit_before_it_ended_has_failed(
    server: RedisServer, workers: Workers
) -> None:
    async with serving(server.url, parting=0.01) as (address, _):
        client = Client(address)
        server.stop(signal.SIGTERM)
        await client.send("a", "run", **RUN)
        await client.send("h", "health")
        assert await client.said("h") == {"success": True, "error": None}
    said = await client.said("a")
    assert (said["success"], said["error"]) == (False, "the door ended before Redis had taken the run")
    client.close()


@scenario
async def test_a_run_that_is_being_submitted_when_a_door_ends_is_run(server: RedisServer, workers: Workers) -> None:
    async with serving(server.url, parting=60) as (address, _):
        client = Client(address)
        server.stop(signal.SIGTERM)
        await client.send("a", "run", **RUN)
        await client.send("h", "health")
        assert await client.said("h") == {"success": True, "error": None}
        starting = asyncio.create_task(asyncio.to_thread(server.start))
    await starting
    assert workers.request("a")
    client.close()


@scenario
async def test_a_run_that_comes_while_a_door_ends_is_run(server: RedisServer, workers: Workers) -> None:
    submit, coming = FleetConnection.submit, {name: asyncio.Event() for name in "ab"}
    taken: set[str] = set()

    async def submit_later(self: FleetConnection, requests: Sequence[RolloutRequest]) -> list[Submitted]:
        name = str(requests[0].info["request_id"])
        taken.add(name)
        await coming[name].wait()
        return await submit(self, requests)

    async def send_another(door: asyncio.Task[None]) -> None:
        await until(door.cancelling)
        await client.send("b", "run", **RUN)
        await until(lambda: "b" in taken)
        coming["a"].set()
        await until(lambda: workers.request("a"))
        asyncio.get_running_loop().call_later(0.05, coming["b"].set)

    with patch.object(FleetConnection, "submit", submit_later):
        async with serving(server.url, parting=60) as (address, door):
            client = Client(address)
            await client.send("a", "run", **RUN)
            await until(lambda: "a" in taken)
            sending = asyncio.create_task(send_another(door))
        await sending
    assert workers.request("b")
    client.close()


@scenario
async def test_of_two_doors_of_one_name_the_later_one_goes_on(server: RedisServer, workers: Workers) -> None:
    async with serving(server.url) as (address, first):
        await until(lambda: server.client.exists(broker.consumer_key(NAME, "door")))
        async with serving(server.url) as (other, second):
            one, two = Client(address), Client(other)
            for name, client in (("a", one), ("b", two)):
                await client.send(name, "run", **RUN)
                await until(lambda name=name: workers.request(name))
                workers.end(workers.claim(name))
            assert await two.next("b") == (b"reply", b"the end")
            await until(first.done)
            assert isinstance(first.exception(), ConsumerTakenError)
            assert not second.done()
            one.close()
            two.close()


@scenario
async def test_what_is_not_of_the_protocol_hurts_nobody(server: RedisServer, workers: Workers) -> None:
    async with serving(server.url) as (address, door):
        client = Client(address)
        await client.socket.send(b"")
        await client.socket.send_multipart([b"x", b"run"])
        await client.socket.send_multipart([b"\xff", b"run", b""])
        await client.socket.send_multipart([b"a", b"run", b"\xc1"])
        await client.send("b", "run", model=7)
        await client.send("c", "cancel", request_id=[1])
        assert not (await client.said("a"))["success"]
        assert not (await client.said("b"))["success"]
        assert not (await client.said("c"))["cancelled"]
        await client.send("d", "dance")
        assert await client.said("d") == {"success": False, "error": "unknown method 'dance'"}
        assert not door.done()
        assert workers.request("a") is None
        client.close()
