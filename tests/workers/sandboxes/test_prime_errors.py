"""What the SDK raises, in our tree; times that a 429 names; and how the platform is connected to."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import httpx
import pytest
from prime_sandboxes import (
    APIError,
    APITimeoutError,
    CommandTimeoutError,
    DownloadTimeoutError,
    PaymentRequiredError,
    SandboxFileNotFoundError,
    SandboxImagePullError,
    SandboxNotRunningError,
    SandboxOOMError,
    SandboxTimeoutError,
    UnauthorizedError,
    UploadTimeoutError,
)
from prime_sandboxes import Sandbox as Answer
from pydantic import ValidationError

from producer.contract import ErrorKind, Resources
from workers import prime
from workers.errors import SandboxError
from workers.sandboxes.base import SandboxSpec
from workers.sandboxes.prime_errors import died, http_status, platform_call, redacted, retry_after, sandbox_error

Spec = Callable[..., SandboxSpec]


@pytest.mark.parametrize(
    ("error", "retryable", "words"),
    [
        (UnauthorizedError("API key unauthorized. Check PRIME_API_KEY."), False, "PRIME_API_KEY"),
        (APIError("No API key configured. Set PRIME_API_KEY environment variable."), False, "PRIME_API_KEY"),
        (PaymentRequiredError("Payment required."), False, "billing"),
        (APIError("HTTP 400: bad"), False, "HTTP 400"),
        (APIError("Upload failed: HTTP 401 POST http://gw/x: Unauthorized"), True, "refused the token of sandbox s1"),
        (APIError("Connect RPC failed (unauthenticated): no"), True, "refused the token of sandbox s1"),
        (APIError("HTTP 403: not yours"), False, "HTTP 403"),
        (APIError("HTTP 404: no such sandbox"), True, "sandbox s1 is gone"),
        (APIError("HTTP 408: slow"), True, "HTTP 408"),
        (APIError("HTTP 409: conflict"), True, "HTTP 409"),
        (APIError("HTTP 422: [{'msg': 'no'}]"), False, "HTTP 422"),
        (APIError("HTTP 429: wait"), True, "HTTP 429"),
        (APIError("HTTP 500: oh"), True, "HTTP 500"),
        (APIError("Upload failed: HTTP 413: too large"), False, "HTTP 413"),
        (APIError("Request failed: ConnectError at POST http://x: refused"), True, "ConnectError"),
        (APIError("Connect RPC failed (unavailable): gone"), True, "unavailable"),
        (APITimeoutError("Request timed out"), True, "timed out"),
        (CommandTimeoutError("s1", "true", 5), True, "timeout"),
        (UploadTimeoutError("s1", "/x", 5), True, "timeout"),
        (DownloadTimeoutError("s1", "/x", 5), True, "timeout"),
        (SandboxFileNotFoundError("File not found: /x"), False, "no such file"),
        (SandboxOOMError("s1", "ERROR", "OOM_KILLED"), False, "memory_gb=2"),
        (SandboxTimeoutError("s1", "TIMEOUT", "TIMEOUT"), True, "time to live of 3600 s"),
        (SandboxImagePullError("s1", "ERROR", "IMAGE_PULL_FAILED"), False, "image 'python:3.11-slim'"),
        (SandboxNotRunningError("s1", "TERMINATED"), True, "TERMINATED"),
        (SandboxNotRunningError("s1", message="Timeout waiting"), True, "not running"),
        (RuntimeError("Sandbox client is closing"), True, "closing"),
        (KeyError("statuses"), True, "KeyError"),
        (OSError(24, "Too many open files"), True, "Too many open files"),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, Exception) else "",
)
def test_errors_of_the_sdk(spec: Spec, error: Exception, retryable: bool, words: str) -> None:
    mapped = sandbox_error("could not", error, sandbox_id="s1", spec=spec(resources=Resources(memory_gb=2)))
    assert (mapped.kind, mapped.retryable) == (ErrorKind.SANDBOX, retryable)
    assert words in mapped.message
    assert mapped.detail
    assert mapped.account is ("PRIME_API_KEY" in mapped.message or "billing" in mapped.message)


def test_404_where_there_is_no_sandbox_yet_is_a_refusal() -> None:
    assert not sandbox_error("could not", APIError("HTTP 404: Not Found")).retryable


def test_an_answer_that_cannot_be_understood_is_retryable_and_shows_no_value() -> None:
    with pytest.raises(ValidationError) as raised:
        Answer.model_validate({"id": "s1", "environmentVars": "t0p-secret"})
    mapped = sandbox_error("could not", raised.value)
    assert mapped.retryable
    assert "environmentVars" in (mapped.detail or "")
    assert "t0p-secret" not in f"{mapped.message}{mapped.detail}"


def test_the_error_type_is_among_the_platforms_words() -> None:
    error = died("s1", status="ERROR", error_type="NODE_LOST", said="the node is gone")
    assert error.retryable
    assert error.detail == "status ERROR, error type NODE_LOST: the node is gone"


def test_an_error_of_ours_passes_unchanged() -> None:
    error = SandboxError("ours", retryable=False)
    assert sandbox_error("could not", error) is error


def test_the_cause_is_kept() -> None:
    async def main() -> None:
        with pytest.raises(SandboxError) as raised:
            async with platform_call("could not", 5):
                raise APIError("HTTP 503: busy")
        assert http_status(raised.value.__cause__) == 503

    asyncio.run(main())


@pytest.mark.parametrize(
    ("value", "seconds"), [("7", 7.0), ("0.5", 0.5), ("-3", 0.0), ("soon", 10.0), ("", 10.0), (None, 10.0)]
)
def test_retry_after_in_seconds(value: str | None, seconds: float) -> None:
    headers = {} if value is None else {"Retry-After": value}
    assert retry_after(httpx.Response(429, headers=headers), 10.0) == seconds


def test_retry_after_as_a_date() -> None:
    date = format_datetime(datetime.now(UTC) + timedelta(seconds=30), usegmt=True)
    assert 25 < retry_after(httpx.Response(429, headers={"Retry-After": date}), 10.0) <= 30


def test_secrets_are_taken_out_of_the_platforms_words_but_not_every_letter() -> None:
    assert redacted("token abcdef and 1", ["abcdef", "1"]) == "token *** and 1"


@pytest.mark.parametrize(
    ("environ", "direct"),
    [
        ({}, True),
        ({"https_proxy": "http://proxy:3128"}, False),
        ({"all_proxy": "http://proxy:3128"}, False),
        ({"http_proxy": "http://proxy:3128"}, True),
        ({"https_proxy": "http://proxy:3128", "no_proxy": "platform.example"}, True),
    ],
)
def test_a_proxy_is_used_where_one_is_set(
    monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], direct: bool
) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert (prime.many_connections("https://platform.example") is not None) is direct
