"""One model call, from an agent's request to the turn that is recorded; whole or streamed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from workers.gateway.server import chat
from workers.gateway.server.chat import ChatRequest
from workers.gateway.server.errors import GatewayRefusal, UpstreamError, json_response
from workers.gateway.server.recorder import RecordedRollout, Turn
from workers.gateway.server.streaming import CompletionAssembler, EventSplitter, event_data
from workers.gateway.server.upstream import Upstream

logger = logging.getLogger(__name__)

#: nginx's status of a client that left before its answer; nobody reads it.
CLIENT_GONE = 499
_STREAM_HEADERS = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}


class ChatCalls:
    """Runs chat calls against one upstream."""

    def __init__(self, upstream: Upstream, *, ask_tokens: bool) -> None:
        self._upstream = upstream
        self._ask_tokens = ask_tokens

    async def answer(self, request: Request, rollout: RecordedRollout, body: bytes) -> Response:
        """Answer an agent's chat request; raises `GatewayRefusal`."""
        chat_request = chat.parse_request(body)
        sent = chat.upstream_fields(chat_request, rollout.registration, ask_tokens=self._ask_tokens)
        if chat_request.stream:
            return StreamedCall(self._upstream, rollout, chat_request, sent)
        return await self._whole(request, rollout, chat_request, sent)

    async def _whole(
        self, request: Request, rollout: RecordedRollout, chat_request: ChatRequest, sent: dict[str, object]
    ) -> Response:
        async with rollout.turn():
            if await request.is_disconnected():  # it left while it waited: its call would be spent on nobody
                return Response(status_code=CLIENT_GONE)
            turn = chat.begin_turn(rollout, chat_request, sent)
            try:
                answer = await self._upstream.complete(chat.PATH, sent)
                completion = chat.read_answer(answer)
            except UpstreamError as error:
                note_failure(rollout, error)
                raise
            rollout.record(chat.close_turn(turn, completion))
        return Response(answer, media_type="application/json")


class StreamedCall(Response):
    """An answer that passes the upstream's events on as they come, and records the same turn as a whole answer.

    Events pass unchanged, one by one, with two exceptions. The usage chunk, which has no choices and which the gateway
    asks for itself, reaches an agent only if it asked too, because ``chunk.choices[0]`` is how agents read a chunk. An
    upstream that fails in the middle is followed by one more event with ``error``, and no ``[DONE]``.
    """

    def __init__(
        self, upstream: Upstream, rollout: RecordedRollout, request: ChatRequest, sent: dict[str, object]
    ) -> None:
        super().__init__(headers=_STREAM_HEADERS)
        del self.headers["content-length"]
        self._upstream = upstream
        self._rollout = rollout
        self._request = request
        self._sent = sent
        self._assembler = CompletionAssembler()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Relay the stream until it ends or the agent leaves, whichever is first."""
        relay = asyncio.create_task(self._relay(scope, receive, send))
        gone = asyncio.create_task(_disconnected(receive))
        try:
            await asyncio.wait({relay, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
            relay.cancel()  # ends the upstream's call; the turn so far is recorded on the way out
            await asyncio.wait({relay, gone})
        if not relay.cancelled() and (error := relay.exception()):
            raise error

    async def _relay(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False
        try:
            async with self._rollout.turn():
                turn = chat.begin_turn(self._rollout, self._request, self._sent)
                async with self._upstream.stream(chat.PATH, self._sent) as chunks:
                    await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                    started = True
                    await self._pass_on_and_record(turn, chunks, send)
        except GatewayRefusal as error:
            if isinstance(error, UpstreamError):
                note_failure(self._rollout, error)
            if not started:
                await json_response(error.agents_body, error.status_code, dict(error.headers or {}))(
                    scope, receive, send
                )
                return
            if self._assembler.error is None:  # else the upstream's own event has told the agent
                event = b"data: " + orjson.dumps(error.agents_body) + b"\n\n"
                await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _pass_on_and_record(self, turn: Turn, chunks: AsyncIterator[bytes], send: Send) -> None:
        assembler = self._assembler
        try:
            await self._pass_on(chunks, send)
        except asyncio.CancelledError:  # the agent left: it has acted on what it got, so that is kept
            if assembler.finished or assembler.started:
                self._record(turn, partial=not assembler.finished)
            raise
        except UpstreamError:
            if not assembler.finished:
                raise
        if assembler.error is not None:
            message = f"The model's server failed in the middle of its stream: {assembler.error}"
            raise UpstreamError(502, message, "upstream_error")
        if not assembler.finished:
            message = f"The model's server ended its stream early, after {assembler.chunks} chunks."
            raise UpstreamError(502, message, "upstream_disconnected")
        self._record(turn)

    async def _pass_on(self, chunks: AsyncIterator[bytes], send: Send) -> None:
        splitter = EventSplitter()
        async for chunk in chunks:
            events = [event for event in splitter.feed(chunk) if self._takes(event)]
            if events:
                await send({"type": "http.response.body", "body": b"".join(events), "more_body": True})
        if (rest := splitter.rest()).strip() and self._takes(rest):
            await send({"type": "http.response.body", "body": rest.rstrip() + b"\n\n", "more_body": True})

    def _record(self, turn: Turn, *, partial: bool = False) -> None:
        self._rollout.record(chat.close_turn(turn, self._assembler.completion(), partial=partial))

    def _takes(self, event: bytes) -> bool:
        """Take an event into the record; return whether the agent gets it."""
        data = event_data(event)
        if data is None:
            return True
        try:
            is_usage = self._assembler.feed(data)
        except ValueError as error:
            raise chat.malformed(f"in its stream, {error}") from None
        return not is_usage or self._request.wants_usage


def note_failure(rollout: RecordedRollout, error: UpstreamError) -> None:
    """Remember a call that the upstream failed, and log it."""
    rollout.record_failure(error.status_code, error.message)
    logger.warning("model call of rollout %s failed: %s", rollout.id, error.message, extra={"rollout_id": rollout.id})


async def _disconnected(receive: Receive) -> None:
    """Return when the client has left; its request's body was read before."""
    while (await receive())["type"] != "http.disconnect":
        pass
