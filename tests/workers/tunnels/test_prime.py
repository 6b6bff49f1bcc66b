"""The Prime provider: the unmodified SDK against the emulated platform, in each of the platform's bad moods."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from prime_tunnel.core.client import TunnelClient
from support import counted, wait_until

from workers.errors import TunnelError
from workers.instruments import PLATFORM_REQUESTS
from workers.reaper import REAP_VARIABLE
from workers.settings import WorkerSettings
from workers.tunnels.pool import TunnelPool
from workers.tunnels.prime import PrimeBackend, Redactor, prime_tunnels

ROOT = Path(__file__).resolve().parents[3]
GATEWAY = "http://127.0.0.1:8080"
LABELS = ("fleet:test", "worker:celery@w1")
NOTHING = {"sandboxes": [], "tunnels": [], "processes": []}


def backend() -> PrimeBackend:
    return PrimeBackend("celery@w1", LABELS)


def frpc_pids(emulator: Any) -> list[int]:
    return [tunnel["frpc_pid"] for tunnel in emulator.tunnels() if tunnel["frpc_pid"]]


def lives(pid: int) -> bool:
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def wrap_frpc(emulator: Any, *lines: str) -> None:
    """Have these shell lines run before the stand-in for frpc, which they may replace; ``$2`` is its configuration."""
    frpc = Path(emulator.home) / ".prime" / "bin" / "frpc"
    real = frpc.rename(frpc.with_name("frpc.real"))
    frpc.write_text("\n".join(["#!/bin/sh", *lines, f'exec {real} "$@"', ""]))
    frpc.chmod(0o755)


@pytest.fixture
def gateway() -> Iterator[str]:
    """A server that answers with the path it was asked for."""

    class Echo(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = self.path.encode()
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Echo)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


# -- what it makes -----------------------------------------------------------------------------------------------------


def test_the_settings_make_a_pool_whose_url_leads_to_the_gateway_also_after_a_kill(
    emulator: Any, gateway: str, redis_url: str, quick: Any, scenario: Any
) -> None:
    async def story() -> None:
        pool = prime_tunnels(WorkerSettings(redis_url=redis_url), labels=LABELS, limits=quick())
        async with httpx.AsyncClient(trust_env=False, timeout=30.0) as client:
            async with pool.lease(gateway) as lease:
                assert (await client.get(f"{lease.url}/v1/rollouts/r")).text.endswith("/v1/rollouts/r")
                emulator.kill_frpc(lease.tunnel_id)
                await scenario.until(lambda: pool.report()[0]["restarts"] == 1, "the restart")
                assert (await client.get(f"{lease.url}/again")).text.endswith("/again")
            (tunnel,) = emulator.tunnels()
            assert tunnel["name"] == "celery@w1"
            assert tunnel["local_port"] == int(gateway.rpartition(":")[2])
            assert tunnel["labels"][:2] == list(LABELS)
            assert tunnel["labels"][2].startswith("start:")
            await pool.aclose()

    asyncio.run(story())
    assert emulator.leaked() == NOTHING
    assert emulator.requests()["create_tunnel"] == 1


def test_closing_leaves_no_process_no_configuration_and_no_variable(emulator: Any, scenario: Any) -> None:
    async def story(pool: TunnelPool) -> list[int]:
        async with pool.lease(GATEWAY) as lease:
            assert (Path(emulator.home) / ".prime/tunnels" / f"{lease.tunnel_id}.toml").exists()
            assert REAP_VARIABLE in os.environ
            return frpc_pids(emulator)

    before = {id(thing) for thing in gc.get_objects() if isinstance(thing, httpx.AsyncClient)}
    (pid,) = scenario(backend(), story)
    assert not lives(pid)
    assert emulator.leaked() == NOTHING
    assert list((Path(emulator.home) / ".prime/tunnels").iterdir()) == []
    assert REAP_VARIABLE not in os.environ
    clients = [thing for thing in gc.get_objects() if isinstance(thing, httpx.AsyncClient)]
    assert [client for client in clients if not client.is_closed and id(client) not in before] == []


# -- starts in each bad mood -------------------------------------------------------------------------------------------


def failing(emulator: Any, scenario: Any, limits: Any, **options: Any) -> TunnelError:
    async def story(pool: TunnelPool) -> TunnelError:
        with pytest.raises(TunnelError) as caught:
            await pool.lease(GATEWAY).__aenter__()
        return caught.value

    error: TunnelError = scenario(backend(), story, limits, **options)
    assert emulator.leaked() == NOTHING
    return error


@pytest.mark.parametrize(
    ("status", "retryable", "tries", "says"),
    [
        (401, False, 1, "set PRIME_API_KEY"),
        (402, False, 1, "add credit"),
        (404, False, 1, "PRIME_API_BASE_URL"),
        (500, True, 3, "on fire"),
    ],
)
def test_a_start_that_is_answered_with_an_error(
    emulator: Any, scenario: Any, quick: Any, status: int, retryable: bool, tries: int, says: str
) -> None:
    emulator.fault("create_tunnel", status=status, detail="on fire", times=None)
    error = failing(emulator, scenario, quick())
    assert (error.retryable, emulator.requests()["create_tunnel"]) == (retryable, tries)
    assert says in error.message
    assert f"HTTP {status}" in (error.detail or "")


def test_the_platforms_limit_fails_at_once_and_says_what_to_delete(emulator: Any, scenario: Any, quick: Any) -> None:
    emulator.limit_tunnels(0)
    error = failing(emulator, scenario, quick())
    assert (error.retryable, emulator.requests()["create_tunnel"]) == (True, 1)
    assert "maximum number of" in error.message
    assert "worker:" in error.message


def test_a_429_is_tried_again_after_the_time_it_names(emulator: Any, scenario: Any) -> None:
    emulator.fault("create_tunnel", status=429, retry_after=0.2)
    before = counted(PLATFORM_REQUESTS, api="tunnels", status="429")
    paused = []

    class Throttle:
        async def take(self) -> None:
            pass

        async def pause(self, seconds: float) -> None:
            paused.append(seconds)

    async def story(pool: TunnelPool) -> None:
        async with pool.lease(GATEWAY):
            pass

    scenario(backend(), story, throttle=Throttle())
    assert (paused, emulator.requests()["create_tunnel"]) == ([0.2], 2)
    assert counted(PLATFORM_REQUESTS, api="tunnels", status="429") == before + 1
    assert emulator.leaked() == NOTHING


@pytest.mark.parametrize("fault", [{"drop": "before"}, {"drop": "after"}, {"hang": "after"}], ids=str)
def test_a_start_whose_answer_is_lost_is_tried_again_and_leaks_nothing(
    emulator: Any, scenario: Any, impatient_at_first: Any, fault: dict[str, Any]
) -> None:
    emulator.fault("create_tunnel", times=1, **fault)
    if "hang" in fault:
        impatient_at_first()

    async def story(pool: TunnelPool) -> None:
        async with pool.lease(GATEWAY) as lease:
            assert lease.generation == 1

    scenario(backend(), story)
    assert emulator.requests()["create_tunnel"] == 2
    assert emulator.leaked() == NOTHING


def test_registrations_whose_answers_are_always_lost_are_found_by_their_label(
    emulator: Any, scenario: Any, quick: Any
) -> None:
    emulator.fault("create_tunnel", drop="after", times=None)
    error = failing(emulator, scenario, quick(start_attempts=2))
    assert error.retryable
    assert len(emulator.tunnels()) == 6, "the SDK tries three times each, and knows none of the ids"


def test_without_a_key_no_request_is_made(
    emulator: Any, scenario: Any, quick: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PRIME_API_KEY")
    error = failing(emulator, scenario, quick())
    assert (error.retryable, "set PRIME_API_KEY" in error.message) == (False, True)
    assert emulator.requests().get("create_tunnel", 0) == 0


def test_a_wrong_key_says_so_and_is_tried_once(
    emulator: Any, scenario: Any, quick: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRIME_API_KEY", "not-the-key")
    error = failing(emulator, scenario, quick())
    assert "not-the-key" not in error.message + (error.detail or "")
    assert "unauthorized" in error.message
    emulator.expected_refusals = [("create_tunnel", "a wrong API key")]


def test_without_frpc_and_without_a_way_to_get_it(
    emulator: Any, scenario: Any, quick: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (Path(emulator.home) / ".prime/bin/frpc").unlink()
    for name in ("HTTPS_PROXY", "https_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # nothing listens there
    error = failing(emulator, scenario, quick())
    assert (error.retryable, "~/.prime/bin" in error.message) == (False, True)
    assert emulator.requests().get("create_tunnel", 0) == 0


def test_a_home_that_cannot_be_written_to(emulator: Any, scenario: Any, quick: Any) -> None:
    folder = Path(emulator.home) / ".prime/bin"
    folder.rename(folder.with_name("elsewhere"))
    folder.write_text("a file")
    error = failing(emulator, scenario, quick())
    assert (error.retryable, "HOME" in error.message) == (False, True)


def test_a_frpc_that_exits_at_once_leaves_its_last_words(emulator: Any, scenario: Any, quick: Any) -> None:
    wrap_frpc(emulator, "echo cannot allocate memory >&2; exit 3")
    error = failing(emulator, scenario, quick(start_attempts=1))
    assert "cannot allocate memory" in error.message
    assert error.retryable


def test_a_frpc_that_never_connects_is_given_up_with_what_it_printed(
    emulator: Any, scenario: Any, quick: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.tunnels.prime._CONNECT_SHARE", 0.1)  # 3 s
    wrap_frpc(emulator, "echo dialling; exec sleep 600")
    error = failing(emulator, scenario, quick(start_attempts=1))
    assert "dialling" in (error.detail or "")


# -- troubles of a tunnel that serves ----------------------------------------------------------------------------------


@pytest.mark.parametrize("for_ever", [False, True], ids=["for a moment", "for ever"])
def test_a_frpc_that_does_not_come_up_again(emulator: Any, scenario: Any, quick: Any, for_ever: bool) -> None:
    flag = Path(emulator.home) / "broken"
    wrap_frpc(emulator, f"[ -e {flag} ] && {'true' if for_ever else f'rm {flag}'} && echo out of sockets && exit 1")

    async def story(pool: TunnelPool) -> None:
        async with pool.lease(GATEWAY) as lease:
            flag.touch()
            emulator.kill_frpc(lease.tunnel_id)
            if for_ever:
                with pytest.raises(TunnelError, match="out of sockets"):
                    await lease.broken()
            else:
                await scenario.until(lambda: pool.report()[0]["restarts"] == 1, "the restart")
                assert pool.report()[0]["tunnel_id"] == lease.tunnel_id

    scenario(backend(), story, quick(restart_attempts=2))
    assert emulator.leaked() == NOTHING


def test_a_registration_that_only_the_platform_knows_to_be_gone_is_found_by_the_check(
    emulator: Any, scenario: Any
) -> None:
    async def story(pool: TunnelPool) -> None:
        async with pool.lease(GATEWAY) as lease:
            emulator.fault("get_tunnel", status=404)
            await pool.check()
            with pytest.raises(TunnelError, match="gone"):
                await lease.broken()

    scenario(backend(), story)
    assert emulator.leaked() == NOTHING


@pytest.mark.parametrize("status", ["expired", "terminated"])
def test_a_registration_that_has_ended_breaks_the_leases(emulator: Any, scenario: Any, status: str) -> None:
    async def story(pool: TunnelPool) -> None:
        async with pool.lease(GATEWAY) as lease:
            emulator.delete_tunnel(lease.tunnel_id, status=status)
            with pytest.raises(TunnelError, match="gone") as caught:
                await lease.broken()
            assert "tunnel is inactive" in (caught.value.detail or "")

    scenario(backend(), story)
    assert emulator.leaked() == NOTHING


def test_a_deletion_that_fails_is_tried_again_by_label(emulator: Any, scenario: Any) -> None:
    emulator.fault("delete_tunnel", status=500, times=1)

    async def story(pool: TunnelPool) -> None:
        async with pool.lease(GATEWAY):
            pass

    scenario(backend(), story)
    assert emulator.requests()["delete_tunnel"] == 2
    assert emulator.leaked() == NOTHING


def test_frpcs_that_ignore_sigterm_do_not_hold_up_the_workers_loop(emulator: Any, scenario: Any) -> None:
    """One is stopped, for which the SDK blocks a thread, and one is still starting, for which it blocks its loop."""
    wrap_frpc(emulator, "trap '' TERM", "grep -q 'localPort = 9090' \"$2\" && exec sleep 600")
    lags = [0.0]

    async def watch() -> None:
        while True:
            began = time.monotonic()
            await asyncio.sleep(0.005)
            lags.append(time.monotonic() - began - 0.005)

    def sleepers() -> list[psutil.Process]:
        found = []
        for child in psutil.Process().children():
            with suppress(psutil.NoSuchProcess):
                found += [child] if child.name() == "sleep" else []
        return found

    others = sleepers()

    async def story(pool: TunnelPool) -> None:
        async with pool.lease(GATEWAY):
            starting = asyncio.create_task(pool.lease("http://127.0.0.1:9090").__aenter__())
            await scenario.until(lambda: sleepers() != others, "the second frpc")
            watching = asyncio.create_task(watch())
            await pool.aclose()
            watching.cancel()
            with pytest.raises(TunnelError):
                await starting

    scenario(backend(), story)
    assert len(lags) > 100
    assert max(lags) < 4, "the SDK waits 5 s for each"
    assert [child for child in sleepers() if child not in others] == []
    assert emulator.leaked() == NOTHING


# -- secrets -----------------------------------------------------------------------------------------------------------


def test_what_frpc_prints_is_logged_without_its_token(
    emulator: Any, scenario: Any, caplog: pytest.LogCaptureFixture
) -> None:
    wrap_frpc(emulator, 'grep -E "auth.token|binding_secret" "$2"')
    caplog.set_level(logging.DEBUG)

    async def story(pool: TunnelPool) -> tuple[str, str]:
        async with pool.lease(GATEWAY) as lease:
            config = (Path(emulator.home) / ".prime/tunnels" / f"{lease.tunnel_id}.toml").read_text()
            (token,) = [line.split('"')[1] for line in config.splitlines() if line.startswith("auth.token")]
            emulator.delete_tunnel(lease.tunnel_id)
            with pytest.raises(TunnelError) as caught:
                await lease.broken()
            return token, f"{caught.value.message} {caught.value.detail}"

    token, said = scenario(backend(), story)
    frpcs = [record for record in caplog.records if record.name == "prime_tunnel.frpc"]
    assert [record for record in frpcs if "auth.token" in record.getMessage()]
    assert "auth.token" in said
    for secret in (token, emulator.api_key):
        assert secret
        assert secret not in caplog.text + said


def test_a_line_without_secrets_is_left_as_it_is() -> None:
    redactor = Redactor()
    redactor.add("hush", "")
    record = logging.LogRecord("frpc", logging.INFO, "", 0, "frpc %s: %s", ("t1", "login"), None)
    assert redactor.filter(record)
    assert (record.msg, record.args) == ("frpc %s: %s", ("t1", "login"))


# -- a killed worker ---------------------------------------------------------------------------------------------------

WORKER = """
import asyncio, sys
from workers.tunnels.pool import TunnelPool
from workers.tunnels.prime import PrimeBackend

async def main():
    pool = TunnelPool(PrimeBackend("celery@dead", ("fleet:test", "worker:celery@dead")))
    async with pool.lease("http://127.0.0.1:8080") as lease:
        print(lease.tunnel_id, flush=True)
        await asyncio.sleep(600)

asyncio.run(main())
"""


def test_a_killed_workers_frpc_dies_with_it_and_its_registration_is_found_by_label(
    emulator: Any, scenario: Any
) -> None:
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    worker = subprocess.Popen([sys.executable, "-c", WORKER], stdout=subprocess.PIPE, env=environ, text=True)
    try:
        assert worker.stdout is not None
        tunnel_id = worker.stdout.readline().strip()
        (pid,) = frpc_pids(emulator)
        assert lives(pid)
        worker.send_signal(signal.SIGKILL)
        worker.wait()
        wait_until(lambda: not lives(pid), what="the end of frpc")
    finally:
        worker.kill()
        worker.wait()
        worker.stdout.close()

    assert emulator.leaked()["tunnels"] == [tunnel_id]

    async def story(pool: TunnelPool) -> int:
        async with pool.lease(GATEWAY):
            (found,) = await pool.find("worker:celery@dead")
            assert 0 <= time.time() - (found.created_at or 0) < 60
            await pool.delete(found.id)
            await pool.delete(found.id)  # one that is gone already is deleted
            return len(await pool.find("worker:celery@dead"))

    assert scenario(backend(), story) == 0
    assert emulator.leaked() == NOTHING


def test_a_service_that_ignores_the_filter_of_labels_loses_no_tunnel_of_others(
    emulator: Any, scenario: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    list_all = TunnelClient.list_tunnels_page
    monkeypatch.setattr(TunnelClient, "list_tunnels_page", lambda self, labels, **options: list_all(self, **options))

    async def story(pool: TunnelPool) -> int:
        async with pool.lease(GATEWAY) as lease:
            assert lease.tunnel_id in emulator.leaked()["tunnels"]
            return len(await pool.find("worker:nobody"))

    assert scenario(backend(), story) == 0


def test_registrations_on_every_page_are_found(emulator: Any, scenario: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.tunnels.prime._PAGE", 1)

    async def story(pool: TunnelPool) -> int:
        async with pool.lease(GATEWAY), pool.lease("http://127.0.0.1:9090"):
            return len(await pool.find(LABELS[1]))

    assert scenario(backend(), story) == 2
    assert emulator.leaked() == NOTHING
