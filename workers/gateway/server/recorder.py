"""What the gateway remembers: the registered rollouts, and the turns of each. Knows no dialect and does no I/O."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

from workers.gateway.protocol import Registration, RolloutStatus
from workers.gateway.server.errors import FINAL, GatewayRefusal, fault_message, not_found
from workers.gateway.server.tokens import Tokens

Message = dict[str, Any]

MAX_FAILURES = 20


def key_digest(key: str) -> bytes:
    """Return what is kept of a key: enough to recognise it, useless to whoever reads this process's memory."""
    return hashlib.sha256(key.encode()).digest()


@dataclass(slots=True)
class Turn:
    """One model call that was answered; ``messages`` and ``completion`` in the trajectory's shape of messages."""

    messages: list[Message]
    completion: Message
    finish_reason: str | None = None
    tokens: Tokens | None = None
    extras: dict[str, Any] = field(default_factory=dict)
    partial: bool = False

    def is_truncated(self, max_seq_len: int | None) -> bool:
        """Return whether the model stopped for length, the sequence limit cut it, or the agent left in between."""
        cut = self.tokens is not None and self.tokens.is_cut(max_seq_len)
        return self.partial or self.finish_reason == "length" or cut

    def step(self, max_seq_len: int | None) -> dict[str, Any]:
        """Return the turn as a step of a trajectory."""
        return {
            "prompt": self.messages,
            "completion": [self.completion],
            "tokens": self.tokens.as_dict(max_seq_len) if self.tokens else None,
            "reward": None,
            "advantage": None,
            "is_truncated": self.is_truncated(max_seq_len),
            "trajectory_id": "",
            "extras": self.extras,
        }


class RecordedRollout:
    """One registered rollout: its limits, the hash of its key, its turns and its failed calls."""

    def __init__(self, rollout_id: str, registration: Registration, key: str | None) -> None:
        self.id = rollout_id
        self.registration = registration
        self.turns: list[Turn] = []
        self.failures: deque[dict[str, Any]] = deque(maxlen=MAX_FAILURES)
        self.failed_calls = 0
        self.lock = asyncio.Lock()
        self._prompt: list[Message] | None = None
        self._key = key_digest(key) if key else None
        self._cancelled = False
        self._forgotten = False
        self._abort: asyncio.Timeout | None = None
        self._last_call: float | None = None  # when one ended, in `time.monotonic` seconds

    @property
    def status(self) -> RolloutStatus:
        """Where the rollout stands; a cancelled one stays cancelled."""
        if self._cancelled:
            return RolloutStatus.CANCELLED
        limit = self.registration.max_turns
        return RolloutStatus.COMPLETED if 0 < limit <= len(self.turns) else RolloutStatus.ACTIVE

    def accepts_key(self, presented: str | None) -> bool:
        """Return whether ``presented`` opens this rollout's model calls; any does when it was registered without."""
        if self._key is None:
            return True
        return presented is not None and hmac.compare_digest(key_digest(presented), self._key)

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Hold the rollout for one model call; calls of one rollout follow each other.

        Raises `GatewayRefusal`: 409 when the rollout is cancelled or completed, 404 when it was unregistered, also
        while the call ran: nobody can read its record then, so the model's time is not spent on it.
        """
        self._refuse_if_over()
        async with self.lock:
            self._refuse_if_over()  # again: it may have ended while this call waited for its predecessor
            try:
                async with asyncio.timeout(None) as self._abort:
                    with self._counted_faults():
                        yield
            except TimeoutError:
                if not self._forgotten:
                    raise
                raise not_found(self.id) from None
            finally:
                self._abort = None
                self._last_call = time.monotonic()

    def begin(self, messages: list[Message]) -> list[Message]:
        """Note the messages of a call and return them, sharing those that the turn before it held already.

        An agent sends its whole conversation at each turn; without sharing, n turns would hold n copies of it.
        """
        if self.turns:
            earlier = [*self.turns[-1].messages, self.turns[-1].completion]
            shared = [old if old == new else new for old, new in zip(earlier, messages, strict=False)]
            messages = shared + messages[len(shared) :]
        if self._prompt is None:
            self._prompt = messages
        return messages

    def record(self, turn: Turn) -> None:
        """Add an answered call."""
        self.turns.append(turn)

    def record_failure(self, status_code: int, message: str) -> None:
        """Remember a call that the upstream, or the gateway itself, failed; it is no turn."""
        self.failed_calls += 1
        self.failures.append({"status": status_code, "message": message, "turns": len(self.turns)})

    def cancel(self) -> None:
        """Refuse further calls; one in flight ends as usual and is recorded."""
        self._cancelled = True

    def forget(self) -> None:
        """End the rollout for good, and with it a call in flight."""
        self._forgotten = True
        if self._abort is not None and not self._abort.expired():
            self._abort.reschedule(asyncio.get_running_loop().time())

    def trajectory(self) -> dict[str, Any]:
        """Build the answer of ``trajectory``.

        ``prompt`` is the first call's messages, failed or not; ``completion`` is the last conversation after them. A
        conversation that became shorter than the first prompt (a compacted context) gives its last completion.
        """
        limit = self.registration.max_seq_len
        prompt = self._prompt or []
        completion: list[Message] = []
        if self.turns:
            last = self.turns[-1]
            completion = [*last.messages, last.completion][min(len(prompt), len(last.messages)) :]
        return {
            "rollout_id": self.id,
            "status": self.status,
            "num_turns": len(self.turns),
            "model": self.registration.model,
            "prompt": prompt,
            "completion": completion,
            "is_truncated": any(turn.is_truncated(limit) for turn in self.turns),
            "trajectory": [turn.step(limit) for turn in self.turns],
            "failures": list(self.failures),
            "failed_calls": self.failed_calls,
            "in_flight": self._abort is not None,
            "idle_seconds": None if self._last_call is None else time.monotonic() - self._last_call,
        }

    @contextmanager
    def _counted_faults(self) -> Iterator[None]:
        try:
            yield
        except GatewayRefusal:
            raise
        except Exception as error:
            self.record_failure(500, fault_message(error))
            raise

    def _refuse_if_over(self) -> None:
        if self._forgotten:
            raise not_found(self.id)
        if self.status is not RolloutStatus.ACTIVE:
            raise GatewayRefusal(409, f"Rollout {self.status}: {self.id}", headers=FINAL)


class Recorder:
    """The registered rollouts, by id."""

    def __init__(self) -> None:
        self._rollouts: dict[str, RecordedRollout] = {}

    def __len__(self) -> int:
        return len(self._rollouts)

    def register(self, rollout_id: str, registration: Registration, key: str | None) -> RecordedRollout:
        """Add a rollout; raises `GatewayRefusal` (409) when the id is registered already."""
        if rollout_id in self._rollouts:
            raise GatewayRefusal(409, f"Rollout already registered: {rollout_id}", headers=FINAL)
        rollout = self._rollouts[rollout_id] = RecordedRollout(rollout_id, registration, key)
        return rollout

    def get(self, rollout_id: str) -> RecordedRollout:
        """Return a rollout; raises `GatewayRefusal` (404) when it is not registered."""
        rollout = self._rollouts.get(rollout_id)
        if rollout is None:
            raise not_found(rollout_id)
        return rollout

    def unregister(self, rollout_id: str) -> RecordedRollout:
        """Forget a rollout and return it; raises `GatewayRefusal` (404) when it is not registered."""
        rollout = self.get(rollout_id)
        del self._rollouts[rollout_id]
        rollout.forget()
        return rollout
