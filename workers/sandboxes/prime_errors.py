"""Turns what the Prime SDK raises into `SandboxError`, bounds its calls in time, and gives cancellation its name back.

Which failures are worth another attempt:

- not: 401 (key), 402 (billing), any other refusal (400, 403, 413, 422, ...), an image that cannot be pulled, and a
  sandbox that ran out of memory: with the same ``memory_gb`` the same agent does so again;
- yes: 408, 409, 429, 5xx, connections that cannot be made or drop, calls that take too long, answers that cannot be
  understood, and a sandbox that is gone for any other reason.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import TypeVar

import httpx
from prime_sandboxes import (
    APIError,
    CommandTimeoutError,
    DownloadTimeoutError,
    PaymentRequiredError,
    SandboxFileNotFoundError,
    SandboxNotRunningError,
    UnauthorizedError,
    UploadTimeoutError,
)
from pydantic import ValidationError

from workers.errors import SandboxError
from workers.instruments import NO_ANSWER, PLATFORM_REQUESTS
from workers.prime import seconds_to_wait
from workers.sandboxes.base import SandboxSpec

ErrorT = TypeVar("ErrorT", bound=BaseException)

#: States from which a sandbox does not come back.
ENDED_STATES = frozenset({"ERROR", "TERMINATED", "TERMINATING", "TIMEOUT"})

#: Refusals that may not be repeated by the next attempt.
_PASSING = {408, 409, 425, 429}
_STATUS = re.compile(r"\bHTTP (\d{3})\b")
_NO_KEY = "No API key configured"
#: How a 401 for a command reads.
_TOKEN_REFUSED = "Connect RPC failed (unauthenticated)"  # noqa: S105 - no password
#: Seconds; a 429 that names fewer has named no pause.
SHORTEST_PAUSE = 0.25
#: Shorter values are too common to be looked for in the platform's words.
_SHORTEST_SECRET = 4


class RateLimitError(SandboxError):
    """The platform answered 429, so nothing was done; ``retry_after`` is in seconds."""

    def __init__(self, retry_after: float, detail: str) -> None:
        super().__init__("the platform wants fewer requests (HTTP 429)", detail=detail, retryable=True)
        self.retry_after = retry_after

    def pause(self, delay: float) -> float:
        """Return the seconds to wait: those that it names, or ``delay`` where those are none to speak of.

        It may say "0", or a date that has passed by our clock: all who were refused would ask again without end.
        """
        return self.retry_after if self.retry_after >= SHORTEST_PAUSE else delay


class UnansweredError(SandboxError):
    """The platform did not answer in time: what was asked for may be done or not."""


@asynccontextmanager
async def platform_call(
    what: str,
    limit: float,
    *,
    sandbox_id: str | None = None,
    spec: SandboxSpec | None = None,
) -> AsyncIterator[None]:
    """Do one call of the SDK inside: it takes at most ``limit`` seconds and raises `SandboxError` or CancelledError.

    The SDK has no deadlines of its own for the platform, and inside its RPCs a cancellation, be it ours or that of a
    deadline, is turned into an APIError: who was cancelled is seen from the task and the clock instead. ``what`` begins
    the message; `RateLimitError` passes unchanged.
    """
    task = asyncio.current_task()
    assert task is not None  # noqa: S101 - a coroutine that awaits runs in a task
    cancels = task.cancelling()
    clock = asyncio.timeout(limit)
    try:
        async with clock:
            yield
    except RateLimitError:
        if task.cancelling() > cancels:
            raise asyncio.CancelledError from None
        raise
    except Exception as error:
        if task.cancelling() > cancels:
            raise asyncio.CancelledError from None
        if limited := _behind(error, RateLimitError):
            raise limited from error
        if clock.expired() or _behind(error, httpx.TransportError):
            PLATFORM_REQUESTS.labels("sandboxes", NO_ANSWER).inc()
        if clock.expired():
            raise UnansweredError(f"{what}: the platform did not answer within {limit:.3g} s") from error
        raise sandbox_error(what, error, sandbox_id=sandbox_id, spec=spec) from error
    if task.cancelling() > cancels:
        raise asyncio.CancelledError


def _behind(error: BaseException | None, kind: type[ErrorT]) -> ErrorT | None:
    """Return the error of this kind that the SDK has wrapped, as it does with whatever a request for a file raises."""
    while error is not None and not isinstance(error, kind):
        error = error.__cause__ or error.__context__
    return error


def sandbox_error(
    what: str, error: Exception, *, sandbox_id: str | None = None, spec: SandboxSpec | None = None
) -> SandboxError:
    """Return ``error`` in our tree; ``spec`` is that of the sandbox, for what to change in it."""
    if isinstance(error, SandboxError):
        return error
    if isinstance(error, SandboxNotRunningError):
        return died(
            sandbox_id or error.sandbox_id, status=error.status, error_type=error.error_type, said=str(error), spec=spec
        )
    if isinstance(error, CommandTimeoutError | UploadTimeoutError | DownloadTimeoutError):
        return SandboxError(f"{what}: it exceeded its timeout", detail=_words(error, spec))
    if isinstance(error, SandboxFileNotFoundError):
        return SandboxError(f"{what}: no such file", detail=_words(error, spec), retryable=False)
    status = http_status(error)
    detail = _words(error, spec)
    of_account = status == 402 or _key_was_refused(error)
    if status == 401 and not of_account:
        # From the sandbox's own gateway, which takes no API key. Another sandbox has another token.
        message, retryable = f"the gateway refused the token of sandbox {sandbox_id}", True
    elif status == 401:
        message, retryable = "the platform refused the API key: check PRIME_API_KEY", False
    elif status == 402:
        message, retryable = "the platform wants payment: check the account's billing", False
    elif status in {404, 410} and sandbox_id:
        message, retryable = f"sandbox {sandbox_id} is gone", True
    elif status and 400 <= status < 500 and status not in _PASSING:
        message, retryable = f"the platform refused it (HTTP {status})", False
    else:
        message, retryable = f"the platform failed (HTTP {status})" if status else _first_line(detail), True
    refusal = SandboxError(f"{what}: {message}", detail=detail, retryable=retryable)
    refusal.account = of_account
    return refusal


def died(
    sandbox_id: str, *, status: str | None, error_type: str | None, said: str | None, spec: SandboxSpec | None = None
) -> SandboxError:
    """Return the error for a sandbox that is no more, or never came to be."""
    detail = f"status {status}, error type {error_type}: {redacted(said or 'no message', _secrets(spec))}"
    retryable = True
    if error_type == "OOM_KILLED":
        given = f" (memory_gb={spec.resources.memory_gb:g})" if spec else ""
        message = f"sandbox {sandbox_id} ran out of memory{given}: request more in resources.memory_gb"
        retryable = False
    elif error_type == "IMAGE_PULL_FAILED":
        image = f"image {spec.image!r}" if spec else "its image"
        message = f"{image} could not be pulled: check its name, and that the platform may read it"
        retryable = False
    elif error_type == "TIMEOUT" or status == "TIMEOUT":
        message = f"sandbox {sandbox_id} exceeded its time to live" + (f" of {spec.ttl:g} s" if spec else "")
    else:
        message = f"sandbox {sandbox_id} is not running any more ({error_type or status or 'it is gone'})"
    return SandboxError(message, detail=detail, retryable=retryable)


def http_status(error: BaseException | None) -> int | None:
    """Return the HTTP status behind an error of the SDK, which has it in its class or in its text only."""
    if _key_was_refused(error) or (isinstance(error, APIError) and _TOKEN_REFUSED in str(error)):
        return 401
    if isinstance(error, PaymentRequiredError):
        return 402
    if isinstance(error, RateLimitError):
        return 429
    found = _STATUS.search(str(error)) if isinstance(error, APIError) else None
    return int(found[1]) if found else None


def _key_was_refused(error: BaseException | None) -> bool:
    """Whether the platform itself turned the account away, or the SDK found no account."""
    return isinstance(error, UnauthorizedError) or (isinstance(error, APIError) and str(error).startswith(_NO_KEY))


def was_refused(error: SandboxError) -> bool:
    """Whether the platform said no, so that certainly nothing was created."""
    status = http_status(error.__cause__)
    return status is not None and 400 <= status < 500 and status not in {408, 409}


def retry_after(response: httpx.Response, default: float) -> float:
    """Return the seconds that a 429 wants us to wait: a number or a date, or ``default`` where it says nothing."""
    return seconds_to_wait(response.headers.get("retry-after"), default)


def redacted(text: str, secrets: Iterable[str]) -> str:
    """Return ``text`` without the values of ``secrets``: a refusal of the platform repeats what it refuses."""
    for secret in secrets:
        if len(secret) >= _SHORTEST_SECRET:
            text = text.replace(secret, "***")
    return text


def validation_words(error: ValidationError) -> str:
    """Return what is wrong without the values, among which are secrets."""
    found = (f"{'.'.join(map(str, e['loc'])) or '(whole)'}: {e['msg']}" for e in error.errors(include_url=False))
    return "; ".join(found)


def _words(error: Exception, spec: SandboxSpec | None) -> str:
    if isinstance(error, ValidationError):
        return f"it cannot be understood: {validation_words(error)}"
    text = str(error) or type(error).__name__
    return redacted(
        text if isinstance(error, APIError | RuntimeError) else f"{type(error).__name__}: {text}", _secrets(spec)
    )


def _secrets(spec: SandboxSpec | None) -> Iterable[str]:
    return spec.secrets.values() if spec else ()


def _first_line(text: str) -> str:
    line = text.partition("\n")[0]
    return line if len(line) <= 200 else f"{line[:200]}..."
