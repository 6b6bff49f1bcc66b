"""Local sandboxes on real processes, under both event loops."""

from __future__ import annotations

import asyncio
import errno
import os
import shlex
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import uvloop

from producer.contract import Phase, Resources
from workers.errors import SandboxError
from workers.reaper import Reaper
from workers.sandboxes import files, local, process
from workers.sandboxes.base import CommandResult, SandboxSpec
from workers.sandboxes.local import LocalSandbox, LocalSandboxes

ROOT = Path(__file__).resolve().parents[2]
Body = Callable[[LocalSandbox], Awaitable[Any]]
Run = Callable[..., Any]


def spec(**fields: Any) -> SandboxSpec:
    return SandboxSpec(**({"name": "test", "image": "ignored"} | fields))


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Run a coroutine function in a sandbox of its own, on a loop of its own, and return what it returns."""

    def run_in_sandbox(body: Body, output_limit: int = 65536, **fields: Any) -> Any:
        async def main() -> Any:
            sandboxes = LocalSandboxes(root=tmp_path / "sandboxes", output_limit=output_limit)
            try:
                async with sandboxes.create(spec(**fields)) as sandbox:
                    assert isinstance(sandbox, LocalSandbox)
                    return await body(sandbox)
            finally:
                await sandboxes.aclose()

        return asyncio.run(main())

    return run_in_sandbox


async def until(predicate: Callable[[], object], what: str) -> None:
    end = time.monotonic() + 30
    while not predicate():
        assert time.monotonic() < end, f"waited 30 s for {what}"
        await asyncio.sleep(0.005)


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def pid_in(file: Path) -> int:
    await until(lambda: file.exists() and file.read_text().strip(), f"a process id in {file}")
    return int(file.read_text())


def variables(result: CommandResult) -> dict[str, str]:
    pairs = (line.partition("=") for line in result.stdout.splitlines())
    return {name: value for name, _, value in pairs}


# Commands


def test_no_worker_variable_leaks(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORKER_PASSWORD", "hidden")
    monkeypatch.setenv("PYTHONPATH", "/worker/only")

    async def body(sandbox: LocalSandbox) -> None:
        shown = variables(await sandbox.execute_command("env"))
        own = {"PATH", "HOME", "TMPDIR", "LANG", "ROLLOUTS_REAP", "ROLLOUTS_SANDBOX", "A"}
        assert set(shown) - {"PWD", "SHLVL", "_", "OLDPWD"} == own
        assert shown["HOME"] == shown["PWD"] == str(sandbox.directory)
        assert Path(shown["TMPDIR"]).parent == sandbox.directory
        assert (shown["A"], shown["LANG"], shown["ROLLOUTS_SANDBOX"]) == ("1", "C.UTF-8", sandbox.id)

    run(body, env={"A": "1"})


def test_variables_of_call_win_over_those_of_spec(run: Run) -> None:
    async def body(sandbox: LocalSandbox) -> None:
        job = await sandbox.start_job("env", env={"B": "call", "HOME": "/nowhere", "ROLLOUTS_SANDBOX": "forged"})
        shown = variables(await job.wait())
        assert (shown["A"], shown["B"], shown["S"], shown["HOME"]) == ("spec", "call", "secret", "/nowhere")
        assert shown["ROLLOUTS_SANDBOX"] == sandbox.id

    run(body, env={"A": "spec", "B": "spec"}, secrets={"S": "secret"})


def test_process_list_shows_the_users_command_and_no_secret(run: Run) -> None:
    async def body(sandbox: LocalSandbox) -> None:
        command = "echo $$ > pid; while :; do sleep 600; done"
        await sandbox.start_job(command)
        shown = psutil.Process(await pid_in(sandbox.directory / "pid")).cmdline()
        assert shown[1:] == ["-c", command]

    run(body, secrets={"KEY": "very-secret"})


def test_python_is_found(run: Run) -> None:
    async def body(sandbox: LocalSandbox) -> None:
        assert (await sandbox.execute_command("python -c 'print(40 + 2)'")).stdout == "42\n"

    run(body)


@pytest.mark.parametrize(
    ("command", "code"), [("exit 3", 3), ("kill -9 $$", 137), ("kill -TERM $$", 143), ("nope", 127)]
)
def test_exit_code(run: Run, command: str, code: int) -> None:
    async def body(sandbox: LocalSandbox) -> None:
        assert (await (await sandbox.start_job(command)).wait()).exit_code == code
        assert (await sandbox.execute_command(command)).exit_code == code

    run(body)


def test_streams_are_kept_apart_and_stdin_is_empty(run: Run) -> None:
    async def body(sandbox: LocalSandbox) -> None:
        result = await sandbox.execute_command("cat; echo out; echo err >&2")
        assert result == CommandResult(0, "out\n", "err\n")

    run(body)


def test_working_dir_is_made_and_lies_in_the_sandbox(run: Run) -> None:
    async def body(sandbox: LocalSandbox) -> None:
        for given, expected in [("a/b", "a/b"), ("/app", "app")]:
            result = await sandbox.execute_command("pwd", working_dir=given)
            assert result.stdout.strip() == str(sandbox.directory / expected)
        with pytest.raises(SandboxError, match="leads out"):
            await sandbox.execute_command("pwd", working_dir="../..")

    run(body)


def test_timeout_kills_the_command_and_tells_what_it_printed(run: Run) -> None:
    async def body(sandbox: LocalSandbox) -> None:
        command = "echo on my way; sh -c 'echo $$ > pid; exec sleep 600'"
        with pytest.raises(SandboxError, match=r"echo on my way; .* exceeded its timeout of 3 s") as caught:
            await sandbox.execute_command(command, timeout=3)
        assert caught.value.detail == "on my way"
        child = await pid_in(sandbox.directory / "pid")
        await until(lambda: not is_running(child), "the end of the command's child")

    run(body)


def test_cancelling_a_command_kills_it(run: Run) -> None:
    async def body(sandbox: LocalSandbox) -> None:
        task = asyncio.create_task(sandbox.execute_command("sh -c 'echo $$ > pid; exec sleep 600'"))
        child = await pid_in(sandbox.directory / "pid")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: not is_running(child), "the end of the command's child")

    run(body)


def test_cancelling_a_start_leaves_no_process(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []
    may_return = threading.Event()
    original = process._popen

    def slow(*args: Any) -> subprocess.Popen[bytes]:
        started.append(original(*args))
        may_return.wait(30)
        return started[-1]

    async def body(sandbox: LocalSandbox) -> None:
        task = asyncio.create_task(sandbox.start_job("exec sleep 600"))
        await until(lambda: started, "the start")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        may_return.set()
        await until(lambda: started[0].returncode == -signal.SIGKILL, "the end of the process")

    monkeypatch.setattr(process, "_popen", slow)
    run(body)


@pytest.mark.parametrize(
    ("command", "env"),
    [("true", {"KEY": "hush\0hush"}), ("true", {"KEY": "hush\ud800"}), ("true", {"K=Y": "hush"}), ("echo \0", {})],
    ids=["NUL in a value", "lone surrogate", "equals sign in a name", "NUL in the command"],
)
def test_what_no_process_can_be_given_is_refused_without_showing_the_value(
    run: Run, command: str, env: dict[str, str]
) -> None:
    async def body(sandbox: LocalSandbox) -> None:
        with pytest.raises(SandboxError, match="could not start the command") as caught:
            await sandbox.start_job(command, env=env)
        assert not caught.value.retryable
        assert "hush" not in f"{caught.value.message} {caught.value.detail}"

    run(body)


def test_command_that_is_too_long_is_refused(run: Run) -> None:
    async def body(sandbox: LocalSandbox) -> None:
        with pytest.raises(SandboxError, match="Argument list too long") as caught:
            await sandbox.start_job(f"echo {'x' * 3_000_000}")
        assert len(caught.value.message) < 200

    run(body)


def test_start_command_runs_as_the_main_process(run: Run) -> None:
    async def body(sandbox: LocalSandbox) -> int:
        main = await pid_in(sandbox.directory / "main")
        assert is_running(main)
        assert (sandbox.directory / "key").read_text() == "k\n"
        return main

    command = "echo $KEY > key; echo $$ > main; exec sleep 600"
    assert not is_running(run(body, start_command=command, secrets={"KEY": "k"}))


# Background jobs


def test_job_ends_although_a_grandchild_keeps_its_output_open(run: Run) -> None:
    async def body(sandbox: LocalSandbox) -> int:
        job = await sandbox.start_job("sleep 600 & echo $! > pid; echo done; exit 4")
        assert await asyncio.wait_for(job.wait(), 30) == CommandResult(4, "done\n", "")
        grandchild = await pid_in(sandbox.directory / "pid")
        assert is_running(grandchild)  # as in a container: it ends with the sandbox
        return grandchild

    assert not is_running(run(body))


def test_wait_may_be_called_by_many_and_cancelled_without_harm(run: Run) -> None:
    async def body(sandbox: LocalSandbox) -> None:
        job = await sandbox.start_job("until [ -e go ]; do sleep 0.01; done; echo went; exit 5")
        waits = [asyncio.create_task(job.wait()) for _ in range(5)]
        done, _ = await asyncio.wait(waits, timeout=0.05)
        assert not done
        waits[0].cancel()
        with pytest.raises(asyncio.CancelledError):
            await waits[0]
        await sandbox.upload_bytes("go", b"")
        assert await asyncio.gather(*waits[1:], job.wait()) == [CommandResult(5, "went\n")] * 5
        assert await job.wait() == CommandResult(5, "went\n")

    run(body)


def test_output_of_a_running_job(run: Run) -> None:
    async def body(sandbox: LocalSandbox) -> None:
        job = await sandbox.start_job("echo early; touch said; until [ -e go ]; do sleep 0.01; done; echo late >&2")
        await until((sandbox.directory / "said").exists, "the first line")
        assert await job.output() == CommandResult(-1, "early\n", "")
        await sandbox.upload_bytes("go", b"")
        assert await job.wait() == await job.output() == CommandResult(0, "early\n", "late\n")

    run(body)


def test_a_million_lines_keep_their_ends_and_do_not_fill_the_memory(run: Run) -> None:
    async def body(sandbox: LocalSandbox) -> None:
        before = psutil.Process().memory_info().rss
        result = await (await sandbox.start_job("seq 1000000; yes error | head -c 50000000 >&2")).wait()
        assert result.stdout.startswith("1\n2\n")
        assert result.stdout.endswith("999999\n1000000\n")
        assert "bytes cut] ..." in result.stdout
        assert len(result.stdout) < 2200
        assert len(result.stderr) < 2200
        assert psutil.Process().memory_info().rss - before < 40_000_000

    run(body, output_limit=2000)


def test_output_is_cut_between_characters(tmp_path: Path) -> None:
    path = tmp_path / "out"
    for shift in range(4):
        path.write_bytes(b"x" * shift + "\N{SNOWMAN}\N{ROCKET}".encode() * 100)
        text = process.read_ends(path, 101)
        assert "\ufffd" not in text
        assert text.startswith("x" * shift + "\N{SNOWMAN}")
        assert text.endswith("\N{ROCKET}")
    path.write_bytes(b"\xff\x80 binary")
    assert process.read_ends(path, 101) == "\ufffd\ufffd binary"


@pytest.mark.parametrize("replace", ["ln -sf /etc/passwd", "mkfifo", "mkdir"])
def test_output_that_an_agent_replaced_is_neither_followed_nor_waited_for(run: Run, replace: str) -> None:
    async def body(sandbox: LocalSandbox) -> None:
        command = f'out=$(readlink /proc/$$/fd/1); rm "$out"; {replace} "$out"; echo still >&2'
        result = await asyncio.wait_for(sandbox.execute_command(command), 30)
        assert result == CommandResult(0, process.REPLACED, "still\n")

    run(body)


def test_output_lies_outside_the_working_directory(run: Run) -> None:
    async def body(sandbox: LocalSandbox) -> None:
        result = await sandbox.execute_command("find . -mindepth 1; readlink /proc/$$/fd/1")
        *found, output = result.stdout.splitlines()
        assert found == ["./tmp"]
        assert not Path(output).is_relative_to(sandbox.directory)

    run(body)


def test_outputs_of_commands_do_not_pile_up(run: Run) -> None:
    async def body(sandbox: LocalSandbox) -> None:
        for _ in range(5):
            await sandbox.execute_command("echo x")
        await until(lambda: not list(sandbox._outputs.iterdir()), "the removal of the output files")

    run(body)


# Limits


def test_files_are_limited_by_disk_gb(run: Run) -> None:
    async def body(sandbox: LocalSandbox) -> None:
        result = await sandbox.execute_command("ulimit -c; exec head -c 100000000 /dev/zero")
        assert result.exit_code == 128 + signal.SIGXFSZ
        assert result.stdout.startswith("0\n")
        assert (await sandbox.execute_command("head -c 100000 /dev/zero > small")).exit_code == 0

    run(body, resources=Resources(disk_gb=0.001))


@pytest.mark.skipif(sys.platform != "linux", reason="other kernels do not enforce RLIMIT_DATA")
def test_memory_is_limited_by_memory_gb(run: Run) -> None:
    async def body(sandbox: LocalSandbox) -> None:
        result = await sandbox.execute_command("python -c 'x = bytearray(300_000_000)'")
        assert "MemoryError" in result.stderr
        assert (await sandbox.execute_command("python -c 'x = bytearray(30_000_000)'")).exit_code == 0

    run(body, resources=Resources(memory_gb=0.2))


def test_an_inherited_lower_limit_is_kept(tmp_path: Path) -> None:
    line = [shlex.quote(part) for part in process.shell_line("ulimit -f", Resources(disk_gb=100))]
    lowered = f"ulimit -f 100; {' '.join(line)}"
    done = subprocess.run(
        ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "/bin/sh", "-c", lowered]
        if os.getuid() == 0
        else ["/bin/sh", "-c", lowered],
        capture_output=True,
        text=True,
        check=True,
        cwd="/",
    )
    assert (done.stdout, done.stderr) == ("50\n", "")


def test_time_to_live_ends_the_processes(run: Run) -> None:
    async def body(sandbox: LocalSandbox) -> None:
        job = await sandbox.start_job("trap '' TERM; setsid sh -c 'echo $$ > pid; exec sleep 600' & sleep 600")
        escaped = await pid_in(sandbox.directory / "pid")
        assert 500 < sandbox._timer.when() - asyncio.get_running_loop().time() <= 600
        sandbox._expire(600.0)  # as the timer does
        with pytest.raises(SandboxError, match=r"exceeded its time to live of 600 s"):
            await asyncio.wait_for(job.wait(), 30)
        await until(lambda: not is_running(escaped), "the end of the escaped process")
        for call in (sandbox.start_job("true"), sandbox.execute_command("true"), sandbox.download("pid"), job.output()):
            with pytest.raises(SandboxError, match="exceeded its time to live"):
                await call

    run(body, ttl=600.0)


# Deletion

AGENTS = {
    "forks": "for i in 1 2 3; do sleep 600 & done; echo $$ > pid; wait",
    "ignores SIGTERM": "trap '' TERM INT HUP; echo $$ > pid; while :; do sleep 600; done",
    "setsid": "setsid sh -c 'echo $$ > pid; exec sleep 600' & wait",
    "double fork": "setsid sh -c 'setsid sh -c \"echo \\$\\$ > pid; exec sleep 600\" &' & exit 0",
    "closes its streams": "exec <&- >&- 2>&-; (setsid sh -c 'echo $$ > pid; exec sleep 600') & exit 0",
    "clears the environment": "env -i PATH=$PATH sh -c 'echo $$ > pid; exec sleep 600' & exit 0",
    "clears it and leaves the group": "env -i PATH=$PATH setsid sh -c 'echo $$ > pid; exec sleep 600' & sleep 600",
    "stopped": "echo $$ > pid; kill -STOP $$",
    "job control": "set -m; sh -c 'echo $$ > pid; exec sleep 600' & exit 0",
}


@pytest.mark.parametrize("agent", AGENTS.values(), ids=AGENTS.keys())
def test_deletion_leaves_nothing(run: Run, tmp_path: Path, agent: str) -> None:
    async def body(sandbox: LocalSandbox) -> set[int]:
        await sandbox.start_job(agent)
        pid = await pid_in(sandbox.directory / "pid")
        assert is_running(pid)
        sessions = {_session(pid)} | {group._popen.pid for group in sandbox._groups}
        return {pid} | {p for p in psutil.pids() if _session(p) in sessions}

    assert [pid for pid in run(body) if is_running(pid)] == []
    assert list((tmp_path / "sandboxes").iterdir()) == []


def _session(pid: int) -> int:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return -1


def test_sandbox_directory_is_private_and_removed_at_once(tmp_path: Path) -> None:
    async def main() -> None:
        sandboxes = LocalSandboxes(root=tmp_path)
        async with sandboxes.create(spec()) as sandbox:
            assert isinstance(sandbox, LocalSandbox)
            for folder in (sandbox.directory, sandbox.directory.parent, sandbox.directory.parent.parent):
                assert stat.S_IMODE(folder.stat().st_mode) == 0o700
            await sandbox.execute_command(
                "mkdir -p ro/deep; touch ro/deep/file; chmod 0 ro/deep/file; chmod 500 ro/deep ro"
            )
        assert not sandbox.directory.parent.exists()
        await sandboxes.aclose()
        assert list(tmp_path.iterdir()) == []

    asyncio.run(main())


def test_cancellation_during_deletion_does_not_stop_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    removing, may_remove = threading.Event(), threading.Event()

    def slow(directory: Path) -> bool:
        removing.set()
        may_remove.wait(30)
        return original(directory)

    original = local.remove_tree
    monkeypatch.setattr(local, "remove_tree", slow)

    async def main() -> None:
        sandboxes = LocalSandboxes(root=tmp_path)
        kept: list[LocalSandbox] = []

        async def use() -> None:
            async with sandboxes.create(spec()) as sandbox:
                assert isinstance(sandbox, LocalSandbox)
                kept.append(sandbox)

        task = asyncio.create_task(use())
        await until(removing.is_set, "the deletion")
        for _ in range(3):
            task.cancel()
            await asyncio.sleep(0)
        assert not task.done()
        may_remove.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not kept[0].directory.exists()
        await sandboxes.aclose()

    asyncio.run(main())


def test_cancelled_creation_deletes_what_was_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    starting, may_start = threading.Event(), threading.Event()
    original = process._popen

    def slow(*args: Any) -> subprocess.Popen[bytes]:
        starting.set()
        may_start.wait(30)
        return original(*args)

    monkeypatch.setattr(process, "_popen", slow)

    async def main() -> None:
        sandboxes = LocalSandboxes(root=tmp_path)

        async def use() -> None:
            async with sandboxes.create(spec(start_command="exec sleep 600")):
                pytest.fail("was cancelled before")

        task = asyncio.create_task(use())
        await until(starting.is_set, "the start")
        (made,) = sandboxes._open
        task.cancel()
        await asyncio.sleep(0)
        may_start.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not made.directory.parent.exists()
        assert not [group for group in made._groups if group.is_alive]
        await sandboxes.aclose()

    asyncio.run(main())


def test_failed_deletion_is_an_error_unless_another_is_on_its_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(local, "remove_tree", lambda directory: False)

    async def main() -> None:
        sandboxes = LocalSandboxes(root=tmp_path)
        with pytest.raises(SandboxError, match="could not be removed") as caught:
            async with sandboxes.create(spec()):
                pass
        assert caught.value.phase is Phase.CLEANUP
        with pytest.raises(KeyError, match="the cause"):
            async with sandboxes.create(spec()):
                raise KeyError("the cause")
        assert "could not be removed" in caplog.text
        await sandboxes.aclose()

    asyncio.run(main())


def test_deletion_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "DELETE_LIMIT", 0.05)
    may_return = threading.Event()

    async def main() -> None:
        sandboxes = LocalSandboxes(root=tmp_path)
        downloads = []

        async def use() -> None:
            async with sandboxes.create(spec()) as sandbox:
                downloads.append(asyncio.create_task(sandbox.download("x")))
                await asyncio.sleep(0)

        with pytest.raises(SandboxError, match="took longer than"):
            await use()
        may_return.set()
        with pytest.raises(SandboxError, match="No such file"):
            await downloads[0]
        await sandboxes.aclose()

    monkeypatch.setattr(files, "read", lambda *_: may_return.wait(30) and files.resolve(*_).read_bytes())
    asyncio.run(main())


def test_a_deletion_that_finds_no_free_descriptor_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, failures = process.carriers, iter(range(3))

    def look(variable: str) -> dict[str, set[int]]:
        if next(failures, None) is not None:
            raise OSError(errno.EMFILE, "Too many open files")
        return original(variable)

    async def main() -> None:
        sandboxes = LocalSandboxes(root=tmp_path)
        async with sandboxes.create(spec()) as sandbox:
            assert isinstance(sandbox, LocalSandbox)
            await sandbox.start_job("setsid sh -c 'echo $$ > pid; exec sleep 600' & sleep 600")
            pid = await pid_in(sandbox.directory / "pid")
        assert not is_running(pid)
        assert not sandbox.directory.exists()
        await sandboxes.aclose()

    monkeypatch.setattr(process, "carriers", look)
    asyncio.run(main())


def test_what_cannot_be_killed_is_looked_for_now_and_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that waits inside the kernel, for a disk that is away, say: looking for it costs everybody time."""
    looks, original = 0, process.carriers

    def look(variable: str) -> dict[str, set[int]]:
        nonlocal looks
        looks += 1
        return original(variable)

    async def main() -> None:
        sandboxes = LocalSandboxes(root=tmp_path)

        async def use() -> None:
            async with sandboxes.create(spec()) as sandbox:
                assert isinstance(sandbox, LocalSandbox)
                await sandbox.start_job("setsid sh -c 'echo $$ > pid; exec sleep 600' & exit 0")
                await pid_in(sandbox.directory / "pid")

        with pytest.raises(SandboxError, match="took longer than"):
            await use()
        assert looks < 10
        await sandboxes.aclose()

    monkeypatch.setattr(local, "DELETE_LIMIT", 0.5)
    monkeypatch.setattr(process, "kill_each", lambda _: None)
    monkeypatch.setattr(process, "carriers", look)
    asyncio.run(main())


def test_calls_after_deletion_are_refused_and_waiting_ends(tmp_path: Path) -> None:
    async def main() -> None:
        sandboxes = LocalSandboxes(root=tmp_path)
        async with sandboxes.create(spec()) as sandbox:
            early = await sandbox.start_job("exit 6")
            assert (await early.wait()).exit_code == 6
            waiting = asyncio.create_task((await sandbox.start_job("sleep 600")).wait())
            running = asyncio.create_task(sandbox.execute_command("sleep 600"))
            await until(lambda: len(sandbox._groups) == 2, "both commands")  # type: ignore[attr-defined]
        for call in (waiting, running, sandbox.execute_command("true"), sandbox.upload_bytes("x", b"")):
            with pytest.raises(SandboxError, match="was deleted"):
                await call
        assert (await early.wait()).exit_code == 6
        await sandboxes.aclose()

    asyncio.run(main())


def test_closing_the_provider_ends_open_sandboxes(tmp_path: Path) -> None:
    async def main() -> None:
        sandboxes = LocalSandboxes(root=tmp_path / "root")
        async with sandboxes.create(spec()) as sandbox:
            job = await sandbox.start_job("setsid sh -c 'echo $$ > pid; exec sleep 600' & sleep 600")
            assert isinstance(sandbox, LocalSandbox)
            escaped = await pid_in(sandbox.directory / "pid")
            await sandboxes.aclose()
            assert not is_running(escaped)
            assert list((tmp_path / "root").iterdir()) == []
            with pytest.raises(SandboxError, match="was deleted"):
                await job.wait()
        with pytest.raises(SandboxError, match="is closed"):
            async with sandboxes.create(spec()):
                pass
        await sandboxes.aclose()

    asyncio.run(main())


def test_closing_waits_for_no_hook_that_blocks_the_loops_threads(tmp_path: Path) -> None:
    go_on = threading.Event()

    async def main() -> None:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        sandboxes = LocalSandboxes(root=tmp_path / "root")
        async with sandboxes.create(spec()):
            hook = asyncio.create_task(asyncio.to_thread(go_on.wait, 60))
        try:
            await asyncio.wait_for(sandboxes.aclose(), 20)
        finally:
            go_on.set()
        assert await hook
        assert list((tmp_path / "root").iterdir()) == []

    asyncio.run(main())


def test_an_exit_code_is_known_although_the_output_cannot_be_read(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    async def hang(*_: object) -> CommandResult:
        await asyncio.Event().wait()
        raise AssertionError

    async def body(sandbox: LocalSandbox) -> int:
        job = await sandbox.start_job("exit 3")
        return await asyncio.wait_for(job.ended(), 20)

    monkeypatch.setattr(LocalSandbox, "read_output", hang)
    assert run(body) == 3


def test_an_unused_provider_starts_nothing_and_closes(tmp_path: Path) -> None:
    sandboxes = LocalSandboxes(root=tmp_path / "root")
    asyncio.run(sandboxes.aclose())
    assert sandboxes._reaper is None
    assert not (tmp_path / "root").exists()


def test_root_that_cannot_be_made_is_a_sandbox_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    async def main() -> None:
        sandboxes = LocalSandboxes(root=tmp_path / "file" / "root")
        with pytest.raises(SandboxError, match="could not create a sandbox: Not a directory"):
            async with sandboxes.create(spec()):
                pass
        await sandboxes.aclose()

    asyncio.run(main())


def test_many_deletions_share_their_looks_at_the_process_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = []

    def counted(variable: str) -> dict[str, set[int]]:
        looks.append(variable)
        return original(variable)

    original = process.carriers
    monkeypatch.setattr(process, "carriers", counted)

    async def main() -> None:
        sandboxes = LocalSandboxes(root=tmp_path)
        ready = asyncio.Barrier(30)

        async def use() -> int:
            async with sandboxes.create(spec()) as sandbox:
                assert isinstance(sandbox, LocalSandbox)
                await sandbox.execute_command("setsid sh -c 'echo $$ > pid; exec sleep 600' >/dev/null 2>&1 &")
                pid = await pid_in(sandbox.directory / "pid")
                await ready.wait()
            return pid

        pids = await asyncio.gather(*[use() for _ in range(30)])
        assert [pid for pid in pids if is_running(pid)] == []
        await sandboxes.aclose()

    asyncio.run(main())
    assert len(looks) < 30, "fewer than one for each"


def test_sigkilled_worker_leaves_no_sandbox(tmp_path: Path) -> None:
    program = """
import asyncio, sys
from pathlib import Path
from workers.sandboxes.base import SandboxSpec
from workers.sandboxes.local import LocalSandboxes

async def main():
    sandboxes = LocalSandboxes(root=Path(sys.argv[1]))
    async with sandboxes.create(SandboxSpec(name="test", image="")) as sandbox:
        job = await sandbox.start_job("trap '' TERM; setsid sh -c 'echo $$ > pid; exec sleep 600' & sleep 600")
        print(sandbox.directory, flush=True)
        await job.wait()

asyncio.run(main())
"""
    command = [sys.executable, "-c", program, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as worker:
        assert worker.stdout
        directory = Path(worker.stdout.readline().strip())

        async def check() -> None:
            escaped = await pid_in(directory / "pid")
            assert is_running(escaped)
            worker.kill()
            await until(lambda: not is_running(escaped), "the end of the sandbox's process")
            await until(lambda: not any(tmp_path.iterdir()), "the removal of the directory")

        asyncio.run(check())


def test_a_worker_that_is_killed_while_it_makes_its_directory_leaves_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever removes it is there before."""
    found: list[list[Path]] = []
    start = Reaper.start

    def noting(directories: list[Path]) -> Reaper:
        found.append([path for path in directories if path.exists()])
        return start(directories)

    monkeypatch.setattr(Reaper, "start", noting)

    async def main() -> None:
        sandboxes = LocalSandboxes(root=tmp_path)
        async with sandboxes.create(spec()):
            (directory,) = tmp_path.iterdir()
            assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        await sandboxes.aclose()

    asyncio.run(main())
    assert found == [[]]
    assert list(tmp_path.iterdir()) == []


def test_a_place_where_no_directory_can_be_made_costs_each_creation_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop waits while one is started: thousands of creations that fail would hang it."""
    begun: list[list[Path]] = []
    start = Reaper.start

    def counted(directories: list[Path]) -> Reaper:
        begun.append(directories)
        return start(directories)

    monkeypatch.setattr(Reaper, "start", counted)

    async def main() -> None:
        place = tmp_path / "place"
        place.write_text("no directory")
        sandboxes = LocalSandboxes(root=place)
        for _ in range(3):
            with pytest.raises(SandboxError, match="could not create a sandbox: Not a directory"):
                await sandboxes.create(spec()).__aenter__()
        place.unlink()
        async with sandboxes.create(spec()) as sandbox:
            assert (await sandbox.execute_command("echo hi")).stdout == "hi\n"
        await sandboxes.aclose()
        assert list(place.iterdir()) == []

    asyncio.run(main())
    assert len(begun) == 1


# Files


def test_files_go_in_and_out(run: Run, tmp_path: Path) -> None:
    source = tmp_path / "tool.sh"
    source.write_text("#!/bin/sh\necho ran $1\n")
    source.chmod(0o750)

    async def body(sandbox: LocalSandbox) -> None:
        data = bytes(range(256)) * 20_000
        await sandbox.upload_bytes("deep/er/data", data)
        assert await sandbox.download("deep/er/data") == data
        await sandbox.upload_bytes("deep/er/data", b"new")
        assert await sandbox.download("/deep/er/../er/data") == b"new"
        await sandbox.upload_file("/app/tool.sh", source)
        assert stat.S_IMODE((sandbox.directory / "app/tool.sh").stat().st_mode) == 0o750
        assert (await sandbox.execute_command("app/tool.sh 1")).stdout == "ran 1\n"
        assert sorted(p.name for p in (sandbox.directory / "deep/er").iterdir()) == ["data"]

    run(body)


@pytest.mark.parametrize(
    "path", ["../secret", "a/../../secret", "/../../../etc/passwd", "out/secret", "file-link", "."]
)
def test_paths_that_lead_outside_are_refused(run: Run, tmp_path: Path, path: str) -> None:
    (tmp_path / "secret").write_text("worker's")

    async def body(sandbox: LocalSandbox) -> None:
        (sandbox.directory / "out").symlink_to(tmp_path)
        (sandbox.directory / "file-link").symlink_to(tmp_path / "secret")
        calls: list[Callable[[], Awaitable[Any]]] = [
            lambda: sandbox.download(path),
            lambda: sandbox.upload_bytes(path, b"x"),
            lambda: sandbox.upload_file(path, tmp_path / "secret"),
        ]
        for call in calls:
            with pytest.raises(SandboxError, match=r"leads out of the sandbox|Is a directory") as caught:
                await call()
            assert not caught.value.retryable

    run(body)
    assert (tmp_path / "secret").read_text() == "worker's"
    assert not (tmp_path / "sandboxes" / "secret").exists()


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("missing", "No such file"),
        ("folder", "Is a directory"),
        ("pipe", "not an ordinary file"),
        ("huge", "has 2147483648 bytes"),
        ("loop", "symbolic links"),
        ("a\0b", "null byte"),
        ("file/below", "Not a directory"),
        ("x" * 300, "name too long"),
    ],
    ids=lambda value: str(value)[:10].replace("\0", "NUL"),
)
def test_what_cannot_be_downloaded(run: Run, path: str, message: str) -> None:
    async def body(sandbox: LocalSandbox) -> None:
        await sandbox.execute_command("mkdir folder; mkfifo pipe; truncate -s 2G huge; ln -s loop loop; touch file")
        with pytest.raises(SandboxError, match=message) as caught:
            await asyncio.wait_for(sandbox.download(path), 30)
        assert not caught.value.retryable

    run(body)


def test_upload_over_a_pipe_does_not_block(run: Run) -> None:
    async def body(sandbox: LocalSandbox) -> None:
        await sandbox.execute_command("mkfifo pipe")
        await asyncio.wait_for(sandbox.upload_bytes("pipe", b"x"), 30)
        assert await sandbox.download("pipe") == b"x"
        with pytest.raises(SandboxError, match="could not write 'gone': No such file"):
            await sandbox.upload_file("gone", sandbox.directory / "no-source")

    run(body)


def test_full_disk_is_retryable() -> None:
    assert files.sandbox_error("could not write", OSError(28, "No space left on device")).retryable


# Event loops


def open_descriptors() -> set[tuple[str, str]]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            found.add((name, os.readlink(f"/proc/self/fd/{name}")))
        except FileNotFoundError:  # the descriptor of the listing itself
            continue
    return found


async def two_hundred_short_jobs(root: Path) -> None:
    sandboxes = LocalSandboxes(root=root)
    async with sandboxes.create(spec()) as sandbox:
        jobs = await asyncio.gather(*[sandbox.start_job(f"exit {number}") for number in range(200)])
        results = await asyncio.gather(*[job.wait() for job in jobs])
        assert [result.exit_code for result in results] == list(range(200))
        await until(lambda: not sandbox._groups, "every group to be forgotten")  # type: ignore[attr-defined]
    await sandboxes.aclose()


@pytest.fixture
def nothing_leaks() -> Iterator[None]:
    uvloop.new_event_loop().close()  # its first loop opens two descriptors for the length of the process
    before = open_descriptors()
    others = {child.pid for child in psutil.Process().children()}  # servers of this test process's other tests
    yield
    end = time.monotonic() + 30
    while (left := {c.pid for c in psutil.Process().children()} - others) or (
        sys.platform == "linux" and len(open_descriptors()) > len(before)
    ):
        assert time.monotonic() < end, (left, open_descriptors() - before)
        time.sleep(0.01)


@pytest.mark.usefixtures("nothing_leaks")
@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
@pytest.mark.parametrize("pidfd", [True, False], ids=["pidfd", "thread"])
def test_hundreds_of_jobs_at_once_in_a_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loop: Callable[[], asyncio.AbstractEventLoop], pidfd: bool
) -> None:
    if not pidfd:
        monkeypatch.setattr(process, "_pidfd", lambda pid: None)
    failures: list[BaseException] = []

    def main() -> None:
        try:
            with asyncio.Runner(loop_factory=loop) as runner:
                runner.run(two_hundred_short_jobs(tmp_path))
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=main)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    assert failures == []


@pytest.mark.skipif(sys.platform != "linux", reason="pidfd is Linux's")
def test_without_pidfd_a_thread_waits(monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    def refused(pid: int) -> int:
        raise OSError(1, "seccomp says no")

    async def body(sandbox: LocalSandbox) -> None:
        assert (await sandbox.execute_command("exit 7")).exit_code == 7

    monkeypatch.setattr(os, "pidfd_open", refused)
    run(body)


def test_a_strangers_group_with_a_reused_number_is_not_killed() -> None:
    async def main() -> None:
        with subprocess.Popen(["sleep", "600"], start_new_session=True) as stranger:
            group = object.__new__(process.ProcessGroup)
            group._popen = subprocess.Popen(["true"])
            group._popen.wait()
            group._popen.pid = stranger.pid
            group.kill()
            assert not group.is_alive
            assert stranger.poll() is None
            stranger.kill()

    asyncio.run(main())
