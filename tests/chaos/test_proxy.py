"""The proxy by which connections are broken: it must break what it says, and nothing else."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from chaos.proxy import Proxy
from workers.children import HOST

pytestmark = [pytest.mark.xdist_group("heavy")]


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server((HOST, 0)) as listener:
        listener.settimeout(10)
        yield listener


@pytest.fixture
def proxy(listener: socket.socket) -> Iterator[Proxy]:
    proxy = Proxy(listener.getsockname()[1])
    proxy.start()
    yield proxy
    proxy.stop()


def connected(proxy: Proxy, listener: socket.socket) -> tuple[socket.socket, socket.socket]:
    """Return both ends of a connection through the proxy."""
    ours = socket.create_connection((HOST, proxy.port), timeout=10)
    theirs, _ = listener.accept()
    theirs.settimeout(10)
    return ours, theirs


def test_what_is_sent_while_it_stalls_arrives_when_it_goes_on(proxy: Proxy, listener: socket.socket) -> None:
    ours, theirs = connected(proxy, listener)
    with ours, theirs:
        ours.sendall(b"before")
        assert theirs.recv(100) == b"before"
        proxy.stall()
        ours.sendall(b"meanwhile")
        theirs.settimeout(0.2)
        with pytest.raises(TimeoutError):
            theirs.recv(100)
        proxy.resume()
        theirs.settimeout(10)
        assert theirs.recv(100) == b"meanwhile"


def test_a_cut_resets_what_is_connected_and_serves_who_comes_next(proxy: Proxy, listener: socket.socket) -> None:
    ours, theirs = connected(proxy, listener)
    with ours, theirs:
        ours.sendall(b"x")
        theirs.recv(1)
        assert proxy.cut() == 1
        with pytest.raises(ConnectionResetError):
            ours.recv(1)
    ours, theirs = connected(proxy, listener)
    with ours, theirs:
        theirs.sendall(b"y")
        assert ours.recv(1) == b"y"


def test_who_calls_while_the_target_is_away_is_reset(proxy: Proxy, listener: socket.socket) -> None:
    listener.close()
    with pytest.raises(ConnectionResetError), socket.create_connection((HOST, proxy.port), timeout=10) as ours:
        ours.recv(1)
