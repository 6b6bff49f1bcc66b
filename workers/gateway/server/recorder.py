"""What the gateway remembers: the registered rollouts, and the calls of each. Knows no dialect."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import time
from collections import deque
from collections.abc import Iterator
from types import TracebackType
from typing import Any

from workers.gateway.protocol import Registration, RolloutStatus
from workers.gateway.server.answers import Message, as_request, normalise
from workers.gateway.server.errors import FINAL, GatewayRefusal, busy, fault_message, not_found
from workers.gateway.server.integrity import compact, integrity
from workers.gateway.server.log import Kind, Log, NoLog
from workers.gateway.server.turns import Answered, Turn, Turns

MAX_FAILURES = 20
#: Calls of one rollout that may wait for the one that runs; an agent has one at a time, or a few sub-agents.
MAX_WAITING = 64
#: Bytes of requests and answers that are kept as they came, before each new one is made a turn of at once.
MAX_UNSETTLED = 128 * 1024 * 1024
#: Seconds after which a rollout that nobody has asked anything of is forgotten: four times the longest rollout.
REGISTRATION_TTL = 24 * 3600.0


def key_digest(key: str) -> bytes:
    """Return what is kept of a key: enough to recognise it, useless to whoever reads this process's memory."""
    return hashlib.sha256(key.encode()).digest()


class RecordedRollout:
    """One registered rollout: its limits, the hash of its key, its turns and its failed calls.

    ``upstream`` is the model server that answered its last call, where its prefix is cached; whoever chooses servers
    sets it.
    """

    def __init__(
        self, rollout_id: str, registration: Registration, key: bytes | None, *, recorder: Recorder, ttl: float
    ) -> None:
        self.id = rollout_id
        self.registration = registration
        self.key = key
        self.ttl = ttl
        self.failures: deque[dict[str, Any]] = deque(maxlen=MAX_FAILURES)
        self.failed_calls = 0
        self.prompt_tokens = 0
        self.completion_tokens = 0
        self.lock = asyncio.Lock()
        self.upstream: Any = None
        self.worker = ""  # who registered it, where that was told
        self.touched = time.monotonic()
        self.first: list[Message] | None = None
        self.cancelled = False
        self.history = Turns()
        self._pending: list[Answered] = []
        self._recorder = recorder
        self._log = recorder.log
        self._waiting = 0
        self._forgotten = False
        self._abort: asyncio.Timeout | None = None
        self._last_call: float | None = None  # when one ended, in `time.monotonic` seconds

    @property
    def turns(self) -> list[Turn]:
        """The answered calls, in their order."""
        self.settle()
        return self.history.settled

    @property
    def status(self) -> RolloutStatus:
        """Where the rollout stands; a cancelled one stays cancelled."""
        if self.cancelled:
            return RolloutStatus.CANCELLED
        limit = self.registration.max_turns
        return RolloutStatus.COMPLETED if 0 < limit <= self.num_turns else RolloutStatus.ACTIVE

    @property
    def num_turns(self) -> int:
        """How many calls were answered."""
        return len(self.history.settled) + len(self._pending)

    def accepts_key(self, presented: str | None) -> bool:
        """Return whether ``presented`` opens this rollout's model calls; any does when it was registered without."""
        if self.key is None:
            return True
        return presented is not None and hmac.compare_digest(key_digest(presented), self.key)

    def turn(self) -> HeldTurn:
        """Hold the rollout for one model call; calls of one rollout follow each other.

        Raises `GatewayRefusal`: 409 when the rollout is cancelled or completed, 404 when it was unregistered, also
        while the call ran: nobody can read its record then, so the model's time is not spent on it.
        """
        return HeldTurn(self)

    def begin(self, messages: list[Message]) -> None:
        """Note the messages of a call that begins."""
        if self.first is None:
            self.first = messages

    def record(self, answered: Answered) -> None:
        """Add an answered call."""
        self._log.write(
            Kind.CALL,
            {
                "id": self.id,
                "extras": answered.extras,
                "answer_id": answered.answer_id,
                "partial": answered.partial,
                "chunks": answered.answer.chunks,
                "packed": answered.answer.packed,
            },
            answered.messages,
            answered.answer.data,
        )
        self._wait(answered)

    def record_failure(self, status_code: int, message: str) -> None:
        """Remember a call that the upstream, or the gateway itself, failed; it is no turn."""
        failure = {"status": status_code, "message": message, "turns": self.num_turns}
        first = self.first if not self.num_turns else None  # else the turns tell it
        self._log.write(Kind.FAILURE, {"id": self.id, "failure": failure}, first)
        self.add_failure(failure)

    def add_failure(self, failure: dict[str, Any]) -> None:
        """Count a failure."""
        self.failed_calls += 1
        self.failures.append(failure)

    def restore(self, answered: Answered) -> None:
        """Add a call that was answered before the gateway was started again."""
        self.begin(answered.messages)
        self._wait(answered)

    def settle(self) -> None:
        """Make turns of the calls that are kept as they came."""
        while self.settle_one():
            pass

    def settle_part(self) -> bool:
        """Do a millisecond or so of `settle`; return whether there was anything to do."""
        if self._pending and self._pending[0].read_part():
            return True
        return self.settle_one()

    def settle_one(self) -> bool:
        """Make a turn of the oldest of them; return whether there was one."""
        if not self._pending:
            self._recorder.unsettled.pop(self, None)
            return False
        answered = self._pending.pop(0)
        self._recorder.unsettled_bytes -= answered.size
        turn = self.history.settle(answered)
        self.prompt_tokens += turn.prompt_tokens
        self.completion_tokens += turn.completion_tokens
        return True

    def _wait(self, answered: Answered) -> None:
        """Keep a call as it came, unless too many are kept so already."""
        recorder = self._recorder
        self._pending.append(answered)
        recorder.unsettled[self] = None
        recorder.unsettled_bytes += answered.size
        if recorder.unsettled_bytes > MAX_UNSETTLED:
            for _ in range(2):  # two for each that comes, whosever they are: it cannot grow, and nobody waits long
                next(iter(recorder.unsettled), self).settle_one()

    def earlier(self, answer_id: str) -> tuple[list[Message], dict[str, Any]] | None:
        """Return the conversation up to and with an answer, as a chat request has it, and that call's extras."""
        self.settle()
        turn = self.history.answered(answer_id)
        return None if turn is None else ([as_request(each) for each in [*turn.messages, turn.completion]], turn.extras)

    def cancel(self) -> None:
        """Refuse further calls; one in flight ends as usual and is recorded."""
        if not self.cancelled:
            self._log.write(Kind.CANCEL, {"id": self.id})
        self.cancelled = True

    def forget(self) -> None:
        """End the rollout for good, and with it a call in flight."""
        self._log.write(Kind.FORGET, {"id": self.id})
        self.discard()
        self._forgotten = True
        if self._abort is not None and not self._abort.expired():
            self._abort.reschedule(asyncio.get_running_loop().time())

    def discard(self) -> None:
        """Let go of what is kept."""
        self._recorder.unsettled_bytes -= sum(answered.size for answered in self._pending)
        self._recorder.unsettled.pop(self, None)
        self._pending.clear()

    def trajectory(self) -> dict[str, Any]:
        """Build the answer of ``trajectory``.

        ``prompt`` is the first call's messages, failed or not; ``completion`` is the last conversation after them. A
        conversation that became shorter than the first prompt (a compacted context) gives its last completion.
        """
        limit = self.registration.max_seq_len
        turns = list(self.turns)  # those of now: more may come while they are written down
        prompt = [normalise(message) for message in self.first or []]
        completion: list[Message] = []
        if turns:
            last = turns[-1]
            completion = [*last.messages, last.completion][min(len(prompt), len(last.messages)) :]
        return {
            "rollout_id": self.id,
            "status": self.status,
            "num_turns": len(turns),
            "model": self.registration.model,
            "prompt": prompt,
            "completion": completion,
            "is_truncated": any(turn.is_truncated(limit) for turn in turns),
            "trajectory": turns,
            **self._about(),
        }

    def compact(self) -> dict[str, Any]:
        """Build the answer of ``trajectory?format=compact``: see `integrity.compact`."""
        self.settle()
        head = {"rollout_id": self.id, "status": self.status, "num_turns": self.num_turns}
        recorded = compact(self.history, self.registration.max_seq_len)
        return head | {"model": self.registration.model} | recorded | self._about()

    def progress(self) -> dict[str, Any]:
        """Build the answer of ``progress``; takes the same time whatever was recorded."""
        self.settle()
        return {
            "rollout_id": self.id,
            "status": self.status,
            "turns": self.num_turns,
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
        } | self._calls()

    def _about(self) -> dict[str, Any]:
        return {
            "failures": list(self.failures),
            "integrity": integrity(self.history, self.failed_calls),
        } | self._calls()

    def _calls(self) -> dict[str, Any]:
        return {
            "failed_calls": self.failed_calls,
            "in_flight": self._abort is not None,
            "idle_seconds": None if self._last_call is None else time.monotonic() - self._last_call,
        }

    # -- what a held turn does ---------------------------------------------------------------------------------------

    async def enter(self) -> None:
        """Wait until no other call of this rollout runs; raises `GatewayRefusal`."""
        self.refuse_if_over()
        if self.lock.locked():
            if self._waiting >= MAX_WAITING:
                raise busy(f"{MAX_WAITING} calls of this rollout wait already; they are made one at a time.", 1.0)
            self._waiting += 1
            try:
                await self.lock.acquire()
            finally:
                self._waiting -= 1
        else:
            await self.lock.acquire()
        try:
            self.refuse_if_over()  # again: it may have ended while this call waited for its predecessor
            self._abort = asyncio.timeout(None)
            await self._abort.__aenter__()
        except BaseException:
            self._abort = None
            self.lock.release()
            raise

    async def leave(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Let the next call begin."""
        abort, self._abort = self._abort, None
        self._last_call = self.touched = time.monotonic()
        self.lock.release()
        if isinstance(error, Exception) and not isinstance(error, GatewayRefusal):
            self.record_failure(500, fault_message(error))
        assert abort is not None  # noqa: S101 - `enter` set it
        try:
            await abort.__aexit__(kind, error, trace)
        except TimeoutError:
            if not self._forgotten:
                raise
            raise not_found(self.id) from None

    def refuse_if_over(self) -> None:
        """Raise `GatewayRefusal` unless further calls may be made."""
        if self._forgotten:
            raise not_found(self.id)
        if self.status is not RolloutStatus.ACTIVE:
            raise GatewayRefusal(409, f"Rollout {self.status}: {self.id}", headers=FINAL)


class HeldTurn:
    """A rollout, held for one model call; a context manager of its own, as it is entered at every call."""

    __slots__ = ("_rollout",)

    def __init__(self, rollout: RecordedRollout) -> None:
        self._rollout = rollout

    async def __aenter__(self) -> None:
        await self._rollout.enter()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._rollout.leave(kind, error, trace)


class Recorder:
    """The registered rollouts, by id."""

    def __init__(self, log: Log | None = None, ttl: float = REGISTRATION_TTL) -> None:
        self.log = log or NoLog()
        self.ttl = ttl
        self.unsettled: dict[RecordedRollout, None] = {}  # those with answers that are kept as they came, oldest first
        self.unsettled_bytes = 0
        self._rollouts: dict[str, RecordedRollout] = {}

    def __len__(self) -> int:
        return len(self._rollouts)

    def __iter__(self) -> Iterator[RecordedRollout]:
        return iter(list(self._rollouts.values()))

    def register(
        self, rollout_id: str, registration: Registration, key: str | None, ttl: float | None = None
    ) -> RecordedRollout:
        """Add a rollout; raises `GatewayRefusal` (409) when the id is registered already."""
        if rollout_id in self._rollouts:
            raise GatewayRefusal(409, f"Rollout already registered: {rollout_id}", headers=FINAL)
        digest = key_digest(key) if key else None
        about = {"id": rollout_id, "registration": registration.model_dump(mode="json"), "ttl": ttl or self.ttl}
        self.log.write(Kind.REGISTER, about | {"key": digest.hex() if digest else None})
        return self.restore(rollout_id, registration, digest, ttl or self.ttl)

    def restore(self, rollout_id: str, registration: Registration, key: bytes | None, ttl: float) -> RecordedRollout:
        """Add a rollout without noting it; one with the same id is replaced."""
        self.drop(rollout_id)
        rollout = self._rollouts[rollout_id] = RecordedRollout(rollout_id, registration, key, recorder=self, ttl=ttl)
        return rollout

    def drop(self, rollout_id: str) -> None:
        """Remove a rollout without noting it."""
        if (rollout := self._rollouts.pop(rollout_id, None)) is not None:
            rollout.discard()

    def find(self, rollout_id: str) -> RecordedRollout | None:
        """Return a rollout, or None."""
        return self._rollouts.get(rollout_id)

    def get(self, rollout_id: str) -> RecordedRollout:
        """Return a rollout; raises `GatewayRefusal` (404) when it is not registered."""
        rollout = self._rollouts.get(rollout_id)
        if rollout is None:
            raise not_found(rollout_id)
        rollout.touched = time.monotonic()
        return rollout

    def unregister(self, rollout_id: str) -> RecordedRollout:
        """Forget a rollout and return it; raises `GatewayRefusal` (404) when it is not registered."""
        rollout = self.get(rollout_id)
        del self._rollouts[rollout_id]
        rollout.forget()
        return rollout

    def forget_expired(self) -> list[str]:
        """Forget the rollouts that nobody asked anything of for their TTL; a call that runs keeps one."""
        now = time.monotonic()
        expired = [each for each in self if now - each.touched > each.ttl and not each.lock.locked()]
        for rollout in expired:
            del self._rollouts[rollout.id]
            rollout.forget()
        return [rollout.id for rollout in expired]
