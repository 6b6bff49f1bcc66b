"""Every values file in ci/ renders under both versions of Helm into what Kubernetes and the operators accept."""

from __future__ import annotations

import json
import re
from functools import cache

import pytest
from helm.binaries import development_module
from helm.chart import CI, Helm, Resource

KUBERNETES = ("1.29", "1.33")
#: Where the models of custom resources are.
OPERATORS = {
    "keda.sh/v1alpha1": "cloudcoil.models.keda.v1alpha1",
    "monitoring.coreos.com/v1": "cloudcoil.models.prometheus_operator.v1",
}

pytestmark = pytest.mark.xdist_group("chart")  # the schemas and models are read once


@pytest.mark.parametrize("values", CI)
def test_it_renders_what_kubernetes_accepts(helm: Helm, values: str) -> None:
    lint = helm.lint(values)
    assert lint.returncode == 0, lint.stdout + lint.stderr

    resources = helm.render(values)

    assert resources
    for resource in resources:
        _accepted(json.dumps(resource))


@cache  # most are the same under both versions of Helm, and in several files
def _accepted(text: str) -> None:
    resource = json.loads(text)
    if resource["apiVersion"] in OPERATORS:
        _accepted_by_operator(resource)
        return
    for version in KUBERNETES:
        development_module("kubernetes_validate").validate(resource, version, strict=True)


def _accepted_by_operator(resource: Resource) -> None:
    models = development_module(OPERATORS[resource["apiVersion"]])
    read = getattr(models, resource["kind"]).model_validate(resource)
    # The models pass over fields that they do not know: those would be missing in what they write.
    assert read.model_dump(mode="json", by_alias=True, exclude_unset=True) == resource


def test_a_field_that_no_operator_knows_is_noticed(helm4: Helm) -> None:
    (scaled,) = [r for r in helm4.render("prime") if r["kind"] == "ScaledObject"]
    scaled["spec"]["advanced"]["scalingModifier"] = {}

    with pytest.raises((AssertionError, ValueError)):
        _accepted_by_operator(scaled)


def test_what_looks_like_a_number_or_a_truth_stays_text_everywhere(helm: Helm) -> None:
    over = {
        "image": {"pullSecrets": ["1"]},
        "redis": {"external": {"existingSecret": "2", "urlKey": "1e3", "passwordKey": "3", "usernameKey": "no"}},
        "gateway": {"persistence": {"storageClass": "4"}, "controlSecret": {"name": "5", "key": "6"}},
        "prime": {"existingSecret": "7", "apiKeyKey": "true", "teamId": "8"},
        "worker": {
            "agentSecrets": {"existingSecret": "9", "names": ["yes", "_1"]},
            "priorityClassName": "10",
            "runtimeClassName": "off",
            "nodeSelector": {"a": "1"},
            "drainTimeout": 1_000_000,
            "terminationGracePeriodSeconds": 2_000_000,
        },
        "networkPolicy": {"kedaNamespace": "11"},
        "flower": {"existingSecret": "12", "basicAuthKey": "13"},
        "admin": {"existingSecret": "14", "tokenKey": "15"},
        "pools": {"1": {}, "1e3": {"queues": ["2"]}},
        "envServers": {"3": {"config": "4", "queue": "2"}},
    }
    bundled = {"redis": {"bundled": {"password": "123", "persistence": {"storageClass": "5"}}}}

    for resource in [*helm.render("production", over), *helm.render("trial", bundled)]:
        _accepted(json.dumps(resource))
        for value in resource.get("stringData", {}).values():
            assert isinstance(value, str)


def test_every_kind_of_installation_is_in_ci() -> None:
    assert set(CI) == {"trial", "production", "prime", "pools", "fixed"}


def test_the_notes_tell_what_will_not_go_as_it_is(helm4: Helm) -> None:
    one = {"podDisruptionBudget": {"minAvailable": 1}}
    over = {"pools": {"a": one, "b": one | {"replicas": 2}, "c": {"podDisruptionBudget": {"maxUnavailable": 0}}}}
    over["worker"] = {"replicas": 1}

    assert re.findall(r"PodDisruptionBudget of pool (\w+) lets none", helm4.notes("fixed", over)) == ["a", "c"]
    assert "can be drained" not in helm4.notes("production")
    assert "settings.verifiers is empty" in helm4.notes("production", {"settings": {"verifiers": ""}})
    assert "settings.verifiers is empty" not in helm4.notes("production")


def test_the_notes_name_commands_of_this_release(helm4: Helm) -> None:
    notes = helm4.notes("pools", release="mine")

    assert "deployment/mine-worker-fixed -- rollouts doctor" in notes
    assert "rollouts status" in notes
    assert "rollouts run" in notes
    assert "no volume" in notes, "what a trial may lose is said"
