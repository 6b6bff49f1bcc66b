"""The emulated platform, one server for all tests of this folder, and what each test sees of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from emulators.prime import PrimeEmulator
from support import wait_until

from workers.sandboxes.base import SandboxSpec
from workers.sandboxes.prime import PrimeSandboxes


class Prime:
    """The platform as one test sees it: what was asked and created since the test began."""

    def __init__(self, emulator: PrimeEmulator) -> None:
        self.emulator = emulator
        self.fault = emulator.fault
        self._requests = emulator.requests()
        self._earlier = {sandbox["id"] for sandbox in emulator.sandboxes()}
        self._refused = len(emulator.refused())
        #: Words of the refusals that the test provokes.
        self.may_refuse: str | None = None

    def requests(self) -> dict[str, int]:
        now = self.emulator.requests()
        return {name: n - self._requests.get(name, 0) for name, n in now.items() if n > self._requests.get(name, 0)}

    def sandboxes(self) -> list[dict[str, Any]]:
        return [sandbox for sandbox in self.emulator.sandboxes() if sandbox["id"] not in self._earlier]

    def run(self, body: Callable[[PrimeSandboxes], Awaitable[Any]], **options: Any) -> Any:
        """Run ``body`` with a provider on an event loop of its own, and return what it returns."""

        async def main() -> Any:
            sandboxes = PrimeSandboxes(**({"creates_per_minute": 60_000, "poll_interval": 0.05} | options))
            try:
                async with asyncio.timeout(60):
                    return await body(sandboxes)
            finally:
                await sandboxes.aclose()

        return asyncio.run(main())

    async def until(self, predicate: Callable[[], object], what: str) -> None:
        end = time.monotonic() + 30
        while not predicate():
            assert time.monotonic() < end, f"waited 30 s for {what}"
            await asyncio.sleep(0.005)

    async def together(self, begun: Callable[[], object]) -> None:
        """Wait for ``begun`` with the event loop's clock standing still: all that begins meanwhile does so at once."""
        loop, end = asyncio.get_running_loop(), time.monotonic() + 30
        now = loop.time()
        loop.time = lambda: now  # type: ignore[method-assign]
        try:
            while not begun():
                assert time.monotonic() < end, "waited 30 s for all to begin"
                await asyncio.sleep(0)
        finally:
            del loop.time

    def check(self) -> None:
        """Nothing is left on the platform, and nothing was asked that no correct client asks."""
        self.emulator.clear_faults()
        left = self.emulator.leaked()
        assert (left["sandboxes"], left["tunnels"]) == ([], [])
        refused = self.emulator.refused()[self._refused :]
        assert [entry for entry in refused if self.may_refuse is None or self.may_refuse not in entry[1]] == []


@pytest.fixture(scope="session")
def emulator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrimeEmulator]:
    with PrimeEmulator(tmp_path_factory.mktemp("prime")) as emulator:
        yield emulator
        # Processes end a little after their sandbox: once for all tests.
        wait_until(lambda: not emulator.leaked()["processes"], what="the end of all sandboxes' processes")


def account(emulator: PrimeEmulator, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PRIME_TEAM_ID", "PRIME_BASE_URL", "PRIME_CONTEXT", "HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in emulator.environ.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def prime(emulator: PrimeEmulator, monkeypatch: pytest.MonkeyPatch) -> Iterator[Prime]:
    """The shared platform."""
    account(emulator, monkeypatch)
    prime = Prime(emulator)
    yield prime
    prime.check()


@pytest.fixture
def own_prime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Prime]]:
    """Starts a platform of the test's own, with options of `PrimeEmulator`."""
    started: list[Prime] = []

    def start(**options: Any) -> Prime:
        emulator = PrimeEmulator(tmp_path / f"prime{len(started)}", **options)
        emulator.start()
        started.append(Prime(emulator))
        account(emulator, monkeypatch)
        return started[-1]

    yield start
    try:
        for prime in started:
            prime.check()
    finally:
        for prime in started:
            prime.emulator.stop()


@pytest.fixture
def spec() -> Callable[..., SandboxSpec]:
    def make(**fields: Any) -> SandboxSpec:
        return SandboxSpec(**({"name": "test", "image": "python:3.11-slim"} | fields))

    return make
