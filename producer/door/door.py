"""The door: each ``run`` of a client becomes a rollout, each rollout's end its answer.

What is in flight is in Redis and nowhere else. A rollout's id is made of the door's name and the client's request id,
the request id is in the request's ``info``, and the door is a named consumer of its batch: one that is started again
under the same name is given what ended meanwhile, and answers it under the request id that the client waits for.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from producer.client import Producer
from producer.connection import CancelAnswer, Submitted, end
from producer.contract import Deadlines, InvalidRequestError, RolloutRequest, RolloutResult
from producer.door import frames
from producer.door.episode import EpisodeCall, pack
from producer.door.frames import Asked, MalformedError
from producer.door.live import LiveDelta, PassedOn, follow
from producer.door.socket import DoorSocket
from producer.door.unclaimed import Answer, Unclaimed
from producer.door.wire import VERIFIERS, Wire
from producer.errors import FleetError
from producer.ids import safe_id
from producer.queues import QUEUE
from producer.results import read_result

logger = logging.getLogger(__name__)

_CONSUMER = "door"
#: Seconds between two looks at who is there while an answer has no taker.
_LOOK_SOON = 0.25


@dataclass(frozen=True, kw_only=True)
class DoorOptions:
    """What a door serves: ``env`` is the configuration's name on the workers, ``digest`` that of the door's own file.

    ``name`` tells it from other doors of the fleet: a door of the same name goes on where this one was. ``patience`` is
    for how many seconds a client that is gone may come back before its episodes are cancelled; ``look`` are the seconds
    between two looks at who is there, ``check`` those between two looks whether Redis knows what is in flight.
    """

    env: str
    name: str
    digest: str | None = None
    wire: Wire = Wire.DELTAS
    live: bool = False
    timeout: float = 24 * 3600.0
    max_attempts: int = 3
    priority: int = 3
    queue: str = QUEUE
    patience: float = 60.0
    look: float = 5.0
    check: float = 15.0
    parting: float = 5.0  #: for how many seconds a door that ends waits until Redis has what came


@dataclass
class Run:
    """A client's ``run`` that was not answered yet; ``peer`` is where it came from last."""

    request: RolloutRequest
    request_id: bytes
    peer: bytes
    passed_on: PassedOn = field(default_factory=PassedOn)
    #: Held while frames of it are sent, so that no delta comes after the reply.
    sending: asyncio.Lock = field(default_factory=asyncio.Lock)
    submitted: asyncio.Event = field(default_factory=asyncio.Event)
    since: float = field(default_factory=time.monotonic)
    gone_since: float | None = None
    looks_done: bool = False


class Door:
    """Serves one environment's clients over ``socket`` until it is cancelled."""

    def __init__(self, producer: Producer, socket: DoorSocket, options: DoorOptions) -> None:
        self._producer = producer
        self._connection = producer.connection
        self._socket = socket
        self._options = options
        self._batch_id = safe_id(options.name)
        self._runs: dict[str, Run] = {}
        self._unclaimed = Unclaimed(self._connection, self._batch_id)
        self._tasks: set[asyncio.Task[None]] = set()
        self._newcomer_at = time.monotonic()

    async def serve(self) -> None:
        """Serve; raises `FleetError` when Redis refuses this door, or another one goes on under its name."""
        parts = [self._receive(), self._deliver_all(), self._look_after()]
        if self._options.live and self._options.wire is Wire.DELTAS:
            parts.append(follow(self._connection, self._batch_id, self._pass_on))
        tasks = [asyncio.create_task(part) for part in parts]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            await asyncio.shield(self._end(tasks))

    async def _end(self, tasks: list[asyncio.Task[None]]) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(self._options.parting):
                await self._settled()
                await end(*tasks)
                await self._settled()  # what came meanwhile
        await end(*tasks)
        await end(*self._tasks)

    async def _settled(self) -> None:
        """Wait for runs that would be lost: a client sends its own once, and waits for it without a limit."""
        if self._tasks:
            await asyncio.wait(self._tasks)

    # -- what clients ask ----------------------------------------------------------------------------------------------

    async def _receive(self) -> None:
        """Answer what can be answered at once; the rest in tasks, so that ``health`` never waits."""
        while True:
            try:
                asked = frames.read(await self._socket.receive())
            except MalformedError as error:
                logger.warning("a message was dropped: %s", error, extra={"stage": "receive"})
                continue
            if asked.method == "health":
                await self._reply(asked, frames.done())
            elif asked.method == "run":
                await self._run(asked)
            elif asked.method == "cancel":
                self._begin(self._cancel(asked))
            else:
                await self._reply(asked, frames.failed(f"unknown method {asked.method!r}"))

    async def _reply(self, asked: Asked, data: bytes) -> None:
        await self._socket.send(asked.peer, asked.request_id, *frames.reply(self._options.wire, data))

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):
            logger.error("unexpected: %r", error, exc_info=error, extra={"stage": "door"})

    async def _run(self, asked: Asked) -> None:
        try:
            request = self._request(asked)
        except (MalformedError, InvalidRequestError) as error:
            await self._reply(asked, frames.failed(f"{type(error).__name__}: {error}"))
            return
        run = self._runs.get(request.rollout_id)
        if run is not None:  # the client asks again, over another connection
            run.peer, run.gone_since, run.passed_on.unsure = asked.peer, None, True
            return
        run = self._runs[request.rollout_id] = Run(request, asked.request_id, asked.peer)
        self._begin(self._submit(run))

    def _request(self, asked: Asked) -> RolloutRequest:
        options = self._options
        call = EpisodeCall(
            env=options.env, digest=options.digest, wire=options.wire, live=options.live, run=pack(asked.payload)
        )
        return RolloutRequest(
            rollout_id=self._rollout_id(asked.request_id.decode()),
            batch_id=self._batch_id,
            environment=VERIFIERS,
            environment_args=call.model_dump(mode="json"),
            model=frames.model_of(asked.payload),
            info={"request_id": asked.request_id.decode()},
            priority=options.priority,
            queue=options.queue,
            max_attempts=options.max_attempts,
            deadlines=Deadlines(agent=options.timeout),
        )

    def _rollout_id(self, request_id: str) -> str:
        return safe_id(f"{self._batch_id}-{request_id}")

    async def _submit(self, run: Run) -> None:
        rollout_id = run.request.rollout_id
        try:
            [found] = await self._connection.submit([run.request])
        except (FleetError, InvalidRequestError) as error:
            await self._not_submitted(run, f"{type(error).__name__}: {error}")
            return
        except asyncio.CancelledError:
            await self._not_submitted(run, "the door ended before Redis had taken the run")
            raise
        finally:
            run.submitted.set()
        if found is not Submitted.CREATED:  # by a door before this one, which may have sent some of it
            run.passed_on.unsure = True
        if found is Submitted.FINISHED:
            await self._fetch(rollout_id)

    async def _not_submitted(self, run: Run, why: str) -> None:
        logger.warning("%s was not submitted: %s", run.request.rollout_id, why, extra={"stage": "submit"})
        self._runs.pop(run.request.rollout_id, None)
        await self._socket.send(run.peer, run.request_id, *frames.reply(self._options.wire, frames.failed(why)))

    async def _cancel(self, asked: Asked) -> None:
        try:
            rollout_id = self._rollout_id(str(frames.fields(asked.payload).get("request_id", "")))
        except MalformedError as error:
            await self._reply(asked, frames.failed(f"{type(error).__name__}: {error}"))
            return
        if run := self._runs.get(rollout_id):
            await run.submitted.wait()  # else there is nothing to cancel yet
        try:
            found = (await self._connection.cancel([rollout_id]))[rollout_id]
        except FleetError as error:
            await self._reply(asked, frames.failed(f"{type(error).__name__}: {error}"))
            return
        live = found in {CancelAnswer.CANCELLED, CancelAnswer.REQUESTED}
        await self._reply(asked, frames.done(cancelled=live))

    # -- what the fleet answers ----------------------------------------------------------------------------------------

    async def _deliver_all(self) -> None:
        for rollout_id in await self._unclaimed.earlier():
            await self._fetch(rollout_id)
        async for result in self._producer.results(self._batch_id, consumer=_CONSUMER):
            await self._deliver(result)

    async def _fetch(self, rollout_id: str) -> None:
        """Deliver the result of a rollout that has ended, wherever the batch's stream is."""
        connection = self._connection.lasting()
        [raw] = await connection.stored_results([rollout_id])
        await self._deliver(await read_result(connection, rollout_id, raw, self._batch_id))

    async def _deliver(self, result: RolloutResult) -> None:
        run = self._runs.get(result.rollout_id)
        request_id = run.request_id if run else str(result.info.get("request_id", "")).encode()
        if not request_id:
            logger.warning("%s: nobody knows who asked for it", result.rollout_id, extra={"stage": "deliver"})
            await self._unclaimed.drop([result.rollout_id])
            return
        answer = Answer(request_id, result.attempt, *frames.answer_of(result, self._options.wire))
        if run is not None:
            async with run.sending:
                self._runs.pop(result.rollout_id, None)
                if await self._answer(run.peer, answer, run.passed_on):
                    return
        logger.info("%s: its client is not there", result.rollout_id, extra={"stage": "deliver"})
        await self._unclaimed.add(result.rollout_id, answer)

    async def _answer(self, peer: bytes, answer: Answer, passed_on: PassedOn | None = None) -> bool:
        passed_on = passed_on or PassedOn(unsure=True)
        for delta in passed_on.rest(answer.attempt, answer.deltas, answer.traces):
            if not await self._socket.send(peer, answer.request_id, frames.DELTA, delta):
                return False
        return await self._socket.send(peer, answer.request_id, *frames.reply(self._options.wire, answer.reply))

    async def _pass_on(self, delta: LiveDelta) -> None:
        run = self._runs.get(delta.rollout_id)
        if run is None:
            return
        async with run.sending:
            if self._runs.get(delta.rollout_id) is run:  # it may have been answered meanwhile
                for data in run.passed_on.take(delta):
                    await self._socket.send(run.peer, run.request_id, frames.DELTA, data)

    # -- what has to be looked after -----------------------------------------------------------------------------------

    async def _look_after(self) -> None:
        looked = checked = time.monotonic()
        while True:
            await asyncio.sleep(min(_LOOK_SOON, self._options.look, self._options.check))
            now = time.monotonic()
            if len(self._unclaimed) or now - looked > self._options.look:
                looked = now
                before = set(self._socket.peers)
                await self._socket.look(frames.nothing(self._options.wire))
                if self._socket.peers - before:
                    self._newcomer_at = now
                await self._unclaimed.offer(set(self._socket.peers), self._answer)
                await self._cancel_deserted(now)
            if now - checked > self._options.check:
                checked = now
                await self._check_records(now)

    async def _cancel_deserted(self, now: float) -> None:
        """Cancel the episodes of clients that are gone, unless somebody has come since who may be the same client."""
        deserted = []
        for rollout_id, run in self._runs.items():
            if run.peer in self._socket.peers:
                run.gone_since = None
                continue
            run.gone_since = run.gone_since or now
            if now - run.gone_since > self._options.patience and self._newcomer_at < run.gone_since:
                deserted.append(rollout_id)
        if not deserted:
            return
        try:
            await self._connection.cancel(deserted)
            logger.warning("%d episodes are cancelled: their client is gone", len(deserted), extra={"stage": "clients"})
        except FleetError as error:
            logger.warning("episodes of a client that is gone go on: %s", error, extra={"stage": "clients"})

    async def _check_records(self, now: float) -> None:
        """Submit again what a Redis that lost data has forgotten, and fetch what ended without a word."""
        old = [i for i, run in self._runs.items() if now - run.since > self._options.check and run.submitted.is_set()]
        try:
            for rollout_id, state in (await self._connection.states(old)).items():
                run = self._runs.get(rollout_id)
                if run is None:
                    continue
                if state is None:
                    run.passed_on.unsure = True
                    await self._submit(run)
                elif state == "done" and run.looks_done:
                    await self._fetch(rollout_id)
                else:
                    run.looks_done = state == "done"
        except FleetError as error:
            logger.warning("what is in flight could not be looked up: %s", error, extra={"stage": "records"})
