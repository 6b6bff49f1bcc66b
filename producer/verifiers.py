"""Results as verifiers knows them: the ``State`` of 0.1, and the trace of its v1 package. verifiers is not imported.

Sources: ``State`` and ``TrajectoryStep`` in ``verifiers/types.py`` of 0.1; ``Trace`` in ``verifiers/v1/trace.py`` and
``MessageNode`` in ``verifiers/v1/graph.py`` of 0.4.0.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import orjson

from producer.contract import ErrorInfo, Message, RolloutResult, Step
from producer.experts import Experts
from producer.kinds import Phase, Purpose, StopCondition

TRACE_VERSION = 1
_STATE_FIELDS = (
    *("rollout_id", "gateway_url", "rollout_base_url", "tunnel_url", "tunnel_local_addr", "tunnel_id", "sandbox_id"),
    *("agent_completed", "agent_exit_code", "agent_stdout", "agent_stderr", "agent_timed_out"),
    *("model", "prompt", "answer", "info", "example_id", "is_truncated", "completion", "reward", "integrity"),
)
_STEP_FIELDS = ("prompt", "completion", "tokens", "reward", "advantage", "is_truncated", "trajectory_id", "extras")
_INFO_FIELDS = ("batch_id", "group_id", "sample_index", "policy_version", "stale", "integrity")
#: Which of our phases make up each of a trace's spans, in the order in which they happen.
_SPANS = {
    "boot": (Phase.REGISTER, Phase.TUNNEL, Phase.SANDBOX),
    "setup": (Phase.SETUP,),
    "agent": (Phase.AGENT,),
    "finalize": (Phase.TRAJECTORY,),
    "scoring": (Phase.SCORE,),
}
_STOPPED = {StopCondition.COMPLETED: "agent_completed", StopCondition.CANCELLED: "cancelled"}


def to_verifiers(result: RolloutResult) -> dict[str, Any]:
    """Return a result as verifiers 0.1's ``State``: a dictionary, of which nothing is shared with the result.

    ``trajectory`` is a list of its ``TrajectoryStep``; their ``response``, the model's raw answer, is None. ``error``
    is a sentence, or None.
    """
    state = {name: getattr(result, name) for name in _STATE_FIELDS}
    task = result.environment
    state["input"] = {name: state[name] for name in ("prompt", "answer", "info", "example_id")} | {"task": task}
    state |= {
        "task": task,
        "trajectory": [_step(step) for step in result.trajectory],
        "trajectory_id": next((str(step.get("trajectory_id")) for step in result.trajectory), result.rollout_id),
        "is_completed": True,
        "stop_condition": result.stop_condition.value,
        "metrics": dict(result.metrics),
        "timing": result.timing.model_dump(),
        "error": str(result.error) if result.error else None,
        "advantage": None,
        "sampling_args": None,
        "tool_defs": [],
        "usage": _usage(result.trajectory),
    }
    copied: dict[str, Any] = orjson.loads(orjson.dumps(state, option=orjson.OPT_NON_STR_KEYS))
    return copied


def to_verifiers_trace(result: RolloutResult) -> dict[str, Any]:
    """Return a result as a v1 trace: what ``verifiers.v1.WireTrace.model_validate`` reads.

    Its message graph has each message once, and a branch wherever the agent went on from something else than before,
    or where the tokens of a prompt do not begin with those of the turn before it. The tokens along the way to a turn's
    answer are exactly its ``prompt_ids + completion_ids``; those between two answers stand with the second, for the
    gateway does not say which of them are of which message. It is plain JSON but for ``routed_experts`` of nodes, which
    are there where the model server gave them: bytes, as on verifiers' own wire.
    """
    graph = _Graph()
    calls = [graph.add(step, result.model) for step in result.trajectory]
    prompt = [_message(message) for message in result.prompt]
    stopped = _STOPPED.get(result.stop_condition, result.stop_condition.value)
    data = {"id": str(result.example_id), "prompt": prompt or None, "answer": result.answer}
    if isinstance(result.example_id, int):
        data["idx"] = result.example_id
    trace = {
        "version": TRACE_VERSION,
        "id": result.rollout_id,
        "task": {"type": result.environment, "data": data, "key": str(result.example_id)},
        "agent": {"config": {"model": result.model}, "trainable": result.purpose is Purpose.TRAIN},
        "nodes": graph.nodes,
        "calls": calls,
        "rewards": {} if result.reward is None else {"reward": {"score": result.reward, "weight": 1.0}},
        "metrics": result.metrics,
        "info": {
            **result.info,
            **{name: getattr(result, name) for name in _INFO_FIELDS},
        },
        "is_completed": True,
        "ok": result.completed,
        "stop_condition": "max_total_tokens" if result.completed and result.is_truncated else stopped,
        "is_timeout": result.stop_condition is StopCondition.AGENT_TIMEOUT,
        "errors": [_error(error) for error in _errors(result)],
        "timing": _timing(result),
    }
    copied: dict[str, Any] = orjson.loads(orjson.dumps(trace, option=orjson.OPT_NON_STR_KEYS))
    for node, experts in graph.experts.items():
        copied["nodes"][node]["routed_experts"] = experts.as_node()
    return copied


def _step(step: Step) -> Step:
    return {name: step.get(name) for name in _STEP_FIELDS} | {"response": None, "extras": step.get("extras") or {}}


def _usage(steps: Iterable[Step]) -> dict[str, float]:
    tokens = [step.get("tokens") or {} for step in steps]
    return {
        "input_tokens": float(sum(len(found.get("prompt_ids") or ()) for found in tokens)),
        "output_tokens": float(sum(len(found.get("completion_ids") or ()) for found in tokens)),
    }


def _errors(result: RolloutResult) -> Iterable[ErrorInfo]:
    yield from (attempt.error for attempt in result.failed_attempts)
    if result.error is not None:
        yield result.error


def _error(error: ErrorInfo) -> dict[str, Any]:
    return {"type": error.type or error.kind.value, "message": error.message, "traceback": error.detail}


def _timing(result: RolloutResult) -> dict[str, Any]:
    """Lay the phases' durations one behind the other: when each began is not kept."""
    at = result.timing.start_time
    timing: dict[str, Any] = {"start": at}
    for span, phases in _SPANS.items():
        took = sum(result.durations.get(phase.value, 0.0) for phase in phases)
        timing[span] = {"start": at, "end": at + took} if took else {}
        at += took
    return timing


class _Graph:
    """A trace's nodes: each message once, with the one before it as its parent."""

    def __init__(self) -> None:
        self.nodes: list[dict[str, Any]] = []
        self.experts: dict[int, Experts] = {}
        self._children: dict[tuple[int | None, bytes], list[int]] = {}

    def add(self, step: Step, model: str) -> dict[str, Any]:
        """Add a turn's messages, those that are there excepted; returns its model call."""
        prompt = step.get("prompt") or []
        asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        tokens = step.get("tokens") or {}
        prompt_ids, completion_ids = tokens.get("prompt_ids") or [], tokens.get("completion_ids") or []
        messages = [_message(message) for message in asked]
        known_to, known, length = self._longest(messages, prompt_ids)
        parent = known_to
        for message in messages[known:]:
            parent = self._put(parent, message)
        answers = [_message(message, sampled=True) for message in step.get("completion") or []]
        node = parent
        for message in answers or [{"role": "assistant", "content": ""}]:
            node = self._put(node, message, sampled=message["role"] == "assistant")
        assert node is not None  # noqa: S101
        mask = [bool(bit) for bit in tokens.get("completion_mask") or [1] * len(completion_ids)]
        logprobs = tokens.get("completion_logprobs") or []
        self.nodes[node] |= {
            "token_ids": [*prompt_ids[length:], *completion_ids],
            "mask": [*[False] * (len(prompt_ids) - length), *mask],
            "logprobs": [value for value, bit in zip(logprobs, mask, strict=False) if bit],
        }
        if experts := Experts.of(tokens.get("routed_experts")):
            self._attribute(experts, known_to, node, length)
        call: dict[str, Any] = {"node": node, "model": model}
        if step.get("is_truncated"):
            call["finish_reason"] = "length"
        if tokens:
            call["usage"] = {"prompt_tokens": len(prompt_ids), "completion_tokens": len(completion_ids)}
        return call

    def _attribute(self, experts: Experts, known_to: int | None, node: int, length: int) -> None:
        """Give a turn's node its rows, and the last token before it, which no model had seen by then, the right one."""
        before = known_to
        while before is not None and not self.nodes[before]["token_ids"]:
            before = self.nodes[before].get("parent")
        if before in self.experts:
            self.experts[before] = self.experts[before].corrected(experts, length - 1)
        if rows := experts.of_tokens(length, len(self.nodes[node]["token_ids"])):
            self.experts[node] = rows

    def _longest(self, messages: list[Message], prompt_ids: list[int]) -> tuple[int | None, int, int]:
        """Return the last node of the longest known way that begins as this prompt does, its messages and tokens."""
        best: tuple[int | None, int, int] = (None, 0, 0)
        ways: list[tuple[int | None, int]] = [(None, 0)]
        for depth, message in enumerate(messages, start=1):
            ways = [way for node, length in ways for way in self._next(node, length, message, prompt_ids)]
            if not ways:
                break
            # Of those with the same messages, what has most of the prompt's tokens.
            node, length = max(ways, key=lambda way: way[1])
            best = (node, depth, length)
        return best

    def _next(
        self, parent: int | None, length: int, message: Message, prompt_ids: list[int]
    ) -> Iterable[tuple[int, int]]:
        for node in self._children.get((parent, _key(message)), ()):
            ids = self.nodes[node]["token_ids"]
            if not ids or not prompt_ids or prompt_ids[length : length + len(ids)] == ids:
                yield node, length + len(ids)

    def _put(self, parent: int | None, message: Message, *, sampled: bool = False) -> int:
        node: dict[str, Any] = {"message": message, "sampled": sampled, "token_ids": [], "mask": [], "logprobs": []}
        if parent is not None:
            node["parent"] = parent
        self.nodes.append(node)
        self._children.setdefault((parent, _key(message)), []).append(len(self.nodes) - 1)
        return len(self.nodes) - 1


def _key(message: Message) -> bytes:
    """Return what two messages have in common that say the same: agents write the arguments of calls anew."""
    same = dict(message)
    if calls := message.get("tool_calls"):
        same["tool_calls"] = [call | {"arguments": _parsed(call["arguments"])} for call in calls]
    return orjson.dumps(same, option=orjson.OPT_SORT_KEYS)


def _parsed(arguments: str) -> Any:
    try:
        return orjson.loads(arguments)
    except ValueError:
        return arguments


# -- messages ----------------------------------------------------------------------------------------------------------


def _message(message: Message, *, sampled: bool = False) -> Message:
    """Return a chat message of the OpenAI API in v1's form, whatever an agent or a model has written there."""
    role, content = str(message.get("role")), message.get("content")
    if sampled or role == "assistant":
        found: Message = {"role": "assistant", "content": _text(content) or None}
        if reasoning := message.get("reasoning_content") or message.get("reasoning"):
            found["reasoning_content"] = _text(reasoning)
        calls = message.get("tool_calls")
        if isinstance(calls, list) and calls:
            found["tool_calls"] = [_call(call) for call in calls if isinstance(call, dict)]
        return found
    if role in {"tool", "function"}:
        called = str(message.get("tool_call_id") or message.get("name") or "")
        return {"role": "tool", "tool_call_id": called, "content": _content(content)}
    return {"role": "system" if role in {"system", "developer"} else "user", "content": _content(content)}


def _call(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    named = function if isinstance(function, dict) else call
    arguments = named.get("arguments")
    text = arguments if isinstance(arguments, str) else orjson.dumps(arguments or {}).decode()
    return {"id": str(call.get("id") or ""), "name": str(named.get("name") or ""), "arguments": text}


def _content(content: Any) -> str | list[dict[str, Any]]:
    """Return texts as one text, and keep parts as parts where there is an image among them."""
    parts = content if isinstance(content, list) else []
    if not any(isinstance(part, dict) and part.get("type") == "image_url" for part in parts):
        return _text(content)
    return [_part(part) for part in parts]


def _part(part: Any) -> dict[str, Any]:
    image = part.get("image_url") if isinstance(part, dict) else None
    if image is None:
        return {"type": "text", "text": _text([part])}
    url = image.get("url") if isinstance(image, dict) else image
    return {"type": "image_url", "image_url": {"url": str(url or "")}}


def _text(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        return orjson.dumps(content).decode()
    texts = [part.get("text") if isinstance(part, dict) else part for part in content]
    return "".join(
        text if isinstance(text, str) else orjson.dumps(part).decode()
        for text, part in zip(texts, content, strict=True)
    )
