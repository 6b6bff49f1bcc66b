"""Which experts of a mixture the model took for each token, cut up as a v1 trace has them: for each of its nodes.

Sources: ``MessageNode.routed_experts`` and ``_attribute_routed_experts`` in ``verifiers/v1/graph.py`` of 0.4.0.
"""

from __future__ import annotations

from array import array
from base64 import b64decode
from dataclasses import dataclass, replace
from typing import Any, Self

_WIDTHS = {"uint8": 1, "uint16": 2}


@dataclass(frozen=True)
class Experts:
    """One row for each token, from the ``start``-th on; ``row`` are its dimensions: layers, and experts of each."""

    dtype: str
    row: tuple[int, ...]
    data: bytes
    start: int = 0

    @classmethod
    def of(cls, given: object) -> Self | None:
        """Return what a model server gave: lists of numbers, or its packed form. None for anything else."""
        try:
            return cls._unpacked(given) if isinstance(given, dict) else cls._listed(given)
        except (LookupError, TypeError, ValueError, OverflowError):
            return None

    @classmethod
    def _unpacked(cls, given: dict[str, Any]) -> Self | None:
        raw, (_, *row) = given["data"], given["shape"]
        data = raw if isinstance(raw, bytes) else b64decode(raw, validate=True)
        found = cls(str(given.get("dtype") or "uint8"), tuple(map(int, row)), data, int(given.get("start") or 0))
        return found if found.dtype in _WIDTHS and found.size and len(data) == given["shape"][0] * found.size else None

    @classmethod
    def _listed(cls, given: Any) -> Self | None:
        row = len(given[0]), len(given[0][0])
        flat = [expert for token in given for layer in token for expert in layer]
        if len(flat) != len(given) * row[0] * row[1] or not flat:
            return None
        wide = max(flat) > 255
        return cls("uint16" if wide else "uint8", row, array("H" if wide else "B", flat).tobytes())

    @property
    def size(self) -> int:
        """Bytes of a row."""
        size = _WIDTHS[self.dtype]
        for dimension in self.row:
            size *= dimension
        return size

    def __len__(self) -> int:
        return len(self.data) // self.size

    def of_tokens(self, first: int, count: int) -> Self | None:
        """Return the rows of ``count`` tokens of a turn, None where they are not all there.

        A turn's very last token went through no model yet: it gets the row before it, until `corrected`.
        """
        begin, end = first - self.start, first - self.start + count
        if not (self.data and count) or begin < 0 or end > len(self) + 1:
            return None
        rows = self.data[begin * self.size : end * self.size]
        if end > len(self):
            rows += self.data[-self.size :]
        return replace(self, data=rows, start=0)

    def corrected(self, after: Self, position: int) -> Self:
        """Return these rows with the last one as the turn ``after`` has it, where the token is at ``position``."""
        place = position - after.start
        if after.row != self.row or not 0 <= place < len(after):
            return self
        mine, other = (self, after) if self.dtype == after.dtype else (self._wide(), after._wide())
        row = other.data[place * other.size : (place + 1) * other.size]
        return replace(mine, data=mine.data[: -mine.size] + row)

    def _wide(self) -> Self:
        if self.dtype == "uint16":
            return self
        return replace(self, dtype="uint16", data=array("H", list(self.data)).tobytes())

    def as_node(self) -> dict[str, Any]:
        """Return what v1's validation makes an array of; its ``data`` are bytes, as on verifiers' own wire."""
        return {"__nd__": True, "dtype": self.dtype, "shape": [len(self), *self.row], "data": self.data}
