"""Requests of OpenAI's Responses API as chat requests."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from workers.gateway.server.dialects import JsonObject
from workers.gateway.server.dialects.fields import (
    content_of,
    image_part,
    mapping,
    name,
    objects,
    refused,
    text,
    text_part,
    unsealed,
    unsupported,
)

#: Tools that a provider runs itself; clients offer them whether it can or not, so they are left out.
_LEFT_OUT = frozenset({"web_search", "web_search_preview", "image_generation", "tool_search"})
#: Items of a history in which such tools ran: what came of them is in the text that follows.
_PASSED_OVER = frozenset({"web_search_call", "image_generation_call", "tool_search_call", "tool_search_output"})
#: What a custom tool's input is called in the function that stands for it.
CUSTOM_INPUT = "input"


@dataclass
class Tools:
    """The tools of a request: as chat has them, and what their functions' names stand for."""

    chat: list[JsonObject] = field(default_factory=list)
    custom: set[str] = field(default_factory=set)
    namespaces: dict[str, tuple[str, str]] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)

    def add(self, tool: JsonObject, where: str, namespace: str = "") -> None:
        """Read one tool."""
        kind = tool.get("type")
        if kind == "namespace" and not namespace:
            inner = name(tool.get("name"), f"{where}.name")
            for index, each in enumerate(objects(tool.get("tools"), f"{where}.tools")):
                self.add(each, f"{where}.tools[{index}]", inner)
        elif kind in {"function", "custom"}:
            self._add_function(tool, where, namespace)
        elif isinstance(kind, str) and (kind in _LEFT_OUT or kind.startswith("web_search")):
            self.left_out.append(kind)
        else:
            raise unsupported(f"{where}.type", kind)

    def _add_function(self, tool: JsonObject, where: str, namespace: str) -> None:
        own = name(tool.get("name"), f"{where}.name")
        full = flat_name(namespace, own)
        if namespace:
            self.namespaces[full] = (namespace, own)
        function: JsonObject = {"name": full}
        if tool.get("description") is not None:
            function["description"] = text(tool["description"], f"{where}.description")
        if tool["type"] == "custom":
            self.custom.add(full)
            self.chat.append({"type": "function", "function": _custom(function, tool.get("format"))})
            return
        if tool.get("parameters") is not None:
            function["parameters"] = mapping(tool["parameters"], f"{where}.parameters")
        if isinstance(tool.get("strict"), bool):
            function["strict"] = tool["strict"]
        self.chat.append({"type": "function", "function": function})


def flat_name(namespace: str, own: str) -> str:
    """Return the name of a function for a tool in a namespace."""
    return f"{namespace}__{own}" if namespace else own


def _custom(function: JsonObject, grammar: Any) -> JsonObject:
    """Return the function that stands for a custom tool: it takes one string, and its grammar is told in words."""
    definition = grammar.get("definition") if isinstance(grammar, dict) else None
    if isinstance(definition, str):
        words = f"The input must match this grammar ({grammar.get('syntax')}):\n{definition}"
        function["description"] = "\n\n".join(filter(None, [function.get("description"), words]))
    schema = {"type": "object", "properties": {CUSTOM_INPUT: {"type": "string"}}, "required": [CUSTOM_INPUT]}
    return function | {"parameters": schema}


def read_tool_choice(choice: Any, tools: Tools) -> Any:
    """Return the chat request's ``tool_choice``; ``allowed_tools`` takes the others out of ``tools``."""
    if isinstance(choice, str):
        if choice not in {"auto", "none", "required"}:
            raise unsupported("tool_choice", choice)
        return choice
    fields = mapping(choice, "tool_choice")
    kind = fields.get("type")
    if kind in {"function", "custom"}:
        return {"type": "function", "function": {"name": name(fields.get("name"), "tool_choice.name")}}
    if kind != "allowed_tools":
        raise unsupported("tool_choice.type", kind)
    allowed = {each.get("name") for each in objects(fields.get("tools"), "tool_choice.tools")}
    tools.chat = [tool for tool in tools.chat if tool["function"]["name"] in allowed]
    return read_tool_choice(fields.get("mode") or "auto", tools)


def input_items(fields: JsonObject, *, is_new: bool = True) -> list[JsonObject]:
    """Return a request's input as items; one that goes on with an earlier answer (not ``is_new``) may have none."""
    given = fields.get("input")
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    return objects([] if given is None and not is_new else given, "input")


class Conversation:
    """Collects input items as the messages of a chat request.

    An answer of the model is one chat message but several items: reasoning, text and calls that follow each other are
    put together again. Images in a tool's output follow it in a user's message, as chat has no other place for them.
    """

    def __init__(self, messages: list[JsonObject]) -> None:
        self.messages = messages
        self._answer: JsonObject | None = None
        self._images: list[JsonObject] = []

    def add(self, item: JsonObject, where: str) -> None:
        """Take in one item."""
        kind = item.get("type") or ("message" if "role" in item else None)
        if kind == "message":
            self._message(item, where)
        elif kind == "reasoning":
            self._reasoning(item, where)
        elif kind in {"function_call", "custom_tool_call"}:
            self._call(item, where, "arguments" if kind == "function_call" else "input")
        elif kind in {"function_call_output", "custom_tool_call_output"}:
            self._output(item, where)
        elif kind not in _PASSED_OVER:
            raise unsupported(f"{where}.type", kind)

    def finish(self) -> list[JsonObject]:
        """Return all messages."""
        self._end_answer()
        self._end_outputs()
        return self.messages

    def _message(self, item: JsonObject, where: str) -> None:
        role = item.get("role")
        if role == "assistant":
            said = self._answer
            if said is not None and said.get("content") and not said.get("tool_calls"):
                self._end_answer()
            answer = self._open_answer()
            answer["content"] = (answer.get("content") or "") + _answer_text(item.get("content"), f"{where}.content")
            return
        if role not in {"user", "system", "developer"}:
            raise unsupported(f"{where}.role", role)
        self._end_answer()
        self._end_outputs()
        content = _content(item.get("content"), f"{where}.content")
        self.messages.append({"role": "user" if role == "user" else "system", "content": content})

    def _reasoning(self, item: JsonObject, where: str) -> None:
        if self._answer is not None and (self._answer.get("content") or self._answer.get("tool_calls")):
            self._end_answer()
        parts = [
            *objects(item.get("content") or [], f"{where}.content"),
        ] or ([] if unsealed(item.get("encrypted_content")) else objects(item.get("summary") or [], f"{where}.summary"))
        said = "".join(text(part.get("text"), f"{where}.content.text") for part in parts)
        if said := said or unsealed(item.get("encrypted_content")):
            answer = self._open_answer()
            answer["reasoning_content"] = answer.get("reasoning_content", "") + said

    def _call(self, item: JsonObject, where: str, given: str) -> None:
        namespace = item.get("namespace")
        called = flat_name(namespace if isinstance(namespace, str) else "", name(item.get("name"), f"{where}.name"))
        arguments = text(item.get(given), f"{where}.{given}")
        if given == "input":
            arguments = custom_arguments(arguments)
        call = {"id": text(item.get("call_id"), f"{where}.call_id"), "type": "function"}
        answer = self._open_answer()
        calls = answer.setdefault("tool_calls", [])
        calls.append(call | {"function": {"name": called, "arguments": arguments}})

    def _output(self, item: JsonObject, where: str) -> None:
        self._end_answer()
        call_id = text(item.get("call_id"), f"{where}.call_id")
        content = _content(item.get("output"), f"{where}.output")
        if not isinstance(content, str):
            texts = [part["text"] for part in content if part["type"] == "text"]
            self._images += [text_part(f"Output of the tool call {call_id}:")]
            self._images += [part for part in content if part["type"] != "text"]
            content = "\n".join(texts) or "(see the image below)"
        self.messages.append({"role": "tool", "tool_call_id": call_id, "content": content})

    def _open_answer(self) -> JsonObject:
        self._end_outputs()
        if self._answer is None:
            self._answer = {"role": "assistant", "content": None}
        return self._answer

    def _end_answer(self) -> None:
        if self._answer is not None:
            if self._answer["content"] is None and not self._answer.get("tool_calls"):
                self._answer["content"] = ""
            self.messages.append(self._answer)
        self._answer = None

    def _end_outputs(self) -> None:
        if self._images:
            self.messages.append({"role": "user", "content": self._images})
        self._images = []


def custom_arguments(given: str) -> str:
    """Return the arguments of the function that stands for a custom tool; spaced as models write JSON."""
    return json.dumps({CUSTOM_INPUT: given}, ensure_ascii=False)


def with_lead(messages: list[JsonObject], instructions: str) -> list[JsonObject]:
    """Return ``messages`` with ``instructions`` and their leading system messages as one, which templates want."""
    at = next((at for at, each in enumerate(messages) if each["role"] != "system"), len(messages))
    lead = [instructions] if instructions else []
    for message in messages[:at]:
        if not isinstance(message["content"], str):
            raise refused("input", "images are not supported in the leading system and developer messages")
        lead.append(message["content"])
    joined = "\n\n".join(filter(None, lead))
    return [{"role": "system", "content": joined}, *messages[at:]] if joined else messages[at:]


def without_instructions(messages: list[JsonObject], size: int) -> list[JsonObject]:
    """Return an earlier conversation without its instructions, which are the first ``size`` characters of its lead."""
    if not size or not messages or messages[0].get("role") != "system":
        return messages
    rest = str(messages[0].get("content"))[size:].removeprefix("\n\n")
    return [{"role": "system", "content": rest}, *messages[1:]] if rest else messages[1:]


def _content(value: Any, where: str) -> str | list[JsonObject]:
    if isinstance(value, str):
        return value
    return content_of([_part(part, f"{where}[{index}]") for index, part in enumerate(objects(value, where))])


def _part(part: JsonObject, where: str) -> JsonObject:
    kind = part.get("type")
    if kind in {"input_text", "output_text", "text"}:
        return text_part(text(part.get("text"), f"{where}.text"))
    if kind == "input_image" and part.get("image_url") is not None:
        return image_part(text(part["image_url"], f"{where}.image_url"), part.get("detail"))
    if kind == "input_image":
        raise refused(f"{where}.image_url", "an image must be given by its URL or data URL", "unsupported_value")
    raise unsupported(f"{where}.type", kind)


def _answer_text(value: Any, where: str) -> str:
    if isinstance(value, str):
        return value
    said = ""
    for index, part in enumerate(objects(value, where)):
        if part.get("type") not in {"output_text", "input_text", "text", "refusal"}:
            raise unsupported(f"{where}[{index}].type", part.get("type"))
        said += text(part.get("refusal" if part["type"] == "refusal" else "text"), f"{where}[{index}].text")
    return said
