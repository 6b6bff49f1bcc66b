"""The worker process's tunnels: one per gateway address, shared by all its rollouts, health-checked, closed at the end.

A `Slot` is the place of one gateway's tunnel. It holds at most one living `Generation` and at most one `Start`. Shared
state is changed in plain methods, between which no other coroutine runs; what must be awaited follows from them.

The pool's tasks: one `Start` per slot while it starts; one per generation that supervises it and then buries it; and
one for each tunnel that is being stopped, which is bounded and which `aclose` waits for.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from contextvars import Context
from typing import Any

from workers.aio import uninterrupted
from workers.errors import TunnelError
from workers.tunnels.backend import Limits, StartLimit, TunnelBackend, TunnelProcess
from workers.tunnels.base import FoundTunnel, TunnelLease, TunnelProvider
from workers.tunnels.generation import Generation, State
from workers.tunnels.slots import Address, PooledLease, Slot
from workers.tunnels.start import Start, pool_closed

logger = logging.getLogger(__name__)

#: Seconds for the backend's own end, once everything is stopped.
_CLOSE_TIMEOUT = 5.0


class TunnelPool(TunnelProvider):
    """Hands out leases on shared tunnels. Lives on one event loop, and its methods are called there.

    ``throttle`` is the fleet's rate of starts; ``on_close`` releases what was made for this pool alone.
    """

    def __init__(
        self,
        backend: TunnelBackend,
        *,
        limits: Limits | None = None,
        throttle: StartLimit | None = None,
        clock: Callable[[], float] = time.monotonic,
        on_close: Callable[[], Awaitable[object]] | None = None,
    ) -> None:
        self._backend = backend
        self._limits = limits or Limits()
        self._throttle = throttle
        self._clock = clock
        self._on_close = on_close
        self._slots: dict[tuple[str, int], Slot] = {}
        self._tasks: set[asyncio.Task[None]] = set()  # supervise generations, and stop what has ended
        self._remains: set[str] = set()  # labels of what may be left at the service
        self._late: set[str] = set()  # labels of failed starts: a slow service may still register them
        self._checking = False
        self._closing: asyncio.Task[None] | None = None

    # -- leases --------------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def lease(self, gateway_url: str) -> AsyncIterator[TunnelLease]:
        """Hold the tunnel to ``gateway_url``, starting it on first use; raises `TunnelError`.

        A path in ``gateway_url`` is kept at the end of the lease's ``url``: the tunnel passes paths on as they are.
        """
        address = Address.of(gateway_url)
        slot = self._slots.setdefault((address.host, address.port), Slot(address.host, address.port, self._clock))
        slot.enter()
        try:
            generation = await self._serving(slot)
            generation.holders += 1
            try:
                process = generation.process
                yield PooledLease(
                    process.url + address.path, process.tunnel_id, address.host, generation.number, generation
                )
            finally:
                generation.holders -= 1
        finally:
            slot.leave()

    async def _serving(self, slot: Slot) -> Generation:
        """Return the slot's serving generation; waits while one is restarted or started."""
        while True:
            if self._closing is not None:
                raise pool_closed()
            generation = slot.generation
            if generation is None:
                start = self._start_of(slot)
                try:
                    await start.wait()
                finally:
                    # Whoever sees its end first acts on it. Were that left to the callback, a caller who comes between
                    # the end and the callback would find neither a start under way nor a generation, for ever: waiting
                    # for what has ended does not let the loop go on.
                    self._settle(slot, start)
            elif generation.state is State.SERVING:
                return generation
            else:
                await generation.settled()

    def _start_of(self, slot: Slot) -> Start:
        """Return the start that is under way, or begin one; raises the refusal of a start that was just refused."""
        if slot.starting is not None:
            return slot.starting
        if refusal := slot.refusal():
            raise refusal.again()
        slot.starting = Start(
            self._backend,
            slot.host,
            slot.port,
            limits=self._limits,
            throttle=self._throttle,
            discard=self._discard_start,
            failures=slot.failures,
        )
        start = slot.starting
        start.task.add_done_callback(lambda task: self._settle(slot, start))  # also when nobody waits any more
        return start

    def _settle(self, slot: Slot, start: Start) -> None:
        """Act on the end of a start, once; nothing happens before it has ended."""
        task = start.task
        if slot.starting is not start or not task.done():
            return
        error = pool_closed() if task.cancelled() else task.exception()
        if error is None:
            process, label = task.result()
            generation = slot.started(process, label, self._limits)
            if self._closing is not None:
                self._end(slot, generation, pool_closed())
                return
            logger.info(
                "generation %d: tunnel %s", generation.number, process.tunnel_id, extra={"stage": "start_tunnel"}
            )
            generation.supervisor = self._spawn(self._supervise(slot, generation))
        elif isinstance(error, TunnelError):
            slot.not_started(error, self._limits.hold_off)
        else:
            logger.error("a tunnel's start failed unexpectedly", exc_info=error, extra={"stage": "start_tunnel"})
            slot.not_started(TunnelError(f"unexpected {type(error).__name__}"), self._limits.hold_off)

    # -- the life and the end of a generation --------------------------------------------------------------------------

    async def _supervise(self, slot: Slot, generation: Generation) -> None:
        try:
            why = await generation.supervise()
        except Exception as error:
            logger.exception("supervising a tunnel failed", extra={"stage": "tunnel_health_monitor"})
            why = TunnelError(f"unexpected {type(error).__name__} while the tunnel was watched")
        if generation.state is not State.ENDED:
            logger.error("%s\n%s", why, why.detail or "(no output)", extra={"stage": "tunnel_health_monitor"})
            self._end(slot, generation, why)

    def _end(self, slot: Slot, generation: Generation, why: TunnelError) -> None:
        """Break all leases first, and at once; stopping the process and its registration takes its time."""
        slot.ended(generation, why)
        self._discard(generation.process, generation.label)

    def _discard_start(self, process: TunnelProcess, label: str | None) -> None:
        if label is not None:
            self._late.add(label)
        self._discard(process, label)

    def _discard(self, process: TunnelProcess, label: str | None) -> None:
        if label is not None:
            self._remains.add(label)
        self._spawn(self._stop(process, label))

    async def _stop(self, process: TunnelProcess, label: str | None) -> None:
        try:
            await process.stop(timeout=self._limits.stop_timeout)
        except TunnelError as error:
            logger.warning("a tunnel was not stopped cleanly: %s", error, extra={"stage": "stop_tunnel"})
        if label is not None:
            await self._sweep(label)

    async def _sweep(self, label: str) -> None:
        """Delete what a tunnel may have left at the service; what cannot be deleted now is tried again by `check`."""
        try:
            found = await self._backend.sweep(label, timeout=self._limits.sweep_timeout)
        except TunnelError as error:
            self._remains.add(label)
            logger.warning("registrations labelled %s may be left: %s", label, error, extra={"stage": "stop_tunnel"})
        else:
            self._remains.discard(label)
            if found:
                logger.info("deleted %d registrations labelled %s", found, label, extra={"stage": "stop_tunnel"})

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        # In a context of its own: a rollout's deadlines are not those of what its calls set going.
        task = asyncio.get_running_loop().create_task(work, context=Context())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # -- health --------------------------------------------------------------------------------------------------------

    async def check(self) -> None:
        """Do one round of health checks: ask about every tunnel, close idle ones, clear up what starts left behind.

        What it finds is acted on by each tunnel's own task; returns without waiting for that. A round that is still
        under way makes this one superfluous: two answers of one moment are not two in a row.
        """
        if self._checking or self._closing is not None:
            return
        self._checking = True
        try:
            self._close_idle()
            labels = self._remains | self._late
            self._late.clear()
            generations = [slot.generation for slot in self._slots.values() if slot.generation is not None]
            serving = [generation for generation in generations if generation.state is State.SERVING]
            await asyncio.gather(*(generation.check() for generation in serving), *map(self._sweep, labels))
        finally:
            self._checking = False

    def _close_idle(self) -> None:
        for key, slot in list(self._slots.items()):
            if slot.idle() > self._limits.idle_timeout:
                if slot.generation is not None:
                    logger.info(
                        "closing the unused tunnel to %s:%s", slot.host, slot.port, extra={"stage": "stop_tunnel"}
                    )
                    self._end(slot, slot.generation, TunnelError("the tunnel was closed because nobody used it"))
                del self._slots[key]

    def report(self) -> list[dict[str, Any]]:
        """Return, per gateway, what its tunnel is and does; the keys are those of `Slot.report`. From any thread."""
        return [slot.report() for slot in list(self._slots.values())]

    async def find(self, label: str) -> list[FoundTunnel]:
        """Return the living registrations that carry ``label``; raises `TunnelError`."""
        return await self._backend.find(label, timeout=self._limits.sweep_timeout)

    async def delete(self, tunnel_id: str) -> None:
        """Delete a registration, such as that of a dead worker; raises `TunnelError`."""
        await self._backend.delete(tunnel_id, timeout=self._limits.sweep_timeout)

    # -- the end -------------------------------------------------------------------------------------------------------

    async def aclose(self) -> None:
        """Break every lease, stop every tunnel, also one that is starting; in bounded time, and only once."""
        if self._closing is None:
            self._closing = asyncio.get_running_loop().create_task(self._close(), context=Context())
        await uninterrupted(asyncio.shield(self._closing), timeout=None)  # its parts are bounded

    async def _close(self) -> None:
        for slot in self._slots.values():
            if slot.starting is not None:
                slot.starting.task.cancel()
            if slot.generation is not None:
                self._end(slot, slot.generation, pool_closed())
        await asyncio.sleep(0)
        await self._finish_tasks()
        for close in (self._backend.aclose, self._on_close):
            if close is not None:
                with suppress(TimeoutError):
                    async with asyncio.timeout(_CLOSE_TIMEOUT):
                        await close()
        if self._remains:
            logger.error(
                "registrations may be left at the tunnel service; delete those labelled %s",
                ", ".join(sorted(self._remains)),
                extra={"stage": "stop_tunnel"},
            )

    async def _finish_tasks(self) -> None:
        """Wait until everything is stopped and swept, or until ``close_timeout`` has passed."""
        end = time.monotonic() + self._limits.close_timeout
        starts = {slot.starting.task for slot in self._slots.values() if slot.starting is not None}
        while (pending := {*self._tasks, *starts}) and (left := end - time.monotonic()) > 0:
            _, pending = await asyncio.wait(pending, timeout=left)
            starts = {task for task in starts if not task.done()}
        for task in self._tasks:
            task.cancel()
