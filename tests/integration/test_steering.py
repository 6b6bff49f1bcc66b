"""What a trainer steers a running fleet with: progress, policy versions, and groups whose workers are killed."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Iterator

import orjson
import pytest
import redis
from fleets import Agents, fleet_on
from support import wait_until

from producer import (
    Drop,
    GroupTerms,
    JobState,
    Phase,
    Producer,
    ProducerSettings,
    RolloutProgress,
    RolloutRequest,
    StopCondition,
    broker,
)
from workers.local import LocalStack

pytestmark = pytest.mark.xdist_group("steering")


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    with fleet_on("local", tmp_path_factory.mktemp("steering"), concurrency=50, workers=2) as (stack, _):
        yield stack


def request(**fields: object) -> RolloutRequest:
    return RolloutRequest.parse({"model": "stand-in", **fields})


async def until(ask: Callable[[], Awaitable[RolloutProgress]], there: Callable[[RolloutProgress], object]) -> None:
    async with asyncio.timeout(30):
        while not there(await ask()):
            await asyncio.sleep(0.05)


def test_progress_of_a_running_rollout_tells_its_phase_turns_and_tokens(stack: LocalStack, agents: Agents) -> None:
    async def scenario() -> None:
        async with Producer(ProducerSettings(redis_url=stack.redis_url)) as producer, asyncio.timeout(60):
            handle = await producer.submit(request(run_command=agents.patient(), batch_id="p"))
            await until(handle.progress, lambda told: told.turns)
            told = (await producer.batch_progress("p"))[handle.rollout_id]
            assert (told.state, told.attempt, told.phase, told.turns) == (JobState.RUNNING, 1, Phase.AGENT, 1)
            assert told.worker
            assert told.prompt_tokens
            assert told.completion_tokens
            agents.release()
            await handle.result()
            told = await handle.progress()
            assert (told.state, told.phase, told.turns) == (JobState.DONE, None, None)
            assert (await producer.progress(["nobody"]))["nobody"].state is None

    asyncio.run(scenario())


def test_a_running_rollout_that_becomes_stale_ends_with_that_reason(stack: LocalStack, agents: Agents) -> None:
    async def scenario() -> None:
        async with Producer(ProducerSettings(redis_url=stack.redis_url)) as producer, asyncio.timeout(60):
            old, exempt = [
                await producer.submit(request(run_command=agents.command(), policy_version=1, purpose=purpose))
                for purpose in ("train", "eval")
            ]
            await asyncio.to_thread(wait_until, lambda: len(agents.starts()) == 2)
            await producer.set_policy_version(5, max_off_policy_steps=2)
            result = await old.result()
            assert result.stop_condition is StopCondition.CANCELLED
            assert (result.error.reason, result.error.phase, result.stale) == ("stale", Phase.AGENT, True)
            agents.release()
            assert (await exempt.result()).completed

    asyncio.run(scenario())


def test_groups_are_whole_or_dropped_when_a_worker_is_killed(stack: LocalStack, agents: Agents) -> None:
    commands = ["true", *[agents.command()] * 9]
    examples = [request(example_id=n, run_command=command, policy_version=9) for n, command in enumerate(commands)]

    async def scenario() -> None:
        async with Producer(ProducerSettings(redis_url=stack.redis_url)) as producer, asyncio.timeout(90):
            groups = producer.groups(examples, GroupTerms(4), run_id="killed", max_groups=10)
            ended = [await anext(groups)]
            await asyncio.to_thread(wait_until, lambda: len(agents.starts()) == 36, what="all others to run")
            await asyncio.to_thread(kill_a_worker, stack)  # that runs some of them
            agents.release()
            ended += [group async for group in groups]
            assert {group.example_id for group in ended} == set(range(10))
            for group in ended:
                assert len(group.results) == (0 if group.dropped else 4)
                assert group.dropped is None or (group.dropped is Drop.FAILED and group.reason)
            assert any(r.attempt > 1 for group in ended for r in group.results) or any(g.dropped for g in ended[1:])

    asyncio.run(scenario())


def kill_a_worker(stack: LocalStack) -> None:
    """Kill one of the stack's workers that run something, as the kernel does that runs out of memory."""
    client = redis.Redis.from_url(stack.redis_url)
    (running,) = client.zrange(broker.RUNNING, 0, 0)
    name = client.hget(broker.job_key(running.decode()), "worker").decode()
    os.kill(orjson.loads(client.get(broker.worker_key(name)))["pid"], signal.SIGKILL)
