"""OpenAI's Responses API, translated to chat completions and back.

``instructions`` and the leading system and developer messages become one system message; ``previous_response_id``
takes up the conversation of an earlier answer of this rollout, without its instructions, as OpenAI has it. Namespaced
tools become functions ``NAMESPACE__NAME`` and custom tools functions of one string, and their calls come back as they
were asked for. Reasoning is given as ``reasoning_text``, and again in ``encrypted_content`` for clients that keep only
that; both are read back.

Ignored, because clients send them whatever they talk to: ``store`` (nothing can be fetched later; everything is kept
for ``previous_response_id``), ``include``, ``truncation``, ``service_tier``, ``prompt_cache_*``, ``client_metadata``,
``safety_identifier``, ``user``, ``text.verbosity``, ``reasoning.summary``, and offers of web search, image generation
and tool search. ``background``, ``conversation``, ``prompt``, stored items and files, other hosted tools, and
parameters that nobody knows are refused with 400.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping

from workers.gateway.server.dialects import KEEP_ALIVE, Call, Earlier, JsonObject, Native, Side, StreamTranslator
from workers.gateway.server.dialects.fields import (
    SAMPLING,
    as_count,
    as_dict,
    as_text,
    mapping,
    objects,
    refuse_unknown,
    refused,
    text,
    unsupported,
)
from workers.gateway.server.dialects.parts import parts_of
from workers.gateway.server.dialects.responses_input import (
    Conversation,
    Tools,
    input_items,
    read_tool_choice,
    with_lead,
    without_instructions,
)
from workers.gateway.server.dialects.responses_native import ResponsesNative
from workers.gateway.server.dialects.responses_output import State, is_cut, item_of, plain_error, response
from workers.gateway.server.dialects.responses_stream import ResponsesStream
from workers.gateway.server.errors import GatewayRefusal
from workers.gateway.server.jsonio import parse_object

#: Known parameters that ask for something that a chat completion cannot be.
_REFUSED = ("background", "conversation", "prompt", "moderation")
_IGNORED = frozenset(
    {"store", "include", "truncation", "service_tier", "prompt_cache_key", "prompt_cache_options"}
    | {"prompt_cache_retention", "client_metadata", "safety_identifier", "user", "max_tool_calls", "stream_options"}
    | {"context_management", "access_programs"}
)
_READ = frozenset(
    {"model", "input", "instructions", "previous_response_id", "tools", "tool_choice", "parallel_tool_calls"}
    | {"max_output_tokens", "text", "reasoning", "metadata", "stream", "top_logprobs"}
)
_EFFORTS = frozenset({"low", "medium", "high"})
#: The note that tells how much of a conversation's first message its instructions are; see `without_instructions`.
_INSTRUCTIONS = "instructions_length"


class Responses:
    """The Responses dialect."""

    name = "responses"
    paths: tuple[str, ...] = ("/responses",)
    sides: Mapping[str, Side] = {}
    keep_alive = KEEP_ALIVE
    native: Native | None = ResponsesNative()

    def read(self, body: bytes, earlier: Earlier) -> Call:
        """Read a request; raises `GatewayRefusal` (400, 422) that names the field it cannot read."""
        fields = parse_object(body)
        for named in _REFUSED:
            if fields.get(named):
                raise refused(named, "not supported by the rollout gateway", "unsupported_parameter")
        refuse_unknown(fields, _READ | _IGNORED | SAMPLING | set(_REFUSED))
        instructions = text(fields.get("instructions") or "", "instructions")
        tools = Tools()
        for index, tool in enumerate(objects(fields.get("tools") or [], "tools")):
            tools.add(tool, f"tools[{index}]")
        before = _before(fields, earlier)
        chat = {"messages": _messages(fields, instructions, before)} | _parameters(fields, tools)
        answer_id = f"resp_{secrets.token_hex(20)}"
        state = State(answer_id, as_text(fields.get("model")), _echo(fields), tools, fields, before)
        notes: JsonObject = {"tools_left_out": tools.left_out} if tools.left_out else {}
        if instructions:
            notes[_INSTRUCTIONS] = len(instructions)
        if fields.get("metadata"):
            notes["metadata"] = mapping(fields["metadata"], "metadata")
        return Call(chat, bool(fields.get("stream")), answer_id, state, notes)

    def answer(self, call: Call, completion: JsonObject) -> JsonObject:
        """Return the completion as a response object."""
        cut = is_cut(completion)
        message = completion["choices"][0]["message"]
        items = [item_of(part, call.state, cut=cut) for part in parts_of(message)]
        return response(call.state, completion, items)

    def translator(self, call: Call) -> StreamTranslator:
        """Return the translator of one streamed answer."""
        return ResponsesStream(call.state)

    def error(self, refusal: GatewayRefusal) -> JsonObject:
        """Return the refusal in OpenAI's shape."""
        return {"error": plain_error(refusal)}


def _before(fields: JsonObject, earlier: Earlier) -> list[JsonObject]:
    """Return the conversation that the request goes on with, without its instructions."""
    if fields.get("previous_response_id") is None:
        return []
    previous = text(fields["previous_response_id"], "previous_response_id")
    found = earlier(previous)
    if found is None:
        said = f"Previous response with id {previous[:100]!r} not found in this rollout."
        param = {"param": "previous_response_id", "code": "previous_response_not_found"}
        raise GatewayRefusal(400, said, error={"message": said, "type": "invalid_request_error"} | param)
    messages, notes = found
    return without_instructions(messages, as_count(notes.get(_INSTRUCTIONS)))


def _messages(fields: JsonObject, instructions: str, before: list[JsonObject]) -> list[JsonObject]:
    conversation = Conversation(list(before))
    for index, item in enumerate(input_items(fields, is_new=not before)):
        conversation.add(item, f"input[{index}]")
    return with_lead(conversation.finish(), instructions)


def _parameters(fields: JsonObject, tools: Tools) -> JsonObject:
    """Return a chat request's fields other than its messages."""
    chat = {key: fields[key] for key in sorted(SAMPLING & fields.keys()) if fields[key] is not None}
    if fields.get("max_output_tokens") is not None:
        chat["max_tokens"] = fields["max_output_tokens"]
    if fields.get("top_logprobs"):
        chat |= {"logprobs": True, "top_logprobs": fields["top_logprobs"]}
    effort = mapping(fields.get("reasoning") or {}, "reasoning").get("effort")
    if isinstance(effort, str) and effort in _EFFORTS:
        chat["reasoning_effort"] = effort
    if wanted := _response_format(fields):
        chat["response_format"] = wanted
    choice = None if fields.get("tool_choice") is None else read_tool_choice(fields["tool_choice"], tools)
    if tools.chat:
        chat["tools"] = tools.chat
        if choice is not None:
            chat["tool_choice"] = choice
        if isinstance(fields.get("parallel_tool_calls"), bool):
            chat["parallel_tool_calls"] = fields["parallel_tool_calls"]
    return chat


def _response_format(fields: JsonObject) -> JsonObject | None:
    wanted = mapping(mapping(fields.get("text") or {}, "text").get("format") or {}, "text.format")
    kind = wanted.get("type", "text")
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": "json_object"}
    if kind != "json_schema":
        raise unsupported("text.format.type", kind)
    schema = {key: wanted[key] for key in ("name", "description", "schema", "strict") if wanted.get(key) is not None}
    return {"type": "json_schema", "json_schema": schema}


def _echo(fields: JsonObject) -> JsonObject:
    """Return what a response repeats of its request, with the defaults of what was not given."""
    reasoning = as_dict(fields.get("reasoning"))
    defaults: JsonObject = {
        "instructions": None,
        "max_output_tokens": None,
        "max_tool_calls": None,
        "metadata": {},
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "prompt_cache_key": None,
        "safety_identifier": None,
        "store": True,
        "temperature": None,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [],
        "top_logprobs": 0,
        "top_p": None,
        "truncation": "disabled",
        "user": None,
    }
    given = {key: fields[key] for key in defaults if fields.get(key) is not None}
    said = {"reasoning": {"effort": reasoning.get("effort"), "summary": reasoning.get("summary")}}
    return defaults | given | said | {"background": False}
