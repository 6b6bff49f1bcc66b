"""Runs an attempt, as its environment wants: through the flow, or as an episode that the environment runs by itself."""

from __future__ import annotations

from producer.contract import Phase
from workers.attempt import in_phase, recorded
from workers.environment import Environment, EpisodeEnvironment
from workers.rollout import Systems, run_rollout
from workers.state import Rollout
from workers.watchdog import Limits, hard_limit


async def run_attempt(rollout: Rollout, environment: Environment, systems: Systems) -> None:
    """Run one attempt and record it in ``rollout``; returns also when it failed, with ``rollout.error`` set."""
    if isinstance(environment, EpisodeEnvironment):
        await run_episode(rollout, environment, systems.limits)
    else:
        await run_rollout(rollout, environment, systems)


async def run_episode(rollout: Rollout, environment: EpisodeEnvironment, limits: Limits) -> None:
    """Run an attempt that has no other phase than `Phase.AGENT`, whose deadline is an error here and no outcome.

    Raises only `asyncio.CancelledError`, after the environment has cleaned up.
    """
    async with recorded(rollout), hard_limit(rollout, limits.attempt_of(rollout)), in_phase(rollout, Phase.AGENT):
        await environment.run(rollout)
        rollout.agent_completed = True
