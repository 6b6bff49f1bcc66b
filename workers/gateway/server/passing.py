"""What becomes of a stream's bytes between the upstream and the agent: passed, or translated; and kept for the record.

Three ways with the same methods: `ChatPassing` (chat to chat, bytes untouched), `Translating` (chat to another
dialect) and `NativePassing` (another dialect to itself).
"""

from __future__ import annotations

from typing import Any, Protocol

import orjson

from workers.gateway.server.answers import check_completion, ended_early, malformed, stream_failed, usage_counts
from workers.gateway.server.dialects import Call, Dialect, Native, StreamTranslator
from workers.gateway.server.dialects.chat import wants_usage
from workers.gateway.server.errors import GatewayRefusal, UpstreamError
from workers.gateway.server.packing import pack
from workers.gateway.server.scan import scan_chunk
from workers.gateway.server.streaming import DONE, CompletionAssembler, EventSplitter, event_data
from workers.gateway.server.turns import Payload

#: Bytes of a stream's chunks that are kept as they are; more are compressed, to a tenth. Small, because the streams of
#: a batch come to the end of a block at one time, and the event loop has no time for all of them at once.
_BLOCK = 16 * 1024
#: No chunk is as short as this, and ``[DONE]`` is.
_SHORT = 32


class Passing(Protocol):
    """One stream on its way.

    ``done``: the upstream has said all there is to say. ``failure``: from here on what it says cannot be used.
    ``told``: its own last event tells the agent that it failed. ``usage``: prompt and completion tokens, by its count.
    ``answer_id``: the answer's, where it has one of the upstream's.
    """

    done: bool
    failure: UpstreamError | None
    told: bool
    usage: tuple[int, int]
    answer_id: str | None

    def begin(self) -> bytes:
        """Return what the agent gets first."""
        ...

    def take(self, data: bytes) -> bytes:
        """Take in bytes as they came, and return the agent's; sets ``failure``."""
        ...

    def rest(self) -> bytes:
        """As `take`, at the stream's end: a last event whose blank line is missing."""
        ...

    def check(self) -> None:
        """Raise `UpstreamError` unless the stream came to a good end."""
        ...

    def end(self) -> bytes:
        """Return what the agent gets last."""
        ...

    def fail(self, refusal: GatewayRefusal) -> bytes:
        """Return what tells the agent that the stream failed; not asked for when it was ``told``."""
        ...

    def payload(self) -> Payload:
        """Return the whole answer for the record."""
        ...

    def partial(self) -> Payload | None:
        """Return what came until the agent left; None when that is nothing."""
        ...


class Lines:
    """A stream's chunks for the record, a line each; a long stream's are compressed as they come."""

    def __init__(self) -> None:
        self.count = 0
        self._frames: list[bytes] = []
        self._lines: list[bytes] = []
        self._size = 0

    def add(self, data: bytes) -> None:
        """Keep a chunk; JSON has line breaks only where a space would do."""
        self._lines.append(data.replace(b"\n", b" ") if b"\n" in data else data)
        self.count += 1
        self._size += len(data)
        if self._size > _BLOCK:
            self._frames.append(pack(b"\n".join([*self._lines, b""])))
            self._lines, self._size = [], 0

    def payload(self) -> Payload:
        """Return all of them."""
        tail = b"\n".join(self._lines)
        if not self._frames:
            return Payload(tail, chunks=True)
        return Payload(b"".join([*self._frames, pack(tail)]), chunks=True, packed=True)


class ChatPassing:
    """Passes events unchanged, with one exception.

    The usage chunk, which has no choices and which the gateway asks for itself, reaches an agent only if it asked too,
    because ``chunk.choices[0]`` is how agents read a chunk.
    """

    def __init__(self, call: Call, dialect: Dialect) -> None:
        self.done = False
        self.failure: UpstreamError | None = None
        self.told = False
        self.usage = (0, 0)
        self.answer_id: str | None = None
        self._dialect = dialect
        self._wants_usage = wants_usage(call.chat)
        self._splitter = EventSplitter()
        self._lines = Lines()
        self._finished = False
        self._error: str | None = None

    def begin(self) -> bytes:
        """Return nothing."""
        return b""

    def take(self, data: bytes) -> bytes:
        """Return ``data``, without the usage chunk that the agent did not ask for."""
        if data.startswith(b"data: ") and data.count(b"\n") == 2 and data.endswith(b"\n\n") and self._splitter.is_empty:
            return data if self._takes_data(data[6:-2]) else b""
        events, is_all = self._splitter.cut(data)
        kept = [event for event in events if self._takes(event)]
        return data if is_all and len(kept) == len(events) else b"".join(kept)  # the same bytes, mostly

    def rest(self) -> bytes:
        """Return a last event whose blank line was missing, with it."""
        rest = self._splitter.rest()
        return rest.rstrip() + b"\n\n" if rest.strip() and self._takes(rest) else b""

    def check(self) -> None:
        """Raise unless the model has come to its end, even if the stream has not."""
        if self.failure is not None:
            raise self.failure
        if self._error is not None:
            raise stream_failed(self._error)
        if not (self._finished or (self.done and self._lines.count)):
            raise ended_early(self._lines.count)

    def end(self) -> bytes:
        """Return nothing: the upstream said it."""
        return b""

    def fail(self, refusal: GatewayRefusal) -> bytes:
        """Return one more event with ``error``, and no ``[DONE]``."""
        return b"data: " + orjson.dumps(self._dialect.error(refusal)) + b"\n\n"

    def payload(self) -> Payload:
        """Return the chunks."""
        return self._lines.payload()

    def partial(self) -> Payload | None:
        """Return the chunks, if the model said anything."""
        payload = self.payload()
        return payload if payload.assembled().started and self._error is None else None

    def _takes(self, event: bytes) -> bool:
        """Keep an event for the record; return whether the agent gets it."""
        data = event_data(event)
        return data is None or self._takes_data(data)

    def _takes_data(self, data: bytes) -> bool:
        if len(data) < _SHORT and data.strip() == DONE:
            self.done = True
            return True
        if self.failure is not None:
            return False
        try:
            chunk = scan_chunk(data)
        except ValueError as error:
            self.failure = malformed(f"in its stream, {error}")
            return False
        if chunk.error is not None:
            self._error, self.told = chunk.error, True
            return True
        self._lines.add(data)
        if chunk.finish_reason is not None:
            self._finished = True
        if chunk.prompt_tokens or chunk.completion_tokens:
            self.usage = (chunk.prompt_tokens, chunk.completion_tokens)
        return not chunk.is_usage or self._wants_usage


class Translating:
    """Translates chat chunks into another dialect's events."""

    def __init__(self, call: Call, dialect: Dialect) -> None:
        self.done = False
        self.failure: UpstreamError | None = None
        self.told = False
        self.answer_id: str | None = None
        self._translator: StreamTranslator = dialect.translator(call)
        self._splitter = EventSplitter()
        self._assembler = CompletionAssembler()

    @property
    def usage(self) -> tuple[int, int]:
        """The tokens, once the upstream has told them."""
        return usage_counts(self._assembler.completion())

    @usage.setter
    def usage(self, value: tuple[int, int]) -> None:
        raise AttributeError("usage is read from the stream")

    def begin(self) -> bytes:
        """Return the dialect's first events."""
        return self._translator.begin()

    def take(self, data: bytes) -> bytes:
        """Return the events that ``data`` is worth."""
        return b"".join(self._translated(event) for event in self._splitter.cut(data)[0])

    def rest(self) -> bytes:
        """Return what a last event is worth whose blank line was missing."""
        rest = self._splitter.rest()
        return self._translated(rest) if rest.strip() else b""

    def check(self) -> None:
        """Raise unless the model has come to its end, even if the stream has not."""
        if self.failure is not None:
            raise self.failure
        if self._assembler.error is not None:
            raise stream_failed(self._assembler.error)
        if not self._assembler.finished:
            raise ended_early(self._assembler.chunks)

    def end(self) -> bytes:
        """Return the dialect's last events."""
        return self._translator.end(self._assembler.completion())

    def fail(self, refusal: GatewayRefusal) -> bytes:
        """Return the dialect's own word for it."""
        return self._translator.fail(refusal)

    def payload(self) -> Payload:
        """Return the completion that the chunks made."""
        return Payload.of(orjson.dumps(self._assembler.completion()))

    def partial(self) -> Payload | None:
        """Return the completion so far, if the model said anything."""
        return self.payload() if self._assembler.started and self._assembler.error is None else None

    def _translated(self, event: bytes) -> bytes:
        data = event_data(event)
        if data is None or self.failure is not None:
            return b""  # a comment of the upstream's; the gateway has keep-alives of its own
        if data.strip() == DONE:
            self.done = True
            return b""
        try:
            chunk = orjson.loads(data)
            self._assembler.add(chunk)
        except ValueError as error:
            self.failure = malformed(f"in its stream, {error}")
            return b""
        return b"" if self._assembler.error is not None else self._translator.feed(chunk)


class NativePassing:
    """Passes the events of an upstream that speaks the dialect, and reads them for the record at their end."""

    def __init__(self, call: Call, dialect: Dialect, native: Native) -> None:
        self.done = False
        self.failure: UpstreamError | None = None
        self.told = False
        self.usage = (0, 0)
        self.answer_id: str | None = None
        self._native = native
        self._translator = dialect.translator(call)
        self._splitter = EventSplitter()
        self._events: list[bytes] = []
        self._completion: dict[str, Any] | None = None

    def begin(self) -> bytes:
        """Return nothing: the upstream begins."""
        return b""

    def take(self, data: bytes) -> bytes:
        """Return the events that are whole, as they came: what is sent while the rest is awaited comes between two."""
        events, is_all = self._splitter.cut(data)
        for event in events:
            self._keep(event)
        return data if is_all else b"".join(events)

    def rest(self) -> bytes:
        """Return a last event whose blank line was missing."""
        rest = self._splitter.rest()
        self._keep(rest)
        return rest

    def check(self) -> None:
        """Raise unless the events make an answer."""
        self._read(self._native.assembled(self._events))

    def end(self) -> bytes:
        """Return nothing: the upstream said it."""
        return b""

    def fail(self, refusal: GatewayRefusal) -> bytes:
        """Return the dialect's own word for it."""
        return self._translator.fail(refusal)

    def payload(self) -> Payload:
        """Return the answer as a chat completion."""
        return Payload.of(orjson.dumps(self._completion))

    def partial(self) -> Payload | None:
        """Return the answer so far, if the events make any."""
        try:
            self._read(self._native.assembled(self._events, partial=True))
        except UpstreamError:
            return None
        return self.payload()

    def _read(self, answer: dict[str, Any]) -> None:
        self._completion = self._native.completion(answer)
        check_completion(self._completion)
        self.usage = usage_counts(self._completion)
        self.answer_id = self._completion.get("id")

    def _keep(self, event: bytes) -> None:
        if (data := event_data(event)) is not None:
            self._events.append(data)
            self.done = self.told = self.done or self._native.is_last(data)
