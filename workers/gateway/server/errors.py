"""Every answer of the gateway that is not a success, as an exception with its status and body.

    GatewayRefusal            a status and ``{"detail": ...}``, and ``{"error": {...}}`` where an agent reads it
    └── UpstreamError         the model's server failed; counted among the rollout's failures

``detail`` is the followed gateway's, word for word; agents are also given ``error``, which is where OpenAI's clients
look for the reason that they show.
"""

from __future__ import annotations

import math
from typing import Any

#: OpenAI's clients repeat a 409 by themselves unless they are told that it is final.
FINAL = {"x-should-retry": "false"}


class GatewayRefusal(Exception):  # noqa: N818 - it is an answer, and often not an error
    """An answer with ``status_code`` and a body of ``detail``, plus ``error`` (message, type, code) when given."""

    def __init__(
        self,
        status_code: int,
        detail: Any,
        *,
        error: dict[str, Any] | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(f"{status_code}: {detail}")
        self.status_code = status_code
        self.detail: Any = detail
        self.error = error
        self.headers = headers or {}

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
    """The model's server failed; ``status_code`` is what the agent is answered, ``kind`` names the failure.

    ``unsent`` says that nothing of the call was sent.
    """

    def __init__(
        self,
        status_code: int,
        message: str,
        kind: str,
        *,
        code: object = None,
        retry_after: str | None = None,
        unsent: bool = False,
    ) -> None:
        error = {"message": message, "type": kind, "param": None, "code": status_code if code is None else code}
        headers = {"retry-after": retry_after} if retry_after else None
        super().__init__(status_code, message, error=error, headers=headers)
        self.message = message
        self.kind = kind
        self.unsent = unsent


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


def busy(reason: str, retry_after: float) -> GatewayRefusal:
    """Return the answer to a call that finds no room: come back in ``retry_after`` seconds."""
    message = f"The rollout gateway is busy: {reason}"
    error = {"message": message, "type": "rate_limit_error", "param": None, "code": "gateway_busy"}
    return GatewayRefusal(429, message, error=error, headers={"retry-after": str(math.ceil(retry_after))})


def fault(error: Exception) -> GatewayRefusal:
    """Return the answer to a call that a fault of the gateway's own ended."""
    message = fault_message(error)
    told = {"message": message, "type": "gateway_error", "param": None, "code": 500}
    return GatewayRefusal(500, message, error=told)


def fault_message(error: Exception) -> str:
    """Return what is told of a fault of the gateway's own: not its words, which may hold a secret."""
    return f"The rollout gateway failed by a fault of its own ({type(error).__name__}); its log has the traceback."


def _sentence(entry: dict[str, Any]) -> str:
    return f"{'.'.join(map(str, entry['loc']))}: {entry['msg']}"
