"""Event streams: cutting bytes into events, and putting a chat completion together from its chunks."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import orjson

from workers.gateway.server.nesting import MAX_NESTING, is_too_deep

#: A blank line ends an event; lines may end in LF, CRLF or CR (WHATWG HTML, server-sent events).
_END = re.compile(rb"\r?\n\r?\n|\r\r")
DONE = b"[DONE]"
#: Bytes of one event; a prompt of a million token ids has 7 MB. What is larger is cut, and so no chunk.
LARGEST_EVENT = 64 * 1024 * 1024


class EventSplitter:
    """Cuts a byte stream into whole events, however its chunks were cut on the way."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._scanned = 0

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Add ``data`` and yield the events that are whole now, each with the blank line that ends it."""
        self._buffer += data
        while match := _END.search(self._buffer, self._scanned):
            event = bytes(self._buffer[: match.end()])
            del self._buffer[: match.end()]
            self._scanned = 0
            yield event
        if len(self._buffer) > LARGEST_EVENT:
            yield self.rest()
        self._scanned = max(0, len(self._buffer) - 3)  # the longest end is 4 bytes; 3 of them may be here already

    @property
    def is_empty(self) -> bool:
        """Whether no part of an event is here already."""
        return not self._buffer

    def cut(self, data: bytes) -> tuple[list[bytes], bool]:
        """Add ``data`` and return the events that are whole now, and whether they are ``data`` and nothing else."""
        if not self._buffer and data.endswith(b"\n\n") and b"\r" not in data:
            return [event + b"\n\n" for event in data[:-2].split(b"\n\n")], True
        return list(self.feed(data)), False

    def rest(self) -> bytes:
        """Return what came after the last whole event: a last event whose blank line is missing."""
        rest = bytes(self._buffer)
        self._buffer.clear()
        return rest


def event_data(event: bytes) -> bytes | None:
    """Return an event's data, or None for one without (a comment that keeps the connection alive)."""
    lines = [line[5:].removeprefix(b" ") for line in event.splitlines() if line.startswith(b"data:")]
    return b"\n".join(lines) if lines else None


class CompletionAssembler:
    """Puts the chat completion together that a call without ``stream`` would have answered.

    Sources: OpenAI's chunks (deltas; tool calls by index; usage in a last chunk without choices), vLLM's additions
    (``prompt_token_ids`` in the first chunk, ``token_ids`` in each choice), llama.cpp's ``logprobs.content[].id``.
    Only the choice with index 0 is put together; others are counted.
    """

    def __init__(self) -> None:
        self.done = False
        self.error: str | None = None
        self.finish_reason: str | None = None
        self.chunks = 0
        self._top: dict[str, Any] = {}
        self._choice: dict[str, Any] = {}
        self._text: dict[str, list[str]] = {}
        self._message: dict[str, Any] = {}
        self._calls: dict[int, dict[str, Any]] = {}
        self._token_ids: Any = None
        self._logprobs: Any = None
        self._indices: set[Any] = set()

    def feed(self, data: bytes) -> bool:
        """Take in one event's data; return whether it is a usage chunk, which has no choices.

        Raises:
            ValueError: ``data`` is no chunk.
        """
        if data.strip() == DONE:
            self.done = True
            return False
        return self.add(orjson.loads(data))

    def add(self, chunk: dict[str, Any]) -> bool:
        """Take in a parsed chunk, as `feed` does."""
        try:
            return self._add_chunk(chunk)
        except (AttributeError, TypeError, KeyError) as error:
            raise ValueError(f"a chunk does not have a chunk's shape: {error}") from None

    @property
    def finished(self) -> bool:
        """Whether the model has come to its end, even if the stream has not."""
        return self.error is None and (self.finish_reason is not None or (self.done and self.chunks > 0))

    @property
    def started(self) -> bool:
        """Whether the first choice has said anything."""
        return bool(self._message or self._text or self._calls)

    def completion(self) -> dict[str, Any]:
        """Return what has come so far as a chat completion."""
        text = {name: "".join(parts) for name, parts in self._text.items()}
        message: dict[str, Any] = self._message | {name: value for name, value in text.items() if value}
        if self._calls:
            message["tool_calls"] = [self._calls[index] for index in sorted(self._calls)]
        if "content" not in message:  # servers start with "" whatever follows; answered whole, they give null
            message["content"] = None if self._calls or len(message.keys() - {"role"}) else ""
        choice = self._choice | {"message": message, "finish_reason": self.finish_reason}
        if self._token_ids is not None:
            choice["token_ids"] = self._token_ids
        if self._logprobs is not None:
            choice["logprobs"] = {"content": self._logprobs}
        others: list[dict[str, Any]] = [{} for _ in self._indices - {0}]
        return self._top | {"choices": [choice, *others]}

    def _add_chunk(self, chunk: dict[str, Any]) -> bool:
        if chunk.get("error"):
            self.error = _error_text(chunk["error"])
            return False
        self.chunks += 1
        self._top |= {name: value for name, value in chunk.items() if name != "choices" and value is not None}
        choices = chunk.get("choices") or []
        for choice in choices:
            self._indices.add(choice.get("index", 0))
            if choice.get("index", 0) == 0:
                self._add_choice(choice)
        return not choices and chunk.get("usage") is not None

    def _add_choice(self, choice: dict[str, Any]) -> None:
        self._add_delta(choice.get("delta") or {})
        self.finish_reason = choice.get("finish_reason") or self.finish_reason
        if (ids := choice.get("token_ids")) is not None:
            self._token_ids = _joined(self._token_ids, ids)
        logprobs = choice.get("logprobs")
        if isinstance(logprobs, dict) and (entries := logprobs.get("content")) is not None:
            self._logprobs = _joined(self._logprobs, entries)
        own = {"delta", "finish_reason", "token_ids", "logprobs", "index"}
        self._choice |= {name: value for name, value in choice.items() if name not in own and value is not None}

    def _add_delta(self, delta: dict[str, Any]) -> None:
        if is_too_deep(delta):
            raise ValueError(f"a chunk is nested more than {MAX_NESTING} levels deep")
        for name, value in delta.items():
            if value is None:
                continue
            if name == "tool_calls":
                for call in value:
                    self._add_call(call)
            elif name != "role" and isinstance(value, str):
                self._text.setdefault(name, []).append(value)
            else:
                self._message[name] = value

    def _add_call(self, part: dict[str, Any]) -> None:
        call = self._calls.setdefault(
            self._call_index(part), {"type": "function", "function": {"name": "", "arguments": ""}}
        )
        if part.get("id"):
            call["id"] = part["id"]
        function = part.get("function") or {}
        if name := function.get("name"):
            known = call["function"]["name"]
            call["function"]["name"] = known if known == name else known + name  # some servers repeat it in each part
        call["function"]["arguments"] += function.get("arguments") or ""

    def _call_index(self, part: dict[str, Any]) -> int:
        """Return which call ``part`` belongs to; servers that give no index start a new call with a new id."""
        if isinstance(index := part.get("index"), int):
            return index
        last = max(self._calls, default=-1)
        is_new = last < 0 or (part.get("id") and part["id"] != self._calls[last].get("id"))
        return last + 1 if is_new else last


def _joined(known: Any, part: Any) -> Any:
    """Return ``known`` with ``part`` added; what is no list is kept as it is, for `read_tokens` to refuse."""
    if isinstance(known, list) and isinstance(part, list):
        known.extend(part)
        return known
    return part if known is None or isinstance(known, list) else known


def _error_text(error: Any) -> str:
    message = error.get("message") if isinstance(error, dict) else None
    return str(message or error)
