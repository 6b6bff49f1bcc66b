"""A set of names that may grow past the memory: of the samples of a million tasks, or of results that are kept."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator

#: What names one rollout of a file across runs: its example id, as text, and its sample index.
Sample = tuple[str, int]

_CACHE_KIB = 16 * 1024


class NameIndex:
    """Distinct texts, each with a number; a few stay in memory, many go to a temporary file that no one else sees.

    SQLite makes it: a database without a name is a private one, deleted when it is closed or its process dies.
    """

    def __init__(self) -> None:
        # The requests may be made in another thread than the one that checked them, though never at the same time.
        self._db = sqlite3.connect("", isolation_level=None, check_same_thread=False)
        self._db.executescript(
            f"PRAGMA cache_size = -{_CACHE_KIB}; PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF;"
            "CREATE TABLE names (name TEXT PRIMARY KEY, number INTEGER NOT NULL) WITHOUT ROWID; BEGIN"
        )
        self._count = 0

    def add(self, name: str, number: int = 0) -> int | None:
        """Note a name; returns the number that it was noted with before, or None when it is new."""
        added = self._db.execute("INSERT OR IGNORE INTO names VALUES (?, ?)", (name, number)).rowcount
        if added:
            self._count += 1
            return None
        return self.number(name)

    def number(self, name: str) -> int | None:
        """Return the number that a name was noted with."""
        found = self._db.execute("SELECT number FROM names WHERE name = ?", (name,)).fetchone()
        return int(found[0]) if found else None

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self.number(name) is not None

    def __iter__(self) -> Iterator[str]:
        return (name for name, _ in self.items())

    def items(self) -> Iterator[tuple[str, int]]:
        """Return the names with their numbers."""
        yield from self._db.execute("SELECT name, number FROM names")

    def __len__(self) -> int:
        return self._count


class SampleIndex:
    """Distinct samples, in the way of a set."""

    def __init__(self) -> None:
        self._names = NameIndex()

    def add(self, sample: Sample, number: int = 0) -> bool:
        """Note a sample, with a number; returns False when it was there."""
        return self._names.add(_name(sample), number) is None

    def __contains__(self, sample: object) -> bool:
        return isinstance(sample, tuple) and _name(sample) in self._names

    def __iter__(self) -> Iterator[Sample]:
        return (sample for sample, _ in self.items())

    def items(self) -> Iterator[tuple[Sample, int]]:
        """Return the samples with their numbers."""
        for name, number in self._names.items():
            index, _, example = name.partition(":")
            yield (example, int(index)), number

    def __len__(self) -> int:
        return len(self._names)


def _name(sample: Sample) -> str:
    example, index = sample
    return f"{index}:{example}"
