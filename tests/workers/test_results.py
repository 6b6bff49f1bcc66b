"""The result backend: what a rollout returns is stored with its record or not at all; other tasks are Celery's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import redis
from celery import Celery, states
from celery.app.task import Context

from producer import broker
from producer.contract import RolloutResult, StopCondition
from workers import results


class Records:
    """A worker that holds one rollout, and notes what is asked of it."""

    def __init__(self) -> None:
        self.commits: list[tuple[str, StopCondition, Any]] = []
        self.cancelled: list[str] = []
        self.failures = 0

    def holds(self, rollout_id: str) -> bool:
        return rollout_id == "held"

    def commit(self, rollout_id: str, outcome: StopCondition, result: bytes, *, error: str = "") -> None:
        if self.failures:
            self.failures -= 1
            raise redis.ConnectionError("away")
        self.commits.append((rollout_id, outcome, broker.decode_result(result)))

    def cancel(self, rollout_id: str) -> None:
        self.cancelled.append(rollout_id)


@pytest.fixture
def app(redis_url: str) -> Iterator[Celery]:
    app = Celery("test", set_as_current=False)
    app.config_from_object(broker.celery_config(redis_url) | {"result_backend": results.PREFIX + redis_url})
    app.rollout_records = Records()
    yield app
    app.close()


RESULT = RolloutResult(rollout_id="held", stop_condition=StopCondition.AGENT_TIMEOUT)
REQUEST = Context(task=broker.RUN_ROLLOUT)


def test_a_held_rollouts_result_goes_through_its_record_and_nowhere_else(app: Celery) -> None:
    app.backend.store_result("held", RESULT, states.SUCCESS, request=REQUEST)

    ((rollout_id, outcome, meta),) = app.rollout_records.commits
    assert (rollout_id, outcome) == ("held", StopCondition.AGENT_TIMEOUT)
    assert (meta["status"], meta["task_id"]) == ("SUCCESS", "held")
    assert RolloutResult.parse(meta["result"]) == RESULT
    assert app.backend.get(app.backend.get_key_for_task("held")) is None


def test_a_fault_of_the_worker_ends_the_rollout_too(app: Celery) -> None:
    app.backend.store_result("held", ValueError("bug"), states.FAILURE, traceback="Traceback ...", request=REQUEST)

    ((_, outcome, meta),) = app.rollout_records.commits
    assert outcome is StopCondition.HAS_ERROR
    assert (meta["status"], meta["result"]["exc_type"]) == ("FAILURE", "ValueError")


@pytest.mark.parametrize("state", [states.RETRY, states.STARTED])
def test_states_on_the_way_do_not_end_a_rollout(app: Celery, state: str) -> None:
    app.backend.store_result("held", ValueError("x"), state, request=REQUEST)
    assert app.rollout_records.commits == []
    assert app.backend.get(app.backend.get_key_for_task("held")) is None


@pytest.mark.parametrize("rollout_id", ["held", "waiting"])
def test_a_revoked_rollout_is_cancelled_by_its_record(app: Celery, rollout_id: str) -> None:
    app.backend.mark_as_revoked(rollout_id, "terminated", request=REQUEST)
    assert app.rollout_records.cancelled == [rollout_id]
    assert app.rollout_records.commits == []


def test_a_commit_is_tried_again_until_redis_answers(app: Celery) -> None:
    app.rollout_records.failures = 2
    app.backend.store_result("held", RESULT, states.SUCCESS, request=REQUEST)
    assert len(app.rollout_records.commits) == 1


def test_other_tasks_results_are_stored_as_celery_does(app: Celery) -> None:
    app.backend.store_result("other", {"any": "thing"}, states.SUCCESS, request=Context(task="other"))
    assert app.AsyncResult("other").get(timeout=30) == {"any": "thing"}
    assert app.rollout_records.commits == []


@pytest.mark.parametrize("odd", [object(), 2**80, "\ud800", float("nan")], ids=["object", "big", "surrogate", "nan"])
def test_a_result_that_is_not_json_still_ends_the_rollout(app: Celery, odd: object) -> None:
    result = RESULT.model_copy(update={"info": {"x": odd}, "attempt": 2})
    app.backend.store_result("held", result, states.SUCCESS, request=REQUEST)

    ((_, outcome, meta),) = app.rollout_records.commits
    stored = RolloutResult.parse(meta["result"])
    assert stored.attempt == 2
    if odd == odd:
        assert outcome is StopCondition.HAS_ERROR
        assert stored.error is not None
        assert "cannot be written as JSON" in stored.error.message
