"""What the benchmarks share: a fleet with null sandboxes, and one JSON line of numbers."""

from __future__ import annotations

import json
import operator
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from producer import RolloutRequest
from workers.local import LocalStack, StackOptions

HERE = Path(__file__).parent


def null_requests(count: int, command: str = "end") -> list[RolloutRequest]:
    """Requests whose agent ends at once (``end``) or when the benchmark says so (``wait``)."""
    return [RolloutRequest(model="null", run_command=command, example_id=n) for n in range(count)]


@contextmanager
def null_fleet(concurrency: int, workers: int = 1, **settings: str) -> Iterator[LocalStack]:
    """A fleet on this machine whose sandboxes are null ones; everything else is real."""
    options = StackOptions(
        workers=workers,
        concurrency=concurrency,
        settings={
            "ROLLOUTS_SANDBOX_PROVIDER": "null_provider:null_sandboxes",
            "PYTHONPATH": str(HERE),
            **settings,
        },
    )
    with LocalStack(options) as stack:
        yield stack


def python_of(venv: Path, requirements: Path, what: str) -> Path:
    """Return the Python of a virtual environment in which another system is installed, made if it is missing."""
    python, made = venv / "bin" / "python", venv / ".made"
    if not made.exists() or made.read_text() != requirements.read_text():
        print(f"installing {what} into {venv} ...", file=sys.stderr)
        shutil.rmtree(venv, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
        install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*install, "--requirement", str(requirements)], check=True, stdout=sys.stderr)
        made.write_text(requirements.read_text())
    return python


def default_venv(name: str) -> Path:
    """Return where such an environment is kept from one run to the next."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "rollout-fleet" / name


#: What has been missed of what was required.
_missed: list[str] = []


def report(benchmark: str, required: Mapping[str, tuple[str, float]] | None = None, **numbers: Any) -> None:
    """Print one JSON line.

    ``required`` has the bound of a number by its name (with a dot for one in a dictionary), such as ``("<=", 100)``;
    the line says which are missed, and `finish` then fails.
    """
    bounds = required or {}
    missed = [name for name, bound in bounds.items() if not _holds(_at(numbers, name), *bound)]
    _missed.extend(f"{benchmark}.{name} is {_at(numbers, name)}" for name in missed)
    judged = {"required": {name: f"{how} {bound:g}" for name, (how, bound) in bounds.items()}, "missed": missed}
    machine = {"cores": os.cpu_count(), "python": platform.python_version()}
    rounded = {k: round(v, 3) if isinstance(v, float) else v for k, v in numbers.items()}
    print(json.dumps({"benchmark": benchmark, **rounded, **(judged if bounds else {}), **machine}), flush=True)


def finish() -> None:
    """End the benchmark, with status 1 when one of its reports missed what was required."""
    if _missed:
        sys.exit("missed what was required: " + "; ".join(_missed))


def _at(numbers: Mapping[str, Any], name: str) -> Any:
    head, _, rest = name.partition(".")
    return _at(numbers[head], rest) if rest else numbers[head]


def _holds(value: float, how: str, bound: float) -> bool:
    return {"<=": operator.le, ">=": operator.ge, "==": operator.eq}[how](value, bound)
