"""Several model servers: who gets a call, what happens when one is gone, and when all are full."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from support import free_port, wait_until

from workers.gateway.server import create_app
from workers.gateway.server.upstreams import UpstreamLimits

QUICK = UpstreamLimits(health_interval=0.05)
UNWATCHED = UpstreamLimits(health_interval=3600)


@pytest.fixture
def servers(serve: Callable[[Any], Any], model: Any) -> list[Any]:
    """Three scripted model servers of the test's own."""
    models = [type(model)() for _ in range(3)]
    for each in models:
        each.url = serve(each.app).url
    return models


def asked(models: list[Any]) -> list[int]:
    return [len(each.requests) for each in models]


def test_a_rollout_stays_with_its_server(
    gateway_with: Callable[..., Any], servers: list[Any], answer_of: Callable[..., Any]
) -> None:
    gateway = gateway_with(upstream=[each.url for each in servers])
    first, second = gateway.register(), gateway.register()
    released = threading.Event()
    for each in servers:
        each.will(lambda _: (released.wait(20), answer_of())[1])
    with ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(gateway.chat, first)]
        wait_until(lambda: sum(asked(servers)) == 1)
        calls.append(pool.submit(gateway.chat, second))  # its server is another, as the first has a call to answer
        wait_until(lambda: sum(asked(servers)) == 2)
        released.set()
        assert [call.result(20).status_code for call in calls] == [200, 200]
    for each in servers:
        each.answers.clear()
    before = asked(servers)
    assert sorted(before) == [0, 1, 1]
    for _ in range(3):  # all servers are free now, and yet each goes to its own
        assert (gateway.chat(first).status_code, gateway.chat(second).status_code) == (200, 200)
    assert asked(servers) == [4 * count for count in before]


def test_new_rollouts_go_to_the_server_with_the_fewest_calls(
    gateway_with: Callable[..., Any], servers: list[Any], answer_of: Callable[..., Any]
) -> None:
    gateway = gateway_with(upstream=[each.url for each in servers])
    released = threading.Event()

    def held(_: object) -> Any:
        assert released.wait(20)
        return answer_of()

    for each in servers:
        each.will(held, held)
    with ThreadPoolExecutor(6) as pool:
        calls = []
        for n in range(6):
            calls.append(pool.submit(gateway.chat, gateway.register()))
            wait_until(lambda n=n: sum(asked(servers)) == n + 1)
        assert asked(servers) == [2, 2, 2]
        released.set()
        assert {call.result(20).status_code for call in calls} == {200}


def test_a_call_whose_server_is_gone_is_made_at_another(gateway_with: Callable[..., Any], servers: list[Any]) -> None:
    gateway = gateway_with(upstream=[f"http://127.0.0.1:{free_port()}", servers[0].url])
    rollout = gateway.register()
    for stream in (False, True, False):
        assert gateway.chat(rollout, stream=stream).status_code == 200
    assert gateway.trajectory(rollout)["failed_calls"] == 0
    assert asked(servers[:1]) == [3]


@pytest.mark.parametrize(
    "broken", [b"HTTP/1.1 500 No\r\ncontent-length: 0\r\n\r\n", b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{", b""]
)
def test_a_call_that_a_server_may_have_answered_is_made_at_no_other(
    gateway_with: Callable[..., Any], servers: list[Any], serve_raw: Callable[..., Any], broken: bytes
) -> None:
    """It was sampled, perhaps: a second answer would not be the one that the first server counts and caches."""
    listener, thread = serve_raw([broken, broken])  # unanswered, it is sent to the same server once more
    with listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        gateway = gateway_with(upstream=[url, servers[0].url], limits=UNWATCHED)  # else a check takes an answer
        assert gateway.chat(gateway.register()).status_code == 502
        if broken:
            socket.create_connection(listener.getsockname()).close()  # lets the thread end
        thread.join(10)
    assert asked(servers[:1]) == [0]


def test_a_server_that_fails_is_left_alone_until_it_answers_again(
    gateway_with: Callable[..., Any], servers: list[Any], serve: Callable[[Any], Any]
) -> None:
    with socket.socket() as back:
        back.bind(("127.0.0.1", 0))  # nobody else gets the port, and connections are refused until it listens
        gateway = gateway_with(upstream=[f"http://127.0.0.1:{back.getsockname()[1]}", servers[0].url], limits=QUICK)

        def healthy() -> list[bool]:
            return [each["healthy"] for each in gateway.get("/admin/status").json()["upstreams"]]

        def answer() -> None:
            while True:
                try:
                    connection, _ = back.accept()
                except OSError:  # the test is over
                    return
                with connection, contextlib.suppress(OSError):
                    connection.recv(65536)
                    connection.sendall(b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\n{}")

        wait_until(lambda: healthy() == [False, True], what="the health checks")
        back.listen()
        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        wait_until(lambda: healthy()[0], what="the server's return")
        back.shutdown(socket.SHUT_RDWR)
        thread.join(20)


def test_when_no_server_is_healthy_all_are_tried(gateway_with: Callable[..., Any], servers: list[Any]) -> None:
    ports = [free_port(), free_port()]
    gateway = gateway_with(upstream=[f"http://127.0.0.1:{port}" for port in ports], limits=QUICK)
    wait_until(lambda: not any(each["healthy"] for each in gateway.get("/admin/status").json()["upstreams"]))
    answer = gateway.chat(gateway.register())
    assert (answer.status_code, answer.json()["error"]["type"]) == (502, "upstream_unreachable")
    assert gateway.get("/readyz").status_code == 503


def test_data_parallel_ranks_are_told_and_kept(gateway_with: Callable[..., Any], servers: list[Any]) -> None:
    gateway = gateway_with(upstream=servers[0].url, data_parallel_size=4)
    rollout = gateway.register()
    for _ in range(3):
        gateway.chat(rollout)
    assert len({headers["x-data-parallel-rank"] for headers in servers[0].headers}) == 1
    names = [each["upstream"] for each in gateway.get("/admin/status").json()["upstreams"]]
    assert [name.rpartition(" ")[2] for name in names] == ["0", "1", "2", "3"]


def test_calls_wait_for_room_and_beyond_the_line_they_are_told_to_come_back(
    gateway_with: Callable[..., Any], model: Any, model_url: str, answer_of: Callable[..., Any]
) -> None:
    gateway = gateway_with(upstream=model_url, limits=UpstreamLimits(per_server=1, waiting=1))
    released = threading.Event()

    def held(_: object) -> Any:
        assert released.wait(20)
        return answer_of()

    model.will(held)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(gateway.chat, gateway.register())
        wait_until(lambda: model.running == 1)
        second = pool.submit(gateway.chat, gateway.register())
        wait_until(lambda: "rollouts_gateway_waiting 1.0" in gateway.get("/metrics").text)
        third = gateway.chat(gateway.register())
        assert (third.status_code, third.headers["retry-after"]) == (429, "1")
        assert third.json()["error"]["code"] == "gateway_busy"
        released.set()
        assert (first.result(20).status_code, second.result(20).status_code) == (200, 200)


def test_a_call_that_waits_too_long_for_room_is_told_to_come_back(
    gateway_with: Callable[..., Any], model: Any, model_url: str, answer_of: Callable[..., Any]
) -> None:
    gateway = gateway_with(upstream=model_url, limits=UpstreamLimits(per_server=1, wait=0.05))
    released = threading.Event()
    model.will(lambda _: (released.wait(20), answer_of())[1])
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(gateway.chat, gateway.register())
        wait_until(lambda: model.running == 1)
        assert gateway.chat(gateway.register()).status_code == 429
        released.set()
        assert first.result(20).status_code == 200
    assert gateway.chat(gateway.register()).status_code == 200  # nobody waits in its place


def test_connections_are_kept_for_the_next_call(serve: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection for each call costs as much as the rest of it."""
    monkeypatch.setattr("workers.gateway.server.upstream.KEEPALIVE_EXPIRY", 600)  # however long a call takes here
    served: list[int] = []

    async def body() -> None:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            served.append(0)
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0])
                await reader.readexactly(length)
                served[-1] += 1
                content = b'{"choices":[{"message":{"role":"assistant","content":"x"},"finish_reason":"stop"}]}'
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(content), content))

        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            app = create_app(upstream=f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
            url = (await asyncio.to_thread(serve, app)).url
            async with httpx.AsyncClient(base_url=url, timeout=20) as client:
                await client.post("/v1/rollouts/r/register", json={"model": "m"})
                for _ in range(5):
                    chat = {"messages": [{"role": "user", "content": "x"}]}
                    assert (await client.post("/v1/rollouts/r/chat/completions", json=chat)).status_code == 200

    asyncio.run(body())
    assert served == [5]
