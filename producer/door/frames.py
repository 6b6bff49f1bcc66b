"""The frames of verifiers' serve protocol, as a server sees them; msgpack only, and nothing that was not asked for.

Source: ``verifiers.v1.serve`` (``client.py``, ``server.py``, ``types.py``). A client sends ``[request_id, method,
payload]`` with method ``health``, ``run`` or ``cancel``; what it is answered depends on the `Wire`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgpack

from producer.contract import RolloutResult, StopCondition
from producer.door.episode import EpisodeAnswer, unpack
from producer.door.wire import Wire

DELTA, REPLY = b"delta", b"reply"
#: Bytes of one ``run``: in base64 it has to fit a request (`producer.contract.RolloutRequest.MAX_BYTES`).
MAX_RUN_BYTES = 11 * 1024 * 1024
_MAX_ID = 200
_FRAMES = 4


class MalformedError(ValueError):
    """A message is not of the protocol; the message says how."""


@dataclass(frozen=True)
class Asked:
    """One message of a client: ``peer`` is its routing id, new for each connection."""

    peer: bytes
    request_id: bytes
    method: str
    payload: bytes


def read(frames: list[bytes]) -> Asked:
    """Return what came; raises `MalformedError` for what cannot be answered, as nobody could match the answer."""
    if len(frames) != _FRAMES:
        raise MalformedError(f"{len(frames) - 1} frames; expected request id, method and payload")
    peer, request_id, method, payload = frames
    try:
        if not 0 < len(request_id) <= _MAX_ID:
            raise MalformedError(f"a request id of {len(request_id)} bytes")
        request_id.decode()
        return Asked(peer, request_id, method.decode()[:_MAX_ID], payload)
    except UnicodeDecodeError:
        raise MalformedError("request id or method is no text") from None


def fields(payload: bytes) -> dict[str, Any]:
    """Return a payload's fields; raises `MalformedError`."""
    try:
        found = msgpack.unpackb(payload, raw=False)
    except (ValueError, msgpack.UnpackException) as error:
        raise MalformedError(f"the payload is not msgpack: {type(error).__name__}") from None
    if not isinstance(found, dict):
        raise MalformedError("the payload has no fields")
    return found


def model_of(payload: bytes) -> str:
    """Return the model that a ``run`` names; raises `MalformedError`."""
    if len(payload) > MAX_RUN_BYTES:
        raise MalformedError(f"the run is {len(payload)} bytes, more than {MAX_RUN_BYTES}")
    model = fields(payload).get("model")
    if not isinstance(model, str) or not 0 < len(model) <= 500:
        raise MalformedError("the run names no model")
    return model


def reply(wire: Wire, data: bytes) -> list[bytes]:
    """Return the frames, after the request id, of what ends a request."""
    return [REPLY, data] if wire is Wire.DELTAS else [data]


def nothing(wire: Wire) -> list[bytes]:
    """Return frames that no client does anything with, of no request: they tell whether it is there."""
    return [b"", DELTA, b""] if wire is Wire.DELTAS else [b"", b""]


def done(**extra: Any) -> bytes:
    """Return the answer of a request that succeeded."""
    return _packed({"success": True, "error": None, **extra})


def failed(error: str) -> bytes:
    """Return the answer of a request that failed: the client raises these words."""
    return _packed({"success": False, "error": error})


def discard(trace: str) -> bytes:
    """Return a delta that has the client forget a trace; a later one may begin it again."""
    return _packed({"trace": trace, "discard": True})


def answer_of(result: RolloutResult, wire: Wire) -> tuple[list[bytes], bytes, list[str]]:
    """Return the deltas, the reply and the traces' ids of an episode that has ended, however it did."""
    if result.stop_condition is StopCondition.CANCELLED:
        return [], failed("Cancelled: rollout aborted"), []
    if result.error is not None or result.episode is None:
        return [], failed(result.error.message if result.error else "the episode left no answer"), []
    try:
        answer = EpisodeAnswer.model_validate(result.episode)
        if answer.wire is not wire:
            return [], failed(f"the episode was run for a door of --wire {answer.wire}, and this one has {wire}"), []
        return [unpack(delta) for delta in answer.deltas], unpack(answer.reply), answer.traces
    except ValueError as error:
        return [], failed(f"the worker's answer cannot be read: {type(error).__name__}"), []


def _packed(value: dict[str, Any]) -> bytes:
    packed: bytes = msgpack.packb(value, use_bin_type=True)
    return packed
