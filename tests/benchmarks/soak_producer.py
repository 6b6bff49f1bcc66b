"""The soak's producer, a process of its own: one batch after the other at a steady rate, of rollouts of every fate.

python soak_producer.py ENVIRONMENT AGENT RATE SECONDS BURST     prints one JSON line when all have ended

It begins with BURST rollouts at once, so that whatever keeps what a rush has needed (connections, threads) has it from
the start; a busy machine would bring one later.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from producer import Producer, RolloutRequest, RolloutResult
from producer.connection import CancelAnswer
from producer.contract import ErrorKind, StopCondition
from producer.settings import ProducerSettings

#: Seconds for which one batch is submitted to. It ends a little later, and then its records expire.
BATCH_SECONDS = 20.0
#: Seconds after its submission at which a rollout is cancelled: most run by then.
CANCEL_AFTER = 0.5
#: The least that the setting allows: only what is consumed and expired can be flat.
KEEP_CONSUMED = 60.0


@dataclass(frozen=True)
class Fate:
    """How rollouts of one kind are asked for, and which of their results are right."""

    request: dict[str, Any]
    is_right: Callable[[RolloutResult], bool]


def _has(kind: ErrorKind) -> Callable[[RolloutResult], bool]:
    return lambda result: result.error is not None and result.error.kind is kind


def _completed(turns: int, attempt: int = 1) -> Callable[[RolloutResult], bool]:
    return lambda result: result.completed and len(result.trajectory) == turns and result.attempt == attempt


def fates(agent: str) -> dict[str, Fate]:
    """Return the kinds, by their names; ``agent`` runs the agents' script."""
    calls = f"exec {agent} spread 3 0.3 30"
    return {
        "completes": Fate({"run_command": calls}, _completed(3)),
        "fails": Fate({"run_command": f"{agent} spread 1 0 30; exit 3"}, _has(ErrorKind.AGENT)),
        "times out": Fate(
            {"run_command": "exec sleep 600", "deadlines": {"agent": 1.0}},
            lambda result: result.stop_condition is StopCondition.AGENT_TIMEOUT,
        ),
        "cancelled": Fate(
            {"run_command": "exec sleep 600"}, lambda result: result.stop_condition is StopCondition.CANCELLED
        ),
        "retried": Fate({"run_command": calls, "environment_args": {"fails": "setup"}}, _completed(3, attempt=2)),
        "badly scored": Fate(
            {"run_command": "true", "environment_args": {"fails": "score"}}, _has(ErrorKind.ENVIRONMENT)
        ),
    }


#: What comes in turn, and again from the start.
TURNS = (
    "completes",
    "fails",
    "completes",
    "retried",
    "completes",
    "cancelled",
    "completes",
    "times out",
    "badly scored",
)


class Soak:
    """Submits, cancels, and checks what comes of it."""

    def __init__(
        self, producer: Producer, environment: str, agent: str, *, rate: float, seconds: float, burst: int
    ) -> None:
        self.submitted: Counter[str] = Counter()
        self.delivered: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._producer = producer
        self._environment = environment
        self._fates = fates(agent)
        self._rate = rate
        self._count = int(rate * seconds)
        self._burst = burst
        self._began = time.monotonic()

    async def run(self) -> None:
        """Submit batch after batch at the rate; the next one begins while the last rollouts of this one end."""
        await self._batch(list(range(-self._burst, 0)), asyncio.Event())
        self._began = time.monotonic()
        numbers = iter(range(self._count))
        async with asyncio.TaskGroup() as batches:
            while chunk := list(itertools.islice(numbers, int(BATCH_SECONDS * self._rate))):
                submitted = asyncio.Event()
                batches.create_task(self._batch(chunk, submitted))
                await submitted.wait()

    async def _batch(self, numbers: list[int], submitted: asyncio.Event) -> None:
        async with asyncio.TaskGroup() as cancels:
            async for result in await self._producer.submit_many(self._paced(numbers, submitted, cancels)):
                kind = str(result.example_id)
                self.delivered[kind] += 1
                if not self._fates[kind].is_right(result) and len(self.wrong) < 20:
                    self.wrong.append(f"{kind}: {result.stop_condition}, attempt {result.attempt}: {result.error}")

    async def _paced(
        self, numbers: list[int], submitted: asyncio.Event, cancels: asyncio.TaskGroup
    ) -> AsyncIterator[RolloutRequest]:
        for number in numbers:
            await asyncio.sleep(self._began + number / self._rate - time.monotonic())
            kind = TURNS[number % len(TURNS)]
            about = {"model": "stand-in", "example_id": kind, "environment": self._environment}
            request = RolloutRequest.parse({**about, **self._fates[kind].request})
            if kind == "cancelled":
                cancels.create_task(self._cancel(request.rollout_id))
            self.submitted[kind] += 1
            yield request
        submitted.set()

    async def _cancel(self, rollout_id: str) -> None:
        answer = CancelAnswer.UNKNOWN
        while answer is CancelAnswer.UNKNOWN:  # a busy machine may not have submitted it yet
            await asyncio.sleep(CANCEL_AFTER)
            answer = (await self._producer.cancel([rollout_id]))[rollout_id]


async def main(environment: str, agent: str, rate: str, seconds: str, burst: str) -> None:
    """Run until all have ended."""
    async with Producer(ProducerSettings()) as producer:
        soak = Soak(producer, environment, agent, rate=float(rate), seconds=float(seconds), burst=int(burst))
        await soak.run()
    print(json.dumps({"submitted": soak.submitted, "delivered": soak.delivered, "wrong": soak.wrong}))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
