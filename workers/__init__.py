"""What runs rollouts: the Celery worker, its pool, the flow, and the systems it touches."""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    """Build the app when Celery's own commands ask for it: ``celery -A workers worker``, ``beat``, ``inspect``."""
    if name == "celery":
        from workers.app import create_app

        app = create_app()
        globals()["celery"] = app
        return app
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
