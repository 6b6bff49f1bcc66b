"""Reading requests that came from an agent: each thing that is wrong is refused by the name of its field."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable
from typing import Any

import orjson

from workers.gateway.server.dialects import JsonObject
from workers.gateway.server.errors import GatewayRefusal

#: Sampling parameters that model servers take beyond the dialects' own, under the names that chat gives them.
SAMPLING = frozenset(
    {"frequency_penalty", "logit_bias", "min_p", "min_tokens", "presence_penalty", "repetition_penalty", "seed"}
    | {"skip_special_tokens", "stop", "stop_token_ids", "temperature", "top_k", "top_p", "chat_template_kwargs"}
)


def refused(field: str, message: str, code: str = "invalid_value") -> GatewayRefusal:
    """Return the refusal of a request for one of its fields."""
    said = f"{field}: {message}"
    error = {"message": said, "type": "invalid_request_error", "param": field, "code": code}
    return GatewayRefusal(400, said, error=error)


def unsupported(field: str, what: object) -> GatewayRefusal:
    """Return the refusal of something that the dialect knows and the gateway cannot do."""
    named = what[:100] if isinstance(what, str) else orjson.dumps(what, default=str).decode()[:100]
    return refused(field, f"{named!r} is not supported by the rollout gateway", "unsupported_value")


def refuse_unknown(fields: JsonObject, known: Iterable[str]) -> None:
    """Refuse the first field that is not known, unless it is null."""
    for name in sorted(fields.keys() - set(known)):
        if fields[name] is not None:
            raise refused(name, "the rollout gateway does not know this parameter", "unknown_parameter")


def mapping(value: Any, field: str) -> JsonObject:
    """Return ``value``, which must be an object."""
    if not isinstance(value, dict):
        raise refused(field, "expected an object")
    return value


def objects(value: Any, field: str) -> list[JsonObject]:
    """Return ``value``, which must be a list of objects."""
    if not isinstance(value, list):
        raise refused(field, "expected a list")
    return [mapping(each, f"{field}[{index}]") for index, each in enumerate(value)]


def text(value: Any, field: str) -> str:
    """Return ``value``, which must be a string."""
    if not isinstance(value, str):
        raise refused(field, "expected a string")
    return value


def name(value: Any, field: str) -> str:
    """Return ``value``, which must be a string that is not empty."""
    if not text(value, field):
        raise refused(field, "expected a name")
    return str(value)


def text_part(content: str) -> JsonObject:
    """Return a part of a chat message."""
    return {"type": "text", "text": content}


def image_part(url: str, detail: Any = None) -> JsonObject:
    """Return a part of a chat message; ``detail`` is kept where chat knows it."""
    image = {"url": url} | ({"detail": detail} if detail in {"low", "high", "auto"} else {})
    return {"type": "image_url", "image_url": image}


def content_of(parts: list[JsonObject]) -> str | list[JsonObject]:
    """Return the content that ``parts`` make: plain text where that is all, which every chat template takes."""
    if all(part["type"] == "text" for part in parts):
        return "\n".join(part["text"] for part in parts)
    return parts


def sealed(reasoning: str) -> str:
    """Return reasoning as what an agent keeps unread and sends back: nothing is secret about it."""
    return base64.b64encode(b"reasoning:" + reasoning.encode("utf-8", "replace")).decode()


def unsealed(value: Any) -> str:
    """Return what was sealed; "" for what another server sealed."""
    try:
        plain = base64.b64decode(value, validate=True) if isinstance(value, str) else b""
    except (binascii.Error, ValueError):
        return ""
    return plain[10:].decode("utf-8", "replace") if plain.startswith(b"reasoning:") else ""


def as_dict(value: Any) -> JsonObject:
    """Return ``value`` if it is an object, else an empty one: for what an upstream may leave out."""
    return value if isinstance(value, dict) else {}


def as_text(value: Any) -> str:
    """Return ``value`` if it is a string, else ""."""
    return value if isinstance(value, str) else ""


def as_count(value: Any) -> int:
    """Return ``value`` if it is a number of tokens, else 0."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else 0


def parsed(data: bytes) -> JsonObject:
    """Return the object in an event's data, or an empty one: ``[DONE]``, or nothing that says anything."""
    try:
        return as_dict(orjson.loads(data))
    except orjson.JSONDecodeError:
        return {}


def event(kind: str, data: JsonObject) -> bytes:
    """Return one event of a stream."""
    return b"event: " + kind.encode() + b"\ndata: " + orjson.dumps(data) + b"\n\n"
