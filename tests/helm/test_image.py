"""The image's steps, without a container engine: in a virtual environment, as its user, from a read-only source."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import stat
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pytest
from helm.binaries import unavailable
from helm.chart import CHART

ROOT = CHART.parent
USER = 65532

pytestmark = [pytest.mark.xdist_group("chart-image"), pytest.mark.timeout(240)]  # it makes an environment


@dataclass
class Stage:
    """One stage of a Dockerfile: its instructions in order, arguments filled in."""

    base: str
    name: str
    steps: list[tuple[str, str]] = field(default_factory=list)

    def of(self, instruction: str) -> list[str]:
        return [argument for name, argument in self.steps if name == instruction]


def stages() -> list[Stage]:
    """Read the Dockerfile."""
    text = re.sub(r"\\\n\s*", "", (CHART / "Dockerfile").read_text())
    found: list[Stage] = []
    arguments: dict[str, str] = {}
    for line in text.splitlines():
        name, _, argument = line.partition(" ")
        if not line.strip() or line.startswith("#"):
            continue
        if name == "ARG":
            key, _, default = argument.partition("=")
            arguments[key] = default
            continue
        argument = re.sub(r"\$\{(\w+)\}", lambda match: arguments[match[1]], argument)
        if name == "FROM":
            base, _, alias = argument.partition(" AS ")
            found.append(Stage(base, alias))
        else:
            found[-1].steps.append((name, argument))
    return found


def test_it_is_small_and_runs_as_somebody_without_rights() -> None:
    build, final = stages()

    assert final.base == build.base, "a virtual environment fits the Python it was made with"
    assert final.base.endswith("-slim")
    assert final.of("USER") == [f"{USER}:{USER}"]
    assert final.of("RUN") == [], "compilers, caches and the source stay in the stage that builds"
    assert final.of("COPY") == ["--from=build /opt/rollouts /opt/rollouts"]
    environment = dict(word.split("=", 1) for line in final.of("ENV") for word in shlex.split(line))
    assert environment["PATH"].startswith("/opt/rollouts/bin:")
    assert environment["PYTHONDONTWRITEBYTECODE"] == "1", "the root file system may be read-only"


def test_signals_reach_the_fleets_own_process() -> None:
    _, final = stages()

    assert final.of("ENTRYPOINT") == ['["rollouts"]'], "in exec form: a shell would swallow SIGTERM"
    assert final.of("CMD") == ['["--help"]']


def test_only_what_the_build_copies_is_sent_to_it() -> None:
    ignored = (CHART / "Dockerfile.dockerignore").read_text().split()
    copied = {source for line in stages()[0].of("COPY") for source in line.split()[:-1]}

    assert ignored[0] == "*"
    assert {line.removeprefix("!") for line in ignored if line.startswith("!")} == copied
    assert [source for source in copied if not (ROOT / source).exists()] == []


@dataclass(frozen=True)
class Built:
    """Where the steps of the build have put things, and who runs them."""

    source: Path
    environment: Path
    home: Path

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command in the image's environment, as its user."""
        variables = {
            "PATH": f"{self.environment / 'bin'}:{os.environ['PATH']}",
            "HOME": str(self.home),
            "TMPDIR": str(self.home),
            "PYTHONDONTWRITEBYTECODE": "1",
            "PIP_NO_COMPILE": "1",  # what is run once need not be compiled
        }
        passed_on = ("PIP_", "SSL_", "REQUESTS_", "http", "HTTP")
        variables |= {name: value for name, value in os.environ.items() if name.startswith(passed_on)}
        done = subprocess.run(
            [*_demotion(), *command], cwd=self.source, env=variables, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done


@cache
def _demotion() -> tuple[str, ...]:
    """Return the command that takes root's rights away from another one; nothing for who has none."""
    if os.getuid() != 0:
        return ()
    if not shutil.which("setpriv"):
        unavailable("no setpriv, with which root becomes the image's user")
    user = ("setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups")
    needed = (os.path.realpath(sys.executable), sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"))
    reached = " && ".join(f"test -r {shlex.quote(path)}" for path in needed)
    if subprocess.run([*user, "sh", "-c", reached], check=False).returncode == 0:
        return user
    # Python is in root's own home: without any capability, root may no more than what permissions say.
    return "setpriv", "--bounding-set=-all", "--inh-caps=-all"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Built]:
    """Do the steps of the stage that builds."""
    other = any(word.startswith("--reuid") for word in _demotion())
    base = tmp_path_factory.mktemp("image")
    for folder in (base, *base.parents):  # pytest keeps them to itself; the image's user has to come through
        if folder.stat().st_uid == os.getuid() and not folder.stat().st_mode & stat.S_IXOTH:
            folder.chmod(folder.stat().st_mode | stat.S_IXOTH)
    found = Built(base / "src", base / "opt", base / "home")
    for folder in (found.source, found.environment, found.home):
        folder.mkdir()
        if other and folder != found.source:
            os.chown(folder, USER, USER)
    (build, _) = stages()
    for step, argument in build.steps:
        if step == "COPY":
            *sources, target = argument.split()
            for source in sources:
                _copy(ROOT / source, found.source / (target if target != "./" else source))
        elif step == "RUN":
            command = argument.replace("/opt/rollouts", str(found.environment))
            _set_writable(found.source, writable=False)
            first, *rest = shlex.split(command)
            found.run(sys.executable if first == "python" else first, *rest)
            _lend_dependencies(found.environment)
    yield found
    _set_writable(found.source, writable=True)


def _copy(source: Path, target: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
    else:
        shutil.copyfile(source, target)


def _set_writable(folder: Path, *, writable: bool) -> None:
    for path in (folder, *folder.rglob("*")):
        path.chmod((0o755 if writable else 0o555) if path.is_dir() else (0o644 if writable else 0o444))


def _lend_dependencies(environment: Path) -> None:
    """Let the new environment find the packages of this one, so that pip need not fetch all of them again."""
    (packages,) = (environment / "lib").glob("python*/site-packages")
    (packages / "lent.pth").write_text(sysconfig.get_path("purelib") + "\n")


def test_its_steps_work_for_its_user_with_a_read_only_source(built: Built) -> None:
    where = "import producer, workers; print(producer.__file__, workers.__file__)"
    loaded = built.run(str(built.environment / "bin/python"), "-I", "-c", where).stdout.split()

    assert [Path(path).is_relative_to(built.environment) for path in loaded] == [True, True], loaded
    assert "worker" in built.run("rollouts", "--help").stdout


@pytest.mark.parametrize("script", ["producer/lua/submit.lua", "workers/lua/claim.lua"])
def test_what_is_no_python_is_in_it_too(built: Built, script: str) -> None:
    (packages,) = (built.environment / "lib").glob("python*/site-packages")

    assert (packages / script).read_text() == (ROOT / script).read_text()
