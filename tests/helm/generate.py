"""Writes what of the chart is made from elsewhere; run it after a change of values.yaml or of the worker's settings:

    PYTHONPATH=tests python tests/helm/generate.py

The tables in helm/README.md come from the comments in values.yaml and from `workers.settings.WorkerSettings`, whose
names and types are also those that values.schema.json allows under ``settings``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import yaml
from helm.chart import CHART
from marked import table, with_part

from workers.settings import WorkerSettings

#: Settings that the chart makes from other values, or that mean nothing in a pod.
OWN = {
    *("redis_url", "fleet", "queues", "concurrency", "drain_timeout", "environments", "secret_env"),
    *("gateway_url", "gateway_control_key", "use_gateway", "model_url", "model_api_key"),
    *("sandbox_provider", "tunnel_provider", "admin_host", "admin_port", "admin_token"),
}

_KEY = re.compile(r"^(?P<indent> *)(?P<key>[A-Za-z]+):")
_COMMENT = re.compile(r"^ *# (?P<first>-- )?(?P<text>.*)$")


@dataclass(frozen=True)
class Value:
    """A documented value: its path with dots, what it is for, its default."""

    path: str
    meaning: str
    default: Any


def documented() -> list[Value]:
    """Return the values that have a ``# --`` comment, in their order."""
    text = (CHART / "values.yaml").read_text()
    defaults = yaml.safe_load(text)
    return [Value(path, meaning, _at(defaults, path)) for path, meaning in _comments(text.splitlines())]


def _comments(lines: list[str]) -> Iterator[tuple[str, str]]:
    path: list[str] = []
    meaning: list[str] = []
    for line in lines:
        if comment := _COMMENT.match(line):
            if comment["first"]:
                meaning = [comment["text"]]
            elif meaning:
                meaning.append(comment["text"])
        elif key := _KEY.match(line):
            path = [*path[: len(key["indent"]) // 2], key["key"]]
            if meaning:
                yield ".".join(path), " ".join(meaning)
            meaning = []
        else:
            meaning = []


def _at(values: dict[str, Any], path: str) -> Any:
    for key in path.split("."):
        values = values[key]
    return values


def setting_names() -> list[str]:
    """Return the settings that may stand under ``settings``."""
    return sorted(set(WorkerSettings.model_fields) - OWN)


def readme(text: str) -> str:
    """Return the README with its tables made anew."""
    values = [(f"`{v.path}`", f"`{json.dumps(v.default)}`", v.meaning) for v in documented()]
    text = with_part(text, "values", table(["value", "default", "meaning"], values))
    fields = WorkerSettings.model_fields
    settings = [(f"`{name}`", fields[name].description or "") for name in setting_names()]
    return with_part(text, "settings", table(["setting", "meaning"], settings))


def schema(text: str) -> str:
    """Return the schema with the names and types of today's settings."""
    found = json.loads(text)
    read = WorkerSettings.model_json_schema()
    found["properties"]["settings"]["properties"] = {
        name: _setting_type(read["properties"][name], read["$defs"]) for name in setting_names()
    }
    return json.dumps(found, indent=2) + "\n"


def _setting_type(field: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    """Return what a value may be, of what a variable is read as."""
    if "$ref" in field:
        field = definitions[field["$ref"].rpartition("/")[2]]
    first = next(iter(field.get("anyOf", [field])))  # the other one is null, which is left out
    if first["type"] == "array":
        return {"type": "string"}  # by commas
    return {key: first[key] for key in ("type", "enum", "minimum", "exclusiveMinimum", "maximum") if key in first}


#: What is made, by its name in the chart.
MADE = {"README.md": readme, "values.schema.json": schema}


if __name__ == "__main__":
    for name, make in MADE.items():
        (CHART / name).write_text(make((CHART / name).read_text()))
