"""The circuit breaker: a worker whose systems fail takes nothing new, and tries with one rollout at a time."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis
from support import RedisServer, free_port, wait_until

from producer import Producer, RolloutRequest, RolloutResult, broker
from producer.contract import ErrorInfo, ErrorKind, Phase, StopCondition
from producer.settings import ProducerSettings
from workers.breaker import Breaker, State, is_infrastructure
from workers.local import LocalStack, StackOptions
from workers.state import Rollout


class World:
    """A breaker with what it tells the pool; a pause is a twentieth of a second."""

    def __init__(self, held: int = 7) -> None:
        self.limits: list[int | None] = []
        self.breaker = Breaker(failures=3, pause=0.05, longest=0.15, limit=self.limits.append, running=lambda: held)

    def attempt(self, error: ErrorInfo | None = None, *, past: Phase = Phase.SCORE, began: float | None = None) -> None:
        rollout = Rollout(RolloutRequest(model="m"), "http://g", error=error)
        rollout.began = rollout.began if began is None else began
        self.breaker.watch(rollout)
        for phase in Phase:
            rollout.enter(phase)
            if phase is (error.phase if error else past):
                break
        if error:
            self.breaker.record(error)

    async def until(self, state: State) -> None:
        async with asyncio.timeout(5):
            while self.breaker.state is not state:
                await asyncio.sleep(0.005)


def failure(kind: ErrorKind = ErrorKind.GATEWAY, phase: Phase = Phase.REGISTER, retryable: bool = True) -> ErrorInfo:
    return ErrorInfo(kind=kind, message="no", retryable=retryable, phase=phase)


def story(work: Callable[[World], Any]) -> World:
    async def run() -> World:
        world = World()
        await work(world)
        return world

    return asyncio.run(run())


def test_it_opens_after_failures_in_a_row_of_one_kind_and_not_before() -> None:
    async def work(world: World) -> None:
        world.attempt(failure())
        world.attempt(failure())
        world.attempt()  # one that works
        world.attempt(failure())
        world.attempt(failure(ErrorKind.SANDBOX, Phase.SANDBOX))  # it came past the gateway
        world.attempt(failure())
        world.attempt(failure())
        assert world.breaker.report() is None
        world.attempt(failure())
        report = world.breaker.report()
        assert report is not None
        assert (report["state"], report["kind"], world.limits) == (State.OPEN, ErrorKind.GATEWAY, [0])

    story(work)


def test_a_refused_account_opens_it_at_once() -> None:
    async def work(world: World) -> None:
        refused = failure(ErrorKind.TUNNEL, Phase.TUNNEL, retryable=False).model_copy(update={"account": True})
        world.attempt(refused)
        assert (world.breaker.state, world.breaker.kind) == (State.OPEN, ErrorKind.TUNNEL)

    story(work)


def test_a_probe_that_works_closes_it_and_one_that_fails_doubles_the_pause() -> None:
    async def work(world: World) -> None:
        for _ in range(3):
            world.attempt(failure())
        await world.until(State.PROBING)
        assert world.limits == [0, 8], "one more than it holds"
        world.attempt(failure())
        assert (world.breaker.state, world.breaker._pause) == (State.OPEN, 0.1)
        await world.until(State.PROBING)
        world.attempt(failure())
        assert world.breaker._pause == 0.15, "the longest"
        await world.until(State.PROBING)
        world.attempt(began=0.0)
        assert world.breaker.state is State.PROBING, "one that began long ago proves nothing"
        world.attempt()
        assert (world.breaker.state, world.limits[-1], world.breaker._pause) == (State.CLOSED, None, 0.05)

    story(work)


def test_a_probe_need_not_end_to_prove_that_sandboxes_are_created_again() -> None:
    async def work(world: World) -> None:
        for _ in range(3):
            world.attempt(failure(ErrorKind.SANDBOX, Phase.SANDBOX))
        await world.until(State.PROBING)
        world.attempt(past=Phase.SETUP)  # its agent may run for hours
        assert world.breaker.state is State.CLOSED

    story(work)


@pytest.mark.parametrize(
    ("error", "counts"),
    [
        (failure(), True),
        (failure(ErrorKind.TUNNEL, Phase.TUNNEL), True),
        (failure(ErrorKind.TUNNEL, Phase.AGENT), False),  # its tunnel died: the next one may be fine
        (failure(ErrorKind.SANDBOX, Phase.SANDBOX, retryable=False), False),  # the request's own fault: no such image
        (failure(ErrorKind.SANDBOX, Phase.SANDBOX, retryable=False).model_copy(update={"account": True}), True),
        (failure(ErrorKind.AGENT, Phase.AGENT), False),
        (failure(ErrorKind.GATEWAY, Phase.TRAJECTORY), False),
    ],
)
def test_what_counts_as_a_failure_of_the_infrastructure(error: ErrorInfo, counts: bool) -> None:
    assert is_infrastructure(error) is counts


def test_a_gateway_that_is_away_for_a_while_costs_no_rollout_its_attempts(
    tmp_path: Path, own_redis: RedisServer
) -> None:
    """30 rollouts of one attempt each begin while the gateway is down, and complete when it is back."""
    settings = {
        "ROLLOUTS_BREAKER_FAILURES": "5",
        "ROLLOUTS_BREAKER_PAUSE": "0.5",
        "ROLLOUTS_BREAKER_LONGEST_PAUSE": "1",
        "ROLLOUTS_LEASE_TTL": "2",
    }
    options = StackOptions(concurrency=10, redis_url=own_redis.url, settings=settings, log_dir=tmp_path)
    with LocalStack(options) as stack:
        gateway = next(child for child in stack._children if child.name == "gateway")
        gateway.process.send_signal(signal.SIGSTOP)
        gateway.process.kill()
        gateway.process.wait()
        log = stack.logs["worker1"]

        async def scenario() -> list[RolloutResult]:
            wanted = [
                RolloutRequest.parse({"model": "m", "example_id": n, "run_command": "true", "max_attempts": 1})
                for n in range(30)
            ]
            async with Producer(ProducerSettings(redis_url=own_redis.url)) as producer, asyncio.timeout(60):
                batch = await producer.submit_many(wanted)
                await asyncio.to_thread(wait_until, lambda: "trying one rollout" in log.read_text(), what="a probe")
                name = broker.worker_key(worker_of(own_redis.client))
                await asyncio.to_thread(
                    wait_until, lambda: b'"kind":"gateway"' in (own_redis.client.get(name) or b""), what="the report"
                )
                stack._children.remove(gateway)
                restart_gateway(stack)
                return [result async for result in batch]

        results = asyncio.run(scenario())

    assert [(r.stop_condition, len(results)) for r in results] == [(StopCondition.COMPLETED, 30)] * 30
    failed = [attempt for r in results for attempt in r.failed_attempts]
    assert failed, "some had begun"
    assert not any(attempt.counted for attempt in failed)
    assert len(failed) < 60, "the breaker kept the others from trying again and again"


def worker_of(client: redis.Redis) -> str:
    names: Any = client.zrange(broker.WORKERS, 0, -1)
    return str(names[0].decode())


def restart_gateway(stack: LocalStack) -> None:
    """Start the gateway anew under the same address."""
    from workers.local import PYTHON, _http_ok

    port = stack.gateway_url.rpartition(":")[2]
    command = [*PYTHON, "workers.cli", "gateway", "--host", "127.0.0.1", "--port", port]
    variables = {"ROLLOUTS_GATEWAY_CONTROL_KEY": stack.control_key, "ROLLOUTS_GATEWAY_UPSTREAM": stack.upstream}
    stack._spawn("gateway", command, variables, lambda: _http_ok(f"{stack.gateway_url}/healthz"))


def test_a_port_that_nobody_listens_on_is_an_infrastructure_failure() -> None:
    from workers.gateway.client import HttpGateway
    from workers.gateway.protocol import Registration

    async def register() -> None:
        gateway = HttpGateway(retry_delay=0.001)
        try:
            async with gateway.registered(f"http://127.0.0.1:{free_port()}", "r", Registration(model="m"), api_key="k"):
                pass
        finally:
            await gateway.aclose()

    with pytest.raises(Exception, match=r"cannot connect to the rollout gateway at http://127\.0\.0\.1:") as raised:
        asyncio.run(register())
    assert is_infrastructure(raised.value.info(Phase.REGISTER))  # type: ignore[attr-defined]
