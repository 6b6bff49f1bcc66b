"""Tells a producer that asks how far this worker's rollouts have come.

Nothing is told unasked: of thousands of rollouts that run for hours, a few are looked at now and then.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from typing import Any

import redis

from producer.contract import Phase
from workers.errors import RolloutError
from workers.gateway.protocol import Gateway
from workers.questions import send_answer
from workers.state import Rollout

logger = logging.getLogger(__name__)

#: Seconds that a gateway has to tell.
_GATEWAY_LIMIT = 3.0
#: Gateways are asked about so many at one time.
_AT_ONCE = 16


class ProgressTeller:
    """Answers from the event loop what the lease keeper's thread was asked."""

    def __init__(
        self,
        running: Mapping[str, Rollout],
        gateway_of: Callable[[Rollout], Gateway],
        client: Any,
        threads: Executor,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._running = running
        self._gateway_of = gateway_of
        self._client = client
        self._threads = threads
        self._loop = loop
        self._slots = asyncio.Semaphore(_AT_ONCE)

    def asked(self, token: str, rollout_ids: list[str]) -> None:
        """Answer later; from any thread."""
        asyncio.run_coroutine_threadsafe(self._answer(token, rollout_ids), self._loop)

    async def _answer(self, token: str, rollout_ids: list[str]) -> None:
        here = [self._running[rollout_id] for rollout_id in rollout_ids if rollout_id in self._running]
        told = await asyncio.gather(*map(self._tell, here))
        answer = {rollout.request.rollout_id: one for rollout, one in zip(here, told, strict=True)}
        try:
            await self._loop.run_in_executor(self._threads, send_answer, self._client, token, answer)
        except redis.RedisError as error:
            logger.info("progress is not told: %s", error, extra={"stage": "progress"})

    async def _tell(self, rollout: Rollout) -> dict[str, Any]:
        told: dict[str, Any] = {"phase": rollout.phase.value}
        # The gateway does not know it yet, or any more, or it uses none.
        if rollout.phase in {Phase.REGISTER, Phase.CLEANUP} or not rollout.gateway_url:
            return told
        try:
            async with self._slots, asyncio.timeout(_GATEWAY_LIMIT):
                seen = await self._gateway_of(rollout).progress(rollout.gateway_url, rollout.gateway_id)
        except (RolloutError, TimeoutError) as error:
            logger.info("%s: its gateway does not tell: %s", rollout.request.rollout_id, error)
            return told
        tokens = {"prompt_tokens": seen.prompt_tokens, "completion_tokens": seen.completion_tokens}
        return told | tokens | {"turns": seen.turns, "in_flight": seen.in_flight}
