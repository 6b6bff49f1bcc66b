"""Every answer of the gateway that is not a success, as an exception with its status and body.

    GatewayRefusal            HTTPException with ``{"detail": ...}``, and ``{"error": {...}}`` where an agent reads it
    └── UpstreamError         the model's server failed; counted among the rollout's failures

``detail`` is the followed gateway's, word for word; agents are also given ``error``, which is where OpenAI's clients
look for the reason that they show.
"""

from __future__ import annotations

from typing import Any

import orjson
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

#: OpenAI's clients repeat a 409 by themselves unless they are told that it is final.
FINAL = {"x-should-retry": "false"}


class GatewayRefusal(HTTPException):
    """An answer with ``status_code`` and a body of ``detail``, plus ``error`` (message, type, code) when given."""

    def __init__(
        self,
        status_code: int,
        detail: Any,
        *,
        error: dict[str, Any] | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(status_code, detail, headers)
        self.detail: Any = detail
        self.error = error

    @property
    def body(self) -> dict[str, Any]:
        """The answer's body."""
        return {"detail": self.detail} if self.error is None else {"error": self.error, "detail": self.detail}

    @property
    def agents_body(self) -> dict[str, Any]:
        """The answer's body for an agent, always with ``error``."""
        message = self.detail if isinstance(self.detail, str) else "; ".join(map(_sentence, self.detail))
        plain = {"message": message, "type": "invalid_request_error", "param": None, "code": self.status_code}
        return {"error": self.error or plain, "detail": self.detail}


class UpstreamError(GatewayRefusal):
    """The model's server failed; ``status_code`` is what the agent is answered, ``kind`` names the failure."""

    def __init__(
        self, status_code: int, message: str, kind: str, *, code: object = None, retry_after: str | None = None
    ) -> None:
        error = {"message": message, "type": kind, "param": None, "code": status_code if code is None else code}
        headers = {"retry-after": retry_after} if retry_after else None
        super().__init__(status_code, message, error=error, headers=headers)
        self.message = message
        self.kind = kind


def not_found(rollout_id: str) -> GatewayRefusal:
    """Return the answer to a call for a rollout that is not registered, or no longer."""
    return GatewayRefusal(404, f"Rollout not found: {rollout_id}")


def unauthorized(message: str) -> GatewayRefusal:
    """Return the answer to a missing or wrong key."""
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": "invalid_api_key"}
    return GatewayRefusal(401, message, error=error, headers={"www-authenticate": "Bearer"})


def too_large(limit: int) -> GatewayRefusal:
    """Return the answer to a body of more than ``limit`` bytes."""
    message = f"The request's body exceeds {limit} bytes."
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": "request_too_large"}
    return GatewayRefusal(413, message, error=error)


def invalid(kind: str, loc: list[str | int], message: str, value: Any, **extra: Any) -> GatewayRefusal:
    """Return the answer to a body that does not validate, in FastAPI's shape."""
    return GatewayRefusal(422, [{"type": kind, "loc": ["body", *loc], "msg": message, "input": value} | extra])


def json_response(value: Any, status_code: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Return ``value`` as a JSON answer."""
    return Response(orjson.dumps(value), status_code, headers, media_type="application/json")


async def answer_refusal(request: Request, error: Exception) -> Response:
    """Answer an HTTPException, our own or the router's (404, 405), as JSON."""
    if isinstance(error, GatewayRefusal):
        body = error.agents_body if request.url.path.endswith("/chat/completions") else error.body
        return json_response(body, error.status_code, dict(error.headers or {}))
    assert isinstance(error, HTTPException)  # noqa: S101 - registered for this class alone
    return json_response({"detail": error.detail}, error.status_code, dict(error.headers or {}))


async def answer_disconnect(request: Request, error: Exception) -> Response:
    """Answer a client that went away while sending: nobody reads this, but nothing is logged as a fault of ours."""
    return json_response({"detail": "Client disconnected"}, 400)


async def answer_fault(request: Request, error: Exception) -> Response:
    """Answer a fault of the gateway's own; Starlette raises it again, so the server logs it with its traceback."""
    message = fault_message(error)
    return json_response({"error": {"message": message, "type": "gateway_error", "code": 500}, "detail": message}, 500)


def fault_message(error: Exception) -> str:
    """Return what is told of a fault of the gateway's own: not its words, which may hold a secret."""
    return f"The rollout gateway failed by a fault of its own ({type(error).__name__}); its log has the traceback."


def _sentence(entry: dict[str, Any]) -> str:
    return f"{'.'.join(map(str, entry['loc']))}: {entry['msg']}"
