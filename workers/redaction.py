"""Takes the values of secrets out of what is shown: whole ones, and what a cut through one has left of it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

#: A shorter value would be found all over the place, and is no secret. A shorter piece of one tells nothing.
SHORTEST = 4
#: Where text was cut; in short texts, as errors are, also an ellipsis.
_CUT = re.compile(r"(\n\.\.\. \[\d+ (?:bytes|characters) cut\] \.\.\.\n)")
_CUT_OR_ELLIPSIS = re.compile(_CUT.pattern + r"|(\.\.\.)")
_SHORT = 2000


def redacted(text: str, secrets: Mapping[str, str]) -> str:
    """Return ``text`` without the values of ``secrets``, which are given by their names."""
    for name, value in secrets.items():
        if len(value) < SHORTEST:
            continue
        forms, mark = _forms(value), f"[redacted {name}]"
        for form in forms:
            text = text.replace(form, mark)
        for form in forms:
            text = _without_pieces(text, form, mark)
    return text


def _forms(secret: str) -> list[str]:
    """Return how a secret may be written: as it is, in JSON, and as Python shows it; the longest first."""
    return sorted(
        {secret, json.dumps(secret)[1:-1], json.dumps(secret, ensure_ascii=False)[1:-1], repr(secret)[1:-1]},
        key=len,
        reverse=True,
    )


def _without_pieces(text: str, secret: str, mark: str) -> str:
    """Replace what stands beside a cut, or at an end of ``text``, and is the part of ``secret`` up to there.

    Text is cut where nobody knows its secrets: in the sandbox, which prints more than is fetched.
    """
    cuts = _CUT_OR_ELLIPSIS if len(text) <= _SHORT else _CUT
    parts = [part for part in cuts.split(text) if part is not None]
    return "".join(part if cuts.fullmatch(part) else _trimmed(part, secret, mark) for part in parts)


def _trimmed(part: str, secret: str, mark: str) -> str:
    # Half a character may stand between a piece and the cut.
    body = part.rstrip("\ufffd")
    if size := _overlap(body[-len(secret) :], secret):
        part = body[:-size] + mark + part[len(body) :]
    body = part.lstrip("\ufffd")
    if size := _overlap(body[: len(secret)][::-1], secret[::-1]):
        part = part[: len(part) - len(body)] + mark + body[size:]
    return part


def _overlap(text: str, secret: str) -> int:
    """Return how many characters of the beginning of ``secret`` are the end of ``text``; 0 for too few."""
    last = text[-SHORTEST:]
    at = secret.rfind(last) if len(last) == SHORTEST else -1
    while at >= 0:
        if text.endswith(secret[: at + SHORTEST]):
            return at + SHORTEST
        at = secret.rfind(last, 0, at + SHORTEST - 1)
    return 0
