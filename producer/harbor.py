"""Reads folders in Harbor's task format and packs what a worker needs of them into requests.

The format is that of https://www.harborframework.com/docs/tasks (repository laude-institute/harbor), schema versions
1.0 to 1.4, single-step tasks whose verifier shares the agent's sandbox: ``task.toml``, ``instruction.md``,
``environment/``, ``tests/test.sh``, and ``solution/solve.sh`` for checking. Older spellings (``version``, ``memory``,
``storage``) are read; unknown keys are ignored, as Harbor does; what is known and cannot be done is refused.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from producer.agents import AGENTS, ORACLE
from producer.contract import Seconds
from producer.dockerfile import NeedsBuildError, Recipe, last_workdir
from producer.packing import PackingError, pack, walk
from producer.tasks_file import Task, TasksFileError

#: The name of the environment that runs such tasks.
ENVIRONMENT = "harbor"

INSTRUCTION_LIMIT = 1024**2
#: Seconds that scoring may take besides the verifier itself: to upload the tests, and to start.
SCORE_MARGIN = 120.0
WEEK = 7 * 24 * 3600.0

#: What an agent is told by its rollout: a task that set them would send it past the gateway.
_OWN_VARIABLES = {"OPENAI_API_KEY", "OPENAI_BASE_URL", "OPENAI_MODEL"}

_TEMPLATE = re.compile(r"\$\{(\w+)(?:(:-)([^}]*))?\}")
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT])(?:i?B)?\s*", re.IGNORECASE)
_MEGABYTES = {"K": 1 / 1024, "M": 1.0, "G": 1024.0, "T": 1024.0**2}

Variables = dict[Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")], str]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class TaskFolderError(Exception):
    """A folder is no task that can be run here; the message is one sentence without the folder's name."""


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", protected_namespaces=())


class _Verifier(_Section):
    timeout_sec: Seconds = 600.0
    env: Variables = Field(default_factory=dict)
    user: str | int | None = None
    environment_mode: str = "shared"
    environment: dict[str, Any] | None = None


class _Agent(_Section):
    timeout_sec: Seconds | None = None
    user: str | int | None = None


class _Environment(_Section):
    docker_image: str | None = None
    cpus: Positive | None = None
    memory_mb: Positive | None = None
    memory: str | None = None
    storage_mb: Positive | None = None
    storage: str | None = None
    gpus: Annotated[int, Field(ge=0)] = 0
    gpu_types: list[str] | None = None
    allow_internet: bool = True
    network_mode: str | None = None
    env: Variables = Field(default_factory=dict)
    workdir: Annotated[str, Field(pattern=r"^/[^\x00]*$")] | None = None
    os: str = "linux"
    mcp_servers: list[Any] = Field(default_factory=list)
    skills_dir: str | None = None
    healthcheck: dict[str, Any] | None = None
    tpu: dict[str, Any] | None = None


class _Solution(_Section):
    env: Variables = Field(default_factory=dict)


class TaskConfig(_Section):
    """A ``task.toml``; sizes are megabytes, times seconds."""

    schema_version: str | float = "1.0"
    version: str | float | None = None
    task: dict[str, Any] = Field(default_factory=dict)
    metadata: dict[str, Any] = Field(default_factory=dict)
    verifier: _Verifier = Field(default_factory=_Verifier)
    agent: _Agent = Field(default_factory=_Agent)
    environment: _Environment = Field(default_factory=_Environment)
    solution: _Solution = Field(default_factory=_Solution)
    steps: list[Any] = Field(default_factory=list)

    @classmethod
    def read(cls, path: Path) -> TaskConfig:
        """Read ``path``; raises `TaskFolderError` naming each wrong field, or what cannot be done here."""
        try:
            config = cls.model_validate(tomllib.loads(_text(path)))
        except tomllib.TOMLDecodeError as error:
            raise TaskFolderError(f"task.toml is not TOML: {error}") from None
        except ValidationError as error:
            wrong = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors(include_url=False)]
            raise TaskFolderError(f"task.toml: {'; '.join(wrong)}") from None
        if unsupported := config._unsupported():
            raise TaskFolderError(f"task.toml: {', '.join(unsupported)} cannot be had here")
        return config

    def _unsupported(self) -> list[str]:
        environment, verifier = self.environment, self.verifier
        version = str(self.version or self.schema_version)
        found = {
            f"schema version {version}": version.partition(".")[0] != "1",
            "[[steps]] (a task of several steps)": bool(self.steps),
            "a separate verifier environment": verifier.environment_mode != "shared" or bool(verifier.environment),
            "agent.user other than root": self.agent.user not in {None, "root", 0},
            "verifier.user other than root": verifier.user not in {None, "root", 0},
            f"environment.os {environment.os!r}": environment.os.lower() != "linux",
            "environment.mcp_servers": bool(environment.mcp_servers),
            "environment.skills_dir": bool(environment.skills_dir),
            "environment.healthcheck": bool(environment.healthcheck),
            "environment.tpu": bool(environment.tpu),
        }
        return [what for what, is_asked in found.items() if is_asked]

    def resources(self) -> dict[str, float | str]:
        """Return the contract's ``resources``, without what the task leaves open; of ``gpu_types`` it is the first."""
        environment = self.environment
        memory = _size("memory", environment.memory) or environment.memory_mb
        storage = _size("storage", environment.storage) or environment.storage_mb
        found: dict[str, float | str | None] = {
            "cpu_cores": environment.cpus,
            "memory_gb": memory and memory / 1024,
            "disk_gb": storage and storage / 1024,
            "gpu_count": environment.gpus or None,
            "gpu_type": self._gpu_type() if environment.gpus else None,
        }
        return {name: value for name, value in found.items() if value is not None}

    def _gpu_type(self) -> str:
        if not self.environment.gpu_types:
            raise TaskFolderError("task.toml: environment.gpus asks for GPUs of any type; name one in gpu_types")
        return self.environment.gpu_types[0]

    def warnings(self) -> list[str]:
        """Return what the task asks for and no sandbox is told."""
        environment = self.environment
        isolated = not environment.allow_internet or environment.network_mode not in {None, "public"}
        return ["the task allows no free internet access; sandboxes do not enforce that"] if isolated else []


@dataclass(frozen=True)
class HarborTask:
    """One task folder, read and checked."""

    folder: Path
    config: TaskConfig
    instruction: str

    @classmethod
    def read(cls, folder: Path) -> HarborTask:
        """Read a task's folder; raises `TaskFolderError`."""
        if not (folder / "task.toml").is_file():
            raise TaskFolderError("has no task.toml")
        config = TaskConfig.read(folder / "task.toml")
        instruction = _text(folder / "instruction.md")
        if not instruction.strip():
            raise TaskFolderError("instruction.md is empty")
        if len(instruction.encode()) > INSTRUCTION_LIMIT:
            raise TaskFolderError(f"instruction.md is larger than {INSTRUCTION_LIMIT} bytes")
        if not (folder / "tests" / "test.sh").is_file():
            raise TaskFolderError("has no tests/test.sh")
        return cls(folder, config, instruction)

    def request(self, agent: str, image: str | None) -> dict[str, Any]:
        """Return the fields of its request; raises `TaskFolderError`.

        ``image`` is for tasks that name none, and is then left for the caller to fill in.
        """
        config = self.config
        recipe, workdir = self._recipe(image)
        variables, secrets = _resolved("environment.env", config.environment.env, may_be_secret=True)
        arguments: dict[str, Any] = {
            "agent": agent,
            "tests": pack("tests/", walk(self.folder / "tests")),
            "verifier": {"timeout": config.verifier.timeout_sec, "env": _plain("verifier.env", config.verifier.env)},
            "workdir": config.environment.workdir or workdir,
            "warnings": config.warnings(),
        }
        if recipe and (files := self._copied(recipe)):
            arguments["files"] = pack("environment/", files)
        if agent == ORACLE:
            arguments |= self._solution()
        timeout = config.agent.timeout_sec
        score = min(config.verifier.timeout_sec + SCORE_MARGIN, WEEK)
        chosen = config.environment.docker_image or (recipe.image if recipe else None)
        return {
            "example_id": self.folder.name,
            "environment": ENVIRONMENT,
            "environment_args": arguments,
            "prompt": self.instruction,
            "info": config.metadata | ({"task_name": config.task["name"]} if "name" in config.task else {}),
            "resources": config.resources(),
            "env": (recipe.env if recipe else {}) | variables,
            "secret_env": secrets,
            "deadlines": {"score": score} | ({"agent": timeout} if timeout else {}),
        } | ({"image": chosen} if chosen else {})

    def _recipe(self, image: str | None) -> tuple[Recipe | None, str | None]:
        """Return the Dockerfile as the image to use, if there is no other, and the working directory that it names."""
        context = self.folder / "environment"
        file = context / "Dockerfile"
        if any((context / f"docker-compose.{ending}").exists() for ending in ("yaml", "yml")):
            raise TaskFolderError("environment/ has a docker-compose file; a sandbox is one container")
        text = _text(file) if file.is_file() else None
        if self.config.environment.docker_image or image:
            return None, last_workdir(text) if text else None
        if text is None:
            raise TaskFolderError("names no docker_image and has no environment/Dockerfile; name an image with --image")
        try:
            recipe = Recipe.read(text)
        except NeedsBuildError as error:
            raise TaskFolderError(_build_it(str(error))) from None
        return recipe, recipe.workdir

    def _copied(self, recipe: Recipe) -> dict[str, Path]:
        context = self.folder / "environment"
        if recipe.copies and (context / ".dockerignore").exists():
            raise TaskFolderError(_build_it("a .dockerignore says what COPY leaves out"))
        found: dict[str, Path] = {}
        try:
            for copy in recipe.copies:
                found |= copy.files(context)
        except NeedsBuildError as error:
            raise TaskFolderError(_build_it(str(error))) from None
        return {name.lstrip("/"): path for name, path in sorted(found.items())}

    def _solution(self) -> dict[str, Any]:
        folder = self.folder / "solution"
        if not (folder / "solve.sh").is_file():
            raise TaskFolderError(f"has no solution/solve.sh, which the agent {ORACLE!r} runs")
        return {
            "solution": pack("solution/", walk(folder)),
            "solution_env": _plain("solution.env", self.config.solution.env),
        }


def read_tasks(root: Path, agent: str, image: str | None = None) -> list[Task]:
    """Return a request's fields for each task below ``root``, or for ``root`` if it is a task itself.

    Raises `TasksFileError` with one sentence for every folder that cannot be run, or when ``agent`` is not known.
    """
    if agent not in AGENTS:
        raise TasksFileError([f"--agent {agent!r} is not known; there are {', '.join(AGENTS)}"])
    tasks, problems = [], []
    for number, folder in enumerate(task_folders(root), start=1):
        try:
            fields = HarborTask.read(folder).request(agent, image)
            tasks.append(Task(number, str(folder), orjson.dumps(fields)))
        except (TaskFolderError, PackingError, orjson.JSONEncodeError) as error:
            problems.append(f"{folder}: {error}")
    if problems:
        raise TasksFileError(problems)
    return tasks


def task_folders(root: Path) -> list[Path]:
    """Return ``root`` if it is a task, else its subfolders that are meant to be; raises `TasksFileError` for none."""
    root = root.resolve()
    if not root.is_dir():
        raise TasksFileError([f"{root}: is no folder; give a task's folder, or one that holds such folders"])
    if (root / "task.toml").exists():
        return [root]
    marks = ("task.toml", "instruction.md", "tests")
    folders = [p for p in sorted(root.iterdir()) if p.is_dir() and not p.name.startswith(".")]
    found = [folder for folder in folders if any((folder / mark).exists() for mark in marks)]
    if not found:
        raise TasksFileError([f"{root}: holds no tasks; each is a folder with a task.toml"])
    return found


def _build_it(why: str) -> str:
    return (
        f"environment/Dockerfile needs a build ({why}); build and push the image, and name it in task.toml as "
        "docker_image, or with --image"
    )


def _plain(section: str, env: Mapping[str, str]) -> dict[str, str]:
    return _resolved(section, env, may_be_secret=False)[0]


def _resolved(section: str, env: Mapping[str, str], *, may_be_secret: bool) -> tuple[dict[str, str], list[str]]:
    """Split variables into values and the names of the worker's own variables, which Harbor takes from the host.

    A value does not enter Redis, so ``${NAME:-default}`` is its default here. Raises `TaskFolderError`.
    """
    values, secrets = {}, []
    if own := sorted(_OWN_VARIABLES & set(env)):
        raise TaskFolderError(f"{section}: {', '.join(own)} say where the rollout's own model is; leave them out")
    for name, value in env.items():
        template = _TEMPLATE.fullmatch(value)
        if template is None or template[2]:
            values[name] = template[3] if template else value
        elif may_be_secret and template[1] == name:
            secrets.append(name)
        elif may_be_secret:
            raise TaskFolderError(f"{section}: {name} takes another variable of the host; only {name} itself is passed")
        else:
            raise TaskFolderError(
                f"{section}: {name} takes a variable of the host, which only the agent's own environment can be given; "
                "write a value or a default"
            )
    return values, secrets


def _size(name: str, text: str | None) -> float | None:
    if text is None:
        return None
    found = _SIZE.fullmatch(text)
    if found is None:
        raise TaskFolderError(f"task.toml: environment.{name}: {text!r} is not a size such as '2G' or '512M'")
    return float(found[1]) * _MEGABYTES[found[2].upper()]


def _text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8")
    except FileNotFoundError:
        raise TaskFolderError(f"has no {path.name}") from None
    except OSError as error:
        raise TaskFolderError(f"{path.name} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise TaskFolderError(f"{path.name} is not UTF-8") from None
