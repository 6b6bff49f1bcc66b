"""Turns data into the contract's models, and what pydantic says of wrong data into sentences for people."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any, TypeVar

import orjson
from pydantic import BaseModel, ValidationError

ModelT = TypeVar("ModelT", bound=BaseModel)
#: Where an object may have more fields than these, they are not listed to who names a wrong one.
_LISTED = 10


class InvalidRequestError(ValueError):
    """A request or a result does not fit the contract; the message names the field, what came and what to do."""


def dump(value: object) -> bytes:
    """Write ``value`` as JSON; raises `TypeError` for what JSON cannot hold."""
    return orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS)


def parse(model: type[ModelT], data: object, what: str, version: int) -> ModelT:
    """Validate ``data`` (a mapping, or JSON as str or bytes) as the ``what`` of this contract ``version``.

    Raises `InvalidRequestError`: one sentence per wrong field.
    """
    if isinstance(data, str | bytes | bytearray):
        try:
            data = orjson.loads(data)
        except orjson.JSONDecodeError as error:
            raise InvalidRequestError(f"the {what} is not JSON: {error}") from None
    if not isinstance(data, dict):
        raise InvalidRequestError(f"the {what} is {_kind(data)}; expected an object with fields")
    came = data.get("schema_version", version)
    if came != version:
        raise InvalidRequestError(
            f"schema_version: {_shown(came)} is not known here; this side speaks version {version}: "
            "upgrade the older of producer and worker"
        )
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise InvalidRequestError("; ".join(_sentence(model, e) for e in error.errors(include_url=False))) from None
    except RecursionError:
        raise InvalidRequestError(f"the {what} is nested too deeply") from None


def _sentence(model: type[BaseModel], error: Any) -> str:
    """Turn one of pydantic's error entries into ``field: what is wrong (what came)``."""
    field = ".".join(str(part) for part in error["loc"]) or "(whole)"
    if error["type"] == "missing":
        return f"{field}: missing; it is required"
    if error["type"] == "extra_forbidden":
        return f"{field}: no such field{_hint(str(error['loc'][-1]), _fields_at(model, error['loc'][:-1]))}"
    message = str(error["msg"]).removeprefix("Value error, ")
    if not error["loc"] or error["loc"][0] == "env":  # the whole request, or a variable's value: may be secret
        return f"{field}: {message} (got {_kind(error['input'])})"
    return f"{field}: {message} (got {_kind(error['input'])} {_shown(error['input'])})"


def _hint(name: str, fields: Sequence[str]) -> str:
    if close := get_close_matches(name, fields, n=1):
        return f"; did you mean {close[0]!r}?"
    return f"; there are {', '.join(fields)}" if 0 < len(fields) <= _LISTED else ""


def _fields_at(model: type[BaseModel], path: Sequence[Any]) -> list[str]:
    """Return the names that an object at ``path`` in a ``model`` may have, such as those of its deadlines."""
    for name in path:
        inner = model.model_fields[name].annotation if name in model.model_fields else None
        if not (isinstance(inner, type) and issubclass(inner, BaseModel)):
            return []
        model = inner
    return [field.alias or name for name, field in model.model_fields.items()]


def _kind(value: object) -> str:
    return "null" if value is None else type(value).__name__


def _shown(value: object, limit: int = 80) -> str:
    try:
        text = repr(value)
    except RecursionError:
        return "(nested too deeply)"
    return text if len(text) <= limit else text[:limit] + "..."
