"""HTTP to a model server: whatever way its bytes are cut, the same stream comes out."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.gateway.server.connection import Answer, Connection, Connections, DroppedError, SilentError

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


class Transport:
    """What a connection writes to; it does nothing."""

    def write(self, data: bytes) -> None: ...

    def close(self) -> None: ...

    def abort(self) -> None: ...

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


def framed(parts: list[bytes]) -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


def answered(pieces: list[bytes], *, flow: bool = False) -> tuple[bytes, Connection, Answer]:
    """Feed a connection, and return the stream that came out, taken part by part or through a sink."""

    async def body() -> tuple[bytes, Connection, Answer]:
        connection = Connection(asyncio.get_running_loop(), 20)
        connection.connection_made(Transport())  # type: ignore[arg-type]
        answer = connection.send(b"request")
        found: list[bytes] = []

        async def read() -> None:
            await answer.head()
            while part := await answer.next():
                found.append(part)
                if flow:
                    await answer.flow(lambda data: found.append(data) is None)

        reading = asyncio.create_task(read())
        for piece in pieces:
            connection.data_received(piece)
            await asyncio.sleep(0)
        await asyncio.wait_for(reading, 20)
        return b"".join(found), connection, answer

    return asyncio.run(body())


def test_chunks_that_were_read_at_once_are_passed_on_at_once() -> None:
    events = [b"data: %d\n\n" % n for n in range(5)]
    chunks = [b"%x\r\n%s\r\n" % (len(event), event) for event in events]
    parts: list[bytes] = []

    async def body() -> None:
        connection = Connection(asyncio.get_running_loop(), 20)
        connection.connection_made(Transport())  # type: ignore[arg-type]
        answer = connection.send(b"request")
        connection.data_received(HEAD + chunks[0])
        await answer.head()
        parts.append(await answer.next())
        flow = asyncio.create_task(answer.flow(lambda data: parts.append(data) is None))
        await asyncio.sleep(0)
        connection.data_received(b"".join(chunks[1:3]))
        connection.data_received(chunks[3] + chunks[4] + b"0\r\n\r\n")
        await flow
        assert answer.ended

    asyncio.run(body())
    assert parts == [events[0], b"".join(events[1:3]), b"".join(events[3:])]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.binary(min_size=1, max_size=40), min_size=1, max_size=6), st.data(), st.booleans())
def test_a_stream_is_the_same_however_its_bytes_are_cut(parts: list[bytes], data: Any, flow: bool) -> None:
    whole = HEAD + framed(parts)
    cuts = sorted(data.draw(st.sets(st.integers(1, len(whole) - 1), max_size=8)))
    pieces = [whole[start:end] for start, end in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    found, connection, _ = answered(pieces, flow=flow)
    assert found == b"".join(parts)
    assert connection.release()  # all of it came, so the connection carries the next call


@pytest.mark.parametrize("flow", [False, True])
def test_a_chunk_a_piece_as_a_slow_stream_has_it(flow: bool) -> None:
    parts = [b"data: %d\n\n" % n for n in range(20)] + [b"5\r\nx\r\n", b"\r\n", b"0\r\n\r\n", b"a" * 300]
    pieces = [b"%x\r\n%s\r\n" % (len(part), part) for part in parts]
    found, connection, _ = answered([HEAD, *pieces, b"0\r\n\r\n"], flow=flow)
    assert found == b"".join(parts)
    assert connection.release()


def test_what_is_no_http_is_dropped() -> None:
    with pytest.raises(DroppedError):
        answered([b"SMTP ready\r\n"])
    with pytest.raises(DroppedError):
        answered([HEAD, b"zz\r\nabc\r\n"])
    with pytest.raises(DroppedError):
        answered([b"HTTP/1.1 200 OK\r\n" + b"x: yyyyyyyy\r\n" * 20_000])


def test_a_head_that_is_cut_in_two_chunks_is_read_by_the_parser() -> None:
    found, _, _ = answered([HEAD, b"3\r\nabc\r\n2\r\n", b"de\r\n0\r\n\r\n"])
    assert found == b"abcde"


def test_a_silent_server_is_given_up() -> None:
    async def body() -> None:
        connection = Connection(asyncio.get_running_loop(), 0.02)
        connection.connection_made(Transport())  # type: ignore[arg-type]
        with pytest.raises(SilentError):
            await connection.send(b"request").head()

    asyncio.run(asyncio.wait_for(body(), 20))


def whole(body: bytes, status: bytes = b"200 OK") -> bytes:
    return b"HTTP/1.1 %s\r\ncontent-length: %d\r\n\r\n%s" % (status, len(body), body)


def test_a_second_answer_to_one_request_is_not_mixed_into_the_first() -> None:
    async def body() -> None:
        connection = Connection(asyncio.get_running_loop(), 20)
        connection.connection_made(Transport())  # type: ignore[arg-type]
        answer = connection.send(b"request")
        connection.data_received(whole(b"first") + whole(b"second", b"500 No"))
        await asyncio.wait_for(answer.head(), 20)
        assert (answer.status, answer.body()) == (200, b"first")
        assert not connection.release()

    asyncio.run(body())


def test_an_answer_that_nobody_asked_for_is_not_the_next_requests() -> None:
    async def body() -> None:
        connection = Connection(asyncio.get_running_loop(), 20)
        connection.connection_made(Transport())  # type: ignore[arg-type]
        answer = connection.send(b"request")
        connection.data_received(whole(b"first"))
        await asyncio.wait_for(answer.head(), 20)
        assert connection.release()
        connection.data_received(b"HTTP/1.1 200 OK\r\n")
        assert connection.closed

    asyncio.run(body())


def test_a_server_that_switches_protocols_is_dropped_with_a_word() -> None:
    async def body() -> None:
        connection = Connection(asyncio.get_running_loop(), 20)
        connection.connection_made(Transport())  # type: ignore[arg-type]
        answer = connection.send(b"request")
        connection.data_received(b"HTTP/1.1 101 Switching\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n")
        with pytest.raises(DroppedError, match="another protocol"):
            await asyncio.wait_for(answer.head(), 20)

    asyncio.run(body())


def test_a_call_that_is_given_up_is_closed_also_when_the_server_takes_nothing() -> None:
    async def body(server: socket.socket) -> None:
        connections = Connections("127.0.0.1", server.getsockname()[1], None, timeout=60, connect=5, keepalive=3)
        answer = await connections.send(bytes(32 * 1024 * 1024))
        connections.release(answer)  # its agent has left
        async with asyncio.timeout(20):
            while answer.connection._transport.get_write_buffer_size():
                await asyncio.sleep(0.01)

    with socket.create_server(("127.0.0.1", 0)) as server:
        asyncio.run(body(server))
