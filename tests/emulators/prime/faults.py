"""What a test wants to go wrong, and with which of the coming requests."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

ENDPOINTS = frozenset(
    "create_sandbox sandbox_statuses get_sandbox list_sandboxes delete_sandbox bulk_delete_sandboxes sandbox_auth "
    "error_context job_statuses command upload download read_file "
    "create_tunnel get_tunnel list_tunnels delete_tunnel bulk_delete_tunnels forwarded".split()
)
#: The batch endpoints can also fail for one of their entries.
BATCHES = frozenset({"sandbox_statuses", "job_statuses"})


@dataclass
class Fault:
    """One thing that goes wrong.

    ``status`` replaces the answer and the effect. ``delay`` holds the answer back after the effect, or before
    ``status``, at most until all faults are cleared. ``hang`` never answers: True leaves the effect out, "after" has it
    happen. ``drop`` cuts the connection before or after the effect. ``code`` turns one entry of a batch (that of
    ``sandbox_id``, or all) into an error.
    """

    endpoint: str
    status: int | None = None
    detail: object = None
    retry_after: float | None = None
    delay: float | None = None
    hang: bool | Literal["after"] = False
    drop: Literal["before", "after"] | None = None
    code: str | None = None
    times: int | None = 1
    skip: int = 0
    sandbox_id: str | None = None

    def __post_init__(self) -> None:
        if self.endpoint not in ENDPOINTS:
            raise ValueError(f"no endpoint {self.endpoint!r}; there are {', '.join(sorted(ENDPOINTS))}")
        if self.drop not in {None, "before", "after"}:
            raise ValueError(f'drop is "before" or "after", not {self.drop!r}')
        if self.code and self.endpoint not in BATCHES:
            raise ValueError(f"code is for the batch endpoints {', '.join(sorted(BATCHES))}")
        if not (self.status or self.delay or self.hang or self.drop or self.code):
            raise ValueError("this fault does nothing: give status, delay, hang, drop or code")

    @property
    def prevents(self) -> bool:
        """Whether the request has no effect."""
        return self.status is not None or self.hang is True or self.drop == "before"

    def matches(self, endpoint: str, ids: Collection[str]) -> bool:
        return endpoint == self.endpoint and (self.sandbox_id is None or self.sandbox_id in ids)


class Faults:
    """The faults that are still to happen; the one that was injected first goes first."""

    def __init__(self) -> None:
        self._waiting: list[Fault] = []
        self._cleared = asyncio.Event()

    def add(self, fault: Fault) -> None:
        self._waiting.append(fault)

    def clear(self) -> None:
        self._waiting.clear()
        self._cleared.set()
        self._cleared = asyncio.Event()

    async def hold_back(self, fault: Fault) -> None:
        """Wait for the fault's delay, or until all faults are cleared."""
        with suppress(TimeoutError):
            async with asyncio.timeout(fault.delay or 0):
                await self._cleared.wait()

    def take(self, endpoint: str, ids: Collection[str] = ()) -> Fault | None:
        """Return the fault of this request, and count it as used."""
        for fault in self._waiting:
            if not fault.matches(endpoint, ids):
                continue
            if fault.skip:
                fault.skip -= 1
                continue
            if fault.times is not None:
                fault.times -= 1
                if fault.times <= 0:
                    self._waiting.remove(fault)
            return fault
        return None
