"""Chat completions as upstreams answer them: whether they are any, and their messages in a trajectory's shape."""

from __future__ import annotations

from typing import Any

import orjson

from workers.gateway.server.errors import UpstreamError
from workers.gateway.server.nesting import MAX_NESTING, is_too_deep

Message = dict[str, Any]

#: An answer's fields that have a place of their own in a trajectory's message, or are another name of one that has.
_ANSWER_FIELDS = frozenset(
    {"role", "content", "reasoning", "reasoning_content", "thinking_blocks", "tool_calls", "function_call"}
)
_NOTHING: Message = {"content": None, "reasoning_content": None, "thinking_blocks": None}


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


def malformed(reason: str) -> UpstreamError:
    """Return the error of an upstream that answered 200 with something else than was asked for."""
    return UpstreamError(
        502, f"The model's server answered something that cannot be used: {reason}.", "upstream_malformed"
    )


def stream_failed(said: str) -> UpstreamError:
    """Return the error of an upstream that sent an error in its stream."""
    return UpstreamError(502, f"The model's server failed in the middle of its stream: {said}", "upstream_error")


def ended_early(chunks: int) -> UpstreamError:
    """Return the error of a stream that ended without an end."""
    message = f"The model's server ended its stream early, after {chunks} chunks."
    return UpstreamError(502, message, "upstream_disconnected")


def normalise(message: Message) -> Message:
    """Return a conversation's message in a trajectory's shape: assistants' have explicit nulls and flat tool calls."""
    if message.get("role") != "assistant":
        return message
    calls = message.get("tool_calls")
    flat = [_flat(call) for call in calls] if isinstance(calls, list) and calls else None
    return _NOTHING | message | {"tool_calls": flat}


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


def as_request(message: Message) -> Message:
    """Return a trajectory's message as a chat request has it: the opposite of `normalise`."""
    if message.get("role") != "assistant":
        return message
    plain = {name: value for name, value in message.items() if value is not None or name == "content"}
    if calls := message.get("tool_calls"):
        plain["tool_calls"] = [_nested(call) for call in calls]
    return plain


def _flat(call: Any) -> Any:
    """Return a tool call as ``{id, name, arguments}``; one that is flat already, or no tool call at all, as it is."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return call
    return {"id": call.get("id"), "name": function.get("name"), "arguments": function.get("arguments")}


def _nested(call: Any) -> Any:
    if not isinstance(call, dict) or "function" in call:
        return call
    function = {"name": call.get("name"), "arguments": call.get("arguments")}
    return {"id": call.get("id"), "type": "function", "function": function}


def usage_counts(completion: dict[str, Any]) -> tuple[int, int]:
    """Return how many tokens the prompt and the completion have by the upstream's count; zeros when it gave none."""
    usage = completion.get("usage")
    found = [usage.get(name) if isinstance(usage, dict) else 0 for name in ("prompt_tokens", "completion_tokens")]
    prompt, sampled = (value if isinstance(value, int) else 0 for value in found)
    return prompt, sampled
