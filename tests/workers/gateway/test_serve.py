"""The gateway as a process: its settings, what it refuses, how it starts and how it ends."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from pydantic import ValidationError

from workers.gateway.server import GatewaySettings, create_app, run_gateway
from workers.gateway.server.upstream import base_url


@pytest.mark.parametrize(
    ("given", "used"),
    [
        ("http://host:8000", "http://host:8000/v1"),
        ("http://host:8000/", "http://host:8000/v1"),
        ("http://host:8000/v1/", "http://host:8000/v1"),
        ("https://host/openai/v1", "https://host/openai/v1"),
    ],
)
def test_the_upstreams_v1_may_be_left_out(given: str, used: str) -> None:
    assert base_url(given) == used


@pytest.mark.parametrize("upstream", ["", "host:8000", "ftp://host", "http://"])
def test_an_upstream_that_is_no_url_is_named(upstream: str) -> None:
    with pytest.raises(ValueError, match="not an http"):
        create_app(upstream=upstream)


def test_settings_come_from_the_environment_and_hide_their_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"UPSTREAM": "http://u", "UPSTREAM_API_KEY": "secret-1", "CONTROL_KEY": "secret-2", "PORT": "81"}
    for name, value in values.items():
        monkeypatch.setenv(f"ROLLOUTS_GATEWAY_{name}", value)
    settings = GatewaySettings()
    assert (settings.upstream, settings.port, settings.host) == ("http://u", 81, "127.0.0.1")
    assert settings.control_key_value == "secret-2"
    assert "secret" not in repr(settings)


def test_settings_without_an_upstream_are_refused() -> None:
    with pytest.raises(ValidationError, match="upstream"):
        GatewaySettings()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "gateway.example"])
@pytest.mark.parametrize("key", [None, ""])
def test_an_open_address_without_a_control_key_is_refused(host: str, key: str | None) -> None:
    with pytest.raises(ValueError, match="ROLLOUTS_GATEWAY_CONTROL_KEY"):
        run_gateway(GatewaySettings(upstream="http://u", host=host, control_key=key))


def test_a_taken_port_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=f"cannot listen on 127.0.0.1:{port}"):
            run_gateway(GatewaySettings(upstream="http://u", port=port))


START = "from workers.gateway.server import *; run_gateway(GatewaySettings())"


@pytest.fixture
def process(model: Any, model_url: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A gateway in a process of its own, and its address as its startup line tells it."""
    upstream = model_url.replace("http://", "http://user:password@")
    settings = {"UPSTREAM": upstream, "PORT": "0", "CONTROL_KEY": "control-key", "SHUTDOWN_GRACE": "20"}
    environment = os.environ | {f"ROLLOUTS_GATEWAY_{name}": value for name, value in settings.items()}
    command = [sys.executable, "-c", START]
    with subprocess.Popen(command, stderr=subprocess.PIPE, env=environment, text=True) as gateway:
        assert gateway.stderr is not None
        line = gateway.stderr.readline()
        assert "password" not in line
        assert model_url.removeprefix("http://") in line
        assert "chat/completions" in line
        found = re.search(r"on (http://127\.0\.0\.1:\d+) with a control key", line)
        assert found, line
        yield gateway, found[1]
        gateway.kill()


def test_a_process_serves_and_ends_the_calls_in_flight_before_it_stops(
    process: tuple[subprocess.Popen[str], str], model: Any, answer_of: Callable[..., Any]
) -> None:
    gateway, url = process
    asked, released = threading.Event(), threading.Event()

    def held(_: object) -> Any:
        asked.set()
        assert released.wait(20)
        return answer_of("in time")

    model.will(held)
    body = {"messages": [{"role": "user", "content": "x"}]}
    with httpx.Client(base_url=f"{url}/v1/rollouts/r-1/", timeout=20) as client, ThreadPoolExecutor(1) as pool:
        headers = {"authorization": "Bearer control-key"}
        assert client.post("register", json={"model": "m"}, headers=headers).status_code == 200
        chat = pool.submit(client.post, "chat/completions", json=body)
        assert asked.wait(20)
        gateway.send_signal(signal.SIGTERM)
        released.set()
        assert chat.result(20).json()["choices"][0]["message"]["content"] == "in time"
    assert gateway.wait(20) in {0, -signal.SIGTERM}
    assert model.headers[0]["authorization"].startswith("Basic ")  # the upstream URL's user and password
    assert gateway.stderr is not None
    assert "Traceback" not in gateway.stderr.read()


def test_control_c_ends_it_without_a_traceback(process: tuple[subprocess.Popen[str], str]) -> None:
    gateway, url = process
    assert httpx.get(f"{url}/readyz", timeout=20).status_code == 200
    gateway.send_signal(signal.SIGINT)
    assert gateway.wait(20) == 0
    assert gateway.stderr is not None
    assert gateway.stderr.read() == ""
