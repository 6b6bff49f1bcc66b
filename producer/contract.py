"""The wire between producers and workers: one request, one result, and errors as data.

Everything that crosses Redis is one of these frozen models, as JSON. A field that a reader does not know is
refused, and so is a ``schema_version`` it was not written for, so a mixed fleet fails loudly instead of guessing.
"""

from __future__ import annotations

import re
import uuid
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, AliasChoices, BaseModel, ConfigDict, Field, field_validator, model_validator

from producer.gateway_url import GatewayUrl
from producer.kinds import ErrorKind, Phase, Purpose, StopCondition
from producer.queues import QUEUE, named
from producer.validation import InvalidRequestError, dump, parse

SCHEMA_VERSION: Literal[1] = 1

#: An id is part of URLs, Redis keys, sandbox names and directory names: nothing in it may need quoting anywhere.
ID_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$"
#: Variables that lead an agent to its own rollout on the gateway, and open it.
_RESERVED = {"OPENAI_API_KEY", "OPENAI_BASE_URL"}
_ENV_NAME = re.compile(r"^[A-Za-z_][A-Za-z0-9_]*$")

Id = Annotated[str, Field(pattern=ID_PATTERN)]
Seconds = Annotated[float, Field(gt=0, le=7 * 24 * 3600, allow_inf_nan=False)]
Message = dict[str, Any]
Step = dict[str, Any]

__all__ = [
    "SCHEMA_VERSION",
    "Deadlines",
    "ErrorInfo",
    "ErrorKind",
    "FailedAttempt",
    "GatewayUrl",
    "InvalidRequestError",
    "Phase",
    "Purpose",
    "Resources",
    "RolloutRequest",
    "RolloutResult",
    "StopCondition",
    "Timing",
]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class Deadlines(_Frozen):
    """Seconds that each phase may take, per attempt.

    A phase that exceeds its deadline ends the attempt with an error whose ``type`` is ``PhaseDeadlineError``, whose
    ``phase`` is that phase, and whose ``kind`` is that of whoever it waited for. The agent's own deadline is an outcome
    instead (`StopCondition.AGENT_TIMEOUT`), because its turns so far are worth keeping.

    Two more bounds are off unless they are set here or by the worker (``ROLLOUTS_IDLE_LIMIT``,
    ``ROLLOUTS_ROLLOUT_LIMIT``). ``idle`` ends an agent that has made no model call for that long, since its start or
    the end of its last one, with an ``AgentStalledError``; a call in flight is not idleness. ``rollout`` ends the whole
    attempt, whatever it is doing, with a ``RolloutLimitError``; only its clean-up, which has a deadline of its own,
    comes after it. Both keep the turns so far, and neither is tried again.
    """

    register_: Seconds = Field(default=30, alias="register")
    tunnel: Seconds = 60
    sandbox: Seconds = 900
    setup: Seconds = 600
    agent: Seconds = 3600
    trajectory: Seconds = 60
    score: Seconds = 600
    cleanup: Seconds = 60
    idle: Seconds | None = None
    rollout: Seconds | None = None

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True, serialize_by_alias=True)

    def of(self, phase: Phase) -> float:
        """Return the deadline of ``phase`` in seconds."""
        return float(self.register_ if phase is Phase.REGISTER else getattr(self, phase.value))


class Resources(_Frozen):
    """What one sandbox is given: cores, gigabytes of memory and disk, and a number of GPUs."""

    cpu_cores: Annotated[float, Field(gt=0, le=256)] = 1.0
    memory_gb: Annotated[float, Field(gt=0, le=4096)] = 2.0
    disk_gb: Annotated[float, Field(gt=0, le=65536)] = 5.0
    gpu_count: Annotated[int, Field(ge=0, le=64)] = 0
    gpu_type: str | None = None

    @model_validator(mode="after")
    def _gpus_have_a_type(self) -> Self:
        if (self.gpu_count > 0) is not (self.gpu_type is not None):
            raise ValueError("gpu_count and gpu_type go together: name the type, such as H100_80GB, or ask for no GPU")
        return self


class ErrorInfo(_Frozen):
    """One failure as data, from the fixed tree of `ErrorKind`.

    ``type`` is the name of the class that was raised, such as ``AgentStalledError`` or ``PhaseDeadlineError``: it tells
    apart what is of one kind; "" where nothing was raised. ``detail`` holds the foreign system's own words: frpc's
    output, or an HTTP status with the head of its body. ``retryable`` says whether another attempt could end
    differently. ``account`` is set when a platform refuses the worker's own account, whatever the request asks for: its
    key, its bill, its quota. ``reason`` says why something was cancelled where that was not its producer's wish:
    ``stale`` or ``overload``.
    """

    kind: ErrorKind
    message: str
    type: str = ""
    retryable: bool = False
    account: bool = False
    phase: Phase | None = None
    detail: str | None = None
    reason: str | None = None

    def __str__(self) -> str:
        where = f" in phase {self.phase}" if self.phase else ""
        return f"{self.kind} error{where}: {self.message}"


class FailedAttempt(_Frozen):
    """An attempt after which the rollout ran again: what failed, and the turns that it had made by then.

    ``counted`` is False for a hand-over, which spends none of ``max_attempts``. ``turns`` is their number, also where
    ``trajectory`` does not hold them: they were too many to keep, or the attempt's worker died.
    """

    attempt: int
    worker: str | None = None
    error: ErrorInfo
    counted: bool = True
    turns: int = 0
    trajectory: list[Step] = Field(default_factory=list)


class Timing(_Frozen):
    """When the attempt began (Unix seconds) and how long it took (milliseconds), as the followed system names them."""

    start_time: float = 0.0
    generation_ms: float = 0.0
    scoring_ms: float = 0.0
    total_ms: float = 0.0


def new_rollout_id() -> str:
    """Return a fresh random rollout id."""
    return f"rollout_{uuid.uuid4().hex}"


class RolloutRequest(_Frozen):
    """One rollout to run: which agent, on which example, with which model, under which limits.

    One whose ``purpose`` is ``eval`` is queued with priority 0 where it sets none. Of several ``gateway_urls`` the
    fleet takes the one that runs the fewest rollouts, for all attempts, and with ``share_gateway`` for the whole group.
    ``use_gateway`` False has the worker itself serve the agent's model calls, where the worker's settings decide if
    it is None. ``team_id`` and ``advanced`` go to the sandbox platform as they are.
    Sources: the field names follow the rollout gateway mixin's state and the prime-rl gateway's registration body.
    Raises `InvalidRequestError` from `parse` for anything that does not fit.
    """

    MAX_BYTES: ClassVar[int] = 16 * 1024 * 1024

    schema_version: Literal[1] = SCHEMA_VERSION
    rollout_id: Id = Field(default_factory=new_rollout_id)

    # what it belongs to
    batch_id: Id = "default"
    example_id: int | str = 0
    group_id: Id | None = None
    sample_index: Annotated[int, Field(ge=0)] = 0
    policy_version: Annotated[int, Field(ge=0, lt=2**53)] | None = None
    purpose: Purpose = Purpose.TRAIN
    labels: tuple[str, ...] = ()
    priority: Annotated[int, Field(ge=0, le=9)] = 3
    queue: Annotated[str, AfterValidator(named)] = QUEUE  #: that of the pool of workers which is to run it
    max_attempts: Annotated[int, Field(ge=1, le=100)] = 3
    retry_agent: bool = False  #: an agent that exits with an error is run again, and is no result before the last time

    # the task
    environment: Annotated[str, Field(min_length=1, max_length=200)] = "command"
    environment_args: dict[str, Any] = Field(default_factory=dict)
    prompt: str | list[Message] = Field(default="", validation_alias=AliasChoices("prompt", "messages"))
    answer: Any = None
    info: dict[str, Any] = Field(default_factory=dict)

    # the model
    model: Annotated[str, Field(min_length=1, max_length=500)]
    sampling_params: dict[str, Any] = Field(default_factory=dict)
    max_turns: int = -1
    max_seq_len: Annotated[int, Field(gt=0)] | None = None
    gateway_url: GatewayUrl | None = None
    gateway_urls: tuple[GatewayUrl, ...] = ()
    share_gateway: bool = False
    use_gateway: bool | None = None

    # the sandbox
    image: str | None = None
    start_command: str | None = None
    run_command: str | None = None
    resources: Resources = Field(default_factory=Resources)
    env: dict[str, str] = Field(default_factory=dict)
    secret_env: tuple[str, ...] = ()
    team_id: str | None = None
    advanced: dict[str, Any] = Field(default_factory=dict)

    deadlines: Deadlines = Field(default_factory=Deadlines)

    @model_validator(mode="before")
    @classmethod
    def _evaluation_first(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("purpose") == Purpose.EVAL and "priority" not in data:
            return data | {"priority": 0}
        return data

    @field_validator("env", "secret_env")
    @classmethod
    def _env_names(cls, value: dict[str, str] | tuple[str, ...]) -> dict[str, str] | tuple[str, ...]:
        for name in value:
            if not _ENV_NAME.fullmatch(name):
                raise ValueError(f"{name!r} is not an environment variable's name")
        if isinstance(value, dict):
            for name, text in value.items():
                if "\x00" in text:
                    raise ValueError(f"the value of {name} holds a NUL byte, which no process can be given")
        return value

    @model_validator(mode="after")
    def _secrets_are_names_only(self) -> Self:
        if reserved := sorted(_RESERVED & set(self.secret_env)):
            raise ValueError(f"{', '.join(reserved)}: given in secret_env, but it is what each rollout gets of its own")
        both = sorted(set(self.env) & set(self.secret_env))
        if both:
            raise ValueError(f"{', '.join(both)}: given in env and in secret_env; a secret is given by its name only")
        return self

    @model_validator(mode="after")
    def _one_gateway(self) -> Self:
        if self.gateway_url and self.gateway_urls:
            raise ValueError("gateway_url and gateway_urls exclude each other: name one gateway, or several")
        if self.use_gateway is False and (self.gateway_url or self.gateway_urls):
            raise ValueError("gateway_url is given, and use_gateway is false: a rollout uses a gateway or none")
        return self

    @property
    def may_become_stale(self) -> bool:
        """Whether it is of no use once its policy version is too old."""
        return self.policy_version is not None and self.purpose is Purpose.TRAIN

    @property
    def messages(self) -> list[Message]:
        """The prompt as a list of chat messages."""
        if isinstance(self.prompt, str):
            return [{"role": "user", "content": self.prompt}] if self.prompt else []
        return self.prompt

    @classmethod
    def parse(cls, data: object) -> Self:
        """Validate ``data`` (a mapping, or JSON as str or bytes) into a request.

        Raises:
            InvalidRequestError: one sentence per wrong field: its name, what came, what would be right.
        """
        return parse(cls, data, "request", SCHEMA_VERSION)

    def to_json(self) -> bytes:
        """Return the request as JSON, without the fields that hold their default."""
        keep = {"schema_version": self.schema_version, "rollout_id": self.rollout_id}
        try:
            data = dump(self.model_dump(mode="json", exclude_defaults=True) | keep)
        except (TypeError, ValueError) as error:  # pydantic's and orjson's errors are among these
            raise InvalidRequestError(f"rollout {self.rollout_id}: cannot be written as JSON: {error}") from None
        if len(data) > self.MAX_BYTES:
            raise InvalidRequestError(
                f"rollout {self.rollout_id}: the request is {len(data)} bytes, more than {self.MAX_BYTES}; "
                "give large inputs by reference, and let the environment's setup fetch them"
            )
        return data


class RolloutResult(_Frozen):
    """How one rollout ended: its trajectory, its score, and everything needed to understand a failure.

    The first block of fields are the state keys of the rollout gateway mixin, under their own names. ``trajectory`` is
    a list of steps ``{prompt, completion, tokens, reward, advantage, is_truncated, trajectory_id, extras}`` with
    ``tokens`` either null or ``{prompt_ids, prompt_mask, completion_ids, completion_mask, completion_logprobs,
    overlong_prompt, is_truncated, routed_experts}``, as the gateway recorded them. ``integrity`` is what the bundled
    gateway checked of it (``ok``, ``problems``, ``partings``, ``branches``, ``unchecked``), None where no gateway told:
    a trainer leaves out what is not ``ok``. ``durations`` are seconds per phase. ``episode`` is what an environment
    answered that runs whole episodes by itself, in a form of its own.
    """

    schema_version: Literal[1] = SCHEMA_VERSION
    rollout_id: str
    gateway_url: str | None = None
    rollout_base_url: str | None = None
    tunnel_url: str | None = None
    tunnel_local_addr: str | None = None
    tunnel_id: str | None = None
    sandbox_id: str | None = None
    agent_completed: bool = False
    agent_exit_code: int | None = None
    agent_stdout: str = ""
    agent_stderr: str = ""
    agent_timed_out: bool = False
    trajectory: list[Step] = Field(default_factory=list)
    prompt: list[Message] = Field(default_factory=list)
    completion: list[Message] = Field(default_factory=list)
    is_truncated: bool = False
    integrity: dict[str, Any] | None = None
    episode: dict[str, Any] | None = None
    stop_condition: StopCondition
    error: ErrorInfo | None = None
    timing: Timing = Field(default_factory=Timing)

    reward: float | None = None
    metrics: dict[str, float] = Field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    failed_attempts: tuple[FailedAttempt, ...] = ()
    attempt: int = 0
    worker: str | None = None
    #: Older than ``max_off_policy_steps`` allow, when it was delivered.
    stale: bool = False
    durations: dict[str, float] = Field(default_factory=dict)

    # the request's identity, so that a result can be used without looking its request up
    batch_id: str = "default"
    example_id: int | str = 0
    group_id: str | None = None
    sample_index: int = 0
    policy_version: int | None = None
    purpose: Purpose = Purpose.TRAIN
    environment: str = ""
    model: str = ""
    answer: Any = None
    info: dict[str, Any] = Field(default_factory=dict)

    @property
    def completed(self) -> bool:
        """Whether the agent ran to its end and nothing failed."""
        return self.stop_condition is StopCondition.COMPLETED

    @classmethod
    def for_request(cls, request: RolloutRequest, stop_condition: StopCondition, **fields: Any) -> Self:
        """Build the result of ``request``, with its identity fields copied."""
        identity = {
            "rollout_id": request.rollout_id,
            "batch_id": request.batch_id,
            "example_id": request.example_id,
            "group_id": request.group_id,
            "sample_index": request.sample_index,
            "policy_version": request.policy_version,
            "purpose": request.purpose,
            "environment": request.environment,
            "model": request.model,
            "answer": request.answer,
            "info": request.info,
        }
        return cls(stop_condition=stop_condition, **(identity | fields))

    @classmethod
    def parse(cls, data: object) -> Self:
        """Validate ``data`` (a mapping, or JSON as str or bytes) into a result; raises `InvalidRequestError`."""
        return parse(cls, data, "result", SCHEMA_VERSION)

    def to_json(self) -> bytes:
        """Return the whole result as one JSON object."""
        return dump(self.model_dump(mode="json"))

    def __repr__(self) -> str:
        """Return a short form: trajectories run to megabytes, and Celery logs and sends what a task returns."""
        shown = f"{self.rollout_id} {self.stop_condition} turns={len(self.trajectory)} reward={self.reward}"
        return f"<RolloutResult {shown}{f' error={self.error.kind}' if self.error else ''}>"

    __str__ = __repr__
