"""The gateway's OpenAPI document."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

JsonObject = dict[str, Any]

_ID = {
    "name": "rollout_id",
    "in": "path",
    "required": True,
    "schema": {"type": "string", "pattern": "^[A-Za-z0-9][A-Za-z0-9._~-]{0,159}$"},
}
_ANY: JsonObject = {"type": "object"}
_REGISTRATION: JsonObject = {
    "type": "object",
    "required": ["model"],
    "properties": {
        "model": {"type": "string"},
        "sampling_params": {"type": "object"},
        "max_turns": {"type": "integer"},
        "max_seq_len": {"type": ["integer", "null"], "minimum": 1},
        "ttl": {
            "type": ["number", "null"],
            "exclusiveMinimum": 0,
            "description": "Idle seconds until it is forgotten.",
        },
    },
}
_CHAT: JsonObject = {
    "type": "object",
    "required": ["messages"],
    "properties": {
        "messages": {
            "type": "array",
            "items": {"type": "object", "required": ["role"], "properties": {"role": {"type": "string"}}},
        },
        "stream": {"type": "boolean"},
    },
}
_RESUME: JsonObject = {"type": "object", "properties": {"policy_version": {"type": ["string", "number"]}}}
_WAIT = {"name": "wait", "in": "query", "schema": {"type": "number"}}
_FORMAT = {"name": "format", "in": "query", "schema": {"enum": ["full", "compact"]}}
_DRAIN = {"name": "drain", "in": "query", "schema": {"type": "number"}}


def document(calls: Iterable[str], sides: Iterable[str]) -> JsonObject:
    """Return the document; ``calls`` and ``sides`` are the dialects' paths below a rollout's base."""
    base = "/v1/rollouts/{rollout_id}"
    paths: JsonObject = {
        f"{base}/register": {"post": _operation("Begin a rollout", "control", _REGISTRATION, (409, 422))},
        f"{base}/cancel": {"post": _operation("Refuse its further model calls", "control")},
        f"{base}/unregister": {"post": _operation("Forget it", "control")},
        f"{base}/trajectory": {"get": _operation("What was recorded", "control", None, (400,), [_WAIT, _FORMAT])},
        f"{base}/progress": {"get": _operation("How far it has come", "control")},
        f"{base}/models": {"get": _operation("The model it may use", "agent")},
    }
    for path in calls:
        schema = _CHAT if path == "/chat/completions" else _ANY
        failures = (400, 408, 409, 413, 422, 429, 502, 503, 504)
        call = _operation("One model call", "agent", schema, failures)
        call["responses"]["200"]["content"]["text/event-stream"] = {}  # with ``stream``
        paths[base + path] = {"post": call}
    for path in sides:
        paths[base + path] = {"post": _operation("A dialect's side call", "agent", _ANY, (400, 422, 502, 504))}
    for item in paths.values():
        item["parameters"] = [_ID]
    return {
        "openapi": "3.1.0",
        "info": {"title": "Rollout gateway", "version": "1"},
        "paths": paths | _own(),
        "components": {
            "securitySchemes": {
                "control": {"type": "http", "scheme": "bearer", "description": "The control key."},
                "agent": {"type": "http", "scheme": "bearer", "description": "The rollout's own key."},
            }
        },
    }


def _own() -> JsonObject:
    return {
        "/healthz": {"get": _operation("Whether the event loop makes progress", None)},
        "/readyz": {"get": _operation("Whether model calls can be made", None, None, (503,))},
        "/metrics": {"get": _operation("Prometheus metrics", None, None, (), (), "text/plain")},
        "/admin/status": {"get": _operation("What the model servers do", "control")},
        "/admin/pause": {"post": _operation("Hold new model calls", "control", None, (400,), [_DRAIN])},
        "/admin/resume": {"post": _operation("Let them go", "control", _RESUME, (422,))},
    }


def _operation(
    summary: str,
    key: str | None,
    body: JsonObject | None = None,
    failures: Iterable[int] = (),
    parameters: Iterable[JsonObject] = (),
    kind: str = "application/json",
) -> JsonObject:
    refused = {*failures} | ({401, 404} if key else {404})
    answers: JsonObject = {str(status): _answer("Refused", "application/json") for status in sorted(refused)}
    operation: JsonObject = {"summary": summary, "responses": {"200": _answer("Done", kind)} | answers}
    if key:
        operation["security"] = [{key: []}]
    if parameters:
        operation["parameters"] = [*parameters]
    if body is not None:
        operation["requestBody"] = {"content": {"application/json": {"schema": body}}}
    return operation


def _answer(text: str, kind: str) -> JsonObject:
    schema = {"type": "object"} if kind == "application/json" else {"type": "string"}
    return {"description": text, "content": {kind: {"schema": schema}}}
