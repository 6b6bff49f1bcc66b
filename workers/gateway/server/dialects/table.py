"""The dialects that the gateway serves: a new one is a module beside this one, and a line here."""

from __future__ import annotations

from collections.abc import Iterable

from workers.gateway.server.dialects import Dialect, Native
from workers.gateway.server.dialects.chat import Chat
from workers.gateway.server.dialects.messages import Messages
from workers.gateway.server.dialects.responses import Responses

CHAT = Chat()

DIALECTS: tuple[Dialect, ...] = (CHAT, Responses(), Messages())


def natives(entries: Iterable[str], urls: Iterable[str], dialects: Iterable[Dialect]) -> dict[str, dict[str, Native]]:
    """Return which dialects each upstream speaks itself; ``entries`` are ``DIALECT``, for all, or ``DIALECT@URL``.

    Raises:
        ValueError: an entry names no such dialect or no upstream.
    """
    known = {dialect.name: dialect.native for dialect in dialects if dialect.native is not None}
    found: dict[str, dict[str, Native]] = {url: {} for url in urls}
    for entry in entries:
        name, _, url = entry.partition("@")
        if name not in known:
            raise ValueError(f"{entry!r} names no dialect that can be passed through; there are {', '.join(known)}")
        if url and url not in found:
            raise ValueError(f"{entry!r} names no upstream; there are {', '.join(found)}")
        for each in [url] if url else found:
            found[each][name] = known[name]
    return found
