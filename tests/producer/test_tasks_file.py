from __future__ import annotations

import json
import re

import pytest

from producer.contract import ID_PATTERN, InvalidRequestError
from producer.ids import safe_id
from producer.tasks_file import TaskDefaults, TasksFile, TasksFileError, run_batch_id


@pytest.fixture
def write(tmp_path):
    def write(*lines):
        path = tmp_path / "tasks.jsonl"
        encoded = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
        path.write_bytes(b"\n".join(encoded))
        return path

    return write


def load(path, samples=1, **defaults):
    return TasksFile.load(path, TaskDefaults(**({"model": "m"} | defaults)), samples)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"max_turns": "x"}, "max_turns: Input should be a valid integer"),
        ({"modle": "m"}, "modle: no such field; did you mean 'model'?"),
        (b"{", "not JSON:"),
        (b"[1]", "list found; each line is one JSON object"),
        (b'{"prompt": "\xff"}', "not UTF-8 (byte 0xff at column 13)"),
        (b'{"reward": NaN}', "not JSON:"),
        ({"example_id": 1}, "example_id 1 with sample_index 0 comes twice"),
    ],
)
def test_a_wrong_line_is_named_by_number_and_field(write, line, message):
    path = write({"prompt": "ok"}, b"", line)
    with pytest.raises(TasksFileError) as caught:
        load(path)
    assert len(caught.value.problems) == 1
    assert caught.value.problems[0].startswith(f"{path}:3: ")
    assert message in caught.value.problems[0]


def test_a_missing_model_says_how_to_give_one(write):
    with pytest.raises(TasksFileError, match="model: missing; give it in the line, or for all lines with --model"):
        load(write({}), model=None)


def test_the_first_twenty_problems_and_their_number_are_shown(write):
    with pytest.raises(TasksFileError) as caught:
        load(write(*[{"max_turns": "x"}] * 30))
    shown = str(caught.value).splitlines()
    assert len(shown) == 21
    assert shown[-1] == "... 10 more; 30 problems in all"


def test_explicit_ids_that_repeat_are_named(write):
    with pytest.raises(TasksFileError, match=r":2: rollout_id: 'a' is taken by line 1 already"):
        load(write({"rollout_id": "a"}, {"rollout_id": "a"}))


def test_a_sample_index_and_samples_exclude_each_other(write):
    with pytest.raises(TasksFileError, match="sample_index: given, while 4 samples are asked for"):
        load(write({"sample_index": 1}), samples=4)


@pytest.mark.parametrize("content", [b"", b"\n \n\t\n", b"\xef\xbb\xbf"])
def test_a_file_without_tasks_says_so(write, content):
    with pytest.raises(TasksFileError, match="holds no tasks"):
        load(write(content))


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(TasksFileError, match="no such file"):
        load(tmp_path / "none.jsonl")
    with pytest.raises(TasksFileError, match="is a directory"):
        load(tmp_path)


def test_blank_lines_crlf_and_a_byte_order_mark_are_no_trouble(write):
    tasks = load(write(b'\xef\xbb\xbf{"prompt": "a"}\r', b"\r", b'{"prompt": "b"}\r'))
    assert [(r.example_id, r.prompt) for r in tasks.requests("b")] == [(1, "a"), (3, "b")]


def test_samples_get_ids_indices_and_a_group(write):
    requests = list(load(write({"example_id": "ex/1"}, {"group_id": "g"}), samples=2).requests("b"))
    assert [r.sample_index for r in requests] == [0, 1, 0, 1]
    assert requests[0].group_id == requests[1].group_id != "g"
    assert {requests[2].group_id, requests[3].group_id} == {"g"}
    assert [r.rollout_id for r in requests[2:]] == ["b-2-0", "b-2-1"]
    assert all(re.match(ID_PATTERN, r.rollout_id) for r in requests)
    assert len({r.rollout_id for r in requests}) == 4


def test_ids_are_the_same_for_the_same_file_and_batch(write):
    tasks = load(write({}, {"example_id": "ü" * 300}), samples=2)
    assert [r.rollout_id for r in tasks.requests("b")] == [r.rollout_id for r in tasks.requests("b")]


def test_explicit_ids_are_kept(write):
    tasks = load(write({"rollout_id": "mine"}))
    assert list(tasks.explicit_ids) == ["mine"]
    assert [r.rollout_id for r in tasks.requests("b")] == ["mine"]
    assert list(load(write({"rollout_id": "mine"}), samples=2).explicit_ids) == ["mine-0", "mine-1"]


def test_options_fill_what_a_line_leaves_out(write):
    lines = [{"model": "own", "deadlines": {"agent": 5}}, {"deadlines": {"setup": 7}}]
    tasks = load(write(*lines), run_command="go", image="img", environment="env", timeout=9.0)
    first, second = tasks.requests("b")
    assert (first.model, second.model) == ("own", "m")
    assert (first.deadlines.agent, second.deadlines.agent, second.deadlines.setup) == (5, 9, 7)
    assert (second.run_command, second.image, second.environment) == ("go", "img", "env")


def test_a_line_may_name_another_queue_than_the_option(write):
    tasks = load(write({}, {"queue": "own"}), queue="gpu")
    assert [request.queue for request in tasks.requests("b")] == ["gpu", "own"]
    assert [request.queue for request in load(write({})).requests("b")] == ["rollouts"]


def test_a_wrong_option_is_not_blamed_on_a_line():
    with pytest.raises(InvalidRequestError, match="gateway_url"):
        TaskDefaults(gateway_url="nonsense").check()
    with pytest.raises(InvalidRequestError, match=r"^queue: 'GPU' is no queue's name"):
        TaskDefaults(queue="GPU").check()


def test_skipped_samples_are_left_out(write):
    tasks = load(write({}, {}), samples=2)
    assert [(r.example_id, r.sample_index) for r in tasks.requests("b", {("1", 0), ("2", 1)})] == [(1, 1), (2, 0)]


def test_cleaned_ids_stay_different():
    assert safe_id("a-1") == "a-1"
    cleaned = {safe_id(t) for t in ("a/b", "a_b", "a b", "x" * 200, "x" * 201, "", "\n", "a\n", "ü")}
    assert len(cleaned) == 9
    assert all(re.fullmatch(ID_PATTERN.strip("^$"), i) for i in cleaned)


def test_batch_ids_name_the_file_and_differ(tmp_path):
    first, second = (run_batch_id(tmp_path / "my tasks.jsonl") for _ in range(2))
    assert first.startswith("my_tasks-")
    assert first != second
    assert re.match(ID_PATTERN, run_batch_id(tmp_path / "....jsonl"))
