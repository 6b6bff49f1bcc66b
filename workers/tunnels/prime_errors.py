"""What the Prime tunnel SDK raises, mapped once to what the pool does about it, in the platform's words."""

from __future__ import annotations

import prime_tunnel.exceptions as sdk
import pydantic
from prime_tunnel.binary import FRPC_VERSION

from workers.errors import TunnelError
from workers.prime import seconds_to_wait
from workers.tunnels.backend import RateLimitedError, RegistrationGoneError, StartRefusedError

#: Seconds without starts after a 429 that names none.
_RETRY_AFTER = 30.0
#: What is refused with these may be allowed the next moment.
_TRANSIENT = frozenset({408, 409, 425})

_LIMIT_HINT = (
    "delete tunnels that are not needed (`prime tunnel list`, `prime tunnel stop ID`), those of dead workers first: "
    "they carry the labels fleet:... and worker:...; or run fewer worker processes, each of which holds one per gateway"
)
_FRPC_HINT = f"let the worker reach github.com, or put frpc {FRPC_VERSION} and .frpc_version into ~/.prime/bin"
_MACHINE_HINT = "is HOME writable, and PRIME_CONTEXT right?"
_STATUS_HINTS = {
    401: "set PRIME_API_KEY, or run `prime login`, with a key that may create tunnels",
    402: "add credit or a payment method to the account of PRIME_API_KEY or PRIME_TEAM_ID",
    403: "the key of PRIME_API_KEY lacks the permission, or is not of the team PRIME_TEAM_ID",
    404: "is PRIME_API_BASE_URL right?",
}


def annotate(error: sdk.TunnelError, status: int, retry_after: str | None) -> None:
    """Note on ``error`` what the SDK drops: the answer's HTTP status and its ``Retry-After``."""
    error.http_status = status  # type: ignore[attr-defined]
    error.retry_after = retry_after  # type: ignore[attr-defined]


def mapped(error: Exception, words: str, doing: str, timeout: float) -> TunnelError:
    """Return the error of the pool for ``error``, which says ``words`` and came while ``doing`` something."""
    could_not = f"could not {doing}"
    match error:
        case TunnelError():
            return error
        case sdk.TunnelError():
            return _of_sdk(error, words, could_not)
        case TimeoutError():
            return TunnelError(f"{could_not} within {timeout:.0f} s")
        case OSError() | ValueError():
            return StartRefusedError(f"{could_not} on this machine: {words}; {_MACHINE_HINT}", retryable=False)
    return TunnelError(f"{could_not}: unexpected {type(error).__name__}")


def _of_sdk(error: sdk.TunnelError, words: str, could_not: str) -> TunnelError:
    message = f"{could_not}: {words.partition(chr(10))[0]}"
    match error:
        case sdk.TunnelGoneError():
            return RegistrationGoneError(message, detail=words)
        case sdk.BinaryDownloadError():
            return StartRefusedError(f"{message}; {_FRPC_HINT}", retryable=False)
        case sdk.TunnelLimitReachedError():
            # Worth another attempt of the rollout, for tunnels end with their workers; not worth asking at once.
            message = f"{could_not}, limit reached: {words}; {_LIMIT_HINT}"
            return StartRefusedError(message, detail=f"HTTP 400\n{words}", retryable=True)
        case _ if isinstance(error.__cause__, pydantic.ValidationError):
            # Its words show what was received, the tokens as well.
            fields = ", ".join(".".join(map(str, e["loc"])) for e in error.__cause__.errors(include_input=False))
            return TunnelError(f"{could_not}: the service's answer was not understood; look at {fields}")
    return _by_status(error, words, message)


def _by_status(error: sdk.TunnelError, words: str, message: str) -> TunnelError:
    status = 401 if "No API key configured" in words else getattr(error, "http_status", None)
    detail = f"HTTP {status}\n{words}" if status else words
    if status == 429:
        retry_after = seconds_to_wait(getattr(error, "retry_after", None), _RETRY_AFTER)
        return RateLimitedError(message, detail=detail, retry_after=retry_after)
    if status is not None and 400 <= status < 500 and status not in _TRANSIENT:
        hint = _STATUS_HINTS.get(status, "the service does not accept such a tunnel")
        return StartRefusedError(f"{message} ({hint})", detail=detail, retryable=False)
    return TunnelError(message, detail=detail)
