"""The gateway's routes: who may call what, and which part answers. All state hangs off ``app.state``."""

from __future__ import annotations

import asyncio
import hmac
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from workers.gateway.protocol import ROLLOUT_KEY_HEADER, Registration
from workers.gateway.server.calls import ChatCalls
from workers.gateway.server.chat import parse_json
from workers.gateway.server.errors import (
    GatewayRefusal,
    UpstreamError,
    answer_disconnect,
    answer_fault,
    answer_refusal,
    invalid,
    json_response,
    too_large,
    unauthorized,
)
from workers.gateway.server.recorder import RecordedRollout, Recorder, key_digest
from workers.gateway.server.upstream import Upstream

MAX_BODY_BYTES = 32 * 1024 * 1024

#: The contract's ids, with room for the suffix that later attempts add.
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._~-]{0,159}")


def create_app(
    *,
    upstream: str,
    upstream_api_key: str | None = None,
    control_key: str | None = None,
    upstream_timeout: float = 600.0,
    max_body_bytes: int = MAX_BODY_BYTES,
    ask_tokens: bool = True,
) -> Starlette:
    """Build the rollout gateway as an ASGI application.

    ``upstream`` is an OpenAI-compatible server's base URL; ``upstream_timeout`` the seconds without a byte after which
    a model call is given up; ``ask_tokens`` whether ``logprobs`` and ``return_token_ids`` are asked for, which a server
    that refuses fields it does not know needs off. With ``control_key``, it is wanted on register, cancel, unregister
    and trajectory. Raises `ValueError` when ``upstream`` is no http(s) URL.
    """
    model_server = Upstream(upstream, upstream_api_key, upstream_timeout)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        await model_server.aclose()

    app = Starlette(
        routes=[
            Route("/v1/rollouts/{rollout_id}/register", register, methods=["POST"]),
            Route("/v1/rollouts/{rollout_id}/cancel", cancel, methods=["POST"]),
            Route("/v1/rollouts/{rollout_id}/unregister", unregister, methods=["POST"]),
            Route("/v1/rollouts/{rollout_id}/trajectory", trajectory, methods=["GET"]),
            Route("/v1/rollouts/{rollout_id}/chat/completions", chat_completions, methods=["POST"]),
            Route("/v1/rollouts/{rollout_id}/models", models, methods=["GET"]),
            Route("/healthz", healthz, methods=["GET"]),
            Route("/readyz", readyz, methods=["GET"]),
        ],
        exception_handlers={
            HTTPException: answer_refusal,
            ClientDisconnect: answer_disconnect,
            Exception: answer_fault,
        },
        lifespan=lifespan,
    )
    app.state.upstream = model_server
    app.state.recorder = Recorder()
    app.state.calls = ChatCalls(model_server, ask_tokens=ask_tokens)
    app.state.control_key = key_digest(control_key) if control_key else None
    app.state.max_body_bytes = max_body_bytes
    return app


async def register(request: Request) -> Response:
    """Begin a rollout; the header ``X-Rollout-Key`` names the key that its model calls must carry."""
    rollout_id = _rollout_id(request)
    _check_control_key(request)
    registration = _parse_registration(await _body(request))
    rollout = _recorder(request).register(rollout_id, registration, request.headers.get(ROLLOUT_KEY_HEADER))
    limits = {"max_turns": registration.max_turns, "max_seq_len": registration.max_seq_len}
    return json_response(_standing(rollout) | {"model": registration.model} | limits)


async def cancel(request: Request) -> Response:
    """Refuse the rollout's further model calls."""
    rollout = _controlled_rollout(request)
    rollout.cancel()
    return json_response(_standing(rollout))


async def unregister(request: Request) -> Response:
    """Forget the rollout; the answer's status is the one it had."""
    rollout = _controlled_rollout(request)
    return json_response(_standing(_recorder(request).unregister(rollout.id)))


async def trajectory(request: Request) -> Response:
    """Answer what was recorded, after the call in flight.

    ``?wait=SECONDS`` bounds that wait; ``in_flight`` then says that a turn is missing.
    """
    rollout = _controlled_rollout(request)
    try:
        async with asyncio.timeout(_wait(request)):
            async with rollout.lock:
                pass
    except TimeoutError:
        pass
    return json_response(rollout.trajectory())


async def chat_completions(request: Request) -> Response:
    """Run one model call of a rollout."""
    rollout = _agents_rollout(request)
    calls: ChatCalls = request.app.state.calls
    return await calls.answer(request, rollout, await _body(request))


async def models(request: Request) -> Response:
    """List the one model that the rollout may use."""
    registration = _agents_rollout(request).registration
    model: dict[str, Any] = {"id": registration.model, "object": "model", "created": 0, "owned_by": "rollout-gateway"}
    if registration.max_seq_len is not None:
        model["max_model_len"] = registration.max_seq_len
    return json_response({"object": "list", "data": [model]})


async def healthz(request: Request) -> Response:
    """Answer whether the event loop makes progress: ``loop_lag`` is the seconds that its queue took just now."""
    loop = asyncio.get_running_loop()
    asked = loop.time()
    await asyncio.sleep(0)
    return json_response({"status": "ok", "rollouts": len(_recorder(request)), "loop_lag": loop.time() - asked})


async def readyz(request: Request) -> Response:
    """Answer whether the upstream can be reached."""
    try:
        await request.app.state.upstream.check()
    except UpstreamError as error:
        return json_response({"status": "upstream unavailable", "detail": error.message}, 503)
    return json_response({"status": "ready"})


def _recorder(request: Request) -> Recorder:
    recorder: Recorder = request.app.state.recorder
    return recorder


def _rollout_id(request: Request) -> str:
    rollout_id: str = request.path_params["rollout_id"]
    if not _ID.fullmatch(rollout_id):
        raise GatewayRefusal(404, "Not Found")
    return rollout_id


def _controlled_rollout(request: Request) -> RecordedRollout:
    """Return the rollout of a control call, whose key is checked before anything is told."""
    rollout_id = _rollout_id(request)
    _check_control_key(request)
    return _recorder(request).get(rollout_id)


def _agents_rollout(request: Request) -> RecordedRollout:
    """Return the rollout of an agent's call, if it carries that rollout's key."""
    rollout = _recorder(request).get(_rollout_id(request))
    if not rollout.accepts_key(_bearer(request) or request.headers.get("x-api-key")):
        raise unauthorized(
            "This rollout's key is missing or wrong. Send it as a bearer token; agents find it in OPENAI_API_KEY."
        )
    return rollout


def _check_control_key(request: Request) -> None:
    wanted: bytes | None = request.app.state.control_key
    if wanted is not None and not hmac.compare_digest(key_digest(_bearer(request) or ""), wanted):
        raise unauthorized(
            "The control key is missing or wrong. Workers send ROLLOUTS_GATEWAY_CONTROL_KEY as a bearer token."
        )


def _bearer(request: Request) -> str | None:
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else None


async def _body(request: Request) -> bytes:
    """Read the body; raises `GatewayRefusal` (413) as soon as it is known to be too large."""
    limit: int = request.app.state.max_body_bytes
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit:
        raise too_large(limit)
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > limit:
            raise too_large(limit)
    return bytes(body)


def _parse_registration(body: bytes) -> Registration:
    data = parse_json(body)
    if not isinstance(data, dict):
        raise invalid(
            "model_attributes_type", [], "Input should be a valid dictionary or object to extract fields from", data
        )
    try:
        registration = Registration.model_validate(data)
    except ValidationError as error:
        detail = [entry | {"loc": ["body", *entry["loc"]]} for entry in error.errors(include_url=False)]
        raise GatewayRefusal(422, detail) from None
    limit = registration.max_seq_len
    if limit is not None and limit <= 0:
        raise invalid("greater_than", ["max_seq_len"], "Input should be greater than 0", limit, ctx={"gt": 0})
    return registration


def _wait(request: Request) -> float | None:
    """Return how long a trajectory may wait for the call in flight; None is as long as it takes."""
    try:
        return max(0.0, float(request.query_params["wait"]))
    except (KeyError, ValueError):
        return None


def _standing(rollout: RecordedRollout) -> dict[str, Any]:
    return {"rollout_id": rollout.id, "status": rollout.status}
