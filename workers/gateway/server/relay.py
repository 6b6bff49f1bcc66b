"""One streamed model call: the upstream's events on their way to the agent, while both are there."""

from __future__ import annotations

import asyncio
import contextlib
import time

from workers.gateway.server.calls import ModelCall
from workers.gateway.server.errors import GatewayRefusal, UpstreamError
from workers.gateway.server.exchange import Exchange
from workers.gateway.server.guard import direct_writer
from workers.gateway.server.passing import ChatPassing, NativePassing, Passing, Translating
from workers.gateway.server.upstreams import Opened


class Relay:
    """Streams one call's answer; records the same turn as a whole answer would, before the agent has its last part.

    An agent that leaves ends the upstream's call; what it got is recorded as a partial turn. While the upstream is
    silent the agent gets keep-alives, also before its first byte: from the first of them on, a failure is an event in
    the stream and no status.
    """

    def __init__(self, call: ModelCall, exchange: Exchange) -> None:
        self._call = call
        self._exchange = exchange
        self._passing: Passing = (ChatPassing if call.passes else Translating)(call.call, call.dialect)
        self._recorded = False
        self._sent_at = time.monotonic()
        self._first = True
        self._write = direct_writer(exchange.scope)
        self._left = b""  # what the sink took and could not pass on

    async def run(self) -> None:
        """Relay the stream until it ends or the agent leaves, whichever is first."""
        relay = asyncio.ensure_future(self._relay())
        gone = asyncio.ensure_future(self._exchange.gone())
        silence = self._call.core.settings.keep_alive
        try:
            while not (await asyncio.wait({relay, gone}, timeout=silence, return_when=asyncio.FIRST_COMPLETED))[0]:
                if time.monotonic() - self._sent_at >= silence:
                    with contextlib.suppress(RuntimeError):  # the stream has ended, before a slow agent could take it
                        await self._send(self._call.dialect.keep_alive)
        finally:
            gone.cancel()
            relay.cancel()  # ends the upstream's call; the turn so far is recorded on the way out
            await asyncio.wait({relay, gone})
        if not relay.cancelled() and (error := relay.exception()):
            raise error

    async def _relay(self) -> None:
        call, exchange = self._call, self._exchange
        try:
            async with call.rollout.turn():
                call.rollout.begin(call.call.chat["messages"])
                await self._held(await call.open())
        except GatewayRefusal as error:
            if isinstance(error, UpstreamError):
                call.failed(error)
            if not exchange.started:
                raise
            if not self._passing.told:
                await self._send(self._passing.fail(error))
        await exchange.end_stream()

    async def _held(self, opened: Opened) -> None:
        """Pass on and record an open stream, and close it."""
        failure: UpstreamError | None = None
        try:
            if self._call.native is not None:
                self._passing = NativePassing(self._call.call, self._call.dialect, self._call.native)
            _check_stream(opened)
            await self._send(self._passing.begin())
            await self._pass_on(opened)
        except UpstreamError as error:
            failure = error
            raise
        except asyncio.CancelledError:  # the agent left: it has acted on what it got, so that is kept
            self._record_partial()
            raise
        finally:
            self._call.core.upstreams.close(opened, failure)

    async def _pass_on(self, opened: Opened) -> None:
        server, answer = opened.server, opened.answer
        try:
            while data := await server.next(answer):
                await self._forward(self._passing.take(data))
                if self._write is not None and not self._passing.done:
                    await answer.flow(self._sink)
                    left, self._left = self._left, b""
                    await self._forward(left)
            await self._forward(self._passing.rest())
        except UpstreamError:
            if not self._is_finished():
                raise
        if rest := self._finish():
            await self._send(rest)

    def _sink(self, data: bytes) -> bool:
        """Pass a part on at once; False when it takes more than that."""
        passing = self._passing
        out = passing.take(data)
        if passing.done or passing.failure is not None or self._write is None or not self._write(out):
            self._left = out
            return False
        if out:
            self._sent_at = time.monotonic()
        return True

    async def _forward(self, out: bytes) -> None:
        if self._first:
            self._first = False
            self._call.core.metrics.first_byte.observe(time.monotonic() - self._call.began)
        if self._passing.done and self._passing.failure is None:
            out += await self._finish_after(out)
        if out:
            await self._send(out)
        if self._passing.failure is not None:
            raise self._passing.failure

    def _finish(self) -> bytes:
        """Record the turn, once, and return what comes last; raises `UpstreamError` when it was no good end."""
        if self._recorded:
            return b""
        self._passing.check()
        self._recorded = True
        self._call.record(self._passing.payload(), answer_id=self._passing.answer_id)
        self._call.count(*self._passing.usage)
        return self._passing.end()

    async def _finish_after(self, out: bytes) -> bytes:
        try:
            return self._finish()
        except UpstreamError:
            if self._passing.told:
                await self._send(out)
            raise

    def _is_finished(self) -> bool:
        try:
            self._passing.check()
        except UpstreamError:
            return False
        return True

    def _record_partial(self) -> None:
        if self._recorded:
            return
        if self._is_finished():
            self._finish()
        elif (payload := self._passing.partial()) is not None:
            self._recorded = True
            self._call.record(payload, partial=True, answer_id=self._passing.answer_id)
            self._call.count(*self._passing.usage, outcome="partial")

    async def _send(self, data: bytes) -> None:
        if not self._exchange.started:
            await self._exchange.begin_stream()
        if data:
            self._sent_at = time.monotonic()
            await self._exchange.part(data)


def _check_stream(opened: Opened) -> None:
    if opened.answer.whole:
        kind = opened.answer.headers.get("content-type") or "no type"
        message = f"The model's server answered a streamed call with {kind}, not an event stream."
        raise UpstreamError(502, message, "upstream_malformed")
