"""Environments of the soak: one whose first attempts and scores fail, and one that leaks."""

from __future__ import annotations

import os
from typing import Any

from workers.environment import CommandEnvironment
from workers.errors import ModelError
from workers.state import Rollout


class Unsteady(CommandEnvironment):
    """Fails in the hook that the request's ``environment_args`` name: ``setup`` in the first attempt, or ``score``."""

    async def setup(self, rollout: Rollout) -> None:
        if rollout.request.environment_args.get("fails") == "setup" and rollout.attempt == 1:
            raise ModelError("the first attempt fails")

    async def score(self, rollout: Rollout) -> float:
        if rollout.request.environment_args.get("fails") == "score":
            raise ValueError("this score always fails")
        return 1.0


class Leaky(Unsteady):
    """Keeps a file open and some memory for each rollout: the soak must notice."""

    kept: list[Any]

    def __init__(self) -> None:
        self.kept = []

    async def setup(self, rollout: Rollout) -> None:
        self.kept.append((open(os.devnull), os.urandom(50_000)))  # noqa: SIM115
        await super().setup(rollout)
