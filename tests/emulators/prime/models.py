"""The bodies that the platform accepts, to the letter: an unknown field is refused, as is a missing one."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

#: A sandbox lives for a day at most.
MAX_TIMEOUT_MINUTES = 24 * 60
MAX_BATCH = 100

Text = Annotated[str, StringConstraints(min_length=1)]
VariableName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
Variables = dict[VariableName, str]
JobId = Annotated[str, StringConstraints(pattern=r"^[0-9A-Fa-f]{8}$")]


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class StartCommand(Body):
    executable: Text
    args: list[str] = Field(default_factory=list)


class VolumeMount(Body):
    name: Text
    mount_path: Text
    read_only: bool = False


class CreateSandbox(Body):
    """``POST /sandbox``. The defaults are the platform's own."""

    name: Text
    docker_image: Text | None = None
    checkpoint_id: Annotated[str, StringConstraints(min_length=1, max_length=64)] | None = None
    arch: Literal["amd64", "arm64"] | None = None
    start_command: StartCommand | None = None
    cpu_cores: float = Field(1.0, gt=0)
    memory_gb: float = Field(1.0, gt=0)
    disk_size_gb: float | None = Field(None, gt=0)
    gpu_count: int = Field(0, ge=0)
    gpu_type: Text | None = None
    network_allowlist: list[str] | None = None
    network_denylist: list[str] | None = None
    timeout_minutes: int = Field(60, ge=1, le=MAX_TIMEOUT_MINUTES)
    idle_timeout_minutes: int | None = Field(None, ge=1)
    environment_vars: Variables | None = None
    secrets: Variables | None = None
    labels: list[Text] = Field(default_factory=list)
    team_id: Text | None = None
    region: Text | None = None
    advanced_configs: dict[str, Any] | None = None
    idempotency_key: Text | None = None
    volumes: list[VolumeMount] | None = None
    vm: Literal[True] = True

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if bool(self.docker_image) == bool(self.checkpoint_id):
            raise ValueError("exactly one of docker_image and checkpoint_id is required")
        if self.gpu_count > 0 and not self.gpu_type:
            raise ValueError("gpu_type is required when gpu_count is greater than 0")
        if self.gpu_count == 0 and self.gpu_type is not None:
            raise ValueError("gpu_type requires gpu_count greater than 0")
        if self.network_allowlist is not None and self.network_denylist is not None:
            raise ValueError("network_allowlist and network_denylist are mutually exclusive")
        if self.idle_timeout_minutes is not None and self.idle_timeout_minutes > self.timeout_minutes:
            raise ValueError("idle_timeout_minutes must be <= timeout_minutes")
        return self


class SandboxIds(Body):
    """``POST /sandbox/status:batchGet``."""

    sandbox_ids: list[Text] = Field(min_length=1, max_length=MAX_BATCH)

    @model_validator(mode="after")
    def _unique(self) -> Self:
        if len(set(self.sandbox_ids)) < len(self.sandbox_ids):
            raise ValueError("sandbox_ids must be unique")
        return self


class JobKey(Body):
    sandbox_id: Text
    job_id: JobId


class JobKeys(Body):
    """``POST /sandbox/background-jobs/status:batchGet``."""

    jobs: list[JobKey] = Field(min_length=1, max_length=MAX_BATCH)

    @model_validator(mode="after")
    def _unique(self) -> Self:
        if len({(job.sandbox_id, job.job_id) for job in self.jobs}) < len(self.jobs):
            raise ValueError("jobs must be unique")
        return self


class BulkDeleteSandboxes(Body):
    """``DELETE /sandbox``."""

    sandbox_ids: list[Text] | None = Field(None, min_length=1, max_length=MAX_BATCH)
    labels: list[Text] | None = Field(None, min_length=1)
    team_id: Text | None = None
    user_id: Text | None = None
    all_users: bool = False

    @model_validator(mode="after")
    def _selects(self) -> Self:
        if not self.sandbox_ids and not self.labels:
            raise ValueError("sandbox_ids or labels is required")
        return self


class CreateTunnel(Body):
    """``POST /tunnel``."""

    local_port: int = Field(ge=1, le=65535)
    name: Text | None = None
    team_id: Text | None = Field(None, alias="teamId")
    labels: list[Text] = Field(default_factory=list)
    http_user: Text | None = None


class BulkDeleteTunnels(Body):
    """``DELETE /tunnel``."""

    tunnel_ids: list[Text] | None = Field(None, min_length=1, max_length=MAX_BATCH)
    labels: list[Text] | None = Field(None, min_length=1)
    status: Literal["pending", "connected", "disconnected", "expired", "terminated"] | None = None
    team_id: Text | None = Field(None, alias="teamId")
    user_id: Text | None = Field(None, alias="userId")
    all_users: bool = False

    @model_validator(mode="after")
    def _selects(self) -> Self:
        if self.status and self.tunnel_ids:
            raise ValueError("status cannot be combined with tunnel_ids")
        if self.all_users and not self.team_id:
            raise ValueError("all_users requires teamId")
        if not (self.tunnel_ids or self.labels or self.status or self.all_users):
            raise ValueError("tunnel_ids, labels, status or all_users is required")
        return self
