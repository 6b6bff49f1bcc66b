"""The worker's half of models that drive the fleet's scripts step by step, on a real server, without processes."""

from __future__ import annotations

from celery import Celery

from producer import RolloutResult, StopCondition, broker
from producer.queues import queue_keys
from workers import results
from workers.jobs import Claim, JobStore
from workers.sweep import sweep

NAME = "w"
QUEUES = ("rollouts", "gpu")


def backend_app(redis_url: str) -> Celery:
    """Return an app that stores results as workers do; to be closed."""
    app = Celery("test", set_as_current=False)
    app.config_from_object(broker.celery_config(redis_url) | {"result_backend": results.PREFIX + redis_url})
    return app


class ModelWorker:
    """Takes messages, claims and ends rollouts when it is told to; ``running`` are those that it believes it holds."""

    def __init__(self, store: JobStore, app: Celery) -> None:
        self._store = store
        self._app = app
        self.running: dict[str, Claim] = {}

    def serve_one(self) -> bool:
        """Take the next message, and claim its rollout if that can be; returns whether there was a message."""
        for key in (key for queue in QUEUES for key in queue_keys(queue)):
            message = self._store.client.rpop(key)
            if message is not None:
                rollout_id = message.split(b'"id":"')[1].split(b'"')[0].decode()
                claim = self._store.claim(rollout_id, NAME)
                if isinstance(claim, Claim):
                    self.running[rollout_id] = claim
                return True
        return False

    def end(self, rollout_id: str) -> bool:
        """End a rollout, as cancelled where that was asked for; returns whether that was recorded."""
        claim = self.running.pop(rollout_id)
        marked = self._store.client.hget(broker.job_key(rollout_id), "cancel")
        stop = StopCondition.CANCELLED if marked else StopCondition.COMPLETED
        result = RolloutResult.for_request(claim.parsed(), stop, attempt=claim.attempt)
        encoded = self._app.backend.encoded(rollout_id, result, "SUCCESS")
        ended = self._store.commit(rollout_id, claim.attempt, claim.batch_id, stop, encoded)
        again = self._store.commit(rollout_id, claim.attempt, claim.batch_id, stop, encoded)
        assert bool(ended) == bool(again), "told so again, it says the same"
        return bool(ended)

    def end_all(self) -> None:
        """End all that runs."""
        for rollout_id in list(self.running):
            self.end(rollout_id)

    def sweep(self) -> None:
        """Look for what dead workers left, however short the last look is ago."""
        self._store.client.delete(broker.SWEPT)
        sweep(self._store, self._app)
