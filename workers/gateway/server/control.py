"""What workers ask: register, cancel, unregister, trajectory, progress."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import orjson
from pydantic import ValidationError

from workers.gateway.protocol import ROLLOUT_KEY_HEADER, WORKER_HEADER, Registration
from workers.gateway.server.errors import GatewayRefusal, invalid
from workers.gateway.server.exchange import Exchange
from workers.gateway.server.jsonio import parse_json
from workers.gateway.server.recorder import RecordedRollout, Recorder

#: Seconds that encoding a trajectory may hold the event loop; one has tens of megabytes.
_SLICE = 0.002
_KEY_HEADER, _WORKER_HEADER = ROLLOUT_KEY_HEADER.lower().encode(), WORKER_HEADER.lower().encode()
_LONGEST_NAME = 300

ReadBody = Callable[[Exchange], Awaitable[bytes]]
Handler = Callable[[Exchange, str], Awaitable[None]]


class Control:
    """The control calls of rollouts; the control key was checked before."""

    def __init__(self, recorder: Recorder, read_body: ReadBody) -> None:
        self._recorder = recorder
        self._read_body = read_body
        self.routes: dict[str, tuple[str, Handler]] = {
            "register": ("POST", self.register),
            "cancel": ("POST", self.cancel),
            "unregister": ("POST", self.unregister),
            "trajectory": ("GET", self.trajectory),
            "progress": ("GET", self.progress),
        }

    async def register(self, exchange: Exchange, rollout_id: str) -> None:
        """Begin a rollout.

        The header ``X-Rollout-Key`` names the key that its model calls must carry, ``X-Rollout-Worker`` the worker for
        log lines; the body's ``ttl`` the seconds without any call about it after which it is forgotten.
        """
        registration, ttl = _registration(await self._read_body(exchange))
        rollout = self._recorder.register(rollout_id, registration, exchange.header(_KEY_HEADER), ttl)
        rollout.worker = (exchange.header(_WORKER_HEADER) or "")[:_LONGEST_NAME]
        limits = {"max_turns": registration.max_turns, "max_seq_len": registration.max_seq_len}
        await exchange.json(_standing(rollout) | {"model": registration.model} | limits)

    async def cancel(self, exchange: Exchange, rollout_id: str) -> None:
        """Refuse the rollout's further model calls."""
        rollout = self._recorder.get(rollout_id)
        rollout.cancel()
        await exchange.json(_standing(rollout))

    async def unregister(self, exchange: Exchange, rollout_id: str) -> None:
        """Forget the rollout; the answer's status is the one it had."""
        await exchange.json(_standing(self._recorder.unregister(rollout_id)))

    async def trajectory(self, exchange: Exchange, rollout_id: str) -> None:
        """Answer what was recorded, after the call in flight.

        ``?wait=SECONDS`` bounds that wait; ``in_flight`` then says that a turn is missing. ``?format=compact`` says
        each message and each token once.
        """
        rollout = self._recorder.get(rollout_id)
        form = exchange.query("format")
        if form not in {None, "full", "compact"}:
            raise GatewayRefusal(400, f"Unknown format {form!r}: it is full or compact.")
        try:
            async with asyncio.timeout(_seconds(exchange.query("wait"))):
                async with rollout.lock:
                    pass
        except TimeoutError:
            pass
        await _settle(rollout)
        if form == "compact":
            await exchange.json(rollout.compact())
        else:
            await exchange.answer(200, await _encoded(rollout))

    async def progress(self, exchange: Exchange, rollout_id: str) -> None:
        """Answer how far the rollout has come: at once, also while a call is in flight, and without its trajectory."""
        rollout = self._recorder.get(rollout_id)
        await _settle(rollout)
        await exchange.json(rollout.progress())


async def _settle(rollout: RecordedRollout) -> None:
    """Make turns of what is kept as it came, and let other work go on while they are made."""
    while rollout.settle_part():  # noqa: ASYNC110 - it is no waiting: each turn is work
        await asyncio.sleep(0)


async def _encoded(rollout: RecordedRollout) -> bytes:
    """Return a rollout's trajectory as JSON, and let other work go on while it is made."""
    whole = rollout.trajectory()
    steps, since = [], time.monotonic()
    for turn in whole["trajectory"]:
        steps.append(orjson.dumps(turn.step(rollout.registration.max_seq_len)))
        if time.monotonic() - since > _SLICE:
            await asyncio.sleep(0)
            since = time.monotonic()
    return orjson.dumps(whole | {"trajectory": orjson.Fragment(b"[" + b",".join(steps) + b"]")})


def _registration(body: bytes) -> tuple[Registration, float | None]:
    data = parse_json(body)
    if not isinstance(data, dict):
        raise invalid(
            "model_attributes_type", [], "Input should be a valid dictionary or object to extract fields from", data
        )
    try:
        registration = Registration.model_validate(data)
    except ValidationError as error:
        detail = [entry | {"loc": ["body", *entry["loc"]]} for entry in error.errors(include_url=False)]
        raise GatewayRefusal(422, detail) from None
    limit = registration.max_seq_len
    if limit is not None and limit <= 0:
        raise invalid("greater_than", ["max_seq_len"], "Input should be greater than 0", limit, ctx={"gt": 0})
    ttl = data.get("ttl")
    if ttl is not None and (isinstance(ttl, bool) or not isinstance(ttl, int | float) or ttl <= 0):
        raise invalid("greater_than", ["ttl"], "Input should be a number greater than 0", ttl, ctx={"gt": 0})
    return registration, ttl


def _seconds(given: str | None) -> float | None:
    """Return how long a trajectory may wait for the call in flight; None is as long as it takes."""
    try:
        return max(0.0, float(given or ""))
    except ValueError:
        return None


def _standing(rollout: RecordedRollout) -> dict[str, Any]:
    return {"rollout_id": rollout.id, "status": rollout.status}
