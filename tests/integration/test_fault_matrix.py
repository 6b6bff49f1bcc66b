"""What rollouts make of every fault that they can meet on the platform; then 300 of them at once.

One line of `WAVE` is one rollout whose first sandbox meets one fault. All of them run at the same time on one fleet,
each with its fault aimed at its own sandbox, so that a second attempt meets none. How often each endpoint is asked for
each fault is counted where requests can be told apart: `tests/workers/sandboxes/test_fault_matrix.py`, and for tunnels
`tests/workers/tunnels/test_fault_matrix.py`. Here "asked again" shows in the attempts: a fault prevents its request, so
a rollout that completes in its first attempt has asked again, and one that needed a second one has not.

Left out, with the reason:

- a launch, a look at a job, a read of output and a deletion that hang: they end after the provider's own 15 to 100 s,
  for which a worker process has no setting; the provider's tests shorten them;
- 402 but for creations: the platform wants payment for what it is to do;
- ``delay`` is in one row of each kind of request only: it is the fault that nobody notices;
- a look at the state of a sandbox, its first command and its token: they come before a rollout has a sandbox to aim at,
  one row of each in `CREATION` shows that they end inside of the creation, the provider's tests have them all;
- tunnels: one start here; what else can go wrong with them is tested where the pool's times can be shortened.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import redis
from emulators.prime import PrimeEmulator
from fleets import fleet_on
from support import wait_until

from producer import Producer, RolloutRequest, RolloutResult, broker
from producer.contract import ErrorKind, Phase, StopCondition
from producer.settings import ProducerSettings
from workers.local import LocalStack

pytestmark = pytest.mark.xdist_group("flow-matrix")

Fleet = tuple[LocalStack, PrimeEmulator]

AT_ONCE = 300

#: Waits until the test has aimed at its sandbox, then uses each kind of request that a hook has.
HOOKS = """
import asyncio
from pathlib import Path
from workers.environment import Environment

class Matrix(Environment):
    async def setup(self, rollout):
        gate = Path(rollout.request.environment_args["directory"], rollout.sandbox.id)
        gate.touch()
        while gate.exists():
            await asyncio.sleep(0.01)
        await rollout.sandbox.upload_bytes("/tmp/in", b"x")
        assert (await rollout.sandbox.execute_command("cat /tmp/in", timeout=3)).stdout == "x"

    async def score(self, rollout):
        assert await rollout.sandbox.download("/tmp/in") == b"x"
        return float((await rollout.sandbox.execute_command("echo 1", timeout=3)).stdout)
"""

S500: dict[str, Any] = {"status": 500}
S503: dict[str, Any] = {"status": 503}
S429: dict[str, Any] = {"status": 429, "retry_after": 0.2}
S401: dict[str, Any] = {"status": 401}
S402: dict[str, Any] = {"status": 402}
DELAY: dict[str, Any] = {"delay": 0.3}
HANG: dict[str, Any] = {"hang": True}
BEFORE: dict[str, Any] = {"drop": "before"}
AFTER: dict[str, Any] = {"drop": "after"}
EVER: dict[str, Any] = {"times": None}


@dataclass(frozen=True)
class Site:
    """A request of a rollout: its endpoint, and how many of the sandbox's own come before it once it is set up."""

    endpoint: str
    skip: int = 0


UPLOAD = Site("upload")
SETUP_COMMAND = Site("command")
LAUNCH = Site("command", skip=1)
POLL = Site("job_statuses")
OUTPUT = Site("read_file")
SIZE = Site("command", skip=2)  # a download asks for the size first
DOWNLOAD = Site("download")
SCORE_COMMAND = Site("command", skip=3)
DELETE = Site("delete_sandbox")


@dataclass(frozen=True)
class Ends:
    """How a rollout ends: its attempts; and the error of its first attempt, which is its only one if that is final."""

    attempts: int
    kind: ErrorKind | None = None
    phase: Phase | None = None
    final: bool = False


FIRST = Ends(1)


def second(phase: Phase) -> Ends:
    """Completed in a second attempt, on another sandbox."""
    return Ends(2, ErrorKind.SANDBOX, phase)


def fails(phase: Phase, kind: ErrorKind = ErrorKind.SANDBOX) -> Ends:
    """No second attempt is made."""
    return Ends(1, kind, phase, final=True)


#: name, where, what, how it ends
WAVE: list[tuple[str, Site, dict[str, Any], Ends]] = [
    ("upload 500", UPLOAD, S500, FIRST),
    ("upload 503", UPLOAD, S503, FIRST),
    ("upload 429", UPLOAD, S429, FIRST),
    ("upload 401", UPLOAD, S401, FIRST),
    ("upload 500 for ever", UPLOAD, S500 | EVER, second(Phase.SETUP)),
    ("upload 401 for ever", UPLOAD, S401 | EVER, second(Phase.SETUP)),  # its token is refused, not the account
    ("upload delay", UPLOAD, DELAY, FIRST),
    ("upload hang", UPLOAD, HANG, fails(Phase.SETUP, ErrorKind.ENVIRONMENT)),
    ("upload drop before", UPLOAD, BEFORE, FIRST),
    ("upload drop after", UPLOAD, AFTER, FIRST),
    ("setup command 500", SETUP_COMMAND, S500, second(Phase.SETUP)),
    ("setup command 503", SETUP_COMMAND, S503, second(Phase.SETUP)),
    ("setup command 429", SETUP_COMMAND, S429, second(Phase.SETUP)),
    ("setup command 401", SETUP_COMMAND, S401, FIRST),
    ("setup command hang", SETUP_COMMAND, HANG, second(Phase.SETUP)),
    ("setup command drop before", SETUP_COMMAND, BEFORE, second(Phase.SETUP)),
    ("setup command drop after", SETUP_COMMAND, AFTER, second(Phase.SETUP)),
    ("launch 500", LAUNCH, S500, second(Phase.AGENT)),
    ("launch 503", LAUNCH, S503, second(Phase.AGENT)),
    ("launch 429", LAUNCH, S429, second(Phase.AGENT)),
    ("launch 401", LAUNCH, S401, FIRST),
    ("launch delay", LAUNCH, DELAY, FIRST),
    ("launch drop before", LAUNCH, BEFORE, second(Phase.AGENT)),
    ("launch drop after", LAUNCH, AFTER, second(Phase.AGENT)),
    ("poll 500", POLL, S500, FIRST),
    ("poll 503", POLL, S503, FIRST),
    ("poll 429", POLL, S429, FIRST),
    ("poll 401", POLL, S401, FIRST),
    ("poll delay", POLL, DELAY, FIRST),
    ("poll drop before", POLL, BEFORE, FIRST),
    ("poll drop after", POLL, AFTER, FIRST),
    ("poll NOT_FOUND", POLL, {"code": "NOT_FOUND"}, FIRST),
    ("output 500", OUTPUT, S500, FIRST),
    ("output 503", OUTPUT, S503, FIRST),
    ("output 429", OUTPUT, S429, FIRST),
    ("output 401", OUTPUT, S401, FIRST),
    ("output delay", OUTPUT, DELAY, FIRST),
    ("output drop before", OUTPUT, BEFORE, FIRST),
    ("output drop after", OUTPUT, AFTER, FIRST),
    ("size 503", SIZE, S503, second(Phase.SCORE)),
    ("download 500", DOWNLOAD, S500, FIRST),
    ("download 503", DOWNLOAD, S503, FIRST),
    ("download 429", DOWNLOAD, S429, FIRST),
    ("download 401", DOWNLOAD, S401, FIRST),
    ("download 401 for ever", DOWNLOAD, S401 | EVER, second(Phase.SCORE)),
    ("download hang", DOWNLOAD, HANG, fails(Phase.SCORE, ErrorKind.ENVIRONMENT)),
    ("download drop before", DOWNLOAD, BEFORE, FIRST),
    ("download drop after", DOWNLOAD, AFTER, FIRST),
    ("score command 500", SCORE_COMMAND, S500, second(Phase.SCORE)),
    ("score command hang", SCORE_COMMAND, HANG, second(Phase.SCORE)),
    ("score command drop after", SCORE_COMMAND, AFTER, second(Phase.SCORE)),
    ("delete 500", DELETE, S500, FIRST),
    ("delete 503", DELETE, S503, FIRST),
    ("delete 429", DELETE, S429, FIRST),
    ("delete 401", DELETE, S401, fails(Phase.CLEANUP)),
    ("delete 402", DELETE, S402, fails(Phase.CLEANUP)),
    ("delete delay", DELETE, DELAY, FIRST),
    ("delete drop before", DELETE, BEFORE, FIRST),
    ("delete drop after", DELETE, AFTER, FIRST),
]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    code = tmp_path_factory.mktemp("hooks")
    (code / "matrix_hooks.py").write_text(HOOKS)
    settings = {
        "PYTHONPATH": os.pathsep.join([str(code), os.environ.get("PYTHONPATH", "")]),
        "ROLLOUTS_SANDBOX_CREATES_PER_MINUTE": "1000000",
        "ROLLOUTS_TUNNEL_CHECK_INTERVAL": "1",
        "ROLLOUTS_ORPHAN_INTERVAL": "1",
        # Faults come thick here; the breaker, which has tests of its own, would have everybody wait for each.
        "ROLLOUTS_BREAKER_FAILURES": "1000",
        "ROLLOUTS_BREAKER_PAUSE": "0.2",
        "ROLLOUTS_INFRASTRUCTURE_RETRIES": "1",
    }
    environments = {"matrix": "matrix_hooks:Matrix"}
    directory = tmp_path_factory.mktemp("matrix")
    with fleet_on("prime", directory, concurrency=AT_ONCE, settings=settings, environments=environments) as found:
        stack, emulator = found
        assert emulator is not None
        yield stack, emulator


@pytest.fixture
def emulator(fleet: Fleet) -> Iterator[PrimeEmulator]:
    """The platform; when the test is over, nothing of it is left but the worker's tunnel."""
    emulator = fleet[1]
    yield emulator
    emulator.clear_faults()
    wait_until(lambda: not emulator.leaked()["sandboxes"], what="the end of all sandboxes")
    wait_until(lambda: len(emulator.leaked()["tunnels"]) <= 1, what="one tunnel at most")
    assert emulator.refused() == []


def request(name: str = "one", **fields: Any) -> RolloutRequest:
    return RolloutRequest.parse(
        {"model": "stand-in", "prompt": "hi", "example_id": name, "run_command": "true"} | fields
    )


def run(fleet: Fleet, *wanted: RolloutRequest, meanwhile: Any = None) -> dict[str, RolloutResult]:
    """Run rollouts to their end; returns their results by example."""

    async def scenario() -> dict[str, RolloutResult]:
        async with Producer(ProducerSettings(redis_url=fleet[0].redis_url)) as producer, asyncio.timeout(100):
            batch = await producer.submit_many(wanted)
            doing = asyncio.create_task(meanwhile()) if meanwhile else None
            results = {str(result.example_id): result async for result in batch}
            if doing and doing.done():
                doing.result()  # raises what it found wrong
            elif doing:
                doing.cancel()
            return results

    return asyncio.run(scenario())


def ending(result: RolloutResult) -> Ends:
    """Return how a rollout has ended, for comparison."""
    failed = result.failed_attempts[0].error if result.failed_attempts else result.error
    completed = result.stop_condition is StopCondition.COMPLETED
    assert completed is (result.error is None)
    return Ends(result.attempt, failed.kind if failed else None, failed.phase if failed else None, final=not completed)


# -- 300 at once: first, so that they want a tunnel that nobody has started --------------------------------------------


def test_300_rollouts_at_once(fleet: Fleet, emulator: PrimeEmulator) -> None:
    stack = fleet[0]
    before = Counter(emulator.requests())
    results = run(fleet, *(request(str(n)) for n in range(AT_ONCE)))

    assert len(results) == AT_ONCE
    assert {(r.stop_condition, r.attempt) for r in results.values()} == {(StopCondition.COMPLETED, 1)}
    asked = Counter(emulator.requests()) - before
    polls = asked["job_statuses"]
    assert asked.total() / AT_ONCE <= 9 + polls / 50
    assert asked["create_tunnel"] <= 1
    wait_until(lambda: not emulator.leaked()["sandboxes"], what="the end of all sandboxes")
    client = redis.Redis.from_url(stack.redis_url)
    (key,) = client.keys(broker.worker_key("*"))
    wait_until(lambda: json.loads(client.get(key))["running"] == 0, what="the worker's report")  # type: ignore[arg-type]
    lag = json.loads(client.get(key))["loop_lag_ms"]  # type: ignore[arg-type]
    assert 0 < lag["p99"] < 6000, "no stall; the benchmark holds the 100 ms, on a machine of its own"


# -- one fault for each of many rollouts at once -----------------------------------------------------------------------


class Aimed:
    """Waits for each sandbox's hook, aims the rollout's fault at its first one, and lets the hook go on."""

    def __init__(self, emulator: PrimeEmulator, directory: Path) -> None:
        self.emulator = emulator
        self.directory = directory
        self.rows = {f"rollout:{self.request(name, fault).rollout_id}": (site, fault) for name, site, fault, _ in WAVE}
        self.sandboxes: dict[str, int] = {}

    def request(self, name: str, fault: dict[str, Any]) -> RolloutRequest:
        short = {"setup": 8, "score": 8, "cleanup": 8} if fault.get("hang") else {}
        return request(
            name,
            rollout_id=f"matrix-{name.replace(' ', '-')}",
            environment="matrix",
            environment_args={"directory": str(self.directory)},
            deadlines=short,
        )

    async def aim(self) -> None:
        while True:
            if waiting := [gate.name for gate in self.directory.iterdir()]:
                labels = {sandbox["id"]: sandbox["labels"] for sandbox in self.emulator.sandboxes()}
                for sandbox_id in waiting:
                    self._let_go(sandbox_id, labels[sandbox_id])
            await asyncio.sleep(0.01)

    def _let_go(self, sandbox_id: str, labels: list[str]) -> None:
        (label,) = self.rows.keys() & set(labels)
        self.sandboxes[label] = self.sandboxes.get(label, 0) + 1
        site, fault = self.rows[label]
        if "attempt:1" in labels:
            self.emulator.fault(site.endpoint, sandbox_id=sandbox_id, skip=site.skip, **fault)
        (self.directory / sandbox_id).unlink()


@pytest.fixture(scope="module")
def wave(fleet: Fleet, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[RolloutResult, int]]:
    """Run the whole of `WAVE`; returns for each row the result, and the number of sandboxes that were made for it."""
    aimed = Aimed(fleet[1], tmp_path_factory.mktemp("gates"))
    results = run(fleet, *(aimed.request(name, fault) for name, _, fault, _ in WAVE), meanwhile=aimed.aim)
    wait_until(lambda: not fleet[1].leaked()["sandboxes"], what="the sweep of what could not be deleted")
    fleet[1].clear_faults()
    return {name: (r, aimed.sandboxes[f"rollout:{r.rollout_id}"]) for name, r in results.items()}


@pytest.mark.parametrize(("name", "expected"), [(name, ends) for name, _, _, ends in WAVE], ids=[r[0] for r in WAVE])
def test_a_fault(
    wave: dict[str, tuple[RolloutResult, int]], emulator: PrimeEmulator, name: str, expected: Ends
) -> None:
    result, sandboxes = wave[name]
    assert ending(result) == expected, result.error or result.failed_attempts
    assert sandboxes == expected.attempts, "one for each attempt"
    if not expected.final or expected.phase is Phase.CLEANUP:
        assert result.reward == 1.0


# -- faults before there is a sandbox to aim at, one after the other ---------------------------------------------------

#: endpoint, what, how it ends, how often the endpoint was asked at least
CREATION: list[tuple[str, dict[str, Any], Ends, int]] = [
    ("create_sandbox", S500, FIRST, 2),
    ("create_sandbox", S429, FIRST, 2),
    ("create_sandbox", S401, second(Phase.SANDBOX), 2),  # the account may be put right, and is tried once more
    ("create_sandbox", S402 | EVER, Ends(2, ErrorKind.SANDBOX, Phase.SANDBOX, final=True), 2),
    ("create_sandbox", AFTER, FIRST, 2),
    ("sandbox_statuses", S503, FIRST, 2),
    ("command", S503, FIRST, 3),  # reached at the second try, and launched
]


@pytest.mark.parametrize(("endpoint", "fault", "expected", "asked"), CREATION, ids=[f"{r[0]} {r[1]}" for r in CREATION])
def test_a_fault_of_a_creation(
    fleet: Fleet, emulator: PrimeEmulator, endpoint: str, fault: dict[str, Any], expected: Ends, asked: int
) -> None:
    before, made = emulator.requests(), len(emulator.sandboxes())
    emulator.fault(endpoint, **fault)
    result = run(fleet, request())["one"]
    assert ending(result) == expected
    assert emulator.requests()[endpoint] - before.get(endpoint, 0) == asked
    assert len(emulator.sandboxes()) - made == (0 if expected.final else 1)


def test_creations_that_hang_beyond_the_deadline_are_given_up_and_cleared_up(
    fleet: Fleet, emulator: PrimeEmulator
) -> None:
    """One that never happens hangs for the provider's minute; the worker would wait for it when it ends."""
    emulator.fault("create_sandbox", status=503, delay=5.5)
    emulator.fault("create_sandbox", hang="after")
    results = run(fleet, *(request(name, deadlines={"sandbox": 4.5}) for name in ("slow refusal", "lost answer")))
    for result in results.values():
        assert ending(result) == second(Phase.SANDBOX)
        assert "deadline of 4.5" in result.failed_attempts[0].error.message


def test_a_first_build_of_an_image_that_takes_longer_than_the_deadline(fleet: Fleet, emulator: PrimeEmulator) -> None:
    emulator.image("slow/build:1", build_seconds=60)
    made = len(emulator.sandboxes())
    result = run(fleet, request(image="slow/build:1", deadlines={"sandbox": 2.5}, max_attempts=1))["one"]
    assert result.error is not None
    assert (result.error.kind, result.error.phase, result.attempt) == (ErrorKind.SANDBOX, Phase.SANDBOX, 2)
    assert "deadline of 2.5" in result.error.message
    assert len(emulator.sandboxes()) - made == 2


def test_an_ambiguous_launch_discards_the_sandbox_and_its_agent_does_not_go_on(
    fleet: Fleet, emulator: PrimeEmulator, agents: Any
) -> None:
    """The answer is lost, the agent runs: it is gone with its sandbox before the second one is asked for anything."""
    before = len(emulator.sandboxes())
    emulator.fault("command", drop="after", skip=1)

    def seconds() -> list[str]:
        return [url for url in agents.starts() if url.endswith("~2")]

    async def release() -> None:
        await asyncio.to_thread(wait_until, seconds, what="the second attempt's agent")
        deleted = [sandbox["deleted"] for sandbox in emulator.sandboxes()[before:]]
        agents.release()
        assert deleted == [True, False]

    result = run(fleet, request(run_command=agents.command()), meanwhile=release)["one"]
    assert ending(result) == second(Phase.AGENT)
    assert len(seconds()) == 1
    assert len(agents.starts()) <= 2, "the first one may have been ended before it said so"
    assert len(emulator.sandboxes()) - before == 2


def test_a_sandbox_token_that_expires_while_the_agent_runs(fleet: Fleet, emulator: PrimeEmulator, agents: Any) -> None:
    before = emulator.requests()

    async def expire() -> None:
        await asyncio.to_thread(wait_until, lambda: len(agents.starts()) == 1)
        emulator.fault("read_file", status=401)  # as an expired token is answered
        agents.release()

    result = run(fleet, request(run_command=f"{agents.command()}; echo said"), meanwhile=expire)["one"]
    assert ending(result) == FIRST
    assert result.agent_stdout == "said\n"
    assert emulator.requests()["sandbox_auth"] > before.get("sandbox_auth", 0)


# -- the way to the model, and tunnels ---------------------------------------------------------------------------------


def test_model_calls_that_fail_on_their_way_are_made_again_by_an_agent_with_patience(
    fleet: Fleet, emulator: PrimeEmulator, agents: Any
) -> None:
    before = emulator.requests().get("forwarded", 0)
    faults = [S500, S503, S429, S401, DELAY, BEFORE, AFTER]
    for fault in faults:
        emulator.fault("forwarded", **fault)
    agents.release()
    results = run(fleet, *(request(str(n), run_command=agents.patient(calls=0)) for n in range(len(faults))))
    assert {(r.stop_condition, r.attempt) for r in results.values()} == {(StopCondition.COMPLETED, 1)}
    turns = [len(result.trajectory) for result in results.values()]
    assert sum(turns) == len(faults) + 1, "the gateway has recorded the call whose answer was lost"
    assert emulator.requests()["forwarded"] - before == 2 * len(faults) - 1, "all but the slow one twice"


@pytest.mark.parametrize("fault", [S503, BEFORE], ids=str)
def test_an_agent_without_patience_fails_with_its_first_call(
    fleet: Fleet, emulator: PrimeEmulator, agents: Any, fault: dict[str, Any]
) -> None:
    """Nobody else has seen that call: to the fleet, the agent itself has failed."""
    emulator.fault("forwarded", **fault)
    result = run(fleet, request(run_command=agents.patient(calls=0, patience=0)))["one"]
    assert ending(result) == fails(Phase.AGENT, ErrorKind.AGENT)
    assert result.error is not None
    assert "gave up" in (result.error.detail or "")


def test_a_model_call_that_hangs_ends_with_the_agents_time(fleet: Fleet, emulator: PrimeEmulator, agents: Any) -> None:
    emulator.fault("forwarded", hang=True)
    result = run(fleet, request(run_command=agents.patient(), deadlines={"agent": 1}))["one"]
    assert (result.stop_condition, result.attempt, result.error) == (StopCondition.AGENT_TIMEOUT, 1, None)


def test_a_start_of_a_tunnel_that_fails_once_costs_no_attempt(fleet: Fleet, emulator: PrimeEmulator) -> None:
    before = emulator.requests().get("create_tunnel", 0)
    emulator.fault("create_tunnel", status=503)
    emulator.delete_tunnel()
    client = redis.Redis.from_url(fleet[0].redis_url)
    (key,) = client.keys(broker.worker_key("*"))

    def ended() -> bool:
        tunnels = json.loads(client.get(key))["tunnels"]  # type: ignore[arg-type]
        return not any(tunnel["alive"] for tunnel in tunnels)

    wait_until(ended, what="the end of the deleted tunnel")
    assert ending(run(fleet, request())["one"]) == FIRST
    assert emulator.requests()["create_tunnel"] - before == 2
