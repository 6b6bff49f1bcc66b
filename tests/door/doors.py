"""Doors as processes, and clients of both wires."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgpack
import zmq
import zmq.asyncio
from small_taskset import data
from support import wait_until
from verifiers.v1.clients import EvalClientConfig
from verifiers.v1.episode import WireEpisode
from verifiers.v1.serve import EnvClient
from verifiers.v1.types import SamplingConfig

HERE = Path(__file__).parent
NAME = "small"
CONFIG = {"taskset": {"id": "small_taskset"}, "agent": {"runtime": {"type": "subprocess"}}}


def write_config(directory: Path) -> Path:
    path = directory / f"{NAME}.json"
    path.write_text(json.dumps(CONFIG))
    return path


def worker_settings(config: Path) -> dict[str, str]:
    """Return the variables with which workers serve the small taskset."""
    return {
        "ROLLOUTS_VERIFIERS": str(config),
        "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]),
    }


class DoorProcess:
    """``rollouts env-server`` as a process that may be killed and started again."""

    def __init__(
        self, redis_url: str, config: Path, log: Path, *options: str, address: str = "tcp://127.0.0.1:*"
    ) -> None:
        self.redis_url, self.config, self.log, self.options, self.address = redis_url, config, log, options, address
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [sys.executable, "-m", "workers.cli", "env-server", "--env", str(self.config)]
        command += ["--address", self.address, "--name", f"door-{self.log.stem}", *self.options]
        before = len(self._announced())
        with self.log.open("ab") as output:
            environment = os.environ | {"ROLLOUTS_REDIS_URL": self.redis_url}
            self.process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
        wait_until(lambda: len(self._announced()) > before, timeout=60, what="the door")
        self.address = self._announced()[-1]

    def _announced(self) -> list[str]:
        return re.findall(r"^env-server  \S+ at (\S+)", self.log.read_text(), re.M) if self.log.exists() else []

    def stop(self, sig: int = signal.SIGTERM) -> int:
        assert self.process is not None
        self.process.send_signal(sig)
        return self.process.wait(60)


@contextmanager
def running_door(redis_url: str, config: Path, log: Path, *options: str) -> Iterator[DoorProcess]:
    door = DoorProcess(redis_url, config, log, *options)
    door.start()
    try:
        yield door
    finally:
        door.stop(signal.SIGKILL)


def run_arguments(upstream: str, number: int, **fields: Any) -> dict[str, Any]:
    """Return what `EnvClient.run` takes for one task."""
    return {
        "client": EvalClientConfig(base_url=upstream, api_key_var="NO_KEY"),
        "model": "stand-in",
        "sampling": SamplingConfig(temperature=1.0),
        "task_data": data(number, **fields).model_dump(),
    }


def reward(episode: WireEpisode) -> float:
    [trace] = episode.traces
    return float(trace.reward)


class WholeClient:
    """A client of the wire before 0.4: ``[request_id, data]``, with the episode in the reply."""

    def __init__(self, address: str) -> None:
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(address)

    async def ask(self, method: str, asked: str, **fields: Any) -> dict[str, Any]:
        payload = msgpack.packb(fields, use_bin_type=True)
        await self._socket.send_multipart([asked.encode(), method.encode(), payload])
        while True:
            answered, answer = await asyncio.wait_for(self._socket.recv_multipart(), 60)
            if answered == asked.encode():
                return dict(msgpack.unpackb(answer, raw=False))

    def close(self) -> None:
        self._socket.close()
        self._context.term()


__all__ = ["EnvClient"]
