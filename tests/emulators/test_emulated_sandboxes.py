"""A sandbox's life in the emulator, its commands and its jobs, under the unmodified SDK."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import prime_sandboxes
import prime_tunnel
import prime_tunnel.binary
import pytest
from prime_sandboxes import APIError, AsyncSandboxClient, BackgroundJob
from prime_sandboxes.exceptions import (
    CommandTimeoutError,
    SandboxNotRunningError,
)
from support import wait_until

from emulators.drive import NOTHING, a_request, alive, completed, counted, row, run, running, until
from emulators.prime import PrimeEmulator


class TestLifecycle:
    def test_a_whole_life_takes_seven_requests(self, emulator: PrimeEmulator) -> None:
        before = emulator.requests()

        async def test(client: AsyncSandboxClient) -> None:
            async with running(client) as sandbox:
                job = await client.start_background_job(sandbox.id, "echo out; echo err >&2; exit 3")
                wait_until(lambda: not row(emulator, sandbox.id)["processes"])
                assert await completed(client, job) == 3
                status = await client.get_background_job(sandbox.id, job)
                assert (status.exit_code, status.stdout, status.stderr) == (3, "out\n", "err\n")

        run(test)
        counts = counted(emulator, before)
        # The poll that get_background_job makes of its own is the third command.
        assert counts == {
            "create_sandbox": 1,
            "sandbox_statuses": 1,
            "command": 3,
            "job_statuses": 1,
            "read_file": 2,
            "delete_sandbox": 1,
        }

    def test_a_creation_is_recorded_whole(self, emulator: PrimeEmulator) -> None:
        async def test(client: AsyncSandboxClient) -> None:
            async with running(
                client,
                labels=["fleet", "worker-1"],
                environment_vars={"A": "1"},
                secrets={"TOKEN": "hush"},
                timeout_minutes=7,
                cpu_cores=2,
                team_id="team-1",
                idempotency_key="key-1",
                advanced_configs={"x": 1},
            ) as sandbox:
                assert sandbox.status == "PENDING"
                got = await client.get(sandbox.id)
                assert (got.status, got.labels, got.secrets) == ("RUNNING", ["fleet", "worker-1"], {"TOKEN": "***"})
                known = row(emulator, sandbox.id)
                assert known["secrets"] == {"TOKEN": "hush"}
                assert known["environment_vars"] == {"A": "1"}
                assert known["resources"]["cpu_cores"] == 2
                assert known["advanced_configs"] == {"x": 1}
                assert (known["timeout_minutes"], known["team_id"], known["idempotency_key"]) == (7, "team-1", "key-1")
            assert row(emulator, sandbox.id)["deleted"]

        run(test)

    def test_one_idempotency_key_is_one_sandbox(self, emulator: PrimeEmulator) -> None:
        async def test(client: AsyncSandboxClient) -> None:
            first = await client.create(a_request(idempotency_key="same"))
            second = await client.create(a_request(idempotency_key="same"))
            other = await client.create(a_request())
            assert first.id == second.id != other.id
            for sandbox_id in (first.id, other.id):
                await client.delete(sandbox_id)

        run(test)

    def test_sandboxes_are_listed_and_deleted_by_label(self, emulator: PrimeEmulator) -> None:
        async def test(client: AsyncSandboxClient) -> None:
            made = [await client.create(a_request(labels=["batch", f"n{i % 2}"])) for i in range(5)]
            listed = await client.list(labels=["batch", "n0"], exclude_terminated=True)
            assert {sandbox.id for sandbox in listed.sandboxes} == {made[i].id for i in (0, 2, 4)}
            page = await client.list(labels=["batch"], per_page=2, page=3)
            assert (len(page.sandboxes), page.total, page.has_next) == (1, 5, False)
            result = await client.bulk_delete(labels=["batch", "n0"])
            assert len(result.succeeded) == 3
            result = await client.bulk_delete(sandbox_ids=[made[1].id, made[3].id, made[0].id])
            assert len(result.succeeded) == 2
            assert [failure["sandbox_id"] for failure in result.failed] == [made[0].id]
            # One that is deleted is still listed, unless only the active ones are asked for.
            assert (await client.list(labels=["batch"])).total == 5
            assert (await client.list(labels=["batch"], exclude_terminated=True)).total == 0

        run(test)

    def test_a_deleted_sandbox_answers_404(self, emulator: PrimeEmulator) -> None:
        async def test(client: AsyncSandboxClient) -> None:
            async with running(client) as alive:
                async with running(client) as sandbox:
                    job = await client.start_background_job(sandbox.id, "sleep 60")
                    other = await client.start_background_job(alive.id, "sleep 60")
                for call in (client.delete, client.get):
                    with pytest.raises(APIError, match="HTTP 404"):
                        await call(sandbox.id)
                with pytest.raises(SandboxNotRunningError):
                    await client.execute_command(sandbox.id, "true")
                with pytest.raises(SandboxNotRunningError):
                    await client.read_file(sandbox.id, "/tmp/x")
                batch = await client.get_sandbox_statuses([sandbox.id, alive.id])
                assert [error.code for error in batch.errors] == ["NOT_FOUND"]
                assert [status.status for status in batch.statuses] == ["RUNNING"]
                # One deleted sandbox poisons a batch of the public call.
                with pytest.raises(APIError, match="NOT_FOUND"):
                    await client.get_background_job_statuses([job, other])

        run(test)

    def test_without_gateway_auth_the_sdk_asks_for_a_token(self, own: Callable[..., PrimeEmulator]) -> None:
        emulator = own(gateway_auth=False)

        async def test(client: AsyncSandboxClient) -> None:
            async with running(client) as sandbox:
                await client.execute_command(sandbox.id, "true")

        run(test)
        assert emulator.requests()["sandbox_auth"] == 1

    def test_a_token_that_expired_is_fetched_anew(self, emulator: PrimeEmulator) -> None:
        before = emulator.requests()

        async def test(client: AsyncSandboxClient) -> None:
            async with running(client) as sandbox:
                emulator.expire_tokens(sandbox.id)
                assert (await client.execute_command(sandbox.id, "echo hi")).stdout == "hi\n"

        run(test)
        assert counted(emulator, before)["sandbox_auth"] == 1


class TestCommands:
    def test_output_exit_code_directory_and_variables(self, emulator: PrimeEmulator) -> None:
        async def test(client: AsyncSandboxClient) -> None:
            async with running(client, environment_vars={"A": "1", "AT": "/logs/x"}, secrets={"S": "2"}) as sandbox:
                command = 'echo "$A$S$B $AT"; pwd; echo err >&2; exit 7'
                got = await client.execute_command(sandbox.id, command, working_dir="/app", env={"B": "3"})
                assert (got.stdout, got.stderr, got.exit_code) == ("123 /logs/x\n/app\n", "err\n", 7)
                killed = await client.execute_command(sandbox.id, "kill -9 $$")
                assert killed.exit_code == 137
                big = await client.execute_command(sandbox.id, "head -c 1000000 /dev/zero | tr '\\0' x")
                assert big.stdout == "x" * 1_000_000
                missing = client.execute_command(sandbox.id, "true", working_dir="/app/none")
                with pytest.raises(APIError, match="does not exist"):
                    await missing
                with pytest.raises(APIError, match="nobody-here"):
                    await client.execute_command(sandbox.id, "true", user="nobody-here")

        run(test)

    def test_every_sandbox_has_folders_of_its_own(self, emulator: PrimeEmulator) -> None:
        async def test(client: AsyncSandboxClient) -> None:
            async with running(client) as first, running(client) as second:
                for number, sandbox in enumerate((first, second)):
                    await client.execute_command(sandbox.id, f"echo {number} > /tmp/each-has; echo {number} > $HOME/y")
                for number, sandbox in enumerate((first, second)):
                    assert (await client.read_file(sandbox.id, "/tmp/each-has")).content == f"{number}\n"
                    assert (await client.read_file(sandbox.id, "/root/y")).content == f"{number}\n"

        run(test)
        assert not Path("/tmp/each-has").exists()

    def test_a_deadline_kills_the_command(self, emulator: PrimeEmulator) -> None:
        async def test(client: AsyncSandboxClient) -> None:
            async with running(client) as sandbox:
                with pytest.raises(CommandTimeoutError):
                    await client.execute_command(sandbox.id, "sleep 60", timeout=1)
                wait_until(lambda: row(emulator, sandbox.id)["processes"] == [])

        run(test)

    def test_what_a_command_left_in_the_background_does_not_hold_it(self, emulator: PrimeEmulator) -> None:
        async def test(client: AsyncSandboxClient) -> None:
            async with running(client) as sandbox:
                got = await client.execute_command(sandbox.id, "sleep 60 & echo done")
                assert got.stdout == "done\n"

        run(test)

    def test_deletion_kills_what_left_its_session(self, emulator: PrimeEmulator) -> None:
        async def test(client: AsyncSandboxClient) -> None:
            async with running(client) as sandbox:
                got = await client.execute_command(sandbox.id, "setsid sleep 60 > /dev/null 2>&1 & echo $!")
                pid = int(got.stdout)
                assert alive(pid)
            assert emulator.leaked() == NOTHING
            assert not alive(pid)

        run(test)


class TestJobs:
    def test_variables_quotes_and_directory_reach_the_job(self, emulator: PrimeEmulator) -> None:
        async def test(client: AsyncSandboxClient) -> None:
            async with running(client) as sandbox:
                command = """echo "$FOO|$BAR" > /tmp/out; pwd; printf '%s' "it's \\"x\\"" """
                env = {"FOO": "it's", "BAR": "a b;$c"}
                job = await client.start_background_job(sandbox.id, command, working_dir="/workspace", env=env)
                assert await completed(client, job) == 0
                assert (await client.read_file(sandbox.id, "/tmp/out")).content == "it's|a b;$c\n"
                assert (await client.get_background_job(sandbox.id, job)).stdout == '/workspace\nit\'s "x"'

        run(test)

    def test_a_job_is_one_process_and_can_be_killed(self, emulator: PrimeEmulator) -> None:
        async def test(client: AsyncSandboxClient) -> None:
            async with running(client) as sandbox:
                job = await client.start_background_job(sandbox.id, "sleep 60", env={"A": "1"})
                (pid,) = row(emulator, sandbox.id)["processes"]
                wait_until(lambda: Path(f"/proc/{pid}/cmdline").read_bytes() == b"sleep\x0060\x00")
                assert not (await client.get_background_job(sandbox.id, job)).completed
                pid_file = f"/tmp/job_{job.job_id}.launch/pid"
                await client.execute_command(sandbox.id, f"kill -TERM $(cat {pid_file})")
                assert await completed(client, job) == 143

        run(test)

    @pytest.mark.parametrize("command", ["cat <<EOF\nhello\nEOF\n", "(echo a; echo b) # both"])
    def test_a_launch_that_does_not_parse_is_really_run(self, emulator: PrimeEmulator, command: str) -> None:
        async def test(client: AsyncSandboxClient) -> None:
            async with running(client) as sandbox:
                if "#" in command:  # in the SDK's parentheses this is a syntax error, here as on the platform
                    with pytest.raises(APIError, match="did not start"):
                        await client.start_background_job(sandbox.id, command)
                    return
                job = await client.start_background_job(sandbox.id, command)
                assert await completed(client, job) == 0
                assert (await client.get_background_job(sandbox.id, job)).stdout == "hello\n"

        run(test)

    def test_a_really_run_job_that_is_killed_whole_is_lost(self, emulator: PrimeEmulator) -> None:
        async def test(client: AsyncSandboxClient) -> None:
            async with running(client) as sandbox:
                job = await client.start_background_job(sandbox.id, "echo $((1)) ${x#y}; sleep 60")
                assert not (await client.get_background_job(sandbox.id, job)).completed
                (status,) = await client.get_background_job_statuses([job])
                assert not status.completed
                pid_file = f"/tmp/job_{job.job_id}.launch/pid"
                await client.execute_command(
                    sandbox.id, f"pid=$(cat {pid_file}); pkill -9 -P $pid & kill -9 $pid; wait"
                )
                with pytest.raises(APIError, match="without recording an exit code"):
                    await client.get_background_job(sandbox.id, job)
                with pytest.raises(APIError, match="RUNTIME_ERROR"):
                    await client.get_background_job_statuses([job])

        run(test)

    def test_a_directory_that_does_not_exist_fails_the_job(self, emulator: PrimeEmulator) -> None:
        async def test(client: AsyncSandboxClient) -> None:
            async with running(client) as sandbox:
                job = await client.start_background_job(sandbox.id, "echo no", working_dir="/app/none")
                assert await completed(client, job) == 1
                assert "can't cd" in ((await client.get_background_job(sandbox.id, job)).stderr or "")

        run(test)

    def test_one_entry_of_a_batch_can_fail(self, emulator: PrimeEmulator) -> None:
        async def test(client: AsyncSandboxClient) -> None:
            async with running(client) as first, running(client) as second:
                jobs = [await client.start_background_job(sandbox.id, "sleep 60") for sandbox in (first, second)]
                emulator.fault("job_statuses", code="RUNTIME_ERROR", sandbox_id=first.id)
                with pytest.raises(APIError, match=f"{first.id}.*RUNTIME_ERROR"):
                    await client.get_background_job_statuses(jobs)
                assert len(await client.get_background_job_statuses(jobs)) == 2

        run(test)


def test_sixty_sandboxes_at_once(emulator: PrimeEmulator) -> None:
    async def test(client: AsyncSandboxClient) -> None:
        async def one(number: int) -> BackgroundJob:
            sandbox = await client.create(a_request(labels=["many"]))
            await client.wait_for_creation(sandbox.id)
            return await client.start_background_job(sandbox.id, f"echo {number}; exit {number}")

        jobs = await asyncio.gather(*(one(number) for number in range(60)))

        async def all_done() -> bool:
            return all(status.completed for status in await client.get_background_job_statuses(jobs))

        await until(all_done)
        outcomes = [(await client.get_background_job(job.sandbox_id, job)) for job in jobs]
        assert [(o.exit_code, o.stdout) for o in outcomes] == [(n, f"{n}\n") for n in range(60)]
        assert len((await client.bulk_delete(labels=["many"])).succeeded) == 60

    before = emulator.requests()
    run(test)
    counts = counted(emulator, before)
    assert counts["create_sandbox"] == 60
    assert counts["sandbox_statuses"] <= 60


def test_the_sdks_are_the_ones_that_this_was_written_for() -> None:
    assert prime_sandboxes.__version__.startswith("0.5.")
    assert prime_tunnel.__version__.startswith("0.1.")
