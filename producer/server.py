"""What the fleet wants of its Redis server: that it lets us in, and that it forgets nothing when it is full.

With a ``maxmemory-policy`` other than ``noeviction``, a full server drops what was used least: the record of a rollout
that has waited for hours, or the queue itself. With it, a full server refuses what is new, and says so.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

import redis.asyncio as aioredis
from redis import exceptions as rx

from producer import broker
from producer.errors import FleetEvictsError

logger = logging.getLogger(__name__)

#: Refusals that no retry mends; redis-py files some of them under ConnectionError.
REFUSED = (rx.AuthenticationError, rx.AuthorizationError, rx.NoPermissionError)
#: What Redis answers, to who writes or waits in it, that passes: it is full or fails over.
_PASSING = (rx.OutOfMemoryError, rx.ReadOnlyError, rx.MasterDownError)
_AWAY = (rx.ConnectionError, rx.TimeoutError, OSError)
#: The same by its first word, where redis-py has no class for it: it cannot save, has too few replicas, fails over.
_PASSING_CODES = ("MISCONF", "NOREPLICAS", "UNBLOCKED")
#: Commands that tell the policy. A managed server forbids the second one, an ACL perhaps the first. In this order a
#: server that answers the first one has no refusal to note.
POLICY_COMMANDS = (("INFO", "memory"), ("CONFIG GET", "maxmemory-policy"))
UNKNOWN_POLICY = (
    "the server tells neither by INFO nor by CONFIG GET what its maxmemory-policy is; see to it that it is noeviction, "
    "for a full server would forget rollouts otherwise"
)


# -- letting us in -----------------------------------------------------------------------------------------------------


def redact(url: str) -> str:
    """Return a URL without user name, password or secret parameters, for messages."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return "(an unreadable URL)"
    host = parts.netloc.rpartition("@")[2]
    query = urlencode([(k, "***" if "pass" in k.lower() else v) for k, v in parse_qsl(parts.query)], safe="*/")
    return urlunsplit((parts.scheme, f"***@{host}" if "@" in parts.netloc else host, parts.path, query, ""))


def is_refusal(error: Exception) -> bool:
    """Whether Redis refuses this user, and will go on doing so; a script's own refusal is no class of redis-py's."""
    return isinstance(error, REFUSED) or (isinstance(error, rx.ResponseError) and "permissions" in str(error))


def passes(error: Exception) -> bool:
    """Whether Redis is away, or takes no writes, for now: what was asked is to be asked again."""
    if isinstance(error, _AWAY + _PASSING):
        return True
    return isinstance(error, rx.ResponseError) and any(code in str(error) for code in _PASSING_CODES)


def is_about_the_data(error: Exception) -> bool:
    """Whether Redis fails because of what stands in the keys that it was asked about: it will go on doing so."""
    # A script that meets what passes, or what this user may not do, is named in that as well.
    if not isinstance(error, rx.ResponseError) or passes(error) or is_refusal(error):
        return False
    return "WRONGTYPE" in str(error) or "user_script" in str(error)


def what_redis_does(error: Exception) -> str:
    """Say in three words whether Redis refuses this user, or something else that may pass is wrong, for log lines."""
    if is_refusal(error):
        return "Redis refuses it"
    return "Redis does not answer" if isinstance(error, _AWAY) else "Redis cannot do it"


def explained(error: Exception, url: str) -> str:
    """Say in one sentence why the Redis at ``url`` cannot be used, and what to do; the password is not in it."""
    said = str(error).rstrip(".") or type(error).__name__
    if isinstance(error, rx.AuthenticationError | rx.AuthorizationError):
        todo = (
            "Check user name and password in ROLLOUTS_REDIS_URL: redis://USER:PASSWORD@HOST:PORT/0, or "
            "redis://:PASSWORD@HOST:PORT/0 where there are no users, with %XX for the special characters in them"
        )
    elif is_refusal(error):
        todo = f"Give the user of ROLLOUTS_REDIS_URL what the fleet needs: ACL SETUSER NAME {broker.acl_rule(url)}"
    elif "CERTIFICATE_VERIFY_FAILED" in said:
        todo = (
            "Name the authority that signed its certificate in ROLLOUTS_REDIS_URL: "
            "rediss://HOST:PORT/0?ssl_ca_certs=/path/to/ca.pem"
        )
    elif isinstance(error, rx.ResponseError):
        todo = "It answers, but not this: see what its own log says"
    else:
        todo = (
            "Start it, or set ROLLOUTS_REDIS_URL to the one that the workers use (or give --redis-url, when it holds "
            "no password); `rollouts up` starts one here"
        )
    return f"Redis at {redact(url)} cannot be used: {said}. {todo}"


# -- forgetting nothing ------------------------------------------------------------------------------------------------


def policy_in(answer: object) -> str | None:
    """Return the eviction policy that the answer to one of `POLICY_COMMANDS` names, None when it names none."""
    if not isinstance(answer, dict):
        return None
    policy = answer.get("maxmemory_policy") or answer.get("maxmemory-policy")
    return policy.decode() if isinstance(policy, bytes) else policy


def eviction_problem(policy: str | None) -> str | None:
    """Say what is wrong with an eviction policy, and what to do; None when nothing is, or it is not known."""
    if policy in {None, "noeviction"}:
        return None
    return (
        f"maxmemory-policy is {policy}: a full server would forget rollouts. Set it to noeviction (with CONFIG SET "
        "maxmemory-policy noeviction, and in its configuration); to use it all the same, set ROLLOUTS_ALLOW_EVICTION=1"
    )


async def require_noeviction(client: aioredis.Redis, url: str) -> None:
    """Raise `FleetEvictsError` when the server at ``url`` evicts keys; warn, once, when it does not tell."""
    for command in POLICY_COMMANDS:
        with suppress(rx.ResponseError):  # forbidden, or unknown to this server
            if policy := policy_in(await client.execute_command(*command)):  # type: ignore[no-untyped-call]
                if problem := eviction_problem(policy):
                    raise FleetEvictsError(f"Redis at {redact(url)} cannot be used: {problem}")
                return
    warn_once(UNKNOWN_POLICY)


_warned: set[str] = set()


def warn_once(message: str) -> None:
    """Log a warning that this process has not logged before."""
    if message not in _warned:
        _warned.add(message)
        logger.warning("Redis: %s", message)
