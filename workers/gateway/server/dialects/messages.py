"""Anthropic's Messages API, translated to chat completions and back.

System blocks become one system message, tool results messages of the role ``tool`` (their images follow in a user's
message), thinking ``reasoning_content``. What the agent sends back of earlier answers is given to the model as it was
sampled; see `messages_input.restored`.

Ignored, because clients send them whatever they talk to: ``cache_control``, ``thinking``, ``metadata``,
``service_tier``, ``context_management``, ``output_config.effort``, ``inference_geo``, ``speed``, and Claude Code's
billing line among the system blocks. ``max_tokens`` is passed on (Claude Code asks for 32,000: register a
``max_tokens`` for models with less room). Hosted tools, MCP servers, containers, files and documents other than text,
and parameters that nobody knows are refused with 400.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from workers.gateway.server.answers import usage_counts
from workers.gateway.server.dialects import Call, Earlier, JsonObject, Native, Side, SideCall, StreamTranslator
from workers.gateway.server.dialects.fields import (
    SAMPLING,
    as_count,
    as_dict,
    as_text,
    event,
    mapping,
    refuse_unknown,
    refused,
    sealed,
    unsupported,
)
from workers.gateway.server.dialects.messages_input import (
    arguments_object,
    read_messages,
    read_tool_choice,
    read_tools,
    restored,
    tool_use_id,
)
from workers.gateway.server.dialects.messages_native import MessagesNative
from workers.gateway.server.dialects.parts import Kind, Part, PartStream, parts_of
from workers.gateway.server.errors import GatewayRefusal, UpstreamError
from workers.gateway.server.jsonio import parse_object

_PING = event("ping", {"type": "ping"})
_REFUSED = ("container", "mcp_servers")
_IGNORED = frozenset(
    {"thinking", "metadata", "service_tier", "context_management", "inference_geo", "speed", "cache_control", "betas"}
)
_READ = frozenset(
    {"model", "messages", "system", "tools", "tool_choice", "max_tokens", "stop_sequences", "stream"}
    | {"output_config", "output_format"}
)
#: Anthropic's names of errors (docs, "Errors"); 529 is its own status of a server that is overloaded.
_ERRORS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}
_STOPS = {"length": "max_tokens", "tool_calls": "tool_use", "content_filter": "refusal"}


@dataclass(frozen=True)
class State:
    """What an answer needs of its request."""

    id: str
    model: str
    fields: JsonObject


class Messages:
    """The Messages dialect."""

    name = "messages"
    paths: tuple[str, ...] = ("/v1/messages", "/messages")
    keep_alive = _PING
    native: Native | None = MessagesNative()

    def __init__(self) -> None:
        self.sides: Mapping[str, Side] = {f"{path}/count_tokens": count_tokens for path in self.paths}

    def read(self, body: bytes, earlier: Earlier) -> Call:
        """Read a request; raises `GatewayRefusal` (400, 422) that names the field it cannot read."""
        fields = parse_object(body)
        chat = _chat(fields)
        chat["messages"] = restored(chat["messages"], earlier)
        state = State(f"msg_{secrets.token_hex(12)}", as_text(fields.get("model")), fields)
        return Call(chat, bool(fields.get("stream")), state.id, state)

    def answer(self, call: Call, completion: JsonObject) -> JsonObject:
        """Return the completion as a message."""
        parts = parts_of(completion["choices"][0]["message"])
        calls = iter(range(len(parts)))
        blocks = [_block(part, call.state, next(calls) if part.kind is Kind.CALL else 0) for part in parts]
        top = _message(call.state) | {"model": as_text(completion.get("model")) or call.state.model}
        return top | {"content": blocks} | _stopped(completion) | {"usage": _usage(completion)}

    def translator(self, call: Call) -> StreamTranslator:
        """Return the translator of one streamed answer."""
        return MessagesStream(call.state)

    def error(self, refusal: GatewayRefusal) -> JsonObject:
        """Return the refusal in Anthropic's shape."""
        message = refusal.agents_body["error"]["message"]
        status = refusal.status_code
        kind = _ERRORS.get(status, "api_error" if status >= 500 else "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": message}}


class MessagesStream:
    """Translates one stream into Anthropic's events; one content block is open at a time."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._parts = PartStream()
        self._index = -1
        self._calls = 0
        self._open: Kind | None = None
        self._thought: list[str] = []

    def begin(self) -> bytes:
        """Return ``message_start``, whose usage is not known yet: ``message_delta`` has it."""
        return _event("message_start", message=_message(self._state))

    def feed(self, chunk: JsonObject) -> bytes:
        """Return the events that ``chunk`` is worth."""
        return b"".join(self._part(part) for part in self._parts.feed(chunk))

    def end(self, completion: JsonObject) -> bytes:
        """Return the end of the open block, ``message_delta`` and ``message_stop``."""
        out = b"".join([*(self._part(part) for part in self._parts.finish()), self._close()])
        out += _event("message_delta", delta=_stopped(completion), usage=_usage(completion))
        return out + _event("message_stop")

    def fail(self, refusal: GatewayRefusal) -> bytes:
        """Return ``error``."""
        return event("error", Messages().error(refusal))

    def _part(self, part: Part) -> bytes:
        out = self._close() + self._start(part) if part.starts else b""
        if part.kind is Kind.REASONING:
            self._thought.append(part.text)
            return out + self._delta(type="thinking_delta", thinking=part.text)
        if part.kind is Kind.CALL:
            return out + (self._delta(type="input_json_delta", partial_json=part.text) if part.text else b"")
        return out + self._delta(type="text_delta", text=part.text)

    def _start(self, part: Part) -> bytes:
        self._index += 1
        self._open = part.kind
        block = _block(Part(part.kind, "", True, part.call_id, part.name), self._state, self._calls)
        if part.kind is Kind.CALL:
            self._calls += 1
        elif part.kind is Kind.REASONING:
            block["signature"] = ""
        return _event("content_block_start", index=self._index, content_block=block)

    def _close(self) -> bytes:
        if self._open is None:
            return b""
        out = b""
        if self._open is Kind.REASONING:
            out = self._delta(type="signature_delta", signature=sealed("".join(self._thought)))
            self._thought = []
        self._open = None
        return out + _event("content_block_stop", index=self._index)

    def _delta(self, **delta: str) -> bytes:
        return _event("content_block_delta", index=self._index, delta=delta)


async def count_tokens(call: SideCall) -> JsonObject:
    """Return ``input_tokens`` of a request: vLLM's ``/tokenize``, else the usage of a call that samples one token.

    An upstream that speaks the dialect counts by itself.
    """
    if call.native:
        return await call.ask("/messages/count_tokens", call.body | {"model": call.registration.model})
    chat = _chat(call.body)
    body = {"model": call.registration.model} | {key: chat[key] for key in ("messages", "tools") if key in chat}
    try:
        counted = (await call.ask("//tokenize", body | {"add_generation_prompt": True})).get("count")
    except UpstreamError:
        counted = None
    if not isinstance(counted, int):
        counted = usage_counts(await call.ask("/chat/completions", body | {"max_tokens": 1}))[0]
    return {"input_tokens": counted}


def _chat(fields: JsonObject) -> JsonObject:
    """Return a request as a chat request."""
    for named in _REFUSED:
        if fields.get(named):
            raise refused(named, "not supported by the rollout gateway", "unsupported_parameter")
    refuse_unknown(fields, _READ | _IGNORED | SAMPLING | set(_REFUSED))
    chat: JsonObject = {"messages": read_messages(fields)}
    chat |= {key: fields[key] for key in sorted(SAMPLING & fields.keys()) if fields[key] is not None}
    for own, chats in (("max_tokens", "max_tokens"), ("stop_sequences", "stop")):
        if fields.get(own):
            chat[chats] = fields[own]
    if fields.get("tools"):
        chat["tools"] = read_tools(fields["tools"])
        if fields.get("tool_choice"):
            chat |= read_tool_choice(mapping(fields["tool_choice"], "tool_choice"))
    config = mapping(fields.get("output_config") or {}, "output_config")
    if wanted := config.get("format") or fields.get("output_format"):
        chat["response_format"] = _response_format(mapping(wanted, "output_config.format"))
    return chat


def _response_format(wanted: JsonObject) -> JsonObject:
    if wanted.get("type") != "json_schema":
        raise unsupported("output_config.format.type", wanted.get("type"))
    schema = mapping(wanted.get("schema"), "output_config.format.schema")
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": schema}}


def _message(state: State) -> JsonObject:
    top: JsonObject = {"id": state.id, "type": "message", "role": "assistant", "model": state.model, "content": []}
    return top | {"stop_reason": None, "stop_sequence": None, "usage": _usage({})}


def _block(part: Part, state: State, call: int) -> JsonObject:
    if part.kind is Kind.REASONING:
        return {"type": "thinking", "thinking": part.text, "signature": sealed(part.text)}
    if part.kind is Kind.CALL:
        block = {"type": "tool_use", "id": tool_use_id(state.id, call), "name": part.name}
        return block | {"input": arguments_object(part.text)}
    return {"type": "text", "text": part.text}


def _stopped(completion: JsonObject) -> JsonObject:
    choice = completion["choices"][0]
    reason = as_text(choice.get("finish_reason"))
    stopped = _STOPS.get(reason, "end_turn")
    if stopped == "end_turn" and choice["message"].get("tool_calls"):
        stopped = "tool_use"  # some servers say "stop" after a call
    sequence = choice.get("stop_reason")  # vLLM's: the string that ended it, or a token's id
    if reason == "stop" and isinstance(sequence, str) and stopped == "end_turn":
        return {"stop_reason": "stop_sequence", "stop_sequence": sequence}
    return {"stop_reason": stopped, "stop_sequence": None}


def _usage(completion: JsonObject) -> JsonObject:
    usage = as_dict(completion.get("usage"))
    prompt, sampled = as_count(usage.get("prompt_tokens")), as_count(usage.get("completion_tokens"))
    cached = min(prompt, as_count(as_dict(usage.get("prompt_tokens_details")).get("cached_tokens")))
    cache = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": cached}
    return {"input_tokens": prompt - cached} | cache | {"output_tokens": sampled}


def _event(kind: str, **fields: Any) -> bytes:
    return event(kind, {"type": kind} | fields)
