"""Wrong values are refused, in words that say what to do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from helm.chart import CHART, Helm

#: What is wrong, the values file that it is put over, the values, and what the refusal says.
WRONG: dict[str, tuple[str, dict[str, Any], str]] = {
    "no Redis": ("fixed", {"redis": {"external": {"url": ""}}}, "redis.mode=bundled for a trial"),
    "two Redises": ("fixed", {"redis": {"external": {"existingSecret": "r"}}}, "keep one of them"),
    "a password in the URL": (
        "fixed",
        {"redis": {"external": {"url": "redis://:secret@redis:6379/0"}}},
        "put the URL into a Secret",
    ),
    "a password in the URL's query": (
        "fixed",
        {"redis": {"external": {"url": "redis://redis:6379/0?password=secret"}}},
        "put the URL into a Secret",
    ),
    "a bundled Redis and another one": (
        "trial",
        {"redis": {"external": {"url": "redis://redis:6379/0"}}},
        "set redis.mode=external to use that one",
    ),
    "a key in the model server's URL": (
        "fixed",
        {"gateway": {"upstream": "https://user:key@models.example.com/v1"}},
        "name that in gateway.upstreamSecret",
    ),
    "a name that can be no Service's": ("trial", {"fullnameOverride": "1a"}, "set fullnameOverride"),
    "a variable that the chart makes itself": (
        "fixed",
        {"worker": {"env": [{"name": "ROLLOUTS_CONCURRENCY", "value": "5"}]}},
        "pool default has the variable ROLLOUTS_CONCURRENCY twice",
    ),
    "the platform's key for agents": (
        "fixed",
        {"worker": {"agentSecrets": {"existingSecret": "agents", "names": ["PRIME_API_KEY"]}}},
        "pool default has the variable PRIME_API_KEY twice",
    ),
    "a variable of the gateway twice": (
        "fixed",
        {"gateway": {"env": [{"name": "A", "value": "1"}, {"name": "A", "value": "2"}]}},
        "the gateway has the variable A twice",
    ),
    "no model server": ("fixed", {"gateway": {"upstream": ""}}, "set it to your model server"),
    "an external gateway without URL": ("fixed", {"gateway": {"mode": "external"}}, "set it to the gateway's URL"),
    "a gateway's URL that is not used": ("fixed", {"gateway": {"url": "http://g"}}, "set gateway.mode=external"),
    "grace below drain": (
        "fixed",
        {"worker": {"terminationGracePeriodSeconds": 60}},
        "pool default is 60, and its pods need 390 to drain",
    ),
    "grace below a pool's own drain": (
        "pools",
        {"pools": {"small": {"drainTimeout": 3600}}, "worker": {"terminationGracePeriodSeconds": 600}},
        "pool small is 600, and its pods need 3690 to drain",
    ),
    "a gateway's grace below its drain": (
        "fixed",
        {"gateway": {"terminationGracePeriodSeconds": 20}},
        "the gateway needs 45 to end",
    ),
    "no key for the platform": (
        "fixed",
        {"prime": {"existingSecret": ""}},
        "a Secret with the platform's API key",
    ),
    "sandboxes that could not reach the gateway": (
        "fixed",
        {"tunnels": {"provider": "direct"}},
        "set tunnels.provider=prime, or gateway.mode=external",
    ),
    "Flower without a password": ("fixed", {"flower": {"enabled": True}}, "so it wants a password"),
    "agents' secrets without a Secret": (
        "fixed",
        {"worker": {"agentSecrets": {"names": ["HF_TOKEN"]}}},
        "name the Secret that holds them",
    ),
    "fewer pods at most than at least": (
        "fixed",
        {"worker": {"autoscaling": {"enabled": True, "minReplicas": 5, "maxReplicas": 2}}},
        "less than minReplicas",
    ),
    "no address for KEDA": ("production", {"redis": {"external": {"address": ""}}}, "set it to HOST:PORT"),
    "both fields of a budget": (
        "fixed",
        {"worker": {"podDisruptionBudget": {"minAvailable": 1}}},
        "set the other to null",
    ),
    "a door that anybody can open": (
        "production",
        {"networkPolicy": {"envServerFrom": []}},
        "knows no password: whoever reaches it can run episodes",
    ),
    "a door without policies": (
        "production",
        {"networkPolicy": {"enabled": False}},
        "leave networkPolicy.enabled true",
    ),
    "a door to a queue that no pool serves": (
        "production",
        {"envServers": {"gsm8k": {"queue": "gpu"}}},
        "is of queue gpu, which no pool serves",
    ),
    "a pool's name that is none": ("fixed", {"pools": {"Big_Pool": {}}}, "pools.Big_Pool: its name becomes a part"),
    "a door's name that is too long": ("production", {"envServers": {"d" * 21: {}}}, "letters, digits and dashes"),
    "an environment's name that is none": (
        "fixed",
        {"worker": {"environments": {"a=b": "m:C"}}},
        'environment "a=b" of pool default',
    ),
    "pools of one queue with different environments": (
        "pools",
        {"pools": {"small": {"environments": {"other": "m:C"}}}},
        "serve queue rollouts and offer different environments",
    ),
}

#: What the schema refuses: it names the value.
MISTAKEN: dict[str, tuple[dict[str, Any], str]] = {
    "a typo": ({"worker": {"concurency": 5}}, "concurency"),
    "a typo in a pool": ({"pools": {"a": {"replica": 5}}}, "replica"),
    "a typo at the top": ({"gatway": {}}, "gatway"),
    "a setting that does not exist": ({"settings": {"leese_ttl": 5}}, "leese_ttl"),
    "a setting that the chart makes itself": ({"settings": {"drain_timeout": 5}}, "drain_timeout"),
    "a setting of a wrong type": ({"settings": {"lease_ttl": "often"}}, "lease_ttl"),
    "a setting that is too low": ({"settings": {"lease_ttl": -5}}, "lease_ttl"),
    "a wrong type": ({"worker": {"concurrency": "many"}}, "concurrency"),
    "no concurrency": ({"worker": {"concurrency": 0}}, "concurrency"),
    "no worker at least": ({"worker": {"autoscaling": {"minReplicas": 0}}}, "minReplicas"),
    "an unknown mode": ({"gateway": {"mode": "cloud"}}, "mode"),
    "a queue's name that is none": ({"worker": {"queues": ["GPU pool"]}}, "queues"),
    "a pool without a queue": ({"pools": {"a": {"queues": []}}}, "queues"),
    "a typo in resources": ({"worker": {"resources": {"limits": {"memroy": "2Gi"}}}}, "memroy"),
    "an amount that is none": ({"beat": {"resources": {"limits": {"memory": "lots"}}}}, "memory"),
    "a typo in a source": (
        {"gateway": {"env": [{"name": "A", "valueFrom": {"secretRef": {}}}]}},
        "secretRef",
    ),
    "a variable without a value": ({"worker": {"env": [{"name": "A"}]}}, "value"),
    "a typo in a toleration": ({"worker": {"tolerations": [{"kee": "a"}]}}, "kee"),
    "a typo in an affinity": ({"gateway": {"affinity": {"nodeAffinty": {}}}}, "nodeAffinty"),
    "a typo in a policy": ({"networkPolicy": {"metricsFrom": [{"podSelecter": {}}]}}, "podSelecter"),
    "a spread that is none": ({"worker": {"topologySpreadConstraints": [{"maxSkew": "one"}]}}, "maxSkew"),
    "a budget of more than all": ({"worker": {"podDisruptionBudget": {"maxUnavailable": "150%"}}}, "maxUnavailable"),
    "a hand-over that is cut off": ({"worker": {"handoverTimeout": 30}}, "handoverTimeout"),
    "a typo in a door": ({"envServers": {"a": {"quue": "rollouts"}}}, "quue"),
    "a privileged port": ({"gateway": {"port": 80}}, "port"),
    "an environment that is no class": ({"worker": {"environments": {"math": "my_module"}}}, "environments"),
    "local sandboxes by mistake": ({"sandboxes": {"provider": "local"}}, "allowLocal"),
}


@pytest.mark.parametrize("what", WRONG)
def test_values_that_cannot_work_are_refused(helm4: Helm, what: str) -> None:
    values, over, words = WRONG[what]

    assert words in helm4.refusal(values, over)


@pytest.mark.parametrize("what", MISTAKEN)
def test_mistaken_values_are_refused(helm4: Helm, what: str) -> None:
    over, name = MISTAKEN[what]

    assert name in helm4.refusal("fixed", over)


def test_both_versions_refuse(helm: Helm) -> None:
    assert "redis.mode=bundled" in helm.refusal("fixed", {"redis": {"external": {"url": ""}}})
    assert "concurency" in helm.refusal("fixed", {"worker": {"concurency": 5}})


def test_a_part_that_null_takes_away_is_missed_by_its_name_or_was_not_needed(helm4: Helm) -> None:
    for path in _parts(yaml.safe_load((CHART / "values.yaml").read_text())):
        over: dict[str, Any] | None = None
        for name in reversed(path):
            over = {name: over}

        if words := helm4.complaint("production", over or {}):
            assert "missing" in words, words
            assert f"'{path[-1]}'" in words


def _parts(values: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield (*path, name)
            yield from _parts(value, (*path, name))


def test_dangerous_values_are_refused_without_the_schema_too(helm4: Helm) -> None:
    local = {"sandboxes": {"provider": "local"}}

    assert "isolates nothing" in helm4.refusal("fixed", local, "--skip-schema-validation")
