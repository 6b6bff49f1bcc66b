"""Choosing a model server for a call: sticky, least loaded, healthy; and what happens when there is none."""

from __future__ import annotations

import asyncio
import itertools
import logging
import ssl
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from workers.gateway.server.connection import Answer
from workers.gateway.server.dialects import Native
from workers.gateway.server.errors import UpstreamError, busy
from workers.gateway.server.upstream import ModelServer

logger = logging.getLogger(__name__)

#: What a server is asked: path and body.
Request = Callable[[ModelServer], tuple[str, bytes]]


@dataclass(frozen=True)
class UpstreamLimits:
    """``per_server`` calls run at a server at one time; ``waiting`` more wait, each at most ``wait`` seconds."""

    per_server: int = 2048
    waiting: int = 4096
    wait: float = 60.0
    health_interval: float = 5.0


class Sticky(Protocol):
    """What remembers its server: a rollout, whose prefix that server has cached."""

    upstream: Any


@dataclass(frozen=True, slots=True)
class Opened:
    """A call that is being answered."""

    server: ModelServer
    answer: Answer


@dataclass(eq=False, slots=True)
class _Waiting:
    """A call that waits for room, which it is given by its ``turn``."""

    rollout: Sticky
    tried: set[ModelServer]
    turn: asyncio.Future[ModelServer]


class Upstreams:
    """The model servers.

    A rollout stays with the server that has its prefix cached, as long as that one is healthy and has room; otherwise
    it goes to the healthy one with the fewest calls. A call is sent to another server only if nothing of it was sent,
    or (once, to the same) if the connection broke before any answer. When no server has room, calls wait in line, and
    beyond `UpstreamLimits.waiting` they are told to come back (429 with Retry-After). When none is healthy, all are
    tried: there is nothing to lose.
    """

    def __init__(
        self,
        urls: list[str],
        api_key: str | None,
        timeout: float,
        *,
        ranks: int = 1,
        limits: UpstreamLimits | None = None,
        native: Mapping[str, Mapping[str, Native]] | None = None,
    ) -> None:
        secure = any(url.strip().startswith("https") for url in urls)
        tls = ssl.create_default_context() if secure else None  # one for all connections: it takes 20 ms to make
        self.servers = [
            ModelServer(url, api_key, timeout, rank=rank, tls=tls, native=(native or {}).get(url, {}))
            for url in urls
            for rank in (range(ranks) if ranks > 1 else [None])
        ]
        self._limits = limits or UpstreamLimits()
        self._waiting: deque[_Waiting] = deque()
        # Those that were refused have waited before, and may use what the others may not: a server that is left alone.
        self._refused: deque[_Waiting] = deque()

    @property
    def in_flight(self) -> int:
        """Calls that run now."""
        return sum(server.in_flight for server in self.servers)

    @property
    def waiting(self) -> int:
        """Calls that wait for room."""
        return len(self._waiting) + len(self._refused)

    async def open(self, rollout: Sticky, request: Request) -> Opened:
        """Make a call at one of the servers; give the answer back with `close`. Raises `UpstreamError`."""
        tried: set[ModelServer] = set()
        while True:
            server = await self._take(rollout, tried)
            try:
                answer = await server.post(*request(server))
            except UpstreamError as error:
                server.note(error)
                self._left(server)
                tried.add(server)
                if error.unsent and len(tried) < len(self.servers):
                    logger.info("a call goes to another model server: %s", error.message)
                    continue
                raise
            except BaseException:
                self._left(server)
                raise
            rollout.upstream = server
            return Opened(server, answer)

    def close(self, opened: Opened, error: UpstreamError | None = None) -> None:
        """End a call; ``error`` is what went wrong after its answer began."""
        opened.server.release(opened.answer)
        opened.server.note(error)
        self._left(opened.server)

    async def check(self) -> None:
        """Raise `UpstreamError` unless at least one server answers."""
        failure: UpstreamError | None = None
        for server in self.servers:
            try:
                await server.check()
            except UpstreamError as error:
                failure = error
            else:
                return
        if failure is not None:
            raise failure

    async def watch(self) -> None:
        """Ask each server for its health, for ever: a silent one is ejected, one that answers again returns."""
        while True:
            await asyncio.sleep(self._limits.health_interval)
            if len(self.servers) > 1:
                await asyncio.gather(*(self._look_at(server) for server in self.servers))

    def aclose(self) -> None:
        """Close idle connections."""
        for server in self.servers:
            server.close()

    async def _look_at(self, server: ModelServer) -> None:
        was = server.ejected
        try:
            await server.check()
        except UpstreamError as error:
            server.failures += 1
            server.ejected = server.failures >= 3
            if server.ejected and not was:
                logger.warning("model server %s is left alone: %s", server.name, error.message)
        else:
            server.failures, server.ejected = 0, False
            if was:
                logger.info("model server %s answers again", server.name)
        self._give_room()

    def _choose(self, sticky: Any, tried: set[ModelServer]) -> ModelServer | None:
        """Return a server with room; None when those that might be asked have none."""
        limit = self._limits.per_server
        if sticky is not None and not sticky.ejected and sticky.in_flight < limit and sticky not in tried:
            return sticky  # type: ignore[no-any-return]
        left = [server for server in self.servers if server not in tried]
        healthy = [server for server in left if not server.ejected] or left
        best = min(healthy, key=lambda server: server.in_flight)
        return best if best.in_flight < limit else None

    async def _take(self, rollout: Sticky, tried: set[ModelServer]) -> ModelServer:
        """Take room at a server, waiting in line for it; whoever has it gives it back with `_left`."""
        if server := self._choose(rollout.upstream, tried):
            server.in_flight += 1
            return server
        if self.waiting >= self._limits.waiting:
            raise busy(f"{self.waiting} calls wait for a model server already.", 1.0)
        caller = _Waiting(rollout, tried, asyncio.get_running_loop().create_future())
        line = self._refused if tried else self._waiting
        line.append(caller)
        try:
            async with asyncio.timeout(self._limits.wait):
                return await caller.turn
        except BaseException as error:
            if caller.turn.cancelled():
                line.remove(caller)
            else:  # it was given room in the moment in which it went
                self._left(caller.turn.result())
            if isinstance(error, TimeoutError):
                raise busy(f"no model server had room for {self._limits.wait:g} s.", 5.0) from None
            raise

    def _left(self, server: ModelServer) -> None:
        server.in_flight -= 1
        self._give_room()

    def _give_room(self) -> None:
        """Give all the room that there is: one call that ended well may have told that its server is well again."""
        while self._give_one():
            pass

    def _give_one(self) -> bool:
        """Give room to the first in line that can use what there is: a call is not made twice at one server."""
        left_out: list[set[ModelServer]] = []  # there is no room for who has tried these, and they may be many
        for caller in itertools.chain(self._refused, self._waiting):
            if caller.turn.done() or caller.tried in left_out:
                continue
            if server := self._choose(caller.rollout.upstream, caller.tried):
                server.in_flight += 1
                caller.turn.set_result(server)
                (self._refused if caller.tried else self._waiting).remove(caller)
                return True
            if not caller.tried:  # then there is none for those behind it either, and the line may be long
                return False
            left_out.append(caller.tried)
        return False
