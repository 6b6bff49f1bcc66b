"""Answers of OpenAI's Responses API: response objects and the items in them."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass, field

import orjson

from workers.gateway.server.dialects import JsonObject
from workers.gateway.server.dialects.fields import as_count, as_dict, as_text, sealed
from workers.gateway.server.dialects.parts import Kind, Part
from workers.gateway.server.dialects.responses_input import CUSTOM_INPUT, Tools
from workers.gateway.server.errors import GatewayRefusal


@dataclass
class State:
    """What an answer needs of its request: its own ``id``, and ``echo``, the fields that it repeats.

    ``fields`` is the request; ``before`` the conversation that it goes on with by ``previous_response_id``.
    """

    id: str
    model: str
    echo: JsonObject
    tools: Tools
    fields: JsonObject
    before: list[JsonObject]
    created_at: int = field(default_factory=lambda: int(time.time()))


def plain_error(refusal: GatewayRefusal) -> JsonObject:
    """Return a refusal as OpenAI's error object, whose code is a string."""
    error: JsonObject = refusal.agents_body["error"]
    code = error.get("code")
    return error | {"code": code if code is None else str(code)}


def is_cut(completion: JsonObject) -> bool:
    """Return whether the model was stopped before it came to its end."""
    return completion["choices"][0].get("finish_reason") in {"length", "content_filter"}


def response(state: State, completion: JsonObject | None, items: list[JsonObject]) -> JsonObject:
    """Return a response object: in progress without a completion."""
    top: JsonObject = {
        "id": state.id,
        "object": "response",
        "created_at": state.created_at,
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "model": state.model,
        "output": items,
        "usage": None,
    } | state.echo
    if completion is None:
        return top
    reason = {"length": "max_output_tokens", "content_filter": "content_filter"}.get(
        as_text(completion["choices"][0].get("finish_reason"))
    )
    status = {"status": "incomplete", "incomplete_details": {"reason": reason}} if reason else {"status": "completed"}
    model = as_text(completion.get("model")) or state.model
    return top | status | {"model": model, "usage": usage_of(completion), "completed_at": int(time.time())}


def usage_of(completion: JsonObject) -> JsonObject:
    """Return a completion's usage under the names of the Responses API."""
    usage = as_dict(completion.get("usage"))
    prompt, sampled = as_count(usage.get("prompt_tokens")), as_count(usage.get("completion_tokens"))
    cached = as_count(as_dict(usage.get("prompt_tokens_details")).get("cached_tokens"))
    reasoned = as_count(as_dict(usage.get("completion_tokens_details")).get("reasoning_tokens"))
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": sampled,
        "output_tokens_details": {"reasoning_tokens": reasoned},
        "total_tokens": prompt + sampled,
    }


def new_item(part: Part, state: State) -> JsonObject:
    """Return the item that a part begins, with nothing in it yet."""
    mark = secrets.token_hex(16)
    if part.kind is Kind.REASONING:
        return {"id": f"rs_{mark}", "type": "reasoning", "status": "in_progress", "summary": [], "content": []}
    if part.kind is not Kind.CALL:
        top = {"id": f"msg_{mark}", "type": "message", "status": "in_progress", "role": "assistant"}
        return top | {"content": []}
    namespace, own = state.tools.namespaces.get(part.name, (None, part.name))
    head: JsonObject = {"status": "in_progress", "call_id": part.call_id or f"call_{mark[:24]}", "name": own}
    if namespace:
        head["namespace"] = namespace
    if part.name in state.tools.custom:
        return {"id": f"ctc_{mark}", "type": "custom_tool_call"} | head | {"input": ""}
    return {"id": f"fc_{mark}", "type": "function_call"} | head | {"arguments": ""}


def content_part(kind: Kind, said: str) -> JsonObject:
    """Return the content of a message or reasoning item."""
    if kind is Kind.REASONING:
        return {"type": "reasoning_text", "text": said}
    if kind is Kind.REFUSAL:
        return {"type": "refusal", "refusal": said}
    return {"type": "output_text", "text": said, "annotations": [], "logprobs": []}


def finished(item: JsonObject, kind: Kind, said: str, *, cut: bool = False) -> JsonObject:
    """Return ``item`` with all that was ``said``."""
    done = item | {"status": "incomplete" if cut else "completed"}
    if item["type"] == "function_call":
        return done | {"arguments": said}
    if item["type"] == "custom_tool_call":
        return done | {"input": custom_input(said)}
    done["content"] = [content_part(kind, said)]
    return done | {"encrypted_content": sealed(said)} if kind is Kind.REASONING else done


def item_of(part: Part, state: State, *, cut: bool) -> JsonObject:
    """Return the item that a whole part is."""
    return finished(new_item(part, state), part.kind, part.text, cut=cut)


def custom_input(arguments: str) -> str:
    """Return the input of a custom tool's call; arguments that are no such object are the input themselves."""
    try:
        given = orjson.loads(arguments).get(CUSTOM_INPUT)
    except (orjson.JSONDecodeError, AttributeError):
        given = None
    return given if isinstance(given, str) else arguments
