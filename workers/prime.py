"""The account of the Prime platform that this worker uses: found as the SDKs find it, and judged before it is used."""

from __future__ import annotations

import os
import ssl
import tempfile
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import cache
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import httpx

from workers.connections import ManyConnections

#: The longest that one `Retry-After` may stop us, in seconds: after that we ask again.
LONGEST_WAIT = 120.0
#: Seconds that an idle connection is kept: fewer than servers usually do, so that none closes as a request goes out.
KEEPALIVE = 3.0


@dataclass(frozen=True)
class Credentials:
    """What the SDKs will use. ``problem`` says what is wrong with it and what to do, or is None."""

    base_url: str = ""
    team_id: str | None = None
    api_key: str = field(default="", repr=False)
    #: Where the key comes from, for people who have several.
    source: str = ""
    problem: str | None = None


def credentials() -> Credentials:
    """Read the account as the SDKs do: ``PRIME_*`` variables, then ``~/.prime/config.json`` and ``PRIME_CONTEXT``.

    Asks nobody: whether the platform takes the key shows at the first call.
    """
    from prime_sandboxes import Config  # it takes a second to import, and the command line does not always need it

    try:
        config = Config()
    except ValueError as error:
        return Credentials(problem=f"PRIME_CONTEXT: {error}; log in with `prime login`, or unset it")
    key = config.api_key
    source = "PRIME_API_KEY" if os.environ.get("PRIME_API_KEY") else str(config.config_file)
    problem = None
    url = urlsplit(config.base_url)
    if not key:
        problem = f"no API key: set PRIME_API_KEY, or log in with `prime login` ({config.config_file})"
    elif not key.isprintable() or key != key.strip():
        problem = f"the API key from {source} holds a space or a line break: it was not copied as it is"
    elif url.scheme not in {"http", "https"} or not url.hostname:
        problem = f"PRIME_API_BASE_URL: {config.base_url!r} is not an http(s) URL"
    return Credentials(config.base_url, config.team_id, key, source if key else "", problem)


def seconds_to_wait(retry_after: str | None, default: float) -> float:
    """Read a ``Retry-After``: seconds or a date, ``default`` where it is neither, and at most `LONGEST_WAIT`."""
    value = (retry_after or "").strip()
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = (parsedate_to_datetime(value) - datetime.now(UTC)).total_seconds()
        except (ValueError, TypeError):
            seconds = default
    return min(max(0.0, seconds), LONGEST_WAIT) if seconds == seconds else default  # noqa: PLR0124 - not a number


def private_folder() -> Path:
    """Make a folder that only this user can read (mode 0700), for what an SDK keeps; the caller removes it."""
    return Path(tempfile.mkdtemp(prefix="rollouts-prime-"))


def many_connections(base_url: str) -> httpx.AsyncBaseTransport | None:
    """Return a transport that stays cheap with many requests at once; None where a proxy must be used."""
    url = urlsplit(base_url)
    proxies = getproxies()
    if (url.scheme in proxies or "all" in proxies) and not proxy_bypass(url.hostname or ""):
        return None
    return ManyConnections(keepalive_expiry=KEEPALIVE, tls=_trusted())


@cache
def _trusted() -> ssl.SSLContext:
    """Return the roots that the SDKs trust, also in an image that has none."""
    return httpx.create_ssl_context()
