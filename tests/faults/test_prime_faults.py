"""What goes wrong on the platform while rollouts run, and that none of it loses a turn, a rollout, or money.

The first part is every item under "what it gets wrong" of the measurements of the system that this follows.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from emulators.prime import PrimeEmulator
from fleets import fleet_on
from submitting import request, requests, results_of
from support import wait_until

from producer import Producer, RolloutRequest, RolloutResult, broker
from producer.contract import ErrorKind, Phase, StopCondition
from producer.settings import ProducerSettings
from workers.local import LocalStack

pytestmark = pytest.mark.xdist_group("prime-faults")

#: Seconds between health checks: the real 30 are too long for a test.
INTERVAL = 1.0
#: Seconds for which agents try again whose tunnel has been deleted: nobody may find out by waiting for their end.
PATIENCE = 30.0


class Platform:
    """The emulator as one test sees it: what was there before the test does not count."""

    def __init__(self, emulator: PrimeEmulator) -> None:
        self._emulator = emulator
        self._requests = Counter(emulator.requests())
        self._earlier = {sandbox["id"] for sandbox in emulator.sandboxes()}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._emulator, name)

    def requests(self) -> Counter[str]:
        return Counter(self._emulator.requests()) - self._requests

    def sandboxes(self) -> list[dict[str, Any]]:
        return [sandbox for sandbox in self._emulator.sandboxes() if sandbox["id"] not in self._earlier]

    def tunnel(self) -> dict[str, Any]:
        """Return the tunnel that is used now."""
        return next(tunnel for tunnel in reversed(self._emulator.tunnels()) if not tunnel["deleted"])


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LocalStack, PrimeEmulator]]:
    settings = {"ROLLOUTS_TUNNEL_CHECK_INTERVAL": str(INTERVAL), "ROLLOUTS_POLL_INTERVAL": "0.5"}
    # Failures show as what they are, and one test's do not pause the next one's rollouts.
    settings |= {"ROLLOUTS_INFRASTRUCTURE_RETRIES": "0", "ROLLOUTS_BREAKER_PAUSE": "0.05"}
    with fleet_on("prime", tmp_path_factory.mktemp("faults"), concurrency=120, settings=settings, beat=True) as (
        stack,
        emulator,
    ):
        assert emulator is not None
        yield stack, emulator


class Runs:
    """Submits rollouts, and collects their results while the test breaks things."""

    def __init__(self, stack: LocalStack) -> None:
        self.url = stack.redis_url

    def __call__(self, *wanted: RolloutRequest, meanwhile: Callable[[], object] = lambda: None) -> list[RolloutResult]:
        return results_of(self.url, list(wanted), meanwhile)


@pytest.fixture
def runs(fleet: tuple[LocalStack, PrimeEmulator]) -> Runs:
    return Runs(fleet[0])


@pytest.fixture
def platform(fleet: tuple[LocalStack, PrimeEmulator]) -> Iterator[Platform]:
    yield Platform(fleet[1])
    fleet[1].clear_faults()
    fleet[1].limit_tunnels(None)
    wait_until(lambda: not fleet[1].leaked()["sandboxes"], what="no sandbox")
    # What the next test runs must not meet what this one has broken.
    wait_until(lambda: all(t["deleted"] or t["status"] == "connected" for t in fleet[1].tunnels()), what="the restart")


# -- what the system that this follows gets wrong ----------------------------------------------------------------------


def test_100_rollouts_survive_a_kill_of_frpc_in_their_first_attempt(
    platform: Platform, runs: Runs, agents: Any
) -> None:
    def kill() -> None:
        wait_until(lambda: len(agents.starts()) == 100, timeout=90, what="100 agents past their first call")
        before = platform.tunnel()
        platform.kill_frpc()
        wait_until(lambda: platform.tunnel()["frpc_pid"] != before["frpc_pid"], what="the restart")
        agents.release()
        assert platform.tunnel()["url"] == before["url"], "the same URL"

    results = runs(*requests(100, run_command=agents.patient()), meanwhile=kill)

    assert [(r.stop_condition, r.attempt, len(r.trajectory)) for r in results] == [
        (StopCondition.COMPLETED, 1, 2)
    ] * 100
    assert platform.requests()["create_tunnel"] <= 1, "one for all of them, or the one of the tests before"


def test_rollouts_survive_a_cut_of_the_tunnels_control_connection(platform: Platform, runs: Runs, agents: Any) -> None:
    """frpc lives, and connects again by itself: nobody else has anything to do."""

    def cut() -> None:
        wait_until(lambda: len(agents.starts()) == 5)
        before = platform.tunnel()
        platform.cut_tunnel()
        agents.release()
        assert platform.tunnel()["frpc_pid"] == before["frpc_pid"]

    results = runs(*requests(5, run_command=agents.patient()), meanwhile=cut)

    assert [(r.stop_condition, r.attempt, len(r.trajectory)) for r in results] == [(StopCondition.COMPLETED, 1, 2)] * 5


def test_100_rollouts_of_a_deleted_tunnel_fail_with_their_turns_and_complete_on_the_next(
    platform: Platform, runs: Runs, agents: Any, fleet: tuple[LocalStack, PrimeEmulator]
) -> None:
    """However alive the new tunnel is: the old one's URL is gone, so its rollouts can never finish."""
    noticed: list[float] = []
    old: list[str] = []
    wanted = requests(100, run_command=agents.patient(patience=PATIENCE))

    def delete() -> None:
        wait_until(lambda: len(agents.starts()) == 100, timeout=90, what="100 agents past their first call")
        client = redis.Redis.from_url(fleet[0].redis_url)
        old.append(platform.tunnel()["tunnel_id"])
        platform.delete_tunnel()
        began = client.time()[0] + client.time()[1] / 1e6
        wait_until(lambda: client.zcard(broker.DELAYED) + client.zcard(broker.RUNNING) == 100)
        wait_until(
            lambda: sum(bool(client.hget(broker.job_key(r.rollout_id), "history")) for r in wanted) == 100,
            what="100 failed attempts",
        )
        noticed.append(client.time()[0] + client.time()[1] / 1e6 - began)
        agents.release()

    results = runs(*wanted, meanwhile=delete)

    assert {r.stop_condition for r in results} == {StopCondition.COMPLETED}
    assert {(r.attempt, len(r.trajectory)) for r in results} == {(2, 2)}
    failed = [attempt for r in results for attempt in r.failed_attempts]
    assert len(failed) == 100
    for attempt in failed:
        assert attempt.error.kind is ErrorKind.TUNNEL
        assert old[0] in attempt.error.message
        assert attempt.error.detail, "frpc's own words"
        assert (attempt.turns, len(attempt.trajectory)) == (1, 1)
        assert attempt.trajectory[0]["tokens"]["completion_ids"]
    assert {r.tunnel_id for r in results} == {platform.tunnel()["tunnel_id"]} != set(old)
    assert noticed[0] < PATIENCE / 2, "two looks, and 100 clean-ups"


def test_a_tunnel_that_cannot_be_restarted_keeps_the_turns_of_its_rollouts(
    platform: Platform, runs: Runs, agents: Any
) -> None:
    def kill_for_good() -> None:
        wait_until(lambda: len(agents.starts()) == 3)
        platform.limit_tunnels(0)
        platform.delete_tunnel()

    results = runs(*requests(3, run_command=agents.patient(), max_attempts=1), meanwhile=kill_for_good)

    for result in results:
        assert result.error is not None
        assert result.error.kind is ErrorKind.TUNNEL
        assert (result.stop_condition, len(result.trajectory)) == (StopCondition.HAS_ERROR, 1)
        assert result.completion


def test_a_tunnel_that_only_the_platform_knows_to_be_down_is_restarted(
    platform: Platform, runs: Runs, agents: Any
) -> None:
    """Its frpc lives and says nothing; two looks at the platform's record say that it is disconnected."""

    def disconnect() -> None:
        wait_until(lambda: len(agents.starts()) == 5)
        platform.disconnect_tunnel()
        agents.release()

    results = runs(*requests(5, run_command=agents.patient()), meanwhile=disconnect)
    assert [(r.stop_condition, r.attempt, len(r.trajectory)) for r in results] == [(StopCondition.COMPLETED, 1, 2)] * 5


def test_a_gateway_that_is_away_for_a_moment_when_the_trajectory_is_fetched_loses_nothing(
    fleet: tuple[LocalStack, PrimeEmulator], platform: Platform, runs: Runs, agents: Any
) -> None:
    stack = fleet[0]
    gateway = next(child for child in stack._children if child.name == "gateway")

    def pause() -> None:
        wait_until(lambda: len(agents.starts()) == 3)
        gateway.process.send_signal(signal.SIGSTOP)
        try:
            agents.release()
            wait_until(lambda: platform.requests().get("read_file", 0) >= 1, what="the agents' end")
        finally:
            gateway.process.send_signal(signal.SIGCONT)

    results = runs(*requests(3, run_command=agents.patient(calls=0)), meanwhile=pause)
    assert [(r.stop_condition, len(r.trajectory)) for r in results] == [(StopCondition.COMPLETED, 1)] * 3


def test_a_restarted_gateway_costs_an_attempt_and_no_rollout(
    fleet: tuple[LocalStack, PrimeEmulator], runs: Runs, agents: Any
) -> None:
    stack, _ = fleet

    def restart() -> None:
        wait_until(lambda: len(agents.starts()) == 3)
        gateway = next(child for child in stack._children if child.name == "gateway")
        command, environment = gateway.process.args, dict(os.environ)
        environment |= {"ROLLOUTS_GATEWAY_CONTROL_KEY": stack.control_key, "ROLLOUTS_GATEWAY_UPSTREAM": stack.upstream}
        gateway.process.kill()
        gateway.process.wait()
        gateway.process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)  # type: ignore[arg-type]
        agents.release()

    wanted = requests(3, run_command=agents.patient(patience=1), max_attempts=10)
    results = runs(*wanted, meanwhile=restart)
    assert [(r.stop_condition, len(r.trajectory)) for r in results] == [(StopCondition.COMPLETED, 2)] * 3
    assert all(r.attempt > 1 for r in results), "one more each time that it was not there yet"
    assert {a.error.kind for r in results for a in r.failed_attempts} <= {ErrorKind.GATEWAY, ErrorKind.MODEL}


@pytest.mark.parametrize("code", [7, 127])
def test_an_agent_that_exits_without_a_turn_is_an_error_and_keeps_the_prompt(runs: Runs, code: int) -> None:
    (result,) = runs(request(run_command=f"exit {code}"))
    assert result.error is not None
    assert (result.error.kind, result.agent_exit_code) == (ErrorKind.AGENT, code)
    assert result.prompt == [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize("fault", [{"delay": 2.0}, {"hang": "after"}])
def test_rollouts_that_are_cancelled_while_their_sandboxes_are_created_leave_nothing(
    fleet: tuple[LocalStack, PrimeEmulator], platform: Platform, fault: dict[str, Any]
) -> None:
    stack = fleet[0]
    platform.fault("create_sandbox", times=None, **fault)

    async def scenario() -> list[RolloutResult]:
        async with Producer(ProducerSettings(redis_url=stack.redis_url)) as producer, asyncio.timeout(100):
            handles = [await producer.submit(r) for r in requests(20, run_command="true")]
            await asyncio.to_thread(wait_until, lambda: platform.requests().get("create_sandbox", 0) >= 20)
            for handle in handles:
                await handle.cancel()
            return [await handle.result() for handle in handles]

    results = asyncio.run(scenario())
    assert {r.stop_condition for r in results} == {StopCondition.CANCELLED}
    platform.clear_faults()
    wait_until(lambda: not platform.leaked()["sandboxes"], what="every sandbox to be deleted")


@pytest.mark.parametrize("drop", ["before", "after"])
def test_a_creation_whose_answer_is_lost_makes_one_sandbox(platform: Platform, runs: Runs, drop: Any) -> None:
    platform.fault("create_sandbox", drop=drop, times=1)
    (result,) = runs(request(run_command="true"))
    assert (result.stop_condition, result.attempt) == (StopCondition.COMPLETED, 1)
    assert len(platform.sandboxes()) == 1


@pytest.mark.parametrize(("status", "words"), [(402, "billing"), (422, "422")])
def test_what_no_second_attempt_can_change_is_not_tried_again(
    platform: Platform, runs: Runs, status: int, words: str
) -> None:
    platform.fault("create_sandbox", status=status, times=None)
    (result,) = runs(request(run_command="true"))
    assert result.error is not None
    assert (result.error.kind, result.error.retryable, result.attempt) == (ErrorKind.SANDBOX, False, 1)
    assert words in f"{result.error.message} {result.error.detail}"
    assert platform.requests()["create_sandbox"] == 1


@pytest.mark.parametrize(
    "fault", [{"status": 500}, {"status": 503}, {"status": 429, "retry_after": 0.2}, {"drop": "after"}]
)
def test_one_poll_that_fails_costs_no_rollout(
    platform: Platform, runs: Runs, agents: Any, fault: dict[str, Any]
) -> None:
    platform.fault("job_statuses", times=2, **fault)

    def release() -> None:
        wait_until(lambda: len(agents.starts()) == 5)
        wait_until(lambda: platform.requests().get("job_statuses", 0) >= 3, what="a poll after the failed ones")
        agents.release()

    results = runs(*requests(5, run_command=agents.command()), meanwhile=release)
    assert [(r.stop_condition, r.attempt) for r in results] == [(StopCondition.COMPLETED, 1)] * 5


def test_everything_that_a_worker_makes_carries_its_labels_and_a_lifetime(platform: Platform, runs: Runs) -> None:
    """A killed worker cannot clean up; what it leaves behind is found by label, and the platform ends it in time."""
    deadlines = dict.fromkeys(("register", "tunnel", "sandbox", "setup", "agent", "trajectory", "score", "cleanup"), 60)
    (result,) = runs(request(run_command="true", labels=["mine"], deadlines=deadlines))
    (sandbox,) = platform.sandboxes()
    assert {"mine", "fleet:fleet", f"rollout:{result.rollout_id}", "attempt:1"} <= set(sandbox["labels"])
    assert f"worker:{result.worker}" in sandbox["labels"]
    assert 8 <= sandbox["timeout_minutes"] <= 12
    assert {"fleet:fleet", f"worker:{result.worker}"} <= set(platform.tunnel()["labels"])


# -- what else the platform can do -------------------------------------------------------------------------------------


def test_a_sandbox_that_runs_out_of_memory_names_it_and_keeps_the_turns(
    platform: Platform, runs: Runs, agents: Any
) -> None:
    def kill() -> None:
        wait_until(lambda: len(agents.starts()) == 1)
        platform.end_sandbox(error_type="OOM_KILLED", message="out of memory")

    (result,) = runs(request(run_command=agents.patient(), max_attempts=1), meanwhile=kill)
    assert result.error is not None
    assert (result.error.kind, result.error.phase) == (ErrorKind.SANDBOX, Phase.AGENT)
    assert "memory" in result.error.message
    assert len(result.trajectory) == 1


def test_a_sandbox_that_dies_mid_run_is_replaced(platform: Platform, runs: Runs, agents: Any) -> None:
    def kill() -> None:
        wait_until(lambda: len(agents.starts()) == 1)
        platform.end_sandbox(error_type=None, message="the host went away")
        wait_until(lambda: len(agents.starts()) == 2, what="the second attempt")
        agents.release()

    (result,) = runs(request(run_command=agents.patient()), meanwhile=kill)
    assert (result.stop_condition, result.attempt, len(result.trajectory)) == (StopCondition.COMPLETED, 2, 2)
    (failed,) = result.failed_attempts
    assert (failed.error.kind, failed.turns) == (ErrorKind.SANDBOX, 1)


def test_an_image_that_cannot_be_pulled_names_it(platform: Platform, runs: Runs) -> None:
    platform.image("no/such:image", pull_fails=True)
    (result,) = runs(request(run_command="true", image="no/such:image"))
    assert result.error is not None
    assert (result.error.kind, result.error.phase, result.attempt) == (ErrorKind.SANDBOX, Phase.SANDBOX, 1)
    assert "no/such:image" in result.error.message


def test_the_request_decides_image_resources_team_and_options(platform: Platform, runs: Runs) -> None:
    wanted = request(
        image="my/image:1",
        run_command="echo $GREETING",
        start_command="sleep infinity",
        env={"GREETING": "hello"},
        resources={"cpu_cores": 2, "memory_gb": 3, "disk_gb": 7, "gpu_count": 1, "gpu_type": "H100_80GB"},
        team_id="team-1",
        advanced={"shape": "round"},
    )
    (result,) = runs(wanted)
    assert result.agent_stdout == "hello\n"
    (sandbox,) = platform.sandboxes()
    assert sandbox["docker_image"] == "my/image:1"
    assert sandbox["team_id"] == "team-1"
    assert sandbox["advanced_configs"] == {"shape": "round"}
    assert sandbox["environment_vars"]["GREETING"] == "hello"
    assert "OPENAI_API_KEY" not in sandbox["environment_vars"], "it is a secret"
    assert "OPENAI_API_KEY" in sandbox["secrets"]
    shown = {name: sandbox["resources"][name] for name in ("cpu_cores", "memory_gb", "disk_size_gb", "gpu_count")}
    assert shown == {"cpu_cores": 2, "memory_gb": 3, "disk_size_gb": 7, "gpu_count": 1}


@pytest.mark.parametrize("code", [0, 1])
@pytest.mark.parametrize("how", ["kill_frpc", "delete_tunnel"])
def test_an_agent_that_gives_up_when_its_tunnel_fails_has_not_completed(
    platform: Platform, runs: Runs, agents: Any, how: str, code: int
) -> None:
    """It does not try its failed call again, and ends before anybody hears of the outage, as if all were well.

    Its call fails however late it comes. A second attempt makes none before that has happened to all first ones.
    """

    def break_it() -> None:
        wait_until(lambda: len(agents.starts()) == 5)
        platform.fault("forwarded", drop="before", times=5)
        getattr(platform, how)()
        agents.release()

    gave_up = agents.directory / "gave-up"
    second = f"case $OPENAI_BASE_URL in *~2) until [ $(wc -l < {gave_up}) -ge 5 ]; do sleep 0.05; done;; esac"
    command = f"{second}; ({agents.patient(patience=0)}) || {{ echo x >> {gave_up}; exit {code}; }}"
    results = runs(*requests(5, run_command=command), meanwhile=break_it)

    assert {(r.stop_condition, r.attempt, len(r.trajectory)) for r in results} == {(StopCondition.COMPLETED, 2, 2)}
    failed = [attempt for r in results for attempt in r.failed_attempts]
    assert {(a.error.kind, a.turns) for a in failed} == {(ErrorKind.TUNNEL, 1)}


def test_an_agent_that_had_ended_before_its_tunnel_failed_has_completed(
    platform: Platform, runs: Runs, agents: Any
) -> None:
    (result,) = runs(request(run_command=agents.patient(calls=0, patience=0)), meanwhile=agents.release)
    platform.kill_frpc()
    assert (result.stop_condition, result.attempt) == (StopCondition.COMPLETED, 1)


def test_an_account_that_is_refused_for_a_while_costs_no_rollout(tmp_path: Path) -> None:
    """The worker stops taking rollouts, tries with one from time to time, and none is charged an attempt."""
    settings = {"ROLLOUTS_BREAKER_PAUSE": "0.5", "ROLLOUTS_BREAKER_LONGEST_PAUSE": "1"}
    with fleet_on("prime", tmp_path, concurrency=10, settings=settings) as (stack, emulator):
        assert emulator is not None
        emulator.fault("create_sandbox", status=402, times=None)
        log = stack.logs["worker1"]

        def pay() -> None:
            wait_until(lambda: "trying one rollout" in log.read_text(), what="a probe")
            emulator.clear_faults()

        results = Runs(stack)(*requests(30, run_command="true", max_attempts=1), meanwhile=pay)
        asked = emulator.requests()["create_sandbox"]

    assert {r.stop_condition for r in results} == {StopCondition.COMPLETED}
    assert len(results) == 30
    assert asked < 80, "a refused account is not asked again and again"
