"""What `producer` offers is found when it is used, and costs nobody who does not use it."""

from __future__ import annotations

import subprocess
import sys

import pytest

import producer


def test_every_name_is_found_and_said_where() -> None:
    at_home = {name for names in producer._HOMES.values() for name in names.split()}
    assert at_home == set(producer.__all__) <= set(dir(producer))
    assert all(getattr(producer, name).__module__.startswith("producer.") for name in producer.__all__)


def test_a_name_that_is_not_there() -> None:
    with pytest.raises(AttributeError, match="'producer' has no attribute 'Consumer'"):
        _ = producer.Consumer


@pytest.mark.parametrize("module", ["producer", "workers.cli", "workers.gateway.server"])
def test_what_starts_often_does_not_wait_for_celery(module: str) -> None:
    program = f"import sys, {module}; print(*({{'celery', 'redis', 'rich.console', 'httpx'}} & {{*sys.modules}}))"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ended.stdout.split() == []
