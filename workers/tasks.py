"""The Celery tasks: thin faces of the fleet."""

from __future__ import annotations

from typing import Any

from celery import Celery, signals

from producer import broker
from producer.contract import RolloutResult
from producer.queues import QUEUE, rollout_queue
from workers.fleet import Fleet
from workers.pool import AsyncTask, Job, current_job


def register_tasks(app: Celery, fleet: Fleet) -> None:
    """Register the fleet's tasks with ``app``."""

    class RolloutTask(AsyncTask):
        """Claims its record on Celery's own thread: a duplicate costs the pool nothing, and no thread has to switch."""

        abstract = True

        def admit(self, job: Job) -> bool:
            """Claim the rollout; from then on its record counts, not its message."""
            carried = _carried(*job.request["args"], **job.request["kwargs"])
            if isinstance(carried, dict):  # it is of the queue on which it came, unless it says otherwise
                name = (job.request.get("delivery_info") or {}).get("routing_key")
                carried = {"queue": rollout_queue(str(name)) or QUEUE, **carried}
            if not fleet.claims.claim(job, carried):
                return False
            job.mark_accepted()
            return True

        def dropped(self, job: Job) -> None:
            """Hand the claim back."""
            fleet.claims.hand_back(job)

    def release(task_id: str, **_: Any) -> None:
        """Whatever became of the result, this attempt is over: its lease must not be renewed."""
        fleet.claims.release(current_job())

    @app.task(base=RolloutTask, name=broker.RUN_ROLLOUT, shared=False)
    async def run_rollout(request: object = None) -> RolloutResult:
        """Run the rollout whose id is the task's id; ``request`` carries it where no producer wrote a record."""
        return await fleet.run(current_job(), request)

    signals.task_postrun.connect(release, sender=run_rollout, weak=False)

    @app.task(name=broker.SWEEP, ignore_result=True, shared=False)
    def sweep_lapsed() -> None:
        """Requeue what dead workers left behind."""
        fleet.sweep()

    @app.task(base=AsyncTask, name=broker.SWEEP_ORPHANS, ignore_result=True, shared=False)
    async def sweep_orphans() -> None:
        """Delete what dead workers and failed clean-ups have left on the platform."""
        await fleet.sweep_orphans()

    @app.task(base=AsyncTask, name=broker.CHECK_TUNNELS, ignore_result=True, shared=False)
    async def check_tunnels() -> None:
        """Have this worker process look after its tunnels; every process is sent one of these."""
        await fleet.check_tunnels()


def _carried(request: object = None) -> object:
    """Return the request of a message that carries one; `TypeError` for arguments that the task does not take."""
    return request
