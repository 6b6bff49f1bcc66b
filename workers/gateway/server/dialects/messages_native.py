"""Anthropic's Messages API as an upstream speaks it: asked in its own words, its answers read for the record.

No such server tells token ids or logprobs in Anthropic's own API; where one gives them under chat's names
(``prompt_token_ids``, ``token_ids``, ``logprobs``: in a message, or in a stream's events) they are recorded. Blocks
that no chat message can hold, such as those of hosted tools, are named in the message's ``left_out``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from workers.gateway.protocol import Registration
from workers.gateway.server.answers import ended_early, malformed, stream_failed
from workers.gateway.server.dialects import Call, JsonObject
from workers.gateway.server.dialects.fields import as_count, as_dict, as_text, parsed
from workers.gateway.server.dialects.messages_input import arguments_object, assistant_message
from workers.gateway.server.errors import GatewayRefusal
from workers.gateway.server.merge import native_params

#: The version of the API that its clients ask for (docs, "Versions"); Anthropic's servers want one.
VERSION = "2023-06-01"
_NAMES = {
    "max_completion_tokens": "max_tokens",
    "stop": "stop_sequences",
    "logprobs": None,
    "top_logprobs": None,
    "return_token_ids": None,
    "n": None,
    "reasoning_effort": None,
}
_READABLE = frozenset({"text", "thinking", "redacted_thinking", "tool_use"})
#: By kind of delta: its text's name, and that of the block's.
_DELTAS = {
    "text_delta": ("text", "text"),
    "thinking_delta": ("thinking", "thinking"),
    "input_json_delta": ("partial_json", "input"),
}
_STOPS = {"max_tokens": "length", "tool_use": "tool_calls", "refusal": "content_filter"}
_TOKENS = ("prompt_token_ids", "token_ids")


class MessagesNative:
    """The Messages dialect, spoken to an upstream."""

    path = "/messages"

    def headers(self, key: str | None) -> dict[str, str]:
        """Return the API's version, and the key where Anthropic's servers look for it."""
        return {"anthropic-version": VERSION} | ({"x-api-key": key} if key else {})

    def body(self, call: Call, registration: Registration, *, ask_tokens: bool) -> JsonObject | None:
        """Return the agent's request with what is registered in it."""
        params = native_params(registration, _NAMES)
        if params is None:
            return None
        if isinstance(params.get("stop_sequences"), str):
            params["stop_sequences"] = [params["stop_sequences"]]
        asked = {"logprobs": True, "return_token_ids": True} if ask_tokens else {}
        body: JsonObject = call.state.fields | {"model": registration.model} | asked
        return body | params

    def is_last(self, data: bytes) -> bool:
        """Return whether the event ends the message, or tells that it failed."""
        return (b"message_stop" in data or b'"error"' in data) and parsed(data).get("type") in {"message_stop", "error"}

    def completion(self, answer: JsonObject) -> JsonObject:
        """Return a message as a chat completion."""
        blocks = answer.get("content")
        if not isinstance(blocks, list) or not all(isinstance(block, dict) for block in blocks):
            raise malformed("its content is not a list of blocks")
        left_out = [as_text(block.get("type")) for block in blocks if block.get("type") not in _READABLE]
        try:  # read as those of a history are, so that the next call continues this one
            message = assistant_message([block for block in blocks if block.get("type") in _READABLE], "content")
        except GatewayRefusal as error:
            raise malformed(str(error.detail)) from None
        if left_out:
            message["left_out"] = left_out
        finish = _STOPS.get(as_text(answer.get("stop_reason")), "stop")
        choice = {"index": 0, "message": message, "finish_reason": finish}
        choice |= {name: answer[name] for name in ("token_ids", "logprobs") if answer.get(name) is not None}
        completion = {"object": "chat.completion", "choices": [choice], "usage": _usage(answer.get("usage"))}
        completion |= {name: answer[name] for name in ("id", "model") if isinstance(answer.get(name), str)}
        prompt = answer.get("prompt_token_ids")
        return completion if prompt is None else completion | {"prompt_token_ids": prompt}

    def assembled(self, events: Sequence[bytes], *, partial: bool = False) -> JsonObject:
        """Return the message that the events make."""
        assembler = _Assembler()
        for data in events:
            event = parsed(data)
            if event.get("type") == "error":
                raise stream_failed(as_text(as_dict(event.get("error")).get("message")) or str(event.get("error")))
            assembler.add(event)
        if not assembler.ended and not (partial and assembler.blocks):
            raise ended_early(len(events))
        return assembler.message()


class _Assembler:
    """Puts a message together from its events."""

    def __init__(self) -> None:
        self.blocks: dict[Any, JsonObject] = {}
        self.ended = False
        self._top: JsonObject = {}
        self._texts: dict[Any, dict[str, list[str]]] = {}

    def add(self, event: JsonObject) -> None:
        """Take in an event; those of a kind that nobody knows are passed over."""
        kind, at = event.get("type"), event.get("index")
        self._add_tokens(event)
        if kind == "message_start":
            self._top |= as_dict(event.get("message"))
        elif kind == "content_block_start":
            self.blocks[at] = as_dict(event.get("content_block"))
        elif kind == "content_block_delta":
            delta = as_dict(event.get("delta"))
            if (names := _DELTAS.get(as_text(delta.get("type")))) is not None:
                self._texts.setdefault(at, {}).setdefault(names[1], []).append(as_text(delta.get(names[0])))
        elif kind == "message_delta":
            self._top |= as_dict(event.get("delta"))
            self._top["usage"] = as_dict(self._top.get("usage")) | as_dict(event.get("usage"))
        elif kind == "message_stop":
            self.ended = True

    def message(self) -> JsonObject:
        """Return what has come so far."""
        return self._top | {"content": [self._whole(at, block) for at, block in self.blocks.items()]}

    def _whole(self, at: Any, block: JsonObject) -> JsonObject:
        said = {name: "".join(parts) for name, parts in self._texts.get(at, {}).items()}
        if "input" in said:
            return block | {"input": arguments_object(said["input"])}
        return block | {name: as_text(block.get(name)) + value for name, value in said.items()}

    def _add_tokens(self, event: JsonObject) -> None:
        for name in _TOKENS:
            if isinstance(event.get(name), list):
                self._top[name] = [*self._top.get(name, []), *event[name]]
        entries = as_dict(event.get("logprobs")).get("content")
        if isinstance(entries, list):
            self._top["logprobs"] = {"content": [*as_dict(self._top.get("logprobs")).get("content", []), *entries]}


def _usage(given: Any) -> JsonObject:
    usage = as_dict(given)
    read, made = as_count(usage.get("cache_read_input_tokens")), as_count(usage.get("cache_creation_input_tokens"))
    prompt, sampled = as_count(usage.get("input_tokens")) + read + made, as_count(usage.get("output_tokens"))
    counts = {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}
    return counts | {"prompt_tokens_details": {"cached_tokens": read}}
