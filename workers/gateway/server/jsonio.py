"""Reading JSON that came from outside."""

from __future__ import annotations

import json
from typing import Any

import orjson

from workers.gateway.server.errors import GatewayRefusal, invalid
from workers.gateway.server.nesting import MAX_NESTING, is_too_deep


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


def parse_object(body: bytes) -> dict[str, Any]:
    """Parse a body that must be an object; raises `GatewayRefusal` (422)."""
    value = parse_json(body)
    if not isinstance(value, dict):
        raise invalid("dict_type", [], "Input should be a valid dictionary", value)
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
