"""Attempts that an environment runs by itself, and the thread on which it may do so."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Coroutine
from typing import Any

import pytest

from producer.contract import Deadlines, ErrorKind, Phase, RolloutRequest, StopCondition
from workers.environment import EpisodeEnvironment
from workers.episode import run_episode
from workers.errors import EnvironmentHookError
from workers.state import Rollout
from workers.verifiers.thread import LoopThread
from workers.watchdog import Limits


class Scripted(EpisodeEnvironment):
    def __init__(self, script: Any) -> None:
        self._script = script

    async def run(self, rollout: Rollout) -> None:
        await self._script(rollout)


def ran(script: Any, limits: Limits | None = None, **fields: Any) -> Rollout:
    rollout = Rollout(RolloutRequest(model="m", **fields), "")
    asyncio.run(run_episode(rollout, Scripted(script), limits or Limits()))
    return rollout


def test_what_an_episode_left_is_its_result() -> None:
    async def script(rollout: Rollout) -> None:
        rollout.episode, rollout.reward = {"reply": "x"}, 0.5

    rollout = ran(script)
    result = rollout.result()
    assert (result.stop_condition, result.episode, result.reward) == (StopCondition.COMPLETED, {"reply": "x"}, 0.5)
    assert list(rollout.durations) == [Phase.AGENT]
    assert result.agent_completed


def test_an_episode_that_fails_is_a_typed_error() -> None:
    async def script(rollout: Rollout) -> None:
        raise EnvironmentHookError("KeyError: 'x'")

    error = ran(script).error
    assert error is not None
    assert (error.kind, error.message, error.phase) == (ErrorKind.ENVIRONMENT, "KeyError: 'x'", Phase.AGENT)


@pytest.mark.parametrize(
    ("fields", "limits", "kind", "type_"),
    [
        ({"deadlines": Deadlines(agent=0.05)}, Limits(), ErrorKind.AGENT, "PhaseDeadlineError"),
        ({}, Limits(rollout=0.05), ErrorKind.LIMIT, "RolloutLimitError"),
    ],
)
def test_an_episode_that_takes_too_long_is_ended(
    fields: dict[str, Any], limits: Limits, kind: ErrorKind, type_: str
) -> None:
    error = ran(lambda _: asyncio.Event().wait(), limits, **fields).error
    assert error is not None
    assert (error.kind, error.type, error.retryable) == (kind, type_, False)


def on_thread(test: Any) -> None:
    async def run() -> None:
        thread = LoopThread("episodes")
        try:
            await test(thread)
        finally:
            await thread.aclose()

    asyncio.run(run())


def test_what_blocks_on_the_thread_does_not_stall_the_workers_loop() -> None:
    release = threading.Event()

    async def blocks() -> str:
        release.wait(20)
        return threading.current_thread().name

    async def test(thread: LoopThread) -> None:
        blocked = asyncio.create_task(thread.run(blocks(), 1))
        await asyncio.sleep(0)
        release.set()  # by this loop, which goes on
        assert await blocked == "episodes"

    on_thread(test)


def test_a_cancelled_episode_has_ended_when_its_cancellation_is_raised() -> None:
    began, ended = threading.Event(), []

    async def slow_to_end() -> None:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.05)
            ended.append(True)

    async def test(thread: LoopThread) -> None:
        task = asyncio.create_task(thread.run(slow_to_end(), 20))
        await asyncio.to_thread(began.wait, 20)
        task.cancel()
        await asyncio.wait({task})
        assert task.cancelled()
        assert ended

    on_thread(test)


def test_an_episode_that_does_not_end_when_it_is_cancelled_is_not_waited_for() -> None:
    began, release = threading.Event(), threading.Event()

    async def stubborn() -> None:
        began.set()
        release.wait(20)

    async def test(thread: LoopThread) -> None:
        task = asyncio.create_task(thread.run(stubborn(), 0.05))
        await asyncio.to_thread(began.wait, 20)
        since = time.monotonic()
        task.cancel()
        await asyncio.wait({task})
        release.set()
        assert task.cancelled()
        assert time.monotonic() - since < 15

    on_thread(test)


@pytest.mark.parametrize("end", [SystemExit, KeyboardInterrupt])
def test_an_episode_whose_task_wants_to_end_the_process_ends_alone(end: type[BaseException]) -> None:
    began, exited = threading.Event(), threading.Event()

    async def other() -> str:
        began.set()
        while not exited.is_set():
            await asyncio.sleep(0)
        return "went on"

    async def reward() -> None:
        exited.set()
        raise end

    async def exits() -> str:
        try:
            await asyncio.gather(reward())
        except end:
            return "ended"
        return "not told"

    async def test(thread: LoopThread) -> None:
        running = asyncio.create_task(thread.run(other(), 1))
        await asyncio.to_thread(began.wait, 20)
        async with asyncio.timeout(20):
            assert await thread.run(exits(), 1) == "ended"
            assert await running == "went on"

    on_thread(test)


def test_an_episode_that_stops_its_loop_stops_nobody() -> None:
    began, stopped = threading.Event(), threading.Event()

    async def other() -> str:
        began.set()
        while not stopped.is_set():
            await asyncio.sleep(0)
        return "went on"

    async def stops() -> str:
        asyncio.get_running_loop().stop()
        stopped.set()
        await asyncio.sleep(0)
        return "went on too"

    async def test(thread: LoopThread) -> None:
        running = asyncio.create_task(thread.run(other(), 1))
        await asyncio.to_thread(began.wait, 20)
        async with asyncio.timeout(20):
            assert await thread.run(stops(), 1) == "went on too"
            assert await running == "went on"

    on_thread(test)


def test_what_an_episode_raises_is_raised_and_what_is_left_ends_with_the_thread() -> None:
    ended: list[bool] = []

    async def forever() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    async def leaves_one_behind() -> asyncio.Task[None]:
        task = asyncio.create_task(forever())
        await asyncio.sleep(0)
        return task

    async def fails() -> None:
        raise KeyError("x")

    async def test(thread: LoopThread) -> None:
        works: list[Coroutine[Any, Any, Any]] = [fails()]
        with pytest.raises(KeyError):
            await thread.run(works.pop(), 1)
        await thread.run(leaves_one_behind(), 1)

    on_thread(test)
    assert ended
