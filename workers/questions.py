"""What is asked of worker processes through Redis: how far rollouts have come, a rollout's log lines, and to drain.

A question is an entry of the stream in which every lease keeper watches for cancellations. It has a token for its
answers (``ask``), and is for all workers unless it names one. So it needs no way to the workers but Redis, and not
Celery's remote control, which a worker that waits for its broker does not hear.
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Mapping
from typing import Any

import orjson

from producer import broker
from workers.recent import RecentLines

logger = logging.getLogger(__name__)


class Questions:
    """Answers for one worker process, on its lease keeper's thread.

    ``progress(token, rollout_ids)`` answers how far rollouts have come, later; ``drain`` has the process end as SIGTERM
    does.
    """

    def __init__(
        self,
        client: Any,
        worker: str,
        *,
        recent: RecentLines,
        drain: Callable[[], object],
        progress: Callable[[str, list[str]], object],
    ) -> None:
        self._client = client
        self._worker = worker
        self._recent = recent
        self._drain = drain
        self._progress = progress

    def answer(self, asked: Mapping[bytes, bytes]) -> None:
        """Answer one question; what is not understood, or is for another worker, is passed over."""
        fields = {name.decode(): value.decode(errors="replace") for name, value in asked.items()}
        if fields.get("worker", self._worker) != self._worker:
            return
        token = fields["ask"]
        match fields.get("what"):
            case None:
                self._progress(token, fields["rollouts"].split())
            case "logs":
                self._reply(token, {"lines": self._recent.of(fields["rollout"])})
            case "drain":
                logger.warning("an operator has this worker drain", extra={"stage": "drain"})
                self._reply(token, {"draining": True})
                self._drain()

    def _reply(self, token: str, said: dict[str, Any]) -> None:
        send_answer(self._client, token, said | {"worker": self._worker})


def send_answer(client: Any, token: str, answer: Mapping[str, Any]) -> None:
    """Leave an answer to the question with this token, for as long as somebody may fetch it."""
    pipe = client.pipeline(transaction=True)
    pipe.rpush(broker.answer_key(token), orjson.dumps(answer))
    pipe.expire(broker.answer_key(token), broker.ANSWER_TTL)
    pipe.execute()


def drain_this_process() -> None:
    """Send the main thread what Kubernetes sends: it is where the worker handles signals."""
    main = threading.main_thread().ident
    assert main is not None  # noqa: S101 - it runs as long as this process
    signal.pthread_kill(main, signal.SIGTERM)
