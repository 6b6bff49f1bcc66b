"""The bundled environment ``verifiers``: each rollout is an episode of one of verifiers' environments."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path

from pydantic import ValidationError

from producer.contract import Phase
from producer.door.config import ServedConfig, ServedConfigError, read_config
from producer.door.episode import EpisodeAnswer, EpisodeCall, pack, unpack
from workers.environment import EpisodeEnvironment
from workers.errors import InvalidRolloutError
from workers.state import Rollout
from workers.verifiers.live import LiveDeltas
from workers.verifiers.served import Sent, Served
from workers.verifiers.thread import LoopThread


class VerifiersEnvironment(EpisodeEnvironment):
    """Runs episodes under the configurations that this worker has, and none that comes with a request."""

    def __init__(self, configs: Iterable[Path], redis_url: str) -> None:
        self._configs: dict[str, ServedConfig] = {}
        for config in map(read_config, configs):
            if config.name in self._configs:
                raise ServedConfigError(f"two files give {config.name!r}")
            self._configs[config.name] = config
        self._redis_url = redis_url
        self._thread = LoopThread("verifiers")
        # Of the thread's loop.
        self._served: dict[str, Served] = {}
        self._live: LiveDeltas | None = None

    async def run(self, rollout: Rollout) -> None:
        """Run the episode of the request's `EpisodeCall`."""
        call, payload = _parsed(rollout)
        config = self._config(call)
        grace = rollout.request.deadlines.of(Phase.CLEANUP)
        sent = await self._thread.run(self._run(rollout, config, call, payload), grace)
        deltas = [pack(delta) for delta in sent.deltas]
        answer = EpisodeAnswer(wire=call.wire, deltas=deltas, reply=pack(sent.reply), traces=sent.traces)
        rollout.episode = answer.model_dump(mode="json")
        if sent.rewards:
            rollout.reward = sum(sent.rewards) / len(sent.rewards)

    async def _run(self, rollout: Rollout, config: ServedConfig, call: EpisodeCall, payload: bytes) -> Sent:
        served = self._served.get(config.name)
        if served is None:
            served = self._served[config.name] = Served(config)
        live = None
        if call.live:
            self._live = self._live or LiveDeltas(self._redis_url)
            live = self._live.of(rollout.request.batch_id, rollout.rollout_id, rollout.attempt)
        return await served.run(call.wire, payload, live)

    def _config(self, call: EpisodeCall) -> ServedConfig:
        config = self._configs.get(call.env)
        if config is None:
            known = ", ".join(sorted(self._configs))
            raise InvalidRolloutError(
                f"this worker serves no verifiers environment {call.env!r}; it has {known}: add {call.env}.json or "
                ".toml to its ROLLOUTS_VERIFIERS"
            )
        if call.digest not in {None, config.digest}:
            raise InvalidRolloutError(
                f"the configuration {call.env!r} of this worker is another one than the door's: give both the same file"
            )
        return config

    async def aclose(self) -> None:
        """Take all environments down."""
        if self._served:
            await self._thread.run(self._close(), _CLOSE_LIMIT)
        await self._thread.aclose()

    async def _close(self) -> None:
        try:
            async with asyncio.timeout(_CLOSE_LIMIT):
                await asyncio.gather(*(served.close() for served in self._served.values()), return_exceptions=True)
                if self._live is not None:
                    await self._live.aclose()
        except TimeoutError:
            pass  # what is left is cancelled with the thread's loop


#: Seconds in which the environments end.
_CLOSE_LIMIT = 6.0


def _parsed(rollout: Rollout) -> tuple[EpisodeCall, bytes]:
    try:
        call = EpisodeCall.model_validate(rollout.request.environment_args)
        return call, unpack(call.run)
    except ValidationError as error:
        wrong = ", ".join(".".join(map(str, one["loc"])) for one in error.errors(include_input=False))
        raise InvalidRolloutError(f"environment_args: not an episode's: {wrong}") from None
    except ValueError:
        raise InvalidRolloutError("environment_args: run is not base64") from None
