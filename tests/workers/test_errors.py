"""Errors that several get: each has a copy of its own, with all that is known."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest

from producer.contract import Phase
from workers.errors import RolloutError, SandboxError, TunnelError
from workers.gateway.client import GatewayStatusError
from workers.sandboxes.prime_errors import RateLimitError
from workers.tunnels.backend import RateLimitedError, StartRefusedError


def refused() -> SandboxError:
    error = SandboxError("no", detail="HTTP 402", retryable=False)
    error.account = True
    return error


@pytest.mark.parametrize(
    "make",
    [
        refused,
        lambda: TunnelError("dead", detail="frpc says", retryable=True),
        lambda: StartRefusedError("check PRIME_API_KEY", retryable=False),
        lambda: RateLimitedError("slow down", retry_after=3.0),
        lambda: RateLimitError(2.5, "wait"),
        lambda: GatewayStatusError("no", status=409, detail="HTTP 409", retryable=True),
    ],
)
def test_a_copy_has_all_of_its_original_and_changes_nothing_of_it(make: Callable[[], RolloutError]) -> None:
    error = make()
    error.__cause__ = OSError("behind it")
    twin = error.again()
    assert type(twin) is type(error)
    assert str(twin) == str(error)
    assert twin.__cause__ is error.__cause__
    assert (twin.account, twin.info()) == (error.account, error.info())
    assert vars(twin) == vars(error)
    before = copy.copy(vars(error))
    twin.phase = Phase.SETUP
    assert vars(error) == before
