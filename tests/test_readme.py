"""The README says what is so: its reference, its links, its commands, and the guides that it names."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

import pytest
from readme import README, made
from typer.main import get_command

from workers.cli import app
from workers.guide import GUIDES, guide

TEXT = README.read_text()
LINKS = sorted(set(re.findall(r"\]\((?!https?://)([^)#]+)\)", TEXT)))
COMMANDS = sorted(set(re.findall(r"(?:`|\$ |=\S+ )rollouts\s([a-z][a-z-]+)", TEXT)))
MAKE = sorted(set(re.findall(r"make\s+([a-z][a-z-]+)`", TEXT)))


def test_the_reference_of_settings_is_up_to_date() -> None:
    assert made(TEXT) == TEXT, "run: PYTHONPATH=.:tests python tests/readme.py"


@pytest.mark.parametrize("link", LINKS)
def test_what_it_links_to_is_there(link: str) -> None:
    assert (README.parent / link).exists()


def test_its_commands_are_there() -> None:
    known = set(get_command(app).commands)  # type: ignore[attr-defined]
    assert {"up", "run", "status", "guide"} <= set(COMMANDS)
    assert set(COMMANDS) - known == set()


def test_its_make_targets_are_there() -> None:
    targets = re.findall(r"^([a-z-]+):", (README.parent / "Makefile").read_text(), re.M)
    assert {"demo", "test"} <= {*MAKE, *re.findall(r"^\$ make ([a-z-]+)", TEXT, re.M)}
    assert set(MAKE) - set(targets) == set()


@pytest.mark.parametrize("name", GUIDES)
def test_each_guide_is_named_and_says_something(name: str) -> None:
    module, about = GUIDES[name]
    path = Path(str(import_module(module).__file__)).relative_to(README.parent)
    assert f"| [{name}]({path}) | {about} |" in TEXT
    assert len(guide(name).splitlines()) > 10
