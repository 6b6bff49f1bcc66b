"""The structure that the design fixes: who imports whom, how long a module may be, what may stand at the top level."""

from __future__ import annotations

import ast
import gc
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MODULES = sorted([*(ROOT / "producer").rglob("*.py"), *(ROOT / "workers").rglob("*.py")])
MAX_LINES = 400
MAX_BODY = 60

#: Modules of a folder may not import the other folders or modules named here.
FORBIDDEN = {
    "producer": {"workers", "prime_sandboxes", "prime_tunnel", "starlette", "uvicorn", "verifiers"},
    "workers/gateway": {"workers.sandboxes", "workers.tunnels", "workers.fleet", "workers.rollout", "workers.jobs"},
    "workers/sandboxes": {"workers.gateway", "workers.tunnels", "workers.fleet", "workers.rollout", "workers.jobs"},
    "workers/tunnels": {"workers.gateway", "workers.sandboxes", "workers.fleet", "workers.rollout", "workers.jobs"},
    "workers/rollout.py": {"celery", "redis", "httpx", "workers.fleet", "workers.jobs", "workers.pool"},
    "workers/attempt.py": {"celery", "redis", "httpx", "workers.fleet", "workers.jobs", "workers.pool"},
    "workers/pool.py": {"producer", "redis", "workers.fleet", "workers.rollout", "workers.jobs"},
}

#: The flow sees protocols, never a provider.
PROVIDERS = {
    *("workers.gateway.client", "workers.gateway.server", "workers.interception"),
    *("workers.sandboxes.local", "workers.sandboxes.prime"),
    *("workers.tunnels.direct", "workers.tunnels.pool", "workers.tunnels.prime"),
}
MAY_IMPORT_PROVIDERS = {
    *("workers/registry.py", "workers/systems.py", "workers/interception.py"),
    *("workers/cli.py", "workers/local.py", "workers/doctor.py"),
}


@cache
def parsed(path: Path) -> ast.Module:
    """Parse a module, once, and without collections meanwhile.

    CPython 3.11 raises `SystemError` when one runs a finalizer inside of `ast.parse` (its issue 106905).
    """
    gc.disable()
    try:
        return ast.parse(path.read_text())
    finally:
        gc.enable()


def imports(path: Path) -> set[str]:
    """Return the dotted names of everything that a module imports, at its top or inside functions."""
    found: set[str] = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: relative import"
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def offends(name: str, forbidden: set[str]) -> bool:
    return any(name == f or name.startswith(f + ".") for f in forbidden)


@pytest.mark.parametrize("place", FORBIDDEN)
def test_imports_go_one_way(place: str) -> None:
    target = ROOT / place
    paths = [target] if target.is_file() else sorted(target.rglob("*.py"))
    assert paths
    wrong = {str(p.relative_to(ROOT)): [n for n in imports(p) if offends(n, FORBIDDEN[place])] for p in paths}
    assert {k: v for k, v in wrong.items() if v} == {}


def test_only_the_composition_sees_providers() -> None:
    wrong = []
    for path in MODULES:
        name = str(path.relative_to(ROOT))
        if name in MAY_IMPORT_PROVIDERS:
            continue
        for imported in imports(path):
            own = name.replace("/", ".").removesuffix(".py").startswith(tuple(PROVIDERS))
            if offends(imported, PROVIDERS) and not own:
                wrong.append((name, imported))
    assert wrong == []


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_a_module_stays_readable(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) < MAX_LINES
    assert ast.get_docstring(parsed(path)), "a module says what it is for"


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_a_function_is_read_on_one_screen(path: Path) -> None:
    """Its body is counted; the options of a command stand in its signature."""
    functions = [n for n in ast.walk(parsed(path)) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    lines = {function.name: (function.end_lineno or 0) - function.body[0].lineno + 1 for function in functions}
    assert {name: count for name, count in lines.items() if count > MAX_BODY} == {}


def test_nothing_is_pickled() -> None:
    assert [p for p in MODULES if offends_any(imports(p), {"pickle", "dill", "cloudpickle", "marshal"})] == []


def offends_any(names: set[str], forbidden: set[str]) -> bool:
    return any(offends(n, forbidden) for n in names)


def test_the_top_level_is_what_the_design_says() -> None:
    allowed = {
        "pyproject.toml",
        "README.md",
        "Makefile",
        "LICENSE",
        "CHANGELOG.md",
        "producer",
        "workers",
        "helm",
        "tests",
    }
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split(
        "\n"
    )
    top = {line.split("/")[0] for line in tracked if line}
    assert {name for name in top if not name.startswith(".")} <= allowed


def test_the_producer_imports_without_the_sandbox_and_tunnel_sdks() -> None:
    code = (
        "import sys\n"
        "for name in ('prime_sandboxes', 'prime_tunnel', 'workers'): sys.modules[name] = None\n"
        "import producer, producer.client, producer.batch, producer.cli\n"
        "import producer.door.command\n"
        "heavy = {'starlette', 'uvicorn', 'prime_sandboxes.client', 'zmq'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_the_command_line_begins_without_what_its_commands_need() -> None:
    code = (
        "import sys, workers.cli; print(sorted({'pydantic', 'celery', 'redis', 'zmq', 'verifiers'} & set(sys.modules)))"
    )
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True)
    assert found.stdout.strip() == "[]"


@pytest.mark.xdist_group("together")
def test_tests_that_share_a_fleet_run_in_one_process(request: pytest.FixtureRequest) -> None:
    """Where the runner ignores the groups, each of its processes starts fleets of its own: the suite takes long."""
    if request.config.getoption("loadgroup", None):
        assert request.node.nodeid.endswith("@together"), "this pytest ignores xdist_group; see pyproject.toml"
