"""The fixed words of the contract: how a rollout ends, what can fail, the phases, and what a rollout is for."""

from __future__ import annotations

from enum import StrEnum


class StopCondition(StrEnum):
    """Why a rollout ended; the four values of the system that this follows."""

    COMPLETED = "completed"
    AGENT_TIMEOUT = "agent_timeout"
    HAS_ERROR = "has_error"
    CANCELLED = "cancelled"


class Purpose(StrEnum):
    """What a rollout is for: only what trains the policy can become too old for it."""

    TRAIN = "train"
    EVAL = "eval"  #: an evaluation: queued before training, unless the request sets a priority
    FROZEN = "frozen"  #: of another policy than the one that is trained


class ErrorKind(StrEnum):
    """The fixed tree of what can go wrong, named after the part that failed."""

    GATEWAY = "gateway"
    TUNNEL = "tunnel"
    SANDBOX = "sandbox"
    AGENT = "agent"
    MODEL = "model"
    ENVIRONMENT = "environment"
    LEASE = "lease"
    CANCELLED = "cancelled"
    LIMIT = "limit"
    INVALID_REQUEST = "invalid_request"


class Phase(StrEnum):
    """The phases of one attempt, in the order in which they happen."""

    REGISTER = "register"
    TUNNEL = "tunnel"
    SANDBOX = "sandbox"
    SETUP = "setup"
    AGENT = "agent"
    TRAJECTORY = "trajectory"
    SCORE = "score"
    CLEANUP = "cleanup"
