"""Gateways that requests name: only those that the worker's settings allow, and not too many at one time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from producer.contract import ErrorKind, InvalidRequestError, RolloutRequest
from workers.errors import GatewayError, InvalidRolloutError
from workers.foreign import AllowedGateways, ForeignGateways, address_of
from workers.gateway.protocol import Registration
from workers.settings import WorkerSettings
from workers.systems import WorkerSystems


@pytest.mark.parametrize(
    ("pattern", "url", "allowed"),
    [
        ("gw", "http://gw:8080", True),
        ("gw", "http://gw", True),
        ("gw", "http://GW.:8080", True),
        ("gw", "http://gw.evil.com", False),
        ("gw", "http://evil-gw:8080", False),
        ("gw:8080", "http://gw:8080/path", True),
        ("gw:8080", "http://gw:80800", False),
        ("gw:8080", "http://gw", False),
        ("gw:80", "http://gw", True),
        ("gw:443", "https://gw", True),
        ("gw:*", "http://gw:1", True),
        ("GW:80*", "http://gw:8099", True),
        ("*.svc", "http://a.b.svc:1", True),
        ("*.svc", "http://svc", False),
        ("*.svc", "http://a.svc.evil.com", False),
        ("10.0.*", "http://10.0.3.4:1", True),
        ("10.0.*", "http://10.0.evil.com", False),
        ("127.0.0.1", "http://2130706433", False),
        ("127.0.0.1", "http://127.1", False),
        ("127x0x0x1", "http://127.0.0.1", False),
        ("[::1]", "http://[::1]:8080", True),
        ("[fd00::*]:8080", "http://[fd00::7]:8080", True),
        ("[fd00::*]:8080", "http://[fe80::7]:8080", False),
        ("*", "http://169.254.169.254/latest", True),
        ("*", "http://[::1]:1", True),
        ("*:8080", "http://anything:8080", True),
        ("*:8080", "http://anything:8081", False),
    ],
)
def test_what_a_pattern_allows(pattern: str, url: str, allowed: bool) -> None:
    assert AllowedGateways([pattern]).allow(url) is allowed


def test_nothing_is_allowed_without_a_pattern() -> None:
    with pytest.raises(InvalidRolloutError, match=r"add 10\.0\.0\.1:80 to the worker's ROLLOUTS_GATEWAY_ALLOW"):
        AllowedGateways([]).check("http://10.0.0.1/v2")


@pytest.mark.parametrize("pattern", ["http://gw:8080", "gw/path", "user@gw", "::1", "gw:", "[gw]", "a b", "gw:port"])
def test_a_pattern_that_is_none_stops_the_worker(pattern: str) -> None:
    with pytest.raises(ValidationError, match=r"is not HOST or HOST:PORT"):
        WorkerSettings(gateway_allow=pattern)


def test_the_patterns_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLOUTS_GATEWAY_ALLOW", "GW:8080, 127.0.0.1")
    assert WorkerSettings().gateway_allow == ("gw:8080", "127.0.0.1")


@pytest.mark.parametrize(
    ("url", "read"),
    [
        ("HTTP://GateWay:8080/v1/", "http://gateway:8080"),
        ("http://gw:1/Path/v1", "http://gw:1/Path"),
        ("http://[FD00::1]:8", "http://[fd00::1]:8"),
        ("http://g\tw:1", "http://gw:1"),
    ],
)
def test_a_gateways_url_is_read_in_one_way(url: str, read: str) -> None:
    assert RolloutRequest.parse({"model": "m", "gateway_url": url}).gateway_url == read


@pytest.mark.parametrize(
    "url", ["http://allowed\\@evil", "http://evil\\.allowed", "http://g w", "http://g%2ew", "http://\u0261w"]
)
def test_a_host_that_could_be_read_in_two_ways_is_refused(url: str) -> None:
    with pytest.raises(InvalidRequestError, match="gateway_url"):
        RolloutRequest.parse({"model": "m", "gateway_url": url})


def test_a_request_for_another_gateway_is_invalid_unless_the_worker_allows_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        own = WorkerSettings(gateway_url="http://own:1", sandbox_dir=tmp_path)
        listed = own.model_copy(update={"gateway_allow": ("other:2",)})
        async with WorkerSystems(own, "w") as closed, WorkerSystems(listed, "w") as opened:
            for url in (None, "http://OWN:1/v1"):
                assert closed.of(RolloutRequest(model="m", gateway_url=url))[0] == "http://own:1"
            wanted = RolloutRequest(model="m", gateway_url="http://other:2")
            with pytest.raises(InvalidRolloutError, match=r"gateway_url: .*ROLLOUTS_GATEWAY_ALLOW") as raised:
                closed.of(wanted)
            assert raised.value.info().kind is ErrorKind.INVALID_REQUEST
            assert opened.of(wanted)[0] == "http://other:2"
            # Nor is it called to clear up what somebody else may have left there: that is left to who may.
            with pytest.raises(InvalidRolloutError):
                closed.gateway_of("http://other:2", None)
            found = opened.gateway_of("http://other:2", None)
            assert found is not None
            assert found[0] == "http://other:2"

    asyncio.run(scenario())


class Registrar:
    """A gateway that notes who is registered."""

    def __init__(self) -> None:
        self.held: list[str] = []
        self.error: Exception | None = None

    @asynccontextmanager
    async def registered(self, url: str, rollout_id: str, *_: object, **__: object) -> AsyncIterator[None]:
        if self.error:
            raise self.error
        self.held.append(rollout_id)
        yield
        self.held.remove(rollout_id)


def hold(gateways: ForeignGateways, url: str, rollout_id: str) -> Any:
    return gateways.registered(url, rollout_id, Registration(model="m"), api_key="k")


def test_a_worker_uses_only_so_many_gateways_of_requests_at_one_time() -> None:
    async def scenario() -> None:
        registrar, tunnels = Registrar(), ["http://own:1"]
        gateways = ForeignGateways(registrar, 2, "http://own:1", lambda: tunnels)  # type: ignore[arg-type]
        async with hold(gateways, "http://a:1", "a"), AsyncExitStack() as b:
            await b.enter_async_context(hold(gateways, "http://b:1", "b"))
            async with hold(gateways, "http://A:1/path", "a2"):  # the same one
                assert registrar.held == ["a", "b", "a2"]
            with pytest.raises(GatewayError, match=r"takes no more \(ROLLOUTS_FOREIGN_GATEWAYS\)") as raised:
                await hold(gateways, "http://c:1", "c").__aenter__()
            assert raised.value.retryable
            await b.aclose()
            tunnels.append("http://b:1")  # it outlives its rollouts
            with pytest.raises(GatewayError):
                await hold(gateways, "http://c:1", "c").__aenter__()
            tunnels.pop()
            async with hold(gateways, "http://c:1", "c"):
                assert registrar.held == ["a", "c"]
        registrar.error = GatewayError("no")
        for name in "defg":
            with pytest.raises(GatewayError, match=r"^no$"):
                await hold(gateways, f"http://{name}:1", name).__aenter__()
        assert not gateways._users, "one that refused is not in use"

    asyncio.run(scenario())


def test_an_address_is_compared_with_its_port() -> None:
    urls = ["http://GW", "https://gw.", "http://[::1]:5/x", "http://gw:9"]
    assert list(map(address_of, urls)) == ["gw:80", "gw:443", "[::1]:5", "gw:9"]
