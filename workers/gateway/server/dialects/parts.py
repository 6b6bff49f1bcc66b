"""What an assistant's message is made of, whole or as it streams: reasoning, text, a refusal, tool calls; one by one.

Chat chunks may mix them: tool calls carry an index, and text may come between. The other dialects send one thing after
the other, so what comes early for a later one is held back; in practice that is parallel tool calls alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from workers.gateway.server.dialects import JsonObject
from workers.gateway.server.dialects.fields import as_dict, as_text


class Kind(Enum):
    """What a part is."""

    REASONING = "reasoning"
    TEXT = "text"
    REFUSAL = "refusal"
    CALL = "call"


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a message, or of a part: ``text`` continues the part before it unless ``starts``.

    A call's ``text`` is its arguments; ``call_id`` may be "" where the upstream gave none.
    """

    kind: Kind
    text: str
    starts: bool = True
    call_id: str = ""
    name: str = ""


@dataclass(slots=True)
class _OpenCall:
    call_id: str = ""
    name: str = ""
    waiting: list[str] = field(default_factory=list)
    started: bool = False


def parts_of(message: JsonObject) -> list[Part]:
    """Return the parts of a whole message, in the order in which they stream."""
    parts = [Part(kind, said) for kind, said in _texts(message)]
    for call in message.get("tool_calls") or []:
        function = as_dict(call.get("function"))
        arguments = as_text(function.get("arguments"))
        parts.append(Part(Kind.CALL, arguments, True, as_text(call.get("id")), as_text(function.get("name"))))
    return parts


class PartStream:
    """Cuts chat chunks into parts."""

    def __init__(self) -> None:
        self._last: Kind | None = None
        self._calls: dict[int, _OpenCall] = {}
        self._later: dict[Kind, list[str]] = {}

    def feed(self, chunk: JsonObject) -> Iterator[Part]:
        """Yield what ``chunk`` adds."""
        for choice in chunk.get("choices") or []:
            if choice.get("index", 0) == 0:
                delta = as_dict(choice.get("delta"))
                for kind, said in _texts(delta):
                    yield from self._text(kind, said)
                for call in delta.get("tool_calls") or []:
                    yield from self._call(call)

    def finish(self) -> Iterator[Part]:
        """Yield what was held back; each call ends up whole."""
        for call in self._calls.values():
            said = "".join(call.waiting)
            if not call.started:
                yield Part(Kind.CALL, said, True, call.call_id, call.name)
            elif said:
                yield Part(Kind.CALL, said, False)
        for kind, texts in self._later.items():
            yield Part(kind, "".join(texts))

    def _text(self, kind: Kind, said: str) -> Iterator[Part]:
        if self._calls:  # a call is not ended before all of it is known
            self._later.setdefault(kind, []).append(said)
            return
        yield Part(kind, said, starts=kind is not self._last)
        self._last = kind

    def _call(self, part: JsonObject) -> Iterator[Part]:
        index = self._index(part)
        call = self._calls.setdefault(index, _OpenCall())
        call.call_id = as_text(part.get("id")) or call.call_id
        function = as_dict(part.get("function"))
        if (named := as_text(function.get("name"))) and named != call.name and not call.started:
            call.name += named  # some servers send it in pieces, some all of it in each part
        said = as_text(function.get("arguments"))
        if not said:
            return
        if index != next(iter(self._calls)):
            call.waiting.append(said)
            return
        yield Part(Kind.CALL, said, not call.started, call.call_id, call.name)
        call.started = True

    def _index(self, part: JsonObject) -> int:
        """Return which call ``part`` belongs to; servers that give no index start a new call with a new id."""
        if isinstance(index := part.get("index"), int):
            return index
        last = max(self._calls, default=-1)
        is_new = last < 0 or (part.get("id") and part["id"] != self._calls[last].call_id)
        return last + 1 if is_new else last


def _texts(message: JsonObject) -> Iterator[tuple[Kind, str]]:
    reasoning = as_text(message.get("reasoning_content")) or as_text(message.get("reasoning"))
    found: list[tuple[Kind, Any]] = [
        (Kind.REASONING, reasoning),
        (Kind.TEXT, as_text(message.get("content"))),
        (Kind.REFUSAL, as_text(message.get("refusal"))),
    ]
    return ((kind, said) for kind, said in found if said)
