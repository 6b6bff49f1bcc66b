"""Streamed answers of OpenAI's Responses API: its events, in order and numbered."""

from __future__ import annotations

from typing import Any

from workers.gateway.server.dialects import JsonObject
from workers.gateway.server.dialects.fields import event
from workers.gateway.server.dialects.parts import Kind, Part, PartStream
from workers.gateway.server.dialects.responses_output import (
    State,
    content_part,
    finished,
    is_cut,
    new_item,
    plain_error,
    response,
)
from workers.gateway.server.errors import GatewayRefusal

#: By kind of part: the events of its text, and what the text is called in the last of them.
_EVENTS = {
    Kind.REASONING: ("response.reasoning_text", "text"),
    Kind.TEXT: ("response.output_text", "text"),
    Kind.REFUSAL: ("response.refusal", "refusal"),
}
#: Only text events have logprobs; they are not passed on, as the trajectory has them.
_LOGPROBS: dict[Kind, JsonObject] = {Kind.TEXT: {"logprobs": []}}


class ResponsesStream:
    """Translates one stream; one item is open at a time."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._parts = PartStream()
        self._sequence = 0
        self._items: list[JsonObject] = []
        self._open: JsonObject | None = None
        self._kind = Kind.TEXT
        self._said: list[str] = []

    def begin(self) -> bytes:
        """Return ``response.created`` and ``response.in_progress``."""
        top = {"response": response(self._state, None, [])}
        return self._event("response.created", **top) + self._event("response.in_progress", **top)

    def feed(self, chunk: JsonObject) -> bytes:
        """Return the events that ``chunk`` is worth."""
        return b"".join(self._part(part) for part in self._parts.feed(chunk))

    def end(self, completion: JsonObject) -> bytes:
        """Return the events that end the open item, and ``response.completed`` or ``response.incomplete``."""
        cut = is_cut(completion)
        out = b"".join([*(self._part(part) for part in self._parts.finish()), self._close(cut=cut)])
        done = response(self._state, completion, self._items)
        return out + self._event(f"response.{done['status']}", response=done)

    def fail(self, refusal: GatewayRefusal) -> bytes:
        """Return ``response.failed`` with the reason; what was said so far stays."""
        out = b"" if self._sequence else self.begin()
        error = plain_error(refusal)
        status = refusal.status_code
        kind = "rate_limit_exceeded" if status == 429 else "server_error" if status >= 500 else "invalid_prompt"
        failed = response(self._state, None, self._items)
        failed |= {"status": "failed", "error": {"code": kind, "message": error["message"]}}
        return out + self._event("response.failed", response=failed)

    def _part(self, part: Part) -> bytes:
        out = b""
        if part.starts:
            out = self._close() + self._start(part)
        self._said.append(part.text)
        if self._kind is not Kind.CALL:
            name = _EVENTS[self._kind][0]
            return out + self._inner(f"{name}.delta", delta=part.text, **_LOGPROBS.get(self._kind, {}))
        if self._open is not None and self._open["type"] == "function_call" and part.text:
            return out + self._item_event("response.function_call_arguments.delta", delta=part.text)
        return out  # a custom tool's input is known when its arguments are whole

    def _start(self, part: Part) -> bytes:
        self._open, self._kind, self._said = new_item(part, self._state), part.kind, []
        out = self._event("response.output_item.added", output_index=len(self._items), item=self._open)
        if part.kind is Kind.CALL:
            return out
        return out + self._inner("response.content_part.added", part=content_part(part.kind, ""))

    def _close(self, *, cut: bool = False) -> bytes:
        if self._open is None:
            return b""
        said = "".join(self._said)
        item = finished(self._open, self._kind, said, cut=cut)
        if item["type"] == "function_call":
            out = self._item_event("response.function_call_arguments.done", arguments=said, name=item["name"])
        elif item["type"] == "custom_tool_call":
            out = self._item_event("response.custom_tool_call_input.delta", delta=item["input"])
            out += self._item_event("response.custom_tool_call_input.done", input=item["input"])
        else:
            name, field = _EVENTS[self._kind]
            out = self._inner(f"{name}.done", **{field: said}, **_LOGPROBS.get(self._kind, {}))
            out += self._inner("response.content_part.done", part=content_part(self._kind, said))
        out += self._event("response.output_item.done", output_index=len(self._items), item=item)
        self._items.append(item)
        self._open = None
        return out

    def _inner(self, kind: str, **fields: Any) -> bytes:
        """Return an event of the open item's only content."""
        return self._item_event(kind, content_index=0, **fields)

    def _item_event(self, kind: str, **fields: Any) -> bytes:
        item_id = self._open["id"] if self._open else ""
        return self._event(kind, item_id=item_id, output_index=len(self._items), **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        data = {"type": kind, "sequence_number": self._sequence} | fields
        self._sequence += 1
        return event(kind, data)
