"""A fleet whose workers run verifiers' environments; the tests need the extra ``verifiers``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from fleets import lean

from workers.local import LocalStack, StackOptions

sys.path.insert(0, str(Path(__file__).parent))

#: A worker that is stopped for two seconds, between two renewals that are one second apart, keeps what it runs.
LEASE_TTL = 4.0


@pytest.fixture(scope="module")
def door_fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LocalStack, Path]]:
    """A fleet of two workers, and the configuration's file."""
    pytest.importorskip("verifiers.v1")
    from doors import worker_settings, write_config

    directory = tmp_path_factory.mktemp("door")
    config = write_config(directory)
    settings = {"ROLLOUTS_LEASE_TTL": str(LEASE_TTL), **worker_settings(config)}
    options = lean() | {"workers": 2, "settings": settings, "log_dir": directory / "logs"}
    with LocalStack(StackOptions(**options)) as stack:
        yield stack, config
