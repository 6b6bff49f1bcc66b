"""The rollouts of a chaos run: a seeded mix of agents, and what each of them must come to."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from producer import RolloutRequest, RolloutResult
from producer.contract import ErrorKind, Phase, StopCondition

#: The variable by which the processes of a run's agents are found; its value is the run's token.
RUN_VARIABLE = "CHAOS_RUN"
#: So many that no rollout fails by attrition.
MAX_ATTEMPTS = 20
_DEADLINES = {"register": 30, "tunnel": 30, "sandbox": 30, "setup": 30, "trajectory": 30, "score": 30, "cleanup": 30}


@dataclass(frozen=True)
class Kind:
    """A kind of agent: how many of a hundred are of it, its command, its deadline (s), and which results are right.

    The agents' patience is in their environment.
    """

    share: int
    command: Callable[[str, random.Random], str]
    is_right: Callable[[RolloutResult], bool]
    deadline: float = 60.0


def _completed(turns: int = 0) -> Callable[[RolloutResult], bool]:
    return lambda result: result.stop_condition is StopCondition.COMPLETED and len(result.trajectory) >= turns


def _failed_by_itself(result: RolloutResult) -> bool:
    return result.error is not None and result.error.kind is ErrorKind.AGENT and result.agent_exit_code == 1


def _timed_out(result: RolloutResult) -> bool:
    return result.stop_condition is StopCondition.AGENT_TIMEOUT


KINDS = {
    "quick": Kind(28, lambda agent, rng: "true", _completed()),
    "calls": Kind(26, lambda agent, rng: f"exec {agent} spread {rng.randint(1, 3)} 0.5 $PATIENCE", _completed(1)),
    "long": Kind(24, lambda agent, rng: f"exec {agent} spread 2 {rng.uniform(2, 10):.1f} $PATIENCE", _completed(2)),
    "fails": Kind(8, lambda agent, rng: "echo it fails >&2; exit 1", _failed_by_itself),
    "endless": Kind(7, lambda agent, rng: "exec sleep 600", _timed_out, deadline=5.0),
    "stubborn": Kind(7, lambda agent, rng: f"exec {agent} stubborn {rng.uniform(0.5, 3):.1f}", _completed()),
}


#: All workers serve both.
QUEUES = ("rollouts", "other")


def requests(seed: str, agent: str, token: str, patience: float) -> Iterator[RolloutRequest]:
    """Return requests without end, whose kinds and lengths depend on the seed only.

    ``agent`` runs the agents' script; they try a call again for ``patience`` seconds.
    """
    rng = random.Random(f"agents-{seed}")
    names, shares = list(KINDS), [kind.share for kind in KINDS.values()]
    for number in itertools.count():
        [name] = rng.choices(names, shares)
        kind = KINDS[name]
        yield RolloutRequest.parse(
            {
                "model": "stand-in",
                "example_id": number,
                "queue": QUEUES[number % len(QUEUES)],
                "prompt": "go",
                "info": {"kind": name},
                "run_command": kind.command(agent, rng),
                "max_attempts": MAX_ATTEMPTS,
                "env": {RUN_VARIABLE: token, "PATIENCE": str(patience)},
                "deadlines": {**_DEADLINES, "agent": kind.deadline},
            }
        )


def is_right(result: RolloutResult) -> bool:
    """Whether the rollout came to what its agent does, whatever was broken meanwhile.

    A gateway that is away at the very end, when the rollout is unregistered, is the error of a result that is complete.
    """
    kind = KINDS.get(result.info.get("kind", ""))
    if kind is None:
        return False
    error = result.error
    if error is not None and (error.kind, error.phase) == (ErrorKind.GATEWAY, Phase.CLEANUP):
        condition = StopCondition.AGENT_TIMEOUT if result.agent_timed_out else StopCondition.COMPLETED
        result = result.model_copy(update={"error": None, "stop_condition": condition})
    return kind.is_right(result)
