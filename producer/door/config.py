"""Configurations of verifiers environments: files of the workers, which the door names and may compare with its own."""

from __future__ import annotations

import hashlib
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from producer.contract import ID_PATTERN

_SUFFIXES = (".json", ".toml")


class ServedConfigError(ValueError):
    """A configuration cannot be used; the message names the file and what to do."""


@dataclass(frozen=True)
class ServedConfig:
    """A configuration: ``data`` is what verifiers makes an environment of, ``digest`` tells equal ones."""

    name: str
    digest: str
    data: dict[str, Any]


def read_config(path: Path) -> ServedConfig:
    """Read a JSON or TOML file, whose name without suffix is the configuration's; raises `ServedConfigError`."""
    if path.suffix not in _SUFFIXES or not re.match(ID_PATTERN, path.stem):
        raise ServedConfigError(f"{path}: a configuration is a file NAME.json or NAME.toml")
    try:
        text = path.read_text()
        data = orjson.loads(text) if path.suffix == ".json" else tomllib.loads(text)
        canonical = orjson.dumps(data, option=orjson.OPT_SORT_KEYS)
    except (OSError, ValueError, TypeError) as error:  # each format's own error is a ValueError
        raise ServedConfigError(f"{path}: cannot be read: {error}") from None
    if not isinstance(data, dict):
        raise ServedConfigError(f"{path}: holds no table of an environment's fields, such as taskset and agent")
    return ServedConfig(path.stem, hashlib.sha256(canonical).hexdigest(), data)


def named_config(given: str) -> tuple[str, str | None]:
    """Return name and digest of ``given``: a file, or only the name of one that the workers have."""
    if given.endswith(_SUFFIXES):
        config = read_config(Path(given))
        return config.name, config.digest
    if not re.match(ID_PATTERN, given):
        raise ServedConfigError(f"{given!r} is neither a file NAME.json or NAME.toml nor such a NAME")
    return given, None
