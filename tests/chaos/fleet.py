"""The fleet that the chaos suite breaks: each part a process of its own, started again when it has died."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import httpx
import orjson
import redis
from emulators.prime import PrimeEmulator
from redis.backoff import NoBackoff
from redis.retry import Retry
from support import RedisServer, wait_until

from chaos.proxy import Proxy
from producer import broker
from workers.children import HOST, free_port
from workers.reaper import Reaper

ROOT = Path(__file__).parents[2]
#: Seconds after which a worker that was told to end is killed and counted as a fault.
EXIT_LIMIT = 60.0
DRAIN_TIMEOUT, ORPHAN_INTERVAL = 3.0, 2.0
_TICK = 0.05

Tell = Callable[[str], None]


@dataclass(eq=False)
class Part:
    """One process of the fleet; ``name`` is its log's, ``life`` counts how often it was started."""

    name: str
    command: Callable[[int], list[str]]
    variables: Mapping[str, str]
    process: subprocess.Popen[bytes] | None = None
    life: int = 0
    #: What we did that ends it; a part that ends without is a fault.
    told: str = ""
    told_at: float = 0.0
    stopped: bool = False
    not_before: float = 0.0

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None


@dataclass
class Trouble:
    """What a fleet must not do, whatever is done to it."""

    crashes: list[str] = field(default_factory=list)
    late_exits: list[str] = field(default_factory=list)
    drains: list[float] = field(default_factory=list)


class Fleet:
    """Redis behind a proxy, the model, the gateway, workers and beat, on one of the systems; a context manager.

    ``redis`` is a client that goes past the proxy. A thread starts what died again, and does what `later` was given.
    """

    def __init__(
        self, systems: str, directory: Path, *, workers: int, concurrency: int, lease_ttl: float, tell: Tell
    ) -> None:
        self.systems = systems
        self.directory = directory
        self.lease_ttl = lease_ttl
        self.concurrency = concurrency
        self.emulator: PrimeEmulator | None = None
        self.trouble = Trouble()
        self.control_key = secrets.token_urlsafe(16)
        self._count = workers
        self._tell = tell
        self._stack = ExitStack()
        self._lock = threading.RLock()
        self._later: list[tuple[float, Callable[[], object]]] = []
        self._parts: list[Part] = []
        self._over = threading.Event()
        self._supervisor = threading.Thread(target=self._supervise, name="supervisor", daemon=True)

    # -- its life ------------------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _start(self) -> None:
        for name in ("logs", "redis", "sandboxes"):
            (self.directory / name).mkdir(parents=True)
        self._reaper = Reaper.start([])
        self._stack.callback(self._reaper.close)
        self.server = _server(self.directory / "redis")
        self._stack.callback(self.server.stop, signal.SIGKILL)
        self.server.start()
        self.redis: Any = self.server.client  # redis-py's annotations allow what any server may answer
        self.proxy = Proxy(self.server.port)
        self.proxy.start()
        self._stack.callback(self.proxy.stop)
        self.redis_url = f"redis://{HOST}:{self.proxy.port}/0"
        if self.systems == "prime":
            self.emulator = self._stack.enter_context(PrimeEmulator(self.directory / "platform"))
        model, gateway = free_port(), free_port()
        self.gateway_url = f"http://{HOST}:{gateway}"
        upstream = f"http://{HOST}:{model}/v1"
        self._add("model", lambda _: [*_python("workers.demo.model"), "--port", str(model)], {})
        keys = {"ROLLOUTS_GATEWAY_CONTROL_KEY": self.control_key, "ROLLOUTS_GATEWAY_UPSTREAM": upstream}
        command = [*_python("workers.cli"), "gateway", "--host", HOST, "--port", str(gateway)]
        self.gateway = self._add("gateway", lambda _: command, keys)
        variables = self._variables()
        self.workers = [self._add(f"worker{n}", self._worker_command(n), variables) for n in range(1, self._count + 1)]
        self.beat = self._add("beat", lambda _: self._beat_command("beat"), variables)
        self._supervisor.start()
        wait_until(lambda: _answers(f"{self.gateway_url}/healthz"), timeout=60, what="the gateway")
        wait_until(lambda: len(self.ready()) == self._count, timeout=60, what="the workers")

    def _variables(self) -> dict[str, str]:
        variables = {
            "ROLLOUTS_REDIS_URL": self.redis_url,
            "ROLLOUTS_GATEWAY_URL": self.gateway_url,
            "ROLLOUTS_GATEWAY_CONTROL_KEY": self.control_key,
            "ROLLOUTS_SANDBOX_DIR": str(self.directory / "sandboxes"),
            "ROLLOUTS_LEASE_TTL": str(self.lease_ttl),
            "ROLLOUTS_DRAIN_TIMEOUT": str(DRAIN_TIMEOUT),
            "ROLLOUTS_ORPHAN_INTERVAL": str(ORPHAN_INTERVAL),
        }
        if self.emulator:
            variables |= {
                "ROLLOUTS_SANDBOX_PROVIDER": "prime",
                "ROLLOUTS_TUNNEL_PROVIDER": "prime",
                "ROLLOUTS_POLL_INTERVAL": "1",
                "ROLLOUTS_TUNNEL_CHECK_INTERVAL": "1",
                **self.emulator.environ,
            }
        return variables

    def _worker_command(self, number: int) -> Callable[[int], list[str]]:
        token = secrets.token_hex(3)

        def command(life: int) -> list[str]:
            # The first comes back under its old name, as of a StatefulSet, the others as those of a Deployment do.
            name = f"worker{number}-{token}" if number == 1 else f"worker{number}-{token}-{life}"
            host = socket.gethostname()
            concurrency = str(self.concurrency)
            return [*_python("workers.cli"), "worker", "--name", f"{name}@{host}", "--concurrency", concurrency]

        return command

    def _beat_command(self, name: str) -> list[str]:
        schedule = str(self.directory / f"{name}-schedule")
        return [*_python("celery"), "-A", "workers", "beat", "--pidfile=", "--schedule", schedule]

    def _add(self, name: str, command: Callable[[int], list[str]], variables: Mapping[str, str]) -> Part:
        part = Part(name, command, variables)
        self._spawn(part)
        self._parts.append(part)
        return part

    def _spawn(self, part: Part) -> None:
        part.life += 1
        part.told, part.stopped = "", False
        with (self.directory / "logs" / f"{part.name}.log").open("ab") as log:
            part.process = subprocess.Popen(
                part.command(part.life),
                env=self._environment(part.variables),
                cwd=self.directory,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _environment(self, variables: Mapping[str, str]) -> dict[str, str]:
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        return os.environ | {"PYTHONPATH": path} | dict(variables) | self._reaper.environment()

    def close(self) -> None:
        """End everything at once; `end_workers` does it in order."""
        self._over.set()
        if self._supervisor.is_alive():
            self._supervisor.join(10)
        for part in self._parts:
            if part.alive and part.process:
                part.process.kill()
                part.process.wait()
        self._stack.close()

    def end_workers(self) -> None:
        """Have the workers and beat end as at a scale-in, and nothing start them again."""
        self._over.set()
        self._supervisor.join(10)
        ending = [*self.workers, self.beat]
        for part in ending:
            self._signal(part, signal.SIGTERM)
        end = time.monotonic() + EXIT_LIMIT
        for part in ending:
            assert part.process is not None
            with suppress(subprocess.TimeoutExpired):
                part.process.wait(max(0.0, end - time.monotonic()))
            if part.alive:
                self._too_late(part)
                part.process.wait()

    def sweep(self) -> str:
        """Clear up once, as an operator does, sparing nothing for its youth; returns what the command said."""
        command = [*_python("workers.cli"), "leaks", "--delete", "--older-than", "0"]
        environment = self._environment(self._variables())
        ended = subprocess.run(
            command, env=environment, cwd=self.directory, capture_output=True, timeout=120, check=False
        )
        return f"{ended.stdout.decode()}{ended.stderr.decode()}(exit status {ended.returncode})"

    # -- what is done to it --------------------------------------------------------------------------------------------

    def later(self, seconds: float, what: Callable[[], object]) -> None:
        """Do ``what`` after ``seconds``, on the supervisor's thread; `settle` does it earlier."""
        with self._lock:
            self._later.append((time.monotonic() + seconds, what))

    def tell_to_end(self, part: Part, sig: signal.Signals, away: float = 0.0) -> bool:
        """Send a signal that ends ``part``; it is started again ``away`` seconds after its end. False if it is ended.

        One that was told before is ended still: a second SIGTERM is the operator's "at once".
        """
        with self._lock:
            if not part.alive:
                return False
            part.told, part.told_at, part.not_before = sig.name, time.monotonic(), away
            self._signal(part, sig)
            return True

    def stop(self, part: Part, seconds: float) -> bool:
        """SIGSTOP ``part`` and SIGCONT it after ``seconds``."""
        with self._lock:
            if not part.alive or part.stopped or part.told:
                return False
            life = part.life
            part.stopped = True
            self._signal(part, signal.SIGSTOP)

        def go_on() -> None:
            if part.life == life and part.alive:
                self._signal(part, signal.SIGCONT)
                part.stopped = False

        self.later(seconds, go_on)
        return True

    def another_beat(self, seconds: float) -> None:
        """Run a second beat for a while."""
        name = f"beat-{secrets.token_hex(2)}"
        second = Part(name, lambda _: self._beat_command(name), self._variables())
        with self._lock:
            self._spawn(second)
        self._stack.callback(self._signal, second, signal.SIGKILL)
        self.later(seconds, lambda: self._signal(second, signal.SIGKILL))

    def _signal(self, part: Part, sig: signal.Signals) -> None:
        if part.process:
            part.process.send_signal(sig)

    # -- what it is ----------------------------------------------------------------------------------------------------

    def ready(self) -> list[Part]:
        """Return the workers that run and have reported to Redis; none while that is away."""
        try:
            reports = self.reports()
        except redis.RedisError:
            return []
        pids = {report["pid"] for report in reports}
        return [
            part for part in self.workers if part.alive and not part.told and not part.stopped and _pid(part) in pids
        ]

    def reports(self) -> list[dict[str, Any]]:
        """Return the workers' reports; raises `redis.RedisError`."""
        keys = list(self.redis.scan_iter(broker.worker_key("*")))
        return [orjson.loads(report) for report in (self.redis.mget(keys) if keys else []) if report]

    def worker_name(self, part: Part) -> str | None:
        """Return the name under which a worker's present process has reported."""
        return next((str(report["name"]) for report in self.reports() if report["pid"] == _pid(part)), None)

    @property
    def is_calm(self) -> bool:
        """Whether nothing is stalled, stopped or faulty now, and every worker takes work."""
        return not self._later and len(self.ready()) == self._count

    def settle(self) -> None:
        """Undo at once what was to be undone later."""
        with self._lock:
            due, self._later = self._later, []
        for _, what in due:
            what()

    # -- its supervisor ------------------------------------------------------------------------------------------------

    def _supervise(self) -> None:
        while not self._over.wait(_TICK):
            with self._lock:
                now = time.monotonic()
                due = [what for at, what in self._later if at <= now]
                self._later = [(at, what) for at, what in self._later if at > now]
                for part in self._parts:
                    self._look_after(part, now)
            for what in due:
                try:
                    what()
                except Exception as error:
                    self._tell(f"FAULT of the suite: {error!r}")

    def _look_after(self, part: Part, now: float) -> None:
        if part.alive:
            if part.told and not part.stopped and now - part.told_at > EXIT_LIMIT:
                self._too_late(part)
            return
        assert part.process is not None
        if part.told != "dead":
            self._note_death(part, now)
            part.told, part.not_before = "dead", now + part.not_before
        if now >= part.not_before:
            part.not_before = 0.0
            self._spawn(part)

    def _note_death(self, part: Part, now: float) -> None:
        assert part.process is not None
        code = part.process.returncode
        if part.told == "SIGTERM":
            self.trouble.drains.append(now - part.told_at)
            # Celery's beat ends by its own handler, and one that is still importing by the signal itself.
            if code not in {0, -signal.SIGTERM}:
                self._crashed(part, f"exit status {code} after SIGTERM")
        elif not part.told:
            self._crashed(part, f"ended by itself with {code}")

    def _crashed(self, part: Part, how: str) -> None:
        log = (self.directory / "logs" / f"{part.name}.log").read_text(errors="replace")
        self.trouble.crashes.append(f"{part.name} (life {part.life}): {how}")
        self._tell(f"FAULT {part.name} {how}; its log ends:\n{log[-3000:]}")

    def _too_late(self, part: Part) -> None:
        self.trouble.late_exits.append(
            f"{part.name} (life {part.life}): not ended {EXIT_LIMIT:.0f} s after {part.told}"
        )
        self._tell(f"FAULT {self.trouble.late_exits[-1]}")
        part.told = "SIGKILL"
        self._signal(part, signal.SIGKILL)


def _server(directory: Path) -> RedisServer:
    server = RedisServer(directory)
    # Not one of the ports that the kernel gives to outgoing connections: who calls such a port while nobody listens
    # there may be connected to himself.
    server.port = free_port()
    server.url = f"redis://{HOST}:{server.port}/0"
    server.client = redis.Redis.from_url(server.url, socket_timeout=5, retry=Retry(NoBackoff(), 0))
    return server


def _python(module: str) -> tuple[str, ...]:
    return (sys.executable, "-m", module)


def _pid(part: Part) -> int:
    return part.process.pid if part.process else 0


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False
