"""What the providers' fault tables share: the faults of every endpoint, and what becomes of one."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

#: Faults by the names that rows give them, as the emulator wants them.
FAULTS: dict[str, dict[str, Any]] = {
    "500": {"status": 500},
    "503": {"status": 503},
    "429": {"status": 429, "retry_after": 0.05},
    "401": {"status": 401},
    "402": {"status": 402},
    "404": {"status": 404},
    "delay": {"delay": 0.2},
    "hang": {"hang": True},
    "hang after": {"hang": "after"},
    "drop before": {"drop": "before"},
    "drop after": {"drop": "after"},
}


@dataclass(frozen=True)
class Works:
    """It does what it is to do, and its endpoint was asked this often."""

    asked: int


@dataclass(frozen=True)
class Fails:
    """The provider's error with these words; ``again`` says whether another attempt is worth it."""

    asked: int
    again: bool
    words: str


def retryable(asked: int, words: str) -> Fails:
    return Fails(asked, True, words)


def final(asked: int, words: str) -> Fails:
    return Fails(asked, False, words)


def is_of_tunnels(endpoint: str) -> bool:
    return "tunnel" in endpoint or endpoint == "forwarded"


def gaps(
    endpoints: Collection[str], rows: Collection[tuple[str, str]], left_out: Mapping[str, Mapping[str, str]]
) -> set[tuple[str, str]]:
    """Return the faults of endpoints that are in no row although nothing says why, or are although something does.

    A fault for ever does not stand for the same fault once.
    """
    excused = {(endpoint, fault) for endpoint, faults in left_out.items() for fault in faults}
    wanted = {(endpoint, fault) for endpoint in endpoints for fault in FAULTS}
    return (wanted - set(rows)) ^ excused
