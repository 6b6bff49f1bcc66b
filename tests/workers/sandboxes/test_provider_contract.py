"""What every provider of sandboxes does: the local one, and the Prime one on the emulated platform."""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from producer.contract import RolloutRequest
from workers.errors import SandboxError
from workers.sandboxes.base import CommandResult, Sandbox, SandboxProvider, SandboxSpec
from workers.sandboxes.local import LocalSandboxes
from workers.sandboxes.prime import PrimeSandboxes
from workers.state import Rollout

Body = Callable[[Sandbox], Awaitable[Any]]
Run = Callable[..., Any]


@pytest.fixture(params=["local", "prime"])
def provider(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., SandboxProvider]:
    if request.param == "local":
        return lambda **options: LocalSandboxes(root=tmp_path / "sandboxes", **options)
    request.getfixturevalue("prime")
    return lambda **options: PrimeSandboxes(creates_per_minute=60_000, poll_interval=0.05, **options)


@pytest.fixture
def run(provider: Callable[..., SandboxProvider], spec: Callable[..., SandboxSpec]) -> Run:
    """Run a coroutine function in a sandbox of its own, on a loop of its own, and return what it returns."""

    def run_in_sandbox(body: Body, options: dict[str, Any] | None = None, **fields: Any) -> Any:
        async def main() -> Any:
            sandboxes = provider(**(options or {}))
            try:
                async with asyncio.timeout(60), sandboxes.create(spec(**fields)) as sandbox:
                    return await body(sandbox)
            finally:
                await sandboxes.aclose()

        return asyncio.run(main())

    return run_in_sandbox


@pytest.mark.parametrize(
    ("command", "code"), [("true", 0), ("exit 7", 7), ("kill -9 $$", 137), ("no-such-command-anywhere", 127)]
)
def test_exit_codes_of_commands_and_jobs(run: Run, command: str, code: int) -> None:
    async def body(sandbox: Sandbox) -> tuple[int, int]:
        job = await sandbox.start_job(command)
        return (await sandbox.execute_command(command)).exit_code, (await job.wait()).exit_code

    assert run(body) == (code, code)


def test_streams_are_kept_apart(run: Run) -> None:
    async def body(sandbox: Sandbox) -> None:
        command = "echo out; echo err >&2"
        expected = CommandResult(0, "out\n", "err\n")
        assert await sandbox.execute_command(command) == expected
        assert await (await sandbox.start_job(command)).wait() == expected

    run(body)


def test_commands_and_jobs_run_in_bash(run: Run) -> None:
    async def body(sandbox: Sandbox) -> None:
        command = '[[ abc == a* ]] && a=(1 2 3) && echo "${a[2]} it\'s" # a comment at the end'
        assert (await sandbox.execute_command(command)).stdout == "3 it's\n"
        assert (await (await sandbox.start_job(command)).wait()).stdout == "3 it's\n"

    run(body)


def test_a_job_may_end_in_a_here_document(run: Run) -> None:
    async def body(sandbox: Sandbox) -> None:
        job = await sandbox.start_job("cat <<'END'\n$HOME (here)\nEND")
        assert (await job.wait()).stdout == "$HOME (here)\n"

    run(body)


def test_variables_of_the_spec_its_secrets_and_the_call(run: Run) -> None:
    async def body(sandbox: Sandbox) -> None:
        show = 'echo "$A|$B|$S|$C"'
        env = {"B": "call's", "C": "x y\nz"}
        expected = "spec|call's|secret|x y\nz\n"
        assert (await sandbox.execute_command(show, env=env)).stdout == expected
        assert (await (await sandbox.start_job(show, env=env)).wait()).stdout == expected
        assert (await sandbox.execute_command(show)).stdout == "spec|spec|secret|\n"

    run(body, env={"A": "spec", "B": "spec"}, secrets={"S": "secret"})


def test_working_dir(run: Run) -> None:
    async def body(sandbox: Sandbox) -> None:
        await sandbox.upload_bytes("/app/deep/file", b"here")
        expected = CommandResult(0, "here", "")
        assert await sandbox.execute_command("cat file", working_dir="/app/deep") == expected
        assert await (await sandbox.start_job("cat file", working_dir="/app/deep")).wait() == expected

    run(body)


def test_a_command_that_exceeds_its_timeout(run: Run) -> None:
    async def body(sandbox: Sandbox) -> None:
        with pytest.raises(SandboxError, match=r"timeout") as raised:
            await sandbox.execute_command("sleep 60", timeout=0.3)
        assert "sleep 60" in raised.value.message
        assert (await sandbox.execute_command("echo alive")).stdout == "alive\n"

    run(body)


def test_a_command_line_of_300_kib(run: Run, request: pytest.FixtureRequest) -> None:
    if "local" in request.node.callspec.params.values():
        pytest.skip("a local sandbox refuses what Linux does not take")

    async def body(sandbox: Sandbox) -> None:
        command = f"value={shlex.quote('x' * 300 * 1024)}; echo ${{#value}}; exit 3"
        expected = CommandResult(3, "307200\n", "")
        assert await sandbox.execute_command(command) == expected
        assert await (await sandbox.start_job(command)).wait() == expected

    run(body)


@pytest.mark.parametrize("call", ["command", "job"])
@pytest.mark.parametrize(
    ("command", "env"), [("echo \x00", {}), ("true", {"BAD NAME": "v4lue"}), ("true", {"A": "v4lue\x00"})]
)
def test_what_no_process_can_be_given_is_refused_without_showing_the_value(
    run: Run, request: pytest.FixtureRequest, call: str, command: str, env: dict[str, str]
) -> None:
    if "local" in request.node.callspec.params.values() and "BAD NAME" in env:
        pytest.skip("a process may have such a variable")

    async def body(sandbox: Sandbox) -> None:
        start = sandbox.execute_command if call == "command" else sandbox.start_job
        with pytest.raises(SandboxError) as raised:
            await start(command, env=env)
        assert not raised.value.retryable
        assert "v4lue" not in f"{raised.value.message} {raised.value.detail}"

    run(body)


def test_waiting_may_be_done_by_many_cancelled_and_repeated(run: Run) -> None:
    async def body(sandbox: Sandbox) -> None:
        job = await sandbox.start_job("while [ ! -e go ]; do sleep 0.01; done; echo done", working_dir="/tmp")
        waiting = [asyncio.create_task(job.wait()) for _ in range(3)]
        await asyncio.sleep(0)
        waiting[0].cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting[0]
        await sandbox.upload_bytes("/tmp/go", b"")
        assert await asyncio.gather(*waiting[1:]) == [CommandResult(0, "done\n", "")] * 2
        assert await job.wait() == CommandResult(0, "done\n", "")

    run(body)


def test_output_of_a_running_job(run: Run) -> None:
    async def body(sandbox: Sandbox) -> None:
        job = await sandbox.start_job("echo so far; sleep 60")
        printed = None
        async with asyncio.timeout(20):
            while printed is None or not printed.stdout:
                printed = await job.output()
        assert printed == CommandResult(-1, "so far\n", "")

    run(body)


@pytest.mark.parametrize("call", ["command", "job"])
def test_long_output_keeps_its_ends(run: Run, call: str) -> None:
    async def body(sandbox: Sandbox) -> str:
        command = "for i in $(seq 20000); do echo line $i; done"
        if call == "command":
            return (await sandbox.execute_command(command)).stdout
        return (await (await sandbox.start_job(command)).wait()).stdout

    text = run(body, options={"output_limit": 2000})
    assert text.startswith("line 1\nline 2\n")
    assert text.endswith("line 19999\nline 20000\n")
    assert "bytes cut] ..." in text
    assert len(text) < 2100


def test_output_is_cut_between_characters(run: Run) -> None:
    async def body(sandbox: Sandbox) -> str:
        job = await sandbox.start_job("for i in $(seq 3000); do printf 'a€'; done")
        return (await job.wait()).stdout

    text = run(body, options={"output_limit": 1026})
    assert "bytes cut] ..." in text
    assert "\ufffd" not in text


@pytest.mark.parametrize("call", ["command", "job", "running job"])
def test_nothing_is_left_of_a_secret_through_which_the_output_was_cut(run: Run, call: str) -> None:
    secret, limit = "hf_Zq8€w0rTyPeX-9", 1024
    size = len(secret.encode())

    async def printed(sandbox: Sandbox, command: str) -> str:
        if call == "command":
            return (await sandbox.execute_command(command)).stdout
        job = await sandbox.start_job(command if call == "job" else f"{command}; echo printed >&2; sleep 60")
        if call == "job":
            return (await job.wait()).stdout
        async with asyncio.timeout(20):
            while (output := await job.output()) is None or output.stderr != "printed\n":
                await asyncio.sleep(0.01)
        # Asked again: the two files are read one after the other, so what came first may be from before the last line.
        return (await job.output() or output).stdout

    async def body(sandbox: Sandbox) -> list[str]:
        texts = []
        for inside in (4, 7, 8, size - 1):  # bytes of the secret that are kept at either end
            padding = limit // 2 - inside
            command = f"printf %{padding}s%s%3000s%s%{padding}s . {secret} . {secret} ."
            texts.append(await printed(sandbox, command))
        return texts

    rollout = Rollout(RolloutRequest(model="m"), "http://gateway", secrets={"TOKEN": secret})
    for text in run(body, options={"output_limit": limit}):
        assert "bytes cut] ..." in text
        shown = rollout.redacted(text)
        assert secret[:4] not in shown
        assert secret[-4:] not in shown
        assert shown.count("[redacted TOKEN]") == 2


def test_files_go_in_and_out(run: Run) -> None:
    async def body(sandbox: Sandbox) -> None:
        data = bytes(range(256)) * 1000
        await sandbox.upload_bytes("/data/a/b/c.bin", data)
        assert await sandbox.download("/data/a/b/c.bin") == data
        await sandbox.upload_bytes("data/a/b/c.bin", b"replaced")
        assert await sandbox.download("data/a/b/c.bin") == b"replaced"
        await sandbox.upload_bytes('/tmp/it\'s "odd" $HOME.txt', b"x")
        assert await sandbox.download('/tmp/it\'s "odd" $HOME.txt') == b"x"

    run(body)


@pytest.mark.parametrize("mode", [0o644, 0o755, 0o600])
def test_an_uploaded_file_keeps_its_permission_bits(run: Run, tmp_path: Path, mode: int) -> None:
    source = tmp_path / "tool"
    source.write_text("#!/bin/sh\necho ran\n")
    source.chmod(mode)

    async def body(sandbox: Sandbox) -> None:
        await sandbox.upload_file("/app/bin/tool", source)
        shown = await sandbox.execute_command("stat -c %a bin/tool", working_dir="/app")
        assert shown.stdout.strip() == f"{mode:o}"
        if mode & 0o100:
            assert (await sandbox.execute_command("bin/tool", working_dir="/app")).stdout == "ran\n"

    run(body)


def test_a_local_file_that_is_not_there_is_no_reason_to_retry(run: Run, tmp_path: Path) -> None:
    async def body(sandbox: Sandbox) -> None:
        with pytest.raises(SandboxError) as raised:
            await sandbox.upload_file("/app/x", tmp_path / "missing")
        assert not raised.value.retryable

    run(body)


@pytest.mark.parametrize("path", ["/app/missing", "/app"])
def test_what_cannot_be_downloaded_is_no_reason_to_retry(run: Run, path: str) -> None:
    async def body(sandbox: Sandbox) -> None:
        await sandbox.upload_bytes("/app/there", b"")
        with pytest.raises(SandboxError) as raised:
            await sandbox.download(path)
        assert not raised.value.retryable

    run(body)


def test_calls_after_deletion_are_refused_and_waiting_ends(
    provider: Callable[..., SandboxProvider], spec: Callable[..., SandboxSpec]
) -> None:
    async def main() -> None:
        sandboxes = provider()
        try:
            async with sandboxes.create(spec()) as sandbox:
                job = await sandbox.start_job("sleep 60")
                waiting = asyncio.create_task(job.wait())
                await asyncio.sleep(0)
            with pytest.raises(SandboxError):
                await waiting
            for call in (sandbox.execute_command("true"), sandbox.start_job("true"), sandbox.upload_bytes("/x", b"")):
                with pytest.raises(SandboxError):
                    await call
            with pytest.raises(SandboxError):
                await sandbox.download("/x")
        finally:
            await sandboxes.aclose()

    asyncio.run(main())


def test_closing_the_provider_ends_open_sandboxes_and_makes_no_more(
    provider: Callable[..., SandboxProvider], spec: Callable[..., SandboxSpec]
) -> None:
    async def main() -> None:
        sandboxes = provider()
        context = sandboxes.create(spec())
        sandbox = await context.__aenter__()
        job = await sandbox.start_job("sleep 60")
        waiting = asyncio.create_task(job.wait())
        await asyncio.sleep(0)
        await sandboxes.aclose()
        with pytest.raises(SandboxError):
            await waiting
        await context.__aexit__(None, None, None)
        with pytest.raises(SandboxError, match="closed"):
            await sandboxes.create(spec()).__aenter__()

    asyncio.run(main())


def test_the_error_of_the_body_comes_through_and_the_sandbox_goes(
    provider: Callable[..., SandboxProvider], spec: Callable[..., SandboxSpec]
) -> None:
    async def main() -> None:
        sandboxes = provider()
        try:
            with pytest.raises(ZeroDivisionError):
                async with sandboxes.create(spec()) as sandbox:
                    raise ZeroDivisionError
            with pytest.raises(SandboxError):
                await sandbox.execute_command("true")
        finally:
            await sandboxes.aclose()

    asyncio.run(main())


def test_an_unused_provider_closes(provider: Callable[..., SandboxProvider]) -> None:
    async def main() -> None:
        await provider().aclose()

    asyncio.run(main())
