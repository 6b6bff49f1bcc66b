"""The address of a rollout gateway, as it stands in requests and settings."""

from __future__ import annotations

import re
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator

_NETLOC = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(:[0-9]{1,5})?")


def _base_url(url: str) -> str:
    url = url.strip().rstrip("/").removesuffix("/v1").rstrip("/")
    parts = urlsplit(url)
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise ValueError(f"{url!r} is not an http(s) URL; give the gateway's base, such as http://gateway:8080")
    if "@" in parts.netloc or parts.query or parts.fragment or parts.port == 0:  # a port above 65535 raises
        raise ValueError("a gateway's base has no user, query or fragment, and a port from 1 to 65535")
    if not _NETLOC.fullmatch(parts.netloc):
        raise ValueError(f"{parts.netloc!r} is not HOST or HOST:PORT; write a name in its ASCII form")
    # Put together anew: whoever decides by its host and whoever connects to it must read the same.
    return f"{parts.scheme}://{parts.netloc.lower()}{parts.path}"


GatewayUrl = Annotated[str, AfterValidator(_base_url)]
