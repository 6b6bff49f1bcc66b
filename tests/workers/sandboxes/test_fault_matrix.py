"""Every fault of every endpoint that a sandbox needs: what becomes of it, how often it was asked for, nothing is left.

One line of `TABLE` is one fault at one *site*: a moment in the life of a sandbox at which one endpoint is asked. The
rows run on several platforms side by side, on each one after the other, so that each row's requests can be counted.
What a rollout makes of such errors is in `tests/integration/test_fault_matrix.py`.

A test holds that no fault of any endpoint is missing, but for those of `LEFT_OUT`. Faults for ever are left out where
the first one is already an error, and there is no second request for them to meet; the tunnels' endpoints have a table
of their own.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

import fault_rows
import pytest
from emulators.prime import PrimeEmulator
from emulators.prime.faults import ENDPOINTS
from fault_rows import Fails, Works, final, retryable

from workers.errors import SandboxError
from workers.sandboxes import polls, prime_client, prime_lifecycle, prime_output
from workers.sandboxes.base import CommandResult, Sandbox, SandboxSpec
from workers.sandboxes.prime import PrimeJob, PrimeSandboxes

pytestmark = pytest.mark.xdist_group("sandbox-matrix")

#: Platforms side by side. On the last ones a creation does not bring a token, which is asked for then.
LANES, TOKEN_LANES = 11, 1
#: More than once, as often as the time goes.
MANY = 0

FAULTS = fault_rows.FAULTS | {
    "405": {"status": 405},
    "NOT_FOUND": {"code": "NOT_FOUND"},
    "RUNTIME_ERROR": {"code": "RUNTIME_ERROR"},
    "FORBIDDEN": {"code": "FORBIDDEN"},
}

TABLE: list[tuple[str, str, Works | Fails]] = [
    # A creation: the money is spent here, so a lost answer is looked into, and a refusal is final.
    ("create", "500", Works(2)),
    ("create", "503", Works(2)),
    ("create", "429", Works(2)),
    ("create", "401", final(1, "PRIME_API_KEY")),
    ("create", "402", final(1, "billing")),
    ("create", "delay", Works(1)),
    ("create", "hang", Works(2)),
    ("create", "drop before", Works(2)),
    ("create", "drop after", Works(2)),
    ("create", "hang after", Works(2)),
    ("create", "500 for ever", retryable(2, "HTTP 500")),
    ("create", "429 for ever", retryable(3, "rate limit")),
    ("create", "hang for ever", retryable(2, "did not answer")),
    ("create", "drop after for ever", retryable(MANY, "Server disconnected")),
    ("create", "404", final(1, "HTTP 404")),
    # Looks at whether it runs: no look is a verdict, unless the platform gives one for that sandbox.
    ("state", "500", Works(2)),
    ("state", "503", Works(2)),
    ("state", "429", Works(2)),
    ("state", "401", Works(2)),
    ("state", "delay", Works(1)),
    ("state", "hang", Works(2)),
    ("state", "drop before", Works(2)),
    ("state", "404", Works(1)),
    ("state", "405", Works(1)),
    ("state", "NOT_FOUND", Works(2)),
    ("state", "NOT_FOUND for ever", retryable(MANY, "NOT_FOUND")),
    ("state", "RUNTIME_ERROR", retryable(1, "RUNTIME_ERROR")),
    ("state", "FORBIDDEN", retryable(1, "FORBIDDEN")),
    ("state", "500 for ever", retryable(MANY, "HTTP 500")),
    ("state", "429 for ever", retryable(MANY, "fewer requests")),
    ("state", "401 for ever", final(MANY, "PRIME_API_KEY")),
    # The same on a platform that has no batches of them.
    ("state, one by one", "500", Works(2)),
    ("state, one by one", "503", Works(2)),
    ("state, one by one", "429", Works(2)),
    ("state, one by one", "401", Works(2)),
    ("state, one by one", "delay", Works(1)),
    ("state, one by one", "hang", Works(2)),
    ("state, one by one", "drop before", Works(2)),
    ("state, one by one", "404", Works(2)),
    ("state, one by one", "500 for ever", retryable(MANY, "HTTP 500")),
    ("state, one by one", "429 for ever", retryable(MANY, "fewer requests")),
    ("state, one by one", "401 for ever", final(MANY, "PRIME_API_KEY")),
    # The first command in it.
    ("reach", "500", Works(2)),
    ("reach", "503", Works(2)),
    ("reach", "429", Works(2)),
    ("reach", "401", Works(2)),
    ("reach", "delay", Works(1)),
    ("reach", "hang", Works(2)),
    ("reach", "drop before", Works(2)),
    ("reach", "500 for ever", retryable(MANY, "(unknown)")),
    ("reach", "hang for ever", retryable(MANY, "cannot be reached")),
    ("reach", "401 for ever", retryable(MANY, "(unauthenticated)")),
    # The key to its gateway, where its creation did not bring one.
    ("token", "500", Works(2)),
    ("token", "503", Works(2)),
    ("token", "429", Works(2)),
    ("token", "401", final(1, "PRIME_API_KEY")),
    ("token", "402", final(1, "billing")),
    ("token", "404", Works(2)),
    ("token", "delay", Works(1)),
    ("token", "hang", Works(2)),
    ("token", "drop before", Works(2)),
    ("token", "drop after", Works(2)),
    ("token", "hang after", Works(2)),
    ("token", "500 for ever", retryable(MANY, "HTTP 500")),
    # What the sweep for orphans asks; it comes again by itself.
    ("find", "500", retryable(1, "HTTP 500")),
    ("find", "503", Works(2)),
    ("find", "429", retryable(1, "fewer requests")),
    ("find", "401", final(1, "PRIME_API_KEY")),
    ("find", "402", final(1, "billing")),
    ("find", "404", final(1, "HTTP 404")),
    ("find", "delay", Works(1)),
    ("find", "hang", retryable(1, "did not answer")),
    ("find", "drop before", Works(2)),
    # The agent: it may run when the answer is lost, so it is never launched twice in one sandbox.
    ("launch", "500", retryable(1, "(unknown)")),
    ("launch", "503", retryable(1, "(unavailable)")),
    ("launch", "429", retryable(1, "(unavailable)")),
    ("launch", "401", Works(2)),
    ("launch", "402", retryable(1, "(unknown)")),
    ("launch", "delay", Works(1)),
    ("launch", "hang", retryable(1, "did not answer")),
    ("launch", "drop before", retryable(1, "(unavailable)")),
    ("launch", "drop after", retryable(1, "(unavailable)")),
    ("launch", "hang after", retryable(1, "did not answer")),
    ("launch", "401 for ever", retryable(2, "(unauthenticated)")),
    # A hook's command: the same. A 429 cannot be told from a 503 here (both are "unavailable" to Connect).
    ("command", "500", retryable(1, "(unknown)")),
    ("command", "503", retryable(1, "(unavailable)")),
    ("command", "429", retryable(1, "(unavailable)")),
    ("command", "401", Works(2)),
    ("command", "402", retryable(1, "(unknown)")),
    ("command", "404", retryable(1, "(unimplemented)")),
    ("command", "delay", Works(1)),
    ("command", "hang", retryable(1, "exceeded its timeout")),
    ("command", "drop before", retryable(1, "(unavailable)")),
    ("command", "drop after", retryable(1, "(unavailable)")),
    ("command", "hang after", retryable(1, "exceeded its timeout")),
    # Files: asked for again where that does no harm.
    ("upload", "500", Works(2)),
    ("upload", "503", Works(2)),
    ("upload", "429", Works(2)),
    ("upload", "401", Works(2)),
    ("upload", "402", final(1, "billing")),
    ("upload", "delay", Works(1)),
    ("upload", "hang", retryable(1, "exceeded its timeout")),
    ("upload", "drop before", Works(2)),
    ("upload", "drop after", Works(2)),
    ("upload", "hang after", retryable(1, "exceeded its timeout")),
    ("upload", "500 for ever", retryable(4, "HTTP 500")),
    ("upload", "429 for ever", retryable(MANY, "wants us to wait")),
    ("upload", "401 for ever", retryable(2, "refused the token of sandbox")),
    ("upload", "404", retryable(1, "HTTP 404")),
    ("download", "500", Works(2)),
    ("download", "503", Works(2)),
    ("download", "429", Works(2)),
    ("download", "401", Works(2)),
    ("download", "402", final(1, "billing")),
    ("download", "404", retryable(1, "HTTP 404")),
    ("download", "delay", Works(1)),
    ("download", "hang", retryable(1, "exceeded its timeout")),
    ("download", "drop before", Works(2)),
    ("download", "drop after", Works(2)),
    ("download", "500 for ever", retryable(MANY, "did not answer")),
    ("download", "401 for ever", retryable(2, "refused the token of sandbox")),
    # Looks at whether the agent has ended.
    ("poll", "500", Works(2)),
    ("poll", "503", Works(2)),
    ("poll", "429", Works(2)),
    ("poll", "401", Works(2)),
    ("poll", "delay", Works(1)),
    ("poll", "hang", Works(2)),
    ("poll", "drop before", Works(2)),
    ("poll", "drop after", Works(2)),
    ("poll", "404", Works(1)),
    ("poll", "405", Works(1)),
    ("poll", "NOT_FOUND", Works(2)),
    ("poll", "NOT_FOUND for ever", retryable(MANY, "NOT_FOUND")),
    ("poll", "RUNTIME_ERROR", Works(2)),
    ("poll", "RUNTIME_ERROR for ever", retryable(MANY, "RUNTIME_ERROR")),
    ("poll", "FORBIDDEN", retryable(1, "FORBIDDEN")),
    ("poll", "500 for ever", retryable(MANY, "HTTP 500")),
    ("poll", "429 for ever", retryable(MANY, "fewer requests")),
    ("poll", "401 for ever", final(MANY, "PRIME_API_KEY")),
    # What it has printed: its record, else a command that prints the same, else the files.
    ("output", "500", Works(2)),
    ("output", "503", Works(2)),
    ("output", "429", Works(2)),
    ("output", "401", Works(2)),
    ("output", "404", Works(1)),
    ("output", "delay", Works(1)),
    ("output", "hang", Works(2)),
    ("output", "drop before", Works(2)),
    ("output", "drop after", Works(2)),
    ("output", "401 for ever", Works(MANY)),
    ("output, by a command", "500", Works(2)),
    ("output, by a command", "401", Works(2)),
    ("output, by a command", "delay", Works(1)),
    ("output, by a command", "hang", Works(2)),
    ("output, by a command", "drop after", Works(2)),
    ("output, by a command", "500 for ever", Works(2)),
    ("output, from files", "500", Works(4)),  # the record, the first file twice, the second one
    ("output, from files", "401", Works(4)),
    ("output, from files", "hang", Works(4)),
    ("output, from files", "drop before", Works(4)),
    # Why it died: without an answer, only that it did.
    ("death", "500", retryable(2, "the host went away")),
    ("death", "503", retryable(2, "the host went away")),
    ("death", "429", retryable(2, "the host went away")),
    ("death", "401", retryable(2, "the host went away")),
    ("death", "404", retryable(1, "is gone")),
    ("death", "delay", retryable(1, "the host went away")),
    ("death", "hang", retryable(2, "the host went away")),
    ("death", "drop before", retryable(2, "the host went away")),
    ("death", "500 for ever", retryable(MANY, "NOT_RUNNING")),
    # A deletion; one that fails is left to the sweep, and says so.
    ("delete", "500", Works(2)),
    ("delete", "503", Works(2)),
    ("delete", "429", Works(2)),
    ("delete", "401", final(1, "PRIME_API_KEY")),
    ("delete", "delay", Works(1)),
    ("delete", "hang", Works(2)),
    ("delete", "drop before", Works(2)),
    ("delete", "drop after", Works(2)),
    ("delete", "500 for ever", retryable(MANY, "HTTP 500")),
    ("delete", "429 for ever", retryable(MANY, "fewer requests")),
    ("delete", "hang for ever", retryable(MANY, "did not answer")),
    ("delete", "drop before for ever", retryable(MANY, "Server disconnected")),
    ("delete", "hang after", Works(2)),
]

FREE = "it costs nothing, and the platform wants payment for what it is to do"
LOOK = "it has no effect, so that the fault before it is the same for who asks"

#: What is in no row, by endpoint: the faults, and why.
LEFT_OUT: dict[str, dict[str, str]] = {
    "sandbox_statuses": {"402": FREE, "drop after": LOOK, "hang after": LOOK},
    "get_sandbox": {"402": FREE, "drop after": LOOK, "hang after": LOOK},
    "list_sandboxes": {"drop after": LOOK, "hang after": LOOK},
    "job_statuses": {"402": FREE, "hang after": LOOK},
    "error_context": {"402": FREE, "drop after": LOOK, "hang after": LOOK},
    "read_file": {"402": FREE, "hang after": LOOK},
    "download": {"hang after": LOOK},
    "delete_sandbox": {"402": FREE, "404": "that it is gone is what was wanted; where it is not, the sweep finds it"},
    "bulk_delete_sandboxes": dict.fromkeys(fault_rows.FAULTS, "it is never asked for"),
}


def test_no_fault_of_any_endpoint_is_missing() -> None:
    endpoints = {name for name in ENDPOINTS if not fault_rows.is_of_tunnels(name)}
    rows = {(SITES[site][0], fault) for site, fault, _ in TABLE}
    assert fault_rows.gaps(endpoints, rows, LEFT_OUT) == set()


# -- what is done at each site -----------------------------------------------------------------------------------------


class Lane:
    """One platform, its provider, and the row that is under way."""

    def __init__(self, emulator: PrimeEmulator) -> None:
        self.emulator = emulator
        self.sandboxes = PrimeSandboxes(creates_per_minute=60_000, poll_interval=0.05)
        self.endpoint = ""
        self.fault: dict[str, Any] = {}
        self.before: dict[str, int] = {}
        self.asked = 0
        self.stack = AsyncExitStack()

    def open(self) -> None:
        """Make the provider's client; the account is found in the environment."""
        here = self.sandboxes._here()
        for poller in (here.polls, here.lifecycle._births):
            poller._patience, poller._min_failures = 0.2, 3

    def arm(self) -> None:
        self.before = self.emulator.requests()
        self.emulator.fault(self.endpoint, **self.fault)

    async def sandbox(self) -> Sandbox:
        spec = SandboxSpec(name="matrix", image="python:3.11-slim", ttl=20)
        return await self.stack.enter_async_context(self.sandboxes.create(spec))

    async def ended_job(self, command: str) -> PrimeJob:
        """Start a job, and return when it has ended in its sandbox, before anybody has looked at it."""
        sandbox = await self.sandbox()
        job = await sandbox.start_job(command)
        assert isinstance(job, PrimeJob)
        await sandbox.execute_command(f"while [ ! -e /tmp/job_{job._key[1]}.exit ]; do sleep 0.01; done")
        return job

    async def run(self, site: str, fault: str) -> Works | Fails:
        self.endpoint, doing = SITES[site]
        name, _, _ = fault.partition(" for ever")
        self.fault = FAULTS[name] | ({"times": None} if fault != name else {})
        refused, created = len(self.emulator.refused()), len(self.emulator.sandboxes())
        self.stack = AsyncExitStack()
        outcome: Works | Fails
        try:
            async with asyncio.timeout(25):
                await doing(self)
                await self.stack.aclose()
        except SandboxError as error:
            outcome = Fails(self._count(), error.retryable, f"{error.message} | {error.detail}")
        else:
            outcome = Works(self._count())
        finally:
            self.emulator.clear_faults()
            await self.stack.aclose()
            left = self.emulator.leaked()["sandboxes"] if site == "delete" else []
            for sandbox_id in left:
                await self.sandboxes.delete(sandbox_id)
        assert bool(left) is (site == "delete" and isinstance(outcome, Fails)), "it says so when one is left"
        await self._tidy(refused, created)
        return outcome

    def _count(self) -> int:
        return self.emulator.requests().get(self.endpoint, 0) - self.before.get(self.endpoint, 0)

    async def _tidy(self, refused: int, created: int) -> None:
        """Nothing is left when what goes on in the background has ended, and nothing was asked that may not be.

        Waiting for its end keeps the looks of a clearing up out of the next row's count.
        """
        if clearing := self.sandboxes._here().lifecycle._background:
            _, unfinished = await asyncio.wait(set(clearing), timeout=15)
            assert not unfinished, "still clearing up"
        end = time.monotonic() + 10
        while left := self.emulator.leaked()["sandboxes"]:
            assert time.monotonic() < end, f"left: {left}"
            await asyncio.sleep(0.02)
        assert self.emulator.refused()[refused:] == []
        keys = [sandbox["idempotency_key"] for sandbox in self.emulator.sandboxes()[created:]]
        assert len(keys) == len(set(keys)) <= 1, "one row, one sandbox"


async def create(lane: Lane) -> None:
    lane.arm()
    await lane.sandbox()


async def one_by_one(lane: Lane) -> None:
    lane.emulator.fault("sandbox_statuses", status=405, times=None)
    lane.arm()
    await lane.sandbox()


async def find(lane: Lane) -> None:
    lane.arm()
    assert await lane.sandboxes.find(("nobody's",)) == []


async def launch(lane: Lane) -> None:
    sandbox = await lane.sandbox()
    lane.arm()
    await sandbox.start_job("sleep 60")


async def command(lane: Lane) -> None:
    sandbox = await lane.sandbox()
    lane.arm()
    assert await sandbox.execute_command("echo hi", timeout=2) == CommandResult(0, "hi\n", "")


async def upload(lane: Lane) -> None:
    sandbox = await lane.sandbox()
    lane.arm()
    await sandbox.upload_bytes("/tmp/x", b"x")


async def download(lane: Lane) -> None:
    sandbox = await lane.sandbox()
    await sandbox.upload_bytes("/tmp/x", b"x")
    lane.arm()
    assert await sandbox.download("/tmp/x") == b"x"


async def poll(lane: Lane) -> None:
    job = await lane.ended_job("exit 3")
    lane.arm()
    assert await job.ended() == 3


async def output(lane: Lane, *, lost: bool = False, no_commands: bool = False) -> None:
    job = await lane.ended_job("echo out; echo err >&2")
    await job.ended()
    if lost:
        await job._sandbox.execute_command("rm /tmp/.rollouts-*.out")
    if no_commands:
        lane.fault["skip"] = 1
        lane.emulator.fault("command", status=503, times=None)
    lane.arm()
    result = await job.wait()
    if result != CommandResult(0, "out\n", "err\n"):
        raise SandboxError(f"{result.stdout} {result.stderr}")


async def death(lane: Lane) -> None:
    sandbox = await lane.sandbox()
    job = await sandbox.start_job("sleep 60")
    lane.arm()
    lane.emulator.end_sandbox(sandbox.id, error_type=None, message="the host went away")
    await job.ended()


async def delete(lane: Lane) -> None:
    await lane.sandbox()
    lane.arm()


Site = tuple[str, Callable[[Lane], Awaitable[None]]]
SITES: dict[str, Site] = {
    "create": ("create_sandbox", create),
    "state": ("sandbox_statuses", create),
    "state, one by one": ("get_sandbox", one_by_one),
    "reach": ("command", create),
    "token": ("sandbox_auth", create),
    "find": ("list_sandboxes", find),
    "launch": ("command", launch),
    "command": ("command", command),
    "upload": ("upload", upload),
    "download": ("download", download),
    "poll": ("job_statuses", poll),
    "output": ("read_file", output),
    "output, by a command": ("command", partial(output, lost=True)),
    "output, from files": ("read_file", partial(output, lost=True, no_commands=True)),
    "death": ("error_context", death),
    "delete": ("delete_sandbox", delete),
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[tuple[str, str], Any]]:
    """Run all rows; returns for each what came of it, or the exception that it met."""
    emulators = [
        PrimeEmulator(tmp_path_factory.mktemp(f"prime{n}"), gateway_auth=n < LANES - TOKEN_LANES, start_seconds=0.05)
        for n in range(LANES)
    ]
    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(LANES) as threads:
        hurry(patch)
        try:
            list(threads.map(lambda emulator: emulator.start(), emulators))
            yield asyncio.run(run_all(emulators, patch))
        finally:
            list(threads.map(lambda emulator: emulator.stop(), emulators))


def hurry(patch: pytest.MonkeyPatch) -> None:
    """Have calls give up after two or three seconds, and tries follow each other soon.

    Not sooner: what is answered must be answered in time on a busy machine too, and a second time where it is to be
    asked twice.
    """
    for name in ("CREATE_LIMIT", "CONTEXT_LIMIT", "DELETE_LIMIT", "COMMAND_GRACE", "LAUNCH_LIMIT"):
        patch.setattr(prime_client, name, 2.5)
    patch.setattr(prime_client, "STATUS_LIMIT", 3.0)  # the SDK is given these two in whole seconds
    patch.setattr(prime_client, "TRANSFER_LIMIT", 5.95)
    patch.setattr(prime_lifecycle, "CREATE_TRIES", 2)
    patch.setattr(prime_lifecycle, "RATE_TRIES", 3)
    patch.setattr(prime_lifecycle, "LOOKS", (0.0, 0.1, 0.2))
    patch.setattr(prime_lifecycle, "REACH_LIMIT", 7.5)
    patch.setattr(prime_lifecycle, "DELETE_LIMIT", 6.0)
    patch.setattr(prime_output, "TRIES", 2)
    patch.setattr(polls, "BACKOFF", 0.1)
    execute = prime_client.Platform.execute

    async def executed(self: Any, *args: Any, timeout: float, **options: Any) -> Any:
        return await execute(self, *args, timeout=min(timeout, 2.0), **options)

    patch.setattr(prime_client.Platform, "execute", executed)
    for name in ("PRIME_TEAM_ID", "PRIME_BASE_URL", "PRIME_CONTEXT", "HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        patch.delenv(name, raising=False)


async def run_all(emulators: list[PrimeEmulator], patch: pytest.MonkeyPatch) -> dict[tuple[str, str], Any]:
    outcomes: dict[tuple[str, str], Any] = {}
    rows = iter([(site, fault) for site, fault, _ in TABLE if site != "token"])
    tokens = iter([(site, fault) for site, fault, _ in TABLE if site == "token"])

    async def work(lane: Lane, rows: Iterator[tuple[str, str]]) -> None:
        for site, fault in rows:
            try:
                outcomes[site, fault] = await lane.run(site, fault)
            except Exception as error:  # the row's own test shows it
                outcomes[site, fault] = error

    lanes = []
    for emulator in emulators:
        for name, value in emulator.environ.items():
            patch.setenv(name, value)
        lanes.append(Lane(emulator))
        lanes[-1].open()
    try:
        others, with_tokens = lanes[:-TOKEN_LANES], lanes[-TOKEN_LANES:]
        await asyncio.gather(*(work(lane, rows) for lane in others), *(work(lane, tokens) for lane in with_tokens))
    finally:
        await asyncio.gather(*(lane.sandboxes.aclose() for lane in lanes))
    return outcomes


@pytest.mark.parametrize(("site", "fault", "expected"), TABLE, ids=[f"{site}: {fault}" for site, fault, _ in TABLE])
def test_a_fault(outcomes: dict[tuple[str, str], Any], site: str, fault: str, expected: Works | Fails) -> None:
    outcome = outcomes[site, fault]
    if isinstance(outcome, Exception):
        raise outcome
    if expected == Works(MANY) and isinstance(outcome, Works):
        assert outcome.asked > 1
        return
    if isinstance(expected, Fails) and isinstance(outcome, Fails):
        assert expected.words in outcome.words
        assert outcome.asked > 1 or expected.asked != MANY
        asked = outcome.asked if expected.asked else MANY
        outcome = Fails(asked, outcome.again, expected.words)
    assert outcome == expected


# -- a state from which a sandbox may come back ------------------------------------------------------------------------


@pytest.fixture
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(polls, "BACKOFF", 0.05)


@pytest.mark.usefixtures("quick_looks")
@pytest.mark.parametrize("dies", [True, False])
def test_a_sandbox_that_is_paused_while_its_agent_runs(prime: Any, spec: Any, dies: bool) -> None:
    """It is no death, so the looks go on; for as long as anything may be unclear, then another attempt is worth it."""

    async def body(sandboxes: PrimeSandboxes) -> None:
        async with sandboxes.create(spec()) as sandbox:
            (here,) = sandboxes._on_loops.values()
            here.polls._patience, here.polls._min_failures = (30.0, 5) if dies else (0.2, 3)
            job = await sandbox.start_job("sleep 60")
            waiting = asyncio.create_task(job.ended())
            await asyncio.sleep(0)
            prime.emulator.end_sandbox(sandbox.id, status="PAUSED", error_type=None, message=None)
            await prime.until(lambda: prime.requests().get("error_context", 0) >= 2, "two looks at why")
            if dies:
                prime.emulator.end_sandbox(sandbox.id, status="ERROR", error_type=None, message="it did not wake up")
            with pytest.raises(SandboxError) as raised:
                await waiting
            assert raised.value.retryable
            assert ("it did not wake up" if dies else "NOT_RUNNING") in (raised.value.detail or "")

    prime.run(body)


def test_a_sandbox_that_is_paused_before_it_is_ready_is_waited_for_until_its_time_is_up(
    own_prime: Any, spec: Any
) -> None:
    prime = own_prime(start_seconds=30)

    async def body(sandboxes: PrimeSandboxes) -> None:
        creating = asyncio.create_task(sandboxes.create(spec(ttl=2.5)).__aenter__())
        await prime.until(prime.sandboxes, "the sandbox")
        prime.emulator.end_sandbox(status="PAUSED", error_type=None, message=None)
        with pytest.raises(SandboxError, match="time to live") as raised:
            await creating
        assert raised.value.retryable

    prime.run(body)
    assert prime.requests()["sandbox_statuses"] >= 2
