"""The alert rules fire when they should, and rules and dashboards ask for metrics that exist."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
import yaml
from helm.binaries import promtool
from helm.chart import CHART, Helm, Resource, container, of_kind, workloads

UNIT_TESTS = Path(__file__).with_name("alerts_test.yaml")
METRIC = re.compile(r"\brollouts_[a-z_]+")
WORKERS = CHART.parent / "workers"


@pytest.fixture(scope="module")
def rendered(helm4: Helm) -> list[Resource]:
    return helm4.render("production")


@pytest.fixture
def rules(rendered: list[Resource], tmp_path: Path) -> Path:
    """The rules as Prometheus's operator hands them over."""
    path = tmp_path / "alerts.yaml"
    path.write_text(yaml.safe_dump(of_kind(rendered, "PrometheusRule")["fleet"]["spec"]))
    return path


def _promtool(*arguments: str, cwd: Path) -> str:
    done = subprocess.run([promtool(), *arguments], cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_alert_rules_are_sound(rules: Path) -> None:
    found = _promtool("check", "rules", "--lint-fatal", rules.name, cwd=rules.parent)

    assert "SUCCESS" in found


def test_the_alerts_fire_when_they_should(rules: Path) -> None:
    (rules.parent / "test.yaml").write_text(UNIT_TESTS.read_text())

    assert "SUCCESS" in _promtool("test", "rules", "test.yaml", cwd=rules.parent)


def test_every_alert_has_a_unit_test_in_which_it_fires_and_one_in_which_it_does_not(rules: Path) -> None:
    alerts = {rule["alert"] for group in yaml.safe_load(rules.read_text())["groups"] for rule in group["rules"]}
    cases = [c for test in yaml.safe_load(UNIT_TESTS.read_text())["tests"] for c in test["alert_rule_test"]]

    assert {c["alertname"] for c in cases if c.get("exp_alerts")} == alerts
    assert {c["alertname"] for c in cases if not c.get("exp_alerts")} == alerts


def test_every_alert_says_what_to_do(rules: Path) -> None:
    for group in yaml.safe_load(rules.read_text())["groups"]:
        for rule in group["rules"]:
            assert rule["labels"]["severity"] in {"warning", "critical"}
            assert "fleet" in rule["annotations"]["summary"] or "{{ $labels.pod }}" in rule["annotations"]["summary"]
            assert len(rule["annotations"]["description"]) > 60


def test_dashboards_are_what_grafana_reads(rendered: list[Resource]) -> None:
    boards = of_kind(rendered, "ConfigMap")["fleet-dashboards"]["data"]

    assert set(boards) == {"fleet-fleet.json", "fleet-systems.json", "fleet-gateway.json"}
    for text in boards.values():
        board = json.loads(text)
        assert len(board["uid"]) <= 40
        assert "__" not in board["title"] + board["uid"]
        ids = [panel["id"] for panel in board["panels"]]
        assert len(ids) == len(set(ids))
        places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in board["panels"]]
        assert len(places) == len(set(places)), "two panels lie over each other"
        for panel in board["panels"]:
            assert all('namespace="$namespace", fleet="$fleet"' in target["expr"] for target in panel["targets"])


def test_the_questions_of_the_dashboards_are_promql(rendered: list[Resource], tmp_path: Path) -> None:
    boards = of_kind(rendered, "ConfigMap")["fleet-dashboards"]["data"].values()
    panels = [panel for text in boards for panel in json.loads(text)["panels"]]
    asked = [target["expr"].replace("$__rate_interval", "5m") for panel in panels for target in panel["targets"]]
    rules = [{"record": f"panel:{number}", "expr": expr} for number, expr in enumerate(asked)]
    (tmp_path / "panels.yaml").write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))

    assert f"{len(asked)} rules found" in _promtool("check", "rules", "panels.yaml", cwd=tmp_path)


def test_the_scrape_sets_what_rules_and_dashboards_select_by(rendered: list[Resource]) -> None:
    monitors = of_kind(rendered, "PodMonitor")
    ends = {name: monitor["spec"]["podMetricsEndpoints"] for name, monitor in monitors.items()}

    assert set(ends) == {"fleet-worker", "fleet-gateway"}
    for name, (endpoint,) in ends.items():
        assert {"targetLabel": "fleet", "replacement": "fleet"} in endpoint["relabelings"]
        selected = monitors[name]["spec"]["selector"]["matchLabels"].items()
        (pods,) = [w for w in workloads(rendered).values() if selected <= _labels(w).items()]
        assert endpoint["port"] in [port["name"] for port in container(pods)["ports"]]
        policies = [p["spec"] for p in of_kind(rendered, "NetworkPolicy").values()]
        (policy,) = [p for p in policies if p["podSelector"]["matchLabels"].items() <= _labels(pods).items()]
        sources = [
            f for rule in policy["ingress"] if rule["ports"][0]["port"] == endpoint["port"] for f in rule["from"]
        ]
        assert {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}} in sources
    assert ends["fleet-worker"][0]["authorization"]["credentials"] == {"name": "admin", "key": "admin-token"}
    expressions = str(of_kind(rendered, "PrometheusRule")["fleet"]["spec"])
    assert expressions.count('namespace="research", fleet="fleet"') == len(METRIC.findall(_only_expressions(rendered)))


def _labels(resource: Resource) -> dict[str, str]:
    labels: dict[str, str] = resource["spec"]["template"]["metadata"]["labels"]
    return labels


def _only_expressions(rendered: list[Resource]) -> str:
    groups = of_kind(rendered, "PrometheusRule")["fleet"]["spec"]["groups"]
    return "\n".join(rule["expr"] for group in groups for rule in group["rules"])


def test_rules_and_dashboards_ask_for_metrics_that_workers_export(rendered: list[Resource]) -> None:
    boards = "".join(of_kind(rendered, "ConfigMap")["fleet-dashboards"]["data"].values())
    asked = set(METRIC.findall(_only_expressions(rendered) + boards))
    families = {re.sub(r"_(total|bucket)$", "", name) for name in asked}
    sources = "".join(path.read_text() for path in WORKERS.rglob("*.py"))
    exported = set(re.findall(r'"(rollouts_[a-z_]+)"', sources))

    assert families - exported == set()
