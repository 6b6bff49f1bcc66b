"""A Redis that lets in only who is allowed to: password, user with the least rights, and TLS, for all of a fleet.

The embedded server has no TLS of its own, so a proxy ends it before the server, with a certificate made for the test.
"""

from __future__ import annotations

import asyncio
import json
import os
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis
from celery import Celery
from support import RedisServer, command

from producer import FleetUnreachableError, Producer, RolloutRequest, broker, queues
from producer.settings import ProducerSettings
from workers import access
from workers.local import LocalStack, StackError, StackOptions

pytestmark = pytest.mark.xdist_group("redis-access")

PASSWORD = "p:w@/%?marker"  # all that has a meaning in a URL
QUOTED = "p%3Aw%40%2F%25%3Fmarker"


class TlsProxy:
    """Ends TLS before a Redis server; ``authority`` is the file of the certificate that signed its own."""

    def __init__(self, port: int, directory: Path) -> None:
        self._redis_port = port
        self.authority, key = directory / "ca.pem", directory / "key.pem"
        command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
        command += ["-keyout", str(key), "-out", str(self.authority), "-days", "2", "-subj", "/CN=localhost"]
        command += ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
        subprocess.run(command, check=True, capture_output=True)
        self._tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self._tls.load_cert_chain(self.authority, key)
        self.connections = 0
        self._writers: list[asyncio.StreamWriter] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self.port = 0

    @contextmanager
    def running(self) -> Iterator[TlsProxy]:
        self._thread.start()
        started = asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self._tls)
        server = asyncio.run_coroutine_threadsafe(started, self._loop).result(10)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(10)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(10)
            self._loop.close()

    async def _end(self) -> None:
        for writer in self._writers:
            writer.close()
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self._redis_port)
        self._writers += [writer, up_writer]
        await asyncio.gather(self._pass(reader, up_writer), self._pass(up_reader, writer), return_exceptions=True)

    @staticmethod
    async def _pass(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        finally:
            writer.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """A server that wants a password of its default user, and knows one with the least rights and one with too few."""
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    server.start()
    acl = server.client.execute_command
    acl("ACL", "SETUSER", "fleet", "reset", "on", f">{PASSWORD}", *broker.acl_rule().split())
    acl("ACL", "SETUSER", "few", "reset", "on", f">{PASSWORD}", "~rollouts:*", "&*", "+@all", "-eval", "-evalsha")
    server.client.config_set("requirepass", PASSWORD)
    server.client.execute_command("AUTH", PASSWORD)
    server.client.connection_pool.connection_kwargs["password"] = PASSWORD
    yield server
    server.stop(9)


@pytest.fixture(scope="module")
def proxy(server: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TlsProxy]:
    with TlsProxy(server.port, tmp_path_factory.mktemp("tls")).running() as proxy:
        yield proxy


def url(server: RedisServer, user: str = "fleet", password: str = QUOTED) -> str:
    return f"redis://{user}:{password}@127.0.0.1:{server.port}/0"


def tls_url(proxy: TlsProxy) -> str:
    return f"rediss://fleet:{QUOTED}@localhost:{proxy.port}/0?ssl_ca_certs={proxy.authority}"


def hides_the_password(*texts: str) -> bool:
    return not any(form in text for text in texts for form in (PASSWORD, QUOTED))


def test_a_fleet_runs_over_tls_as_the_user_with_the_least_rights(
    server: RedisServer, proxy: TlsProxy, tmp_path: Path
) -> None:
    server.client.execute_command("ACL", "LOG", "RESET")
    address = tls_url(proxy)
    options = StackOptions(
        redis_url=address,
        log_dir=tmp_path,
        settings={
            "ROLLOUTS_LEASE_TTL": "2",
            "ROLLOUTS_TUNNEL_CHECK_INTERVAL": "1",
            "ROLLOUTS_ORPHAN_INTERVAL": "1",
            "ROLLOUTS_QUEUES": "rollouts,gpu",
        },
    )
    with LocalStack(options) as stack:
        request = RolloutRequest(model="stand-in", run_command="sleep 1.2; echo here", rollout_id="tls", queue="gpu")

        async def main() -> None:
            async with Producer(ProducerSettings(redis_url=address)) as producer, asyncio.timeout(60):
                batch = await producer.submit_many([request], batch_id="tls")
                assert [result.agent_stdout async for result in batch] == ["here\n"]
                slow = await producer.submit(RolloutRequest(model="stand-in", run_command="sleep 60"))
                while await slow.state() != "running":
                    await asyncio.sleep(0.02)
                await slow.cancel()
                assert (await slow.result()).stop_condition == "cancelled"

        asyncio.run(main())
        app = Celery(set_as_current=False)
        app.config_from_object(broker.celery_config(address))
        for queue in ("rollouts", "gpu"):
            carried, where = {"model": "stand-in", "run_command": "echo plain"}, queues.celery_name(queue)
            task = app.send_task(broker.RUN_ROLLOUT, args=[carried], queue=where)
            assert task.get(timeout=30)["agent_stdout"] == "plain\n"
            assert RolloutRequest.parse(server.client.hget(broker.job_key(task.id), "request")).queue == queue
        assert list((app.control.inspect(timeout=5, limit=1).ping() or {}).values()) == [{"ok": "pong"}]
        app.close()

        status = command("status", "--json", ROLLOUTS_REDIS_URL=address)
        assert [worker["state"] for worker in json.loads(status.stdout)["workers"]] == ["running"]
        doctor = command("doctor", "--json", ROLLOUTS_REDIS_URL=address, ROLLOUTS_GATEWAY_URL=stack.gateway_url)
        found = [(f["state"], f["message"]) for f in json.loads(doctor.stdout) if f["check"] == "redis"]
        assert [state for state, _ in found] == ["ok", "ok", "ok"], "it answers, forgets nothing, and keeps what it has"
        assert "maxmemory-policy is noeviction" in found[1][1]
        logs = [path.read_text() for path in tmp_path.glob("*.log")]

    refused = [(entry["reason"], entry["object"]) for entry in server.client.acl_log() if entry["username"] == "fleet"]
    assert refused == []
    assert proxy.connections > 10
    assert hides_the_password(status.stdout, status.stderr, doctor.stdout, doctor.stderr, *logs)


def test_a_certificate_that_nobody_vouches_for_is_refused_by_every_part(proxy: TlsProxy) -> None:
    address = tls_url(proxy).partition("?")[0]
    with pytest.raises(FleetUnreachableError, match=r"rediss://HOST:PORT/0\?ssl_ca_certs=/path/to/ca\.pem"):
        asyncio.run(opened(address))
    app = Celery(set_as_current=False)
    app.config_from_object(broker.celery_config(address))
    with app.connection_for_write() as connection, pytest.raises(Exception, match="CERTIFICATE_VERIFY_FAILED"):
        connection.ensure_connection(max_retries=1, timeout=5)
    with pytest.raises(Exception, match="CERTIFICATE_VERIFY_FAILED"):
        app.backend.client.ping()
    app.close()


async def opened(address: str) -> None:
    async with Producer(ProducerSettings(redis_url=address), patience=0) as producer:
        await producer.submit(RolloutRequest(model="m"))


@pytest.mark.parametrize("user", ["", "fleet"])
def test_a_wrong_password_ends_everything_at_once_and_says_what_to_check(server: RedisServer, user: str) -> None:
    address = url(server, user, "wr0ng-marker")
    with pytest.raises(FleetUnreachableError, match="Check user name and password in ROLLOUTS_REDIS_URL") as raised:
        asyncio.run(opened(address))
    with pytest.raises(StackError, match="Check user name and password"), LocalStack(StackOptions(redis_url=address)):
        pytest.fail("it started")
    status = command("status", ROLLOUTS_REDIS_URL=address)
    doctor = command("doctor", ROLLOUTS_REDIS_URL=address)
    worker = command("worker", ROLLOUTS_REDIS_URL=address)
    assert (status.returncode, doctor.returncode, worker.returncode) == (2, 1, 2)
    for said in (status.stderr, doctor.stdout, worker.stderr, str(raised.value)):
        assert "Check user name and password in ROLLOUTS_REDIS_URL" in said
        assert "wr0ng-marker" not in said


def test_a_user_with_too_few_rights_is_told_the_rule_that_it_needs(server: RedisServer) -> None:
    address = url(server, "few")
    rule = broker.acl_rule(address)
    with pytest.raises(FleetUnreachableError, match="has no permissions") as raised:
        asyncio.run(opened(address))
    doctor = command("doctor", ROLLOUTS_REDIS_URL=address)
    worker = command("worker", ROLLOUTS_REDIS_URL=address)
    assert (doctor.returncode, worker.returncode) == (1, 2)
    for said in (doctor.stdout, worker.stderr, str(raised.value)):
        assert f"ACL SETUSER NAME {rule}" in said
    assert "Refused were PERSIST rollouts\x06\x163, DEL celery-task-meta-doctor-nobody" in doctor.stdout
    assert hides_the_password(doctor.stdout, worker.stderr, str(raised.value))


@pytest.mark.parametrize(
    ("without", "refused"),
    [
        (("-info",), "INFO server"),
        (("resetchannels", "&/0.*"), "PUBLISH celery-task-meta-doctor-nobody"),
        (("resetchannels", "&celery-task-meta-*"), "PUBLISH /0.doctor-nobody"),
        (("-publish",), "PUBLISH celery-task-meta-doctor-nobody"),
    ],
    ids=["info", "results", "kombu", "publish"],
)
def test_each_right_that_only_recovery_or_waiting_clients_need_is_looked_for(
    server: RedisServer, without: tuple[str, ...], refused: str
) -> None:
    acl = server.client.execute_command
    acl("ACL", "SETUSER", "almost", "reset", "on", f">{PASSWORD}", *broker.acl_rule().split(), *without)
    address = url(server, "almost")
    with redis.Redis.from_url(address) as client:
        found = access.look(client, address)
    assert refused in found.refused
    assert "ACL SETUSER NAME" in (found.refusal_problem or "")


def test_the_rule_is_for_the_database_of_the_url() -> None:
    assert "&/7.celery.pidbox" in broker.acl_rule("redis://host/7")
    assert "&/0.celery.pidbox" in broker.acl_rule("redis://host")


def test_a_worker_and_up_refuse_a_redis_that_evicts_unless_they_are_told_to_use_it(own_redis: RedisServer) -> None:
    own_redis.client.config_set("maxmemory-policy", "allkeys-lru")
    worker = command("worker", ROLLOUTS_REDIS_URL=own_redis.url)
    assert worker.returncode == 2
    assert "maxmemory-policy is allkeys-lru: a full server would forget rollouts. Set it to noeviction" in worker.stderr
    assert len(worker.stderr.splitlines()) == 1
    plain = subprocess.run(
        [sys.executable, "-m", "celery", "-A", "workers", "worker", "--without-mingle", "--without-gossip"],
        env=os.environ | {"ROLLOUTS_REDIS_URL": own_redis.url},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert plain.returncode != 0
    assert "set ROLLOUTS_ALLOW_EVICTION=1" in plain.stderr + plain.stdout
    with (
        pytest.raises(StackError, match="ROLLOUTS_ALLOW_EVICTION=1"),
        LocalStack(StackOptions(redis_url=own_redis.url)),
    ):
        pytest.fail("it started")
    allowed = {"ROLLOUTS_ALLOW_EVICTION": "1"}
    with LocalStack(StackOptions(redis_url=own_redis.url, settings=allowed)) as stack:
        doctor = command("doctor", "--json", ROLLOUTS_REDIS_URL=own_redis.url, **allowed)
        assert stack.logs["worker1"].exists()
    states = [finding["state"] for finding in json.loads(doctor.stdout) if finding["check"] == "redis"]
    assert states == ["ok", "warn", "ok"]
