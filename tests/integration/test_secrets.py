"""Marker secrets are planted wherever a fleet has secrets, and everything that others can read is searched for them.

Flower shows what Celery's events and its remote control's ``inspect`` answer; both are searched here.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import redis
import zstandard
from celery import Celery
from support import wait_until

from producer import Producer, RolloutRequest, RolloutResult, broker
from producer.contract import ErrorKind, StopCondition
from producer.settings import ProducerSettings
from workers.local import LocalStack, StackOptions

pytestmark = pytest.mark.xdist_group("secrets")

ASKED, NOT_ASKED, CONTROL = "marker-asked-7f3a", "marker-not-asked-91bc", "marker-control-55de"

#: Hooks that do with secrets what a careless author might do.
LEAKY = """
from workers.environment import CommandEnvironment
from workers.errors import SandboxError


class Leaky(CommandEnvironment):
    async def setup(self, rollout):
        if rollout.request.answer == "retry":
            raise SandboxError(f"refused {rollout.secrets}", detail=rollout.api_key, retryable=True)

    async def score(self, rollout):
        if rollout.request.answer == "raise":
            raise RuntimeError(f"{rollout.secrets} {rollout.api_key}")
        return 1.0


class Sync(CommandEnvironment):
    def score(self, rollout):
        raise SystemExit(f"{rollout.secrets} {rollout.api_key}")
"""


class Fleet:
    """A fleet with marker secrets, and what was seen of it by everybody who looks on."""

    def __init__(self, stack: LocalStack, directory: Path) -> None:
        self.stack = stack
        self.client = redis.Redis.from_url(stack.redis_url)
        self.password = urlsplit(stack.redis_url).password or ""
        self.keys = directory / "keys"  # of the rollouts, written there by their agents
        self.app = Celery(set_as_current=False)
        self.app.config_from_object(broker.celery_config(stack.redis_url))
        self.events: list[dict[str, Any]] = []
        self.commands: list[str] = []
        self.inspected: list[Any] = []
        self.results: list[RolloutResult] = []
        self.environments: list[bytes] = []  # of the processes of a running agent
        self.command_lines: list[bytes] = []  # of all processes

    def secrets(self) -> list[str]:
        return [ASKED, NOT_ASKED, CONTROL, self.password, *self.keys.read_text().split()]

    def watch(self) -> None:
        """Listen to events and to every command that Redis is sent, from now on."""
        # As with `worker --events`. The worker reports before it listens to remote control.
        wait_until(lambda: self.app.control.enable_events(reply=True, timeout=1, limit=1), what="the worker's answer")
        for target in (self._listen, self._monitor):
            threading.Thread(target=target, daemon=True).start()
        wait_until(lambda: self.client.pubsub_numpat() >= 3 and self.events and self.commands, what="events")

    def _listen(self) -> None:
        with suppress(Exception), self.app.connection_for_read() as connection:  # the fleet ends before it does
            self.app.events.Receiver(connection, handlers={"*": self.events.append}).capture(wakeup=True)

    def _monitor(self) -> None:
        with suppress(Exception), redis.Redis.from_url(self.stack.redis_url).monitor() as monitor:
            for command in monitor.listen():
                self.commands.append(command["command"])

    def inspect(self) -> None:
        """Ask the worker all that remote control tells."""
        inspect = self.app.control.inspect(timeout=10, limit=1)
        asked = ("active", "reserved", "scheduled", "revoked", "stats", "registered", "report", "active_queues")
        self.inspected = [getattr(inspect, name)() for name in asked] + [inspect.conf(with_defaults=True)]

    def dump(self) -> Iterator[bytes]:
        """Everything that stands in Redis, and what is packed in it."""
        for key in self.client.scan_iter():
            dumped = self.client.dump(key) or b""
            yield key + b" " + dumped
            values = {
                b"string": lambda k: [self.client.get(k)],
                b"hash": lambda k: [*self.client.hgetall(k).values()],
                b"list": lambda k: self.client.lrange(k, 0, -1),
                b"set": lambda k: [*self.client.smembers(k)],
                b"zset": lambda k: self.client.zrange(k, 0, -1),
                b"stream": lambda k: [repr(self.client.xrange(k)).encode()],
                b"none": lambda k: [],  # it has expired meanwhile
            }[self.client.type(key)](key)
            for value in filter(None, values):
                yield value
                if value.startswith(zstandard.FRAME_HEADER):
                    yield zstandard.ZstdDecompressor().decompressobj().decompress(value)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    directory = tmp_path_factory.mktemp("secrets")
    (directory / "leaky.py").write_text(LEAKY)
    settings = {
        "PYTHONPATH": str(directory),
        "ROLLOUTS_SECRET_ENV": "ASKED_TOKEN,OTHER_TOKEN",
        "ASKED_TOKEN": ASKED,
        "OTHER_TOKEN": NOT_ASKED,
    }
    options = StackOptions(
        log_dir=directory / "logs",
        settings=settings,
        environments={"leaky": "leaky:Leaky", "sync": "leaky:Sync"},
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ROLLOUTS_GATEWAY_CONTROL_KEY", CONTROL)
        patch.setenv("PYTHONPATH", str(directory), prepend=":")
        with LocalStack(options) as stack:
            fleet = Fleet(stack, directory)
            fleet.watch()
            asyncio.run(run_everything(fleet))
            yield fleet
            fleet.app.close()


async def run_everything(fleet: Fleet) -> None:
    """Run rollouts that print their secrets, fail with them, and raise them in hooks; look on while one runs."""
    note = f"echo $OPENAI_API_KEY >> {fleet.keys}; echo $ASKED_TOKEN $OPENAI_API_KEY"
    wait = fleet.keys.with_name("go-on")

    def request(command: str, **fields: Any) -> RolloutRequest:
        filled = {"model": "stand-in", "run_command": command, "secret_env": ["ASKED_TOKEN"], "max_attempts": 1}
        return RolloutRequest.parse(filled | fields)

    requests = [
        request(f"{note}; env; echo $ASKED_TOKEN >&2"),
        request(f"{note}; echo $ASKED_TOKEN >&2; exit 3"),
        request(note, environment="leaky", answer="raise"),
        request(note, environment="leaky", answer="retry", max_attempts=2),
        request(note, environment="sync"),
    ]
    async with Producer(ProducerSettings(redis_url=fleet.stack.redis_url)) as producer, asyncio.timeout(80):
        # One that waits for a file: a loop of short sleeps, in the agent and not in the test.
        held = await producer.submit(request(f"{note}; while [ ! -e {wait} ]; do sleep 0.1; done", rollout_id="held"))
        batch = await producer.submit_many(requests)
        fleet.results = [result async for result in batch]
        await asyncio.to_thread(wait_until, lambda: environments_of_agents(fleet))
        await asyncio.to_thread(fleet.inspect)
        fleet.environments = environments_of_agents(fleet)
        fleet.command_lines = [*read_all("cmdline")]
        wait.touch()
        fleet.results.append(await held.result(30))
    wait_until(lambda: sum(e["type"] == "task-succeeded" for e in fleet.events) >= 6, what="the events of all six")


def read_all(name: str) -> Iterator[bytes]:
    """Read a file of every process on this machine."""
    for path in Path("/proc").glob(f"[0-9]*/{name}"):
        with suppress(OSError):  # of others, or over
            yield path.read_bytes()


def environments_of_agents(fleet: Fleet) -> list[bytes]:
    base_url = f"OPENAI_BASE_URL={fleet.stack.gateway_url}/v1/rollouts/held".encode()
    return [environment for environment in read_all("environ") if base_url in environment]


def found_in(secrets: list[str], *texts: str | bytes) -> list[str]:
    """Return the secrets that stand in one of the texts, with what stands around them."""
    blobs = [text.encode() if isinstance(text, str) else text for text in texts]
    return [
        f"{secret}: {blob[max(0, at - 60) : at + 60]!r}"
        for secret in secrets
        for blob in blobs
        if (at := blob.find(secret.encode())) >= 0
    ]


def test_the_markers_were_where_they_should_be(fleet: Fleet) -> None:
    """Else the tests below would find nothing because there was nothing."""
    ends = [(r.stop_condition, r.error.kind if r.error else None) for r in fleet.results]
    assert sorted(ends, key=str) == sorted(
        [
            *[(StopCondition.COMPLETED, None)] * 2,
            (StopCondition.HAS_ERROR, ErrorKind.AGENT),
            (StopCondition.HAS_ERROR, ErrorKind.SANDBOX),
            *[(StopCondition.HAS_ERROR, ErrorKind.ENVIRONMENT)] * 2,
        ],
        key=str,
    )
    text = json.dumps([r.model_dump(mode="json") for r in fleet.results])
    assert text.count("[redacted ASKED_TOKEN]") >= 6
    assert text.count("[redacted OPENAI_API_KEY]") >= 6
    assert len(set(fleet.keys.read_text().split())) == 5, "each rollout has a key of its own; one got no agent"
    assert fleet.password


def test_results_hold_no_secret(fleet: Fleet) -> None:
    assert found_in(fleet.secrets(), *(result.to_json() for result in fleet.results)) == []


def test_redis_holds_no_secret(fleet: Fleet) -> None:
    dumped = list(fleet.dump())
    assert any(b'"failed_attempts"' in value for value in dumped), "results are unpacked"
    assert found_in(fleet.secrets(), *dumped) == []


def test_no_command_that_redis_was_sent_holds_a_secret(fleet: Fleet) -> None:
    assert len(fleet.commands) > 100
    assert found_in(fleet.secrets(), *fleet.commands) == []


def test_logs_hold_no_secret(fleet: Fleet) -> None:
    logs = {name: path.read_text() for name, path in fleet.stack.logs.items()}
    assert logs.keys() == {"redis", "model", "gateway", "worker1", "beat"}
    assert "held" in logs["worker1"]
    assert found_in(fleet.secrets(), *logs.values()) == []


def test_events_hold_no_secret(fleet: Fleet) -> None:
    types = {event["type"] for event in fleet.events}
    assert types >= {"task-received", "task-started", "task-succeeded", "worker-heartbeat"}
    assert found_in(fleet.secrets(), *map(repr, fleet.events)) == []


def test_remote_control_tells_no_secret(fleet: Fleet) -> None:
    assert all(fleet.inspected)
    assert "held" in repr(fleet.inspected[0])
    assert found_in(fleet.secrets(), repr(fleet.inspected)) == []


def test_no_command_line_holds_a_secret(fleet: Fleet) -> None:
    assert any(b"workers.cli" in line for line in fleet.command_lines)
    assert found_in(fleet.secrets(), *fleet.command_lines) == []


def test_an_agents_environment_holds_its_own_secrets_and_none_of_the_workers(fleet: Fleet) -> None:
    assert fleet.environments
    for environment in fleet.environments:
        assert ASKED.encode() in environment
        assert found_in([NOT_ASKED, CONTROL, fleet.password, "ROLLOUTS_REDIS_URL", "PYTHONPATH"], environment) == []
