"""The watchdog on real processes: whatever becomes of its holder, nothing of it is left."""

from __future__ import annotations

import errno
import os
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from support import wait_until

from workers import reaper as reaper_module
from workers.reaper import REAP_VARIABLE, Reaper, carriers, remove_tree

ROOT = Path(__file__).resolve().parents[2]
PATH = {"PATH": os.environ["PATH"]}


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def read_pid(file: Path) -> int:
    wait_until(lambda: file.exists() and file.read_text().strip(), what=f"a process id in {file.name}")
    return int(file.read_text())


class Holder:
    """A process that holds a reaper and runs shell lines, marked and unmarked."""

    PROGRAM = """
import json, os, subprocess, sys, time
from workers.reaper import Reaper
directory, marked, unmarked = sys.argv[1:]
reaper = Reaper.start([directory])
environment = {"PATH": os.environ["PATH"]}
subprocess.Popen(["/bin/sh", "-c", marked], env=environment | reaper.environment())
if unmarked:
    subprocess.Popen(["/bin/sh", "-c", unmarked], env=environment)
print(reaper.pid, flush=True)
time.sleep(600)
"""

    def __init__(self, directory: Path, marked: str, unmarked: str = "", env: dict[str, str] | None = None) -> None:
        directory.mkdir()
        (directory / "file").write_text("content")
        self.directory = directory
        command = [sys.executable, "-c", self.PROGRAM, str(directory), marked, unmarked]
        environment = PATH | {"PYTHONPATH": str(ROOT)} | (env or {})
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True)
        assert self.process.stdout
        self.reaper = int(self.process.stdout.readline())

    def end(self, number: int = signal.SIGKILL) -> None:
        self.process.send_signal(number)
        self.process.wait()
        assert self.process.stdout
        self.process.stdout.close()


@pytest.fixture
def holders() -> Iterator[list[Holder]]:
    started: list[Holder] = []
    yield started
    for holder in started:
        with suppress(ProcessLookupError):
            holder.end()


@pytest.fixture
def reaper(tmp_path: Path) -> Iterator[Reaper]:
    directory = tmp_path / "held"
    directory.mkdir()
    running = Reaper.start([directory])
    yield running
    running.close()


def start_marked(running: Reaper, line: str) -> None:
    subprocess.run(["/bin/sh", "-c", line], env=PATH | running.environment(), check=True)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=["SIGKILL", "SIGTERM"])
def test_killed_holder_leaves_no_process_and_no_directory(
    tmp_path: Path, holders: list[Holder], number: signal.Signals
) -> None:
    holder = Holder(tmp_path / "held", f"setsid sh -c 'echo $$ > {tmp_path}/pid; exec sleep 600' &")
    holders.append(holder)
    sleeper = read_pid(tmp_path / "pid")
    holder.end(number)
    wait_until(lambda: not is_running(sleeper), what="the end of the sleeper")
    wait_until(lambda: not holder.directory.exists(), what="the removal of the directory")
    wait_until(lambda: not is_running(holder.reaper), what="the end of the reaper")


def test_reaper_ignores_the_signals_that_end_its_holder(tmp_path: Path, holders: list[Holder]) -> None:
    holder = Holder(tmp_path / "held", f"echo $$ > {tmp_path}/pid; exec sleep 600")
    holders.append(holder)
    sleeper = read_pid(tmp_path / "pid")
    ignored = (1 << signal.SIGINT - 1) | (1 << signal.SIGTERM - 1) | (1 << signal.SIGHUP - 1)
    status = Path(f"/proc/{holder.reaper}/status")
    if status.exists():
        wait_until(
            lambda: int(status.read_text().split("SigIgn:")[1].split()[0], 16) & ignored == ignored, what="the handlers"
        )
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(holder.reaper, number)
    assert os.getsid(holder.reaper) == holder.reaper
    holder.end()
    wait_until(lambda: not is_running(sleeper), what="the end of the sleeper")
    wait_until(lambda: not holder.directory.exists(), what="the removal of the directory")


def test_other_children_of_the_holder_do_not_keep_the_pipe_open(tmp_path: Path, holders: list[Holder]) -> None:
    holder = Holder(tmp_path / "held", "exec sleep 600", f"echo $$ > {tmp_path}/other; exec sleep 600")
    holders.append(holder)
    other = read_pid(tmp_path / "other")
    holder.end()
    wait_until(lambda: not holder.directory.exists(), what="the removal of the directory")
    assert is_running(other)  # unmarked, so it is not the reaper's
    os.kill(other, signal.SIGKILL)


def test_reaper_of_a_marked_holder_outlives_the_outer_reaper_to_do_its_work(
    tmp_path: Path, holders: list[Holder]
) -> None:
    outer_directory = tmp_path / "outer"
    outer_directory.mkdir()
    outer = Reaper.start([outer_directory])
    line = f"setsid sh -c 'echo $$ > {tmp_path}/pid; exec sleep 600' &"
    inner = Holder(tmp_path / "held", line, env=outer.environment())
    holders.append(inner)
    sleeper = read_pid(tmp_path / "pid")
    outer.close()
    assert not is_running(inner.process.pid)
    assert not outer_directory.exists()
    wait_until(lambda: not is_running(sleeper), what="the end of the inner holder's process")
    wait_until(lambda: not inner.directory.exists(), what="the removal of the inner directory")


def test_close_kills_what_is_left_and_may_be_called_again(tmp_path: Path, reaper: Reaper) -> None:
    start_marked(reaper, f"trap '' TERM HUP INT; (setsid sh -c 'echo $$ > {tmp_path}/pid; exec sleep 600' &) &")
    sleeper = read_pid(tmp_path / "pid")
    reaper.close()
    assert not is_running(sleeper)
    assert not (tmp_path / "held").exists()
    assert not is_running(reaper.pid)
    reaper.close()


def test_a_process_that_keeps_forking_is_caught(tmp_path: Path, reaper: Reaper) -> None:
    log = tmp_path / "log"
    # Each generation lives for about a millisecond, in a session of its own, and leaves an orphan as its successor.
    script = tmp_path / "hop.sh"
    script.write_text(f"echo $$ >> {log}; setsid sh {script} & exit 0")
    start_marked(reaper, f"sh {script} >/dev/null 2>&1 &")
    wait_until(lambda: log.exists() and log.read_text().count("\n") > 20, what="some generations")
    reaper.close()
    generations = log.read_text().count("\n")
    left = carriers(REAP_VARIABLE).get(reaper.token)
    script.unlink()  # the end of it, should it have got away
    assert left is None
    assert log.read_text().count("\n") == generations


def test_child_with_a_cleared_environment_counts_with_its_parent(tmp_path: Path, reaper: Reaper) -> None:
    inner = f"echo $$ > {tmp_path}/pid; exec sleep 600"
    start_marked(reaper, f"(env -i /usr/bin/setsid /bin/sh -c {shlex.quote(inner)}; sleep 600) >/dev/null 2>&1 &")
    sleeper = read_pid(tmp_path / "pid")
    assert sleeper in carriers(REAP_VARIABLE)[reaper.token]
    reaper.close()
    assert not is_running(sleeper)


def test_others_are_left_alone(reaper: Reaper) -> None:
    with subprocess.Popen(["sleep", "600"], env=PATH | {REAP_VARIABLE: f"{reaper.token}x"}) as bystander:
        reaper.close()
        assert bystander.poll() is None
        bystander.kill()


def test_zombies_are_not_counted(reaper: Reaper) -> None:
    with subprocess.Popen(["sleep", "600"], env=PATH | reaper.environment()) as child:
        wait_until(lambda: carriers(REAP_VARIABLE).get(reaper.token) == {child.pid}, what="the child")
        child.kill()
        wait_until(lambda: psutil.Process(child.pid).status() == psutil.STATUS_ZOMBIE, what="the zombie")
        assert reaper.token not in carriers(REAP_VARIABLE)


def test_nothing_to_do_is_fine(tmp_path: Path) -> None:
    running = Reaper.start([tmp_path / "never-made"])
    running.close()
    assert not is_running(running.pid)


def test_close_that_takes_too_long_is_bounded_and_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, reaper: Reaper
) -> None:
    monkeypatch.setattr(reaper_module, "CLOSE_LIMIT", 0.05)
    os.kill(reaper.pid, signal.SIGSTOP)
    try:
        reaper.close()
        assert "still at work" in caplog.text
    finally:
        os.kill(reaper.pid, signal.SIGCONT)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_look_without_a_free_descriptor_is_no_look(reaper: Reaper, monkeypatch: pytest.MonkeyPatch) -> None:
    failures = iter(range(3))

    def few(*arguments: Any) -> Any:
        if next(failures, None) is not None:
            raise OSError(errno.EMFILE, "Too many open files")
        return open(*arguments)

    child = subprocess.Popen(["sleep", "600"], env=PATH | reaper.environment())
    monkeypatch.setattr(reaper_module, "open", few, raising=False)
    with pytest.raises(OSError, match="Too many"):
        carriers(REAP_VARIABLE)
    assert reaper_module.kill_carriers(REAP_VARIABLE, reaper.token, limit=10)
    assert child.wait(10) == -signal.SIGKILL


def test_table_of_ps_is_read() -> None:
    listing = "    1     0 Ss   /sbin/launchd\n  200     1 S+   sh -c x HOME=/a ROLLOUTS_REAP=abc TERM=x\n"
    listing += "  201   200 Z    (sh)\n  202   200 R    ROLLOUTS_REAPER=no OTHER_ROLLOUTS_REAP=no\n  203 1 S\n"
    rows = [(row.pid, row.parent, row.value) for row in reaper_module._parse_ps(listing, REAP_VARIABLE)]
    assert rows == [(1, 0, None), (200, 1, "abc"), (202, 200, None), (203, 1, None)]


def as_nobody(action: Callable[[], bool]) -> bool:
    """Run ``action`` in a child without root's right to write everywhere."""
    pid = os.fork()
    if pid == 0:
        try:
            if os.getuid() == 0:
                os.setgroups([])
                os.setgid(65534)
                os.setuid(65534)
            os._exit(0 if action() else 1)
        except BaseException:
            os._exit(2)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@pytest.mark.skipif(threading.active_count() > 1, reason="forks")
def test_read_only_folders_are_removed_and_links_are_not_followed(tmp_path_factory: pytest.TempPathFactory) -> None:
    def build_and_remove() -> bool:
        outside, tree = Path(base, "outside"), Path(base, "tree")
        outside.mkdir(mode=0o500)
        (tree / "locked" / "deep").mkdir(parents=True)
        (tree / "locked" / "deep" / "file").write_text("x")
        (tree / "locked" / "link").symlink_to(outside)
        (tree / "locked" / "file").write_text("x")
        (tree / "locked" / "file").chmod(0o400)
        for folder in ("locked/deep", "locked", "."):
            (tree / folder).chmod(0o000)
        return remove_tree(tree) and not tree.exists() and outside.stat().st_mode & 0o777 == 0o500

    base = subprocess.run(["mktemp", "-d"], capture_output=True, text=True, check=True).stdout.strip()
    try:
        os.chmod(base, 0o777)
        assert as_nobody(build_and_remove)
    finally:
        subprocess.run(["rm", "-rf", base], check=True)


def test_a_tree_that_is_deeper_than_recursion_and_paths_may_be_is_removed(tmp_path: Path) -> None:
    (tmp_path / "tree").mkdir()
    folder = os.open(tmp_path / "tree", os.O_RDONLY)
    for _ in range(3000):
        os.mkdir("d", dir_fd=folder)
        os.symlink("/etc", "link", dir_fd=folder)
        inner = os.open("d", os.O_RDONLY, dir_fd=folder)
        os.close(folder)
        folder = inner
    os.close(folder)
    assert remove_tree(tmp_path / "tree") is True
    assert os.listdir(tmp_path) == []


def test_remove_tree_reports_what_it_could_not_remove(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reaper_module.shutil, "rmtree", lambda *args, **kwargs: None)
    monkeypatch.setattr(reaper_module, "_take_apart", lambda top: None)
    assert remove_tree(tmp_path) is False
    assert remove_tree(tmp_path / "nothing") is True
