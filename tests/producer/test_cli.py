from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from array import array
from contextlib import suppress
from importlib.metadata import version

import pytest
import redis
from support import wait_until
from typer.testing import CliRunner

from producer import ErrorInfo, ErrorKind, RolloutRequest, RolloutResult, StopCondition, Timing, broker
from producer.batch import Counts
from producer.cli import app
from producer.progress import describe
from producer.results_file import ResultsFile, ResultsFileError
from producer.runner import RunOptions, run_batch
from producer.settings import ProducerSettings
from producer.summary import Summary

CLI = [sys.executable, "-m", "producer.cli"]


@pytest.fixture
def files(tmp_path):
    class Files:
        tasks = tmp_path / "tasks.jsonl"
        out = tmp_path / "results.jsonl"

        def write(self, *tasks):
            self.tasks.write_text("".join(json.dumps(task) + "\n" for task in tasks))

        def results(self):
            data = self.out.read_bytes()
            assert not data or data.endswith(b"\n")
            return [json.loads(line) for line in data.splitlines()]

    files = Files()
    files.write({}, {}, {})
    return files


@pytest.fixture
def rollouts(files, redis_url):
    """Runs ``rollouts run`` in this process; returns click's result."""

    def run(*options, url=redis_url):
        arguments = ["run", str(files.tasks), "--out", str(files.out), "--model", "m", "--redis-url", url]
        return CliRunner().invoke(app, [*arguments, *map(str, options)])

    return run


@pytest.fixture
def process(files, redis_url):
    """Starts ``rollouts run`` as a process of its own."""
    started = []

    def start(*options):
        arguments = ["run", str(files.tasks), "--out", str(files.out), "--model", "m", "--redis-url", redis_url]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        started.append(subprocess.Popen([*CLI, *arguments, *options], **pipes))
        return started[-1]

    yield start
    for running in started:
        running.kill()
        running.communicate()


def line(example=1, sample=0, stop="completed", **more):
    fields = {"rollout_id": f"old-{example}-{sample}", "example_id": example, "sample_index": sample}
    return json.dumps(fields | {"stop_condition": stop} | more) + "\n"


# -- a run to its end --------------------------------------------------------------------------------------------------


def test_all_completed(rollouts, worker, files):
    ended = rollouts("--samples", 4)
    assert ended.exit_code == 0, ended.output
    assert ended.stdout.splitlines()[-1] == "12 rollouts: 12 completed, 0 failed"
    results = files.results()
    assert {(r["example_id"], r["sample_index"]) for r in results} == {(e, s) for e in (1, 2, 3) for s in range(4)}
    assert len({r["batch_id"] for r in results}) == 1


def test_some_failed_and_the_table_says_why(rollouts, worker):
    def behaviour(request):
        if request.example_id == 1:
            error = ErrorInfo(kind=ErrorKind.GATEWAY, message="[no] answer from the gateway")
            return RolloutResult.for_request(request, StopCondition.HAS_ERROR, error=error)
        steps = [{"tokens": {"prompt_ids": [1, 2], "completion_ids": [3]}}]
        return RolloutResult.for_request(
            request,
            StopCondition.COMPLETED,
            reward=0.5,
            trajectory=steps,
            durations={"agent": 1.25},
            timing=Timing(total_ms=1500),
            warnings=("the agent made no model call",),
        )

    worker.behaviour = behaviour
    ended = rollouts()
    assert ended.exit_code == 1
    assert ended.stdout.splitlines()[-1] == "3 rollouts: 2 completed, 1 failed"
    for words in ("0.5 (of 2)", "4 prompt, 2 completion", "1.250", "1.500", "[no] answer", "made no model call"):
        assert words in ended.stdout


def test_json_prints_one_object_and_nothing_else(rollouts, worker):
    worker.behaviour = lambda r: RolloutResult.for_request(r, StopCondition.AGENT_TIMEOUT, durations={"agent": 2})
    ended = rollouts("--json")
    assert ended.exit_code == 1
    summary = json.loads(ended.stdout)
    assert (summary["rollouts"], summary["completed"], summary["failed"], summary["cancelled"]) == (3, 0, 3, 0)
    assert summary["stop_conditions"] == {"agent_timeout": 3}
    assert summary["latency"] == {"agent": {"p50": 2.0, "p95": 2.0}}
    assert summary["reward"] == {"mean": None, "count": 0}


def test_run_batch_is_usable_from_code(settings, worker, make, tmp_path):
    out = tmp_path / "out.jsonl"
    summary = run_batch(make(4), out, RunOptions(settings=settings, total=4, max_in_flight=2))
    assert summary.last_line == "4 rollouts: 4 completed, 0 failed"
    assert len(out.read_text().splitlines()) == 4
    with pytest.raises(ResultsFileError, match="holds results already"):
        run_batch(make(4), out, RunOptions(settings=settings))


def test_without_a_worker_a_warning_says_how_to_start_one_and_the_run_waits(process, start_worker, redis_url):
    running = process()
    assert "no worker is running" in (warning := running.stderr.readline())
    assert "rollouts worker" in warning
    start_worker(redis_url)
    stdout, _ = running.communicate(timeout=60)
    assert stdout.splitlines()[-1] == "3 rollouts: 3 completed, 0 failed"
    assert running.returncode == 0


def test_no_warning_while_a_worker_reports(rollouts, worker):
    worker.client.zadd(broker.WORKERS, {"w1": (time.time() + 60) * 1000})
    assert "no worker" not in rollouts().stderr


# -- misuse ------------------------------------------------------------------------------------------------------------


def refused(ended, words, client):
    assert ended.exit_code == 2, ended.output
    assert words in ended.output
    assert client.dbsize() == 0


def test_malformed_tasks_are_named_and_nothing_is_submitted(rollouts, files, redis_url):
    files.write({}, {"max_turns": "x"})
    ended = rollouts()
    refused(ended, f"{files.tasks}:2: max_turns: Input should be a valid integer", redis.Redis.from_url(redis_url))
    assert not files.out.exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--samples", "0"), "--samples"),
        (("--max-in-flight", "0"), "--max-in-flight"),
        (("--gateway-url", "nonsense"), "gateway_url"),
        (("--timeout", "-1"), "deadlines.agent"),
        (("--resume", "--overwrite"), "exclude each other"),
        (("--no-such-option",), "No such option"),
    ],
)
def test_wrong_options_are_refused(rollouts, redis_url, options, words):
    refused(rollouts(*options), words, redis.Redis.from_url(redis_url))


def test_a_missing_tasks_file_is_refused(rollouts, files, redis_url):
    files.tasks.unlink()
    refused(rollouts(), "no such file", redis.Redis.from_url(redis_url))


def test_results_that_are_there_are_not_overwritten_unasked(rollouts, files, worker):
    files.out.write_text(line())
    ended = rollouts()
    assert ended.exit_code == 2
    assert "--resume" in ended.stderr
    assert files.out.read_text() == line()
    assert rollouts("--overwrite").exit_code == 0
    assert len(files.results()) == 3


def test_an_unreachable_redis_keeps_the_old_results_even_with_overwrite(rollouts, files):
    files.out.write_text(line())
    ended = rollouts("--overwrite", url="redis://:hunter2@127.0.0.1:1/0")
    assert ended.exit_code == 2
    assert "redis://***@127.0.0.1:1/0" in ended.stderr
    assert "hunter2" not in ended.output
    assert files.out.read_text() == line()


def test_places_that_cannot_be_written_are_refused(rollouts, files, tmp_path, redis_url):
    client = redis.Redis.from_url(redis_url)
    refused(rollouts("--out", tmp_path), "is a directory", client)
    refused(rollouts("--out", tmp_path / "no" / "out.jsonl"), "is no directory", client)
    refused(rollouts("--out", files.tasks, "--overwrite"), "is the file of tasks itself", client)


def test_a_name_that_promises_another_format_is_refused(rollouts, tmp_path, redis_url):
    ended = rollouts("--out", str(tmp_path / "results.CSV"))
    assert ended.exit_code == 2
    assert "would hold no CSV: results are written as JSON lines" in ended.output
    assert not (tmp_path / "results.CSV").exists()


def test_a_wrong_setting_is_named(rollouts, monkeypatch):
    monkeypatch.setenv("ROLLOUTS_MAX_IN_FLIGHT", "many")
    ended = rollouts()
    assert ended.exit_code == 2
    assert "ROLLOUTS_MAX_IN_FLIGHT" in ended.stderr


def test_a_run_that_breaks_off_after_it_has_begun_exits_with_1(process, files, worker):
    worker.behaviour = lambda r: None if r.example_id == 3 else RolloutResult.for_request(r, StopCondition.COMPLETED)
    os.mkfifo(files.out)
    reader = os.open(files.out, os.O_RDONLY | os.O_NONBLOCK)
    running = process()
    written = bytearray()

    def two_are_written():
        with suppress(BlockingIOError):
            written.extend(os.read(reader, 65536))
        return written.count(b"\n") == 2

    wait_until(lambda: two_are_written() and worker.held)
    os.close(reader)  # as a disk that is full: writing fails from now on
    worker.finish(RolloutResult.for_request(worker.held.pop(*worker.held), StopCondition.COMPLETED))
    _, stderr = running.communicate(timeout=60)
    assert "the run ended early" in stderr
    assert "cannot be written: Broken pipe" in stderr
    assert running.returncode == 1


def test_explicit_ids_of_an_earlier_run_are_refused_before_anything_is_submitted(rollouts, files, worker):
    files.write({"rollout_id": "mine"}, {})
    assert rollouts().exit_code == 0
    ended = rollouts("--overwrite")
    assert ended.exit_code == 2
    assert "used by an earlier run: mine" in ended.stderr
    assert len(worker.started) == 2
    assert len(files.results()) == 2


# -- resuming and stopping ---------------------------------------------------------------------------------------------


def test_resume_runs_what_is_missing_cancelled_or_failed(rollouts, files, worker):
    kept = line(1) + line("elsewhere", 7)
    files.out.write_text(kept + line(2, stop="has_error") + '{"rollout_id": "half a li')
    ended = rollouts("--resume")
    assert ended.exit_code == 0, ended.output
    assert "holds 2 results that are kept; 2 rollouts to run" in ended.stderr
    assert ended.stdout.splitlines()[-1] == "2 rollouts: 2 completed, 0 failed"
    assert files.out.read_text().startswith(kept)
    assert sorted(str(r["example_id"]) for r in files.results()) == ["1", "2", "3", "elsewhere"]


def test_resume_with_keep_failed_keeps_errors(rollouts, files, worker):
    files.out.write_text(line(1, stop="has_error") + line(2, stop="agent_timeout") + line(3))
    ended = rollouts("--resume", "--keep-failed")
    assert ended.exit_code == 1  # not all completed, though nothing is left to run
    assert "kept from before" in ended.stdout
    assert "3 (2 failed)" in ended.stdout
    assert ended.stdout.splitlines()[-1] == "0 rollouts: 0 completed, 0 failed"
    assert len(files.results()) == 3


def test_resume_gives_explicit_ids_that_run_again_new_ones(rollouts, files, worker):
    files.write({"rollout_id": "mine"})
    worker.behaviour = lambda r: RolloutResult.for_request(r, StopCondition.HAS_ERROR)
    assert rollouts().exit_code == 1
    worker.behaviour = lambda r: RolloutResult.for_request(r, StopCondition.COMPLETED)
    assert rollouts("--resume").exit_code == 0
    [result] = files.results()
    assert result["rollout_id"].startswith("mine-")


def test_resume_refuses_a_file_that_holds_something_else(rollouts, files, redis_url):
    files.out.write_text("not a result\n" + line())
    refused(rollouts("--resume"), f"{files.out}:1: is not a result", redis.Redis.from_url(redis_url))


def test_ctrl_c_cancels_what_is_in_flight_keeps_what_is_done_and_resumes(process, files, worker):
    worker.behaviour = lambda r: None if r.example_id > 1 else RolloutResult.for_request(r, StopCondition.COMPLETED)
    running = process()
    wait_until(lambda: len(worker.held) == 2 and files.out.exists() and len(files.out.read_bytes().splitlines()) == 1)
    running.send_signal(signal.SIGINT)
    stdout, stderr = running.communicate(timeout=60)
    assert running.returncode == 130
    hint = next(line for line in stderr.splitlines() if line.startswith("to run the rest: "))
    assert hint.startswith(f"to run the rest: rollouts run {files.tasks} --out {files.out} ")
    assert hint.endswith(" --resume")
    assert stdout.splitlines()[-1] == "3 rollouts: 1 completed, 0 failed, 2 cancelled"
    assert [r["example_id"] for r in files.results()] == [1]

    worker.behaviour = lambda r: RolloutResult.for_request(r, StopCondition.COMPLETED)
    again = process("--resume")
    stdout, _ = again.communicate(timeout=60)
    assert again.returncode == 0
    assert stdout.splitlines()[-1] == "2 rollouts: 2 completed, 0 failed"
    assert sorted(r["example_id"] for r in files.results()) == [1, 2, 3]


def killed(process, files, worker, *behaviours):
    """Run a task of each behaviour in a process that is killed once the first has been written; the others are held."""
    files.write(*[{"answer": word} for word in behaviours])
    worker.behaviour = lambda r: None if r.answer == "held" else RolloutResult.for_request(r, StopCondition(r.answer))
    running = process()
    others = behaviours.count("held")
    wait_until(lambda: len(worker.held) == others and files.out.exists() and files.out.stat().st_size)
    running.kill()
    running.communicate()
    assert [r["example_id"] for r in files.results()] == [1]
    return {request.example_id: request for request in worker.held.values()}


def test_a_killed_run_that_is_resumed_misses_nothing_and_runs_nothing_twice(process, rollouts, files, worker):
    held = killed(process, files, worker, "completed", *["held"] * 5)
    meanwhile = {2: StopCondition.COMPLETED, 3: StopCondition.AGENT_TIMEOUT, 4: StopCondition.HAS_ERROR}
    for example, stop in meanwhile.items():
        worker.finish(RolloutResult.for_request(held[example], stop, reward=float(example)))

    def run_again(request):
        for example in (5, 6):  # which have run on all the time
            worker.finish(RolloutResult.for_request(held[example], StopCondition.COMPLETED))
        return RolloutResult.for_request(request, StopCondition.COMPLETED)

    worker.behaviour = run_again
    ended = rollouts("--resume")
    assert "taken over of what was submitted before: 4 rollouts" in ended.stderr
    assert ended.stdout.splitlines()[-1] == "5 rollouts: 4 completed, 1 failed"
    assert sorted(r["example_id"] for r in files.results()) == [1, 2, 3, 4, 5, 6]
    rewards = {r["example_id"]: r["reward"] for r in files.results()}
    assert (rewards[2], rewards[3], rewards[4]) == (2.0, 3.0, None)
    assert len(worker.started) == len(set(worker.started)) == 7, "only what had failed ran again"
    assert "0 rollouts to run" in rollouts("--resume").stderr


def test_a_run_that_is_killed_a_second_time_finds_what_both_processes_had_submitted(process, rollouts, files, worker):
    held = killed(process, files, worker, "completed", "held", "held")
    worker.finish(RolloutResult.for_request(held[2], StopCondition.HAS_ERROR))
    worker.behaviour = lambda r: None
    again = process("--resume")
    wait_until(lambda: len(worker.started) == 4)
    again.kill()
    again.communicate()
    for request in [held[3], worker.held[worker.started[-1]]]:
        worker.finish(RolloutResult.for_request(request, StopCondition.COMPLETED))
    ended = rollouts("--resume")
    assert ended.stdout.splitlines()[-1] == "2 rollouts: 2 completed, 0 failed"
    assert sorted(r["example_id"] for r in files.results()) == [1, 2, 3]
    assert len(worker.started) == 4


def test_what_failed_while_nobody_was_there_is_taken_with_keep_failed(process, rollouts, files, worker):
    held = killed(process, files, worker, "completed", "held")
    worker.finish(RolloutResult.for_request(held[2], StopCondition.HAS_ERROR))
    ended = rollouts("--resume", "--keep-failed")
    assert ended.stdout.splitlines()[-1] == "1 rollouts: 0 completed, 1 failed"
    assert len(worker.started) == 2


def test_what_is_asked_for_in_another_way_when_resumed_runs_anew_and_the_old_is_cancelled(
    process, rollouts, files, worker
):
    held = killed(process, files, worker, "completed", "held", "held")
    worker.finish(RolloutResult.for_request(held[2], StopCondition.COMPLETED))  # as it was asked for then: it counts
    worker.behaviour = lambda r: RolloutResult.for_request(r, StopCondition.COMPLETED)
    ended = rollouts("--resume", "--timeout", "99")
    assert ended.stdout.splitlines()[-1] == "2 rollouts: 2 completed, 0 failed"
    assert len(worker.started) == 4
    assert worker.client.hget(broker.job_key(held[3].rollout_id), "cancel") == b"1"
    assert sorted(r["example_id"] for r in files.results()) == [1, 2, 3]


def test_a_result_that_is_gone_when_its_run_is_resumed_is_made_again(process, rollouts, files, worker):
    held = killed(process, files, worker, "completed", "held")
    worker.finish(RolloutResult.for_request(held[2], StopCondition.COMPLETED))
    worker.client.delete(broker.result_key(held[2].rollout_id))
    worker.behaviour = lambda r: RolloutResult.for_request(r, StopCondition.COMPLETED)
    assert rollouts("--resume").stdout.splitlines()[-1] == "1 rollouts: 1 completed, 0 failed"
    assert len(worker.started) == 3


def test_a_second_ctrl_c_leaves_at_once(process, files, idle_worker):
    client = idle_worker.client
    running = process()
    wait_until(lambda: client.zcard(broker.PENDING) == 3)
    first, *others = (broker.job_key(rollout_id.decode()) for rollout_id in client.zrange(broker.PENDING, 0, -1))
    request = RolloutRequest.parse(client.hget(first, "request"))
    idle_worker.finish(RolloutResult.for_request(request, StopCondition.COMPLETED))
    wait_until(lambda: files.out.stat().st_size, what="the run to have heard that all are submitted")
    for key in others:
        client.hset(key, "state", "running")  # by a worker that will never answer
    running.send_signal(signal.SIGINT)
    wait_until(lambda: client.xlen(broker.CANCELS) == 2)
    running.send_signal(signal.SIGINT)
    _, stderr = running.communicate(timeout=10)  # by itself it waits for twice as long
    assert running.returncode == 130
    assert "left without waiting for 2 rollouts" in stderr


def test_a_run_that_is_killed_leaves_whole_lines(process, files, worker):
    files.write(*[{}] * 300)
    # What comes last is held: however late the kill is, it finds a run that goes on.
    worker.behaviour = lambda r: None if r.example_id > 250 else RolloutResult.for_request(r, StopCondition.COMPLETED)
    running = process("--max-in-flight", "20")
    wait_until(lambda: files.out.exists() and files.out.stat().st_size > 5000)
    running.kill()
    running.communicate()
    assert 0 < len(files.results()) < 300


def test_a_full_disk_leaves_no_half_line_and_is_named(tmp_path, make):
    result = RolloutResult.for_request(make(1)[0], StopCondition.COMPLETED, agent_stdout="x" * 5000)
    child = f"""
import resource, signal, pathlib
from producer import RolloutResult
from producer.results_file import ResultsFile, ResultsFileError
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (8000, 8000))
result = RolloutResult.parse({result.to_json()!r})
with ResultsFile.prepare(pathlib.Path({str(tmp_path / "out.jsonl")!r})) as file:
    file.write(result)
    try:
        file.write(result)
    except ResultsFileError as error:
        print(error)
"""
    ended = subprocess.run([sys.executable, "-c", child], capture_output=True, text=True, check=True)
    assert "cannot be written: File too large" in ended.stdout
    assert (tmp_path / "out.jsonl").read_bytes() == result.to_json() + b"\n"


def test_two_runs_do_not_write_one_file(tmp_path):
    path = tmp_path / "out.jsonl"
    with (
        ResultsFile.prepare(path),
        pytest.raises(ResultsFileError, match="being written by another run"),
        ResultsFile.prepare(path),
    ):
        pass


def test_redis_restarts_during_a_run(own_redis, start_worker, make, tmp_path):
    worker = start_worker(own_redis.url)
    worker.behaviour = lambda request: None

    def restart():
        wait_until(lambda: len(worker.held) == 3)
        worker.stop()
        own_redis.stop()
        own_redis.start()
        for request in worker.held.values():
            worker.finish(RolloutResult.for_request(request, StopCondition.COMPLETED))

    thread = threading.Thread(target=restart)
    thread.start()
    settings = ProducerSettings(redis_url=own_redis.url)
    summary = run_batch(make(3), tmp_path / "out.jsonl", RunOptions(settings=settings))
    thread.join()
    assert summary.last_line == "3 rollouts: 3 completed, 0 failed"


# -- status and progress -----------------------------------------------------------------------------------------------


def test_status_shows_workers_queues_and_phases(redis_url, idle_worker):
    client = idle_worker.client
    now = time.time() * 1000
    client.zadd(broker.WORKERS, {"w1": now + 60_000, "dead": now - 1})
    report = {"name": "w1", "host": "h", "pid": 7, "concurrency": 9, "running": 2, "state": "ready"}
    client.set(
        broker.worker_key("w1"),
        json.dumps(
            report | {"phases": {"agent": 2}, "loop_lag_ms": {"last": 1.0, "p50": 2.0, "p99": 34.56, "max": 99.0}}
        ),
    )
    client.lpush(broker.queue_key(9), "m")
    client.zadd(broker.PENDING, {"a": 1})
    client.zadd(broker.RUNNING, {"b": now + 60_000, "c": 1})
    ended = CliRunner().invoke(app, ["status", "--json", "--redis-url", redis_url])
    assert ended.exit_code == 0
    found = json.loads(ended.stdout)
    assert [w["name"] for w in found["workers"]] == ["w1"]
    assert found["phases"] == {"agent": 2}
    assert (found["pending"], found["running"], found["lapsed"]) == (1, 1, 1)
    assert found["queues"]["rollouts"]["messages"]["priority 9"] == 1
    table = CliRunner().invoke(app, ["status", "--redis-url", redis_url]).stdout
    assert "w1" in table
    assert "in agent" in table
    assert "34.6" in table
    assert "99.0" not in table


def test_status_of_an_idle_fleet_says_how_to_start_a_worker(redis_url):
    assert "rollouts worker" in CliRunner().invoke(app, ["status", "--redis-url", redis_url]).stdout


def test_status_without_redis_exits_with_2():
    ended = CliRunner().invoke(app, ["status", "--redis-url", "redis://127.0.0.1:1/0"])
    assert ended.exit_code == 2
    assert "cannot be used" in ended.stderr


def test_the_error_names_the_variable_before_the_option():
    ended = CliRunner().invoke(app, ["status", "--redis-url", "redis://127.0.0.1:1/0"])
    assert ended.stderr.index("ROLLOUTS_REDIS_URL") < ended.stderr.index("--redis-url")
    assert "password" in ended.stderr


def test_percentiles_are_the_nearest_rank():
    summary = Summary()
    summary.latency["agent"] = array("d", [2.0, 1.0])
    assert summary.as_dict()["latency"]["agent"] == {"p50": 1.0, "p95": 2.0}
    summary.latency["agent"] = array("d", range(1, 101))
    assert summary.as_dict()["latency"]["agent"] == {"p50": 50.0, "p95": 95.0}


def test_progress_names_counts_rate_and_time_left():
    counts = Counts(submitted=30, completed=8, failed=2)
    assert describe(counts, 100, 5.0) == "10/100 done, 2 failed, 20 in flight, 2.0/s, ETA 0:00:45"
    assert describe(counts, None, 5.0) == "10 done, 2 failed, 20 in flight, 2.0/s"
    assert describe(Counts(), 100, 0.0) == "0/100 done, 0 failed, 0 in flight, 0.0/s"


def test_a_terminal_gets_a_progress_bar(files, worker, redis_url):
    import pty

    parent, child = pty.openpty()
    arguments = ["run", str(files.tasks), "--out", str(files.out), "--model", "m", "--redis-url", redis_url]
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "120"}
    running = subprocess.Popen([*CLI, *arguments], stdout=subprocess.PIPE, stderr=child, env=environment)
    os.close(child)
    shown = bytearray()

    def read():
        with suppress(OSError):  # EIO: nobody has the other side any more
            while data := os.read(parent, 65536):  # a terminal holds four kilobytes, and then who writes waits
                shown.extend(data)

    reader = threading.Thread(target=read)
    reader.start()
    stdout, _ = running.communicate(timeout=60)
    reader.join()
    os.close(parent)
    assert b"3/3 done" in shown
    assert stdout.decode().splitlines()[-1] == "3 rollouts: 3 completed, 0 failed"


def test_the_version_is_told() -> None:
    ended = CliRunner().invoke(app, ["--version"])
    assert (ended.exit_code, ended.stdout) == (0, f"rollouts {version('rollout-fleet')}\n")
