"""The circuit breaker: a worker whose systems fail takes nothing new, and tries with one rollout at a time."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fleets import lean
from prometheus_client import CollectorRegistry
from support import RedisServer, free_port, wait_until
from typer.testing import CliRunner

from producer import Producer, RolloutRequest, RolloutResult
from producer.cli import app
from producer.contract import ErrorInfo, ErrorKind, Phase, StopCondition
from producer.settings import ProducerSettings
from workers.breaker import Breaker, State, is_infrastructure
from workers.local import LocalStack, StackOptions
from workers.metrics import BreakerCollector
from workers.state import SYSTEMS, Rollout


class World:
    """A breaker with what it tells the pool; a pause is a twentieth of a second."""

    def __init__(self, pause: float = 0.05, held: int = 7) -> None:
        self.limits: list[int | None] = []
        self.held = held
        self.breaker = Breaker(
            failures=3, pause=pause, longest=3 * pause, limit=self.limits.append, running=lambda: self.held
        )

    def attempt(
        self,
        error: ErrorInfo | None = None,
        *,
        past: Phase = Phase.SCORE,
        began: float | None = None,
        meets: frozenset[ErrorKind] = SYSTEMS,
    ) -> None:
        rollout = Rollout(RolloutRequest(model="m"), "http://g", error=error, meets=meets)
        rollout.began = rollout.began if began is None else began
        self.breaker.watch(rollout, time.monotonic())
        for phase in Phase:
            rollout.enter(phase)
            if phase is (error.phase if error else past):
                break
        if error:
            self.breaker.record(rollout, error)

    async def until(self, state: State) -> None:
        async with asyncio.timeout(30):
            while self.breaker.state is not state:
                await asyncio.sleep(0.005)


def failure(kind: ErrorKind = ErrorKind.GATEWAY, phase: Phase = Phase.REGISTER, retryable: bool = True) -> ErrorInfo:
    return ErrorInfo(kind=kind, message="no", retryable=retryable, phase=phase)


def story(work: Callable[[World], Any], **options: Any) -> World:
    async def run() -> World:
        world = World(**options)
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
        assert world.breaker.report()["state"] is State.CLOSED
        world.attempt(failure())
        report = world.breaker.report()
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
        assert world.breaker._pause == pytest.approx(0.15), "the longest"
        await world.until(State.PROBING)
        world.attempt(began=0.0)
        assert world.breaker.state is State.PROBING, "one that began long ago proves nothing"
        world.attempt()
        assert (world.breaker.state, world.limits[-1], world.breaker._pause) == (State.CLOSED, None, 0.05)

    story(work)


def test_a_probe_is_one_rollout_however_many_old_ones_end_meanwhile() -> None:
    async def work(world: World) -> None:
        old = time.monotonic()
        for _ in range(3):
            world.attempt(failure())
        world.breaker.released(old)
        assert world.limits == [0], "while it is open, there is nothing to lower"
        await world.until(State.PROBING)
        for _ in range(7):
            world.breaker.released(old)
        assert world.limits == [0, 8, 7, 6, 5, 4, 3, 2, 1], "the place of each that ends is closed"
        world.breaker.released(time.monotonic())
        assert world.limits[-1] == 1, "a probe that ends without a proof makes place for the next one"
        world.attempt()
        world.breaker.released(old)
        assert world.limits[-1] is None

    story(work)


#: What meets them: an episode that its environment runs alone, and what runs with a gateway that its request chose.
NOTHING: frozenset[ErrorKind] = frozenset()
SANDBOXES = frozenset({ErrorKind.SANDBOX})


@pytest.mark.parametrize("meets", [NOTHING, SANDBOXES], ids=["an episode", "another gateway"])
def test_a_probe_that_does_not_meet_what_fails_makes_place_for_one_that_does(meets: frozenset[ErrorKind]) -> None:
    """It may run for hours and proves nothing: it must not be the one rollout that is let in."""

    async def work(world: World) -> None:
        for _ in range(3):
            world.attempt(failure())
        await world.until(State.PROBING)
        beside = Rollout(RolloutRequest(model="m"), "http://other", meets=meets)
        claimed_at = time.monotonic()
        world.breaker.watch(beside, claimed_at)
        assert world.limits[-1] == 9, "one more may come"
        for phase in Phase:
            beside.enter(phase)
        assert world.breaker.state is State.PROBING, "it has not met the gateway"
        world.breaker.released(claimed_at)
        assert world.limits[-1] == 8, "its place is not for a second probe"
        world.attempt()
        assert (world.breaker.state, world.limits[-1]) == (State.CLOSED, None)

    story(work)


def test_what_ran_beside_the_last_probe_is_counted_with_the_old_ones_at_the_next() -> None:
    async def work(world: World) -> None:
        for _ in range(3):
            world.attempt(failure())
        await world.until(State.PROBING)
        claimed_at = time.monotonic()
        world.breaker.watch(Rollout(RolloutRequest(model="m"), "", meets=NOTHING), claimed_at)
        world.attempt(failure())
        world.held += 1
        await world.until(State.PROBING)
        assert world.limits[-1] == 9, "one more than it holds"
        world.breaker.released(claimed_at)
        assert world.limits[-1] == 8

    story(work)


def test_another_gateway_neither_fails_nor_clears_the_workers_own() -> None:
    async def work(world: World) -> None:
        for _ in range(4):
            world.attempt(failure(), meets=SANDBOXES)
        assert world.breaker.report()["systems"]["gateway"]["failures"] == 0
        for _ in range(3):
            world.attempt(failure())
            world.attempt(meets=SANDBOXES)  # it works, which says nothing of ours
        assert (world.breaker.state, world.breaker.kind) == (State.OPEN, ErrorKind.GATEWAY)

    story(work)


def test_sandboxes_are_proven_by_whatever_gateway_their_rollout_has() -> None:
    async def work(world: World) -> None:
        for _ in range(3):
            world.attempt(failure(ErrorKind.SANDBOX, Phase.SANDBOX), meets=SANDBOXES)
        await world.until(State.PROBING)
        world.attempt(meets=SANDBOXES)
        assert world.breaker.state is State.CLOSED

    story(work)


def test_its_report_tells_of_each_system_how_it_stands_and_what_it_said_last() -> None:
    async def work(world: World) -> None:
        closed = {"state": "closed", "failures": 0, "opened": 0, "last_error": None, "last_error_at": None}
        assert world.breaker.report()["systems"] == dict.fromkeys(("gateway", "tunnel", "sandbox"), closed)
        world.attempt(failure(ErrorKind.TUNNEL, Phase.TUNNEL))
        for words in ("first", "second", "x" * 1000):
            world.attempt(failure().model_copy(update={"message": words}))
        report = world.breaker.report()
        gateway, tunnel = report["systems"]["gateway"], report["systems"]["tunnel"]
        assert 0 <= report["seconds"] <= 0.1
        assert (gateway["state"], gateway["failures"], gateway["opened"]) == ("open", 3, 1)
        assert gateway["last_error"] == "x" * 300
        assert abs(gateway["last_error_at"] - time.time()) < 60
        assert (tunnel["state"], tunnel["failures"], tunnel["last_error"]) == ("closed", 1, "no")
        assert report["systems"]["sandbox"] == closed
        await world.until(State.PROBING)
        report = world.breaker.report()
        assert (report["state"], report["systems"]["gateway"]["state"], report["seconds"]) == ("probing", "probing", 0)

    story(work)


def test_the_metrics_tell_how_it_stands_for_each_system() -> None:
    async def work(world: World) -> None:
        registry = CollectorRegistry()
        registry.register(BreakerCollector(world.breaker.report))
        for _ in range(3):
            world.attempt(failure())
        value = registry.get_sample_value
        states = {
            (system, state): value("rollouts_breaker_state", {"system": system, "state": state})
            for system in ("gateway", "tunnel", "sandbox")
            for state in ("closed", "open", "probing")
        }
        assert {where for where, found in states.items() if found} == {
            ("gateway", "open"),
            ("tunnel", "closed"),
            ("sandbox", "closed"),
        }
        assert value("rollouts_breaker_failures", {"system": "gateway"}) == 3
        assert value("rollouts_breaker_opened_total", {"system": "gateway"}) == 1
        assert 40 < (value("rollouts_breaker_probe_in_seconds") or 0) <= 75

    story(work, pause=60.0)


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
        "ROLLOUTS_LEASE_TTL": "30",
    }
    options = StackOptions(concurrency=10, redis_url=own_redis.url, settings=settings, log_dir=tmp_path, **lean())
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
                view = await asyncio.to_thread(status_until_paused, own_redis.url)
                assert "takes no rollouts, " in view
                assert "its gateway failed" in view
                assert "cannot connect to the rollout gateway" in view
                stack._children.remove(gateway)
                restart_gateway(stack)
                return [result async for result in batch]

        results = asyncio.run(scenario())

    assert [(r.stop_condition, len(results)) for r in results] == [(StopCondition.COMPLETED, 30)] * 30
    failed = [attempt for r in results for attempt in r.failed_attempts]
    assert failed, "some had begun"
    assert not any(attempt.counted for attempt in failed)
    assert len(failed) < 60, "the breaker kept the others from trying again and again"


def status_until_paused(url: str) -> str:
    """Return what ``rollouts status`` shows at a moment at which the breaker is not closed."""
    shown = [""]

    def is_paused() -> bool:
        shown[0] = CliRunner().invoke(app, ["status", "--redis-url", url], env={"COLUMNS": "200"}).stdout
        return " paused " in shown[0]

    wait_until(is_paused, what="a worker that is paused")
    return shown[0]


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
