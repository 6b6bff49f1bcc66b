"""Makes a request's fields of a table's columns: which column goes where, and a template for the prompt."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import orjson

from producer.contract import InvalidRequestError, RolloutRequest

#: What a task may hold; ``messages`` is another name of ``prompt``.
FIELDS = frozenset(RolloutRequest.model_fields) | {"messages"}
#: Fields that have fields of their own.
OBJECTS = ("info", "environment_args", "sampling_params", "env", "deadlines", "resources", "advanced")
_SAME = {"prompt": "messages", "messages": "prompt"}
_PLACE = re.compile(r"\{\{([^\W\d][\w .-]*)\}\}|\{([^\W\d][\w .-]*)\}")
_SHOWN_COLUMNS = 40


class Template:
    """A prompt with places for columns: ``Solve: {question}``.

    Braces around anything but a name stay as they are, so that ``\\boxed{}`` can be written; ``{{name}}`` gives
    ``{name}``. A text is put in as it is, and anything else as JSON.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.columns = list(dict.fromkeys(found[2] for found in _PLACE.finditer(text) if found[2]))
        if not self.columns:
            raise InvalidRequestError(
                f"--template {text[:60]!r} names no column, such as {{question}}: every prompt would be the same; "
                "to read it from a file, write @FILE"
            )

    @classmethod
    def read(cls, given: str) -> Template:
        """Make a template of an option's text, or of the file that it names after ``@``."""
        if not given.startswith("@"):
            return cls(given)
        path = Path(given[1:])
        try:
            return cls(path.read_bytes().decode("utf-8").removeprefix("\ufeff").removesuffix("\n"))
        except OSError as error:
            raise InvalidRequestError(f"--template: {path} cannot be read: {error.strerror}") from None
        except UnicodeDecodeError:
            raise InvalidRequestError(f"--template: {path} is not UTF-8") from None

    def fill(self, row: Mapping[str, Any]) -> str:
        """Return the prompt of a row; raises `InvalidRequestError` that names the column which it lacks."""

        def value(place: re.Match[str]) -> str:
            if place[1]:
                return f"{{{place[1]}}}"
            found = _value(row, place[2], "--template")
            if found is None:
                raise InvalidRequestError(f"--template: column {place[2]!r} is null")
            return found if isinstance(found, str) else orjson.dumps(found).decode()

        return _PLACE.sub(value, self.text)


class ColumnMapping:
    """Which columns become which fields of a request.

    A column that has a field's name keeps it, unless a mapping takes the column or the field. Once there is a mapping
    or a template, other columns are left out, and named in ``left_out``; without, they are refused as any unknown
    field is.
    """

    def __init__(self, maps: Sequence[str] = (), template: str | None = None) -> None:
        """Read options such as ``prompt=question`` and ``info.level=level``; raises `InvalidRequestError`."""
        self._moves: dict[str, str] = {}
        for given in maps:
            target, source = _move(given)
            if target in self._moves:
                raise InvalidRequestError(f"--map {given}: {target} is mapped already, from {self._moves[target]!r}")
            self._moves[target] = source
        self._template = Template.read(template) if template is not None else None
        if self._template and {"prompt", "messages"} & self._moves.keys():
            raise InvalidRequestError("--template makes the prompt, and --map prompt does too; drop one")
        self.is_set = bool(self._moves or self._template)
        self.left_out: set[str] = set()

    def choose(self, columns: Sequence[str]) -> list[str]:
        """Return those of a table's columns that are used; raises `InvalidRequestError` for what it does not have."""
        sources = [*self._moves.values(), *(self._template.columns if self._template else ())]
        if missing := [source for source in sources if _column(source, columns) is None]:
            raise InvalidRequestError(_unknown(missing, columns))
        used = {_column(source, columns) for source in sources}
        others = [column for column in columns if column not in FIELDS | used]
        if others and not self.is_set:
            raise InvalidRequestError(
                f"no fields of a request are: {_listed(others)}; say what becomes of the columns, such as --map "
                "prompt=COLUMN or --template 'Solve: {COLUMN}': those that are not named are then left out"
            )
        self.left_out |= set(others)
        return [column for column in columns if column not in self.left_out]

    def apply(self, row: dict[str, Any]) -> dict[str, Any]:
        """Return the request's fields of a row; raises `InvalidRequestError`."""
        if not self.is_set:
            return row
        taken = {_column(source, row) for source in self._moves.values()}
        fields = {name: value for name, value in row.items() if name in FIELDS and name not in taken}
        self.left_out |= row.keys() - FIELDS - taken - set(self._template.columns if self._template else ())
        for target, source in self._moves.items():
            value = _value(row, source, f"--map {target}={source}")
            if value is None and target in _SAME:
                raise InvalidRequestError(f"{target}: column {source!r} is null")
            _put(fields, target, value)
        if self._template:
            _put(fields, "prompt", self._template.fill(row))
        return fields


def _move(given: str) -> tuple[str, str]:
    target, separator, source = (part.strip() for part in given.partition("="))
    if not (target and separator and source):
        raise InvalidRequestError(f"--map {given}: write FIELD=COLUMN, such as prompt=question")
    field, dot, rest = target.partition(".")
    if field not in FIELDS:
        close = get_close_matches(field, FIELDS, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else f"; there are {', '.join(sorted(FIELDS))}"
        raise InvalidRequestError(f"--map {given}: a request has no field {field!r}{hint}")
    if dot and (field not in OBJECTS or not all(rest.split("."))):
        raise InvalidRequestError(f"--map {given}: only {', '.join(OBJECTS)} have fields of their own")
    return target, source


def _put(fields: dict[str, Any], target: str, value: Any) -> None:
    *path, last = target.split(".")
    place = fields
    for number, name in enumerate(path, start=1):
        inner = place.get(name)
        if not isinstance(inner, dict | None):
            raise InvalidRequestError(f"{target}: {'.'.join(path[:number])} holds {inner!r:.40}, which has no fields")
        place[name] = place = dict(inner or {})
    if value is None:
        place.pop(last, None)
    else:
        place[last] = value
    if target in _SAME:
        fields.pop(_SAME[target], None)


def _column(source: str, columns: Iterable[str]) -> str | None:
    """Return the column that ``source`` begins with: a name may hold dots of its own."""
    parts = source.split(".")
    names = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
    return next((name for name in names if name in columns), None)


def _value(row: Mapping[str, Any], source: str, option: str) -> Any:
    column = _column(source, row)
    if column is None:
        raise InvalidRequestError(f"{option}: {_unknown([source], row)}")
    value = row[column]
    for part in source[len(column) + 1 :].split(".") if column != source else ():
        if not isinstance(value, dict):
            return None
        value = value.get(part)
    return value


def _unknown(missing: Sequence[str], columns: Iterable[str]) -> str:
    return f"there is no column {_listed(missing)}; the columns are {_listed(columns)}"


def _listed(names: Iterable[str]) -> str:
    names = list(names)
    more = f" and {len(names) - _SHOWN_COLUMNS} more" if len(names) > _SHOWN_COLUMNS else ""
    return (", ".join(repr(name) for name in names[:_SHOWN_COLUMNS]) or "(none)") + more
