"""Results in Parquet: what a trainer finds there, and what is there after whatever happened to the run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import redis
from support import wait_until
from typer.testing import CliRunner

from producer import ErrorInfo, ErrorKind, RolloutRequest, RolloutResult, StopCondition, Timing
from producer.cli import app
from producer.contract import FailedAttempt
from producer.files.errors import ResultsFileError
from producer.files.output import prepare_results
from producer.files.parts import ParquetResults, parts_of
from producer.files.read import ResultsReader
from producer.results_file import ResultsFile

pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")
pc = pytest.importorskip("pyarrow.compute")


def step(prompt_ids=(1, 2), completion_ids=(3,), logprobs=(-0.5,), **tokens):
    given = {
        "prompt_ids": list(prompt_ids),
        "prompt_mask": [0] * len(prompt_ids),
        "completion_ids": list(completion_ids),
        "completion_mask": [1] * len(completion_ids),
        "completion_logprobs": list(logprobs),
    }
    rest = {"overlong_prompt": False, "is_truncated": False, "routed_experts": None}
    messages = {"prompt": [{"role": "user", "content": "?"}], "completion": [{"role": "assistant", "content": "!"}]}
    return messages | {"tokens": given | rest | tokens, "reward": None, "is_truncated": False, "extras": {}}


@pytest.fixture
def result():
    def result(example=1, stop=StopCondition.COMPLETED, **fields):
        request = RolloutRequest(
            model="m", rollout_id=f"r-{example}".replace(" ", "_"), example_id=example, answer=[1], info={"a": None}
        )
        return RolloutResult.for_request(request, stop, **fields)

    return result


FULL = {
    "trajectory": [step(), {**step(), "tokens": None}, step((), (), ())],
    "prompt": [{"role": "user", "content": "ü\x00"}],
    "reward": 0.25,
    "metrics": {"format": 1.0},
    "warnings": ("careful",),
    "durations": {"agent": 1.5, "odd": 2.0},
    "timing": Timing(start_time=10.0, total_ms=1500),
    "failed_attempts": (FailedAttempt(attempt=1, error=ErrorInfo(kind=ErrorKind.LEASE, message="lost"), turns=2),),
    "attempt": 2,
    "worker": "w1",
    "tunnel_url": "http://t",
    "agent_exit_code": -9,
    "policy_version": 7,
    "group_id": "g",
}


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out.parquet"


def write(path, *results, part_rows=None, **options):
    with prepare_results(path, **options) as file:
        assert isinstance(file, ParquetResults)
        file.part_rows = part_rows or file.part_rows
        for result in results:
            file.write(result)
            if file.is_full:
                file.roll()


def names(path):
    return sorted(file.name for file in path.iterdir())


def examples(path):
    return pq.read_table(path).column("example_id").to_pylist()


def read(path):
    reader = ResultsReader(path)
    return [result for _, result in reader.results(range(sum(1 for _ in reader.briefs())))]


# -- what is in it -----------------------------------------------------------------------------------------------------


def test_a_trainer_finds_tokens_as_lists_for_each_step(out, result):
    write(out, result(reward=1.0, trajectory=[step((1, 2), (3, 4), (-0.5, -0.25)), {**step(), "tokens": None}]))
    [row] = pq.read_table(out).to_pylist()
    assert row["prompt_ids"] == [[1, 2], None]
    assert row["completion_ids"] == [[3, 4], None]
    assert row["completion_logprobs"] == [[-0.5, -0.25], None]
    assert (row["completion_mask"], row["prompt_mask"]) == ([[1, 1], None], [[0, 0], None])
    assert (row["reward"], row["num_turns"], row["prompt_tokens"], row["completion_tokens"]) == (1.0, 2, 2, 2)
    assert json.loads(row["answer_json"]) == [1]
    assert json.loads(row["trajectory_json"])[1]["tokens"] is None
    assert "prompt_ids" not in row["trajectory_json"]


def test_a_row_is_the_whole_result(out, result):
    plain, full = result(1), result("text id", **FULL)
    failed = result(3, StopCondition.HAS_ERROR, error=ErrorInfo(kind=ErrorKind.AGENT, message="no", account=True))
    write(out, plain, full, failed)
    assert read(out) == [plain, full, failed]


@pytest.mark.parametrize(
    "tokens",
    [
        {"prompt_ids": ["not", "numbers"]},
        {"completion_ids": [2**40]},
        {"completion_logprobs": [None]},
        {"completion_mask": [True]},
        {"prompt_ids": None},
    ],
)
def test_tokens_of_another_form_stay_in_the_json(out, result, tokens):
    odd = result(trajectory=[step()])
    odd.trajectory[0]["tokens"] |= tokens
    write(out, odd)
    assert read(out) == [odd]


def test_what_each_step_repeats_is_compressed(out, result):
    """50 turns of a prompt that grows to 32k tokens: the columns take a small part of the JSON's bytes."""
    ids = [n * 7919 % 32_000 for n in range(32_000)]
    steps = [step(ids[: n * 640], ids[n * 640 : (n + 1) * 640], [-0.1] * 640) for n in range(50)]
    big = result(trajectory=steps)
    write(out, big)
    size = sum(file.stat().st_size for file in out.iterdir())
    assert size < 0.06 * len(big.to_json())


def test_parts_are_made_as_they_fill_and_are_one_table(out, result):
    write(out, *(result(n) for n in range(5)), part_rows=2)
    assert names(out) == ["part-00000.parquet", "part-00001.parquet", "part-00002.parquet"]
    assert examples(out) == ["0", "1", "2", "3", "4"]


def test_a_run_without_results_leaves_an_empty_folder(out):
    write(out)
    assert names(out) == []


# -- whoever is killed -------------------------------------------------------------------------------------------------


def journal(out):
    return out / ".journal-00000.jsonl"


def test_a_result_is_on_disk_when_write_returns_and_readers_of_parquet_pass_over_it(out, result):
    with prepare_results(out) as file:
        file.write(result(1))
        assert journal(out).read_bytes() == result(1).to_json() + b"\n"
        assert [brief.example_id for brief in ResultsReader(out).briefs()] == ["1"]
        file.roll()
        file.write(result(2))
        assert examples(out) == ["1"]
        assert [brief.example_id for brief in ResultsReader(out).briefs()] == ["1", "2"]


def test_resume_makes_a_part_of_the_journal_and_cuts_off_half_a_line(out, result):
    out.mkdir()
    journal(out).write_bytes(result(1).to_json() + b"\n" + result(2).to_json()[:50])
    file = prepare_results(out, resume=True)
    assert set(file.kept) == {("1", 0)}
    assert names(out) == [".journal-00000.jsonl"]  # nothing is changed before the context is entered
    with file:
        file.write(result(2))
    assert names(out) == ["part-00000.parquet", "part-00001.parquet"]
    assert examples(out) == ["1", "2"]


def test_a_journal_that_is_a_part_already_counts_once(out, result):
    write(out, result(1), result(2))
    journal(out).write_bytes(result(1).to_json() + b"\n" + result(2).to_json() + b"\n")  # killed before it was removed
    assert len(list(ResultsReader(out).briefs())) == 2
    write(out, result(3), resume=True)
    assert examples(out) == ["1", "2", "3"]
    assert names(out) == ["part-00000.parquet", "part-00001.parquet"]


def test_half_a_part_is_removed_and_its_journal_kept(out, result):
    out.mkdir()
    journal(out).write_bytes(result(1).to_json() + b"\n")
    (out / ".part-00000.parquet.tmp").write_bytes(b"PAR1 and no more")
    write(out, resume=True)
    assert names(out) == ["part-00000.parquet"]
    assert examples(out) == ["1"]


def test_resume_drops_from_the_parts_what_runs_again(out, result):
    bad = ErrorInfo(kind=ErrorKind.AGENT, message="no")
    failed = [result(n, StopCondition.HAS_ERROR, error=bad) for n in (2, 3, 4)]
    late = result(5, StopCondition.AGENT_TIMEOUT)
    write(out, result(1, **FULL), failed[0], *failed[1:], late, part_rows=2)
    kept = prepare_results(out, resume=True, keep_failed=True)
    assert (len(kept.kept), kept.kept_failed) == (5, 4)
    with (file := prepare_results(out, resume=True)):
        assert (set(file.kept), file.kept_failed) == ({("1", 0), ("5", 0)}, 1)
    assert names(out) == ["part-00000.parquet", "part-00002.parquet"]
    assert read(out) == [result(1, **FULL), late]


def test_of_two_results_of_one_sample_the_first_stays(out, result):
    write(out, result(1, reward=1.0), result(1, reward=2.0))
    write(out, resume=True)
    assert [brief.reward for brief in ResultsReader(out).briefs()] == [1.0]


def test_a_full_disk_keeps_the_journal(tmp_path, out, result):
    whole = result(agent_stdout="x" * 3000)
    child = f"""
import resource, signal, pathlib
from producer import RolloutResult
from producer.files.errors import ResultsFileError
from producer.files.output import prepare_results
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (9000, 9000))
result = RolloutResult.parse({whole.to_json()!r})
try:
    with prepare_results(pathlib.Path({str(out)!r})) as file:
        for _ in range(9):
            file.write(result)
except ResultsFileError as error:
    print(error)
"""
    ended = subprocess.run([sys.executable, "-c", child], capture_output=True, text=True, check=True)
    assert f"{journal(out)} cannot be written: File too large" in ended.stdout
    assert names(out) == [".journal-00000.jsonl"]  # the part did not fit either
    assert len(list(ResultsReader(out).briefs())) == 2


def test_a_killed_run_keeps_what_it_wrote_and_resumes(tmp_path, out, worker, redis_url):
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text("{}\n" * 150)
    options = ["run", str(tasks), "--out", str(out), "--model", "m", "--redis-url", redis_url]
    killed = threading.Event()

    def behaviour(request):
        if request.example_id > 100:  # however late the kill is, it finds a run that goes on
            killed.wait(60)
        return RolloutResult.for_request(request, StopCondition.COMPLETED)

    worker.behaviour = behaviour
    running = subprocess.Popen([sys.executable, "-m", "producer.cli", *options, "--max-in-flight", "20"])
    wait_until(lambda: journal(out).exists() and journal(out).stat().st_size > 5000)
    running.kill()
    running.wait()
    killed.set()
    before = len(list(ResultsReader(out).briefs()))
    assert 0 < before < 150
    ended = CliRunner().invoke(app, [*options, "--resume"])
    assert ended.exit_code == 0, ended.output
    assert f"holds {before} results that are kept; {150 - before} rollouts to run" in ended.stderr
    assert sorted(map(int, examples(out))) == list(range(1, 151))


def in_a_child(work, steps):
    """Run ``work`` in a forked process that dies at its ``steps``-th write, rename, removal or sync; 0 if it ended."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    try:
        left = iter(range(steps))

        def dying(real):
            def call(*arguments, **options):
                if next(left, None) is None:
                    os._exit(9)
                return real(*arguments, **options)

            return call

        os.write, os.fsync = dying(os.write), dying(os.fsync)
        Path.replace, Path.unlink = dying(Path.replace), dying(Path.unlink)
        work()
        os._exit(0)
    finally:
        os._exit(1)


def test_killed_at_any_step_and_resumed_each_result_is_there_once(out, result):
    write(out, result(0), result(1, StopCondition.HAS_ERROR), part_rows=1)  # parts to rewrite as well

    def resume():
        with prepare_results(out, resume=True) as file:
            file.part_rows = 2
            for number in range(6):
                if (str(number), 0) not in file.kept:
                    file.write(result(number))
                    done.write(b"%d\n" % number)  # it was said to be written
                    if file.is_full:
                        file.roll()

    with (out.parent / "done").open("ab", buffering=0) as done:
        deaths = 0
        for steps in (1, 2, 3, 4, 5, 6, 3, 2, 7, 4, 3, 5, *[100] * 3):
            deaths += in_a_child(resume, steps) == 9
            there = [brief.example_id for brief in ResultsReader(out).briefs()]
            assert len(there) == len(set(there))
            assert {"0", *(out.parent / "done").read_text().split()} <= set(there)
    assert deaths > 5
    assert sorted(examples(out)) == [str(number) for number in range(6)]
    assert all(name.startswith("part-") for name in names(out))


# -- misuse ------------------------------------------------------------------------------------------------------------


def test_results_that_are_there_are_not_replaced_unasked(out, result):
    write(out, result(1))
    with pytest.raises(ResultsFileError, match="holds results already; continue it with --resume"):
        prepare_results(out)
    write(out, result(2), overwrite=True)
    assert examples(out) == ["2"]


def test_a_folder_of_something_else_is_left_alone(out):
    out.mkdir()
    (out / "mine.txt").touch()
    for options in ({}, {"overwrite": True}, {"resume": True}):
        with pytest.raises(ResultsFileError, match=r"holds 'mine\.txt', which is no part of results"):
            prepare_results(out, **options)


def test_places_that_cannot_be_written(tmp_path, out):
    out.touch()
    with pytest.raises(ResultsFileError, match="is a file; results in Parquet are a folder of parts"):
        prepare_results(out, overwrite=True)
    with pytest.raises(ResultsFileError, match="is no directory"):
        prepare_results(tmp_path / "no" / "out.parquet")


def test_two_runs_do_not_write_one_folder(out):
    with (
        prepare_results(out),
        pytest.raises(ResultsFileError, match="being written by another run"),
        prepare_results(out),
    ):
        pass


def test_parts_that_are_no_results_are_named(out, tmp_path):
    out.mkdir()
    (out / "part-00000.parquet").write_bytes(b"junk")
    with pytest.raises(ResultsFileError, match=r"part-00000\.parquet cannot be read as Parquet"):
        prepare_results(out, resume=True)
    import pyarrow as pa

    pq.write_table(pa.table({"a": [1]}), out / "part-00000.parquet")
    with pytest.raises(ResultsFileError, match="is no file of results: it has no column 'rollout_id'"):
        prepare_results(out, resume=True)


def test_a_part_that_is_damaged_inside_is_named(out, result):
    write(out, result(1, agent_stdout="word " * 5000))
    [part] = out.iterdir()
    data = bytearray(part.read_bytes())
    data[8 : len(data) // 2] = b"\xff" * (len(data) // 2 - 8)  # its footer is whole
    part.write_bytes(data)
    with pytest.raises(ResultsFileError, match=r"part-00000\.parquet cannot be read as Parquet"):
        read(out)


def test_only_the_suffix_makes_it_parquet(tmp_path):
    assert isinstance(prepare_results(tmp_path / "a.jsonl"), ResultsFile)
    assert parts_of(tmp_path / "none.parquet") == ([], [])


# -- the whole way -----------------------------------------------------------------------------------------------------


def test_a_dataset_goes_in_and_parquet_comes_out(tmp_path, out, worker, redis_url):
    import pyarrow as pa

    folder = tmp_path / "gsm"
    folder.mkdir()
    rows = [{"question": f"{n}+1", "solution": str(n + 1), "level": n} for n in range(3)]
    pq.write_table(pa.Table.from_pylist(rows), folder / "train-00000-of-00001.parquet")
    got = []

    def behaviour(request):
        got.append((request.prompt, request.answer, request.info))
        return RolloutResult.for_request(request, StopCondition.COMPLETED, reward=1.0, trajectory=[step()])

    worker.behaviour = behaviour
    options = ["run", str(folder), "--out", str(out), "--model", "m", "--redis-url", redis_url, "--split", "train"]
    options += ["--template", "Solve: {question}", "--map", "answer=solution"]
    ended = CliRunner().invoke(app, options)
    assert ended.exit_code == 0, ended.output
    assert "columns that are left out: level" in ended.stderr
    assert sorted(got) == [("Solve: 0+1", "1", {}), ("Solve: 1+1", "2", {}), ("Solve: 2+1", "3", {})]
    assert pc.sum(pq.read_table(out).column("reward")).as_py() == 3.0


def test_tasks_come_through_standard_input(out, worker, redis_url):
    options = ["run", "-", "--out", str(out), "--model", "m", "--redis-url", redis_url]
    command = [sys.executable, "-m", "producer.cli", *options]
    ended = subprocess.run(command, input='{"prompt": "a"}\n' * 3, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert len(examples(out)) == 3
    again = subprocess.run([*command, "--overwrite"], input="[]", capture_output=True, text=True, check=False)
    assert again.returncode == 2
    assert "stdin:1: list found" in again.stderr


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--map", "prmpt=question"), "did you mean 'prompt'?"),
        (("--template", "none"), "names no column"),
        (("--map", "prompt=quest"), "no column 'quest'; the columns are 'question'"),
        (("--split", "train"), "--split chooses from"),
        (("--harbor", "x", "--agent", "nop", "--map", "prompt=a"), "are for tables and lines of JSON"),
    ],
)
def test_wrong_options_are_refused_and_nothing_is_submitted(tmp_path, out, redis_url, options, words):
    (tmp_path / "t.jsonl").write_text('{"question": "q"}\n')
    given = [] if "--harbor" in options else [str(tmp_path / "t.jsonl")]
    ended = CliRunner().invoke(
        app, ["run", *given, "--out", str(out), "--model", "m", "--redis-url", redis_url, *options]
    )
    assert ended.exit_code == 2, ended.output
    assert words in " ".join(ended.stderr.split())
    assert redis.Redis.from_url(redis_url).dbsize() == 0
    assert not Path(out).exists()


# -- resuming with other tasks -----------------------------------------------------------------------------------------


@pytest.fixture(params=["out.jsonl", "out.parquet"])
def resumable(request, tmp_path, worker, redis_url):
    """Runs two tasks of which the second fails, and returns what resumes them."""
    path, tasks = tmp_path / request.param, tmp_path / "tasks.jsonl"
    tasks.write_text('{"question": "a"}\n{"question": "b"}\n')

    def run(*options, template="Solve: {question}"):
        arguments = ["--out", str(path), "--model", "m", "--redis-url", redis_url, "--template", template]
        return CliRunner().invoke(app, ["run", str(tasks), *arguments, *options])

    def fail(request):
        good = request.example_id == 1
        return RolloutResult.for_request(request, StopCondition.COMPLETED if good else StopCondition.HAS_ERROR)

    worker.behaviour, succeed = fail, worker.behaviour
    assert run().exit_code == 1
    worker.behaviour = succeed
    run.tasks, run.path = tasks, path
    return run


def test_resume_with_another_template_is_refused(resumable):
    ended = resumable("--resume", template="Answer: {question}")
    assert ended.exit_code == 2
    assert "1 of the tasks whose results" in ended.stderr
    assert "are not what they were: 1;" in ended.stderr
    assert resumable("--resume").exit_code == 0
    assert len(list(ResultsReader(resumable.path).briefs())) == 2


def test_resume_may_change_what_runs_again_add_tasks_and_mend_limits(resumable):
    resumable.tasks.write_text('{"question": "a"}\n{"question": "changed"}\n{"question": "new"}\n')
    ended = resumable("--resume", "--timeout", "9", "--run-command", "go")
    assert ended.exit_code == 0, ended.output
    assert len(list(ResultsReader(resumable.path).briefs())) == 3
    resumable.tasks.write_text('{"question": "a"}\n{"question": "b"}\n{"question": "new"}\n')
    assert "are not what they were: 2;" in resumable("--resume").stderr


def test_without_a_usable_record_nothing_is_checked(resumable):
    record = resumable.path.with_name(f".{resumable.path.name}.tasks")
    record.write_bytes(b"junk" * 300)
    assert resumable("--resume", template="Answer: {question}").exit_code == 0
    record.unlink()
    assert resumable("--resume").exit_code == 0


def test_parts_are_made_while_a_run_goes_on(out, worker, settings, make):
    from producer.runner import RunOptions, run_batch

    file = prepare_results(out)
    file.part_rows = 2
    assert run_batch(make(7), file, RunOptions(settings=settings)).completed == 7
    assert len(names(out)) == 4
    assert sorted(map(int, examples(out))) == list(range(7))
