"""The flow: every way an attempt can end, with the three foreign systems replaced at their protocols."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import workers.rollout
from producer.contract import ErrorKind, Phase, RolloutRequest, RolloutResult, StopCondition
from workers.environment import Environment
from workers.errors import GatewayError, SandboxError, TunnelError
from workers.gateway.protocol import Progress, Registration, Trajectory
from workers.rollout import Systems, run_rollout
from workers.sandboxes import prime_output
from workers.sandboxes.base import CommandResult, SandboxSpec
from workers.state import Rollout
from workers.watchdog import IdleWatch, Limits

STEP = {"prompt": [], "completion": [], "tokens": None}
#: Of an attempt, in seconds; less than any of its phases may take.
HARD_LIMIT = 20.0


class Leaping(asyncio.SelectorEventLoop):
    """A loop whose clock can be set forward, so that a limit is reached when, and not before, a test says so."""

    ahead = 0.0

    def time(self) -> float:
        return super().time() + self.ahead


class World:
    """In-memory gateway, tunnel and sandbox that note every call, and fail or hang where a test says so."""

    def __init__(self, **faults: Exception | str) -> None:
        self.faults = faults
        self.calls: list[str] = []
        self.held: set[str] = set()
        self.turns = 2
        self.failures: list[dict[str, Any]] = []
        self.integrity: dict[str, Any] = {}
        self.progresses: list[dict[str, Any]] = [{}]
        self.exit_code = 0
        self.agent_ends = asyncio.Event()
        self.agent_ends.set()
        self.tunnel_breaks = asyncio.Event()
        self.reached: dict[str, asyncio.Event] = {}
        self.spec: SandboxSpec | None = None

    async def at(self, point: str) -> None:
        self.calls.append(point)
        self.reached.setdefault(point, asyncio.Event()).set()
        fault = self.faults.get(point)
        if fault == "hang to the limit":
            loop = asyncio.get_running_loop()
            assert isinstance(loop, Leaping)
            loop.ahead += HARD_LIMIT + 1
        if fault in {"hang", "hang to the limit"}:
            await asyncio.Event().wait()
        if isinstance(fault, Exception):
            raise fault

    @asynccontextmanager
    async def holding(self, name: str, enter: str, leave: str) -> AsyncIterator[None]:
        await self.at(enter)
        self.held.add(name)
        try:
            yield
        finally:
            await self.at(leave)
            self.held.discard(name)

    # the gateway
    @asynccontextmanager
    async def registered(
        self, url: str, rollout_id: str, registration: Registration, *, api_key: str
    ) -> AsyncIterator[None]:
        async with self.holding("registration", "register", "unregister"):
            yield

    async def fetch_trajectory(self, url: str, rollout_id: str) -> Trajectory:
        await self.at("fetch")
        return Trajectory.model_validate(
            {
                "rollout_id": rollout_id,
                "status": "active",
                "num_turns": self.turns,
                "prompt": [{"role": "user", "content": "seen"}] if self.turns else [],
                "trajectory": [STEP] * self.turns,
                "failures": self.failures,
                "integrity": self.integrity,
            }
        )

    async def progress(self, url: str, rollout_id: str) -> Progress:
        await self.at("progress")
        told = self.progresses.pop(0) if len(self.progresses) > 1 else self.progresses[0]
        return Progress.model_validate({"rollout_id": rollout_id, "status": "active", "turns": self.turns} | told)

    async def cancel(self, url: str, rollout_id: str) -> None:
        await self.at("cancel")

    async def unregister(self, url: str, rollout_id: str) -> None:
        await self.at("unregister")

    # the tunnel
    @asynccontextmanager
    async def lease(self, url: str) -> AsyncIterator[Tunnel]:
        async with self.holding("tunnel", "tunnel", "untunnel"):
            yield Tunnel(self)

    # the sandbox
    @asynccontextmanager
    async def create(self, spec: SandboxSpec) -> AsyncIterator[Sandbox]:
        self.spec = spec
        async with self.holding("sandbox", "create", "delete"):
            yield Sandbox(self)

    async def aclose(self) -> None: ...


class Tunnel:
    url = "http://tunnel.test"
    tunnel_id = "tn-1"
    local_addr = "gateway"

    def __init__(self, world: World) -> None:
        self.world = world

    async def confirm(self, since: float, until: float) -> None:
        await self.world.at("confirm")
        assert since <= time.monotonic() >= until > 0

    async def broken(self) -> None:
        await self.world.tunnel_breaks.wait()
        raise TunnelError("tunnel tn-1 died", detail="frpc: EOF")


class Sandbox:
    id = "sb-1"

    def __init__(self, world: World) -> None:
        self.world = world

    async def start_job(self, command: str, **_: Any) -> Sandbox:
        await self.world.at("start_job")
        return self

    async def ended(self) -> int:
        await self.world.at("wait")
        await self.world.agent_ends.wait()
        return self.world.exit_code

    async def wait(self) -> CommandResult:
        await self.world.at("read")
        return CommandResult(self.world.exit_code, "out", "err")

    async def output(self) -> CommandResult | None:
        if self.world.faults.get("output") == "hang":
            await asyncio.Event().wait()
        return CommandResult(-1, "so far", "")

    async def execute_command(self, command: str, **_: Any) -> CommandResult:
        await self.world.at("execute")
        return CommandResult(0, "42", "")

    async def upload_bytes(self, path: str, data: bytes) -> None: ...

    async def upload_file(self, path: str, source: Path) -> None: ...

    async def download(self, path: str) -> bytes:
        return b""


class Scored(Environment):
    async def score(self, rollout: Rollout) -> dict[str, float]:
        assert rollout.sandbox is not None
        answer = await rollout.sandbox.execute_command("cat answer")
        return {"reward": float(answer.stdout), "turns": float(len(rollout.trajectory))}


def attempt_of(**fields: Any) -> Rollout:
    request = RolloutRequest.parse({"model": "m", "run_command": "agent", "prompt": "asked", **fields})
    return Rollout(request, "http://gateway:1", attempt=1, worker="w")


def run(world: World, rollout: Rollout, environment: Environment | None = None) -> Rollout:
    asyncio.run(go(world, rollout, environment))
    return rollout


async def go(
    world: World, rollout: Rollout, environment: Environment | None = None, limits: Limits | None = None
) -> None:
    await run_rollout(rollout, environment or Scored(), Systems(world, world, world, limits=limits or Limits()))


def test_what_the_gateway_checked_is_in_the_result() -> None:
    world = World()
    world.integrity = {"ok": False, "problems": [{"turn": 1, "kind": "retokenised", "token": 7}], "branches": [[0, 1]]}
    rollout = run(world, attempt_of())
    result = rollout.result()
    assert result.integrity == world.integrity
    assert RolloutResult.parse(result.to_json()).integrity == world.integrity


def test_a_rollout_completes_and_everything_is_released_in_reverse_order() -> None:
    world = World()
    rollout = run(world, attempt_of())

    result = rollout.result()
    assert result.stop_condition is StopCondition.COMPLETED
    assert result.reward == 42.0
    assert result.metrics == {"reward": 42.0, "turns": 2.0, "model_calls": 2.0, "failed_model_calls": 0.0}
    assert result.integrity is None, "a gateway that does not tell"
    assert (result.agent_exit_code, result.agent_stdout, result.agent_completed) == (0, "out", True)
    assert result.rollout_base_url == f"http://tunnel.test/v1/rollouts/{result.rollout_id}"
    assert (result.tunnel_id, result.tunnel_local_addr, result.sandbox_id) == ("tn-1", "gateway", "sb-1")
    assert set(result.durations) == {p.value for p in Phase}
    order = ["register", "tunnel", "create", "start_job", "wait", "read", "fetch", "confirm", "execute"]
    assert world.calls == [*order, "delete", "untunnel", "unregister"]
    assert world.held == set()


def test_the_agents_key_goes_into_secrets_and_its_variables_into_env() -> None:
    world = World()
    rollout = run(world, attempt_of(env={"OPENAI_TIMEOUT": "5", "MINE": "1"}))

    assert world.spec is not None
    assert world.spec.secrets == {"OPENAI_API_KEY": rollout.api_key, "ANTHROPIC_API_KEY": rollout.api_key}
    assert world.spec.env == {
        "OPENAI_BASE_URL": rollout.rollout_base_url,
        "ANTHROPIC_BASE_URL": rollout.rollout_base_url,
        "OPENAI_MODEL": "m",
        "OPENAI_TIMEOUT": "5",
        "OPENAI_REQUEST_TIMEOUT": "600",
        "HTTPX_TIMEOUT": "600",
        "MINE": "1",
    }
    assert rollout.api_key not in repr(world.spec) + repr(rollout)


def test_a_request_that_brings_anthropics_own_key_is_led_to_anthropic() -> None:
    rollout: Any = SimpleNamespace(rollout_base_url="http://gateway.test/v1/rollouts/r", api_key="own")
    for secret_env, led in (([], True), (["ANTHROPIC_API_KEY"], False)):
        request = RolloutRequest.parse({"model": "m", "secret_env": secret_env})
        env = Environment().build_env_vars(request, rollout)
        assert ("ANTHROPIC_BASE_URL" in env, "ANTHROPIC_API_KEY" in env) == (led, led)


@pytest.mark.parametrize(
    ("point", "error", "phase"),
    [
        ("register", GatewayError("refused"), Phase.REGISTER),
        ("tunnel", TunnelError("no tunnel"), Phase.TUNNEL),
        ("create", SandboxError("no sandbox"), Phase.SANDBOX),
        ("start_job", SandboxError("no job"), Phase.AGENT),
        ("wait", SandboxError("sandbox died"), Phase.AGENT),
        ("fetch", GatewayError("gone"), Phase.TRAJECTORY),
        ("execute", SandboxError("died while scoring"), Phase.SCORE),
    ],
)
def test_a_failure_at_any_point_is_typed_and_releases_what_is_held(point: str, error: Any, phase: Phase) -> None:
    world = World(**{point: error})
    result = run(world, attempt_of()).result()

    assert result.stop_condition is StopCondition.HAS_ERROR
    assert result.error is not None
    assert (result.error.kind, result.error.phase, result.error.message) == (error.kind, phase, error.message)
    assert result.error.retryable
    assert world.held == set()
    assert result.prompt, "the dataset's prompt is never lost"


@pytest.mark.parametrize("point", ["create", "start_job", "wait", "execute"])
def test_a_rollout_that_fails_part_way_keeps_its_turns(point: str) -> None:
    world = World(**{point: SandboxError("died")})
    assert len(run(world, attempt_of()).result().trajectory) == 2


class Unready(Scored):
    async def setup(self, rollout: Rollout) -> None:
        await asyncio.Event().wait()


#: For each phase: what hangs, and the error's kind and whether it is tried again. The agent's own is an outcome.
DEADLINES = {
    Phase.REGISTER: ("register", ErrorKind.GATEWAY, True),
    Phase.TUNNEL: ("tunnel", ErrorKind.TUNNEL, True),
    Phase.SANDBOX: ("create", ErrorKind.SANDBOX, True),
    Phase.SETUP: ("", ErrorKind.ENVIRONMENT, False),
    Phase.AGENT: ("wait", None, False),
    Phase.TRAJECTORY: ("fetch", ErrorKind.GATEWAY, True),
    Phase.SCORE: ("execute", ErrorKind.ENVIRONMENT, False),
    Phase.CLEANUP: ("delete", ErrorKind.SANDBOX, False),
}


@pytest.mark.parametrize("phase", Phase)
def test_a_phase_that_hangs_ends_at_its_deadline_with_a_typed_outcome(
    phase: Phase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.attempt._SALVAGE_TIMEOUT", 0.02)
    point, kind, again = DEADLINES[phase]
    world = World(**{point: "hang"} if point else {})
    rollout = run(world, attempt_of(deadlines={phase.value: 0.02}), None if point else Unready())
    result = RolloutResult.parse(rollout.result().to_json())

    if kind is None:
        assert (result.stop_condition, result.error) == (StopCondition.AGENT_TIMEOUT, None)
    else:
        assert result.stop_condition is StopCondition.HAS_ERROR
        assert result.error is not None
        assert (result.error.type, result.error.kind, result.error.phase) == ("PhaseDeadlineError", kind, phase)
        assert result.error.retryable is again
        assert result.error.message == f"phase {phase} took longer than its deadline of 0.02 s"
    assert world.held == ({"sandbox"} if phase is Phase.CLEANUP else set())


def test_an_agent_that_is_not_started_in_time_is_an_agent_error_that_is_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("workers.rollout._START_TIMEOUT", 0.02)
    world = World(start_job="hang")
    error = run(world, attempt_of()).error

    assert error is not None
    assert (error.kind, error.type, error.phase, error.retryable) == (ErrorKind.AGENT, "AgentError", Phase.AGENT, True)
    assert world.held == set()


def test_output_that_cannot_be_read_costs_no_rollout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.rollout._OUTPUT_TIMEOUT", 0.02)
    world = World(output="hang")
    world.agent_ends.clear()
    result = run(world, attempt_of(deadlines={"agent": 0.02})).result()

    assert result.stop_condition is StopCondition.AGENT_TIMEOUT
    assert "could not be read" in result.warnings[0]


@pytest.mark.parametrize("code", [0, 3])
def test_an_agent_that_ended_is_judged_by_its_exit_code_although_its_output_cannot_be_read(
    code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.rollout._OUTPUT_TIMEOUT", 0.02)
    world = World(read="hang")
    world.exit_code = code
    result = run(world, attempt_of()).result()

    assert (result.agent_completed, result.agent_exit_code) == (True, code)
    assert "could not be read" in result.warnings[0]
    assert (result.error.message if result.error else None) == (f"the agent exited with {code}" if code else None)
    assert world.held == set()


def test_a_provider_gives_up_the_output_before_its_rollout_does() -> None:
    assert prime_output.LIMIT < workers.rollout._OUTPUT_TIMEOUT


# -- the hard limit ----------------------------------------------------------------------------------------------------


def run_to_the_limit(world: World, rollout: Rollout) -> Rollout:
    with asyncio.Runner(loop_factory=Leaping) as runner:
        runner.run(go(world, rollout))
    return rollout


@pytest.mark.parametrize(
    ("point", "phase"),
    [
        ("register", Phase.REGISTER),
        ("tunnel", Phase.TUNNEL),
        ("create", Phase.SANDBOX),
        ("start_job", Phase.AGENT),
        ("wait", Phase.AGENT),
        ("fetch", Phase.TRAJECTORY),
        ("confirm", Phase.TRAJECTORY),
        ("execute", Phase.SCORE),
    ],
)
def test_an_attempt_ends_at_its_hard_limit_wherever_it_is(
    point: str, phase: Phase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.attempt._SALVAGE_TIMEOUT", 0.02)
    world = World(**{point: "hang to the limit"})
    result = run_to_the_limit(world, attempt_of(deadlines={"rollout": HARD_LIMIT})).result()

    assert result.stop_condition is StopCondition.HAS_ERROR
    assert result.error is not None
    assert (result.error.kind, result.error.type) == (ErrorKind.LIMIT, "RolloutLimitError")
    assert (result.error.phase, result.error.retryable) == (phase, False)
    assert "its hard limit of 20 s" in result.error.message
    assert world.held == set()
    if point not in {"register", "fetch"}:
        assert len(result.trajectory) == 2
    if point != "register":
        assert "cancel" in world.calls, "its agent must not go on spending the model"


def test_a_clean_up_after_the_hard_limit_has_a_bound_of_its_own() -> None:
    world = World(wait="hang to the limit", delete="hang")
    error = run_to_the_limit(world, attempt_of(deadlines={"rollout": HARD_LIMIT, "cleanup": 0.02})).error

    assert error is not None
    assert error.type == "RolloutLimitError"
    assert world.calls[-2:] == ["untunnel", "unregister"]


def test_the_workers_hard_limit_is_for_requests_that_set_none() -> None:
    for deadlines, type_ in (({}, "RolloutLimitError"), ({"rollout": 60, "agent": 0.1}, None)):
        world = World()
        world.agent_ends.clear()
        rollout = attempt_of(deadlines=deadlines)
        asyncio.run(go(world, rollout, limits=Limits(rollout=0.05)))
        assert (rollout.error.type if rollout.error else None) == type_


def test_a_cancellation_is_not_taken_for_the_hard_limit() -> None:
    async def scenario() -> World:
        world = World(wait="hang")
        task = asyncio.create_task(go(world, attempt_of(deadlines={"rollout": 60})))
        await world.reached.setdefault("wait", asyncio.Event()).wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return world

    assert asyncio.run(scenario()).held == set()


def test_a_sandbox_lives_as_long_as_its_attempt_may_take_and_no_longer() -> None:
    ttls = []
    for deadlines in ({}, {"rollout": 100}, {"rollout": 7 * 24 * 3600}):
        world = World()
        run(world, attempt_of(deadlines=deadlines))
        assert world.spec is not None
        ttls.append(world.spec.ttl)
    phases = 30 + 60 + 900 + 600 + 3600 + 60 + 600 + 60
    assert ttls == [phases + 180, 100 + 60 + 180, phases + 180]


# -- an agent that makes no model call ---------------------------------------------------------------------------------


def idle_attempt(limit: float = 0.02, agent: float = 30.0) -> Rollout:
    return attempt_of(deadlines={"idle": limit, "agent": agent})


def test_an_agent_that_makes_no_model_call_is_ended_with_its_turns_and_its_output() -> None:
    world = World()
    world.agent_ends.clear()
    world.progresses = [{"idle_seconds": 9.0, "failed_calls": 3}]
    result = run(world, idle_attempt()).result()

    assert result.stop_condition is StopCondition.HAS_ERROR
    assert result.error is not None
    assert (result.error.kind, result.error.type) == (ErrorKind.AGENT, "AgentStalledError")
    assert (result.error.phase, result.error.retryable) == (Phase.AGENT, False)
    assert "after 2 turns and 3 failed calls; its limit is 0.02 s" in result.error.message
    assert (result.agent_stdout, result.agent_exit_code, len(result.trajectory)) == ("so far", None, 2)
    assert (result.agent_timed_out, result.agent_completed, result.reward) == (False, False, None)
    assert world.calls.count("progress") == 1, "not before it could have been idle for so long"
    assert world.held == set()


def test_the_workers_idle_limit_is_for_requests_that_set_none() -> None:
    world = World()
    world.agent_ends.clear()
    rollout = attempt_of()
    asyncio.run(go(world, rollout, limits=Limits(idle=0.02)))
    assert rollout.error is not None
    assert rollout.error.type == "AgentStalledError"


def test_without_an_idle_limit_the_gateway_is_not_asked() -> None:
    world = World()
    world.agent_ends.clear()
    assert run(world, attempt_of(deadlines={"agent": 0.1})).agent_timed_out
    assert "progress" not in world.calls


def test_a_call_in_flight_is_not_idleness() -> None:
    world = World()
    world.agent_ends.clear()
    world.progresses = [{"in_flight": True, "idle_seconds": 9.0}] * 3 + [{"idle_seconds": 9.0}]
    rollout = run(world, idle_attempt())
    assert rollout.error is not None
    assert rollout.error.type == "AgentStalledError"
    assert world.calls.count("progress") == 4


@pytest.mark.parametrize("fault", [GatewayError("away"), "hang"], ids=["refused", "no answer"])
def test_a_question_that_is_not_answered_is_no_verdict(fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.watchdog.QUESTION_TIMEOUT", 0.01)

    async def scenario() -> World:
        world = World(progress=fault)
        world.agent_ends.clear()
        task = asyncio.create_task(go(world, rollout))
        async with asyncio.timeout(20):
            while world.calls.count("progress") < 3:
                await asyncio.sleep(0.005)
        world.agent_ends.set()
        await task
        return world

    rollout = idle_attempt()
    asyncio.run(scenario())
    assert rollout.stop_condition() is StopCondition.COMPLETED


def test_an_agent_that_was_kept_from_calling_by_its_tunnel_is_a_tunnel_error() -> None:
    world = World(confirm=TunnelError("did not serve for a time"))
    world.agent_ends.clear()
    error = run(world, idle_attempt()).error
    assert error is not None
    assert (error.kind, error.type, error.retryable) == (ErrorKind.TUNNEL, "TunnelError", True)


def test_an_idle_watch_asks_when_the_limit_could_be_reached_at_the_earliest() -> None:
    def told(**fields: Any) -> Progress:
        return Progress.model_validate({"rollout_id": "r", "status": "active", "turns": 1} | fields)

    watch = IdleWatch(100.0, started=1000.0)
    assert watch.left(1000.0) == 100
    watch.take(told(idle_seconds=30.0), 1100.0)
    assert (watch.heard, watch.left(1100.0)) == (1070.0, 70.0)
    watch.take(told(in_flight=True, idle_seconds=100.0), 1170.0)
    assert watch.left(1170.0) == 100
    watch.take(told(idle_seconds=300.0), 1270.0)
    assert watch.left(1270.0) == 0, "a call that was in flight a moment ago counts"

    untold = IdleWatch(100.0, started=1000.0)
    untold.take(told(turns=0), 1100.0)
    assert untold.left(1100.0) == 0, "no call since the start"
    untold.take(told(turns=5), 1100.0)
    assert untold.left(1100.0) == 100, "at some time since the last answer"
    untold.take(told(turns=5), 1200.0)
    assert untold.left(1200.0) == 0


def test_an_agent_that_never_ends_is_an_outcome_with_its_turns_and_its_score() -> None:
    world = World()
    world.agent_ends.clear()
    result = run(world, attempt_of(deadlines={"agent": 0.02})).result()

    assert result.stop_condition is StopCondition.AGENT_TIMEOUT
    assert (result.agent_timed_out, result.agent_completed, result.agent_exit_code) == (True, False, None)
    assert (result.agent_stdout, result.reward, len(result.trajectory)) == ("so far", 42.0, 2)
    assert world.calls.index("cancel") < world.calls.index("fetch"), "its call in flight is not waited for"


def test_an_agent_that_exits_3_is_an_agent_error_that_is_not_retried() -> None:
    world = World()
    world.exit_code = 3
    result = run(world, attempt_of()).result()

    assert result.stop_condition is StopCondition.HAS_ERROR
    assert result.error is not None
    assert (result.error.kind, result.error.retryable, result.error.detail) == (ErrorKind.AGENT, False, "err")
    assert (result.agent_exit_code, result.reward, len(result.trajectory)) == (3, 42.0, 2)


def test_an_agent_whose_model_failed_is_a_model_error() -> None:
    world = World()
    world.exit_code, world.turns = 1, 0
    world.failures = [{"status": 502, "message": "upstream refused the connection", "turns": 0}]
    result = run(world, attempt_of()).result()

    assert result.error is not None
    assert (result.error.kind, result.error.retryable) == (ErrorKind.MODEL, True)
    assert "upstream refused the connection" in result.error.message


def test_an_agent_that_makes_no_model_call_is_flagged() -> None:
    world = World()
    world.turns = 0
    result = run(world, attempt_of()).result()

    assert result.metrics["model_calls"] == 0
    assert "OPENAI_BASE_URL" in result.warnings[0]
    assert result.prompt == [{"role": "user", "content": "asked"}], "the dataset's own prompt is kept"


def test_a_broken_tunnel_ends_the_rollout_at_once_with_frpcs_words() -> None:
    world = World()
    world.agent_ends.clear()
    world.tunnel_breaks.set()
    result = run(world, attempt_of()).result()

    assert result.error is not None
    assert (result.error.kind, result.error.detail) == (ErrorKind.TUNNEL, "frpc: EOF")
    assert len(result.trajectory) == 2
    assert world.held == set()


@pytest.mark.parametrize("point", ["register", "tunnel", "create", "start_job", "wait", "fetch", "execute"])
def test_a_cancellation_at_any_point_cleans_up_and_is_raised_again(point: str) -> None:
    async def scenario() -> World:
        world = World(**{point: "hang"})
        task = asyncio.create_task(go(world, attempt_of()))
        await world.reached.setdefault(point, asyncio.Event()).wait()
        world.faults.clear()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return world

    world = asyncio.run(scenario())
    assert world.held == set()
    if point != "register":
        assert "cancel" in world.calls, "the gateway is told, so that the agent stops spending the model"


def test_a_second_cancellation_does_not_interrupt_the_clean_up() -> None:
    async def scenario() -> World:
        world = World(wait="hang")
        release = asyncio.Event()
        at = world.at

        async def slow(point: str) -> None:
            await at(point)
            if point == "delete":
                await release.wait()

        world.at = slow  # type: ignore[method-assign]
        task = asyncio.create_task(go(world, attempt_of()))
        await world.reached.setdefault("wait", asyncio.Event()).wait()
        task.cancel()
        await world.reached.setdefault("delete", asyncio.Event()).wait()
        task.cancel()
        await asyncio.sleep(0)
        release.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        return world

    world = asyncio.run(scenario())
    assert world.held == set()


@pytest.mark.parametrize("point", ["delete", "untunnel", "unregister"])
def test_a_failed_clean_up_is_recorded_when_nothing_failed_before(point: str) -> None:
    result = run(World(**{point: SandboxError("HTTP 500")}), attempt_of()).result()

    assert result.error is not None
    assert (result.error.phase, result.error.retryable) == (Phase.CLEANUP, False)
    assert (result.reward, len(result.trajectory)) == (42.0, 2), "what was achieved is kept"


def test_a_failed_clean_up_does_not_hide_the_cause() -> None:
    world = World(wait=SandboxError("sandbox died"), delete=SandboxError("HTTP 500"))
    error = run(world, attempt_of()).error
    assert error is not None
    assert error.message == "sandbox died"


def test_a_clean_up_that_hangs_is_bounded_and_the_rest_is_still_released() -> None:
    world = World(delete="hang")
    error = run(world, attempt_of(deadlines={"cleanup": 0.02})).error

    assert error is not None
    assert "took longer than its deadline" in error.message
    assert world.calls[-2:] == ["untunnel", "unregister"]


def raising(error: BaseException) -> Callable[..., Any]:
    def hook(*_: object) -> None:
        raise error

    return hook


@pytest.mark.parametrize("hook", ["run_command", "docker_image", "build_env_vars", "setup", "score", "after"])
def test_a_hook_that_raises_is_an_environment_error_that_names_it(hook: str) -> None:
    environment = Scored()
    setattr(environment, hook, raising(KeyError("answer")))
    world = World()
    result = run(world, attempt_of(), environment).result()

    assert result.error is not None
    assert (result.error.kind, result.error.retryable) == (ErrorKind.ENVIRONMENT, False)
    assert f"Scored.{hook} raised KeyError" in result.error.message
    assert "raise error" in (result.error.detail or "")
    assert world.held == set()


@pytest.mark.parametrize("error", [SystemExit(1), KeyboardInterrupt()], ids=["SystemExit", "KeyboardInterrupt"])
def test_a_hook_cannot_end_the_worker(error: BaseException) -> None:
    environment = Scored()
    environment.score = raising(error)  # type: ignore[method-assign]
    result = run(World(), attempt_of(), environment).result()

    assert result.error is not None
    assert (result.error.kind, len(result.trajectory)) == (ErrorKind.ENVIRONMENT, 2)


@pytest.mark.parametrize(
    "error", [StopIteration(), concurrent.futures.CancelledError()], ids=lambda e: type(e).__name__
)
def test_what_no_future_can_hold_is_told_when_a_plain_hook_raises_it(error: Exception) -> None:
    environment = Scored()
    environment.score = raising(error)  # type: ignore[method-assign]
    told = run(World(), attempt_of(deadlines={"score": 30.0}), environment).error

    assert told is not None
    assert told.message == f"Scored.score raised {type(error).__name__}: "


@pytest.mark.parametrize("scored", [float("nan"), float("inf"), {"reward": 1.0, "x": float("nan")}])
def test_a_score_that_json_cannot_hold_keeps_the_trajectory(scored: object) -> None:
    class Odd(Environment):
        async def score(self, rollout: Rollout) -> Any:
            return scored

    result = run(World(), attempt_of(), Odd()).result()
    assert result.error is not None
    assert "expected a finite number" in result.error.message
    assert (result.error.kind, len(result.trajectory)) == (ErrorKind.ENVIRONMENT, 2)


def test_an_earlier_attempts_registration_is_forgotten() -> None:
    world = World()
    rollout = attempt_of(rollout_id="r")
    rollout.attempt = 3
    assert (rollout.gateway_id, rollout.earlier_gateway_id) == ("r~3", "r~2")
    run(world, rollout)
    assert world.calls[:2] == ["register", "unregister"]


def test_secrets_are_cut_out_of_everything_that_is_said() -> None:
    world = World()
    world.exit_code = 1
    rollout = attempt_of()
    rollout.secrets = {"TOKEN": "hush-hush"}
    environment = Scored()
    environment.score = raising(ValueError("hush-hush"))  # type: ignore[method-assign]
    rollout.warnings.append("hush-hush")
    result = run(world, rollout, environment).result()
    assert "hush-hush" not in result.to_json().decode()
    assert "[redacted TOKEN]" in result.warnings[0]


@pytest.mark.parametrize(
    ("point", "error", "stage"),
    [
        ("create", SandboxError("refused hush-hush"), "finish"),
        ("create", ValueError("hush-hush"), "sandbox: unexpected error"),
        ("delete", SandboxError("still there: hush-hush"), "cleanup: "),
        ("delete", ValueError("hush-hush"), "cleanup: unexpected error"),
        ("confirm", TunnelError("hush-hush"), "tunnel_died"),
        ("progress", GatewayError("hush-hush"), "idle_watch"),
        ("unregister", GatewayError("hush-hush"), "unregister"),
    ],
)
def test_errors_are_logged_without_the_secrets_that_they_quote(
    point: str, error: Exception, stage: str, caplog: pytest.LogCaptureFixture
) -> None:
    world = World(**{point: error})
    rollout = attempt_of()
    if point == "progress":
        world.agent_ends.clear()
        rollout = idle_attempt(agent=0.2)
    if point == "unregister":
        rollout.attempt = 2
    rollout.secrets = {"TOKEN": "hush-hush"}
    with caplog.at_level(logging.INFO, logger="workers"):
        run(world, rollout)

    said = [record.getMessage() for record in caplog.records]
    assert [line for line in said if line.startswith(stage) and "[redacted TOKEN]" in line]
    assert "hush-hush" not in caplog.text, "tracebacks included"


def test_what_an_agent_printed_stays_as_it_is_where_it_holds_no_secret() -> None:
    rollout = attempt_of()
    rollout.secrets = {"URL": "http://internal/xyz"}
    rollout.agent_completed, rollout.agent_stdout = True, "answer: see http"
    assert rollout.result().agent_stdout == "answer: see http"


def test_a_plain_hook_runs_in_a_thread_and_may_block() -> None:
    import threading

    seen: list[bool] = []

    class Blocking(Environment):
        def score(self, rollout: Rollout) -> float:  # type: ignore[override]
            seen.append(threading.current_thread() is not threading.main_thread())
            return 0.5

    assert run(World(), attempt_of(), Blocking()).reward == 0.5
    assert seen == [True]


@pytest.mark.parametrize("scored", ["high", [1.0], {"reward": "high"}])
def test_a_score_of_the_wrong_type_is_an_environment_error(scored: object) -> None:
    class Odd(Environment):
        async def score(self, rollout: Rollout) -> Any:
            return scored

    error = run(World(), attempt_of(), Odd()).error
    assert error is not None
    assert error.kind is ErrorKind.ENVIRONMENT
    assert "expected a float" in error.message


def test_a_missing_run_command_is_an_invalid_request_before_anything_is_created() -> None:
    world = World()
    error = run(world, attempt_of(run_command=None)).error
    assert error is not None
    assert error.kind is ErrorKind.INVALID_REQUEST
    assert world.calls == []
