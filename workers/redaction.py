"""Takes the values of secrets out of what is shown: whole ones, and what a cut through one has left of it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

#: A shorter value would be found all over the place, and is no secret. A shorter piece of one tells nothing.
SHORTEST = 4
#: The same where text only may have been cut: what stands there is more often a word than a piece.
SHORTEST_UNMARKED = 8
#: Where text was cut; in short texts that are our own words, as errors are, also an ellipsis.
_CUT = re.compile(r"(\n\.\.\. \[\d+ (?:bytes|characters) cut\] \.\.\.\n)")
_CUT_OR_ELLIPSIS = re.compile(_CUT.pattern + r"|(\.\.\.)")
_SHORT = 2000


def redacted(text: str, secrets: Mapping[str, str]) -> str:
    """Return ``text`` without the values of ``secrets``, which are given by their names."""
    return _redacted(text, secrets, _CUT_OR_ELLIPSIS if len(text) <= _SHORT else _CUT, unfinished=False)


def redacted_output(text: str, secrets: Mapping[str, str], *, unfinished: bool) -> str:
    """Return what a command has printed without the values of ``secrets``; its own ellipses are no cuts.

    One that is ``unfinished`` was read while the command printed, so that it may end within a value.
    """
    return _redacted(text, secrets, _CUT, unfinished=unfinished)


def _redacted(text: str, secrets: Mapping[str, str], cuts: re.Pattern[str], *, unfinished: bool) -> str:
    for name, value in secrets.items():
        if len(value) < SHORTEST:
            continue
        forms, mark = _forms(value), f"[redacted {name}]"
        for form in forms:
            text = text.replace(form, mark)
        for form in forms:
            text = _without_pieces(text, form, mark, cuts, unfinished=unfinished)
    return text


def _forms(secret: str) -> list[str]:
    """Return how a secret may be written: as it is, in JSON, and as Python shows it; the longest first."""
    return sorted(
        {secret, json.dumps(secret)[1:-1], json.dumps(secret, ensure_ascii=False)[1:-1], repr(secret)[1:-1]},
        key=len,
        reverse=True,
    )


def _without_pieces(text: str, secret: str, mark: str, cuts: re.Pattern[str], *, unfinished: bool) -> str:
    """Replace what stands beside a cut and is the part of ``secret`` up to there.

    Text is cut where nobody knows its secrets: in the sandbox, which prints more than is fetched. An end of ``text`` is
    no cut unless it is ``unfinished``: a word that happens to begin as a secret does is not touched there.
    """
    parts = [part for part in cuts.split(text) if part is not None]  # text and cuts by turns
    last = len(parts) - 1
    for at in range(0, last + 1, 2):
        if at < last:
            parts[at] = _without_last(parts[at], secret, mark, SHORTEST)
        elif unfinished:
            parts[at] = _without_last(parts[at], secret, mark, SHORTEST_UNMARKED)
        if at > 0:
            parts[at] = _without_first(parts[at], secret, mark)
    return "".join(parts)


# Half a character may stand between a piece and the cut.


def _without_last(part: str, secret: str, mark: str, least: int) -> str:
    body = part.rstrip("\ufffd")
    size = _overlap(body[-len(secret) :], secret, least)
    return body[:-size] + mark + part[len(body) :] if size else part


def _without_first(part: str, secret: str, mark: str) -> str:
    body = part.lstrip("\ufffd")
    size = _overlap(body[: len(secret)][::-1], secret[::-1], SHORTEST)
    return part[: len(part) - len(body)] + mark + body[size:] if size else part


def _overlap(text: str, secret: str, least: int) -> int:
    """Return how many characters of the beginning of ``secret`` are the end of ``text``; 0 for fewer than ``least``."""
    last = text[-least:]
    at = secret.rfind(last) if len(last) == least else -1
    while at >= 0:
        if text.endswith(secret[: at + least]):
            return at + least
        at = secret.rfind(last, 0, at + least - 1)
    return 0
