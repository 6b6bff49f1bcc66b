"""What is particular to sandboxes on the Prime platform: what is asked for, what stays private, what it costs."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from producer.contract import Resources
from workers.errors import SandboxError
from workers.prime import credentials
from workers.sandboxes.base import CommandResult, SandboxSpec
from workers.sandboxes.prime import PrimeSandboxes, prime_sandboxes
from workers.sandboxes.prime_client import Platform
from workers.settings import WorkerSettings

Spec = Callable[..., SandboxSpec]
Prime = Any  # conftest.Prime


# What the platform is asked for


def test_the_request_says_all_that_the_spec_says(prime: Prime, spec: Spec) -> None:
    async def body(sandboxes: PrimeSandboxes) -> None:
        wanted = spec(
            name="rollout-1",
            image="ghcr.io/x/y:1",
            start_command="sleep 60 # main",
            resources=Resources(cpu_cores=2, memory_gb=3, disk_gb=7, gpu_count=1, gpu_type="H100_80GB"),
            env={"A": "1"},
            secrets={"S": "hidden"},
            labels=("mine", "fleet:f", "worker:w@host", "rollout:r", "attempt:2"),
            ttl=121.0,
            team_id="team-7",
            advanced={"region_hint": "eu"},
        )
        async with sandboxes.create(wanted):
            pass

    prime.run(body)
    (made,) = prime.sandboxes()
    assert made["name"] == "rollout-1"
    assert made["docker_image"] == "ghcr.io/x/y:1"
    assert made["start_command"] == {"executable": "/bin/sh", "args": ["-c", "sleep 60 # main"]}
    assert made["environment_vars"] == {"A": "1"}
    assert made["secrets"] == {"S": "hidden"}
    assert made["labels"][:-1] == ["mine", "fleet:f", "worker:w@host", "rollout:r", "attempt:2"]
    assert made["timeout_minutes"] == 3
    assert made["team_id"] == "team-7"
    assert made["advanced_configs"] == {"region_hint": "eu"}
    resources = made["resources"]
    assert {"cpu_cores": 2, "memory_gb": 3, "disk_size_gb": 7, "gpu_count": 1, "gpu_type": "H100_80GB"}.items() <= (
        resources.items()
    )


@pytest.mark.parametrize(("ttl", "minutes"), [(0.5, 1), (60, 1), (60.1, 2), (7 * 24 * 3600, 24 * 60)])
def test_time_to_live_in_whole_minutes_as_far_as_the_platform_goes(
    prime: Prime, spec: Spec, ttl: float, minutes: int
) -> None:
    async def body(sandboxes: PrimeSandboxes) -> None:
        # Not entered to its end where it lives for less time than a creation takes.
        async with sandboxes.create(spec(ttl=max(ttl, 30.0) if minutes == 1 and ttl < 1 else ttl)):
            pass

    prime.run(body)
    assert prime.sandboxes()[0]["timeout_minutes"] == minutes


def test_each_creation_has_its_own_label_and_key(prime: Prime, spec: Spec) -> None:
    async def body(sandboxes: PrimeSandboxes) -> None:
        async with sandboxes.create(spec(labels=("a",))), sandboxes.create(spec(labels=("a",))):
            pass

    prime.run(body)
    one, other = prime.sandboxes()
    assert one["labels"][0] == other["labels"][0] == "a"
    assert one["labels"][1].startswith("create:")
    assert one["labels"][1] != other["labels"][1]
    assert one["idempotency_key"] != other["idempotency_key"]


def test_a_spec_that_the_sdk_does_not_take_is_refused_without_its_values(prime: Prime, spec: Spec) -> None:
    async def body(sandboxes: PrimeSandboxes) -> None:
        with pytest.raises(SandboxError, match="docker_image") as raised:
            await sandboxes.create(spec(image="", secrets={"S": "h1dden"})).__aenter__()
        assert not raised.value.retryable
        assert "h1dden" not in f"{raised.value.message}{raised.value.detail}"

    prime.run(body)
    assert prime.requests() == {}


def test_a_rollout_costs_six_requests_and_its_polls(prime: Prime, spec: Spec) -> None:
    async def body(sandboxes: PrimeSandboxes) -> float:
        loop = asyncio.get_running_loop()
        async with sandboxes.create(spec()) as sandbox:
            began = loop.time()
            assert await (await sandbox.start_job("echo done")).wait() == CommandResult(0, "done\n", "")
            return loop.time() - began

    interval = 0.05
    took = prime.run(body, poll_interval=interval)
    requests = prime.requests()
    assert 1 <= requests.pop("job_statuses") <= took / interval
    assert requests == {
        "create_sandbox": 1,
        "sandbox_statuses": 1,
        "command": 2,  # is it reachable, and the launch
        "read_file": 1,
        "delete_sandbox": 1,
    }


def test_creations_share_their_looks_at_the_state(own_prime: Callable[..., Prime], spec: Spec) -> None:
    prime = own_prime(start_seconds=0.3)

    async def body(sandboxes: PrimeSandboxes) -> None:
        async def one() -> None:
            async with sandboxes.create(spec()):
                pass

        lives = [asyncio.create_task(one()) for _ in range(30)]
        await asyncio.sleep(0)
        (here,) = sandboxes._on_loops.values()
        await prime.together(lambda: len(here.lifecycle._births._watched) == 30)
        await asyncio.gather(*lives)

    prime.run(body, poll_interval=0.5)
    requests = prime.requests()
    assert requests["create_sandbox"] == requests["delete_sandbox"] == requests["command"] == 30
    assert requests["sandbox_statuses"] <= 20


def test_no_more_creations_are_open_than_allowed(prime: Prime, spec: Spec) -> None:
    prime.fault("create_sandbox", delay=0.2, times=None)

    async def body(sandboxes: PrimeSandboxes) -> float:
        async def one() -> None:
            async with sandboxes.create(spec()):
                pass

        loop = asyncio.get_running_loop()
        began = loop.time()
        await asyncio.gather(*(one() for _ in range(8)))
        return loop.time() - began

    assert prime.run(body, concurrent_creates=2) >= 4 * 0.2


def test_each_event_loop_has_a_client_of_its_own(prime: Prime, spec: Spec) -> None:
    sandboxes = PrimeSandboxes(creates_per_minute=60_000)

    async def use() -> str:
        async with sandboxes.create(spec()) as sandbox:
            return (await sandbox.execute_command("echo hello")).stdout

    async def close() -> None:
        await sandboxes.aclose()

    with asyncio.Runner() as one, asyncio.Runner() as other:
        assert [runner.run(use()) for runner in (one, other, one, other)] == ["hello\n"] * 4
        one.run(close())
        sandboxes._closed = False
        assert other.run(use()) == "hello\n"
        other.run(close())


def test_settings_become_a_provider(prime: Prime, spec: Spec, redis_url: str) -> None:
    async def main() -> None:
        sandboxes = prime_sandboxes(WorkerSettings(redis_url=redis_url, sandbox_creates_per_minute=60_000))
        try:
            async with sandboxes.create(spec()) as sandbox:
                assert (await sandbox.execute_command("echo hello")).stdout == "hello\n"
        finally:
            await sandboxes.aclose()

    asyncio.run(main())


# What stays private


def processes_of(sandbox: dict[str, Any]) -> list[str]:
    found = []
    for pid in sandbox["processes"]:
        with suppress(psutil.NoSuchProcess):  # of a command that has ended meanwhile
            parent = psutil.Process(pid)
            found += [" ".join(process.cmdline()) for process in [parent, *parent.children(recursive=True)]]
    return found


def test_no_secret_and_no_variable_of_a_job_is_in_the_process_list(prime: Prime, spec: Spec) -> None:
    async def body(sandboxes: PrimeSandboxes) -> None:
        async with sandboxes.create(spec(secrets={"S": "t0p-secret"})) as sandbox:
            job = await sandbox.start_job('echo "$S $V"; sleep 60; :', env={"V": "val-ue"})
            async with asyncio.timeout(15):
                while (printed := await job.output()) is None or "t0p-secret val-ue" not in printed.stdout:
                    pass
            lines = processes_of(prime.sandboxes()[0])
            assert any("sleep" in line for line in lines)
            assert not [line for line in lines if "t0p-secret" in line or "val-ue" in line]
            left = await sandbox.execute_command("ls -a /tmp")
            assert ".rollouts-" not in left.stdout

    prime.run(body)


def test_tokens_are_kept_by_nobody_but_this_process(prime: Prime, spec: Spec) -> None:
    cache = prime.emulator.home / ".prime" / "sandbox_auth_cache.json"
    before = set(prime.emulator.home.rglob("*"))

    async def body(sandboxes: PrimeSandboxes) -> Path:
        async with sandboxes.create(spec()) as sandbox:
            await sandbox.execute_command("true")
            (here,) = sandboxes._on_loops.values()
            assert here.folder.stat().st_mode & 0o777 == 0o700
            assert list(here.folder.iterdir()) == []
            tokens = here.platform._tokens._auth_cache
            assert list(tokens) == [sandbox.id]
        assert tokens == {}, "the token of a deleted sandbox is forgotten"
        return here.folder

    home = os.environ["HOME"]
    folder = prime.run(body)
    assert not folder.exists()
    assert not cache.exists()
    assert set(prime.emulator.home.rglob("*")) == before
    assert os.environ["HOME"] == home


def test_the_users_own_login_is_found(
    prime: Prime, spec: Spec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    account = {"api_key": prime.emulator.api_key, "base_url": prime.emulator.api_url + "/api/v1", "team_id": "t-1"}
    (tmp_path / ".prime").mkdir()
    (tmp_path / ".prime" / "config.json").write_text(json.dumps(account))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("PRIME_API_KEY")
    monkeypatch.delenv("PRIME_API_BASE_URL")

    async def body(sandboxes: PrimeSandboxes) -> None:
        async with sandboxes.create(spec()):
            pass

    prime.run(body)
    assert prime.sandboxes()[0]["team_id"] == "t-1"
    found = credentials()
    assert (found.base_url, found.team_id, found.problem) == (prime.emulator.api_url, "t-1", None)
    assert found.source == str(tmp_path / ".prime" / "config.json")
    assert prime.emulator.api_key not in repr(found)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("PRIME_API_KEY", "", "set PRIME_API_KEY"),
        ("PRIME_CONTEXT", "nowhere", "PRIME_CONTEXT"),
        ("PRIME_API_BASE_URL", "platform.example", "PRIME_API_BASE_URL"),
    ],
)
def test_an_account_that_cannot_work_is_named_before_anything_is_asked(
    prime: Prime, spec: Spec, monkeypatch: pytest.MonkeyPatch, name: str, value: str, words: str
) -> None:
    monkeypatch.setenv(name, value)
    assert words in (credentials().problem or "")

    async def body(sandboxes: PrimeSandboxes) -> None:
        with pytest.raises(SandboxError, match=words) as raised:
            await sandboxes.create(spec()).__aenter__()
        assert not raised.value.retryable

    prime.run(body)
    assert prime.requests() == {}


def test_a_token_that_was_not_given_is_asked_for_once(own_prime: Callable[..., Prime], spec: Spec) -> None:
    prime = own_prime(gateway_auth=False)

    async def body(sandboxes: PrimeSandboxes) -> None:
        async with sandboxes.create(spec()) as sandbox:
            await sandbox.execute_command("true")
            await sandbox.upload_bytes("/tmp/x", b"x")

    prime.run(body)
    assert prime.requests()["sandbox_auth"] == 1


def test_a_token_that_has_expired_is_renewed(prime: Prime, spec: Spec) -> None:
    prime.may_refuse = "sandbox token unknown or expired"

    async def body(sandboxes: PrimeSandboxes) -> None:
        async with sandboxes.create(spec()) as sandbox:
            prime.emulator.expire_tokens(sandbox.id)
            assert (await sandbox.execute_command("echo hello")).stdout == "hello\n"

    prime.run(body)
    assert prime.requests()["sandbox_auth"] == 1


# Output


def long_output(sandboxes: PrimeSandboxes, spec: SandboxSpec) -> Any:
    async def run() -> CommandResult:
        async with sandboxes.create(spec) as sandbox:
            return await (await sandbox.start_job("for i in $(seq 5000); do echo line $i; done; echo x >&2")).wait()

    return run()


@pytest.mark.parametrize("options", [{}, {"windowed_reads": True}, {"read_limit": 10_000}])
def test_long_output_keeps_its_ends_however_the_platform_reads_files(
    own_prime: Callable[..., Prime], spec: Spec, options: dict[str, Any]
) -> None:
    prime = own_prime(**options)
    result = prime.run(lambda sandboxes: long_output(sandboxes, spec()), output_limit=2000)
    size = sum(len(f"line {i}\n") for i in range(1, 5001))
    assert result.stdout.startswith("line 1\nline 2\n")
    assert result.stdout.endswith("line 4999\nline 5000\n")
    assert f"... [{size - 2000} bytes cut] ..." in result.stdout
    assert len(result.stdout) < 2100
    assert result.stderr == "x\n"


def printed(prime: Prime, spec: Spec) -> CommandResult:
    async def body(sandboxes: PrimeSandboxes) -> CommandResult:
        async with sandboxes.create(spec()) as sandbox:
            return await (await sandbox.start_job("echo out; echo err >&2; exit 4")).wait()

    result: CommandResult = prime.run(body)
    return result


@pytest.mark.parametrize("fault", [{"status": 409}, {"drop": "after"}, {"drop": "before", "times": 2}, {"status": 502}])
def test_output_that_cannot_be_read_is_asked_for_again(prime: Prime, spec: Spec, fault: dict[str, Any]) -> None:
    prime.fault("read_file", **fault)
    assert printed(prime, spec) == CommandResult(4, "out\n", "err\n")
    assert prime.requests()["read_file"] == 1 + fault.get("times", 1)


def test_a_rollout_is_not_lost_for_its_output(prime: Prime, spec: Spec) -> None:
    async def body(sandboxes: PrimeSandboxes) -> CommandResult:
        async with sandboxes.create(spec()) as sandbox:
            job = await sandbox.start_job("echo out; echo err >&2; exit 4")
            await job.ended()
            prime.fault("read_file", status=403, detail="not for you", times=None)
            prime.fault("command", status=500, times=None)
            return await job.wait()

    result = prime.run(body)
    assert result.exit_code == 4
    assert result.stdout.startswith("[output could not be read: ")
    assert result.stderr == result.stdout


def test_an_agent_that_removes_everything_from_tmp_is_read_by_a_command(prime: Prime, spec: Spec) -> None:
    async def body(sandboxes: PrimeSandboxes) -> CommandResult:
        async with sandboxes.create(spec()) as sandbox:
            job = await sandbox.start_job("echo out; echo err >&2; exit 4")
            await job.ended()
            await sandbox.execute_command("rm /tmp/.rollouts-*")
            return await job.wait()

    assert prime.run(body) == CommandResult(4, "out\n", "err\n")


def test_a_full_disk_costs_neither_the_exit_code_nor_the_output(prime: Prime, spec: Spec) -> None:
    """There the record is empty, or cannot be made at all."""

    async def body(sandboxes: PrimeSandboxes) -> CommandResult:
        async with sandboxes.create(spec()) as sandbox:
            job = await sandbox.start_job("echo out; exit 4")
            await job.ended()
            await sandbox.execute_command("for f in /tmp/.rollouts-*.out; do : > $f; done")
            return await job.wait()

    assert prime.run(body) == CommandResult(4, "out\n", "")


@pytest.mark.parametrize("signal", ["KILL", "SEGV"])
def test_what_the_shell_says_of_a_killed_agent_is_not_its_output(prime: Prime, spec: Spec, signal: str) -> None:
    async def body(sandboxes: PrimeSandboxes) -> CommandResult:
        async with sandboxes.create(spec()) as sandbox:
            return await (await sandbox.start_job(f"echo out; kill -{signal} $$")).wait()

    assert prime.run(body) == CommandResult({"KILL": 137, "SEGV": 139}[signal], "out\n", "")


def test_no_more_than_the_ends_of_a_long_output_is_fetched(
    prime: Prime, spec: Spec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The emulator, as the platform's virtual machines, sends whole files."""
    fetched: list[int] = []
    read = Platform.read

    async def counted(self: Platform, *args: Any, **options: Any) -> Any:
        answer = await read(self, *args, **options)
        fetched.append(len(answer.content))
        return answer

    monkeypatch.setattr(Platform, "read", counted)
    result = prime.run(lambda sandboxes: long_output(sandboxes, spec()), output_limit=2000)
    assert "bytes cut" in result.stdout
    assert len(fetched) == 1
    assert fetched[0] < 2300
