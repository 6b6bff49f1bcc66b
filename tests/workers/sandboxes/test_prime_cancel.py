"""Cancellation and deadlines at each stage: they come out as what they are, and leave nothing on the platform."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from workers.aio import deadline
from workers.errors import SandboxError
from workers.sandboxes import prime_client, prime_lifecycle
from workers.sandboxes.base import Sandbox, SandboxSpec
from workers.sandboxes.prime import PrimeSandboxes
from workers.sandboxes.prime_errors import platform_call

Spec = Callable[..., SandboxSpec]
Prime = Any  # conftest.Prime


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prime_client, "CREATE_LIMIT", 0.5)
    monkeypatch.setattr(prime_lifecycle, "LOOKS", (0.0, 0.05, 0.1))


async def cancelled_by_task(work: Awaitable[Any], reached: Callable[[], Awaitable[None]]) -> None:
    task = asyncio.ensure_future(work)
    await reached()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def cancelled_by_timeout(work: Awaitable[Any], reached: Callable[[], Awaitable[None]]) -> None:
    await _cancelled_by(asyncio.timeout(None), work, reached)


async def cancelled_by_deadline(work: Awaitable[Any], reached: Callable[[], Awaitable[None]]) -> None:
    await _cancelled_by(deadline(None), work, reached)


async def _cancelled_by(scope: Any, work: Awaitable[Any], reached: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with scope as clock:
            watching = asyncio.create_task(reached())
            watching.add_done_callback(lambda _: clock.reschedule(asyncio.get_running_loop().time()))
            await work

    with pytest.raises(TimeoutError):
        await bounded()


WAYS = pytest.mark.parametrize("cancelled", [cancelled_by_task, cancelled_by_timeout, cancelled_by_deadline])


def asked(prime: Prime, endpoint: str, times: int = 1) -> Callable[[], Awaitable[None]]:
    """Return a coroutine function that ends when ``endpoint`` has had so many requests."""

    async def reached() -> None:
        await prime.until(lambda: prime.requests().get(endpoint, 0) >= times, endpoint)

    return reached


# Creation


@WAYS
@pytest.mark.parametrize(
    ("endpoint", "fault"),
    [
        ("create_sandbox", {"hang": True}),
        ("create_sandbox", {"hang": "after"}),
        ("create_sandbox", {"delay": 0.2}),
        ("sandbox_statuses", {"hang": True}),
        ("command", {"hang": True}),
    ],
    ids=["asking, no effect", "asking, answer lost", "asking, answer late", "waiting for the state", "reaching it"],
)
def test_a_creation_that_is_cancelled_leaves_nothing(
    prime: Prime, spec: Spec, cancelled: Any, endpoint: str, fault: dict[str, Any]
) -> None:
    prime.fault(endpoint, **fault)

    async def body(sandboxes: PrimeSandboxes) -> None:
        await cancelled(sandboxes.create(spec()).__aenter__(), asked(prime, endpoint))

    prime.run(body)
    assert all(sandbox["deleted"] for sandbox in prime.sandboxes())


def test_a_creation_that_is_cancelled_while_it_queues_asks_for_nothing(prime: Prime, spec: Spec) -> None:
    async def body(sandboxes: PrimeSandboxes) -> None:
        async with sandboxes.create(spec()):
            before = prime.requests()["create_sandbox"]
            (here,) = sandboxes._on_loops.values()
            throttle = here.lifecycle._throttle
            task = asyncio.create_task(sandboxes.create(spec()).__aenter__())
            await prime.until(lambda: throttle._waiting, "its place in the queue")
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert prime.requests()["create_sandbox"] == before

    prime.run(body, creates_per_minute=1, concurrent_creates=1)


def test_waiting_in_our_own_queue_stops_the_phases_deadline(
    prime: Prime, spec: Spec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prime_client, "CREATE_LIMIT", 30.0)
    create, may_ask = prime_client.Platform.create, asyncio.Event()
    clocks: list[asyncio.Timeout] = []

    async def create_when_it_may(*args: Any) -> tuple[str, str]:
        await may_ask.wait()
        return await create(*args)

    monkeypatch.setattr(prime_client.Platform, "create", create_when_it_may)

    async def one(sandboxes: PrimeSandboxes) -> None:
        async with deadline(30) as clock:
            clocks.append(clock)
            context = sandboxes.create(spec())
            await context.__aenter__()
            assert clock.when() is not None, "it goes on when the turn has come"
        await context.__aexit__(None, None, None)

    async def body(sandboxes: PrimeSandboxes) -> None:
        together = asyncio.gather(one(sandboxes), one(sandboxes))
        stopped = [False, True]  # the first one asks, and the second one waits for that
        await prime.until(lambda: [clock.when() is None for clock in clocks] == stopped, "the second clock to stop")
        may_ask.set()
        await together

    prime.run(body, concurrent_creates=1)


def test_creations_that_are_cancelled_at_any_moment_leave_nothing(
    prime: Prime, spec: Spec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prime_client, "CREATE_LIMIT", 30.0)  # they end by their cancellation alone

    async def life(sandboxes: PrimeSandboxes) -> None:
        async with sandboxes.create(spec()) as sandbox:
            await (await sandbox.start_job("sleep 60")).wait()

    async def body(sandboxes: PrimeSandboxes) -> None:
        moments = random.Random(7)
        tasks = [asyncio.create_task(life(sandboxes)) for _ in range(60)]
        loop = asyncio.get_running_loop()
        for task in tasks:
            loop.call_later(moments.uniform(0, 1.5), task.cancel)
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert {type(outcome) for outcome in outcomes} == {asyncio.CancelledError}

    prime.run(body, concurrent_creates=10)
    assert all(sandbox["deleted"] for sandbox in prime.sandboxes())


def test_a_cancelled_creation_that_must_queue_for_its_deletion_leaves_nothing(
    prime: Prime, spec: Spec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prime_lifecycle, "CONCURRENT_DELETES", 1)
    prime.fault("create_sandbox", hang="after")

    async def phase(sandboxes: PrimeSandboxes) -> None:
        async with deadline(60):
            await sandboxes.create(spec()).__aenter__()

    async def body(sandboxes: PrimeSandboxes) -> None:
        task = asyncio.create_task(phase(sandboxes))
        await asked(prime, "create_sandbox")()
        (here,) = sandboxes._on_loops.values()
        async with here.lifecycle._deleting:  # others are deleted meanwhile
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await prime.until(lambda: here.lifecycle._deleting._waiters, "its place in the queue")

    prime.run(body)
    assert [sandbox["deleted"] for sandbox in prime.sandboxes()] == [True]


# In a sandbox


def in_sandbox(prime: Prime, spec: SandboxSpec, body: Callable[[Sandbox], Awaitable[Any]]) -> Any:
    async def main(sandboxes: PrimeSandboxes) -> Any:
        async with sandboxes.create(spec) as sandbox:
            return await body(sandbox)

    return prime.run(main)


@WAYS
@pytest.mark.parametrize(
    ("endpoint", "fault", "call"),
    [
        ("command", {"hang": True}, lambda sandbox: sandbox.start_job("sleep 60")),
        ("command", {"hang": "after"}, lambda sandbox: sandbox.start_job("sleep 60")),
        ("command", {"hang": True}, lambda sandbox: sandbox.execute_command("true")),
        ("upload", {"hang": True}, lambda sandbox: sandbox.upload_bytes("/tmp/x", b"x")),
        ("download", {"hang": True}, lambda sandbox: sandbox.download("/tmp/job")),
    ],
    ids=["launch, no effect", "launch, answer lost", "command", "upload", "download"],
)
def test_a_call_that_is_cancelled_is_cancelled(
    prime: Prime, spec: Spec, cancelled: Any, endpoint: str, fault: dict[str, Any], call: Any
) -> None:
    async def body(sandbox: Sandbox) -> None:
        await sandbox.upload_bytes("/tmp/job", b"")
        before = prime.requests().get(endpoint, 0)
        # A download asks for the file's size before.
        prime.fault(endpoint, **fault)
        await cancelled(call(sandbox), asked(prime, endpoint, before + 1))

    in_sandbox(prime, spec(), body)


@WAYS
def test_a_command_that_runs_is_cancelled(prime: Prime, spec: Spec, cancelled: Any) -> None:
    async def body(sandbox: Sandbox) -> None:
        await cancelled(sandbox.execute_command("sleep 60"), asked(prime, "command", 2))

    in_sandbox(prime, spec(), body)


@WAYS
def test_waiting_for_a_job_is_cancelled(prime: Prime, spec: Spec, cancelled: Any) -> None:
    async def body(sandbox: Sandbox) -> None:
        job = await sandbox.start_job("sleep 60")
        await cancelled(job.wait(), asked(prime, "job_statuses"))

    in_sandbox(prime, spec(), body)


@WAYS
def test_reading_output_is_cancelled(prime: Prime, spec: Spec, cancelled: Any) -> None:
    async def body(sandbox: Sandbox) -> None:
        prime.fault("read_file", hang=True, times=None)
        job = await sandbox.start_job("true")
        await cancelled(job.wait(), asked(prime, "read_file"))

    in_sandbox(prime, spec(), body)


def test_a_failure_in_a_task_group_cancels_its_other_calls(prime: Prime, spec: Spec) -> None:
    async def failing() -> None:
        await asked(prime, "command", 2)()
        raise ZeroDivisionError

    async def body(sandbox: Sandbox) -> None:
        async def together() -> None:
            async with asyncio.TaskGroup() as group:
                group.create_task(sandbox.execute_command("true"))
                group.create_task(failing())

        prime.fault("command", hang=True)
        with pytest.raises(ExceptionGroup) as raised:
            await together()
        assert [type(error) for error in raised.value.exceptions] == [ZeroDivisionError]

    in_sandbox(prime, spec(), body)


def test_cancellation_during_deletion_does_not_stop_it(prime: Prime, spec: Spec) -> None:
    prime.fault("delete_sandbox", delay=0.3)

    async def life(sandboxes: PrimeSandboxes) -> None:
        async with sandboxes.create(spec()):
            pass

    async def body(sandboxes: PrimeSandboxes) -> None:
        task = asyncio.create_task(life(sandboxes))
        await asked(prime, "delete_sandbox")()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert prime.sandboxes()[0]["deleted"]

    prime.run(body)


# The one place where it is decided


async def swallowing() -> None:
    """What the SDK does inside its RPCs."""
    try:
        await asyncio.sleep(60)
    except asyncio.CancelledError:
        raise RuntimeError("request was canceled") from None


async def forgetting() -> None:
    try:
        await asyncio.sleep(60)
    except asyncio.CancelledError:
        return


@pytest.mark.parametrize("call", [swallowing, forgetting])
def test_a_swallowed_cancellation_is_raised(call: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with platform_call("could not", 30):
            await call()

    async def main() -> None:
        task = asyncio.create_task(bounded())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert task.cancelled()

    asyncio.run(main())


def test_a_swallowed_deadline_is_a_retryable_error() -> None:
    async def main() -> None:
        with pytest.raises(SandboxError, match=r"could not: the platform did not answer within 0.01 s") as raised:
            async with platform_call("could not", 0.01):
                await swallowing()
        assert raised.value.retryable
        task = asyncio.current_task()
        assert task is not None
        assert task.cancelling() == 0

    asyncio.run(main())
