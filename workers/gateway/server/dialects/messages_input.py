"""Requests of Anthropic's Messages API as chat requests."""

from __future__ import annotations

import json
import re
from typing import Any

from workers.gateway.server.dialects import Earlier, JsonObject
from workers.gateway.server.dialects.fields import (
    as_dict,
    content_of,
    image_part,
    mapping,
    name,
    objects,
    refused,
    text,
    text_part,
    unsupported,
)

#: Claude Code's first system block: it differs from call to call, so with it no prompt would continue the one before.
_BILLING = "x-anthropic-billing-header:"
#: What a tool that failed has said already, so that it is not said twice.
_ERROR_WORDS = ("error", "<tool_use_error>")
_TOOL_USE_ID = re.compile(r"toolu_([0-9a-f]{24})_\d+")
#: The arguments of a call whose JSON the model broke, as an agent gets them.
BROKEN = "invalid_json"


def tool_use_id(answer_id: str, index: int) -> str:
    """Return the id that an agent is given for a tool call: it tells which answer made it."""
    return f"toolu_{answer_id.removeprefix('msg_')}_{index}"


def arguments_object(arguments: str) -> JsonObject:
    """Return a call's arguments as an object, which Anthropic's ``input`` must be."""
    try:
        value = json.loads(arguments) if arguments.strip() else {}
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {BROKEN: arguments}


def read_messages(fields: JsonObject) -> list[JsonObject]:
    """Return the messages of a chat request for ``system`` and ``messages``."""
    messages: list[JsonObject] = []
    if system := _system(fields.get("system"), "system"):
        messages.append({"role": "system", "content": system})
    for index, message in enumerate(objects(fields.get("messages"), "messages")):
        where, role = f"messages[{index}]", message.get("role")
        if role == "user":
            messages += _user(message.get("content"), f"{where}.content")
        elif role == "assistant":
            messages.append(assistant_message(message.get("content"), f"{where}.content"))
        elif role == "system":
            messages.append({"role": "system", "content": _system(message.get("content"), f"{where}.content")})
        else:
            raise unsupported(f"{where}.role", role)
    return messages


def restored(messages: list[JsonObject], earlier: Earlier) -> list[JsonObject]:
    """Return ``messages`` with the model's own words where an agent sent them back in other ones.

    Arguments reach an agent as an object, so that their spaces are lost, and tool calls have ids of the gateway's own:
    the conversation up to the last answer that this history names tells what they were.
    """
    before = _conversation(messages, earlier)
    if before is None:
        return messages
    ids: dict[str, str] = {}
    whole: list[JsonObject] = []
    for index, message in enumerate(messages):
        known = before[index] if index < len(before) else {}
        if message["role"] == "assistant" and _is_same(message, known):
            own = {key: known[key] for key in ("content", "tool_calls") if key in known}
            pairs = zip(message.get("tool_calls") or (), known.get("tool_calls") or (), strict=True)
            ids |= {call["id"]: was["id"] for call, was in pairs if isinstance(was.get("id"), str)}
            message = message | own  # noqa: PLW2901 - the agent's is not used any more
        elif message["role"] == "tool":
            message = message | {"tool_call_id": ids.get(message["tool_call_id"], message["tool_call_id"])}  # noqa: PLW2901
        whole.append(message)
    return whole


def _conversation(messages: list[JsonObject], earlier: Earlier) -> list[JsonObject] | None:
    for message in reversed(messages):
        for call in message.get("tool_calls") or ():
            if match := _TOOL_USE_ID.fullmatch(call["id"]):
                found = earlier(f"msg_{match[1]}")
                return found and found[0]
    return None


def _is_same(message: JsonObject, known: JsonObject) -> bool:
    said, was = message.get("content") or "", known.get("content") or ""
    calls, were = message.get("tool_calls") or [], known.get("tool_calls") or []
    if known.get("role") != "assistant" or not isinstance(was, str) or said.strip() != was.strip():
        return False
    return len(calls) == len(were) and all(_is_same_call(*pair) for pair in zip(calls, were, strict=True))


def _is_same_call(call: JsonObject, was: JsonObject) -> bool:
    function, known = call["function"], as_dict(was.get("function"))
    arguments = known.get("arguments")
    if function["name"] != known.get("name") or not isinstance(arguments, str):
        return False
    return arguments_object(function["arguments"]) == arguments_object(arguments)


def read_tools(tools: Any) -> list[JsonObject]:
    """Return a chat request's tools."""
    return [_tool(tool, f"tools[{index}]") for index, tool in enumerate(objects(tools, "tools"))]


def _tool(tool: JsonObject, where: str) -> JsonObject:
    if tool.get("type") not in {None, "custom"}:
        raise unsupported(f"{where}.type", tool["type"])
    function: JsonObject = {"name": name(tool.get("name"), f"{where}.name")}
    if tool.get("description") is not None:
        function["description"] = text(tool["description"], f"{where}.description")
    function["parameters"] = mapping(tool.get("input_schema"), f"{where}.input_schema")
    return {"type": "function", "function": function}


def read_tool_choice(choice: JsonObject) -> JsonObject:
    """Return the fields of a chat request that say the same as ``tool_choice``."""
    kind = choice.get("type")
    plain = {"auto": "auto", "any": "required", "none": "none"}
    if kind == "tool":
        function = {"name": name(choice.get("name"), "tool_choice.name")}
        chosen: JsonObject = {"tool_choice": {"type": "function", "function": function}}
    elif isinstance(kind, str) and kind in plain:
        chosen = {"tool_choice": plain[kind]}
    else:
        raise unsupported("tool_choice.type", kind)
    return chosen | ({"parallel_tool_calls": False} if choice.get("disable_parallel_tool_use") else {})


def _system(value: Any, where: str) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    said = []
    for index, block in enumerate(objects(value, where)):
        if block.get("type") != "text":
            raise unsupported(f"{where}[{index}].type", block.get("type"))
        said.append(text(block.get("text"), f"{where}[{index}].text"))
    return "\n\n".join(each for each in said if each and not each.startswith(_BILLING))


def _user(content: Any, where: str) -> list[JsonObject]:
    """Return the messages that one user's message is: its tool results, then all else."""
    if isinstance(content, str):
        return [{"role": "user", "content": content}]
    results: list[JsonObject] = []
    images: list[JsonObject] = []
    said: list[JsonObject] = []
    for index, block in enumerate(objects(content, where)):
        if block.get("type") == "tool_result":
            result, shown = _tool_result(block, f"{where}[{index}]")
            results.append(result)
            images += shown
        else:
            said.append(_part(block, f"{where}[{index}]"))
    if images or said or not results:
        results.append({"role": "user", "content": content_of(images + said)})
    return results


def _tool_result(block: JsonObject, where: str) -> tuple[JsonObject, list[JsonObject]]:
    """Return a tool's message, and the images in it, which chat has in users' messages alone."""
    call_id = text(block.get("tool_use_id"), f"{where}.tool_use_id")
    content = block.get("content") or ""
    images: list[JsonObject] = []
    if not isinstance(content, str):
        parts = [_part(each, f"{where}.content[{n}]") for n, each in enumerate(objects(content, f"{where}.content"))]
        content = "\n".join(part["text"] for part in parts if part["type"] == "text")
        images = [part for part in parts if part["type"] != "text"]
        if images:
            content = content or "(see the image below)"
            images.insert(0, text_part(f"Output of the tool call {call_id}:"))
    if block.get("is_error") and not content.lstrip().lower().startswith(_ERROR_WORDS):
        content = f"Error: {content}"
    return {"role": "tool", "tool_call_id": call_id, "content": content}, images


def _part(block: JsonObject, where: str) -> JsonObject:
    kind = block.get("type")
    if kind == "text":
        return text_part(text(block.get("text"), f"{where}.text"))
    source = as_dict(block.get("source"))
    if kind == "document" and source.get("type") == "text":
        return text_part(text(source.get("data"), f"{where}.source.data"))
    if kind != "image":
        raise unsupported(f"{where}.type", kind)
    if source.get("type") == "url":
        return image_part(text(source.get("url"), f"{where}.source.url"))
    if source.get("type") != "base64":
        raise unsupported(f"{where}.source.type", source.get("type"))
    media = text(source.get("media_type"), f"{where}.source.media_type")
    return image_part(f"data:{media};base64,{text(source.get('data'), f'{where}.source.data')}")


def assistant_message(content: Any, where: str) -> JsonObject:
    """Return the chat message that an assistant's ``content`` is."""
    if isinstance(content, str):
        return {"role": "assistant", "content": content}
    said, thought, calls = "", "", []
    for index, block in enumerate(objects(content, where)):
        at, kind = f"{where}[{index}]", block.get("type")
        if kind == "text":
            said += text(block.get("text"), f"{at}.text")
        elif kind == "thinking":
            thought += text(block.get("thinking"), f"{at}.thinking")
        elif kind == "tool_use":
            calls.append(_call(block, at))
        elif kind != "redacted_thinking":  # nobody but its author can read it
            raise unsupported(f"{at}.type", kind)
    message: JsonObject = {"role": "assistant", "content": said if said or not calls else None}
    if thought:
        message["reasoning_content"] = thought
    return message | ({"tool_calls": calls} if calls else {})


def _call(block: JsonObject, where: str) -> JsonObject:
    given = mapping(block.get("input"), f"{where}.input")
    broken = given.get(BROKEN)
    arguments = broken if len(given) == 1 and isinstance(broken, str) else json.dumps(given, ensure_ascii=False)
    function = {"name": name(block.get("name"), f"{where}.name"), "arguments": arguments}
    call_id = block.get("id")
    if not isinstance(call_id, str):
        raise refused(f"{where}.id", "expected a string")
    return {"id": call_id, "type": "function", "function": function}
