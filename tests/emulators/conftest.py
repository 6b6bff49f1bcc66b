"""One emulator for most of the tests in this folder, and a maker of others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import certifi
import pytest

from emulators.drive import NOTHING, settle
from emulators.prime import PrimeEmulator


@pytest.fixture(scope="module", autouse=True)
def _one_root_certificate(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Spare every client that is made here the 20 ms of reading all of certifi's roots: nothing here uses TLS."""
    first, end, _ = Path(certifi.where()).read_text().partition("-----END CERTIFICATE-----\n")
    path = tmp_path_factory.mktemp("roots") / "one.pem"
    path.write_text(first + end)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SSL_CERT_FILE", str(path))
        yield


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrimeEmulator]:
    with PrimeEmulator(tmp_path_factory.mktemp("prime")) as emulator:
        yield emulator


@pytest.fixture
def emulator(shared: PrimeEmulator, monkeypatch: pytest.MonkeyPatch) -> Iterator[PrimeEmulator]:
    """The shared emulator; every test has to leave it empty."""
    settle(monkeypatch, shared)
    yield shared
    shared.clear_faults()
    shared.limit_tunnels(None)
    assert shared.leaked() == NOTHING
    assert shared.log.read_text() == ""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., PrimeEmulator]]:
    """Makes an emulator with options of its own."""
    started: list[PrimeEmulator] = []

    def make(**options: Any) -> PrimeEmulator:
        emulator = PrimeEmulator(tmp_path / f"own{len(started)}", **options)
        emulator.start()
        started.append(emulator)
        settle(monkeypatch, emulator)
        return emulator

    yield make
    for emulator in started:
        emulator.stop()
