"""`rollouts doctor`: each thing that a worker needs, when it is there and when it is not."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from emulators.prime import PrimeEmulator
from support import RedisServer, command, free_port

from producer import queues
from workers import doctor
from workers.doctor import State, examine
from workers.interception import InterceptingGateway
from workers.settings import WorkerSettings

pytestmark = pytest.mark.xdist_group("doctor")


@pytest.fixture(scope="module")
def emulator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrimeEmulator]:
    with PrimeEmulator(tmp_path_factory.mktemp("platform")) as emulator:
        yield emulator


@pytest.fixture
def account(emulator: PrimeEmulator, monkeypatch: pytest.MonkeyPatch) -> Iterator[PrimeEmulator]:
    for name in ("PRIME_BASE_URL", "PRIME_TEAM_ID", "PRIME_CONTEXT", "PRIME_USER_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in emulator.environ.items():
        monkeypatch.setenv(name, value)
    yield emulator
    emulator.clear_faults()


@pytest.fixture
def model_server() -> Iterator[HTTPServer]:
    """A model server that lists its models, and knows nothing else."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/v1/models" else 404)
            self.end_headers()
            self.wfile.write(b'{"data": []}')

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture
def gateway(model_server: HTTPServer) -> Iterator[InterceptingGateway]:
    gateway = InterceptingGateway(f"http://127.0.0.1:{model_server.server_port}/v1")
    gateway.start()
    yield gateway
    asyncio.run(gateway.aclose())


def findings(**fields: Any) -> dict[str, tuple[State, str]]:
    found = asyncio.run(examine(WorkerSettings(**fields), environ={}))
    return {finding.check: (finding.state, finding.message) for finding in found}


def test_all_is_well(own_redis: RedisServer, gateway: InterceptingGateway, account: PrimeEmulator) -> None:
    found = findings(
        redis_url=own_redis.url,
        gateway_url=gateway.url,
        gateway_control_key=gateway.control_key,
        sandbox_provider="prime",
        tunnel_provider="prime",
    )
    assert {check: state for check, (state, _) in found.items()} == dict.fromkeys(
        ("redis", "clock", "queues", "settings", "gateway", "upstream", "platform", "frpc"), State.OK
    )
    assert account.api_url in found["platform"][1]
    assert account.api_key not in str(found)
    assert account.leaked() == {"sandboxes": [], "tunnels": [], "processes": []}


@pytest.mark.parametrize(
    ("told", "state", "words"),
    [
        ({"aof_enabled": 1, "aof_last_write_status": "ok"}, State.OK, "keeps rollouts"),
        ({"aof_enabled": 0}, State.WARN, "set appendonly yes"),
        ({"aof_enabled": 1, "aof_last_write_status": "err"}, State.FAIL, "look at the server's disk"),
    ],
)
def test_a_server_that_keeps_what_it_has_or_does_not(
    own_redis: RedisServer, monkeypatch: pytest.MonkeyPatch, told: dict[str, Any], state: State, words: str
) -> None:
    info = doctor._info
    monkeypatch.setattr(doctor, "_info", lambda client, of: told if of == "persistence" else info(client, of))

    found = asyncio.run(examine(WorkerSettings(redis_url=own_redis.url), {}))

    assert [finding.state for finding in found if words in finding.message] == [state]


def test_rollouts_in_a_queue_that_nobody_serves(own_redis: RedisServer) -> None:
    own_redis.client.sadd(queues.QUEUES, "gpu")
    own_redis.client.zadd(queues.pending_key("gpu"), {"r1": 1, "r2": 2})
    state, message = findings(redis_url=own_redis.url)["queues"]
    assert state is State.WARN
    assert message.startswith("2 rollouts wait in queue gpu, which no worker serves; start one with: ROLLOUTS_QUEUES=")


def prime() -> tuple[State, str]:
    return findings(sandbox_provider="prime")["platform"]


def test_no_credentials(account: PrimeEmulator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PRIME_API_KEY")
    state, message = prime()
    assert state is State.FAIL
    assert message.startswith("no API key: set PRIME_API_KEY, or log in")


def test_bad_credentials(account: PrimeEmulator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRIME_API_KEY", "wrong-one")
    state, message = prime()
    assert state is State.FAIL
    assert "refuses the API key from PRIME_API_KEY (401)" in message
    assert "wrong-one" not in message


def test_bad_credentials_in_the_users_file(account: PrimeEmulator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PRIME_API_KEY")
    file = Path(account.home) / ".prime" / "config.json"
    file.write_text(json.dumps({"api_key": "stale"}))
    try:
        state, message = prime()
    finally:
        file.unlink()
    assert state is State.FAIL
    assert f"from {file} (401)" in message


def test_an_account_that_must_pay(account: PrimeEmulator) -> None:
    account.fault("list_sandboxes", status=402)
    assert "wants payment (402): check the account's billing" in prime()[1]


@pytest.mark.parametrize("path", ["", "/elsewhere"])
def test_a_wrong_base_url(account: PrimeEmulator, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    url = f"{account.api_url}{path}" if path else f"http://127.0.0.1:{free_port()}"
    monkeypatch.setenv("PRIME_API_BASE_URL", url)
    state, message = prime()
    assert state is State.FAIL
    assert f"the platform at {url} does not answer as it should" in message
    assert "check PRIME_API_BASE_URL" in message


def test_a_base_url_that_is_none(account: PrimeEmulator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRIME_API_BASE_URL", "platform.example")
    assert "PRIME_API_BASE_URL: 'platform.example' is not an http(s) URL" in prime()[1]


def test_no_frpc(account: PrimeEmulator, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    state, message = findings(tunnel_provider="prime")["frpc"]
    assert state is State.WARN
    assert "the first tunnel downloads it" in message


def test_no_redis(tmp_path: Path) -> None:
    url = f"redis://:secret@127.0.0.1:{free_port()}/0"
    state, message = findings(redis_url=url)["redis"]
    assert state is State.FAIL
    assert "check ROLLOUTS_REDIS_URL" in message
    assert "secret" not in message


@pytest.mark.parametrize(
    ("version", "state"), [("6.0.16", State.FAIL), ("6.2.0", State.OK), ("7.2.4", State.OK), ("10.0", State.OK)]
)
def test_a_redis_that_is_too_old(
    own_redis: RedisServer, monkeypatch: pytest.MonkeyPatch, version: str, state: State
) -> None:
    monkeypatch.setattr(doctor, "_info", lambda client, section: {"redis_version": version})
    found = asyncio.run(examine(WorkerSettings(redis_url=own_redis.url), environ={}))
    (told,) = [finding for finding in found if finding.check == "redis" and "version" in finding.message]
    assert told.state is state
    assert version in told.message
    assert (state is State.OK) == ("use Redis 6.2 or newer, or Valkey" not in told.message)


@pytest.mark.parametrize(("off", "way"), [(900.0, "behind"), (-900.0, "ahead of")])
def test_clocks_that_differ(own_redis: RedisServer, monkeypatch: pytest.MonkeyPatch, off: float, way: str) -> None:
    clock = time.time
    monkeypatch.setattr(doctor.time, "time", lambda: clock() + off)
    state, message = findings(redis_url=own_redis.url)["clock"]
    assert state is State.WARN
    # The answer may take its time on the way; that long it is not known how far they are apart.
    told = re.match(rf"the Redis server's clock is ([\d.]+) s {way} this host's", message)
    assert told
    assert 880 <= float(told[1]) <= 900.1
    assert "set both by NTP" in message


def test_a_gateway_whose_model_server_is_not_there(gateway: InterceptingGateway, model_server: HTTPServer) -> None:
    model_server.shutdown()
    model_server.server_close()
    state, message = findings(gateway_url=gateway.url, gateway_control_key=gateway.control_key)["upstream"]
    assert state is State.FAIL
    assert f"the gateway at {gateway.url} can make no model calls: upstream unavailable" in message
    assert "check ROLLOUTS_GATEWAY_UPSTREAM" in message


def test_a_gateway_of_another_make_does_not_tell(model_server: HTTPServer) -> None:
    found = findings(gateway_url=f"http://127.0.0.1:{model_server.server_port}")
    assert found["gateway"][0] is State.OK
    assert "upstream" not in found


def test_a_gateway_that_is_not_there_or_wants_another_key(gateway: InterceptingGateway) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    assert f"{url} does not answer" in findings(gateway_url=url)["gateway"][1]
    assert "wants a control key (401)" in findings(gateway_url=gateway.url)["gateway"][1]
    wrong = findings(gateway_url=gateway.url, gateway_control_key="wrong")["gateway"][1]
    assert "refuses the control key (401): set ROLLOUTS_GATEWAY_CONTROL_KEY" in wrong


def test_a_model_server_that_is_not_there() -> None:
    found = findings(use_gateway=False, model_url=f"http://127.0.0.1:{free_port()}/v1")
    assert "check ROLLOUTS_MODEL_URL" in found["model"][1]
    assert "gateway" not in found
    assert "set ROLLOUTS_MODEL_URL" in findings(use_gateway=False)["model"][1]
    assert "there is no ROLLOUTS_MODEL_URL" in findings(use_gateway=False)["settings"][1]


def test_environments_and_secrets_that_are_not_there() -> None:
    found = findings(environments="x=no.such:Thing", secret_env="HF_TOKEN")
    assert "cannot import 'no.such'" in found["settings"][1]
    assert findings(secret_env="HF_TOKEN")["secrets"] == (
        State.WARN,
        "HF_TOKEN: in ROLLOUTS_SECRET_ENV, but not set; rollouts that ask for it are refused",
    )


def test_a_setting_whose_name_is_misspelt() -> None:
    environ = {"ROLLOUTS_QUEUE": "gpu", "ROLLOUTS_QUEUES": "gpu", "ROLLOUTS_GATEWAY_UPSTREAM": "http://m", "PATH": "/"}
    found = asyncio.run(examine(WorkerSettings(), environ=environ))
    (told,) = [finding for finding in found if "is no setting" in finding.message]
    assert told.state is State.WARN
    assert told.message == "ROLLOUTS_QUEUE is no setting, and is not read; did you mean ROLLOUTS_QUEUES?"


def test_the_command_ends_with_1_and_says_what_to_do(account: PrimeEmulator) -> None:
    url = f"redis://127.0.0.1:{free_port()}/0"
    ended = command("doctor", ROLLOUTS_REDIS_URL=url, ROLLOUTS_SANDBOX_PROVIDER="prime", PRIME_API_KEY="wrong")
    assert ended.returncode == 1
    assert "fail  redis" in ended.stdout
    assert "fail  platform" in ended.stdout
    as_json = json.loads(command("doctor", "--json", ROLLOUTS_REDIS_URL=url).stdout)
    assert {finding["check"]: finding["state"] for finding in as_json}["redis"] == "fail"


def test_a_worker_whom_the_platform_refuses_takes_no_rollout(account: PrimeEmulator) -> None:
    ended = command("worker", ROLLOUTS_SANDBOX_PROVIDER="prime", PRIME_API_KEY="wrong")
    assert ended.returncode == 2
    assert "refuses the API key from PRIME_API_KEY (401)" in ended.stderr


def test_a_key_with_a_line_break_is_named_and_not_shown(
    account: PrimeEmulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRIME_API_KEY", "half\nother-half")
    state, message = prime()
    assert state is State.FAIL
    assert "the API key from PRIME_API_KEY holds a space or a line break" in message
    assert "half" not in message


def test_a_provider_that_is_not_known() -> None:
    found = findings(sandbox_provider="primee")["settings"]
    assert found == (
        State.FAIL,
        "ROLLOUTS_SANDBOX_PROVIDER: 'primee' is not known; give local, prime, or MODULE:FACTORY",
    )


def test_sandboxes_elsewhere_that_could_never_reach_the_gateway(account: PrimeEmulator) -> None:
    found = findings(sandbox_provider="prime", gateway_url="http://127.0.0.1:1")["settings"]
    assert found[0] is State.FAIL
    assert "cannot reach a gateway on this host's loopback address" in found[1]


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"ROLLOUTS_SANDBOX_PROVIDER": "primee"}, "rollouts: ROLLOUTS_SANDBOX_PROVIDER: 'primee' is not known"),
        ({"ROLLOUTS_USE_GATEWAY": "false"}, "rollouts: ROLLOUTS_USE_GATEWAY is false, and there is no"),
        ({"ROLLOUTS_ENVIRONMENTS": "math=nomod:Math"}, "rollouts: ROLLOUTS_ENVIRONMENTS: cannot import 'nomod'"),
    ],
)
def test_a_worker_with_wrong_settings_ends_with_one_sentence(variables: dict[str, str], words: str) -> None:
    ended = command("worker", **variables)
    assert ended.returncode == 2
    assert ended.stderr.startswith(words)
    assert len(ended.stderr.splitlines()) == 1


def test_beat_needs_nothing_of_what_workers_need() -> None:
    code = "import workers; workers.celery.conf.beat_schedule"
    variables = {"ROLLOUTS_ENVIRONMENTS": "math=nomod:Math"}
    subprocess.run([sys.executable, "-c", code], env=os.environ | variables, check=True, timeout=60)
