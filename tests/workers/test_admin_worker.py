"""A whole worker's probes: live while its event loop moves, ready while it takes rollouts."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from fleets import lean
from support import free_port, wait_until
from typer.testing import CliRunner

from producer import RolloutRequest, SyncProducer
from producer.settings import ProducerSettings
from workers.cli import app as worker_app
from workers.environment import Environment
from workers.local import LocalStack, StackOptions
from workers.state import Rollout

HERE = Path(__file__).parent


class Blocking(Environment):
    """Its hook blocks the event loop until there is a file, once."""

    async def score(self, rollout: Rollout) -> float:
        go_on = Path(rollout.request.info["go_on"])
        while rollout.attempt == 1 and not go_on.exists():
            time.sleep(0.01)
        return 1.0


class Probes:
    """Asks a worker's admin port as a kubelet does."""

    def __init__(self) -> None:
        self.port = free_port()

    def answer(self, path: str) -> tuple[int, str]:
        found = httpx.get(f"http://127.0.0.1:{self.port}{path}", timeout=20)
        return found.status_code, found.text.strip()

    def await_ready(self, *answer: object) -> None:
        wait_until(lambda: self.answer("/readyz") == answer, timeout=60, what=f"{answer} from /readyz")

    def await_live(self, status: int) -> None:
        wait_until(lambda: self.answer("/livez")[0] == status, timeout=60, what=f"{status} from /livez")


@contextmanager
def one_worker(probes: Probes, logs: Path, **settings: str) -> Iterator[LocalStack]:
    variables = {
        "ROLLOUTS_LEASE_TTL": "1",
        "ROLLOUTS_ADMIN_PORT": str(probes.port),
        "ROLLOUTS_ENVIRONMENTS": "blocking=test_admin_worker:Blocking",
        "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", "")]),
    }
    with LocalStack(StackOptions(settings=variables | settings, log_dir=logs, **lean())) as stack:
        yield stack


def operate(stack: LocalStack, *arguments: str) -> Any:
    return json.loads(CliRunner().invoke(worker_app, [*arguments, "--redis-url", stack.redis_url, "--json"]).stdout)


def request(**fields: Any) -> RolloutRequest:
    return RolloutRequest.parse({"model": "stand-in", "run_command": "true"} | fields)


def test_probes_tell_of_a_loop_that_hangs_and_of_a_drain(tmp_path: Path) -> None:
    probes, go_on, started, end = Probes(), *(tmp_path / name for name in ("go-on", "started", "end"))
    waits = f"touch {started}; while [ ! -e {end} ]; do sleep 0.05; done"
    with (
        one_worker(probes, tmp_path, ROLLOUTS_LOOP_HANG_LIMIT="1.5") as stack,
        SyncProducer(ProducerSettings(redis_url=stack.redis_url)) as producer,
    ):
        probes.await_ready(200, "running")
        probes.await_live(200)
        blocked = producer.submit(request(environment="blocking", info={"go_on": str(go_on)}))
        probes.await_live(503)
        probes.await_ready(503, "hung")
        go_on.touch()
        assert blocked.result(timeout=60).reward == 1.0
        probes.await_live(200)
        probes.await_ready(200, "running")

        last = producer.submit(request(run_command=waits))
        wait_until(started.exists, timeout=60, what="the agent")
        (worker,) = operate(stack, "status")["workers"]
        assert operate(stack, "drain", worker["name"].partition("@")[0]) == {"worker": worker["name"], "draining": True}
        probes.await_ready(503, "draining")
        probes.await_live(200)  # a drain is no reason to kill it
        end.touch()
        assert last.result(timeout=60).agent_exit_code == 0


def test_a_worker_whose_breaker_is_open_is_not_ready_but_lives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    probes = Probes()
    broken = {
        "ROLLOUTS_GATEWAY_URL": f"http://127.0.0.1:{free_port()}",
        "ROLLOUTS_BREAKER_FAILURES": "1",
        "ROLLOUTS_BREAKER_PAUSE": "600",
        "ROLLOUTS_BREAKER_LONGEST_PAUSE": "600",
    }
    with (
        one_worker(probes, tmp_path, **broken) as stack,
        SyncProducer(ProducerSettings(redis_url=stack.redis_url)) as producer,
    ):
        producer.submit(request(deadlines={"register": 2}))
        probes.await_ready(503, "paused: gateway fails")
        probes.await_live(200)

        monkeypatch.setenv("ROLLOUTS_ADMIN_PORT", str(probes.port))
        ready, live = (CliRunner().invoke(worker_app, ["probe", what]) for what in ("ready", "live"))
        assert (ready.exit_code, ready.stdout) == (1, "paused: gateway fails\n")
        assert live.exit_code == 0


def test_a_worker_serves_no_metrics_to_everybody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLOUTS_ADMIN_HOST", "0.0.0.0")
    monkeypatch.setenv("ROLLOUTS_ADMIN_PORT", str(free_port()))

    ended = CliRunner().invoke(worker_app, ["worker"])

    assert ended.exit_code == 2
    assert "set ROLLOUTS_ADMIN_TOKEN" in ended.output


def test_a_probe_without_a_port_says_what_is_missing() -> None:
    ended = CliRunner().invoke(worker_app, ["probe", "live"])

    assert ended.exit_code == 2
    assert "ROLLOUTS_ADMIN_PORT is not set" in ended.output
