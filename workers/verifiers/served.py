"""verifiers' environments of one worker process, each loaded once, and episodes of them.

It does what ``verifiers.v1.serve.server.EnvServer`` does for a ``run``, without its socket. Everything here runs on one
event loop, on which verifiers insists. Source: verifiers 0.4.0; its main branch before it, which has no deltas.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import msgpack
from pydantic import BaseModel, ValidationError
from verifiers.v1.clients import ModelContext
from verifiers.v1.serve.encoding import msgpack_encoder
from verifiers.v1.serve.types import RunRequest, RunResponse
from verifiers.v1.utils.loaders import load_environment, resolve_env_config

from producer.door.config import ServedConfig
from producer.door.wire import Wire
from workers.errors import EnvironmentHookError, InvalidRolloutError, RolloutError, RolloutLimitError

try:
    from verifiers.v1.serve.delta import DeltaStreamer, TraceSummary
except ImportError:  # a version before deltas
    DeltaStreamer = TraceSummary = None

logger = logging.getLogger(__name__)

#: Bytes that an episode may send in all: it is one value in Redis.
MAX_EPISODE_BYTES = 128 * 1024 * 1024

Send = Callable[[int, str, bytes], Awaitable[None]]  #: a delta's number, its trace's id, and its bytes


@dataclass
class Sent:
    """What an episode has sent; its size is bounded."""

    deltas: list[bytes] = field(default_factory=list)
    traces: list[str] = field(default_factory=list)
    reply: bytes = b""
    rewards: list[float] = field(default_factory=list)
    _size: int = 0

    def add(self, delta: bytes, trace: str) -> None:
        """Keep one more delta."""
        self.check(delta)
        self.deltas.append(delta)
        if trace not in self.traces:
            self.traces.append(trace)

    def check(self, data: bytes) -> None:
        """Count bytes; raises `RolloutLimitError` when there are too many."""
        self._size += len(data)
        if self._size > MAX_EPISODE_BYTES:
            raise RolloutLimitError(f"the episode is more than {MAX_EPISODE_BYTES} bytes")


class Served:
    """One environment, from its first episode to `close`."""

    def __init__(self, config: ServedConfig) -> None:
        self.config = config
        self._env: asyncio.Future[Any] | None = None
        self._holder: asyncio.Task[None] | None = None
        self._stop = asyncio.Event()

    async def run(self, wire: Wire, payload: bytes, live: Send | None) -> Sent:
        """Run one episode; raises `RolloutError` in the words in which verifiers' own server would say it."""
        try:
            env = await self._loaded()
            return await _episode(env, wire, payload, live)
        except RolloutError:
            raise
        except (Exception, SystemExit, KeyboardInterrupt) as error:  # a user's code must not end the worker either
            raise EnvironmentHookError(f"{type(error).__name__}: {_words(error)}") from error

    async def close(self) -> None:
        """Take the environment down."""
        self._stop.set()
        if self._holder is not None:
            await asyncio.wait({self._holder})

    async def _loaded(self) -> Any:
        if self._env is None:
            self._env = asyncio.get_running_loop().create_future()
            # Entered and left in one task, which outlasts the episode that came first.
            self._holder = asyncio.create_task(self._hold(self._env))
        return await asyncio.shield(self._env)

    async def _hold(self, ready: asyncio.Future[Any]) -> None:
        try:
            env = _load(self.config)
            async with env.serving():
                ready.set_result(env)
                logger.info("verifiers' environment %s is up", self.config.name, extra={"stage": "verifiers"})
                await self._stop.wait()
        except (Exception, SystemExit) as error:
            logger.exception("verifiers' environment %s", self.config.name, extra={"stage": "verifiers"})
            self._env = None  # the next episode tries again
            if not ready.done():
                what = f"{self.config.name} cannot be served here: {type(error).__name__}: {_words(error)}"
                ready.set_exception(InvalidRolloutError(what))


def _load(config: ServedConfig) -> Any:
    env = load_environment(resolve_env_config(config.data))
    data_class = type(env.taskset).task_type().data_type()
    # As verifiers' own server: such a field would be lost on the way from the client and silently take its default.
    if excluded := [name for name, about in data_class.model_fields.items() if about.exclude]:
        raise InvalidRolloutError(f"{data_class.__name__} excludes {excluded} from serialization: drop exclude=True")
    return env


async def _episode(env: Any, wire: Wire, payload: bytes, live: Send | None) -> Sent:
    request = RunRequest.model_validate(msgpack.unpackb(payload, raw=False))
    task_class = type(env.taskset).task_type()
    data = task_class.data_type().model_validate(request.task_data)
    (slot,) = env.slots(task_class(data, env.config.taskset.task))
    context = ModelContext(client=request.client, model=request.model, sampling=request.sampling)
    sent = Sent()
    if wire is Wire.DELTAS:
        episode, response = await _streamed(env, slot, context, sent, live)
    else:
        episode = await env.run_slot(slot, context)
        response = {"success": True, "error": None, "episode": _dump(episode)}
    sent.reply = _pack(response)
    sent.check(sent.reply)
    sent.rewards = [float(trace.reward) for trace in episode.traces]
    return sent


async def _streamed(env: Any, slot: Any, context: Any, sent: Sent, live: Send | None) -> tuple[Any, dict[str, Any]]:
    if DeltaStreamer is None:
        raise InvalidRolloutError("this worker's verifiers sends no deltas: give the door --wire whole, or upgrade it")

    async def send(delta: dict[str, Any]) -> None:
        data = _pack(delta)
        sent.add(data, delta["trace"])
        if live is not None:
            await live(len(sent.deltas) - 1, delta["trace"], data)

    async with DeltaStreamer(lambda: slot.traces, send) as streamer:
        episode = await env.run_slot(slot, context, None, on_trace=streamer.watch)
    summaries = [TraceSummary(id=trace.id, nodes=len(trace.nodes), calls=len(trace.calls)) for trace in episode.traces]
    response = RunResponse(head=_dump(episode, exclude={"traces"}), traces=summaries)
    return episode, response.model_dump(mode="python")


def _dump(model: BaseModel, **options: Any) -> dict[str, Any]:
    # Task data and agents are of classes of their own, whose fields must not be lost.
    return model.model_dump(mode="python", serialize_as_any=True, **options)


def _pack(value: Any) -> bytes:
    packed: bytes = msgpack.packb(value, default=msgpack_encoder, use_bin_type=True)
    return packed


def _words(error: BaseException) -> str:
    """Return what ``error`` says, without the values that it refuses: a client's headers hold keys."""
    if not isinstance(error, ValidationError):
        return str(error)
    found = error.errors(include_url=False, include_input=False, include_context=False)
    return "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in found)
