"""What the benchmarks share: a fleet with null sandboxes, and one JSON line of numbers."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from producer import RolloutRequest
from workers.local import LocalStack, StackOptions

HERE = Path(__file__).parent


def null_requests(count: int, command: str = "end") -> list[RolloutRequest]:
    """Requests whose agent ends at once (``end``) or when the benchmark says so (``wait``)."""
    return [RolloutRequest(model="null", run_command=command, example_id=n) for n in range(count)]


@contextmanager
def null_fleet(concurrency: int, workers: int = 1, **settings: str) -> Iterator[LocalStack]:
    """A fleet on this machine whose sandboxes are null ones; everything else is real."""
    options = StackOptions(
        workers=workers,
        concurrency=concurrency,
        settings={
            "ROLLOUTS_SANDBOX_PROVIDER": "null_provider:null_sandboxes",
            "PYTHONPATH": str(HERE),
            **settings,
        },
    )
    with LocalStack(options) as stack:
        yield stack


def report(benchmark: str, **numbers: Any) -> None:
    """Print one JSON line."""
    machine = {"cores": os.cpu_count(), "python": platform.python_version()}
    rounded = {k: round(v, 3) if isinstance(v, float) else v for k, v in numbers.items()}
    print(json.dumps({"benchmark": benchmark, **rounded, **machine}), flush=True)
