"""What is rendered is safe to run, drains in time, scales on what counts, and keeps to its own release."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from helm.chart import CHART, CI, Helm, Resource, container, of_kind, pod, variables, workloads

from producer import broker
from producer.queues import QUEUE_PATTERN, delayed_key, pending_key, running_key
from workers.gateway.server import GatewaySettings
from workers.pool import AsyncioPool
from workers.settings import WorkerSettings

#: Kubernetes's longest name of a pod's controller that leaves its labels valid.
LONGEST_NAME = 63


@pytest.fixture(scope="module")
def rendered(helm4: Helm) -> dict[str, list[Resource]]:
    """What each values file renders."""
    return {values: helm4.render(values) for values in CI}


@pytest.mark.parametrize("values", CI)
def test_pods_are_confined(rendered: dict[str, list[Resource]], values: str) -> None:
    for resource in workloads(rendered[values]).values():
        spec, main = pod(resource), container(resource)
        assert spec["automountServiceAccountToken"] is False
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        confined = {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert main["securityContext"] == confined
        assert main["resources"]["limits"]["memory"]
    accounts = of_kind(rendered[values], "ServiceAccount").values()
    assert all(account["automountServiceAccountToken"] is False for account in accounts)


@pytest.mark.parametrize("values", CI)
def test_what_a_pod_needs_is_there(rendered: dict[str, list[Resource]], values: str) -> None:
    accounts = of_kind(rendered[values], "ServiceAccount")
    own_secrets = of_kind(rendered[values], "Secret")
    for resource in workloads(rendered[values]).values():
        assert pod(resource)["serviceAccountName"] in accounts
        labels = resource["spec"]["template"]["metadata"]["labels"]
        assert resource["spec"]["selector"]["matchLabels"].items() <= labels.items()
        for entry in container(resource).get("env", []):
            reference = entry.get("valueFrom", {}).get("secretKeyRef", {"name": "", "key": ""})
            if reference["name"].startswith("fleet-") and reference["name"] in own_secrets:
                assert reference["key"] in own_secrets[reference["name"]]["stringData"]
        names = [entry["name"] for entry in container(resource).get("env", [])]
        assert len(names) == len(set(names)), "Kubernetes would silently take the last"


def _known_variables() -> set[str]:
    """Return the variables that worker, beat and gateway read."""
    found = {f"ROLLOUTS_{name.upper()}" for name in WorkerSettings.model_fields}
    return found | {f"ROLLOUTS_GATEWAY_{name.upper()}" for name in GatewaySettings.model_fields}


@pytest.mark.parametrize("values", CI)
def test_every_variable_of_ours_is_one_that_is_read(rendered: dict[str, list[Resource]], values: str) -> None:
    given = {
        entry["name"]
        for resource in workloads(rendered[values]).values()
        for entry in container(resource).get("env", [])
        if entry["name"].startswith("ROLLOUTS_")
    }
    assert given
    assert given <= _known_variables()


def test_the_gateway_keeps_its_journal_on_the_volume_that_is_mounted(helm4: Helm) -> None:
    over = {"gateway": {"persistence": {"enabled": True, "size": "3Gi"}}}
    resources = helm4.render("trial", over)
    gateway = of_kind(resources, "StatefulSet")["fleet-gateway"]

    journal = variables(gateway, of_kind(resources, "Secret"))["ROLLOUTS_GATEWAY_JOURNAL"]
    (mounted,) = [mount for mount in container(gateway)["volumeMounts"] if mount["mountPath"] == journal]
    (claim,) = gateway["spec"]["volumeClaimTemplates"]
    assert mounted["name"] == claim["metadata"]["name"]
    assert claim["spec"]["resources"]["requests"]["storage"] == "3Gi"


@pytest.mark.parametrize("values", CI)
def test_no_secret_is_in_the_open(rendered: dict[str, list[Resource]], values: str) -> None:
    secrets = [v for s in of_kind(rendered[values], "Secret").values() for v in s["stringData"].values()]
    shown = str([resource for resource in rendered[values] if resource["kind"] != "Secret"])

    assert [secret for secret in secrets if secret in shown] == []


@pytest.mark.parametrize("values", CI)
def test_a_workers_grace_is_its_drain_and_hand_over(rendered: dict[str, list[Resource]], values: str) -> None:
    workers = {name: w for name, w in workloads(rendered[values]).items() if "-worker-" in name}

    assert workers
    for worker in workers.values():
        drain = float(variables(worker, {})["ROLLOUTS_DRAIN_TIMEOUT"])
        assert pod(worker)["terminationGracePeriodSeconds"] >= drain + 90


def test_the_least_time_for_handing_over_is_what_a_worker_takes_at_most() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())

    least = schema["definitions"]["pool"]["properties"]["handoverTimeout"]["minimum"]

    assert least >= AsyncioPool.shutdown_grace + AsyncioPool.lifespan_grace


def test_the_gateway_logs_as_workers_do(helm4: Helm) -> None:
    resources = helm4.render("trial", {"settings": {"log_format": "human"}})

    parts = ("fleet-gateway", "fleet-worker-default", "fleet-beat")
    found = {name: variables(workloads(resources)[name], of_kind(resources, "Secret")) for name in parts}
    assert {name: of["ROLLOUTS_LOG_FORMAT"] for name, of in found.items()} == dict.fromkeys(parts, "human")


def test_a_budget_that_null_takes_away_is_none(helm4: Helm) -> None:
    resources = helm4.render("fixed", {"worker": {"podDisruptionBudget": None}})

    assert "fleet-worker-default" not in of_kind(resources, "PodDisruptionBudget")


def test_a_pools_own_values_win_even_when_they_are_false_or_empty(rendered: dict[str, list[Resource]]) -> None:
    found = workloads(rendered["pools"])
    small, large, fixed = (found[f"fleet-worker-{name}"] for name in ("small", "large", "fixed"))

    assert variables(small, {})["ROLLOUTS_CONCURRENCY"] == "50"
    assert variables(large, {})["ROLLOUTS_CONCURRENCY"] == "1000"
    assert pod(small)["nodeSelector"] == {"pool": "spot"}
    assert pod(fixed)["topologySpreadConstraints"] == []
    assert fixed["spec"]["replicas"] == 2
    budget = of_kind(rendered["pools"], "PodDisruptionBudget")["fleet-worker-fixed"]["spec"]
    assert budget["minAvailable"] == 0
    assert "maxUnavailable" not in budget
    assert pod(small)["terminationGracePeriodSeconds"] == 150


def test_numbers_are_written_in_full(helm4: Helm) -> None:
    over = {"settings": {"output_limit": 3_000_000, "lease_ttl": 0.5}}
    worker = workloads(helm4.render("fixed", over))["fleet-worker-default"]

    found = variables(worker, {})

    assert found["ROLLOUTS_OUTPUT_LIMIT"] == "3000000"
    assert found["ROLLOUTS_LEASE_TTL"] == "0.5"


# -- autoscaling -------------------------------------------------------------------------------------------------------


def test_an_autoscaler_owns_the_number_of_pods(rendered: dict[str, list[Resource]]) -> None:
    for values in CI:
        scaled = of_kind(rendered[values], "ScaledObject")
        for name, resource in workloads(rendered[values]).items():
            assert ("replicas" in resource["spec"]) != (name in scaled)


def test_a_pool_scales_on_queued_delayed_and_running_rollouts(rendered: dict[str, list[Resource]]) -> None:
    spec = of_kind(rendered["production"], "ScaledObject")["fleet-worker-default"]["spec"]

    read = {trigger["name"]: trigger["metadata"]["listName"] for trigger in spec["triggers"]}
    assert read == {"queued": broker.PENDING, "delayed": broker.DELAYED, "running": broker.RUNNING}
    assert spec["advanced"]["scalingModifiers"]["formula"] == "(queued + delayed + running) * 1"
    assert spec["advanced"]["scalingModifiers"]["target"] == "400", "80 % of a concurrency of 500"
    down = spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]["scaleDown"]
    assert down["policies"] == [{"type": "Pods", "value": 1, "periodSeconds": 990}]


def test_autoscaled_pools_share_their_queue(helm4: Helm) -> None:
    found = of_kind(helm4.render("pools"), "ScaledObject")

    formulas = {name: scaled["spec"]["advanced"]["scalingModifiers"]["formula"] for name, scaled in found.items()}

    assert formulas == {
        "fleet-worker-small": "(queued + delayed + running) * 0.5 + (queued1 + delayed1 + running1) * 1",
        "fleet-worker-large": "(queued + delayed + running) * 0.5",
        "fleet-worker-gpu": "(queued + delayed + running) * 0.75",
    }


def test_a_pool_scales_on_its_own_queues_only(rendered: dict[str, list[Resource]]) -> None:
    found = of_kind(rendered["pools"], "ScaledObject")

    def keys(pool: str) -> dict[str, str]:
        triggers = found[f"fleet-worker-{pool}"]["spec"]["triggers"]
        return {trigger["name"]: trigger["metadata"]["listName"] for trigger in triggers}

    sets = {"queued": pending_key, "delayed": delayed_key, "running": running_key}
    assert keys("gpu") == {name: key("gpu") for name, key in sets.items()}
    own = {name: key() for name, key in sets.items()}
    assert keys("large") == own
    assert keys("small") == own | {f"{name}1": key("short") for name, key in sets.items()}


def test_a_worker_is_told_its_pools_queues_and_the_schema_knows_what_a_queue_is(
    rendered: dict[str, list[Resource]],
) -> None:
    found = workloads(rendered["pools"])
    served = {pool: variables(found[f"fleet-worker-{pool}"], {})["ROLLOUTS_QUEUES"] for pool in ("small", "gpu")}

    assert served == {"small": "rollouts,short", "gpu": "gpu"}
    schema = json.loads((CHART / "values.schema.json").read_text())
    assert schema["definitions"]["queue"]["pattern"] == QUEUE_PATTERN


def test_it_is_said_when_no_pool_serves_what_names_no_queue(helm4: Helm) -> None:
    assert "No pool serves the queue rollouts" not in helm4.notes("pools")
    assert "each has to name one of gpu, tpu\n" in helm4.notes("fixed", {"worker": {"queues": ["tpu", "gpu"]}})


def test_keda_logs_in_where_the_workers_do(rendered: dict[str, list[Resource]]) -> None:
    def trigger(values: str) -> dict[str, Any]:
        return next(iter(of_kind(rendered[values], "ScaledObject").values()))["spec"]["triggers"][0]

    login = of_kind(rendered["pools"], "TriggerAuthentication")["fleet-redis"]["spec"]["secretTargetRef"]
    assert login == [{"parameter": "password", "name": "fleet-redis", "key": "password"}]
    assert trigger("pools")["metadata"]["address"] == "fleet-redis.research.svc:6379"
    assert trigger("production")["metadata"]["address"] == "redis.data.svc:6379"
    by_url = trigger("prime")["metadata"]
    assert (by_url["address"], by_url["databaseIndex"], by_url["enableTLS"]) == ("redis.data.svc:6380", "2", "true")
    assert "authenticationRef" not in trigger("prime")


# -- releases and networks ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("values", CI)
def test_two_releases_in_one_namespace_do_not_collide(helm4: Helm, values: str) -> None:
    one, two = helm4.render(values, release="one"), helm4.render(values, release="two")

    assert not {_identity(r) for r in one} & {_identity(r) for r in two}
    for mine, others in ((one, two), (two, one)):
        for selector in _selectors(mine):
            for other in workloads(others).values():
                labels = other["spec"]["template"]["metadata"]["labels"]
                assert not selector.items() <= labels.items(), "a selector finds the other release's pods"
    dashboards = re.findall(r'"uid": "(rollouts-[^"]+)"', str(one)), re.findall(r'"uid": "(rollouts-[^"]+)"', str(two))
    assert not set(dashboards[0]) & set(dashboards[1])


def test_long_releases_keep_their_names_apart_and_short(helm4: Helm) -> None:
    prefix = "a-very-long-release-name-of-a-research-group-with-"
    pools = {"pools": {"p" * 20: {}}}
    one, two = (helm4.render("pools", pools, release=prefix + end) for end in ("one", "two"))

    assert not {_identity(r) for r in one} & {_identity(r) for r in two}
    assert max(len(resource["metadata"]["name"]) for resource in one + two) <= LONGEST_NAME


def test_names_that_look_like_numbers_stay_text(helm4: Helm) -> None:
    resources = helm4.render("prime", {"pools": {"1": {}, "on": {}}}, release="12")

    for resource in resources:
        assert all(isinstance(value, str) for value in resource["metadata"]["labels"].values())
    workers = of_kind(resources, "Deployment")
    assert container(workers["12-worker-1"])["args"][:2] == ["--name", "1"]
    assert container(workers["12-worker-on"])["args"][:2] == ["--name", "on"]
    assert variables(workers["12-worker-1"], {})["ROLLOUTS_FLEET"] == "12"


def _identity(resource: Resource) -> tuple[str, str]:
    return resource["kind"], resource["metadata"]["name"]


def _selectors(resources: list[Resource]) -> list[dict[str, str]]:
    found = []
    for resource in resources:
        spec = resource.get("spec", {})
        for selector in (spec.get("selector"), spec.get("podSelector")):
            if selector:
                found.append(selector.get("matchLabels", selector))
    return found


@pytest.mark.parametrize("values", [name for name in CI if name != "fixed"])
def test_every_port_has_a_policy(rendered: dict[str, list[Resource]], values: str) -> None:
    policies = [policy["spec"] for policy in of_kind(rendered[values], "NetworkPolicy").values()]
    for name, resource in workloads(rendered[values]).items():
        labels = resource["spec"]["template"]["metadata"]["labels"]
        mine = [p for p in policies if p["podSelector"]["matchLabels"].items() <= labels.items()]
        assert len(mine) == 1, name
        ports = {port["name"] for port in container(resource).get("ports", [])}
        assert {port["port"] for rule in mine[0]["ingress"] for port in rule["ports"]} <= ports


@pytest.mark.parametrize("values", CI)
def test_every_port_that_tells_something_has_a_key(rendered: dict[str, list[Resource]], values: str) -> None:
    keys = {
        "worker": "ROLLOUTS_ADMIN_TOKEN",
        "gateway": "ROLLOUTS_GATEWAY_CONTROL_KEY",
        "flower": "FLOWER_BASIC_AUTH",
    }
    for name, resource in workloads(rendered[values]).items():
        component = resource["metadata"]["labels"]["app.kubernetes.io/component"]
        if component == "redis":
            secret = of_kind(rendered[values], "Secret")[name]["stringData"]
            assert f"requirepass {secret['password']}\n" in secret["valkey.conf"]
        elif component == "env-server":
            policy = of_kind(rendered[values], "NetworkPolicy")["fleet-env-server"]["spec"]["ingress"]
            assert all(rule["from"] for rule in policy), "it knows no password, so those who may come in are named"
        elif container(resource).get("ports"):
            assert keys[component] in [entry["name"] for entry in container(resource)["env"]]


def test_a_door_leads_to_its_queue_and_lets_in_whom_it_is_told(helm4: Helm) -> None:
    resources = helm4.render("production", {"envServers": {"gsm8k": {"priority": 0, "timeout": 1_000_000 / 2}}})
    found = workloads(resources)
    doors = {name: container(found[f"fleet-env-{name}"]) for name in ("gsm8k", "swe")}

    assert doors["gsm8k"]["args"] == [
        *("--env=gsm8k", "--name=fleet-env-gsm8k", "--address=tcp://0.0.0.0:5000", "--allow-remote"),
        *("--queue=rollouts", "--wire=deltas", "--attempts=3", "--priority=0", "--timeout=500000", "--patience=60"),
    ]
    assert ("--env=swe-easy" in doors["swe"]["args"], doors["swe"]["args"][-1]) == (True, "--live")
    assert doors["gsm8k"]["resources"]["limits"] == {"memory": "2Gi"}
    assert found["fleet-env-swe"]["spec"]["strategy"] == {"type": "Recreate"}, "two of one name would take turns"
    for name in doors:
        service = of_kind(resources, "Service")[f"fleet-env-{name}"]["spec"]
        labels = found[f"fleet-env-{name}"]["spec"]["template"]["metadata"]["labels"]
        assert service["selector"].items() <= labels.items()
        assert labels["rollout-fleet/client"] == "fleet", "it reaches a bundled Valkey"
    assert of_kind(resources, "Service")["fleet-env-swe"]["spec"]["selector"]["rollout-fleet/door"] == "swe"


def test_nobody_is_let_in_without_policies(rendered: dict[str, list[Resource]]) -> None:
    assert of_kind(rendered["fixed"], "NetworkPolicy") == {}, "they are off there"
    gateway = of_kind(rendered["trial"], "NetworkPolicy")["fleet-gateway"]["spec"]["ingress"][0]["from"]
    assert [entry["podSelector"]["matchLabels"]["app.kubernetes.io/component"] for entry in gateway] == ["worker"]
    redis = of_kind(rendered["trial"], "NetworkPolicy")["fleet-redis"]["spec"]["ingress"][0]["from"]
    assert redis == [{"podSelector": {"matchLabels": {"rollout-fleet/client": "fleet"}}}], "KEDA only where it scales"
