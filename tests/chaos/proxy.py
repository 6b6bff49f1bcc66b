"""A TCP proxy on loopback, in a thread of its own, whose connections can be cut and stalled."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from collections.abc import Awaitable
from contextlib import suppress
from typing import TypeVar

from workers.children import HOST, free_port

T = TypeVar("T")
_CALL_LIMIT = 10.0


class Proxy:
    """Forwards connections to ``target`` (a port of this machine), also those made while it is away: they are reset.

    A stalled proxy holds back what either side sends, and loses nothing of it: as a network does that drops packets for
    a while.
    """

    def __init__(self, target: int) -> None:
        self.target = target
        self.port = free_port()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    def start(self) -> None:
        self._thread.start()
        self._server = self._call(asyncio.start_server(self._accepted, HOST, self.port))

    def stop(self) -> None:
        async def end() -> None:
            assert self._server is not None
            self._server.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

        if self._thread.is_alive():
            self._call(end())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(_CALL_LIMIT)
            self._loop.close()

    def cut(self) -> int:
        """Reset every connection; returns how many (each has two ends). New ones are served."""

        async def abort() -> int:
            writers = list(self._writers)
            for writer in writers:
                _reset(writer)
            return len(writers) // 2

        return self._call(abort())

    def stall(self) -> None:
        """Forward nothing from now on."""

        async def shut() -> None:
            self._flowing.clear()

        self._call(shut())

    def resume(self) -> None:
        """Forward what was held back, and everything after it."""
        self._loop.call_soon_threadsafe(self._flowing.set)

    def _call(self, work: Awaitable[T]) -> T:
        async def run() -> T:
            return await work

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(_CALL_LIMIT)

    def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = self._loop.create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ours = {writer}
        self._writers.add(writer)
        try:
            theirs, to_target = await asyncio.open_connection(HOST, self.target)
            ours.add(to_target)
            self._writers.add(to_target)
            pumps = [self._loop.create_task(self._pump(*ends)) for ends in ((reader, to_target), (theirs, writer))]
            try:
                await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for pump in pumps:
                    pump.cancel()
                await asyncio.gather(*pumps, return_exceptions=True)
        except OSError:
            pass  # the target is away
        finally:
            for each in ours:
                self._writers.discard(each)
                _reset(each)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            await self._flowing.wait()
            writer.write(data)
            await writer.drain()


def _reset(writer: asyncio.StreamWriter) -> None:
    """Break a connection off: its peer is told of an error and not of an end."""
    with suppress(OSError):  # it is closed already
        sock = writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
