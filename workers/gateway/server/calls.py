"""One model call, from an agent's request to its record."""

from __future__ import annotations

import contextlib
import logging
import time
from dataclasses import dataclass
from typing import Any

import orjson

from workers.gateway.server.answers import check_completion, read_answer, usage_counts
from workers.gateway.server.dialects import Call, Dialect, JsonObject, Native
from workers.gateway.server.dialects.chat import PATH
from workers.gateway.server.dialects.table import CHAT
from workers.gateway.server.errors import UpstreamError
from workers.gateway.server.exchange import Exchange
from workers.gateway.server.gate import Gate
from workers.gateway.server.merge import upstream_fields, who_asked
from workers.gateway.server.metrics import Metrics
from workers.gateway.server.recorder import RecordedRollout
from workers.gateway.server.scan import scan_answer
from workers.gateway.server.turns import Answered, Payload
from workers.gateway.server.upstream import ModelServer
from workers.gateway.server.upstreams import Opened, Upstreams

logger = logging.getLogger(__name__)

#: nginx's status of a client that left before its answer; nobody reads it.
CLIENT_GONE = 499


class _PausedError(Exception):
    """A call's turn has come, and no call may be made now."""


@dataclass(frozen=True)
class CallSettings:
    """``ask_tokens``: ask for token ids and logprobs.

    ``keep_alive``: seconds of silence after which a stream's reader is told that it goes on.
    """

    ask_tokens: bool = True
    keep_alive: float = 15.0


class ModelCall:
    """One call of an agent in one dialect; made when its request was read, and run once."""

    def __init__(self, core: ModelCalls, rollout: RecordedRollout, dialect: Dialect, call: Call) -> None:
        self.core = core
        self.rollout = rollout
        self.dialect = dialect
        self.call = call
        self.native: Native | None = None  # once an upstream is chosen that speaks the dialect
        self.sent = b""
        self.fields = upstream_fields(
            call.chat, rollout.registration, stream=call.stream, ask_tokens=core.settings.ask_tokens
        )
        self.extras = self._extras()
        self.began = time.monotonic()

    @property
    def passes(self) -> bool:
        """Whether the upstream's bytes are the agent's."""
        return self.native is not None or self.dialect is CHAT

    def request(self, server: ModelServer) -> tuple[str, bytes]:
        """Return the path and the body that ``server`` is asked with: in the agent's dialect if it speaks that.

        Notes the policy version that the call is sampled under, for it is sent now. Raises `_PausedError`, and
        `GatewayRefusal` when the rollout was cancelled while the call waited for room.
        """
        gate = self.core.gate
        if gate.is_paused:
            raise _PausedError
        self.rollout.refuse_if_over()
        if gate.version is not None:
            self.extras["policy_version"] = gate.version
        self.native = None
        native = server.native.get(self.dialect.name)
        if native is not None:
            asked = native.body(self.call, self.rollout.registration, ask_tokens=self.core.settings.ask_tokens)
            if asked is not None:
                self.native, self.sent = native, orjson.dumps(asked)
                return native.path, self.sent
        if self.call.stream:
            self.fields["stream"] = True
        self.sent = orjson.dumps(self.fields)
        return PATH, self.sent

    async def whole(self, exchange: Exchange) -> None:
        """Answer a call that is not streamed."""
        waits = self.rollout.lock.locked()
        async with self.rollout.turn():
            if waits and await exchange.is_gone():  # its call would be spent on nobody
                await exchange.answer(CLIENT_GONE, b"")
                return
            self.rollout.begin(self.call.chat["messages"])
            try:
                answer = await self._ask()
            except UpstreamError as error:
                self.failed(error)
                raise
        await exchange.answer(200, answer)

    async def open(self) -> Opened:
        """Make the call once no weight update goes on and there is room; give the answer back with `Upstreams.close`.

        Raises `UpstreamError` and `GatewayRefusal`: 503 when an update takes too long, 409 when the rollout was
        cancelled meanwhile.
        """
        gate = self.core.gate
        while True:
            if gate.is_paused:
                await gate.passed()
                self.rollout.refuse_if_over()  # those that are too old for the new weights were cancelled meanwhile
            with contextlib.suppress(_PausedError):  # while it waited for room
                return await self.core.upstreams.open(self.rollout, self.request)

    def record(self, payload: Payload, *, partial: bool = False, answer_id: str | None = None) -> None:
        """Record the call as answered; ``answer_id`` is the answer's own, where the upstream gave it one."""
        version = self.core.gate.version
        if version is not None and version != self.extras.get("policy_version"):
            self.extras["policy_version_at_end"] = version  # the weights changed under it
        messages = self.call.chat["messages"]
        size = len(self.sent) + len(payload.data)
        if self.native is not None:
            self.extras["native"] = True
        known_as = answer_id or self.call.answer_id
        self.rollout.record(Answered(messages, payload, self.extras, known_as, partial, size))

    def count(self, prompt_tokens: int, completion_tokens: int, outcome: str = "answered") -> None:
        """Count the call in the metrics."""
        metrics = self.core.metrics
        metrics.calls[self.dialect.name, outcome] += 1
        metrics.prompt_tokens += prompt_tokens
        metrics.completion_tokens += completion_tokens
        metrics.seconds.observe(time.monotonic() - self.began)

    def failed(self, error: UpstreamError) -> None:
        """Remember a call that the upstream failed, and log it."""
        self.rollout.record_failure(error.status_code, error.message)
        self.core.metrics.calls[self.dialect.name, error.kind] += 1
        rollout_id, _, attempt = self.rollout.id.partition("~")  # as `workers.state.gateway_id` puts them together
        number = int(attempt) if attempt.isdecimal() else 1
        where = {"rollout_id": rollout_id, "attempt": number, "worker": self.rollout.worker, "stage": "model_call"}
        logger.warning("model call of rollout %s failed: %s", self.rollout.id, error.message, extra=where)

    async def _ask(self) -> bytes:
        """Make the call, record it, and return the agent's answer."""
        opened = await self.open()
        malformed: UpstreamError | None = None
        try:
            body = opened.answer.body()
            return self._recorded(body)
        except UpstreamError as error:
            malformed = error
            raise
        finally:
            self.core.upstreams.close(opened, malformed)

    def _recorded(self, body: bytes) -> bytes:
        if self.dialect is CHAT:
            scan = scan_answer(body)
            self.record(Payload.of(body))
            self.count(scan.prompt_tokens, scan.completion_tokens)
            return body
        if self.native is not None:
            completion, answer = self.native.completion(_object(body)), body
            check_completion(completion)
            self.record(Payload.of(orjson.dumps(completion)), answer_id=completion.get("id"))
        else:
            completion = read_answer(body)
            answer = orjson.dumps(self.dialect.answer(self.call, completion))
            self.record(Payload.of(orjson.dumps(completion)))
        self.count(*usage_counts(completion))
        return answer

    def _extras(self) -> dict[str, Any]:
        extras = who_asked(self.call.chat, self.fields) | self.call.notes
        return extras if self.dialect is CHAT else extras | {"dialect": self.dialect.name}


class ModelCalls:
    """What all model calls share."""

    def __init__(self, upstreams: Upstreams, gate: Gate, settings: CallSettings) -> None:
        self.upstreams = upstreams
        self.gate = gate
        self.metrics: Metrics  # set by whoever makes both
        self.settings = settings

    def read(self, rollout: RecordedRollout, dialect: Dialect, body: bytes) -> ModelCall:
        """Read an agent's request; raises `GatewayRefusal`."""
        return ModelCall(self, rollout, dialect, dialect.read(body, rollout.earlier))


def _object(body: bytes) -> JsonObject:
    try:
        answer = orjson.loads(body)
    except orjson.JSONDecodeError:
        answer = None
    if not isinstance(answer, dict):
        message = "The model's server answered something that cannot be used: it is no JSON object."
        raise UpstreamError(502, message, "upstream_malformed")
    return answer
