"""Writes the README's reference of settings from the models that read them; run it after a change of one:

PYTHONPATH=. python tests/readme.py
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined
from pydantic_settings import BaseSettings

from producer.settings import ProducerSettings, variables
from workers.gateway.server import GatewaySettings
from workers.settings import WorkerSettings

README = Path(__file__).parents[1] / "README.md"
BEGIN, END = "<!-- settings -->\n", "<!-- end of settings -->"
READERS = {"Workers read": WorkerSettings, "Producers read": ProducerSettings, "The gateway reads": GatewaySettings}


def reference() -> str:
    """Return a table for each of those that read settings."""
    return "\n".join(f"{who}:\n\n{_table(model)}" for who, model in READERS.items())


def _table(model: type[BaseSettings]) -> str:
    return "\n".join(["| variable | default | meaning |", "|---|---|---|", *_rows(model), ""])


def _rows(model: type[BaseSettings]) -> Iterator[str]:
    for name, field in model.model_fields.items():
        names = " or ".join(f"`{variable}`" for variable in variables(model, name))
        yield f"| {names} | {_default(field)} | {(field.description or '').replace('|', chr(92) + '|')} |"


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "(needed)"
    default = field.default
    if default is PydanticUndefined or default in {None, "", ()}:
        return ""
    if isinstance(default, bool):
        return str(default).lower()
    return f"`{default:g}`" if isinstance(default, float) else f"`{default}`"


def made(text: str) -> str:
    """Return the README with its reference made anew."""
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    assert begin, f"README.md has no {BEGIN.strip()}"
    assert end, f"README.md has no {END}"
    return f"{head}{begin}\n{reference()}\n{end}{tail}"


if __name__ == "__main__":
    README.write_text(made(README.read_text()))
