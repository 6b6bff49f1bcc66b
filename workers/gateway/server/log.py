"""What is written down of the rollouts as it happens, for a gateway that is started again; see `journal`."""

from __future__ import annotations

from enum import IntEnum
from typing import Any, Protocol


class Kind(IntEnum):
    """What an entry tells; its number is what the journal holds."""

    REGISTER = 1
    CALL = 2
    FAILURE = 3
    CANCEL = 4
    FORGET = 5
    SNAPSHOT = 6
    POLICY = 7


class Log(Protocol):
    """Takes entries."""

    def write(self, kind: Kind, header: dict[str, Any], body: Any = None, data: bytes = b"") -> None:
        """Write an entry down; ``header`` and ``body`` are JSON values. Never raises."""
        ...


class NoLog:
    """Keeps nothing."""

    def write(self, kind: Kind, header: dict[str, Any], body: Any = None, data: bytes = b"") -> None:
        """Keep nothing."""
