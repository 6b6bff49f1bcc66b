"""``rollouts doctor``: looks at everything that a worker needs before it takes its first rollout.

Each finding says what was looked at, what came, and what to do. Nothing is created and nothing is changed.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from enum import StrEnum
from typing import Any
from urllib.parse import urlsplit

import httpx
from redis import Redis, RedisError, ResponseError
from redis.backoff import NoBackoff
from redis.retry import Retry

from producer.connection import FleetConnection
from producer.errors import FleetError
from producer.server import UNKNOWN_POLICY, explained, is_refusal, redact
from producer.settings import ProducerSettings, variables
from producer.status import read_status, told_unserved
from producer.worker_report import count
from workers.access import Access, look
from workers.prime import credentials
from workers.registry import ConfigurationError, check
from workers.settings import WorkerSettings

#: Seconds that each check may take.
LIMIT = 15.0
OLDEST_REDIS = (6, 2)
CLOCK_TOLERANCE = 2.0  #: seconds between two clocks that nobody minds
#: A rollout that no gateway knows: asked for with the control key, the answer tells whether the key is right.
_UNKNOWN = "doctor-asks-for-a-rollout-that-is-not-there"


class State(StrEnum):
    """How a check ended; ``WARN`` lets a worker start."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True)
class Finding:
    """What one check found; ``message`` ends with what to do where there is something to do."""

    check: str
    state: State
    message: str

    def as_dict(self) -> dict[str, str]:
        """Return the finding as plain data."""
        return asdict(self)


async def examine(settings: WorkerSettings, environ: Mapping[str, str] | None = None) -> list[Finding]:
    """Do all checks that these settings call for, at the same time; returns their findings in a fixed order."""
    environ = os.environ if environ is None else environ
    checks: list[Callable[[], Awaitable[list[Finding]]]] = [
        lambda: _redis_and_queues(settings),
        lambda: _settings(settings, environ),
        lambda: _gateway(settings) if settings.use_gateway else _model(settings),
    ]
    if uses_platform(settings):
        checks.append(_platform)
    if settings.tunnel_provider == "prime":
        checks.append(_frpc)
    found = await asyncio.gather(*(_bounded(check()) for check in checks))
    return [finding for findings in found for finding in findings]


def uses_platform(settings: WorkerSettings) -> bool:
    """Whether these settings need an account on the sandbox and tunnel platform."""
    return "prime" in {settings.sandbox_provider, settings.tunnel_provider}


async def platform() -> list[Finding]:
    """Check the credentials and the address of the sandbox and tunnel platform, as the SDKs find them; bounded."""
    return await _bounded(_platform())


async def _platform() -> list[Finding]:
    from prime_sandboxes import APIError, AsyncSandboxClient, PaymentRequiredError, UnauthorizedError

    account = credentials()
    if account.problem:
        return [Finding("platform", State.FAIL, account.problem)]
    where = f"the platform at {account.base_url}"
    client = AsyncSandboxClient()
    try:
        await client.list(per_page=1)
    except UnauthorizedError:
        problem = f"{where} refuses the API key from {account.source} (401): get a new one, and set PRIME_API_KEY"
    except PaymentRequiredError:
        problem = f"{where} wants payment (402): check the account's billing, and PRIME_TEAM_ID if it is a team's"
    except (APIError, ValueError) as error:  # the latter when what came is no answer of the platform
        said = (str(error).splitlines() or [type(error).__name__])[0][:300]
        problem = (
            f"{where} does not answer as it should: {said}; check PRIME_API_BASE_URL and PRIME_BASE_URL, which come "
            "before the address in ~/.prime/config.json"
        )
    else:
        team = f", team {account.team_id}" if account.team_id else ""
        return [Finding("platform", State.OK, f"{where} accepts the API key from {account.source}{team}")]
    finally:
        await client.aclose()
    return [Finding("platform", State.FAIL, problem)]


async def _frpc() -> list[Finding]:
    from prime_tunnel.binary import FRPC_VERSION
    from prime_tunnel.core.config import Config

    try:
        folder = Config().config_dir / "bin"
    except ValueError:  # PRIME_CONTEXT; `platform` says it
        return []
    version = folder / ".frpc_version"
    if (folder / "frpc").exists() and version.exists() and version.read_text().strip() == FRPC_VERSION:
        return [Finding("frpc", State.OK, f"version {FRPC_VERSION} is in {folder}")]
    message = (
        f"version {FRPC_VERSION} is not in {folder}: the first tunnel downloads it, so this host needs a way out; "
        "where it has none, put the binary and .frpc_version there beforehand"
    )
    return [Finding("frpc", State.WARN, message)]


async def _redis_and_queues(settings: WorkerSettings) -> list[Finding]:
    found = await asyncio.to_thread(_redis, settings.redis_url, settings.allow_eviction)
    usable = all(finding.state is not State.FAIL for finding in found)
    return [*found, *await _queues(settings.redis_url)] if usable else found


def _redis(url: str, allow_eviction: bool) -> list[Finding]:
    shown = redact(url)
    try:
        with Redis.from_url(url, socket_timeout=5, socket_connect_timeout=5, retry=Retry(NoBackoff(), 0)) as client:
            access = look(client, url)
            server, persistence = _info(client, "server"), _info(client, "persistence")
            clock = _clock(client)
    except (RedisError, OSError, ValueError) as error:
        message = f"{shown} does not answer: {error}; check ROLLOUTS_REDIS_URL, and that the server runs"
        if is_refusal(error):
            message = explained(error, url)
        return [Finding("redis", State.FAIL, message)]
    found = [_version(shown, server), *clock]
    if access.refusal_problem:
        found.append(Finding("redis", State.FAIL, access.refusal_problem))
    found.append(_eviction(access, allow_eviction))
    return found + _persistence(persistence)


def _persistence(told: Mapping[str, Any]) -> list[Finding]:
    """Look at whether the server survives a restart; nothing where its user may not ask."""
    if not told:
        return []
    if not int(told.get("aof_enabled", 0)):
        message = "appendonly is off: a restart of the server forgets rollouts; set appendonly yes"
        return [Finding("redis", State.WARN, message)]
    if told.get("aof_last_write_status", "ok") != "ok":
        message = "appendonly is on, and the last write to its file failed: look at the server's disk"
        return [Finding("redis", State.FAIL, message)]
    return [Finding("redis", State.OK, "appendonly is on: a restart of the server keeps rollouts")]


def _version(shown: str, server: Mapping[str, Any]) -> Finding:
    """Valkey calls itself a Redis 7.2 as well, for programs that know no other."""
    version, compatible = server.get("valkey_version"), str(server.get("redis_version", ""))
    numbers = [int(part) for part in compatible.split(".")[:2] if part.isdigit()]
    if numbers and tuple(numbers) < OLDEST_REDIS:
        message = f"{shown} is version {compatible}: use Redis {'.'.join(map(str, OLDEST_REDIS))} or newer, or Valkey"
        return Finding("redis", State.FAIL, message)
    return Finding("redis", State.OK, f"{shown} answers, version {version or compatible or '(not told)'}")


def _clock(client: Redis) -> list[Finding]:
    """Compare the server's clock with this host's; how long the answer took is no difference."""
    try:
        before = time.time()
        seconds, micros = client.time()
        after = time.time()
    except ResponseError:  # forbidden to this user, which `look` has said
        return []
    told = int(seconds) + int(micros) / 1e6
    off = told - min(max(told, before), after)
    if abs(off) <= CLOCK_TOLERANCE:
        return [
            Finding("clock", State.OK, f"this host's and the Redis server's differ by less than {CLOCK_TOLERANCE:g} s")
        ]
    message = (
        f"the Redis server's clock is {abs(off):.1f} s {'ahead of' if off > 0 else 'behind'} this host's: leases go by "
        "the server's and hold, but times in results, logs and traces do not fit together; set both by NTP"
    )
    return [Finding("clock", State.WARN, message)]


def _eviction(access: Access, allowed: bool) -> Finding:
    if access.policy is None:
        return Finding("redis", State.WARN, UNKNOWN_POLICY)
    if access.eviction_problem:
        return Finding("redis", State.WARN if allowed else State.FAIL, access.eviction_problem)
    return Finding(
        "redis", State.OK, f"maxmemory-policy is {access.policy}: a full server refuses, and forgets nothing"
    )


async def _queues(url: str) -> list[Finding]:
    """Look for rollouts that wait where nobody takes them."""
    # Other checks import what takes seconds, on this loop: an answer that came meanwhile looks like none.
    connection = FleetConnection(url, patience=5)
    try:
        status = await read_status(connection)
    except (FleetError, ResponseError):  # `_redis` says it
        return []
    finally:
        await connection.close()
    found = [Finding("queues", State.WARN, told_unserved(name, n)) for name, n in status.unserved.items()]
    served = ", ".join(f"{name} by {count(n, 'worker')}" for name, n in sorted(status.served.items()))
    return found or [Finding("queues", State.OK, f"served: {served or 'none, and nothing waits'}")]


def _info(client: Redis, section: str) -> dict[str, Any]:
    try:
        return dict(client.info(section))
    except ResponseError:  # forbidden to this user
        return {}


async def _settings(settings: WorkerSettings, environ: Mapping[str, str]) -> list[Finding]:
    try:
        names = check(settings).names()
    except ConfigurationError as error:
        return [Finding("settings", State.FAIL, str(error))]
    providers = f"{settings.sandbox_provider} sandboxes, {settings.tunnel_provider} tunnels"
    found = [Finding("settings", State.OK, f"{providers}; environments {', '.join(names)}")]
    host = urlsplit(settings.gateway_url).hostname or ""
    reached_directly = settings.tunnel_provider == "direct" and settings.sandbox_provider == "prime"
    if reached_directly and (not settings.use_gateway or host in {"localhost", "127.0.0.1", "::1"}):
        message = (
            "sandboxes elsewhere cannot reach a gateway on this host's loopback address: set "
            "ROLLOUTS_TUNNEL_PROVIDER=prime, or give the gateway an address that they can reach"
        )
        found.append(Finding("settings", State.FAIL, message))
    found += [Finding("settings", State.WARN, said) for said in _misspelt(environ)]
    missing = [name for name in settings.secret_env if name not in environ]
    if missing:
        message = f"{', '.join(missing)}: in ROLLOUTS_SECRET_ENV, but not set; rollouts that ask for it are refused"
        found.append(Finding("secrets", State.WARN, message))
    return found


def _misspelt(environ: Mapping[str, str]) -> Iterator[str]:
    """Tell of variables that nobody reads: a worker would go on without what they were meant to say."""
    from workers.gateway.server import GatewaySettings

    readers = (WorkerSettings, ProducerSettings, GatewaySettings)
    known = {variable for model in readers for name in model.model_fields for variable in variables(model, name)}
    for name in sorted(environ):
        if name.startswith("ROLLOUTS_") and name not in known:
            close = get_close_matches(name, known, n=1)
            yield f"{name} is no setting, and is not read" + (f"; did you mean {close[0]}?" if close else "")


async def _gateway(settings: WorkerSettings) -> list[Finding]:
    key = settings.gateway_control_key
    headers = {"Authorization": f"Bearer {key.get_secret_value()}"} if key and key.get_secret_value() else {}
    url = settings.gateway_url
    status = await _status(f"{url}/v1/rollouts/{_UNKNOWN}/trajectory", headers)
    match status:
        case str():
            unset = "" if "gateway_url" in settings.model_fields_set else ", which is not set in this shell"
            state, message = State.FAIL, f"{url} does not answer: {status}; check ROLLOUTS_GATEWAY_URL{unset}"
        case 404:
            state, message = State.OK, f"{url} answers" + ("" if headers else ", without a control key")
        case 401 | 403:
            what = "refuses the control key" if headers else "wants a control key"
            message = f"{url} {what} ({status}): set ROLLOUTS_GATEWAY_CONTROL_KEY to the one that the gateway has"
            state = State.FAIL
        case 503:
            state, message = State.FAIL, f"{url} is switched off (503): turn the gateway on at its server"
        case _:
            message = f"{url} answers {status} where a rollout gateway answers 404; check ROLLOUTS_GATEWAY_URL"
            state = State.FAIL
    found = [Finding("gateway", state, message)]
    return [*found, *await _upstream(url)] if state is State.OK else found


async def _upstream(gateway_url: str) -> list[Finding]:
    """Ask the gateway whether its model servers answer; one that is not ours may not tell."""
    try:
        async with httpx.AsyncClient(timeout=LIMIT / 2) as client:
            answer = await client.get(f"{gateway_url}/readyz")
            said = answer.json() if answer.status_code in {200, 503} else None
    except (httpx.HTTPError, ValueError):
        said = None
    if not isinstance(said, dict) or "status" not in said:
        return []
    if answer.status_code == 200:
        return [Finding("upstream", State.OK, "the gateway reaches its model servers")]
    message = (
        f"the gateway at {gateway_url} can make no model calls: {said['status']}: {str(said.get('detail'))[:300]}; "
        "check ROLLOUTS_GATEWAY_UPSTREAM there, and that the model server runs"
    )
    return [Finding("upstream", State.FAIL, message)]


async def _model(settings: WorkerSettings) -> list[Finding]:
    url = settings.model_url
    if not url:
        message = (
            "ROLLOUTS_USE_GATEWAY is false: set ROLLOUTS_MODEL_URL to the model server, such as http://host:8000/v1"
        )
        return [Finding("model", State.FAIL, message)]
    key = settings.model_api_key
    headers = {"Authorization": f"Bearer {key.get_secret_value()}"} if key else {}
    status = await _status(f"{url.rstrip('/').removesuffix('/v1')}/v1/models", headers)
    if isinstance(status, str):
        return [Finding("model", State.FAIL, f"{url} does not answer: {status}; check ROLLOUTS_MODEL_URL")]
    if status in {401, 403}:
        message = f"{url} refuses the key ({status}): set ROLLOUTS_MODEL_API_KEY to the one that it wants"
        return [Finding("model", State.FAIL, message)]
    if status != 200:
        message = f"{url} answers {status} to /v1/models; check ROLLOUTS_MODEL_URL if it is no server that has no list"
        return [Finding("model", State.WARN, message)]
    return [Finding("model", State.OK, f"{url} answers")]


async def _status(url: str, headers: dict[str, str]) -> int | str:
    """Return the status of a GET, or in words why there is none."""
    try:
        async with httpx.AsyncClient(timeout=LIMIT / 2) as client:
            return (await client.get(url, headers=headers)).status_code
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        return str(error) or type(error).__name__


async def _bounded(check: Awaitable[list[Finding]]) -> list[Finding]:
    try:
        async with asyncio.timeout(LIMIT):
            return await check
    except TimeoutError:
        return [Finding("doctor", State.FAIL, f"a check did not end within {LIMIT:.0f} s: something hangs")]
