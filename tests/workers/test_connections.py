"""The transport of all our HTTP: what can go wrong on the way has httpx's own names, and nothing is kept or held up."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest
from support import free_port

from workers.connections import ManyConnections, PlainClient

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


async def head(reader: asyncio.StreamReader) -> bytes:
    return await reader.readuntil(b"\r\n\r\n")


def against(serve: Serve, act: Callable[[httpx.AsyncClient, str], Awaitable[Any]], **options: Any) -> Any:
    """Run ``act`` with a client against a server that does ``serve`` with each connection."""

    async def scenario() -> Any:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        transport = ManyConnections(keepalive_expiry=options.pop("keepalive_expiry", 60.0))
        async with httpx.AsyncClient(transport=transport, timeout=30.0, **options) as client, asyncio.timeout(60):
            try:
                return await act(client, url)
            finally:
                server.close()

    return asyncio.run(scenario())


async def post(client: httpx.AsyncClient, url: str) -> httpx.Response:
    return await client.post(url, json={})


async def closes(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await head(reader)
    writer.close()


async def cuts(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await head(reader)
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf")
    await writer.drain()
    writer.transport.abort()


async def garbles(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await head(reader)
    writer.write(b"no HTTP at all\r\n\r\n")
    writer.close()


async def hangs(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read(-1)
    writer.close()


@pytest.mark.parametrize(
    ("serve", "error"),
    [(closes, httpx.RemoteProtocolError), (cuts, httpx.ReadError), (garbles, httpx.TransportError)],
)
def test_a_lost_connection_has_the_name_that_tells_whether_the_request_may_have_been_served(
    serve: Serve, error: type[Exception]
) -> None:
    with pytest.raises(error) as raised:
        against(serve, post)
    assert not isinstance(raised.value, httpx.ConnectTimeout | httpx.ConnectError)


def test_nobody_listening_is_a_connect_error() -> None:
    async def act(client: httpx.AsyncClient, _: str) -> None:
        await client.get(f"http://127.0.0.1:{free_port()}")

    with pytest.raises(httpx.ConnectError):
        against(hangs, act)


def test_a_server_that_says_nothing_is_a_read_timeout() -> None:
    with pytest.raises(httpx.ReadTimeout):
        against(hangs, lambda client, url: client.post(url, timeout=httpx.Timeout(30.0, read=0.1)))


def test_a_cancelled_request_closes_its_connection() -> None:
    arrived, closed = asyncio.Event(), asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await head(reader)
        arrived.set()
        await reader.read(-1)
        closed.set()
        writer.close()

    async def act(client: httpx.AsyncClient, url: str) -> None:
        request = asyncio.create_task(client.get(url))
        await arrived.wait()
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request
        await closed.wait()

    against(serve, act)


def test_a_chunk_of_a_stream_arrives_at_once() -> None:
    go_on = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await head(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nfirst\r\n")
        await writer.drain()
        await go_on.wait()
        writer.write(b"4\r\nlast\r\n0\r\n\r\n")
        writer.close()

    async def act(client: httpx.AsyncClient, url: str) -> list[bytes]:
        async with client.stream("GET", url) as response:
            chunks = []
            async for chunk in response.aiter_raw():
                chunks.append(chunk)
                go_on.set()
            return chunks

    assert against(serve, act) == [b"first", b"last"]


def test_connections_are_used_again_and_cookies_are_not() -> None:
    connections, heads = [], []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(writer)
        while not reader.at_eof():
            try:
                heads.append((await head(reader)).lower())
            except asyncio.IncompleteReadError:
                break
            writer.write(ANSWER.replace(b"\r\n\r\n", b"\r\nSet-Cookie: a=b\r\n\r\n"))
        writer.close()

    async def act(client: httpx.AsyncClient, url: str) -> None:
        for _ in range(3):
            client.cookies.clear()
            assert (await client.get(url)).text == "ok"

    against(serve, act)
    assert len(connections) == 1
    assert len(heads) == 3
    assert not any(b"cookie" in head for head in heads)


def test_300_requests_at_once_are_not_limited() -> None:
    waiting: list[asyncio.StreamWriter] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await head(reader)
        waiting.append(writer)
        if len(waiting) == 300:
            for each in waiting:
                each.write(ANSWER)

    async def act(client: httpx.AsyncClient, url: str) -> int:
        answers = await asyncio.gather(*(client.get(url) for _ in range(300)))
        return sum(answer.status_code == 200 for answer in answers)

    assert against(serve, act) == 300


def test_a_plain_client_sends_what_httpx_would_and_follows_a_redirect_but_keeps_no_cookie() -> None:
    seen: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        if request.url.path == "/old":
            return httpx.Response(307, headers={"location": "/new", "set-cookie": "a=1"})
        return httpx.Response(200, json={"path": request.url.path})

    async def main(kind: type[httpx.AsyncClient]) -> list[tuple[Any, ...]]:
        seen.clear()
        transport = httpx.MockTransport(answer)
        async with kind(transport=transport, headers={"x-own": "1"}, follow_redirects=True, timeout=3) as client:
            got = await client.get("http://h/a", params={"q": "x y"}, headers={"x-own": "2"})
            assert got.json() == {"path": "/a"}
            assert (await client.post("http://h/old", json={"b": 1}, timeout=None)).json() == {"path": "/new"}
        with pytest.raises(RuntimeError, match="closed"):
            await client.get("http://h/a")
        return [(r.method, str(r.url), r.headers.raw, r.content, r.extensions["timeout"]) for r in seen]

    theirs, ours = asyncio.run(main(httpx.AsyncClient)), asyncio.run(main(PlainClient))
    assert ours[0] == theirs[0]
    assert ours[1] == theirs[1]
    assert [each[1] for each in ours] == ["http://h/a?q=x+y", "http://h/old", "http://h/old", "http://h/new"]
    assert not any("cookie" in dict(each[2]) for each in ours[:3])
