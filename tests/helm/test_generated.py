"""The chart's README and schema say what values.yaml and the worker's settings say."""

from __future__ import annotations

import json

import pytest
import yaml
from helm.chart import CHART, leaves
from helm.generate import MADE, OWN, documented

from workers.settings import WorkerSettings


@pytest.mark.parametrize("name", MADE)
def test_what_is_made_is_up_to_date(name: str) -> None:
    text = (CHART / name).read_text()
    assert MADE[name](text) == text, "run: PYTHONPATH=tests python tests/helm/generate.py"


def test_every_value_is_documented() -> None:
    known = [value.path for value in documented()]
    values = yaml.safe_load((CHART / "values.yaml").read_text())

    paths = [path.removeprefix(".") for path, _ in leaves(values)]

    assert [path for path in paths if not any(path == k or path.startswith(k + ".") for k in known)] == []


def test_the_schema_has_a_default_for_each_value_that_it_knows() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())

    assert list(_without_default(schema, values, schema["definitions"])) == []


def _without_default(schema: dict, values: object, definitions: dict, path: str = "") -> list[str]:
    (schema,) = schema.get("allOf", [schema])
    schema = definitions[schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema
    if not isinstance(values, dict) or schema.get("additionalProperties") is not False:
        return []
    free = {
        "definitions",
        "global",
        *("requests", "limits", "claims", "minAvailable", "maxUnavailable"),
        *("nodeAffinity", "podAffinity", "podAntiAffinity"),
    }
    missing = [f"{path}.{name}" for name in schema.get("properties", {}) if name not in values and name not in free]
    for name, inner in schema.get("properties", {}).items():
        if name == "settings":  # their defaults are the worker's
            continue
        missing += _without_default(inner, values.get(name), definitions, f"{path}.{name}")
    return missing


def test_what_the_chart_sets_itself_are_settings_of_the_worker() -> None:
    assert OWN - set(WorkerSettings.model_fields) == set()
