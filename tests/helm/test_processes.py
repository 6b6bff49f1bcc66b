"""What the chart renders, run as plain processes with the rendered commands, variables, configuration and probes."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from helm.binaries import promtool
from helm.chart import CHART, Helm, Resource, container, of_kind, variables, workloads
from support import free_port, wait_until

from producer import SyncProducer
from producer.contract import StopCondition
from producer.settings import ProducerSettings
from workers.demo.environment import demo_requests
from workers.local import find_redis_server

ROLLOUTS = 20

pytestmark = pytest.mark.timeout(240)  # four processes start


@dataclass
class Cluster:
    """This host as the one node of a cluster: names of services lead to it, volumes are folders."""

    directory: Path
    resources: list[Resource]
    ports: dict[str, int]
    #: Secrets that are there before the chart.
    secrets: dict[str, Resource] = field(default_factory=dict)
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def here(self, text: str) -> str:
        """Return ``text`` with the cluster's addresses and paths replaced by this host's."""
        text = text.replace("fleet-redis:6379", f"127.0.0.1:{self.ports['redis']}")
        text = text.replace("fleet-gateway:", "127.0.0.1:").replace("0.0.0.0", "127.0.0.1")
        return text.replace("/tmp/", f"{self.directory}/").replace("find /tmp ", f"find {self.directory} ")

    def variables(self, name: str) -> dict[str, str]:
        """Return what the container would find in its environment."""
        rendered = variables(workloads(self.resources)[name], of_kind(self.resources, "Secret") | self.secrets)
        # Of the image: the path, and where it may write.
        image = {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "HOME": str(self.directory),
            "TMPDIR": str(self.directory),
            "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
        }
        return image | {key: self.here(value) for key, value in rendered.items()}

    def start(self, name: str) -> subprocess.Popen[bytes]:
        """Start the container's command."""
        main = container(workloads(self.resources)[name])
        command = [self.here(str(word)) for word in (*main["command"], *main.get("args", []))]
        with (self.directory / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                command, env=self.variables(name), cwd=self.directory, stdout=log, stderr=log, start_new_session=True
            )
        self.processes[name] = process
        return process

    def start_redis(self) -> None:
        """Start the server with the configuration of the bundled one; it is called with a file, as in its pod."""
        (data := self.directory / "data").mkdir()
        text = of_kind(self.resources, "Secret")["fleet-redis"]["stringData"]["valkey.conf"]
        here = f"bind 127.0.0.1\nport {self.ports['redis']}\nloglevel warning\n"
        path = self.directory / "valkey.conf"
        path.write_text(text.replace("dir /data", f'dir "{data}"') + here)
        self.processes["fleet-redis"] = subprocess.Popen([find_redis_server(), str(path)], stdout=subprocess.DEVNULL)

    def passes(self, name: str, probe: str) -> bool:
        """Ask what the kubelet would ask."""
        main = container(workloads(self.resources)[name])
        asked: dict[str, Any] = main[probe]
        if "exec" in asked:
            command = [self.here(word) for word in asked["exec"]["command"]]
            return subprocess.run(command, env=self.variables(name), check=False).returncode == 0
        (port,) = [port["containerPort"] for port in main["ports"] if port["name"] == asked["httpGet"]["port"]]
        try:
            return httpx.get(f"http://127.0.0.1:{port}{asked['httpGet']['path']}").status_code == 200
        except httpx.HTTPError:
            return False

    def await_probe(self, name: str, probe: str) -> None:
        def passes() -> bool:
            assert self.processes[name].poll() is None, self.log(name)
            return self.passes(name, probe)

        wait_until(passes, timeout=60, what=f"the {probe} of {name}")

    def log(self, name: str) -> str:
        return (self.directory / f"{name}.log").read_text()

    def close(self) -> None:
        for process in self.processes.values():
            if process.poll() is None:
                process.kill()
            process.wait()


@pytest.fixture
def cluster(helm4: Helm, tmp_path: Path) -> Iterator[Cluster]:
    ports = {name: free_port() for name in ("redis", "gateway", "admin", "model")}
    over = {
        "gateway": {"port": ports["gateway"], "upstream": f"http://127.0.0.1:{ports['model']}/v1"},
        "admin": {"port": ports["admin"]},
        "worker": {"drainTimeout": 20, "handoverTimeout": 90, "queues": ["rollouts", "short"]},
        "settings": {"lease_ttl": 10},
    }
    with ExitStack() as stack:
        found = Cluster(tmp_path, helm4.render("trial", over), ports)
        stack.callback(found.close)
        yield found


def test_the_rendered_commands_run_a_fleet(cluster: Cluster) -> None:
    model = [sys.executable, "-m", "workers.demo.model", "--port", str(cluster.ports["model"])]
    cluster.processes["model"] = subprocess.Popen(model)
    cluster.start_redis()
    parts = ("fleet-worker-default", "fleet-gateway", "fleet-beat")
    for name in parts:
        cluster.start(name)
    for name in parts:
        cluster.await_probe(name, "livenessProbe")
    for name in parts[:2]:
        cluster.await_probe(name, "startupProbe")
        cluster.await_probe(name, "readinessProbe")

    worker = cluster.variables("fleet-worker-default")
    requests = [
        request.model_copy(update={"queue": ("rollouts", "short")[number % 2]})
        for number, request in enumerate(demo_requests(2, stream=False)[:ROLLOUTS])
    ]
    with SyncProducer(ProducerSettings(redis_url=worker["ROLLOUTS_REDIS_URL"])) as producer:
        results = list(producer.submit_many(requests))

    assert len(results) == ROLLOUTS
    assert {result.stop_condition for result in results} == {StopCondition.COMPLETED}
    assert all(result.trajectory for result in results)
    assert 1.0 in {result.reward for result in results}, "the stand-in for a model gets some of them wrong"
    _metrics_want_the_rendered_token(cluster, worker)
    _the_command_finds_the_worker(worker)
    _all_end_in_time(cluster, parts)
    _every_line_is_json(cluster, parts)


def test_the_rendered_door_opens_and_ends_in_time(helm4: Helm, tmp_path: Path) -> None:
    pytest.importorskip("zmq")
    ports = {name: free_port() for name in ("redis", "gateway", "door")}
    doors = {"networkPolicy": {"envServerFrom": [{"podSelector": {}}]}, "envServer": {"port": ports["door"]}}
    resources = helm4.render("trial", doors | {"envServers": {"math": {}}})
    with closing(Cluster(tmp_path, resources, ports)) as cluster:
        cluster.start_redis()
        door = cluster.start("fleet-env-math")

        def is_open() -> bool:
            assert door.poll() is None, cluster.log("fleet-env-math")
            with socket.socket() as probe:
                return probe.connect_ex(("127.0.0.1", ports["door"])) == 0

        wait_until(is_open, timeout=60, what="the door")
        words = "WARNING no worker is running on"
        wait_until(lambda: words in cluster.log("fleet-env-math"), timeout=30, what=words)
        door.send_signal(signal.SIGTERM)
        assert door.wait(30) == 0, cluster.log("fleet-env-math")


def test_the_rendered_flower_shows_the_fleet_to_who_has_the_password(helm4: Helm, tmp_path: Path) -> None:
    ports = {name: free_port() for name in ("redis", "gateway", "flower", "admin")}
    over = {
        "flower": {"enabled": True, "existingSecret": "flower", "port": ports["flower"]},
        "gateway": {"port": ports["gateway"]},
        "admin": {"port": ports["admin"]},
    }
    secrets = {"flower": {"stringData": {"basic-auth": "somebody:sesame"}}}
    url, auth = f"http://127.0.0.1:{ports['flower']}", ("somebody", "sesame")
    with closing(Cluster(tmp_path, helm4.render("trial", over), ports, secrets)) as cluster:
        cluster.start_redis()
        for name in ("fleet-worker-default", "fleet-flower"):
            cluster.start(name)
        for name in ("fleet-worker-default", "fleet-flower"):
            cluster.await_probe(name, "livenessProbe")

        pages = ("/", "/worker/any", "/tasks", "/api/workers", "/api/tasks")
        assert {httpx.get(url + page, timeout=30).status_code for page in pages} == {401}
        assert {httpx.get(url + page, timeout=30).status_code for page in ("/metrics", "/healthcheck")} == {200}

        def shown() -> set[str]:
            answer = httpx.get(f"{url}/api/workers", params={"refresh": "1"}, auth=auth, timeout=30)
            return {task for worker in answer.raise_for_status().json().values() for task in worker["registered"]}

        wait_until(lambda: "rollouts.run" in shown(), timeout=60, what="the worker in Flower")
        cluster.processes["fleet-flower"].send_signal(signal.SIGTERM)
        assert cluster.processes["fleet-flower"].wait(30) == 0, cluster.log("fleet-flower")
        assert "sesame" not in cluster.log("fleet-flower")


def _metrics_want_the_rendered_token(cluster: Cluster, worker: dict[str, str]) -> None:
    url = f"http://127.0.0.1:{cluster.ports['admin']}/metrics"
    assert httpx.get(url, timeout=30).status_code == 401

    def told() -> httpx.Response:
        return httpx.get(url, headers={"Authorization": f"Bearer {worker['ROLLOUTS_ADMIN_TOKEN']}"}, timeout=30)

    counted = f'rollouts_finished_total{{error="",outcome="completed"}} {ROLLOUTS}.0'
    wait_until(lambda: counted in told().text, what="the last rollout to be counted, whose result is there before")
    metrics = told()
    assert metrics.status_code == 200
    assert all(f'rollouts_serves{{queue="{queue}"}} 1.0' in metrics.text for queue in ("rollouts", "short"))
    gateway = httpx.get(f"http://127.0.0.1:{cluster.ports['gateway']}/metrics", timeout=30)
    for answer in (metrics, gateway):
        command = [promtool(), "check", "metrics"]
        checked = subprocess.run(command, input=answer.content, capture_output=True, check=False)
        assert checked.returncode == 0, checked.stderr.decode()
    _what_is_asked_for_is_told(metrics.text + gateway.text)


def _what_is_asked_for_is_told(told: str) -> None:
    asked = "".join(path.read_text() for path in [CHART / "files/alerts.yaml", *CHART.glob("files/dashboards/*.json")])
    names = set(re.findall(r"\b(rollouts_[a-z_]+)\{", asked))
    missing = {name for name in names if f"{name}{{" not in told and f"{name} " not in told}
    # There is no tunnel here; `# TYPE` is there for the others before anything has happened.
    kept = {name for name in missing if f" {name.removesuffix('_total')}" in told or f" {name} " in told}
    assert {name for name in missing - kept if not name.startswith("rollouts_tunnel_")} == set()


def _the_command_finds_the_worker(worker: dict[str, str]) -> None:
    done = subprocess.run(shlex.split("rollouts probe ready"), env=worker, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "running\n"), done.stderr


def _all_end_in_time(cluster: Cluster, parts: tuple[str, ...]) -> None:
    for name in parts:
        cluster.processes[name].send_signal(signal.SIGTERM)
    for name in parts:
        # uvicorn ends the gateway by the same signal, after its orderly shutdown.
        expected = -signal.SIGTERM if name == "fleet-gateway" else 0
        assert cluster.processes[name].wait(60) == expected, cluster.log(name)


def _every_line_is_json(cluster: Cluster, parts: tuple[str, ...]) -> None:
    for name in parts:
        for line in cluster.log(name).splitlines():
            said = json.loads(line)
            assert {"time", "level", "logger", "message"} <= said.keys(), line
            if "rollout_id" in said:
                assert {"attempt", "worker", "stage"} <= said.keys(), line
    assert "Warm shutdown" in cluster.log("fleet-worker-default"), "what Celery says in a signal's handler is one too"
