"""The fleet that the chaos suite breaks: an embedded stack, each part of which is started again when it has died."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import orjson
import redis
from emulators.prime import PrimeEmulator
from fleets import prime_settings
from redis.backoff import NoBackoff
from redis.retry import Retry
from support import RedisServer

from chaos.agents import QUEUES
from chaos.proxy import Proxy
from chaos.scrapes import Scrapes
from producer import broker
from workers.children import HOST, free_port
from workers.local import LocalStack, StackOptions

ROOT = Path(__file__).parents[2]
#: Seconds after which a worker that was told to end is killed and counted as a fault.
EXIT_LIMIT = 60.0
DRAIN_TIMEOUT, ORPHAN_INTERVAL = 3.0, 2.0
_TICK = 0.05

Tell = Callable[[str], None]


class Stack(LocalStack):
    """An embedded stack of which every part can be started again, the servers too."""

    def __init__(self, options: StackOptions) -> None:
        super().__init__(options)
        self._starts: dict[str, tuple[Any, ...]] = {}

    def _spawn(
        self,
        name: str,
        command: Sequence[str],
        variables: Mapping[str, str],
        is_ready: Callable[[], bool],
        stdin: bytes | None = None,
    ) -> None:
        self._starts.setdefault(name, (command, variables, is_ready))
        super()._spawn(name, command, variables, is_ready, stdin)

    def process(self, name: str) -> subprocess.Popen[bytes]:
        """Return a part's present process."""
        return next(child.process for child in self._children if child.name == name)

    def start_again(self, name: str, life: int) -> subprocess.Popen[bytes]:
        """Replace a part that has ended; returns its new process.

        The first worker comes back under its old name, as of a StatefulSet, the others as those of a Deployment do.
        """
        command, variables, is_ready = self._starts[name]
        if name.startswith("worker") and name != "worker1":
            command = [part.replace("@", f"-{life}@") for part in command]
        self._children = [child for child in self._children if child.name != name]
        super()._spawn(name, command, variables, is_ready)
        return self.process(name)

    def another_beat(self, name: str) -> subprocess.Popen[bytes]:
        """Run one more beat, with a schedule of its own; returns its process."""
        command, variables, is_ready = self._starts["beat"]
        schedule = str(self.directory / f"{name}-schedule")
        super()._spawn(name, [*command[:-1], schedule], variables, is_ready)
        return self.process(name)

    def environment(self) -> dict[str, str]:
        """Return the environment of an operator's command."""
        return os.environ | self._celery_variables() | dict(self.options.settings)


@dataclass(eq=False)
class Part:
    """One process of the fleet; ``name`` is its log's, ``life`` counts how often it was started."""

    name: str
    process: subprocess.Popen[bytes]
    life: int = 1
    #: What we did that ends it; a part that ends without is a fault.
    told: str = ""
    told_at: float = 0.0
    stopped: bool = False
    not_before: float = 0.0

    @property
    def alive(self) -> bool:
        return self.process.poll() is None


@dataclass
class Trouble:
    """What a fleet must not do, whatever is done to it."""

    crashes: list[str] = field(default_factory=list)
    late_exits: list[str] = field(default_factory=list)
    drains: list[float] = field(default_factory=list)


class Fleet:
    """The embedded stack with Redis behind a proxy, on one of the systems; a context manager.

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
        self._count = workers
        self.scrapes = Scrapes(free_port())
        self._tell = tell
        self._exits = ExitStack()
        self._lock = threading.RLock()
        self._later: list[tuple[float, Callable[[], object]]] = []
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
        (self.directory / "redis").mkdir(parents=True)
        self.server = _server(self.directory / "redis")
        self._exits.callback(self.server.stop, signal.SIGKILL)
        self.server.start()
        self.redis: Any = self.server.client  # redis-py's annotations allow what any server may answer
        self.proxy = Proxy(self.server.port)
        self.proxy.start()
        self._exits.callback(self.proxy.stop)
        if self.systems == "prime":
            self.emulator = self._exits.enter_context(PrimeEmulator(self.directory / "platform"))
        options = StackOptions(
            workers=self._count,
            concurrency=self.concurrency,
            redis_url=f"redis://{HOST}:{self.proxy.port}/0",
            settings=self._settings(),
            log_dir=self.directory / "logs",
            ready_timeout=120.0,
            grace=1.0,
        )
        self.stack = self._exits.enter_context(Stack(options))
        names = ["model", "gateway", *(f"worker{number}" for number in range(1, self._count + 1)), "beat"]
        self._parts = [Part(name, self.stack.process(name)) for name in names]
        _, self.gateway, *self.workers, self.beat = self._parts
        self._supervisor.start()
        self.scrapes.start()
        self._exits.callback(self.scrapes.stop)

    def _settings(self) -> dict[str, str]:
        settings = {
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
            "ROLLOUTS_LEASE_TTL": str(self.lease_ttl),
            "ROLLOUTS_ADMIN_PORT": str(self.scrapes.port),
            "ROLLOUTS_QUEUES": ",".join(QUEUES),
            "ROLLOUTS_DRAIN_TIMEOUT": str(DRAIN_TIMEOUT),
            "ROLLOUTS_ORPHAN_INTERVAL": str(ORPHAN_INTERVAL),
        }
        if self.emulator:
            settings |= prime_settings(self.emulator) | {"ROLLOUTS_TUNNEL_CHECK_INTERVAL": "1"}
        return settings

    @property
    def sandboxes(self) -> Path:
        """The folder in which workers keep local sandboxes."""
        return self.stack.directory / "sandboxes"

    def close(self) -> None:
        """End everything at once; `end_workers` does it in order."""
        self._over.set()
        if self._supervisor.is_alive():
            self._supervisor.join(10)
        self._exits.close()

    def end_workers(self) -> None:
        """Have the workers and beat end as at a scale-in, and nothing start them again."""
        self._over.set()
        self._supervisor.join(10)
        ending = [*self.workers, self.beat]
        for part in ending:
            part.process.send_signal(signal.SIGTERM)
        end = time.monotonic() + EXIT_LIMIT
        for part in ending:
            with suppress(subprocess.TimeoutExpired):
                part.process.wait(max(0.0, end - time.monotonic()))
            if part.alive:
                self._too_late(part)
                part.process.wait()

    def sweep(self) -> str:
        """Clear up once, as an operator does, sparing nothing for its youth; returns what the command said."""
        command = [sys.executable, "-m", "workers.cli", "leaks", "--delete", "--older-than", "0"]
        environment = self.stack.environment()
        ended = subprocess.run(command, env=environment, capture_output=True, timeout=120, check=False)
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
            part.process.send_signal(sig)
            return True

    def stop(self, part: Part, seconds: float) -> bool:
        """SIGSTOP ``part`` and SIGCONT it after ``seconds``."""
        with self._lock:
            if not part.alive or part.stopped or part.told:
                return False
            life = part.life
            part.stopped = True
            part.process.send_signal(signal.SIGSTOP)

        def go_on() -> None:
            if part.life == life and part.alive:
                part.process.send_signal(signal.SIGCONT)
                part.stopped = False

        self.later(seconds, go_on)
        return True

    def another_beat(self, seconds: float) -> None:
        """Run a second beat for a while."""
        with self._lock:
            second = self.stack.another_beat(f"beat-{secrets.token_hex(2)}")
        self.later(seconds, second.kill)

    # -- what it is ----------------------------------------------------------------------------------------------------

    def ready(self) -> list[Part]:
        """Return the workers that run and have reported to Redis; none while that is away."""
        try:
            reports = self.reports()
        except redis.RedisError:
            return []
        pids = {report["pid"] for report in reports}
        return [
            part
            for part in self.workers
            if part.alive and not part.told and not part.stopped and part.process.pid in pids
        ]

    def reports(self) -> list[dict[str, Any]]:
        """Return the workers' reports; raises `redis.RedisError`."""
        keys = list(self.redis.scan_iter(broker.worker_key("*")))
        return [orjson.loads(report) for report in (self.redis.mget(keys) if keys else []) if report]

    def worker_name(self, part: Part) -> str | None:
        """Return the name under which a worker's present process has reported."""
        return next((str(report["name"]) for report in self.reports() if report["pid"] == part.process.pid), None)

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
        if part.told != "dead":
            self._note_death(part, now)
            part.told, part.not_before = "dead", now + part.not_before
        if now >= part.not_before:
            part.life += 1
            part.process = self.stack.start_again(part.name, part.life)
            part.told, part.stopped, part.not_before = "", False, 0.0

    def _note_death(self, part: Part, now: float) -> None:
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
        part.process.send_signal(signal.SIGKILL)


def _server(directory: Path) -> RedisServer:
    server = RedisServer(directory)
    # Not one of the ports that the kernel gives to outgoing connections: who calls such a port while nobody listens
    # there may be connected to himself.
    server.port = free_port()
    server.url = f"redis://{HOST}:{server.port}/0"
    server.client = redis.Redis.from_url(server.url, socket_timeout=5, retry=Retry(NoBackoff(), 0))
    return server
