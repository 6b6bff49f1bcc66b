"""The chart, rendered by a real Helm, and what its resources hold."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

CHART = Path(__file__).parents[2] / "helm"
#: Values files of the chart, by what they are for.
CI = {path.name.removesuffix("-values.yaml"): path for path in sorted((CHART / "ci").glob("*-values.yaml"))}

Resource = dict[str, Any]


@dataclass(frozen=True)
class Helm:
    """One version of Helm. ``render`` and ``refusal`` take a values file of `CI`, and values over it."""

    path: str

    def lint(self, values: str) -> subprocess.CompletedProcess[str]:
        return self._run("lint", "--strict", str(CHART), "--values", str(CI[values]))

    def render(
        self, values: str, over: dict[str, Any] | None = None, *, release: str = "fleet", namespace: str = "research"
    ) -> list[Resource]:
        done = self._template(values, over, release, namespace)
        assert done.returncode == 0, done.stderr
        return [resource for resource in yaml.load_all(done.stdout, Loader=yaml.CSafeLoader) if resource]

    def refusal(self, values: str, over: dict[str, Any], *options: str) -> str:
        """Return the words with which values are refused."""
        done = self._template(values, over, "fleet", "research", *options)
        assert done.returncode != 0, "these values were taken"
        return done.stderr

    def complaint(self, values: str, over: dict[str, Any]) -> str:
        """Return what is wrong with values; nothing if they are taken."""
        return self._template(values, over, "fleet", "research").stderr

    def notes(self, values: str, over: dict[str, Any] | None = None, *, release: str = "fleet") -> str:
        command = ["install", release, str(CHART), "--values", str(CI[values]), "--values", "-", "--dry-run=client"]
        done = self._run(*command, stdin=json.dumps(over or {}))
        assert done.returncode == 0, done.stderr
        return done.stdout.partition("NOTES:")[2]

    def _template(
        self, values: str, over: dict[str, Any] | None, release: str, namespace: str, *options: str
    ) -> subprocess.CompletedProcess[str]:
        command = ["template", release, str(CHART), "--namespace", namespace, *options]
        return self._run(*command, "--values", str(CI[values]), "--values", "-", stdin=json.dumps(over or {}))

    def _run(self, *arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        return subprocess.run([self.path, *arguments], input=stdin, capture_output=True, text=True, check=False)


def of_kind(resources: list[Resource], kind: str) -> dict[str, Resource]:
    """Return the resources of one kind by name."""
    return {found["metadata"]["name"]: found for found in resources if found["kind"] == kind}


def workloads(resources: list[Resource]) -> dict[str, Resource]:
    """Return what runs pods, by name."""
    return of_kind(resources, "Deployment") | of_kind(resources, "StatefulSet")


def pod(resource: Resource) -> dict[str, Any]:
    """Return the pod's spec of a Deployment or StatefulSet."""
    return resource["spec"]["template"]["spec"]


def container(resource: Resource) -> dict[str, Any]:
    """Return the only container of a Deployment or StatefulSet."""
    (found,) = pod(resource)["containers"]
    return found


def variables(resource: Resource, secrets: dict[str, Resource]) -> dict[str, str]:
    """Return the environment that the container gets; values of Secrets that are not rendered stay out."""
    found = {}
    for entry in container(resource)["env"]:
        if "value" in entry:
            found[entry["name"]] = entry["value"]
            continue
        reference = entry["valueFrom"]["secretKeyRef"]
        if reference["name"] in secrets:
            found[entry["name"]] = secrets[reference["name"]]["stringData"][reference["key"]]
    return found


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every value in a structure with its path."""
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(inner, f"{path}.{key}")
    else:
        yield path, value
