"""The seam between the gateway's core and the APIs that agents speak.

The core knows rollouts, keys, upstreams, streams and records; a dialect knows one API's JSON. Everything is recorded
as chat completions, whatever the agent spoke, so a dialect is a set of pure functions around that shape::

    agent ── body ──▶ Dialect.read ─▶ Call.chat ──▶ the core merges the registration's parameters, asks the upstream
    agent ◀─ JSON ─── Dialect.answer ◀──────────── a chat completion           (not streamed)
    agent ◀─ events ─ StreamTranslator ◀────────── chat chunks, one at a time   (streamed)
    agent ◀─ JSON ─── Dialect.error ◀────────────── a `GatewayRefusal`           (before anything was streamed)

No method here does I/O, waits or keeps state between calls; a translator lives for one stream. An upstream that speaks
the dialect itself may be asked in it (`Native`); the core then passes its bytes on and needs the dialect for the record
alone. Chat completions are the first dialect (``chat``), whose bytes pass untouched in both directions.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from workers.gateway.protocol import Registration
from workers.gateway.server.errors import GatewayRefusal

JsonObject = dict[str, Any]

#: ``earlier(answer_id)``: the conversation up to and with the answer that had this id, as messages of a chat request,
#: and the notes of that call; None when this rollout has none. For dialects whose agents send only what is new.
Earlier = Callable[[str], tuple[list[JsonObject], JsonObject] | None]

#: The comment that keeps an event stream open in every dialect that has no event of its own for it.
KEEP_ALIVE = b": keep-alive\n\n"


@dataclass(frozen=True, slots=True)
class Call:
    """One agent's request, read.

    ``chat`` is the same request as the body of a chat completion: ``messages`` (at least a list) and whatever sampling
    parameters the agent gave, under chat's names. Not ``stream``, ``stream_options`` or ``model``: the core sets them.
    ``answer_id`` is the id that the answer will have, where a later request may name it (``previous_response_id``).
    ``state`` is the dialect's own: what it needs to translate the answer (the core does not look at it). ``notes`` are
    added to the recorded step's ``extras``; JSON, small.
    """

    chat: JsonObject
    stream: bool
    answer_id: str | None = None
    state: Any = None
    notes: JsonObject = field(default_factory=dict)


class StreamTranslator(Protocol):
    """Turns one chat stream into one of the dialect's: each method returns whole events, ready to be sent, or b"".

    The calls come in this order: ``begin``, any number of ``feed``, then ``end`` or ``fail``. ``fail`` may come without
    a ``feed`` before it. Chunks are as the upstream sent them, parsed and known to have a chunk's shape; the last may
    have no choices and a ``usage`` (it is always asked for).
    """

    def begin(self) -> bytes:
        """Return what comes first, before the model said anything."""
        ...

    def feed(self, chunk: JsonObject) -> bytes:
        """Return the events that ``chunk`` is worth."""
        ...

    def end(self, completion: JsonObject) -> bytes:
        """Return the events that end the stream; ``completion`` is all of it as one chat completion."""
        ...

    def fail(self, refusal: GatewayRefusal) -> bytes:
        """Return the events that end a stream that failed in its middle."""
        ...


class Native(Protocol):
    """How the dialect is spoken to an upstream that knows it: an optional part of a dialect."""

    path: str  #: Below the upstream's ``/v1``, such as ``/responses``.

    def headers(self, key: str | None) -> dict[str, str]:
        """Return the headers that such an upstream wants besides a bearer token; ``key`` is the gateway's."""
        ...

    def body(self, call: Call, registration: Registration, *, ask_tokens: bool) -> JsonObject | None:
        """Return the agent's request with the registered model and sampling parameters in it.

        None when it cannot be said in the dialect's own words: the call is translated then.
        """
        ...

    def is_last(self, data: bytes) -> bool:
        """Return whether an event with this data is a stream's last."""
        ...

    def completion(self, answer: JsonObject) -> JsonObject:
        """Return the upstream's answer as a chat completion, for the record; raises `UpstreamError` if malformed.

        Its ``id`` is the answer's, where a later request may name it.
        """
        ...

    def assembled(self, events: Sequence[bytes], *, partial: bool = False) -> JsonObject:
        """Return the answer that a stream's events (the data of each) make.

        Raises `UpstreamError` if it is malformed or failed, or has no end and is not ``partial``.
        """
        ...


@dataclass(frozen=True, slots=True)
class SideCall:
    """What a side route is given: the registration, the parsed body, and a way to ask the upstream.

    ``native`` says that the upstreams speak the dialect.

    ``ask(path, body)`` posts to the rollout's upstream and returns its JSON answer; raises `UpstreamError`. A path that
    begins with ``/`` is below ``/v1``, and one that begins with ``//`` below the server's root (vLLM's ``//tokenize``).
    """

    registration: Registration
    body: JsonObject
    ask: Callable[[str, JsonObject], Awaitable[JsonObject]]
    native: bool = False


#: A route of a dialect that is no model call, such as counting tokens: nothing of it is recorded.
Side = Callable[[SideCall], Awaitable[JsonObject]]


class Dialect(Protocol):
    """One API that agents speak. Methods raise `GatewayRefusal`; `error` gives it the dialect's shape.

    ``paths`` are the model calls' routes (POST) below a rollout's base ``/v1/rollouts/ID``, such as ``/responses``;
    ``sides`` other POST routes there. A rollout's key (bearer or ``x-api-key``) is checked by the core for all of them;
    the query is ignored. ``GET /models``, ``GET /v1/models`` and ``HEAD`` or ``GET`` of the base are the core's.
    ``keep_alive`` is sent while the upstream is silent.
    """

    name: str
    paths: tuple[str, ...]
    sides: Mapping[str, Side]
    keep_alive: bytes
    native: Native | None

    def read(self, body: bytes, earlier: Earlier) -> Call:
        """Read a request; raises `GatewayRefusal` (400 or 422) for one that cannot be understood."""
        ...

    def answer(self, call: Call, completion: JsonObject) -> JsonObject:
        """Return the agent's answer for the upstream's chat completion, which is checked to have a message."""
        ...

    def translator(self, call: Call) -> StreamTranslator:
        """Return the translator of one streamed answer."""
        ...

    def error(self, refusal: GatewayRefusal) -> JsonObject:
        """Return the body of an answer that is no success; the status and headers are the refusal's."""
        ...
