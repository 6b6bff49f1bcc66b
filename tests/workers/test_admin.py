"""The admin port: probes that tell the truth, metrics for who has the token, and nothing that holds up the worker."""

from __future__ import annotations

import errno
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from socketserver import TCPServer

import httpx
import pytest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector
from support import free_port, wait_until

from workers import admin
from workers.admin import AdminServer, Health, probe
from workers.registry import ConfigurationError

TOKEN = "a-token-of-the-operator"


class Numbers(Collector):
    """A metric that can be told to fail."""

    fails = False

    def collect(self) -> Iterator[GaugeMetricFamily]:
        if self.fails:
            raise RuntimeError("no numbers today")
        yield GaugeMetricFamily("rollouts_of_the_test", "A number.", value=3)


class Worker:
    """What the server asks."""

    def __init__(self) -> None:
        self.live = Health(True, "ok")
        self.ready = Health(True, "running")
        self.numbers = Numbers()

    @contextmanager
    def served(self, token: str | None = None) -> Iterator[str]:
        server = AdminServer("127.0.0.1", free_port(), token, live=lambda: self.live, ready=lambda: self.ready)
        server.collect(self.numbers)
        with server:
            yield f"http://127.0.0.1:{server.port}"


@pytest.fixture
def worker() -> Worker:
    return Worker()


def test_probes_say_how_the_worker_is(worker: Worker) -> None:
    with worker.served(TOKEN) as url:
        assert httpx.get(f"{url}/livez").status_code == 200
        worker.live, worker.ready = Health(False, "hung"), Health(False, "draining")
        answers = [httpx.get(f"{url}{path}") for path in ("/livez", "/readyz")]

    assert [(answer.status_code, answer.text) for answer in answers] == [(503, "hung\n"), (503, "draining\n")]


def test_metrics_want_the_token(worker: Worker) -> None:
    with worker.served(TOKEN) as url:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": f"Basic {TOKEN}"}):
            refused = httpx.get(f"{url}/metrics", headers=headers)
            assert refused.status_code == 401
            assert "rollouts_of_the_test" not in refused.text
        answer = httpx.get(f"{url}/metrics", headers={"Authorization": f"Bearer {TOKEN}"})

    assert answer.status_code == 200
    assert "rollouts_of_the_test 3.0" in answer.text


def test_on_loopback_metrics_need_no_token(worker: Worker) -> None:
    with worker.served() as url:
        assert "rollouts_of_the_test 3.0" in httpx.get(f"{url}/metrics").text
        assert httpx.get(f"{url}/secrets").status_code == 404


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "worker.example"])
def test_no_metrics_for_everybody(worker: Worker, host: str) -> None:
    with pytest.raises(ConfigurationError, match="ROLLOUTS_ADMIN_TOKEN"):
        AdminServer(host, 9091, None, live=lambda: worker.live, ready=lambda: worker.ready)

    AdminServer(host, 9091, TOKEN, live=lambda: worker.live, ready=lambda: worker.ready)
    AdminServer(host, 0, None, live=lambda: worker.live, ready=lambda: worker.ready)


def test_a_scrape_that_fails_is_told_and_ends_nothing(worker: Worker, caplog: pytest.LogCaptureFixture) -> None:
    with worker.served() as url:
        worker.numbers.fails = True
        assert httpx.get(f"{url}/metrics").status_code == 500
        assert "no numbers today" in caplog.text
        assert httpx.get(f"{url}/livez").status_code == 200


def test_a_port_in_use_costs_the_probes_and_not_the_worker(worker: Worker, caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with AdminServer("127.0.0.1", port, None, live=lambda: worker.live, ready=lambda: worker.ready) as server:
            assert server.port == 0

    assert f"ROLLOUTS_ADMIN_PORT={port}" in caplog.text


def test_silent_clients_neither_fill_the_worker_with_threads_nor_hold_up_its_end(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admin._Handler, "timeout", 80.0)
    with ExitStack() as stack:
        with worker.served() as url:
            address = ("127.0.0.1", int(url.rpartition(":")[2]))
            silent = [stack.enter_context(socket.create_connection(address)) for _ in range(2 * admin._MOST_REQUESTS)]
            hung_up = silent[admin._MOST_REQUESTS :]
            wait_until(lambda: all(_is_closed(client) for client in hung_up), what="those too many to be hung up on")
            begin = time.monotonic()
        assert time.monotonic() - begin < 40, "it waited for them"


def test_clients_that_send_a_byte_now_and_then_lose_their_places(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admin, "_PATIENCE", 0.5)
    ended = threading.Event()

    def drip(clients: list[socket.socket]) -> None:
        while not ended.wait(0.05):
            for client in clients:
                with suppress(OSError):
                    client.sendall(b"G")

    with ExitStack() as stack, worker.served() as url:
        port = int(url.rpartition(":")[2])
        slow = [stack.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(admin._MOST_REQUESTS)]
        dripping = threading.Thread(target=drip, args=[slow])
        dripping.start()
        stack.callback(dripping.join)
        stack.callback(ended.set)
        wait_until(lambda: probe("127.0.0.1", port, "/livez").ok, what="an answer to a probe")


def test_a_process_without_a_free_descriptor_does_not_spin(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client waits in the kernel's queue, so the listener is said to be readable again at once."""
    tried: list[float] = []

    def accept(_: object) -> None:
        tried.append(time.monotonic())
        raise OSError(errno.EMFILE, "Too many open files")

    with worker.served() as url, socket.socket() as client:
        with monkeypatch.context() as patch:
            patch.setattr(TCPServer, "get_request", accept)
            client.connect(("127.0.0.1", int(url.rpartition(":")[2])))
            wait_until(lambda: len(tried) >= 3)
        assert tried[2] - tried[0] > admin._ACCEPT_PAUSE
        assert httpx.get(f"{url}/livez").status_code == 200


def test_nobody_is_asked_for_the_name_of_the_host(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(*_: object) -> str:
        raise AssertionError("a name server was asked")

    monkeypatch.setattr(socket, "getfqdn", ask)
    with worker.served() as url:
        assert httpx.get(f"{url}/livez").status_code == 200


def _is_closed(client: socket.socket) -> bool:
    client.setblocking(False)
    try:
        return client.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True


def test_the_command_asks_the_worker_of_this_host(worker: Worker) -> None:
    with worker.served(TOKEN) as url:
        port = int(url.rpartition(":")[2])
        assert probe("127.0.0.1", port, "/livez") == Health(True, "ok")
        worker.ready = Health(False, "draining")
        assert probe("0.0.0.0", port, "/readyz") == Health(False, "draining")

    assert not probe("127.0.0.1", port, "/livez").ok
    assert "no answer" in probe("127.0.0.1", port, "/livez").words
