"""Fleets as processes, on each of the systems that a rollout may run on, and agents that do as they are told."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from emulators.prime import PrimeEmulator

from workers.local import LocalStack, StackOptions

LEASE_TTL = 2.0
#: What a flow is tested on: the embedded providers; the platform's sandboxes and tunnels; these without a gateway.
SYSTEMS = ("local", "prime", "interception")


@dataclass
class Agents:
    """Agents that note their start in a file and run until they are released."""

    directory: Path
    _writer: int | None = None

    def __post_init__(self) -> None:
        os.mkfifo(self.directory / "wait")

    def command(self) -> str:
        # Reading one byte from a FIFO costs nothing while it waits, unlike a loop around sleep.
        return f"echo $OPENAI_BASE_URL >> {self.directory}/started; head -c 1 {self.directory}/wait > /dev/null"

    def patient(self, calls: int = 1, patience: float = 60.0) -> str:
        """Return the command of one that makes a model call before it waits, and ``calls`` after; see the script."""
        script = self.directory / "patient_agent.py"
        if not script.exists():
            script.write_text((Path(__file__).with_name("patient_agent.py")).read_text())
        return f"exec {sys.executable} -I -S {script} {self.directory} {calls} {patience}"

    def starts(self) -> list[str]:
        """Return the base URL of every agent that was started: one line for each start."""
        path = self.directory / "started"
        return path.read_text().split() if path.exists() else []

    def release(self) -> None:
        """Let the agents end, those that start later too."""
        self._writer = os.open(self.directory / "wait", os.O_RDWR)
        os.write(self._writer, b"." * 4096)

    def close(self) -> None:
        if self._writer is not None:
            os.close(self._writer)


@contextmanager
def fleet_on(systems: str, directory: Path, **options: Any) -> Iterator[tuple[LocalStack, PrimeEmulator | None]]:
    """Run a fleet on one of `SYSTEMS`; yields it, and the platform's emulator where there is one."""
    settings = {"ROLLOUTS_LEASE_TTL": str(LEASE_TTL), **options.pop("settings", {})}
    logs = directory / "logs"
    if systems == "local":
        with LocalStack(StackOptions(log_dir=logs, settings=settings, **options)) as stack:
            yield stack, None
        return
    with PrimeEmulator(directory / "platform") as emulator:
        settings = {
            "ROLLOUTS_SANDBOX_PROVIDER": "prime",
            "ROLLOUTS_TUNNEL_PROVIDER": "prime",
            "ROLLOUTS_POLL_INTERVAL": "1",
            **emulator.environ,
            **settings,
        }
        gateway = systems == "prime"
        with LocalStack(StackOptions(log_dir=logs, settings=settings, gateway=gateway, **options)) as stack:
            yield stack, emulator
        assert emulator.refused() == [], "the platform refused what it was asked"
        assert emulator.leaked() == {"sandboxes": [], "tunnels": [], "processes": []}
