"""The versions of Helm with which the chart's tests render it."""

from __future__ import annotations

import pytest
from helm.binaries import helm_program
from helm.chart import Helm


@pytest.fixture(scope="session", params=[3, 4], ids=["helm3", "helm4"])
def helm(request: pytest.FixtureRequest) -> Helm:
    """Both versions: a test that uses this runs once with each."""
    return Helm(helm_program(request.param))


@pytest.fixture(scope="session")
def helm4() -> Helm:
    return Helm(helm_program(4))
