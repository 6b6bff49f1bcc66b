"""OpenAI's chat completions: the dialect that upstreams speak, so nothing is translated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workers.gateway.server.answers import Message
from workers.gateway.server.dialects import KEEP_ALIVE, Call, Earlier, JsonObject, Native, Side, StreamTranslator
from workers.gateway.server.errors import GatewayRefusal, invalid
from workers.gateway.server.jsonio import parse_object

PATH = "/chat/completions"


class Chat:
    """The chat-completions dialect; the core passes its bytes on, and asks it for requests and errors alone."""

    name = "chat"
    paths: tuple[str, ...] = (PATH,)
    sides: Mapping[str, Side] = {}
    keep_alive = KEEP_ALIVE
    native: Native | None = None

    def read(self, body: bytes, earlier: Earlier) -> Call:
        """Read a request; raises `GatewayRefusal` (400 without messages, 422 when malformed)."""
        fields = parse_object(body)
        check_messages(fields.get("messages"))
        return Call(chat=fields, stream=bool(fields.get("stream")))

    def answer(self, call: Call, completion: JsonObject) -> JsonObject:
        """Return the completion."""
        return completion

    def translator(self, call: Call) -> StreamTranslator:
        """Chat streams pass as they are."""
        raise NotImplementedError

    def error(self, refusal: GatewayRefusal) -> JsonObject:
        """Return the refusal with ``error``, where OpenAI's clients look, and ``detail``."""
        return refusal.agents_body


def check_messages(messages: Any) -> list[Message]:
    """Return ``messages``; raises `GatewayRefusal` (400, 422) unless it is a list of objects with roles."""
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
    return messages


def wants_usage(fields: JsonObject) -> bool:
    """Return whether an agent asked for the usage chunk at the end of its stream."""
    options = fields.get("stream_options")
    return isinstance(options, dict) and bool(options.get("include_usage"))
