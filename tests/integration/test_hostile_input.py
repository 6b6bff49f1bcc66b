"""What somebody with access to Redis may send a worker: each ends as an invalid request's result, and no worker dies.

Upload names that lead out of a sandbox are in ``workers/test_local_sandbox.py`` and ``workers/harbor/test_task.py``.
"""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Iterator
from typing import Any

import pytest
import redis
from celery import Celery
from fleets import lean

from producer import Producer, RolloutRequest, RolloutResult, StopCondition, broker
from producer.contract import ErrorKind
from producer.settings import ProducerSettings
from workers.local import LocalStack, StackOptions

pytestmark = pytest.mark.xdist_group("hostile")

VALID = {"model": "m", "run_command": "true"}
PATTERN = "rollout_id: String should match pattern"


class Attacker:
    """Writes what it likes into the fleet's Redis."""

    def __init__(self, stack: LocalStack) -> None:
        self.stack = stack
        self.client = redis.Redis.from_url(stack.redis_url)
        self.app = Celery(set_as_current=False)
        self.app.config_from_object(broker.celery_config(stack.redis_url))
        self.wake_up = broker.WakeUp.for_app(self.app, 3)

    def record(self, rollout_id: str, request: bytes) -> RolloutResult:
        """Write a record as no producer of ours does, wake a worker, and wait for the result."""
        fields = {"state": "pending", "attempt": 0, "spent": 0, "batch": "b", "max_attempts": 1, "priority": 3}
        self.client.hset(broker.job_key(rollout_id), mapping={"request": request, "enqueued_ms": 1, **fields})
        self.client.lpush(broker.queue_key(3), self.wake_up.render(rollout_id))
        return asyncio.run(self._result(rollout_id))

    async def _result(self, rollout_id: str) -> RolloutResult:
        async with Producer(ProducerSettings(redis_url=self.stack.redis_url)) as producer:
            return await producer.handle(rollout_id, "b").result(60)

    def message(self, carried: Any, **options: Any) -> RolloutResult:
        """Send a task that carries its request."""
        task = self.app.send_task(broker.RUN_ROLLOUT, args=[carried], **options)
        return RolloutResult.model_validate(task.get(timeout=60) | {"rollout_id": "any"})

    def body(self, rollout_id: str, body: bytes) -> RolloutResult:
        """Send a message with a body that Celery's own clients cannot have made."""
        message = json.loads(self.wake_up.render(rollout_id))
        message["body"] = base64.b64encode(body).decode()
        self.client.lpush(broker.queue_key(3), json.dumps(message))
        return RolloutResult.parse(self.app.AsyncResult(rollout_id).get(timeout=60))


@pytest.fixture(scope="module")
def attacker() -> Iterator[Attacker]:
    with LocalStack(StackOptions(**lean())) as stack:
        attacker = Attacker(stack)
        workers = [child.process.pid for child in stack._children if child.name == "worker1"]
        yield attacker
        alive = asyncio.run(a_good_one(stack))
        assert alive is StopCondition.COMPLETED
        assert [child.process.pid for child in stack._children if child.name == "worker1"] == workers
        stack.check()
        attacker.app.close()


async def a_good_one(stack: LocalStack) -> StopCondition:
    async with Producer(ProducerSettings(redis_url=stack.redis_url)) as producer:
        return (await (await producer.submit(RolloutRequest.parse(VALID))).result(60)).stop_condition


def refusal(result: RolloutResult) -> str:
    assert result.stop_condition is StopCondition.HAS_ERROR
    assert result.error is not None
    assert result.error.kind is ErrorKind.INVALID_REQUEST
    return result.error.message


def nested(levels: int) -> list[Any]:
    inner: list[Any] = []
    for _ in range(levels):
        inner = [inner]
    return inner


def encoded(**fields: Any) -> bytes:
    return json.dumps(VALID | fields).encode()


@pytest.mark.parametrize(
    ("rollout_id", "request_", "words"),
    [
        ("bytes", b"\xff\xfe{", "the request is not JSON"),
        ("empty", b"", "the request is not JSON"),
        ("list", b"[1]", "the request is list"),
        ("version", encoded(schema_version=99), "schema_version: 99 is not known here"),
        ("types", encoded(model=5, env={"A": 1}, deadlines=[]), "env.A: Input should be a valid string"),
        ("path", encoded(rollout_id="../../evil"), PATTERN),
        ("another", encoded(rollout_id="somebody-elses"), "'somebody-elses', in the record of another rollout"),
        ("lists", encoded()[:-1] + b', "answer":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "depth limit exceeded"),
        ("objects", b'{"info":' + b'{"a":' * 100_000 + b"1" + b"}" * 100_001, "depth limit exceeded"),
        ("deep", encoded(rollout_id="deep", answer=nested(500)), "cannot be written as JSON"),
    ],
    ids=["bytes", "empty", "list", "version", "types", "path", "another", "lists", "objects", "deep"],
)
def test_a_record_that_no_producer_wrote(attacker: Attacker, rollout_id: str, request_: bytes, words: str) -> None:
    assert words in refusal(attacker.record(rollout_id, request_))


def test_a_record_of_100_mb(attacker: Attacker) -> None:
    request = b'{"prompt":"' + b"x" * 100_000_000 + b'"}'
    assert "the request is 100000013 bytes, more than 16777216" in refusal(attacker.record("huge", request))
    attacker.client.delete(broker.job_key("huge"))


@pytest.mark.parametrize(
    ("carried", "words"),
    [
        ({**VALID, "model": 5, "max_attempts": "x"}, "model: Input should be a valid string (got int 5)"),
        ({**VALID, "answer": nested(400)}, "cannot be written as JSON"),
        ({**VALID, "prompt": "x" * 17_000_000}, "more than 16777216; give large inputs by reference"),
    ],
    ids=["types", "deep", "huge"],
)
def test_a_message_that_carries_what_cannot_be_run(attacker: Attacker, carried: Any, words: str) -> None:
    assert words in refusal(attacker.message(carried))


@pytest.mark.parametrize("task_id", ["../../etc/passwd", "a/b", "a\nb", ".hidden", "x y", "a" * 500, "a%2fb", "a:b"])
def test_a_rollout_id_that_means_something_elsewhere(attacker: Attacker, task_id: str) -> None:
    assert PATTERN in refusal(attacker.message(VALID, task_id=task_id))


@pytest.mark.parametrize(
    ("rollout_id", "body"),
    [
        ("body-deep", b"[[" + b"[" * 100_000 + b"]" * 100_000 + b"],{},{}]"),
        ("body-cut", b"{"),
        ("body-number", b"5"),
        ("body-args", b'[{"a": 1}, {}, {}]'),
        ("body-bytes", b"\xff\xfe"),
    ],
    ids=["deep", "cut", "number", "args", "bytes"],
)
def test_a_message_that_cannot_be_decoded_is_a_result_and_no_silence(
    attacker: Attacker, rollout_id: str, body: bytes
) -> None:
    assert "the request is not JSON" in refusal(attacker.body(rollout_id, body))
