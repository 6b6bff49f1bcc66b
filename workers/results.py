"""Celery's Redis result backend, which ends a rollout's record in the same step in which it stores the result.

Stored apart from the record, a result could be written by an attempt that has lost its lease, or be stored and never
announced. Keys and encoding stay Celery's own, so its clients find the result as ever.
"""

from __future__ import annotations

from typing import Any, Protocol

from celery import states
from celery.backends.redis import RedisBackend

from producer import broker
from producer.contract import ErrorInfo, ErrorKind, RolloutResult, StopCondition
from producer.server import passes

#: Goes before the Redis URL in Celery's ``result_backend``.
PREFIX = "workers.results:RolloutBackend+"


class Records(Protocol):
    """What the backend asks of the worker that runs the rollouts."""

    def holds(self, rollout_id: str) -> bool:
        """Whether this worker has claimed the rollout."""
        ...

    def commit(self, rollout_id: str, outcome: StopCondition, result: bytes, *, error: str = "") -> None:
        """End the record of a rollout that this worker holds, unless another attempt owns it by now.

        ``error`` is the kind of the result's error, if it has one.
        """
        ...

    def cancel(self, rollout_id: str) -> None:
        """Cancel a rollout, whoever holds it."""
        ...


class RolloutBackend(RedisBackend):
    """Stores what rollouts return through their record, and everything else as Celery does.

    ``app.rollout_records`` is the worker's `Records`.
    """

    def _store_result(
        self, task_id: str, result: Any, state: str, traceback: Any = None, request: Any = None, **options: Any
    ) -> Any:
        records: Records = self.app.rollout_records
        if state == states.REVOKED and getattr(request, "task", None) == broker.RUN_ROLLOUT:
            # By Celery's `revoke`. One that waits would else wait for ever: every message of it is dropped from now on.
            records.cancel(task_id)
        elif not records.holds(task_id):
            if state == states.FAILURE and getattr(request, "task", None) == broker.RUN_ROLLOUT:
                return result  # whoever holds the rollout now says how it ends
            super()._store_result(task_id, result, state, traceback=traceback, request=request, **options)
        elif state in {states.SUCCESS, states.FAILURE}:
            # A failure is a fault of ours: the producer makes a typed result of it.
            outcome = result.stop_condition if isinstance(result, RolloutResult) else StopCondition.HAS_ERROR
            try:
                encoded = self.encoded(task_id, result, state, traceback, request)
            except Exception as error:  # noqa: BLE001 - pydantic, orjson, or the object that a hook put into the result
                outcome, result = StopCondition.HAS_ERROR, _storable_part(result, error)
                encoded = self.encoded(task_id, result, state, traceback, request)
            records.commit(task_id, outcome, encoded, error=_kind(result))
        return result

    def exception_safe_to_retry(self, exc: Exception) -> bool:
        """Whether to try again what failed so: Celery knows of lost connections alone, and would lose the result."""
        return passes(exc) or bool(super().exception_safe_to_retry(exc))

    def encoded(self, task_id: str, result: Any, state: str, traceback: Any = None, request: Any = None) -> bytes:
        """Return what Celery keeps for a task, as the bytes under its key."""
        meta = self._get_result_meta(result=result, state=state, traceback=traceback, request=request)
        return bytes(self.encode(meta | {"task_id": task_id}))


def _kind(result: Any) -> str:
    error = result.error if isinstance(result, RolloutResult) else None
    return error.kind.value if error else ""


def _storable_part(result: RolloutResult, error: Exception) -> RolloutResult:
    """Return what can be stored of a result into which a hook put something that is not JSON."""
    message = f"the result cannot be written as JSON: {type(error).__name__}: {error}"
    kept = ["rollout_id", "batch_id", "example_id", "group_id", "sample_index", "policy_version", "model"]
    kept += ["environment", "attempt", "worker", "agent_exit_code", "agent_completed", "agent_timed_out"]
    return RolloutResult(
        stop_condition=StopCondition.HAS_ERROR,
        error=ErrorInfo(kind=ErrorKind.ENVIRONMENT, message=message.encode("utf-8", "replace").decode()),
        **{name: getattr(result, name) for name in kept},
    )
