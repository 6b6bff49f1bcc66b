"""Parts of a page that a program makes: what stands between ``<!-- NAME -->`` and ``<!-- end of NAME -->``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def part(text: str, name: str) -> str:
    """Return what a page has as its part ``name``."""
    return _split(text, name)[1].strip()


def with_part(text: str, name: str, made: str) -> str:
    """Return a page with ``made`` as its part ``name``."""
    head, _, tail = _split(text, name)
    return f"{head}\n\n{made.strip()}\n\n{tail}"


def table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table, a row a line."""
    lines = [titles, *rows]
    shown = ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]
    return "\n".join([shown[0], "|---" * len(titles) + "|", *shown[1:]])


def _split(text: str, name: str) -> tuple[str, str, str]:
    begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    head, begins, rest = text.partition(begin)
    found, ends, tail = rest.partition(end)
    assert begins, f"the page has no {begin}"
    assert ends, f"the page has no {end}"
    return head + begin, found, end + tail
