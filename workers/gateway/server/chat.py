"""The chat-completions dialect: reading an agent's request, asking the upstream, and reading its answer.

The merge rule, weakest first: the agent's own fields, the registration's sampling parameters, ``logprobs`` and
``return_token_ids``, the registration's ``extra_body``. The model is the registered one; messages and whether the
answer is streamed are the agent's alone. ``max_tokens`` and ``max_completion_tokens`` are two names of one limit, so a
registered one removes the agent's other.

An agent that sends fields beyond messages, tools, model and streaming has both recorded in its step's ``extras``:
``agent_params`` (what it sent) and ``sent_params`` (what the upstream was asked for instead). Otherwise, and unless
there is something to note (``token_error``, ``choices``, ``partial``), ``extras`` is ``{}``.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import orjson

from workers.gateway.protocol import Registration
from workers.gateway.server.errors import GatewayRefusal, UpstreamError, invalid
from workers.gateway.server.nesting import MAX_NESTING, is_too_deep
from workers.gateway.server.recorder import Message, RecordedRollout, Turn
from workers.gateway.server.tokens import TokenError, read_tokens

PATH = "/chat/completions"

_AGENTS_ALONE = frozenset({"messages", "stream", "stream_options"})
_NOT_PARAMS = _AGENTS_ALONE | {"model", "tools"}
_LENGTH_LIMITS = frozenset({"max_tokens", "max_completion_tokens"})
#: An answer's fields that have a place of their own in a trajectory's message, or are another name of one that has.
_ANSWER_FIELDS = frozenset(
    {"role", "content", "reasoning", "reasoning_content", "thinking_blocks", "tool_calls", "function_call"}
)


@dataclass(frozen=True)
class ChatRequest:
    """An agent's request; ``fields`` is all that it sent."""

    fields: dict[str, Any]

    @property
    def messages(self) -> list[Message]:
        """The conversation, in the agent's own shape."""
        messages: list[Message] = self.fields["messages"]
        return messages

    @property
    def stream(self) -> bool:
        """Whether the answer is to be streamed."""
        return bool(self.fields.get("stream"))

    @property
    def wants_usage(self) -> bool:
        """Whether the agent asked for the usage chunk at the end of its stream."""
        options = self.fields.get("stream_options")
        return isinstance(options, dict) and bool(options.get("include_usage"))

    @property
    def params(self) -> dict[str, Any]:
        """What the agent sent beyond messages, tools, model and streaming."""
        return {name: value for name, value in self.fields.items() if name not in _NOT_PARAMS}


def parse_json(body: bytes) -> Any:
    """Parse a request's body; raises `GatewayRefusal` (422) in FastAPI's shape."""
    if not body:
        raise invalid("missing", [], "Field required", None)
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise _unreadable(body, error) from None
    if is_too_deep(value):
        raise invalid("nesting_limit", [], f"Input should be nested at most {MAX_NESTING} levels deep", None)
    return value


def _unreadable(body: bytes, error: orjson.JSONDecodeError) -> GatewayRefusal:
    position, reason = error.pos, error.msg
    try:  # the followed gateway's words for the same fault
        json.loads(body)
    except json.JSONDecodeError as followed:
        position, reason = followed.pos, followed.msg
    except (RecursionError, UnicodeDecodeError):
        pass
    return invalid("json_invalid", [position], "JSON decode error", {}, ctx={"error": reason})


def parse_request(body: bytes) -> ChatRequest:
    """Read an agent's request; raises `GatewayRefusal` (400 without messages, 422 when malformed)."""
    fields = parse_json(body)
    if not isinstance(fields, dict):
        raise invalid("dict_type", [], "Input should be a valid dictionary", fields)
    messages = fields.get("messages")
    if not isinstance(messages, list):
        raise GatewayRefusal(400, "Chat request must include a `messages` array.")
    for index, message in enumerate(messages):
        where: list[str | int] = ["messages", index]
        if not isinstance(message, dict):
            raise invalid("dict_type", where, "Input should be a valid dictionary", message)
        if "role" not in message:
            raise invalid("missing", [*where, "role"], "Field required", message)
        if not isinstance(message["role"], str):
            raise invalid("string_type", [*where, "role"], "Input should be a valid string", message["role"])
    return ChatRequest(fields)


def upstream_fields(request: ChatRequest, registration: Registration, *, ask_tokens: bool = True) -> dict[str, Any]:
    """Return the body that the upstream is sent, by the merge rule."""
    sampling = {k: v for k, v in registration.sampling_params.items() if k != "extra_body" and k not in _AGENTS_ALONE}
    extra = registration.sampling_params.get("extra_body")
    extra = {k: v for k, v in extra.items() if k not in _AGENTS_ALONE} if isinstance(extra, dict) else {}
    registered = sampling | extra
    dropped = _LENGTH_LIMITS if not _LENGTH_LIMITS.isdisjoint(registered) else frozenset()

    body = {name: value for name, value in request.fields.items() if name not in dropped}
    body |= {"model": registration.model} | sampling
    if ask_tokens:
        body |= {"logprobs": True, "return_token_ids": True}
    body |= extra
    if request.stream:
        options = body.get("stream_options")
        body["stream_options"] = (options if isinstance(options, dict) else {}) | {"include_usage": True}
    return body


def begin_turn(rollout: RecordedRollout, request: ChatRequest, sent: dict[str, Any]) -> Turn:
    """Open the record of a call: its conversation, and who asked for which parameters."""
    messages = rollout.begin([normalise(message) for message in request.messages])
    extras: dict[str, Any] = {}
    if request.params:
        sent_params = {name: value for name, value in sent.items() if name not in _NOT_PARAMS}
        extras = {"agent_params": request.params, "sent_params": sent_params}
    return Turn(messages=messages, completion={}, extras=extras)


def read_answer(body: bytes) -> dict[str, Any]:
    """Parse and check the upstream's answer; raises `UpstreamError` (502) when it is no chat completion."""
    try:
        completion = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise malformed(f"it is not JSON ({error})") from None
    check_completion(completion)
    checked: dict[str, Any] = completion
    return checked


def check_completion(completion: Any) -> None:
    """Raise `UpstreamError` (502) unless ``completion`` has a first choice with an assistant's message."""
    choices = completion.get("choices") if isinstance(completion, dict) else None
    choice = choices[0] if isinstance(choices, list) and choices else None
    message = choice.get("message") if isinstance(choice, dict) else None
    if not isinstance(message, dict):
        raise malformed("it has no choices[0].message")
    calls = message.get("tool_calls")
    if calls is not None and not (isinstance(calls, list) and all(isinstance(call, dict) for call in calls)):
        raise malformed("its tool_calls are not a list of objects")
    if is_too_deep(message):
        raise malformed(f"its message is nested more than {MAX_NESTING} levels deep")


def close_turn(turn: Turn, completion: dict[str, Any], *, partial: bool = False) -> Turn:
    """Fill the record of a call from the upstream's (checked) answer."""
    choice = completion["choices"][0]
    turn.completion = answer_message(choice["message"])
    turn.finish_reason = choice.get("finish_reason")
    notes: dict[str, Any] = {}
    try:
        turn.tokens = read_tokens(completion)
    except TokenError as error:
        notes["token_error"] = str(error)
    if len(completion["choices"]) > 1:
        notes["choices"] = len(completion["choices"])  # the agent got them all, the step holds the first
    if partial:
        turn.partial = notes["partial"] = True
    turn.extras |= notes
    return turn


def normalise(message: Message) -> Message:
    """Return a conversation's message in a trajectory's shape: assistants' have explicit nulls and flat tool calls."""
    if message["role"] != "assistant":
        return message
    known = {"content": None, "reasoning_content": None, "thinking_blocks": None}
    calls = message.get("tool_calls")
    return (
        known | message | {"tool_calls": [_flat(call) for call in calls] if isinstance(calls, list) and calls else None}
    )


def answer_message(message: Message) -> Message:
    """Return an upstream's message in a trajectory's shape; fields without a place in it are kept unless empty."""
    known = {
        "role": "assistant",
        "content": message.get("content"),
        "reasoning_content": message.get("reasoning_content") or message.get("reasoning") or None,
        "thinking_blocks": message.get("thinking_blocks"),
        "tool_calls": message.get("tool_calls"),
    }
    rest = {name: value for name, value in message.items() if name not in _ANSWER_FIELDS and value}
    return normalise(known) | rest


def malformed(reason: str) -> UpstreamError:
    """Return the error of an upstream that answered 200 with something else than was asked for."""
    return UpstreamError(
        502, f"The model's server answered something that cannot be used: {reason}.", "upstream_malformed"
    )


def _flat(call: Any) -> Any:
    """Return a tool call as ``{id, name, arguments}``; one that is flat already, or no tool call at all, as it is."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return call
    return {"id": call.get("id"), "name": function.get("name"), "arguments": function.get("arguments")}
