"""Reading and packing folders in Harbor's task format."""

from __future__ import annotations

import base64
import gzip
import io
import json
import os
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from producer import packing
from producer.contract import RolloutRequest
from producer.dockerfile import NeedsBuildError, Recipe, last_workdir
from producer.harbor import read_tasks
from producer.tasks_file import TaskDefaults, TasksFile, TasksFileError

#: Every key that task.toml documents, in the newest spelling that is followed.
FULL = """\
schema_version = "1.3"
[task]
name = "org/everything"
description = "Names everything"
authors = [{ name = "A", email = "a@example.org" }]
keywords = ["all"]
[metadata]
difficulty = "hard"
category = "science"
tags = ["a", "b"]
created = 2025-10-31
expert_time_estimate_min = 60.0
[verifier]
timeout_sec = 900
env = { MODE = "strict", KEY = "${JUDGE_KEY:-none}" }
user = "root"
[agent]
timeout_sec = 1800.5
[environment]
docker_image = "registry/everything:1"
build_timeout_sec = 600.0
cpus = 2
memory_mb = 4096
storage_mb = 10240
gpus = 1
gpu_types = ["H100"]
allow_internet = false
mcp_servers = []
workdir = "/srv/work"
new_key = "is ignored"
[environment.env]
PLAIN = "value"
HF_TOKEN = "${HF_TOKEN}"
[solution.env]
"""

MakeTask = Callable[..., Path]


@pytest.fixture
def make_task(tmp_path: Path) -> MakeTask:
    def make(name: str = "task", toml: str = "", dockerfile: str | None = "FROM debian:12\n", **files: str) -> Path:
        folder = tmp_path / "tasks" / name
        written = {"task.toml": toml, "instruction.md": "Do it.", "tests/test.sh": "#!/bin/sh\nexit 0\n"} | files
        if dockerfile is not None:
            written["environment/Dockerfile"] = dockerfile
        for path, text in written.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text)
        return folder

    return make


def fields(folder: Path, agent: str = "shell", image: str | None = None) -> dict[str, Any]:
    (task,) = read_tasks(folder, agent, image)
    found: dict[str, Any] = json.loads(task.line)
    RolloutRequest.parse({"model": "m"} | ({"image": image} if image else {}) | found)
    return found


def problems(folder: Path, agent: str = "shell", image: str | None = None) -> list[str]:
    with pytest.raises(TasksFileError) as caught:
        read_tasks(folder, agent, image)
    return [problem.removeprefix(f"{folder}: ") for problem in caught.value.problems]


def packed(text: str) -> dict[str, tuple[bytes, int]]:
    with tarfile.open(fileobj=io.BytesIO(gzip.decompress(base64.b64decode(text)))) as archive:
        return {m.name: (archive.extractfile(m).read(), m.mode) for m in archive}  # type: ignore[union-attr]


def test_every_field_of_a_task_reaches_its_request(make_task: MakeTask) -> None:
    found = fields(make_task("everything", FULL, dockerfile=None))
    arguments = found.pop("environment_args")

    assert found == {
        "example_id": "everything",
        "environment": "harbor",
        "prompt": "Do it.",
        "info": {
            "difficulty": "hard",
            "category": "science",
            "tags": ["a", "b"],
            "created": "2025-10-31",
            "expert_time_estimate_min": 60.0,
            "task_name": "org/everything",
        },
        "resources": {"cpu_cores": 2.0, "memory_gb": 4.0, "disk_gb": 10.0, "gpu_count": 1, "gpu_type": "H100"},
        "env": {"PLAIN": "value"},
        "secret_env": ["HF_TOKEN"],
        "deadlines": {"score": 1020.0, "agent": 1800.5},
        "image": "registry/everything:1",
    }
    assert packed(arguments.pop("tests")) == {"test.sh": (b"#!/bin/sh\nexit 0\n", 0o644)}
    assert arguments == {
        "agent": "shell",
        "verifier": {"timeout": 900.0, "env": {"MODE": "strict", "KEY": "none"}},
        "workdir": "/srv/work",
        "warnings": [
            "the task allows no free internet access; sandboxes do not enforce that",
        ],
    }


def test_the_older_spellings_are_read(make_task: MakeTask) -> None:
    toml = 'version = "1.0"\n[environment]\nmemory = "2G"\nstorage = "512M"\n'
    assert fields(make_task(toml=toml))["resources"] == {"memory_gb": 2.0, "disk_gb": 0.5}


def test_an_empty_task_toml_leaves_everything_at_its_default(make_task: MakeTask) -> None:
    found = fields(make_task())
    request = RolloutRequest.parse({"model": "m"} | found)

    assert (request.image, request.deadlines.agent, request.deadlines.score) == ("debian:12", 3600, 720)
    assert request.resources == type(request.resources)()
    assert found["environment_args"]["workdir"] == "/"


@pytest.mark.parametrize(
    ("toml", "problem"),
    [
        ("[verifier", "task.toml is not TOML: "),
        ("[verifier]\ntimeout_sec = 'long'", "task.toml: verifier.timeout_sec: Input should be a valid number"),
        ("[agent]\ntimeout_sec = -1\n[environment]\ncpus = 0", "agent.timeout_sec: Input should be greater than 0; "),
        ("[agent]\ntimeout_sec = -1\n[environment]\ncpus = 0", "; environment.cpus: Input should be greater than 0"),
        (
            "[environment]\nmemory = 'much'",
            "task.toml: environment.memory: 'much' is not a size such as '2G' or '512M'",
        ),
        ("[environment]\ngpus = 1", "task.toml: environment.gpus asks for GPUs of any type; name one in gpu_types"),
        ("[environment]\nworkdir = 'app'", "task.toml: environment.workdir: "),
        ("[environment]\nenv = { 'A-B' = 'x' }", "task.toml: environment.env.A-B"),
        ("environment = 3", "task.toml: environment: "),
        ("version = '2.0'", "task.toml: schema version 2.0 cannot be had here"),
        ("[[steps]]\nname = 'a'", "task.toml: [[steps]] (a task of several steps) cannot be had here"),
        ("[verifier]\nenvironment_mode = 'separate'", "a separate verifier environment cannot be had here"),
        ("[verifier.environment]\ndocker_image = 'x'", "a separate verifier environment cannot be had here"),
        ("[agent]\nuser = 'agent'\n[verifier]\nuser = 1", "agent.user other than root, verifier.user other than root"),
        ("[environment]\nos = 'windows'", "environment.os 'windows' cannot be had here"),
        ("[environment]\nskills_dir = '/s'", "environment.skills_dir cannot be had here"),
        ("[environment.healthcheck]\ncommand = 'x'", "environment.healthcheck cannot be had here"),
        ("[[environment.mcp_servers]]\nname = 'x'", "environment.mcp_servers cannot be had here"),
        ("[environment]\ntpu = { type = 'v4' }", "environment.tpu cannot be had here"),
        ("[environment]\nenv = { OPENAI_API_KEY = '${OPENAI_API_KEY}' }", "OPENAI_API_KEY say where the rollout's own"),
        ("[environment]\nenv = { A = '${B}' }", "environment.env: A takes another variable of the host"),
        ("[verifier]\nenv = { A = '${A}' }", "verifier.env: A takes a variable of the host, which only the agent's"),
    ],
)
def test_a_wrong_task_toml_is_one_sentence(make_task: MakeTask, toml: str, problem: str) -> None:
    (found,) = problems(make_task(toml=toml))
    assert problem in found


@pytest.mark.parametrize(
    ("missing", "problem"),
    [
        ("instruction.md", "has no instruction.md"),
        ("tests/test.sh", "has no tests/test.sh"),
        ("environment/Dockerfile", "names no docker_image and has no environment/Dockerfile; name an image with"),
    ],
)
def test_a_missing_file_is_named(make_task: MakeTask, missing: str, problem: str) -> None:
    folder = make_task()
    (folder / missing).unlink()
    assert problem in problems(folder)[0]


def test_a_folder_without_task_toml_is_a_broken_task_and_others_are_none(make_task: MakeTask, tmp_path: Path) -> None:
    (make_task("broken") / "task.toml").unlink()
    make_task("good")
    for other in (".git", "docs"):
        (tmp_path / "tasks" / other).mkdir()
    with pytest.raises(TasksFileError) as caught:
        read_tasks(tmp_path / "tasks", "shell")
    assert caught.value.problems == [f"{tmp_path}/tasks/broken: has no task.toml"]
    with pytest.raises(TasksFileError, match="holds no tasks"):
        read_tasks(tmp_path / "tasks" / "docs", "shell")


def test_an_instruction_is_utf8_and_not_empty(make_task: MakeTask) -> None:
    folder = make_task(**{"instruction.md": " \n"})
    assert problems(folder) == ["instruction.md is empty"]
    (folder / "instruction.md").write_bytes(b"\xff")
    assert problems(folder) == ["instruction.md is not UTF-8"]


def test_compose_files_are_refused(make_task: MakeTask) -> None:
    folder = make_task(**{"environment/docker-compose.yaml": "services: {}"})
    assert problems(folder) == ["environment/ has a docker-compose file; a sandbox is one container"]


# -- images ------------------------------------------------------------------------------------------------------------


def test_a_dockerfile_without_a_build_becomes_an_image_and_what_is_laid_over_it(make_task: MakeTask) -> None:
    dockerfile = """\
# syntax=docker/dockerfile:1
FROM --platform=linux/amd64 python:3.11-slim AS base
LABEL a=b
WORKDIR /srv
ENV A=1 B="two words" \\
    # a comment in between
    C=3
ENV OLD form of it
WORKDIR app
COPY one.py two.py ./
COPY data /data
COPY ["one.py", "renamed.py"]
CMD ["sleep", "infinity"]
"""
    texts = {f"environment/{name}": name for name in ("one.py", "two.py", "data/x/deep.txt", "unused.txt")}
    found = fields(make_task(dockerfile=dockerfile, **texts))

    assert found["image"] == "python:3.11-slim"
    assert found["env"] == {"A": "1", "B": "two words", "C": "3", "OLD": "form of it"}
    assert found["environment_args"]["workdir"] == "/srv/app"
    assert {name: content for name, (content, _) in packed(found["environment_args"]["files"]).items()} == {
        "srv/app/one.py": b"one.py",
        "srv/app/two.py": b"two.py",
        "srv/app/renamed.py": b"one.py",
        "data/x/deep.txt": b"data/x/deep.txt",
    }


@pytest.mark.parametrize(
    ("dockerfile", "why"),
    [
        ("FROM a\nRUN make", "line 2: RUN changes the image"),
        ("FROM a\nFROM b", "line 2: only one FROM"),
        ("FROM scratch", "line 1: only one FROM, of an image that exists"),
        ("ARG V=1\nFROM a:$V", "line 1: ARG changes the image"),
        ("FROM a\nENV PATH=/x:$PATH", "line 2: ENV uses a variable"),
        ("FROM a\nCOPY --chown=1 x y", "line 2: COPY with an option or a pattern"),
        ("FROM a\nCOPY *.py /", "line 2: COPY with an option or a pattern"),
        ("FROM a\nCOPY x", "line 2: COPY names no target"),
        ("FROM a\nCOPY none.txt /", "COPY none.txt: there is no such file in environment/"),
        ("FROM a\nCOPY ../tests /t", "COPY ../tests: there is no such file in environment/"),
        ("FROM a\nUSER me", "line 2: USER changes the image"),
        ("FROM a\nENTRYPOINT x", "line 2: ENTRYPOINT changes the image"),
        ("FROM a\nENV A='x", "line 2: No closing quotation"),
        ("\n", "it has no FROM"),
    ],
)
def test_a_dockerfile_that_needs_a_build_says_what_to_do(make_task: MakeTask, dockerfile: str, why: str) -> None:
    (problem,) = problems(make_task(dockerfile=dockerfile))
    assert problem.startswith("environment/Dockerfile needs a build (")
    assert why in problem
    assert "build and push the image, and name it in task.toml as docker_image, or with --image" in problem


def test_docker_image_comes_before_the_option_and_that_before_the_dockerfile(make_task: MakeTask) -> None:
    dockerfile = "FROM a AS build\nWORKDIR /build\nFROM b\nRUN make\nWORKDIR /app\nWORKDIR sub\n"
    named = fields(make_task("named", '[environment]\ndocker_image = "own"', dockerfile), image="other")
    given = fields(make_task("given", "", dockerfile), image="other")

    assert named["image"] == "own"
    assert "image" not in given, "the option fills it in, as for any task"
    assert named["environment_args"]["workdir"] == given["environment_args"]["workdir"] == "/app/sub"


def test_the_last_stage_alone_says_the_working_directory() -> None:
    assert last_workdir("FROM a\nWORKDIR /a\nFROM b\n") is None
    assert Recipe.read("from a\nworkdir /b/../c").workdir == "/c"
    with pytest.raises(NeedsBuildError, match="line 2: "):
        Recipe.read("FROM a\nADD x /y")


# -- packing -----------------------------------------------------------------------------------------------------------


def test_a_pack_depends_on_names_contents_and_execute_bits_alone(make_task: MakeTask) -> None:
    folder = make_task(**{"tests/b.txt": "b", "tests/a/c.txt": "c", "tests/a/__pycache__/x.pyc": "x"})
    (folder / "tests/test.sh").chmod(0o755)
    first = fields(folder)["environment_args"]["tests"]
    os.utime(folder / "tests/b.txt", (1, 1))
    (folder / "tests/b.txt").chmod(0o600)

    assert fields(folder)["environment_args"]["tests"] == first
    assert {name: mode for name, (_, mode) in packed(first).items()} == {
        "a/c.txt": 0o644,
        "b.txt": 0o644,
        "test.sh": 0o755,
    }


def test_the_solution_is_packed_for_the_oracle_alone(make_task: MakeTask) -> None:
    folder = make_task(toml="[solution]\nenv = { A = 'b' }", **{"solution/solve.sh": "true"})

    assert "solution" not in fields(folder)["environment_args"]
    arguments = fields(folder, "oracle")["environment_args"]
    assert (list(packed(arguments["solution"])), arguments["solution_env"]) == (["solve.sh"], {"A": "b"})
    (folder / "solution/solve.sh").unlink()
    assert problems(folder, "oracle") == ["has no solution/solve.sh, which the agent 'oracle' runs"]


def test_what_cannot_be_packed_names_the_folder(make_task: MakeTask, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_task(**{"tests/more.txt": "more" * 100})
    with monkeypatch.context() as patch:
        patch.setattr(packing, "FILES_LIMIT", 1)
        assert problems(folder) == [
            "tests/: 2 files are more than 1; put large files into the image, or fetch them in the sandbox"
        ]
    with monkeypatch.context() as patch:
        patch.setattr(packing, "UNPACKED_LIMIT", 100)
        assert "tests/: 417 bytes are more than 100; put large files into the image" in problems(folder)[0]
    (folder / "tests/random.bin").write_bytes(os.urandom(packing.PACK_LIMIT + 1))
    assert "bytes packed are more than 4194304; put large files into the image" in problems(folder)[0]
    (folder / "tests/random.bin").unlink()
    (folder / "tests/link").symlink_to("/etc/passwd")
    assert problems(folder) == ["tests/link is a link or no ordinary file; put a copy there"]


def test_tasks_become_requests_like_lines_of_a_file(make_task: MakeTask) -> None:
    folder = make_task("one").parent
    make_task("two", "[agent]\ntimeout_sec = 5")
    defaults = TaskDefaults(model="m", image="i", timeout=7)
    checked = TasksFile.check(folder, read_tasks(folder, "nop", "i"), defaults, samples=2)
    requests = list(checked.requests("batch", {("one", 0)}))

    assert set(checked.all_samples) == {("one", 0), ("one", 1), ("two", 0), ("two", 1)}
    assert [(r.example_id, r.sample_index, r.deadlines.agent, r.image) for r in requests] == [
        ("one", 1, 7, "i"),
        ("two", 0, 5, "i"),
        ("two", 1, 5, "i"),
    ]
