"""How a rollout is given back to run again, and what its record keeps of the attempts before.

The record's ``history`` has one line of JSON for each, for whoever reads it with a Redis client. The turns that they
had made are fields of their own, packed, as a long trajectory shrinks by well over ten times.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import zstandard

from producer import broker
from producer.contract import SCHEMA_VERSION, ErrorInfo, ErrorKind, FailedAttempt, InvalidRequestError, Step
from producer.validation import dump, parse

logger = logging.getLogger(__name__)

#: Bytes of an attempt's packed turns that a record keeps: beyond that, only how many they were.
MAX_PACKED_TURNS = 4 * 1024 * 1024
#: Bytes of JSON of an attempt's turns that a record keeps: a conversation of long turns packs a hundred times smaller.
MAX_TURNS_BYTES = 16 * 1024 * 1024


@dataclass(frozen=True, kw_only=True)
class HandBack:
    """Why and how a rollout runs again.

    ``counts`` is False for a hand-over, which spends no attempt. ``delay`` is in seconds; ``front`` puts it before what
    already waits. ``turns`` are what the attempt's agent had done by then.
    """

    error: ErrorInfo
    counts: bool = True
    delay: float = 0.0
    front: bool = False
    turns: Sequence[Step] = ()

    @classmethod
    def over(cls, why: str, *, counts: bool = False) -> HandBack:
        """Return that of a rollout that did not fail: it goes to the front, as it has waited already."""
        error = ErrorInfo(kind=ErrorKind.LEASE, message=why, retryable=True)
        return cls(error=error, counts=counts, front=True)


def history_line(attempt: int, worker: str, how: HandBack) -> bytes:
    """Return the line that an attempt leaves in its record, without its turns."""
    failed = FailedAttempt(attempt=attempt, worker=worker, error=how.error, counted=how.counts, turns=len(how.turns))
    return dump(failed.model_dump(mode="json", exclude_defaults=True))


def packed(turns: Sequence[Step]) -> bytes:
    """Return ``turns`` as the record keeps them; b"" for none, and for more than it keeps."""
    if not turns or len(dump(list(turns))) > MAX_TURNS_BYTES:
        return b""
    data = broker.encode_result(list(turns))
    return data if len(data) <= MAX_PACKED_TURNS else b""


def parsed(history: bytes) -> list[FailedAttempt]:
    """Return the attempts of which a record's ``history`` tells; a line that cannot be read is named in the log."""
    attempts = []
    for line in history.splitlines():
        try:
            attempts.append(parse(FailedAttempt, line, "line of history", version=SCHEMA_VERSION))
        except InvalidRequestError as error:
            logger.warning("a rollout's history: %s", error)
    return attempts


def with_turns(attempt: FailedAttempt, turns: bytes | None) -> FailedAttempt:
    """Return ``attempt`` with its packed ``turns``, where there are any that can be read."""
    if not turns:
        return attempt
    try:
        return attempt.model_copy(update={"trajectory": broker.decode_result(turns)})
    except (ValueError, zstandard.ZstdError) as error:
        logger.warning("the turns of attempt %d cannot be read: %s", attempt.attempt, error)
        return attempt
