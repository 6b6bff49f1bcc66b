"""The marker of the chaos suite."""

from __future__ import annotations

import pytest


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "chaos: breaks a whole fleet for about a minute")
