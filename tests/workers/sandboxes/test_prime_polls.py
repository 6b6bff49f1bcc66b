"""Looks at running agents on the emulated platform: how many requests they cost, and who is hurt when one fails."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest

from workers.errors import SandboxError
from workers.sandboxes import polls
from workers.sandboxes.base import CommandResult, Sandbox, SandboxSpec
from workers.sandboxes.prime import PrimeSandboxes

Spec = Callable[..., SandboxSpec]
Prime = Any  # conftest.Prime

#: Runs until the file appears.
UNTIL_GO = "while [ ! -e go ]; do sleep 0.02; done; exit 5"


async def enter(stack: AsyncExitStack, sandboxes: PrimeSandboxes, spec: Spec, count: int) -> list[Sandbox]:
    return [await stack.enter_async_context(sandboxes.create(spec())) for _ in range(count)]


def test_120_jobs_share_two_requests_a_round(prime: Prime, spec: Spec) -> None:
    asked: list[int] = []

    async def body(sandboxes: PrimeSandboxes) -> None:
        async with AsyncExitStack() as stack:
            (sandbox,) = await enter(stack, sandboxes, spec, 1)
            (here,) = sandboxes._on_loops.values()
            jobs = await asyncio.gather(*(sandbox.start_job("sleep 60") for _ in range(120)))
            ask = here.polls._ask

            async def counted(keys: Any) -> Any:
                asked.append(len(keys))
                return await ask(keys)

            here.polls._ask = counted
            waiting = [asyncio.create_task(job.wait()) for job in jobs]
            # Those that one request has asked for stay together, also where a round's two are answered far apart.
            await prime.together(lambda: len(here.polls._watched) == 120)
            await prime.until(lambda: len(asked) >= 8, "four rounds")
        await asyncio.gather(*waiting, return_exceptions=True)

    prime.run(body, poll_interval=0.3)
    assert set(asked) == {100, 20}
    # The last ones may have been on their way when all was closed.
    assert len(asked) - 2 <= prime.requests()["job_statuses"] <= len(asked)


def test_one_bad_job_fails_alone(prime: Prime, spec: Spec) -> None:
    async def body(sandboxes: PrimeSandboxes) -> None:
        async with AsyncExitStack() as stack:
            good, bad = await enter(stack, sandboxes, spec, 2)
            jobs = [await sandbox.start_job(UNTIL_GO, working_dir="/tmp") for sandbox in (good, bad)]
            waiting = [asyncio.create_task(job.wait()) for job in jobs]
            await asyncio.sleep(0)
            prime.emulator.end_sandbox(bad.id)
            with pytest.raises(SandboxError, match="ran out of memory"):
                await waiting[1]
            assert not waiting[0].done()
            await good.upload_bytes("/tmp/go", b"")
            assert await waiting[0] == CommandResult(5)

    prime.run(body)
    assert prime.requests()["error_context"] == 1


def test_a_job_of_a_sandbox_that_somebody_deleted_fails_alone(prime: Prime, spec: Spec) -> None:
    async def body(sandboxes: PrimeSandboxes) -> None:
        async with AsyncExitStack() as stack:
            good, gone = await enter(stack, sandboxes, spec, 2)
            jobs = [await sandbox.start_job(UNTIL_GO, working_dir="/tmp") for sandbox in (good, gone)]
            waiting = [asyncio.create_task(job.wait()) for job in jobs]
            (here,) = sandboxes._on_loops.values()
            await here.platform._sdk.delete(gone.id)
            with pytest.raises(SandboxError, match="is gone") as raised:
                await waiting[1]
            assert raised.value.retryable
            await good.upload_bytes("/tmp/go", b"")
            assert await waiting[0] == CommandResult(5)

    prime.run(body)


@pytest.mark.parametrize(
    "fault",
    [
        {"status": 500},
        {"status": 503, "times": 6},
        {"status": 429, "retry_after": 0},
        {"drop": "before"},
        {"drop": "after"},
        {"code": "RUNTIME_ERROR"},
        {"code": "NOT_FOUND"},
        {"code": "NOT_RUNNING"},
    ],
    ids=str,
)
def test_a_look_that_fails_costs_nobody_his_rollout(prime: Prime, spec: Spec, fault: dict[str, Any]) -> None:
    async def body(sandboxes: PrimeSandboxes) -> None:
        async with AsyncExitStack() as stack:
            (sandbox,) = await enter(stack, sandboxes, spec, 1)
            prime.fault("job_statuses", **fault)
            job = await sandbox.start_job("exit 5")
            assert await job.wait() == CommandResult(5)

    prime.run(body)


@pytest.mark.parametrize("code", ["FORBIDDEN", "MANAGED", "NOT_VM"])
def test_a_job_that_may_not_be_looked_at_fails_at_once(prime: Prime, spec: Spec, code: str) -> None:
    async def body(sandboxes: PrimeSandboxes) -> None:
        async with AsyncExitStack() as stack:
            (sandbox,) = await enter(stack, sandboxes, spec, 1)
            prime.fault("job_statuses", code=code, times=None)
            with pytest.raises(SandboxError, match="cannot be looked at") as raised:
                await (await sandbox.start_job("sleep 60")).wait()
            assert code in (raised.value.detail or "")

    prime.run(body)


def test_looks_that_fail_for_too_long_fail_the_job(prime: Prime, spec: Spec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(polls, "BACKOFF", 0.02)

    async def body(sandboxes: PrimeSandboxes) -> None:
        async with AsyncExitStack() as stack:
            (sandbox,) = await enter(stack, sandboxes, spec, 1)
            (here,) = sandboxes._on_loops.values()
            here.polls._patience = 0.3
            prime.fault("job_statuses", status=500, detail="broken", times=None)
            with pytest.raises(SandboxError) as raised:
                await (await sandbox.start_job("sleep 60")).wait()
            assert raised.value.retryable
            assert "broken" in (raised.value.detail or "")
        assert prime.requests()["job_statuses"] >= 5

    prime.run(body)


def test_retry_after_delays_the_next_look(prime: Prime, spec: Spec) -> None:
    async def body(sandboxes: PrimeSandboxes) -> float:
        async with AsyncExitStack() as stack:
            (sandbox,) = await enter(stack, sandboxes, spec, 1)
            prime.fault("job_statuses", status=429, retry_after=1)
            job = await sandbox.start_job("exit 5")
            began = asyncio.get_running_loop().time()
            await job.wait()
            return asyncio.get_running_loop().time() - began

    assert 1.0 <= prime.run(body) < 10.0, "the SDK itself would wait for 10 s"


@pytest.mark.parametrize("status", [404, 405])
def test_a_platform_without_batches_of_jobs_is_asked_one_by_one(prime: Prime, spec: Spec, status: int) -> None:
    prime.fault("job_statuses", status=status, times=None)

    async def body(sandboxes: PrimeSandboxes) -> None:
        async with AsyncExitStack() as stack:
            good, bad = await enter(stack, sandboxes, spec, 2)
            jobs = [await sandbox.start_job(UNTIL_GO, working_dir="/tmp") for sandbox in (good, bad)]
            waiting = [asyncio.create_task(job.wait()) for job in jobs]
            await asyncio.sleep(0)
            prime.emulator.end_sandbox(bad.id)
            with pytest.raises(SandboxError, match="ran out of memory"):
                await waiting[1]
            await good.upload_bytes("/tmp/go", b"")
            assert await waiting[0] == CommandResult(5)

    prime.run(body)


def test_looks_become_rarer_for_a_job_that_runs_on(prime: Prime, spec: Spec) -> None:
    async def body(sandboxes: PrimeSandboxes) -> float:
        async with AsyncExitStack() as stack:
            (sandbox,) = await enter(stack, sandboxes, spec, 1)
            waiting = asyncio.create_task((await sandbox.start_job("sleep 60")).wait())
            await asyncio.sleep(0)
            (here,) = sandboxes._on_loops.values()
            (watch,) = here.polls._watched.values()
            watch.began -= 600  # it has run for ten minutes
            await prime.until(lambda: prime.requests().get("job_statuses"), "the first look")
            await prime.until(lambda: not watch.asked, "its answer")
            due: float = watch.due - asyncio.get_running_loop().time()
            waiting.cancel()
        return due

    # A quarter of a second is what it begins with.
    assert 15 < prime.run(body, poll_interval=30.0) <= 30
