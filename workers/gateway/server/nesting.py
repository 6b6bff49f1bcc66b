"""How deep JSON from outside may be nested: orjson reads about 1,024 levels, but writes only about 254."""

from __future__ import annotations

from typing import Any

#: Levels of objects and arrays. What is recorded must be written again, a few levels further down in a trajectory.
MAX_NESTING = 100


def is_too_deep(value: Any, limit: int = MAX_NESTING) -> bool:
    """Return whether lists and dictionaries are nested in ``value`` more than ``limit`` levels deep."""
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(limit):
        if not level:
            return False
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
    return bool(level)
