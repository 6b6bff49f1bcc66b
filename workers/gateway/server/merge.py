"""What the upstream is asked, of what the agent asked and what was registered.

The merge rule, weakest first: the agent's own fields, the registration's sampling parameters, ``logprobs`` and
``return_token_ids``, the registration's ``extra_body``. The model is the registered one; messages and whether the
answer is streamed are the agent's alone. ``max_tokens`` and ``max_completion_tokens`` are two names of one limit, so a
registered one removes the agent's other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workers.gateway.protocol import Registration

_AGENTS_ALONE = frozenset({"messages", "stream", "stream_options"})
_NOT_PARAMS = _AGENTS_ALONE | {"model", "tools"}
_CHATS_OWN = frozenset({"tools", "tool_choice", "response_format", "functions", "function_call"})
_LENGTH_LIMITS = frozenset({"max_tokens", "max_completion_tokens"})


def upstream_fields(
    fields: dict[str, Any], registration: Registration, *, stream: bool, ask_tokens: bool = True
) -> dict[str, Any]:
    """Return the body that the upstream is sent; ``fields`` is the agent's, as a chat request."""
    sampling, extra = registered(registration)
    dropped = _LENGTH_LIMITS if not _LENGTH_LIMITS.isdisjoint(sampling | extra) else frozenset()

    body = {name: value for name, value in fields.items() if name not in dropped}
    body |= {"model": registration.model} | sampling
    if ask_tokens:
        body |= {"logprobs": True, "return_token_ids": True}
    body |= extra
    if stream:
        options = body.get("stream_options")
        body["stream_options"] = (options if isinstance(options, dict) else {}) | {"include_usage": True}
    return body


def registered(registration: Registration) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the registration's sampling parameters, and its ``extra_body``."""
    sampling = {k: v for k, v in registration.sampling_params.items() if k != "extra_body" and k not in _AGENTS_ALONE}
    extra = registration.sampling_params.get("extra_body")
    return sampling, {k: v for k, v in extra.items() if k not in _AGENTS_ALONE} if isinstance(extra, dict) else {}


def native_params(registration: Registration, names: Mapping[str, str | None]) -> dict[str, Any] | None:
    """Return what is registered under another dialect's ``names`` (None: it has no such thing, and does without).

    None when something is registered whose shape is chat's own, so that the call has to be made as a chat call.
    """
    sampling, extra = registered(registration)
    given = sampling | extra
    if not _CHATS_OWN.isdisjoint(given):
        return None
    renamed = {names.get(key, key): value for key, value in given.items()}
    return {key: value for key, value in renamed.items() if key is not None and key != "model"}


def who_asked(fields: dict[str, Any], sent: dict[str, Any]) -> dict[str, Any]:
    """Return a step's ``agent_params`` and ``sent_params``; ``{}`` for an agent that sent none of its own."""
    own = params(fields)
    return {"agent_params": own, "sent_params": params(sent)} if own else {}


def params(fields: dict[str, Any]) -> dict[str, Any]:
    """Return what a request has beyond messages, tools, model and streaming."""
    return {name: value for name, value in fields.items() if name not in _NOT_PARAMS}
