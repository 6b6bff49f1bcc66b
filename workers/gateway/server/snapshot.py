"""A rollout as one journal entry, and rollouts from a journal's entries."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Iterable, Iterator
from typing import Any

from workers.gateway.protocol import Registration
from workers.gateway.server.integrity import compact
from workers.gateway.server.journal import Entry
from workers.gateway.server.log import Kind
from workers.gateway.server.recorder import RecordedRollout, Recorder
from workers.gateway.server.tokenstore import TokenSpan, packed, unpacked
from workers.gateway.server.turns import Answered, Payload, Turn

logger = logging.getLogger(__name__)

_COPIED = ("finish_reason", "partial", "prompt_tokens", "completion_tokens", "answer_id")


def snapshots(recorder: Recorder) -> Iterator[tuple[dict[str, Any], bytes]]:
    """Yield header and data of a `Kind.SNAPSHOT` for each rollout that is still registered when its turn comes."""
    for rollout in recorder:
        if recorder.find(rollout.id) is rollout:
            yield {"id": rollout.id}, snapshot(rollout)


def snapshot(rollout: RecordedRollout) -> bytes:
    """Return all that is known of a rollout; each message and token once."""
    rollout.settle()
    recorded = compact(rollout.history, None)
    for turn, told in zip(rollout.history.settled, recorded["turns"], strict=True):
        told |= {name: getattr(turn, name) for name in _COPIED}
    whole = packed(
        recorded
        | {
            "registration": rollout.registration.model_dump(mode="json"),
            "ttl": rollout.ttl,
            "key": rollout.key.hex() if rollout.key else None,
            "cancelled": rollout.cancelled,
            "first": rollout.first,
            "failures": list(rollout.failures),
            "failed_calls": rollout.failed_calls,
        }
    )
    assert whole is not None  # noqa: S101 - it is no None
    return whole


def restore(recorder: Recorder, entries: Iterable[Entry]) -> Any:
    """Register what the entries tell; return the last policy version among them."""
    policy: Any = None
    for entry in entries:
        if entry.kind is Kind.POLICY:
            policy = entry.header["version"]
        else:
            _apply(recorder, entry)
    return policy


def _apply(recorder: Recorder, entry: Entry) -> None:
    rollout_id = entry.header["id"]
    rollout = recorder.find(rollout_id)
    if entry.kind is Kind.REGISTER:
        _register(recorder, rollout_id, entry.header)
    elif entry.kind is Kind.SNAPSHOT:
        _load(recorder, rollout_id, unpacked(entry.data))
    elif rollout is None:
        return  # it was forgotten, or its snapshot follows
    elif entry.kind is Kind.CALL:
        rollout.restore(_answered(entry))
    elif entry.kind is Kind.FAILURE:
        if entry.body is not None:
            rollout.begin(entry.body)
        rollout.add_failure(entry.header["failure"])
    elif entry.kind is Kind.CANCEL:
        rollout.cancelled = True
    elif entry.kind is Kind.FORGET:
        recorder.drop(rollout_id)


def _answered(entry: Entry) -> Answered:
    header = entry.header
    payload = Payload(entry.data, header["chunks"], header["packed"])
    size = 2 * len(entry.data)  # its request was about as large, and is parsed
    return Answered(entry.body, payload, header["extras"], header["answer_id"], header["partial"], size)


def _register(recorder: Recorder, rollout_id: str, told: dict[str, Any]) -> RecordedRollout:
    registration = Registration.model_validate(told["registration"])
    key = bytes.fromhex(told["key"]) if told["key"] else None
    return recorder.restore(rollout_id, registration, key, told["ttl"])


def _load(recorder: Recorder, rollout_id: str, told: dict[str, Any]) -> None:
    rollout = _register(recorder, rollout_id, told)
    rollout.cancelled = told["cancelled"]
    rollout.first = told["first"]
    rollout.failures.extend(told["failures"])
    rollout.failed_calls = told["failed_calls"]
    store = rollout.history.tokens
    for each in told["streams"]:
        stream = store.new_stream(None if each["parent"] is None else store.streams[each["parent"]], each["shared"])
        stream.own = array("i", each["ids"])
    messages = told["messages"]
    for each in told["turns"]:
        turn = Turn(messages=[], completion=messages[each["completion"]], extras=each["extras"])
        for name in _COPIED:
            setattr(turn, name, each[name])
        if (tokens := each["tokens"]) is not None:
            stream = store.streams[tokens["stream"]]
            logprobs = array("d", tokens["logprobs"])
            experts = packed(tokens["routed_experts"])
            end, length = tokens["end"], tokens["prompt_length"]
            turn.span = store.mark(stream, TokenSpan(stream, tokens["prompt_end"], end, logprobs, length, experts))
        rollout.history.add(turn, [messages[index] for index in each["prompt"]])
        rollout.prompt_tokens += turn.prompt_tokens
        rollout.completion_tokens += turn.completion_tokens
