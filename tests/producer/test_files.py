"""Tasks from tables, datasets and pipes; columns that become fields; what is checked before anything is submitted."""

from __future__ import annotations

import datetime
import io
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from producer import tasks_file
from producer.contract import InvalidRequestError
from producer.files import lines
from producer.files.errors import TasksChangedError
from producer.files.index import NameIndex, SampleIndex
from producer.files.lines import STDIN, JsonLines
from producer.files.mapping import ColumnMapping, Template
from producer.files.tables import shards
from producer.tasks_file import TaskDefaults, TasksFile, TasksFileError

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

ROWS = [{"question": f"q{n}", "solution": n, "level": "easy"} for n in range(5)]
MAPS = ("prompt=question", "answer=solution", "info.level=level")


def table(rows=ROWS):
    return pa.Table.from_pylist(rows)


def load(path, maps=(), template=None, split=None, samples=1):
    mapping = ColumnMapping(maps, template)
    return TasksFile.load(Path(path), TaskDefaults(model="m"), samples, mapping=mapping, split=split)


def seen(tasks):
    return [(r.example_id, r.prompt, r.answer, r.info) for r in tasks.requests("b")]


EXPECTED = [(n + 1, f"q{n}", n, {"level": "easy"}) for n in range(5)]


def stream(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table(rows).schema) as writer:
        writer.write_table(table(rows), max_chunksize=2)


def save_to_disk(folder, rows, split="train", parts=2):
    """Write what datasets' ``save_to_disk`` writes."""
    half = len(rows) // parts + 1
    names = []
    for part in range(parts):
        names.append(f"data-{part:05}-of-{parts:05}.arrow")
        stream(folder / names[-1], rows[part * half : (part + 1) * half])
    (folder / "dataset_info.json").write_text(json.dumps({"features": {}}))
    state = {"_data_files": [{"filename": name} for name in names], "_fingerprint": "f", "_split": split}
    (folder / "state.json").write_text(json.dumps(state))


# -- where tasks come from ---------------------------------------------------------------------------------------------


def test_parquet_rows_become_requests(tmp_path):
    pq.write_table(table(), tmp_path / "t.parquet", row_group_size=2)
    assert seen(load(tmp_path / "t.parquet", MAPS)) == EXPECTED


@pytest.mark.parametrize("name", ["t.arrow", "t.feather"])
def test_both_formats_of_arrow_are_read(tmp_path, name):
    path = tmp_path / name
    stream(path, ROWS)
    assert seen(load(path, MAPS)) == EXPECTED
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table().schema) as writer:
        writer.write_table(table())
    assert seen(load(path, MAPS)) == EXPECTED


def test_a_saved_dataset_is_read_in_the_order_of_its_state(tmp_path):
    save_to_disk(tmp_path / "d", ROWS)
    (tmp_path / "d" / "cache-1234.arrow").write_bytes(b"left by datasets, not data")
    assert seen(load(tmp_path / "d", MAPS)) == EXPECTED
    assert seen(load(tmp_path / "d", MAPS, split="train")) == EXPECTED
    with pytest.raises(TasksFileError, match="has no split 'test'; there is train"):
        load(tmp_path / "d", MAPS, split="test")


def test_a_dictionary_of_datasets_needs_its_split(tmp_path):
    save_to_disk(tmp_path / "d" / "train", ROWS)
    save_to_disk(tmp_path / "d" / "test", ROWS[:2], "test", parts=1)
    (tmp_path / "d" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(TasksFileError, match="holds the splits train, test; choose one with --split"):
        load(tmp_path / "d", MAPS)
    assert seen(load(tmp_path / "d", MAPS, split="test")) == EXPECTED[:2]


@pytest.mark.parametrize(
    "names", [("a.parquet", "b.parquet"), ("data/train-00000-of-00002.parquet", "train/x.parquet")]
)
def test_a_folder_of_shards_is_one_table(tmp_path, names):
    for name, rows in zip(names, (ROWS[:2], ROWS[2:]), strict=True):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        pq.write_table(table(rows), tmp_path / name)
    (tmp_path / ".hidden.parquet").write_bytes(b"")
    assert seen(load(tmp_path, MAPS)) == EXPECTED


def test_shards_that_name_splits_need_a_choice(tmp_path):
    for name in ("train-00000-of-00001.parquet", "test-00000-of-00001-0123abcd.parquet"):
        pq.write_table(table(), tmp_path / name)
    with pytest.raises(TasksFileError, match="holds the splits test, train; choose one"):
        shards(tmp_path)
    assert [path.name for path in shards(tmp_path, "train")] == ["train-00000-of-00001.parquet"]


def test_a_state_that_names_files_elsewhere_is_refused(tmp_path):
    (tmp_path / "state.json").write_text('{"_data_files": [{"filename": "../secret.arrow"}]}')
    with pytest.raises(TasksFileError, match="which is not in the folder"):
        load(tmp_path, MAPS)
    (tmp_path / "state.json").write_text("{}")
    with pytest.raises(TasksFileError, match="does not name its _data_files"):
        load(tmp_path, MAPS)


@pytest.mark.parametrize(("name", "kind"), [("t.parquet", "Parquet"), ("t.arrow", "Arrow")])
def test_files_that_are_no_tables_are_named(tmp_path, name, kind):
    with pytest.raises(TasksFileError, match=rf"{name}: (no such file|cannot be read as {kind})"):
        load(tmp_path / name)
    (tmp_path / name).write_bytes(b"junk" * 10)
    with pytest.raises(TasksFileError, match=f"{name}: cannot be read as {kind}"):
        load(tmp_path / name)


def test_shards_with_other_columns_are_named(tmp_path):
    pq.write_table(table(), tmp_path / "a.parquet")
    pq.write_table(table([{"question": "q"}]), tmp_path / "b.parquet")
    with pytest.raises(TasksFileError, match=r"b\.parquet: has other columns than .*a\.parquet"):
        load(tmp_path, MAPS)


def test_a_split_is_for_folders(tmp_path):
    (tmp_path / "t.jsonl").write_text("{}")
    with pytest.raises(TasksFileError, match="--split chooses from"):
        load(tmp_path / "t.jsonl", split="train")


def test_without_pyarrow_the_extra_is_named(tmp_path):
    code = (
        "import sys; sys.modules['pyarrow'] = None\n"
        "from producer.cli import app\n"
        f"app(['run', {str(tmp_path / 't.parquet')!r}, '--out', {str(tmp_path / 'o')!r}, '--model', 'm'])"
    )
    (tmp_path / "t.parquet").touch()
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert "pip install 'rollout-fleet[parquet]'" in ended.stderr
    code = code.replace("t.parquet", "t.jsonl").replace("/o'", "/o.parquet'")
    (tmp_path / "t.jsonl").write_text("{}")
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert "pip install 'rollout-fleet[parquet]'" in ended.stderr


# -- rows --------------------------------------------------------------------------------------------------------------


def test_a_wrong_row_is_named_by_number_and_field(tmp_path):
    path = tmp_path / "t.parquet"
    pq.write_table(table([{"prompt": "a", "max_turns": "1"}, {"prompt": "b", "max_turns": "x"}]), path)
    with pytest.raises(TasksFileError) as caught:
        load(path)
    [problem] = caught.value.problems
    assert problem.startswith(f"{path}:row 2: max_turns: Input should be a valid integer")


def test_a_null_is_a_field_that_is_left_out(tmp_path):
    messages = [{"role": "user", "content": "x", "name": None}]
    rows = [
        {"messages": messages, "max_turns": None, "answer": float("nan")},
        {"messages": messages, "max_turns": 5.0, "answer": 1.0},
    ]
    pq.write_table(table(rows), tmp_path / "t.parquet")
    first, second = load(tmp_path / "t.parquet").requests("b")
    assert first.prompt == [{"role": "user", "content": "x"}]
    assert (first.max_turns, first.answer, second.max_turns, second.answer) == (-1, None, 5, 1.0)


def test_times_become_texts_and_bytes_are_refused(tmp_path):
    path = tmp_path / "t.parquet"
    pq.write_table(table([{"prompt": "a", "answer": datetime.date(2026, 1, 2)}]), path)
    assert next(load(path).requests("b")).answer == "2026-01-02"
    pq.write_table(table([{"prompt": "a", "answer": b"\xff"}]), path)
    with pytest.raises(TasksFileError, match=r"row 1: answer: holds bytes"):
        load(path)


def test_columns_that_are_no_fields_are_refused_unless_others_are_mapped(tmp_path):
    path = tmp_path / "t.parquet"
    pq.write_table(table(), path)
    with pytest.raises(TasksFileError, match="no fields of a request are: 'question', 'solution', 'level'; say what"):
        load(path)
    tasks = load(path, ["prompt=question"])
    assert tasks.mapping.left_out == {"solution", "level"}


# -- columns -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("prompt", "write FIELD=COLUMN"),
        ("=question", "write FIELD=COLUMN"),
        ("prmpt=question", "no field 'prmpt'; did you mean 'prompt'?"),
        ("zzzz=question", "no field 'zzzz'; there are advanced, answer"),
        ("prompt.text=question", "only info, environment_args"),
        ("info.=question", "only info, environment_args"),
    ],
)
def test_wrong_mappings_are_refused(given, words):
    with pytest.raises(InvalidRequestError) as caught:
        ColumnMapping([given])
    assert words in str(caught.value)


def test_a_field_is_mapped_once():
    with pytest.raises(InvalidRequestError, match="prompt is mapped already, from 'a'"):
        ColumnMapping(["prompt=a", "prompt=b"])
    with pytest.raises(InvalidRequestError, match="--template makes the prompt, and --map prompt does too"):
        ColumnMapping(["prompt=a"], "{b}")


def test_unknown_columns_are_named_with_those_there_are(tmp_path):
    path = tmp_path / "t.parquet"
    pq.write_table(table(), path)
    words = "no column 'quest'; the columns are 'question', 'solution', 'level'"
    for options in ({"maps": ["prompt=quest"]}, {"template": "Solve: {quest}"}):
        with pytest.raises(TasksFileError, match=words):
            load(path, **options)


def test_in_lines_of_json_each_line_must_have_the_column(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text('{"question": "a", "other": 1}\n{"other": 1}\n')
    with pytest.raises(TasksFileError) as caught:
        load(path, ["prompt=question"])
    assert caught.value.problems == [
        f"{path}:2: --map prompt=question: there is no column 'question'; the columns are 'other'"
    ]


def test_mappings_reach_into_objects_and_columns_move():
    mapping = ColumnMapping(["info.level=meta.level", "info.a.b=x", "answer=solution", "example_id=meta.dotted.id"])
    row = {"meta": {"level": 3}, "meta.dotted": {"id": "e"}, "x": 1, "solution": 4, "answer": "old", "noise": 0}
    assert mapping.apply(row) == {"info": {"level": 3, "a": {"b": 1}}, "answer": 4, "example_id": "e"}
    assert mapping.left_out == {"noise"}


def test_a_mapped_prompt_replaces_messages_and_is_never_null():
    mapping = ColumnMapping(["prompt=q"])
    assert mapping.apply({"messages": [], "q": "x"}) == {"prompt": "x"}
    with pytest.raises(InvalidRequestError, match="prompt: column 'q' is null"):
        mapping.apply({"q": None})
    assert ColumnMapping(["answer=a"]).apply({"a": None}) == {}


def test_a_field_of_what_is_no_object_is_refused():
    with pytest.raises(InvalidRequestError, match="info holds 'text', which has no fields"):
        ColumnMapping(["info.a=x"]).apply({"info": "text", "x": 1})


@pytest.mark.parametrize(
    ("template", "prompt"),
    [
        ("Solve: {question}", "Solve: 1+1"),
        (r"{question} in \boxed{}", r"1+1 in \boxed{}"),
        (r"{question} {{question}} {1} { x }", "1+1 {question} {1} { x }"),
        ('{"a": {"b": "{question}"}}', '{"a": {"b": "1+1"}}'),
        ("{question} {list} {number}", "1+1 [1,null] 2.5"),
        ("{meta.level} {with space} {naïve}", "3 s n"),
    ],
)
def test_templates_put_columns_into_a_prompt(template, prompt):
    row = {"question": "1+1", "list": [1, None], "number": 2.5, "meta": {"level": 3}, "with space": "s", "naïve": "n"}
    assert Template(template).fill(row) == prompt


def test_a_template_does_not_read_what_it_puts_in():
    assert Template("{a}{b}").fill({"a": "{b}", "b": "{a}"}) == "{b}{a}"


def test_templates_come_from_files(tmp_path):
    path = tmp_path / "solve.txt"
    path.write_text("Line\n{question}\n")
    assert Template.read(f"@{path}").fill({"question": "q"}) == "Line\nq"
    with pytest.raises(InvalidRequestError, match="cannot be read: No such file"):
        Template.read(f"@{path}.none")
    with pytest.raises(InvalidRequestError, match="names no column"):
        Template.read(str(path))
    with pytest.raises(InvalidRequestError, match="column 'question' is null"):
        Template("{question}").fill({"question": None})


def test_a_template_keeps_the_columns_that_are_fields(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text('{"question": "q", "answer": 3, "noise": 1}\n')
    assert seen(load(path, template="Solve: {question} ({answer})")) == [(1, "Solve: q (3)", 3, {})]


# -- reading twice, in bounded memory ----------------------------------------------------------------------------------


def test_a_pipe_is_read_twice(tmp_path):
    path = tmp_path / "fifo"
    os.mkfifo(path)
    writer = threading.Thread(target=lambda: path.write_text('{"prompt": "a"}\n{"prompt": "b"}\n'))
    writer.start()
    tasks = load(path)
    writer.join()
    assert [r.prompt for r in tasks.requests("b")] == [r.prompt for r in tasks.requests("b")] == ["a", "b"]


@pytest.mark.parametrize("limit", [4, 10**6])
def test_standard_input_is_kept_wherever_it_fits(monkeypatch, limit):
    read, write = os.pipe()
    os.write(write, b'{"prompt": "a"}\n{"prompt": "b"}\n')
    os.close(write)
    monkeypatch.setattr(lines, "IN_MEMORY", limit)
    with os.fdopen(read, "rb") as file:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(file))
        tasks = JsonLines(STDIN)
        both = zip(tasks, tasks, strict=True)  # two readers at once do not move each other
        assert [(a.line, b.where) for a, b in both] == [
            (b'{"prompt": "a"}', "stdin:1"),
            (b'{"prompt": "b"}', "stdin:2"),
        ]


def test_a_large_file_that_is_changed_meanwhile_is_noticed(tmp_path, monkeypatch):
    monkeypatch.setattr(lines, "IN_MEMORY", 4)
    path = tmp_path / "t.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    tasks = load(path)
    assert len(list(tasks.requests("b"))) == 2
    with path.open("a") as file:
        file.write('{"prompt": "c"}\n')
    with pytest.raises(TasksChangedError, match="was changed while its tasks are run"):
        list(tasks.requests("b"))


def test_a_large_file_that_is_replaced_is_read_on_as_it_was(tmp_path, monkeypatch):
    monkeypatch.setattr(lines, "IN_MEMORY", 4)
    path = tmp_path / "t.jsonl"
    path.write_text('{"prompt": "a"}\n')
    tasks = load(path)
    other = tmp_path / "new"
    other.write_text('{"prompt": "other"}\n')
    other.replace(path)
    assert [r.prompt for r in tasks.requests("b")] == ["a"]


def test_a_small_file_may_be_edited_while_its_tasks_run(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text('{"prompt": "a"}\n')
    tasks = load(path)
    path.write_text("something else")
    assert [r.prompt for r in tasks.requests("b")] == ["a"]


def test_a_table_that_is_replaced_meanwhile_is_noticed(tmp_path):
    path = tmp_path / "t.parquet"
    pq.write_table(table(), path)
    tasks = load(path, MAPS)
    pq.write_table(table(ROWS * 9), path)
    with pytest.raises(TasksChangedError, match="was changed"):
        list(tasks.requests("b"))
    path.unlink()
    with pytest.raises(TasksChangedError, match="no such file; it could be read when it was checked"):
        list(tasks.requests("b"))


def test_a_line_without_an_end_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(lines, "LONGEST_LINE", 10)
    (tmp_path / "t.jsonl").write_text('{"prompt": "a"}\n')
    with pytest.raises(TasksFileError, match=r":1: longer than 10 bytes"):
        load(tmp_path / "t.jsonl")


def test_many_wrong_rows_are_counted_and_not_kept(tmp_path):
    (tmp_path / "t.jsonl").write_text("[]\n" * 1500)
    with pytest.raises(TasksFileError) as caught:
        load(tmp_path / "t.jsonl")
    assert (len(caught.value.problems), caught.value.count) == (1000, 1500)
    assert str(caught.value).endswith("... 1480 more; 1500 problems in all")


def test_a_long_check_says_how_far_it_is(tmp_path, monkeypatch):
    monkeypatch.setattr(tasks_file, "_TELL_EVERY", 2)
    (tmp_path / "t.jsonl").write_text("{}\n" * 5)
    told = []
    TasksFile.load(tmp_path / "t.jsonl", TaskDefaults(model="m"), tell=told.append)
    assert told == [2, 4]


def test_the_index_is_a_set_with_numbers():
    names = NameIndex()
    assert [names.add("a", 1), names.add("b", 2), names.add("a", 3)] == [None, None, 1]
    assert (len(names), "a" in names, "c" in names, sorted(names)) == (2, True, False, ["a", "b"])
    samples = SampleIndex()
    assert [samples.add(("x:1", 0)), samples.add(("1", 0)), samples.add(("x:1", 0))] == [True, True, False]
    assert set(samples) == {("x:1", 0), ("1", 0)}
    assert ("1", 1) not in samples


def test_what_is_left_is_counted_for_every_sample(tmp_path):
    (tmp_path / "t.jsonl").write_text("{}\n{}\n")
    assert load(tmp_path / "t.jsonl", samples=3).left({("1", 0), ("2", 2), ("9", 0)}) == 4


MANY = """
import sys
import pyarrow.parquet
from pathlib import Path
from producer.tasks_file import TaskDefaults, TasksFile
tasks = TasksFile.load(Path(sys.argv[1]), TaskDefaults(model="m"))
count = sum(1 for _ in tasks.requests("b"))
# Not what getrusage tells: that begins with the memory of the process that started this one.
[peak] = [line.split()[1] for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:")]
print(count, tasks.left(), int(peak) // 1024)
"""


def test_a_large_table_is_never_in_memory_whole(tmp_path):
    """800 rows more of 160 kB, 128 MB of prompts, take a small part of that."""
    schema = pa.schema([("prompt", pa.string())])
    megabytes = []
    for rows in (400, 1200):
        path = tmp_path / f"{rows}.parquet"
        with pq.ParquetWriter(path, schema) as writer:
            for start in range(0, rows, 100):
                prompts = [f"{n} " + "word " * 32_000 for n in range(start, start + 100)]
                writer.write_table(pa.table({"prompt": prompts}, schema=schema))
        ended = subprocess.run([sys.executable, "-c", MANY, str(path)], capture_output=True, text=True, check=True)
        count, left, peak = map(int, ended.stdout.split())
        assert (count, left) == (rows, rows)
        megabytes.append(peak)
    assert megabytes[1] - megabytes[0] < 100, megabytes
