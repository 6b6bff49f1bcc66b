"""OpenAI's Responses API as an upstream speaks it: asked in its own words, its answers read for the record.

``previous_response_id`` never reaches an upstream: the gateway has the conversation, and most model servers keep none
(vLLM only with a setting, and not across a restart), so that it is sent whole. Token ids come as vLLM gives them with
``enable_response_messages`` (``input_messages`` and ``output_messages``, each ``tokens`` of one ``raw_message_tokens``)
or under chat's names at the answer's top; logprobs are those of the output's text. Items that no chat message can hold,
such as calls of hosted tools, are named in the message's ``left_out``; requests that cannot be translated are refused
here too, as no record could hold them.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from typing import Any

from workers.gateway.protocol import Registration
from workers.gateway.server.answers import ended_early, malformed, stream_failed
from workers.gateway.server.dialects import Call, JsonObject
from workers.gateway.server.dialects.fields import as_count, as_dict, as_text, parsed
from workers.gateway.server.dialects.responses_input import Conversation, Tools, input_items
from workers.gateway.server.dialects.responses_output import custom_input
from workers.gateway.server.errors import GatewayRefusal
from workers.gateway.server.merge import native_params

_LOGPROBS = "message.output_text.logprobs"
_NAMES = {
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "logprobs": None,
    "return_token_ids": None,
    "n": None,
    "reasoning_effort": None,
}
_ENDS = frozenset({"response.completed", "response.incomplete", "response.failed", "error"})
_READABLE = frozenset({"message", "reasoning", "function_call", "custom_tool_call"})
#: By kind of delta: where an item has its text.
_DELTAS = {
    "response.output_text.delta": "output_text",
    "response.refusal.delta": "refusal",
    "response.reasoning_text.delta": "reasoning_text",
    "response.function_call_arguments.delta": "arguments",
    "response.custom_tool_call_input.delta": "input",
}
_STOPS = {"max_output_tokens": "length", "content_filter": "content_filter"}


class ResponsesNative:
    """The Responses dialect, spoken to an upstream."""

    path = "/responses"

    def headers(self, key: str | None) -> dict[str, str]:
        """Return none."""
        return {}

    def body(self, call: Call, registration: Registration, *, ask_tokens: bool) -> JsonObject | None:
        """Return the agent's request with what is registered in it, and all of the conversation."""
        params = native_params(registration, _NAMES)
        if params is None:
            return None
        fields, before = call.state.fields, call.state.before
        body: JsonObject = fields | {"model": registration.model}
        if before:
            del body["previous_response_id"]
            body["input"] = [*_items(before, call.state.tools), *input_items(fields, is_new=False)]
        if effort := registration.sampling_params.get("reasoning_effort"):
            body["reasoning"] = as_dict(body.get("reasoning")) | {"effort": effort}
        if ask_tokens:
            asked = [each for each in fields.get("include") or () if each != _LOGPROBS]
            body |= {"include": [*asked, _LOGPROBS], "enable_response_messages": True}
        return body | params

    def is_last(self, data: bytes) -> bool:
        """Return whether the event ends the response, or tells that it failed."""
        if b"response.completed" in data or b"response.incomplete" in data or b"response.failed" in data:
            return parsed(data).get("type") in _ENDS
        return b'"error"' in data and _is_error(parsed(data))

    def completion(self, answer: JsonObject) -> JsonObject:
        """Return a response object as a chat completion."""
        items = answer.get("output")
        if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
            raise malformed("its output is not a list of items")
        if answer.get("status") == "failed":
            raise stream_failed(_reason(answer))
        message = _message(items)
        reason = as_text(as_dict(answer.get("incomplete_details")).get("reason"))
        finish = _STOPS.get(reason) or ("tool_calls" if message.get("tool_calls") else "stop")
        choice = {"index": 0, "message": message, "finish_reason": finish} | _sampled(answer, items)
        completion = {"object": "chat.completion", "choices": [choice], "usage": _usage(answer.get("usage"))}
        completion |= {name: answer[name] for name in ("id", "model") if isinstance(answer.get(name), str)}
        prompt = _raw_tokens(answer.get("input_messages")) or answer.get("prompt_token_ids")
        return completion if prompt is None else completion | {"prompt_token_ids": prompt}

    def assembled(self, events: Sequence[bytes], *, partial: bool = False) -> JsonObject:
        """Return the response that the last event has, or as much of it as came."""
        for data in reversed(events):
            if self.is_last(data):
                event = parsed(data)
                if _is_error(event) or event["type"] == "response.failed":
                    raise stream_failed(_reason(event))
                return as_dict(event.get("response"))
        if not partial:
            raise ended_early(len(events))
        return _assembled(events)


def _message(items: list[JsonObject]) -> JsonObject:
    """Return the assistant's message that the items are, read as those of a history are: so the next call continues."""
    conversation, left_out = Conversation([]), []
    try:
        for index, item in enumerate(items):
            if item.get("type") in _READABLE:
                conversation.add(item, f"output[{index}]")
            else:
                left_out.append(as_text(item.get("type")))
    except GatewayRefusal as error:
        raise malformed(str(error.detail)) from None
    messages = conversation.finish()
    message: JsonObject = {"role": "assistant", "content": None}
    for each in messages:
        for name in ("content", "reasoning_content"):
            if each.get(name):
                message[name] = (message.get(name) or "") + each[name]
        if each.get("tool_calls"):
            message["tool_calls"] = [*message.get("tool_calls", []), *each["tool_calls"]]
    if message["content"] is None and "tool_calls" not in message:
        message["content"] = ""
    return message | ({"left_out": left_out} if left_out else {})


def _sampled(answer: JsonObject, items: list[JsonObject]) -> JsonObject:
    """Return token ids and logprobs, where given, as a chat completion's choice has them."""
    ids = _raw_tokens(answer.get("output_messages")) or answer.get("token_ids")
    entries = [entry for part in _texts(items) for entry in part.get("logprobs") or ()]
    found: JsonObject = {} if ids is None else {"token_ids": ids}
    if entries:
        found["logprobs"] = {"content": entries}
    elif isinstance(answer.get("logprobs"), dict):
        found["logprobs"] = answer["logprobs"]
    return found


def _texts(items: list[JsonObject]) -> Iterator[JsonObject]:
    for item in items:
        if item.get("type") == "message" and isinstance(item.get("content"), list):
            yield from (part for part in item["content"] if isinstance(part, dict))


def _raw_tokens(messages: Any) -> Any:
    """Return the tokens of a prompt or an answer that was sampled in one go; several were more than one call."""
    if not isinstance(messages, list) or len(messages) != 1:
        return None
    message = as_dict(messages[0])
    return message.get("tokens") if message.get("type") == "raw_message_tokens" else None


def _usage(given: Any) -> JsonObject:
    usage = as_dict(given)
    prompt, sampled = as_count(usage.get("input_tokens")), as_count(usage.get("output_tokens"))
    cached = as_count(as_dict(usage.get("input_tokens_details")).get("cached_tokens"))
    reasoned = as_count(as_dict(usage.get("output_tokens_details")).get("reasoning_tokens"))
    return {
        "prompt_tokens": prompt,
        "completion_tokens": sampled,
        "total_tokens": prompt + sampled,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {"reasoning_tokens": reasoned},
    }


def _assembled(events: Sequence[bytes]) -> JsonObject:
    """Return the response that a stream without its end makes."""
    top: JsonObject = {}
    items: dict[Any, JsonObject] = {}
    texts: dict[Any, dict[str, list[str]]] = {}
    for data in events:
        event = parsed(data)
        kind, at = event.get("type"), event.get("output_index")
        if kind == "response.created":
            top = as_dict(event.get("response"))
        elif kind in {"response.output_item.added", "response.output_item.done"}:
            items[at] = as_dict(event.get("item"))
            if kind.endswith("done"):
                texts.pop(at, None)
        elif kind in _DELTAS:
            texts.setdefault(at, {}).setdefault(_DELTAS[kind], []).append(as_text(event.get("delta")))
    if not items:
        raise ended_early(len(events))
    return top | {"output": [_with_texts(item, texts.get(at, {})) for at, item in items.items()]}


def _with_texts(item: JsonObject, texts: dict[str, list[str]]) -> JsonObject:
    said = {name: "".join(parts) for name, parts in texts.items()}
    flat = {name: value for name, value in said.items() if name in {"arguments", "input"}}
    parts = [
        {"type": name, "refusal" if name == "refusal" else "text": said[name]} for name in said if name not in flat
    ]
    return item | flat | ({"content": parts} if parts else {})


def _items(messages: list[JsonObject], tools: Tools) -> Iterator[JsonObject]:
    """Yield a conversation's messages as input items: the opposite of `Conversation`."""
    custom: set[str] = set()
    for message in messages:
        content = message.get("content")
        if message["role"] == "tool":
            kind = "custom_tool_call_output" if message["tool_call_id"] in custom else "function_call_output"
            yield {"type": kind, "call_id": message["tool_call_id"], "output": content}
            continue
        if thought := message.get("reasoning_content"):
            parts = [{"type": "reasoning_text", "text": thought}]
            yield {"id": f"rs_{secrets.token_hex(16)}", "type": "reasoning", "summary": [], "content": parts}
        if content or not message.get("tool_calls"):
            said = content if isinstance(content, str) else [_part(part) for part in content or ()]
            yield {"type": "message", "role": message["role"], "content": said}
        for call in message.get("tool_calls") or ():
            item = _call(call, tools)
            if item["type"] == "custom_tool_call":
                custom.add(item["call_id"])
            yield item


def _call(call: JsonObject, tools: Tools) -> JsonObject:
    function = call["function"]
    namespace, own = tools.namespaces.get(function["name"], (None, function["name"]))
    head = {"call_id": call["id"], "name": own} | ({"namespace": namespace} if namespace else {})
    if function["name"] in tools.custom:
        return {"type": "custom_tool_call"} | head | {"input": custom_input(function["arguments"])}
    return {"type": "function_call"} | head | {"arguments": function["arguments"]}


def _part(part: JsonObject) -> JsonObject:
    if part["type"] == "text":
        return {"type": "input_text", "text": part["text"]}
    image = part["image_url"]
    return {"type": "input_image", "image_url": image["url"], "detail": image.get("detail", "auto")}


def _is_error(event: JsonObject) -> bool:
    return event.get("type") == "error" or ("type" not in event and bool(event.get("error")))


def _reason(event: JsonObject) -> str:
    error = as_dict(event.get("response", event)).get("error")
    return as_text(as_dict(error).get("message")) or as_text(event.get("message")) or str(error)
