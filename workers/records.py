"""Reads what stands in Redis, which anybody may have written: what cannot be read is told apart, and ends nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from producer import broker, queues


def fields_of(client: Any, members: Sequence[bytes], *fields: str) -> list[tuple[bytes, list[bytes | None]]]:
    """Return the members of a set, each with fields of its record; with no field where that is no record."""
    pipe = client.pipeline(transaction=False)
    for member in members:
        pipe.hmget(broker.job_key(member.decode(errors="replace")), *fields)
    found = []
    for member, record in zip(members, pipe.execute(raise_on_error=False), strict=True):
        if isinstance(record, Exception) and "WRONGTYPE" not in str(record):
            raise record
        found.append((member, [] if isinstance(record, Exception) else record))
    return found


def id_in(member: bytes) -> str | None:
    """Return the rollout id that a set has as a member; None for bytes that are no text."""
    try:
        return member.decode()
    except UnicodeDecodeError:
        return None


def number(text: bytes | None, digits: int = 9) -> int | None:
    """Return a number that the scripts count up; None for what none of them has written."""
    return int(text) if text and text.isdigit() and len(text) <= digits else None


def priority(text: bytes | None) -> int:
    """Return a record's priority; the last one's for one that cannot be read, so that it goes before nobody."""
    found = number(text or b"0")
    return min(found, 9) if found is not None else max(queues.PRIORITY_STEPS)


def woken_by(message: bytes) -> str:
    """Return the id of the rollout that a message in a queue is for; "" for one that is not a wake-up call."""
    try:
        return str(orjson.loads(message)["headers"]["id"])
    except (ValueError, TypeError, KeyError):
        return ""
