"""Each fault of the platform: which error results, whether another attempt is worth it, and that nothing is left."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import pytest
from prime_sandboxes import AsyncSandboxClient
from redis import Redis
from support import counted

from producer.broker import throttle_key
from producer.contract import Phase, Resources
from workers.errors import SandboxError
from workers.instruments import NO_ANSWER, PLATFORM_REQUESTS
from workers.sandboxes import prime as prime_module
from workers.sandboxes import prime_client, prime_lifecycle
from workers.sandboxes.base import CommandResult, Sandbox, SandboxSpec
from workers.sandboxes.prime import PrimeSandboxes

Spec = Callable[..., SandboxSpec]
Prime = Any  # conftest.Prime


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prime_lifecycle, "LOOKS", (0.0, 0.05, 0.1))
    monkeypatch.setattr(prime_lifecycle, "CREATE_TRIES", 2)


def failure(prime: Prime, spec: SandboxSpec, **options: Any) -> SandboxError:
    """Return the error with which a creation fails."""

    async def body(sandboxes: PrimeSandboxes) -> SandboxError:
        with pytest.raises(SandboxError) as raised:
            await sandboxes.create(spec).__aenter__()
        return raised.value

    error: SandboxError = prime.run(body, **options)
    return error


def works(prime: Prime, spec: SandboxSpec) -> None:
    """Run a whole life of a sandbox."""

    async def body(sandboxes: PrimeSandboxes) -> None:
        async with sandboxes.create(spec) as sandbox:
            assert await (await sandbox.start_job("echo done")).wait() == CommandResult(0, "done\n", "")

    prime.run(body)


# Creation


@pytest.mark.parametrize(
    ("status", "words"),
    [(401, "PRIME_API_KEY"), (402, "billing"), (403, "HTTP 403"), (422, "HTTP 422"), (400, "HTTP 400")],
)
def test_a_refused_creation_is_not_retried(prime: Prime, spec: Spec, status: int, words: str) -> None:
    prime.fault("create_sandbox", status=status, detail="the platform's words")
    error = failure(prime, spec())
    assert (error.retryable, words in error.message) == (False, True)
    if status not in {401, 402}:  # for these the SDK has words of its own
        assert "the platform's words" in (error.detail or "")
    assert prime.requests() == {"create_sandbox": 1}


def test_a_refusal_that_repeats_what_it_refuses_shows_no_secret(prime: Prime, spec: Spec) -> None:
    prime.fault("create_sandbox", status=422, detail=[{"loc": ["secrets", "S"], "input": "t0p-secret"}])
    error = failure(prime, spec(secrets={"S": "t0p-secret"}))
    assert "t0p-secret" not in f"{error.message}{error.detail}"
    assert "***" in (error.detail or "")


@pytest.mark.parametrize("fault", [{"status": 500}, {"status": 409}, {"drop": "before"}, {"drop": "after"}])
def test_a_creation_without_a_clear_answer_is_asked_for_again_and_makes_one(
    prime: Prime, spec: Spec, fault: dict[str, Any]
) -> None:
    prime.fault("create_sandbox", **fault)
    works(prime, spec())
    assert prime.requests()["create_sandbox"] == 2
    assert len(prime.sandboxes()) == 1


def test_a_creation_that_hangs_is_asked_for_again_and_makes_one(
    prime: Prime, spec: Spec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prime_client, "CREATE_LIMIT", 0.5)
    monkeypatch.setattr(prime_lifecycle, "CREATE_TRIES", 6)  # on a busy machine others may have no answer in time too
    prime.fault("create_sandbox", hang="after")
    before = counted(PLATFORM_REQUESTS, api="sandboxes", status=NO_ANSWER)
    works(prime, spec())
    assert prime.requests()["create_sandbox"] >= 2
    assert len(prime.sandboxes()) == 1
    assert counted(PLATFORM_REQUESTS, api="sandboxes", status=NO_ANSWER) > before


@pytest.mark.parametrize("fault", [{"drop": "after"}, {"status": 503}, {"status": 500}])
def test_a_creation_that_stays_without_a_clear_answer_leaves_nothing(
    prime: Prime, spec: Spec, fault: dict[str, Any]
) -> None:
    prime.fault("create_sandbox", **fault, times=None)
    error = failure(prime, spec())
    assert error.retryable
    assert "could not create a sandbox" in error.message
    assert prime.requests()["list_sandboxes"] >= 1
    assert all(sandbox["deleted"] for sandbox in prime.sandboxes())
    assert len({sandbox["idempotency_key"] for sandbox in prime.sandboxes()}) <= 1


def test_a_sandbox_of_which_nothing_can_be_learnt_is_logged(
    prime: Prime, spec: Spec, caplog: pytest.LogCaptureFixture
) -> None:
    prime.fault("create_sandbox", status=500, times=None)
    prime.fault("list_sandboxes", status=500, times=None)
    with caplog.at_level(logging.ERROR):
        failure(prime, spec(labels=("mine",)))
    assert [message for message in caplog.messages if "may be left" in message and "create:" in message]


def test_429_pauses_the_whole_fleet_for_as_long_as_the_platform_says(prime: Prime, spec: Spec, redis_url: str) -> None:
    prime.fault("create_sandbox", status=429, retry_after=1)

    async def one(sandboxes: PrimeSandboxes) -> float:
        async with sandboxes.create(spec()):
            return asyncio.get_running_loop().time()

    async def body(sandboxes: PrimeSandboxes) -> tuple[float, float]:
        other = PrimeSandboxes(redis_url=redis_url, creates_per_minute=60_000)  # another worker of the fleet
        try:
            began = asyncio.get_running_loop().time()
            first = asyncio.create_task(one(sandboxes))
            redis = Redis.from_url(redis_url)
            await prime.until(lambda: redis.hget(throttle_key("sandbox-creates"), "pauses") == b"1", "the pause")
            second = await one(other)
            return await first - began, second - began
        finally:
            await other.aclose()

    first, second = prime.run(body, redis_url=redis_url)
    assert 1.0 <= first < 10.0, "the SDK itself would wait for 10 s"
    assert 1.0 <= second < 10.0
    assert prime.requests()["create_sandbox"] == 3


def test_429_that_does_not_end_is_a_retryable_error(prime: Prime, spec: Spec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prime_lifecycle, "RATE_TRIES", 3)
    prime.fault("create_sandbox", status=429, retry_after=0, times=None)
    before = counted(PLATFORM_REQUESTS, api="sandboxes", status="429")
    error = failure(prime, spec())
    assert error.retryable
    assert "rate limit" in error.message
    assert prime.requests() == {"create_sandbox": 3}
    assert counted(PLATFORM_REQUESTS, api="sandboxes", status="429") == before + 3


def test_an_image_that_cannot_be_pulled_is_not_retried(prime: Prime, spec: Spec) -> None:
    prime.emulator.image("no/such:image", pull_fails=True)
    error = failure(prime, spec(image="no/such:image"))
    assert not error.retryable
    assert "no/such:image" in error.message
    assert "IMAGE_PULL_FAILED" in (error.detail or "")


def test_a_sandbox_that_runs_out_of_memory_at_its_start_names_the_memory(prime: Prime, spec: Spec) -> None:
    prime.emulator.image("too/big:1", oom_at_start=True)
    error = failure(prime, spec(image="too/big:1", resources=Resources(memory_gb=1.5)))
    assert not error.retryable
    assert "memory_gb=1.5" in error.message
    assert "OOM_KILLED" in (error.detail or "")


def test_the_first_use_of_an_image_waits_for_its_build(prime: Prime, spec: Spec) -> None:
    prime.emulator.image("first/use:1", build_seconds=0.6)

    async def body(sandboxes: PrimeSandboxes) -> float:
        began = asyncio.get_running_loop().time()
        async with sandboxes.create(spec(image="first/use:1")):
            return asyncio.get_running_loop().time() - began

    assert prime.run(body) >= 0.5


@pytest.mark.parametrize("fault", [{"status": 500}, {"status": 429, "retry_after": 0}, {"drop": "before"}])
def test_one_look_at_the_state_that_fails_costs_no_sandbox(
    own_prime: Callable[..., Prime], spec: Spec, fault: dict[str, Any]
) -> None:
    prime = own_prime(start_seconds=0.1)
    prime.fault("sandbox_statuses", **fault)
    works(prime, spec())


def test_a_look_at_the_state_that_hangs_costs_no_sandbox(
    prime: Prime, spec: Spec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prime_client, "STATUS_LIMIT", 0.2)
    prime.fault("sandbox_statuses", hang=True)
    works(prime, spec())


def test_a_platform_without_batches_of_states_is_asked_one_by_one(prime: Prime, spec: Spec) -> None:
    prime.fault("sandbox_statuses", status=404, times=None)
    works(prime, spec())
    assert prime.requests()["get_sandbox"] >= 1


def test_a_sandbox_that_is_not_known_yet_is_looked_at_again(prime: Prime, spec: Spec) -> None:
    prime.fault("sandbox_statuses", code="NOT_FOUND")
    works(prime, spec())


def test_a_state_that_nobody_knows_breaks_no_others(own_prime: Callable[..., Prime], spec: Spec) -> None:
    prime = own_prime(start_seconds=0.5)
    prime.emulator.image("slow/build:1", build_seconds=60)

    async def body(sandboxes: PrimeSandboxes) -> None:
        failing = asyncio.create_task(sandboxes.create(spec(name="ending", image="slow/build:1")).__aenter__())
        await prime.until(prime.sandboxes, "the sandbox")
        prime.emulator.end_sandbox(prime.sandboxes()[0]["id"], status="TERMINATING", error_type=None, message=None)
        async with sandboxes.create(spec(name="well")):
            pass
        with pytest.raises(SandboxError, match="TERMINATING") as raised:
            await failing
        assert raised.value.retryable

    prime.run(body)


def test_a_sandbox_that_cannot_be_reached_at_once_is_tried_again(prime: Prime, spec: Spec) -> None:
    prime.fault("command", status=502, times=2)
    works(prime, spec())


def test_a_sandbox_that_cannot_be_reached_at_all(prime: Prime, spec: Spec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prime_lifecycle, "REACH_LIMIT", 0.5)
    prime.fault("command", status=502, times=None)
    error = failure(prime, spec())
    assert error.retryable
    assert "cannot be reached" in error.message


def test_a_sandbox_that_is_not_ready_within_its_time(own_prime: Callable[..., Prime], spec: Spec) -> None:
    prime = own_prime(start_seconds=30)
    error = failure(prime, spec(ttl=0.3))
    assert error.retryable
    assert "time to live" in error.message


def test_a_key_that_the_platform_does_not_know(prime: Prime, spec: Spec, monkeypatch: pytest.MonkeyPatch) -> None:
    prime.may_refuse = "API key"
    monkeypatch.setenv("PRIME_API_KEY", "pit_wrong")
    error = failure(prime, spec())
    assert not error.retryable
    assert "PRIME_API_KEY" in error.message


def test_a_platform_that_is_not_there(prime: Prime, spec: Spec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRIME_API_BASE_URL", "http://127.0.0.1:9")
    error = failure(prime, spec())
    assert error.retryable
    assert "ConnectError" in (error.detail or "")


# Commands, jobs, files


def in_sandbox(prime: Prime, spec: SandboxSpec, body: Callable[[Sandbox], Any], **options: Any) -> Any:
    async def main(sandboxes: PrimeSandboxes) -> Any:
        async with sandboxes.create(spec) as sandbox:
            return await body(sandbox)

    return prime.run(main, **options)


@pytest.mark.parametrize("fault", [{"drop": "before"}, {"drop": "after"}, {"status": 502}, {"status": 429}])
@pytest.mark.parametrize("call", ["start_job", "execute_command"])
def test_a_command_without_a_clear_answer_is_a_retryable_error_and_not_repeated(
    prime: Prime, spec: Spec, fault: dict[str, Any], call: str
) -> None:
    async def body(sandbox: Sandbox) -> int:
        prime.fault("command", **fault)
        with pytest.raises(SandboxError) as raised:
            await getattr(sandbox, call)("echo ran >> /tmp/ran")
        assert raised.value.retryable
        assert raised.value.detail
        return int(prime.requests()["command"])

    assert in_sandbox(prime, spec(), body) == 2


def test_a_command_that_hangs_is_bounded(prime: Prime, spec: Spec, monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(sandbox: Sandbox) -> None:
        prime.fault("command", hang=True)
        with pytest.raises(SandboxError, match="timeout") as raised:
            await sandbox.execute_command("true", timeout=0.2)
        assert raised.value.retryable

    in_sandbox(prime, spec(), body)


@pytest.mark.parametrize("endpoint", ["upload", "download"])
@pytest.mark.parametrize(("status", "retryable"), [(413, False), (500, True)])
def test_files_that_cannot_be_moved(
    prime: Prime, spec: Spec, monkeypatch: pytest.MonkeyPatch, endpoint: str, status: int, retryable: bool
) -> None:
    async def body(sandbox: Sandbox) -> None:
        await sandbox.upload_bytes("/tmp/x", b"x")
        if retryable:  # it is tried for as long as it may take
            monkeypatch.setattr(prime_client, "TRANSFER_LIMIT", 1.0)
        prime.fault(endpoint, status=status, times=None)
        moving = sandbox.upload_bytes("/tmp/x", b"x") if endpoint == "upload" else sandbox.download("/tmp/x")
        with pytest.raises(SandboxError) as raised:
            await moving
        assert raised.value.retryable is retryable
        assert "/tmp/x" in raised.value.message

    in_sandbox(prime, spec(), body)


@pytest.mark.parametrize("fault", [{"status": 502}, {"drop": "before"}])
def test_an_upload_that_fails_once_is_tried_again(prime: Prime, spec: Spec, fault: dict[str, Any]) -> None:
    async def body(sandbox: Sandbox) -> bytes:
        prime.fault("upload", **fault)
        await sandbox.upload_bytes("/tmp/x", b"x")
        return await sandbox.download("/tmp/x")

    assert in_sandbox(prime, spec(), body) == b"x"


def test_the_token_endpoint_says_429(own_prime: Callable[..., Prime], spec: Spec) -> None:
    prime = own_prime(gateway_auth=False)
    prime.fault("sandbox_auth", status=429, retry_after=0)
    works(prime, spec())
    assert prime.requests()["sandbox_auth"] == 2


@pytest.mark.parametrize(
    ("end", "retryable", "words"),
    [
        ({}, False, "memory_gb=2"),
        ({"status": "TIMEOUT", "error_type": "TIMEOUT", "message": "too old"}, True, "time to live"),
        ({"status": "TERMINATED", "error_type": None, "message": "preempted"}, True, "not running any more"),
    ],
)
def test_a_sandbox_that_dies_while_its_agent_runs(
    prime: Prime, spec: Spec, end: dict[str, Any], retryable: bool, words: str
) -> None:
    async def body(sandbox: Sandbox) -> None:
        waiting = asyncio.create_task((await sandbox.start_job("sleep 60")).wait())
        await asyncio.sleep(0)
        prime.emulator.end_sandbox(sandbox.id, **end)
        with pytest.raises(SandboxError, match=words) as raised:
            await waiting
        assert raised.value.retryable is retryable
        assert (end.get("error_type", "OOM_KILLED") or end.get("message")) in (raised.value.detail or "")
        with pytest.raises(SandboxError) as raised:
            await sandbox.execute_command("true")
        assert raised.value.detail

    in_sandbox(prime, spec(), body)


# Deletion


@pytest.mark.parametrize(
    "fault",
    [
        {"drop": "after"},  # the SDK asks again, and is told 404
        {"drop": "before"},
        {"status": 500},
        {"status": 429, "retry_after": 0},
        {"status": 503},
    ],
)
def test_a_deletion_that_fails_once_is_tried_again(prime: Prime, spec: Spec, fault: dict[str, Any]) -> None:
    prime.fault("delete_sandbox", **fault)
    works(prime, spec())


@pytest.mark.parametrize("endpoint", ["upload", "delete_sandbox"])
def test_a_429_that_asks_for_no_pause_gets_longer_and_longer_ones(prime: Prime, spec: Spec, endpoint: str) -> None:
    """It says "0", or a date that has passed by our clock: all who were refused would ask again without end."""

    async def body(sandboxes: PrimeSandboxes) -> float:
        async with sandboxes.create(spec()) as sandbox:
            prime.fault(endpoint, status=429, retry_after=0, times=3)
            began = asyncio.get_running_loop().time()
            await sandbox.upload_bytes("/tmp/x", b"x")
        return asyncio.get_running_loop().time() - began

    assert prime.run(body) >= 0.25 * (0.5 + 1 + 2)


@pytest.mark.parametrize("endpoint", ["upload", "delete_sandbox"])
def test_a_429_that_names_a_time_is_obeyed_however_often_it_comes(prime: Prime, spec: Spec, endpoint: str) -> None:
    """Longer pauses than those would give up before the platform does."""

    async def body(sandboxes: PrimeSandboxes) -> float:
        async with sandboxes.create(spec()) as sandbox:
            prime.fault(endpoint, status=429, retry_after=0.3, times=6)
            began = asyncio.get_running_loop().time()
            await sandbox.upload_bytes("/tmp/x", b"x")
        return asyncio.get_running_loop().time() - began

    assert 6 * 0.3 <= prime.run(body) < 0.5 * (0.5 + 1 + 2 + 4 + 8 + 16), "that is what doubled ones take"


def test_a_deletion_that_hangs_is_tried_again(prime: Prime, spec: Spec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prime_client, "DELETE_LIMIT", 0.3)
    prime.fault("delete_sandbox", hang=True)
    works(prime, spec())


def test_a_sandbox_that_somebody_else_deleted_is_deleted(prime: Prime, spec: Spec) -> None:
    async def body(sandboxes: PrimeSandboxes) -> None:
        async with sandboxes.create(spec()) as sandbox:
            (here,) = sandboxes._on_loops.values()
            await here.platform._sdk.delete(sandbox.id)

    prime.run(body)
    assert prime.requests()["delete_sandbox"] == 2


def test_a_deletion_that_is_refused_is_an_error_unless_another_is_on_its_way(
    prime: Prime, spec: Spec, caplog: pytest.LogCaptureFixture
) -> None:
    prime.fault("delete_sandbox", status=403, detail="locked", times=2)

    async def body(sandboxes: PrimeSandboxes) -> None:
        ids = []

        async def life(error: Exception | None) -> None:
            async with sandboxes.create(spec()) as sandbox:
                ids.append(sandbox.id)
                if error:
                    raise error

        with pytest.raises(SandboxError, match="is not deleted") as raised:
            await life(None)
        assert raised.value.phase is Phase.CLEANUP
        assert "locked" in (raised.value.detail or "")
        with pytest.raises(ZeroDivisionError), caplog.at_level(logging.WARNING):
            await life(ZeroDivisionError())
        assert [message for message in caplog.messages if "is not deleted" in message]
        (here,) = sandboxes._on_loops.values()
        for sandbox_id in ids:
            await here.lifecycle.delete(sandbox_id)

    prime.run(body)


def test_a_deletion_that_never_works_is_bounded(prime: Prime, spec: Spec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prime_lifecycle, "DELETE_LIMIT", 0.4)
    prime.fault("delete_sandbox", status=500, times=None)

    async def body(sandboxes: PrimeSandboxes) -> None:
        with pytest.raises(SandboxError, match="is not deleted") as raised:
            async with sandboxes.create(spec()) as sandbox:
                pass
        assert raised.value.retryable
        prime.emulator.clear_faults()
        (here,) = sandboxes._on_loops.values()
        await here.lifecycle.delete(sandbox.id)

    prime.run(body)


def test_deletion_does_not_wait_for_a_look_that_hangs(prime: Prime, spec: Spec) -> None:
    async def body(sandboxes: PrimeSandboxes) -> float:
        loop = asyncio.get_running_loop()
        async with sandboxes.create(spec()) as sandbox:
            prime.fault("job_statuses", hang=True, times=None)
            waiting = asyncio.create_task((await sandbox.start_job("sleep 60")).wait())
            await prime.until(lambda: prime.requests().get("job_statuses"), "a look")
            began = loop.time()
        with pytest.raises(SandboxError, match="was deleted"):
            await waiting
        return loop.time() - began

    assert prime.run(body) < prime_client.STATUS_LIMIT / 2


def test_closing_is_bounded_when_the_platform_hangs(
    prime: Prime, spec: Spec, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(prime_module, "DELETE_LIMIT", 0.2)
    prime.fault("delete_sandbox", hang=True)

    async def body(sandboxes: PrimeSandboxes) -> None:
        context = sandboxes.create(spec())
        sandbox = await context.__aenter__()
        began = asyncio.get_running_loop().time()
        with caplog.at_level(logging.ERROR):
            await sandboxes.aclose()
        assert asyncio.get_running_loop().time() - began < prime_client.DELETE_LIMIT * 2 / 3
        assert [message for message in caplog.messages if "are not deleted" in message]
        prime.emulator.clear_faults()
        async with AsyncSandboxClient() as sdk:
            await sdk.delete(sandbox.id)

    prime.run(body)


@pytest.mark.parametrize(
    ("endpoint", "fault"),
    [
        ("create_sandbox", {"delay": 0.3}),
        ("create_sandbox", {"drop": "after", "times": 3}),
        ("sandbox_statuses", {"delay": 0.3}),
        ("command", {"status": 502, "times": None}),
    ],
    ids=["asking", "asking, answer lost", "waiting for the state", "reaching it"],
)
def test_closing_ends_what_is_being_created(prime: Prime, spec: Spec, endpoint: str, fault: dict[str, Any]) -> None:
    prime.fault(endpoint, **fault)

    async def body(sandboxes: PrimeSandboxes) -> None:
        creating = asyncio.create_task(sandboxes.create(spec()).__aenter__())
        await prime.until(lambda: prime.requests().get(endpoint), endpoint)
        await sandboxes.aclose()
        with pytest.raises(SandboxError):
            await creating
        assert all(sandbox["deleted"] for sandbox in prime.sandboxes())

    prime.run(body)
