"""Files in the emulator's sandboxes, and the states that a sandbox can get into."""

from __future__ import annotations

import asyncio
import io
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from prime_sandboxes import APIError, AsyncSandboxClient, StartCommand
from prime_sandboxes.exceptions import (
    SandboxFileNotFoundError,
    SandboxFileTooLargeError,
    SandboxImagePullError,
    SandboxNotRunningError,
    SandboxOOMError,
    SandboxTimeoutError,
)
from support import wait_until

from emulators.drive import NOTHING, a_request, completed, row, run, running, until
from emulators.prime import PrimeEmulator
from emulators.prime.paths import PathView, kept_paths


class TestFiles:
    def test_bytes_and_text_survive_the_way_there_and_back(self, emulator: PrimeEmulator, tmp_path: Path) -> None:
        binary = bytes(range(256)) * 100
        text = b"#!/bin/sh\nmkdir -p /logs/verifier\necho 1 > /logs/verifier/reward.txt\n"

        async def test(client: AsyncSandboxClient) -> None:
            async with running(client) as sandbox:
                for path, content in (("/tmp/a.bin", binary), ("/tests/test.sh", text), ("/opt/agent/x.py", b"1\n")):
                    response = await client.upload_bytes(sandbox.id, path, content, "name")
                    assert (response.success, response.path, response.size) == (True, path, len(content))
                    await client.download_file(sandbox.id, path, str(tmp_path / "back"))
                    assert (tmp_path / "back").read_bytes() == content
                got = await client.execute_command(sandbox.id, "sh /tests/test.sh; cat /opt/agent/x.py")
                assert (got.exit_code, got.stdout, got.stderr) == (0, "1\n", "")
                assert (await client.read_file(sandbox.id, "/logs/verifier/reward.txt")).content == "1\n"
                (tmp_path / "local").write_bytes(b"from disk")
                await client.upload_file(sandbox.id, "/app/deep/file", str(tmp_path / "local"))
                assert (await client.read_file(sandbox.id, "/app/deep/file")).content == "from disk"
                with pytest.raises(SandboxFileNotFoundError):
                    await client.read_file(sandbox.id, "/tmp/none")
                with pytest.raises(APIError, match="HTTP 404"):
                    await client.download_file(sandbox.id, "/tmp/none", str(tmp_path / "back"))

        run(test)
        assert not Path("/opt/agent").exists()

    def test_scripts_in_an_archive_write_into_their_sandbox(self, emulator: PrimeEmulator) -> None:
        script = b"echo 0.5 > /logs/reward.txt\n"
        archive = io.BytesIO()
        with tarfile.open(fileobj=archive, mode="w:gz") as tar:
            member = tarfile.TarInfo("test.sh")
            member.size = len(script)
            tar.addfile(member, io.BytesIO(script))

        async def test(client: AsyncSandboxClient) -> None:
            async with running(client) as sandbox:
                await client.upload_bytes(sandbox.id, "/tmp/t.tar.gz", archive.getvalue(), "t.tar.gz")
                got = await client.execute_command(sandbox.id, "tar xzf /tmp/t.tar.gz -C /tests && sh /tests/test.sh")
                assert got.exit_code == 0
                assert (await client.read_file(sandbox.id, "/logs/reward.txt")).content == "0.5\n"

        run(test)

    def test_reads_are_whole_and_limited(self, own: Callable[..., PrimeEmulator]) -> None:
        own(read_limit=1000)

        async def test(client: AsyncSandboxClient) -> None:
            async with running(client) as sandbox:
                await client.execute_command(sandbox.id, "head -c 1001 /dev/zero > /tmp/big; echo abc > /tmp/small")
                with pytest.raises(SandboxFileTooLargeError):
                    await client.read_file(sandbox.id, "/tmp/big", offset=-10, length=10)
                got = await client.read_file(sandbox.id, "/tmp/small", offset=-2, length=2)
                assert (got.content, got.offset) == ("abc\n", None)

        run(test)

    def test_windows_where_they_are_supported(self, own: Callable[..., PrimeEmulator]) -> None:
        own(windowed_reads=True, read_limit=4)

        async def test(client: AsyncSandboxClient) -> None:
            async with running(client) as sandbox:
                await client.execute_command(sandbox.id, "printf 0123456789 > /tmp/x")
                got = await client.read_file(sandbox.id, "/tmp/x", offset=-4, length=4)
                assert (got.content, got.offset, got.total_size, got.truncated) == ("6789", 6, 10, True)

        run(test)

    def test_paths_are_rewritten_where_a_shell_would_begin_a_word(self, tmp_path: Path) -> None:
        root = tmp_path / "sandbox"
        view = PathView(root, kept_paths(tmp_path))
        for inside in ("cat {}/tmp/x", "x={}/logs", "A={}/app:{}/root", '"{}/tests/a b"', "echo >{}/tmp/y;{}/app/z"):
            assert view.enter(inside.replace("{}", "")) == inside.replace("{}", str(root))
        for outside in (
            "http://host/tmp/x",
            "http://127.0.0.1:80/app",
            "$DIR/tmp",
            "${DIR}/tmp",
            "../tmp",
            "/usr/tmp",
            "/tmpfile",
            "/tmp.d",
            "/application",
            f"{sys.prefix}/bin/python",
            f"'{tmp_path}/tmp'",
        ):
            assert view.enter(outside) == outside
        assert view.leave(f"{root}/tmp/x {root}\n".encode()) == b"/tmp/x /\n"
        assert view.locate("../../etc/passwd") == root / "etc/passwd"
        assert view.locate("x", cwd="/app") == root / "app/x"

    def test_programs_of_the_host_can_be_named(self, emulator: PrimeEmulator) -> None:
        async def test(client: AsyncSandboxClient) -> None:
            async with running(client) as sandbox:
                script = "import os; print(os.getcwd(), open('/tmp/in').read(), os.environ['HOME'])"
                await client.upload_bytes(sandbox.id, "/app/main.py", script.encode(), "main.py")
                await client.upload_bytes(sandbox.id, "/tmp/in", b"text", "in")
                job = await client.start_background_job(sandbox.id, f"{sys.executable} /app/main.py", "/app")
                assert await completed(client, job) == 0
                assert (await client.get_background_job(sandbox.id, job)).stdout == "/app text /root\n"

        run(test)


class TestStates:
    def test_an_image_that_cannot_be_pulled(self, emulator: PrimeEmulator) -> None:
        emulator.image("none:1", pull_fails=True)

        async def test(client: AsyncSandboxClient) -> None:
            sandbox = await client.create(a_request(docker_image="none:1"))
            with pytest.raises(SandboxImagePullError):
                await client.wait_for_creation(sandbox.id)
            assert emulator.leaked()["sandboxes"] == [sandbox.id]
            await client.delete(sandbox.id)

        run(test)

    def test_out_of_memory_at_start(self, emulator: PrimeEmulator) -> None:
        emulator.image("big:1", oom_at_start=True)

        async def test(client: AsyncSandboxClient) -> None:
            with pytest.raises(SandboxOOMError):
                async with running(client, docker_image="big:1"):
                    pytest.fail("it started")

        run(test)

    def test_a_start_command_runs_without_being_asked_for(self, emulator: PrimeEmulator) -> None:
        async def test(client: AsyncSandboxClient) -> None:
            command = StartCommand(executable="sh", args=["-c", "echo started > /tmp/mark; exec sleep 60"])
            async with running(client, start_command=command) as sandbox:

                async def marked() -> bool:
                    return (await client.execute_command(sandbox.id, "cat /tmp/mark")).stdout == "started\n"

                await until(marked)
                assert len(row(emulator, sandbox.id)["processes"]) == 1
            with pytest.raises(SandboxNotRunningError, match="START_COMMAND_FAILED"):
                async with running(client, start_command=StartCommand(executable="/none")):
                    pytest.fail("it started")

        run(test)

    def test_a_first_use_builds_the_image(self, emulator: PrimeEmulator) -> None:
        emulator.image("new:1", build_seconds=3.0)

        async def test(client: AsyncSandboxClient) -> None:
            first = await client.create(a_request(docker_image="new:1"))
            second = await client.create(a_request(docker_image="new:1"))
            both = await client.get_sandbox_statuses([first.id, second.id])
            assert [status.status for status in both.statuses] == ["PENDING", "PENDING"]
            assert first.pending_image_build_id == second.pending_image_build_id is not None

            async def started() -> bool:
                both = await client.get_sandbox_statuses([first.id, second.id])
                return all(s.status == "RUNNING" and s.pending_image_build_id is None for s in both.statuses)

            await until(started)
            async with running(client, docker_image="new:1") as third:
                assert third.pending_image_build_id is None
            await client.bulk_delete(sandbox_ids=[first.id, second.id])

        run(test)

    def test_a_sandbox_that_dies_takes_its_processes_along(self, emulator: PrimeEmulator) -> None:
        async def test(client: AsyncSandboxClient) -> None:
            async with running(client) as sandbox:
                job = await client.start_background_job(sandbox.id, "sleep 60")
                command = asyncio.create_task(client.execute_command(sandbox.id, "echo begun; sleep 60"))
                await until(lambda: asyncio.to_thread(lambda: len(row(emulator, sandbox.id)["processes"]) == 2))
                emulator.end_sandbox(sandbox.id)
                with pytest.raises((APIError, SandboxOOMError)):
                    await command
                with pytest.raises(APIError, match="NOT_RUNNING"):
                    await client.get_background_job_statuses([job])
                with pytest.raises(SandboxOOMError):
                    await client.execute_command(sandbox.id, "true")
                with pytest.raises(SandboxOOMError):
                    await client.read_file(sandbox.id, "/tmp/x")
                assert row(emulator, sandbox.id)["status"] == "ERROR"
                assert emulator.leaked()["processes"] == []

        run(test)

    def test_a_lifetime_ends_a_sandbox(self, own: Callable[..., PrimeEmulator]) -> None:
        emulator = own(minute_seconds=3.0)

        async def test(client: AsyncSandboxClient) -> None:
            sandbox = await client.create(a_request(timeout_minutes=1))
            longer = await client.create(a_request(timeout_minutes=1000))
            await client.wait_for_creation(sandbox.id)
            await client.start_background_job(sandbox.id, "sleep 60")
            wait_until(lambda: row(emulator, sandbox.id)["status"] == "TIMEOUT")
            with pytest.raises(SandboxTimeoutError):
                await client.wait_for_creation(sandbox.id)
            assert row(emulator, longer.id)["status"] == "RUNNING"
            assert emulator.leaked() == {**NOTHING, "sandboxes": [longer.id]}

        run(test)
