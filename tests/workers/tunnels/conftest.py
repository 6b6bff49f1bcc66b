"""The tunnel pool over two services: one of plain objects, and the emulated platform with the unmodified SDK."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Coroutine, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import pytest
import uvloop
from emulators.prime import PrimeEmulator

from workers.errors import TunnelError
from workers.tunnels.backend import Limits, Registration, RegistrationGoneError
from workers.tunnels.pool import TunnelPool
from workers.tunnels.prime import PrimeBackend, PrimeTunnel

T = TypeVar("T")

GATEWAY = "http://127.0.0.1:8080"
#: Times for tests: nothing is waited for but what happens, however long this machine takes for that.
QUICK = Limits(
    start_timeout=30.0,
    start_budget=60.0,
    backoff=0.01,
    backoff_max=0.05,
    restart_timeout=30.0,
    restart_budget=60.0,
    restart_attempts=3,
    watch_interval=0.02,
    status_timeout=30.0,
    stop_timeout=30.0,
    sweep_timeout=30.0,
    close_timeout=30.0,
)


@dataclass
class FakeTunnel:
    """A tunnel that is nothing but its state."""

    service: FakeService
    port: int
    label: str
    tunnel_id: str | None = None
    running: bool = False
    gone: bool = False
    stopped: bool = False

    @property
    def url(self) -> str:
        return f"http://{self.tunnel_id}.test"

    async def start(self, *, timeout: float) -> None:
        await self.service.at("start", timeout)
        self.tunnel_id = f"t{len(self.service.tunnels)}"
        self.service.tunnels[self.tunnel_id] = self
        self.service.registered[self.tunnel_id] = self.label
        await self.service.at("connect", timeout)
        self.running = True

    async def restart(self, *, timeout: float) -> None:
        self.running = False
        await self.service.at("restart", timeout)
        if self.tunnel_id not in self.service.registered:
            raise RegistrationGoneError("tunnel not registered")
        self.service.disconnected.discard(self.tunnel_id)
        self.running = True

    async def status(self, *, timeout: float) -> Registration:
        await self.service.at("status", timeout)
        if self.tunnel_id not in self.service.registered:
            self.gone = True
            return Registration.GONE
        down = self.tunnel_id in self.service.disconnected
        return Registration.DISCONNECTED if down else Registration.CONNECTED

    async def output(self) -> str:
        return "frpc: start proxy success"

    async def stop(self, *, timeout: float) -> None:
        self.running, self.stopped = False, True
        await self.service.at("stop", timeout)
        self.service.registered.pop(self.tunnel_id or "", None)


@dataclass
class FakeService:
    """A tunnel service whose every point can be made to fail, once per entry of ``faults``, or to wait."""

    tunnels: dict[str, FakeTunnel] = field(default_factory=dict)
    opened: list[FakeTunnel] = field(default_factory=list)
    registered: dict[str, str] = field(default_factory=dict)
    disconnected: set[str] = field(default_factory=set)
    faults: dict[str, list[BaseException | str | None]] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    closed: bool = False

    def open(self, host: str, port: int, label: str) -> FakeTunnel:
        self.opened.append(FakeTunnel(self, port, label))
        return self.opened[-1]

    async def sweep(self, label: str, *, timeout: float) -> int:
        await self.at("sweep", timeout)
        found = [tunnel_id for tunnel_id, its in self.registered.items() if its == label]
        for tunnel_id in found:
            del self.registered[tunnel_id]
        return len(found)

    async def aclose(self) -> None:
        self.closed = True

    async def at(self, point: str, timeout: float) -> None:
        self.calls.append(point)
        await asyncio.sleep(0)
        faults = self.faults.get(point)
        fault = (faults[0] if faults[-1] == "for ever" else faults.pop(0)) if faults else None
        if isinstance(fault, BaseException):
            raise fault
        if fault == "deaf":  # to a cancellation
            with suppress(asyncio.CancelledError):
                await self.gate.wait()
        if fault == "hang":
            try:
                async with asyncio.timeout(timeout):
                    await self.gate.wait()
            except TimeoutError:
                raise TunnelError(f"{point} took longer than {timeout} s") from None


class FakeWorld:
    """What tests do to the fake service."""

    real = False

    def __init__(self) -> None:
        self.service = FakeService()

    def backend(self) -> FakeService:
        return self.service

    def kill(self, tunnel_id: str | None) -> None:
        self.service.tunnels[tunnel_id or ""].running = False

    def delete(self, tunnel_id: str | None) -> None:
        tunnel = self.service.tunnels[tunnel_id or ""]
        tunnel.gone = True
        del self.service.registered[tunnel_id or ""]

    def disconnect(self, tunnel_id: str | None) -> None:
        self.service.disconnected.add(tunnel_id or "")

    def fail_status(self) -> None:
        self.service.faults["status"] = [TunnelError("HTTP 500"), "for ever"]

    def hold_starts(self) -> None:
        self.service.faults["start"] = ["hang", "for ever"]

    def let_starts_go(self) -> None:
        self.service.faults.clear()
        self.service.gate.set()

    @property
    def starts(self) -> int:
        return self.service.calls.count("start")

    def leaked(self) -> list[str]:
        alive = [tunnel.tunnel_id or "?" for tunnel in self.service.opened if tunnel.running]
        return [*self.service.registered, *alive]


class PrimeWorld:
    """The same, done to the emulated platform."""

    real = True

    def __init__(self, emulator: Platform) -> None:
        self.emulator = emulator

    def backend(self) -> PrimeBackend:
        return PrimeBackend("celery@worker-1", ("fleet:test", "worker:celery@worker-1"))

    def kill(self, tunnel_id: str | None) -> None:
        self.emulator.kill_frpc(tunnel_id)

    def delete(self, tunnel_id: str | None) -> None:
        self.emulator.delete_tunnel(tunnel_id)

    def disconnect(self, tunnel_id: str | None) -> None:
        self.emulator.disconnect_tunnel(tunnel_id)

    def fail_status(self) -> None:
        self.emulator.fault("get_tunnel", status=500, detail="internal error", times=None)

    def hold_starts(self) -> None:
        self.emulator.fault("create_tunnel", delay=60.0)

    def let_starts_go(self) -> None:
        self.emulator.clear_faults()

    @property
    def starts(self) -> int:
        return int(self.emulator.requests().get("create_tunnel", 0))

    def leaked(self) -> list[str]:
        return [str(found) for kind in self.emulator.leaked().values() for found in kind]


World = FakeWorld | PrimeWorld


class Platform:
    """One test's view of the emulated platform that all tests share: what happened since the test began."""

    def __init__(self, emulator: PrimeEmulator, home: Path) -> None:
        self.emulator = emulator
        self.home = home
        self.expected_refusals: list[tuple[str, str]] = []
        self._requests = emulator.requests()
        self._refused = len(emulator.refused())
        self._tunnels = {tunnel["tunnel_id"] for tunnel in emulator.tunnels()}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.emulator, name)

    def requests(self) -> dict[str, int]:
        return {name: count - self._requests.get(name, 0) for name, count in self.emulator.requests().items()}

    def refused(self) -> list[tuple[str, str]]:
        return self.emulator.refused()[self._refused :]

    def leaked(self) -> dict[str, list[Any]]:
        """Return what is left, but for what a test before this one has left, which has failed for it."""
        found = self.emulator.leaked()
        return found | {"tunnels": [tunnel for tunnel in found["tunnels"] if tunnel not in self._tunnels]}

    def tunnels(self) -> list[dict[str, Any]]:
        return [tunnel for tunnel in self.emulator.tunnels() if tunnel["tunnel_id"] not in self._tunnels]


@pytest.fixture(scope="session")
def shared_emulator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrimeEmulator]:
    with PrimeEmulator(tmp_path_factory.mktemp("prime")) as emulator:
        yield emulator


@pytest.fixture
def emulator(shared_emulator: PrimeEmulator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Platform]:
    """The emulated platform, in its best mood, and a HOME of the test's own."""
    home = tmp_path / "home"
    shutil.copytree(shared_emulator.home / ".prime" / "bin", home / ".prime" / "bin")
    for name in ("PRIME_TEAM_ID", "PRIME_BASE_URL", "PRIME_CONTEXT", "HTTP_PROXY", "http_proxy"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {**shared_emulator.environ, "HOME": str(home)}.items():
        monkeypatch.setenv(name, value)
    platform = Platform(shared_emulator, home)
    yield platform
    shared_emulator.clear_faults()
    shared_emulator.limit_tunnels(None)
    assert platform.refused() == platform.expected_refusals


@pytest.fixture(params=["fake", "prime"])
def world(request: pytest.FixtureRequest) -> World:
    """Either service; each test that uses this runs on both."""
    if request.param == "fake":
        return FakeWorld()
    return PrimeWorld(request.getfixturevalue("emulator"))


@pytest.fixture
def service() -> FakeService:
    return FakeService()


@pytest.fixture
def quick() -> Callable[..., Limits]:
    return lambda **changes: replace(QUICK, **changes)


class Scenario:
    """Runs a coroutine function with a pool, closes it, and looks for what is left."""

    def __call__(
        self,
        backend: Any,
        story: Callable[[TunnelPool], Coroutine[Any, Any, T]],
        limits: Limits = QUICK,
        **options: Any,
    ) -> T:
        async def go() -> T:
            pool = TunnelPool(backend, limits=limits, **options)
            try:
                async with asyncio.timeout(60):
                    return await story(pool)
            finally:
                async with asyncio.timeout(60):
                    await pool.aclose()

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:  # the worker's kind of loop
            return runner.run(go())

    @staticmethod
    async def until(predicate: Callable[[], object], what: str = "the condition") -> None:
        """Wait on ``predicate``; fails after 30 s."""
        try:
            async with asyncio.timeout(30):
                while not predicate():
                    await asyncio.sleep(0.005)
        except TimeoutError:
            pytest.fail(f"waited 30 s for {what}")


@pytest.fixture
def impatient_at_first(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Have the first start on the platform, which is to hang, given up after a few seconds; the next has its time."""

    def be_so() -> None:
        start, given = PrimeTunnel.start, iter([4.0])

        async def bounded(tunnel: PrimeTunnel, *, timeout: float) -> None:
            await start(tunnel, timeout=next(given, timeout))

        monkeypatch.setattr(PrimeTunnel, "start", bounded)

    return be_so


@pytest.fixture
def scenario() -> Scenario:
    return Scenario()
