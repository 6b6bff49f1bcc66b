"""What door and worker tell each other about an episode, inside an ordinary request and its result.

The request's ``environment`` is `producer.door.wire.VERIFIERS`, its ``environment_args`` are an `EpisodeCall`; the
result's ``episode`` is an `EpisodeAnswer`. What verifiers itself has packed stays as it is, in base64: the door reads
none of it, so that it fits every version that speaks one of its wires.
"""

from __future__ import annotations

from base64 import b64decode, b64encode

from pydantic import BaseModel, ConfigDict

from producer.door.wire import Wire


class EpisodeCall(BaseModel):
    """One episode to run: a client's ``run`` as it came, and under which of the worker's configurations.

    With a ``digest`` the worker's file of that name must be the one that the door has. ``live`` has deltas sent to the
    door as they come as well.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    env: str
    digest: str | None = None
    wire: Wire = Wire.DELTAS
    live: bool = False
    run: str


class EpisodeAnswer(BaseModel):
    """What one attempt sent: its deltas in their order, the reply that ends them, and the ids of all of its traces."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    wire: Wire
    deltas: list[str] = []
    reply: str
    traces: list[str] = []


def pack(data: bytes) -> str:
    """Return bytes as JSON can hold them."""
    return b64encode(data).decode()


def unpack(text: str) -> bytes:
    """Return what was packed; raises ValueError."""
    return b64decode(text, validate=True)
