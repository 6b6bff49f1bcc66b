"""Writes the README's reference of settings from the models that read them; run it after a change of one:

PYTHONPATH=.:tests python tests/readme.py
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from marked import table, with_part
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined
from pydantic_settings import BaseSettings

from producer.settings import ProducerSettings, variables
from workers.gateway.server import GatewaySettings
from workers.settings import WorkerSettings

README = Path(__file__).parents[1] / "README.md"
READERS = {"Workers read": WorkerSettings, "Producers read": ProducerSettings, "The gateway reads": GatewaySettings}


def reference() -> str:
    """Return a table for each of those that read settings."""
    titles = ["variable", "default", "meaning"]
    return "\n\n".join(f"{who}:\n\n{table(titles, _rows(model))}" for who, model in READERS.items())


def _rows(model: type[BaseSettings]) -> Iterator[tuple[str, str, str]]:
    for name, field in model.model_fields.items():
        names = " or ".join(f"`{variable}`" for variable in variables(model, name))
        yield names, _default(field), field.description or ""


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
    return with_part(text, "settings", reference())


if __name__ == "__main__":
    README.write_text(made(README.read_text()))
