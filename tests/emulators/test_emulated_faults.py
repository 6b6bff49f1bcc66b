"""Each kind of fault that the emulator injects, as the SDK sees it."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
from prime_sandboxes import APIError, AsyncSandboxClient
from prime_sandboxes.core.client import PaymentRequiredError, UnauthorizedError

from emulators.drive import a_request, counted, create_and_delete, row, run, running, until
from emulators.prime import PrimeEmulator


class TestFaults:
    def test_a_status_with_words_and_retry_after(self, emulator: PrimeEmulator) -> None:
        emulator.fault("list_sandboxes", status=429, detail="slow down", retry_after=2)
        auth = {"Authorization": f"Bearer {emulator.api_key}"}
        answer = httpx.get(f"{emulator.api_url}/api/v1/sandbox", headers=auth)
        assert (answer.status_code, answer.headers["retry-after"], answer.json()) == (429, "2", {"detail": "slow down"})
        assert httpx.get(f"{emulator.api_url}/api/v1/sandbox", headers=auth).status_code == 200

    @pytest.mark.parametrize(
        ("status", "error"), [(401, UnauthorizedError), (402, PaymentRequiredError), (500, APIError)]
    )
    def test_a_failed_creation_creates_nothing(
        self, emulator: PrimeEmulator, status: int, error: type[Exception]
    ) -> None:
        made = len(emulator.sandboxes())
        emulator.fault("create_sandbox", status=status)

        async def test(client: AsyncSandboxClient) -> None:
            with pytest.raises(error):
                await client.create(a_request())

        run(test)
        assert len(emulator.sandboxes()) == made

    @pytest.mark.parametrize("drop", ["before", "after"])
    def test_a_dropped_creation_is_repeated_by_the_sdk_with_its_key(self, emulator: PrimeEmulator, drop: Any) -> None:
        before, made = emulator.requests(), len(emulator.sandboxes())
        emulator.fault("create_sandbox", drop=drop)
        run(create_and_delete)
        assert counted(emulator, before)["create_sandbox"] == 2
        assert len(emulator.sandboxes()) == made + 1

    def test_a_creation_dropped_after_its_effect_exists(self, emulator: PrimeEmulator) -> None:
        emulator.fault("create_sandbox", drop="after", times=3)

        async def test(client: AsyncSandboxClient) -> None:
            with pytest.raises(APIError):
                await client.create(a_request(labels=["lost"]))
            (lost,) = (await client.list(labels=["lost"])).sandboxes
            await client.delete(lost.id)

        run(test)

    def test_a_deletion_dropped_after_its_effect_ends_as_404(self, emulator: PrimeEmulator) -> None:
        emulator.fault("delete_sandbox", drop="after")

        async def test(client: AsyncSandboxClient) -> None:
            sandbox = await client.create(a_request())
            with pytest.raises(APIError, match="HTTP 404"):
                await client.delete(sandbox.id)

        run(test)

    @pytest.mark.parametrize("hang", [True, "after"])
    def test_a_hung_creation(self, emulator: PrimeEmulator, hang: Any) -> None:
        before = emulator.requests()
        emulator.fault("create_sandbox", hang=hang)

        async def test(client: AsyncSandboxClient) -> None:
            creation = asyncio.create_task(client.create(a_request(labels=[f"hung-{hang}"])))

            async def asked() -> bool:
                return "create_sandbox" in counted(emulator, before)

            await until(asked)
            creation.cancel()
            with pytest.raises(asyncio.CancelledError):
                await creation
            made = (await client.list(labels=[f"hung-{hang}"], exclude_terminated=True)).sandboxes
            assert len(made) == (1 if hang == "after" else 0)
            for sandbox in made:
                await client.delete(sandbox.id)

        run(test)

    def test_a_slow_answer_comes_after_its_effect(self, emulator: PrimeEmulator) -> None:
        emulator.fault("create_sandbox", delay=0.8)

        async def test(client: AsyncSandboxClient) -> None:
            sandbox = await client.create(a_request())
            assert (datetime.now(UTC) - sandbox.created_at.replace(tzinfo=UTC)).total_seconds() >= 0.8
            await client.delete(sandbox.id)

        run(test)

    def test_a_fault_skips_repeats_and_is_meant_for_one_sandbox(self, emulator: PrimeEmulator) -> None:
        async def test(client: AsyncSandboxClient) -> None:
            async with running(client) as first, running(client) as second:
                emulator.fault("get_sandbox", status=500, sandbox_id=first.id, skip=1, times=2)
                outcomes = []
                for sandbox_id in (first.id, second.id, first.id, second.id, first.id, first.id):
                    try:
                        await client.get(sandbox_id)
                        outcomes.append(True)
                    except APIError:
                        outcomes.append(False)
                assert outcomes == [True, True, False, True, False, True]

        run(test)

    def test_a_launch_dropped_after_its_effect_runs_on(self, emulator: PrimeEmulator) -> None:
        async def test(client: AsyncSandboxClient) -> None:
            async with running(client) as sandbox:
                emulator.fault("command", drop="after", sandbox_id=sandbox.id)
                with pytest.raises(APIError):
                    await client.start_background_job(sandbox.id, "sleep 60")
                assert len(row(emulator, sandbox.id)["processes"]) == 1

        run(test)

    @pytest.mark.parametrize("fault", [{"status": 503}, {"drop": "before"}, {"drop": "after"}, {"status": 429}])
    def test_a_command_that_fails_on_the_way(self, emulator: PrimeEmulator, fault: dict[str, Any]) -> None:
        async def test(client: AsyncSandboxClient) -> None:
            async with running(client) as sandbox:
                before = emulator.requests()
                emulator.fault("command", **fault)
                with pytest.raises(APIError):
                    await client.execute_command(sandbox.id, "echo > /tmp/effect")
                assert counted(emulator, before)["command"] == 1
                if fault.get("drop") == "after":
                    assert (await client.read_file(sandbox.id, "/tmp/effect")).content == "\n"

        run(test)

    def test_uploads_downloads_and_reads_that_fail(self, emulator: PrimeEmulator, tmp_path: Path) -> None:
        async def test(client: AsyncSandboxClient) -> None:
            async with running(client) as sandbox:
                for endpoint in ("upload", "download", "read_file"):
                    emulator.fault(endpoint, status=403, detail="no")
                with pytest.raises(APIError, match="403"):
                    await client.upload_bytes(sandbox.id, "/tmp/x", b"x", "x")
                with pytest.raises(APIError, match="403"):
                    await client.download_file(sandbox.id, "/tmp/x", str(tmp_path / "x"))
                with pytest.raises(APIError, match="403"):
                    await client.read_file(sandbox.id, "/tmp/x")

        run(test)

    def test_without_batches_the_sdk_asks_one_by_one(self, emulator: PrimeEmulator) -> None:
        before = emulator.requests()
        emulator.fault("sandbox_statuses", status=404)

        async def test(client: AsyncSandboxClient) -> None:
            async with running(client):
                pass

        run(test)
        assert counted(emulator, before)["get_sandbox"] == 1

    def test_a_fault_that_does_nothing_is_a_mistake(self, emulator: PrimeEmulator) -> None:
        for wrong in ({"endpoint": "nothing", "status": 500}, {"endpoint": "upload"}):
            with pytest.raises(RuntimeError, match="ValueError"):
                emulator.fault(**wrong)
        emulator.log.write_text("")
