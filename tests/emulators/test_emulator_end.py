"""However the emulator or its holder ends, nothing that it started is left."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from prime_sandboxes import AsyncSandboxClient
from prime_tunnel import Tunnel
from support import wait_until

from emulators.drive import a_request, alive, run
from emulators.prime import PrimeEmulator


class TestItsEnd:
    def test_stopping_ends_everything_it_started(self, own: Callable[..., PrimeEmulator]) -> None:
        emulator = own()
        tunnel = Tunnel(1)

        async def test(client: AsyncSandboxClient) -> None:
            sandbox = await client.create(a_request())
            await client.wait_for_creation(sandbox.id)
            await client.start_background_job(sandbox.id, "setsid sleep 60 & sleep 60")
            await tunnel.start()

        run(test)
        (sandbox,) = emulator.sandboxes()
        (pid,) = sandbox["processes"]
        frpc = emulator.tunnels()[0]["frpc_pid"]
        assert alive(pid)
        assert alive(frpc)
        emulator.stop()
        wait_until(lambda: not alive(pid) and not alive(frpc))
        assert not Path(sandbox["directory"]).parent.exists()
        assert sorted(path.name for path in emulator.directory.iterdir()) == ["emulator.log"]
        assert emulator.log.read_text() == ""
        tunnel.sync_stop()

    def test_it_ends_with_the_process_that_started_it(self, tmp_path: Path) -> None:
        """A test process that is killed leaves neither a server nor a sandbox behind."""
        code = (
            "import asyncio, os, sys, time\n"
            "from emulators.prime import PrimeEmulator\n"
            f"emulator = PrimeEmulator({str(tmp_path / 'prime')!r})\n"
            "emulator.start()\n"
            "os.environ.update(emulator.environ)\n"
            "from prime_sandboxes import SandboxClient, APIClient, CreateSandboxRequest\n"
            "client = SandboxClient(APIClient())\n"
            "sandbox = client.create(CreateSandboxRequest(name='n', docker_image='i'))\n"
            "client.wait_for_creation(sandbox.id)\n"
            "client.start_background_job(sandbox.id, 'sleep 60')\n"
            "(row,) = emulator.sandboxes()\n"
            "print(emulator._process.pid, row['processes'][0], row['directory'], flush=True)\n"
            "time.sleep(60)\n"
        )
        tests = Path(__file__).parents[1]
        env = {**os.environ, "PYTHONPATH": f"{tests}:{tests.parent}"}
        process = subprocess.Popen([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        with process, process.stdout:
            *pids, directory = process.stdout.readline().split()
            server, job = map(int, pids)
            assert alive(server)
            assert alive(job)
            process.kill()
        wait_until(lambda: not alive(server) and not alive(job))
        wait_until(lambda: not Path(directory).parent.exists())

    def test_its_own_death_leaves_nothing_either(self, own: Callable[..., PrimeEmulator]) -> None:
        emulator = own()

        async def test(client: AsyncSandboxClient) -> None:
            sandbox = await client.create(a_request())
            await client.wait_for_creation(sandbox.id)
            await client.start_background_job(sandbox.id, "sleep 60")
            await Tunnel(1).start()

        run(test)
        (sandbox,) = emulator.sandboxes()
        (pid,) = sandbox["processes"]
        frpc = emulator.tunnels()[0]["frpc_pid"]
        assert emulator._process is not None
        emulator._process.kill()
        wait_until(lambda: not alive(pid) and not alive(frpc))
        wait_until(lambda: not Path(sandbox["directory"]).parent.exists())
        with pytest.raises(RuntimeError, match="has ended"):
            emulator.requests()
