"""Looks whether the fleet's Redis lets a worker in, lets it do all that it must, and forgets nothing when it is full.

A worker that found out later would go on reconnecting for ever, or lose rollouts on the day on which Redis is full.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import redis

from producer import broker
from producer.server import (
    POLICY_COMMANDS,
    UNKNOWN_POLICY,
    eviction_problem,
    explained,
    is_refusal,
    policy_in,
    redact,
    warn_once,
)
from workers.registry import ConfigurationError

#: Names a rollout, a queue and a channel that nobody uses.
_NOBODY = "doctor-nobody"


@dataclass(frozen=True)
class Access:
    """What was found at ``url``: the policy, None if not told, and the refused commands with the first refusal."""

    url: str
    policy: str | None
    refused: tuple[str, ...] = ()
    refusal: Exception | None = None

    @property
    def refusal_problem(self) -> str | None:
        """What this user may not do, and the rule that it needs; None when it may do everything."""
        if self.refusal is None:
            return None
        return f"{explained(self.refusal, self.url)}. Refused were {', '.join(self.refused)}"

    @property
    def eviction_problem(self) -> str | None:
        """What is wrong with the policy, and what to do; None when nothing is, or it is not known."""
        return eviction_problem(self.policy)


def look(client: redis.Redis, url: str) -> Access:
    """Try all kinds of commands on all kinds of keys; none changes anything. Raises `redis.RedisError`.

    A wrong password is raised as `redis.AuthenticationError`.
    """
    client.ping()
    refused = _refused_commands(client, _database(client)) | _refused_subscriptions(client, _database(client))
    return Access(url, _policy(client), tuple(refused), next(iter(refused.values()), None))


def require(client: redis.Redis, url: str, *, allow_eviction: bool) -> None:
    """Raise `ConfigurationError` when a worker cannot use this Redis; warn, once, when its policy is not known.

    Raises `redis.ConnectionError` or `redis.TimeoutError` when it is away: that passes.
    """
    try:
        found = look(client, url)
    except redis.RedisError as error:
        if is_refusal(error):
            raise ConfigurationError(explained(error, url)) from None
        raise
    if found.refusal_problem:
        raise ConfigurationError(found.refusal_problem)
    if allow_eviction:
        return
    if found.policy is None:
        warn_once(UNKNOWN_POLICY)
    if found.eviction_problem:
        raise ConfigurationError(f"Redis at {redact(url)} cannot be used: {found.eviction_problem}")


def _policy(client: Any) -> str | None:
    for command in POLICY_COMMANDS:
        with suppress(redis.ResponseError):  # forbidden, or unknown to this server
            if policy := policy_in(client.execute_command(*command)):
                return policy
    return None


def _refused_commands(client: redis.Redis, database: int) -> dict[str, Exception]:
    """Return the refused ones of commands that do nothing where they are allowed, by what they are."""
    probes: tuple[tuple[Any, ...], ...] = (
        ("TIME",),
        ("INFO", "server"),
        ("HDEL", broker.job_key(_NOBODY), "field"),
        ("ZREM", broker.PENDING, _NOBODY),
        ("XLEN", broker.stream_key(_NOBODY)),
        ("PERSIST", broker.queue_key(3)),
        ("DEL", broker.result_key(_NOBODY)),
        ("DEL", f"_kombu.binding.{_NOBODY}"),
        ("DEL", f"{_NOBODY}.celery.pidbox"),
        ("DEL", f"bcast.{_NOBODY}"),
        ("DISCARD",),  # an error that is no refusal, where it is allowed
        ("PUBLISH", broker.result_key(_NOBODY), ""),
        ("PUBLISH", f"/{database}.{_NOBODY}", ""),
        ("SCRIPT LOAD", "return redis.call('TTL', KEYS[1])"),
        ("SCRIPT EXISTS", "0" * 40),
        ("EVAL", "return redis.call('TTL', KEYS[1])", 1, broker.job_key(_NOBODY)),
    )
    pipe: Any = client.pipeline(transaction=False)
    for probe in probes:
        pipe.execute_command(*probe)
    answers = pipe.execute(raise_on_error=False)
    return {
        " ".join(map(str, probe[:2])) if probe[0] not in {"SCRIPT LOAD", "SCRIPT EXISTS", "EVAL"} else probe[0]: answer
        for probe, answer in zip(probes, answers, strict=True)
        if isinstance(answer, Exception) and is_refusal(answer)
    }


def _refused_subscriptions(client: Any, database: int) -> dict[str, Exception]:
    refused: dict[str, Exception] = {}
    for channel in ("celery.pidbox", f"{broker.HEALTH_QUEUE}/{broker.QUEUE}"):
        pattern = f"/{database}.{channel}"
        try:
            with client.pubsub() as pubsub:
                pubsub.psubscribe(pattern)
                pubsub.get_message(timeout=5)
        except redis.ResponseError as error:
            if not is_refusal(error):
                raise
            refused[f"PSUBSCRIBE {pattern}"] = error
    return refused


def _database(client: redis.Redis) -> int:
    return int(client.connection_pool.connection_kwargs.get("db") or 0)
