"""What the SDK raises, and what becomes of it."""

from __future__ import annotations

from typing import Any

import prime_tunnel.exceptions as sdk
import pytest
from prime_tunnel.models import TunnelInfo
from pydantic import ValidationError

from workers.errors import TunnelError
from workers.tunnels.backend import RateLimitedError, RegistrationGoneError, StartRefusedError
from workers.tunnels.prime_errors import annotate, mapped


def with_status(error: sdk.TunnelError, status: int, retry_after: str | None = None) -> sdk.TunnelError:
    annotate(error, status, retry_after)
    return error


@pytest.mark.parametrize(
    ("error", "kind", "retryable", "says"),
    [
        (with_status(sdk.TunnelAuthError("API key unauthorized."), 401), StartRefusedError, False, "set PRIME_API_KEY"),
        (with_status(sdk.TunnelAuthError("Payment required."), 402), StartRefusedError, False, "add credit"),
        (with_status(sdk.TunnelError("Failed to create tunnel: no"), 403), StartRefusedError, False, "PRIME_TEAM_ID"),
        (with_status(sdk.TunnelError("not found"), 404), StartRefusedError, False, "PRIME_API_BASE_URL"),
        (with_status(sdk.TunnelError("bad field"), 422), StartRefusedError, False, "does not accept"),
        (with_status(sdk.TunnelError("oops"), 500), TunnelError, True, "oops"),
        (with_status(sdk.TunnelError("conflict"), 409), TunnelError, True, "conflict"),
        (sdk.TunnelError("No API key configured. Set PRIME_API_KEY"), StartRefusedError, False, "set PRIME_API_KEY"),
        (sdk.TunnelError("Failed to connect to API: refused"), TunnelError, True, "refused"),
        (sdk.TunnelLimitReachedError("maximum number of tunnels: 5"), StartRefusedError, True, "labels fleet:"),
        (sdk.BinaryDownloadError("Failed to download frpc"), StartRefusedError, False, "~/.prime/bin"),
        (sdk.TunnelGoneError("tunnel is inactive"), RegistrationGoneError, True, "inactive"),
        (sdk.TunnelConnectionError("frpc: EOF"), TunnelError, True, "frpc: EOF"),
        (sdk.TunnelTimeoutError("Tunnel connection timed out\nfrpc: dialling"), TunnelError, True, "timed out"),
        (TimeoutError(), TunnelError, True, "within 5 s"),
        (PermissionError("~/.prime/bin"), StartRefusedError, False, "HOME"),
        (ValueError("Invalid context name"), StartRefusedError, False, "PRIME_CONTEXT"),
        (KeyError("tunnel_id"), TunnelError, True, "unexpected KeyError"),
    ],
)
def test_each_error_of_the_sdk_has_its_meaning(error: Exception, kind: Any, retryable: bool, says: str) -> None:
    result = mapped(error, str(error), "start a tunnel", 5.0)
    assert (type(result), result.retryable) == (kind, retryable)
    assert says in result.message
    assert "\n" not in result.message


@pytest.mark.parametrize(
    ("header", "seconds"),
    [("7", 7.0), (None, 30.0), ("Wed, 21 Oct 2015 07:28:00 GMT", 0.0), ("86400", 120.0), ("inf", 120.0), ("nan", 30.0)],
)
def test_a_429_keeps_its_retry_after(header: str | None, seconds: float) -> None:
    result = mapped(with_status(sdk.TunnelError("slow down"), 429, header), "slow down", "start a tunnel", 5.0)
    assert isinstance(result, RateLimitedError)
    assert result.retry_after == seconds


def test_an_answer_that_is_not_understood_is_not_quoted_for_its_token() -> None:
    with pytest.raises(ValidationError) as caught:
        TunnelInfo(frp_token="hush", tunnel_id="t", url="u", server_host="h", expires_at="2030-01-01T00:00:00Z")
    error = sdk.TunnelError(f"Failed to register tunnel: {caught.value}")
    error.__cause__ = caught.value
    assert "hush" in str(error)
    result = mapped(error, str(error), "start a tunnel", 5.0)
    assert "hostname" in result.message
    assert "hush" not in result.message + (result.detail or "")
