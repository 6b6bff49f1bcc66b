"""Fleets as processes, on each of the systems that a rollout may run on, and agents that do as they are told."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from emulators.prime import PrimeEmulator
from support import free_port, wait_until

from workers.local import LocalStack, StackOptions
from workers.reaper import Reaper

#: Seconds: no more than a test can wait for, and more than a busy machine stops a worker for.
LEASE_TTL = 3.0
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
        return f"exec {install_agent(self.directory)} wait {self.directory} {calls} {patience}"

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


def install_agent(directory: Path) -> str:
    """Copy the agent's script to where sandboxes see it; returns the command that runs it."""
    script = directory / "patient_agent.py"
    if not script.exists():
        shutil.copyfile(Path(__file__).with_name("patient_agent.py"), script)
    return f"{sys.executable} -I -S {script}"


def prime_settings(emulator: PrimeEmulator) -> dict[str, str]:
    """Return the variables with which workers use an emulated platform."""
    return {
        "ROLLOUTS_SANDBOX_PROVIDER": "prime",
        "ROLLOUTS_TUNNEL_PROVIDER": "prime",
        "ROLLOUTS_POLL_INTERVAL": "1",
        **emulator.environ,
    }


@cache
def _stand_in() -> tuple[str, Reaper]:
    port = free_port()
    reaper = Reaper.start()
    command = [sys.executable, "-m", "workers.demo.model", "--port", str(port)]
    subprocess.Popen(
        command, env=os.environ | reaper.environment(), stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT
    )

    def listens() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    wait_until(listens, timeout=60, what="the stand-in model")
    return f"http://127.0.0.1:{port}/v1", reaper


def lean() -> dict[str, Any]:
    """Return options for a stack of fewer processes, each of which takes a second to start.

    All fleets of this process share one stand-in model, which ends with it, however that ends. Workers without beat
    sweep and check their tunnels by themselves.
    """
    return {"beat": False, "upstream": _stand_in()[0]}


@contextmanager
def fleet_on(systems: str, directory: Path, **options: Any) -> Iterator[tuple[LocalStack, PrimeEmulator | None]]:
    """Run a fleet on one of `SYSTEMS`; yields it, and the platform's emulator where there is one."""
    options = lean() | options
    settings = {"ROLLOUTS_LEASE_TTL": str(LEASE_TTL), **options.pop("settings", {})}
    logs = directory / "logs"
    if systems == "local":
        with LocalStack(StackOptions(log_dir=logs, settings=settings, **options)) as stack:
            yield stack, None
        return
    with PrimeEmulator(directory / "platform") as emulator:
        settings = prime_settings(emulator) | settings
        gateway = systems == "prime"
        with LocalStack(StackOptions(log_dir=logs, settings=settings, gateway=gateway, **options)) as stack:
            yield stack, emulator
        assert emulator.refused() == [], "the platform refused what it was asked"
        assert emulator.leaked() == {"sandboxes": [], "tunnels": [], "processes": []}
