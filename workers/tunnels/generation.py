"""One started tunnel, from its start to its end: watched, restarted under its URL, given up when that fails.

            a new registration                     restart() worked
    (start) ──────────────────▶ SERVING ◀───────────────────────────── RESTARTING
                                   │    process exited, or the service       │
                                   │    said "disconnected" twice in a row   │
                                   ├────────────────────────────────────────▶│
                                   │ registration gone, closed               │ gone, or out of tries
                                   ▼                                         ▼
                                 ENDED ◀──────────────────────────────────── ┘

A generation that has ended never serves again, whatever becomes of its successor: the successor has another URL.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from contextlib import suppress
from contextvars import Context
from enum import StrEnum

from workers.errors import TunnelError
from workers.tunnels.backend import Limits, Registration, RegistrationGoneError, TunnelProcess

logger = logging.getLogger(__name__)

#: One "disconnected" may be a reconnection that is under way.
_DISCONNECTED_IN_A_ROW = 2
#: Least seconds between two questions to the service about a tunnel that agents have just ended on.
_SPACING = 0.1


class State(StrEnum):
    """Where a generation stands in its life."""

    SERVING = "serving"
    RESTARTING = "restarting"
    ENDED = "ended"


class Trouble(StrEnum):
    """Why a generation does not serve; the value continues the sentence "its ..."."""

    EXITED = "process exited"
    DISCONNECTED = "connection was lost"
    GONE = "registration is gone"


class Generation:
    """A tunnel that has started. Rollouts hold it; `supervise` runs as the one task that acts on it."""

    def __init__(self, number: int, process: TunnelProcess, label: str, limits: Limits) -> None:
        self.number = number
        self.process = process
        self.label = label
        self.state = State.SERVING
        self.error: TunnelError | None = None
        self.holders = 0
        self.restarts = 0
        self.last_error: str | None = None
        #: The task that runs `supervise`.
        self.supervisor: asyncio.Task[None] | None = None
        self._limits = limits
        self._tries = 0
        self._disconnected = 0
        self._restarted_disconnected = False
        self._serving_since = self._good_at = self._connected_at = time.monotonic()
        self._registration = Registration.CONNECTED  # what the service said last
        self._outages: list[tuple[float, float]] = []  # since when it may have failed, and when that was noticed
        self._asking: asyncio.Task[None] | None = None
        self._asked_at = 0.0
        self._asked_next: asyncio.Task[None] | None = None
        self._nudged = asyncio.Event()
        self._settled = asyncio.Event()  # not RESTARTING
        self._settled.set()
        self._ended = asyncio.Event()

    # -- for those who hold it -----------------------------------------------------------------------------------------

    async def settled(self) -> None:
        """Wait until a restart has worked or failed."""
        await self._settled.wait()

    async def broken(self) -> None:
        """Wait for the end, then raise the `TunnelError` that says why."""
        await self._ended.wait()
        assert self.error is not None  # noqa: S101
        raise self.error.again()

    def end(self, error: TunnelError) -> None:
        """Break every hold on this tunnel, now and for ever, and stop watching it. The first reason stays."""
        if self.state is State.ENDED:
            return
        if self.supervisor is not None and self.supervisor is not asyncio.current_task():
            self.supervisor.cancel()
        if self.state is State.SERVING:
            self._note_outage(Trouble.EXITED)
        self.state, self.error, self.last_error = State.ENDED, error, error.message
        self._settled.set()
        self._ended.set()

    async def confirm(self, since: float, until: float) -> None:
        """Raise `TunnelError` if the URL may have failed between ``since`` and ``until`` (`time.monotonic`).

        The service is asked once more, for all who ask at about the same time; where it does not answer, what is known
        here decides. A call that was served after an outage was noticed came through what ended it.
        """
        await self._ask_from_now_on()
        outages = [*self._outages, *self._unnoticed_outage()]
        if not any(began <= until and noticed > since for began, noticed in outages):
            return
        if self.error is not None:
            raise self.error.again()
        raise TunnelError(
            f"tunnel {self.process.tunnel_id} (generation {self.number}) did not serve for a time after the last model "
            "call that was recorded: the agent may have ended for that",
            detail=await self.process.output() or None,
        )

    def _unnoticed_outage(self) -> list[tuple[float, float]]:
        if self.state is not State.SERVING:
            return []  # it is in the list
        if self.process.gone or self._registration is Registration.DISCONNECTED:
            return [(self._connected_at, math.inf)]
        return [] if self.process.running else [(self._last_good(), math.inf)]

    def _last_good(self) -> float:
        """Return until when the URL surely served: a process hears a little later than agents that it does not."""
        return self._good_at - self._limits.notice

    def _note_outage(self, trouble: Trouble) -> None:
        began = self._connected_at if trouble is Trouble.DISCONNECTED else self._last_good()
        self._outages.append((began, time.monotonic()))

    async def _ask_from_now_on(self) -> None:
        """Wait for an answer of the service to a question that was not asked before now; others wait for the same."""
        if self._asked_next is None:
            work = self._ask_after(self._asking)
            self._asked_next = asyncio.get_running_loop().create_task(work, context=Context())
        with suppress(TimeoutError):  # a service that hangs is no reason to doubt a finished agent
            async with asyncio.timeout(self._limits.confirm_patience):
                await asyncio.shield(self._asked_next)

    async def _ask_after(self, earlier: asyncio.Task[None] | None) -> None:
        if earlier is not None:
            await asyncio.wait({earlier})
            # Hundreds of agents may end at once: those that come meanwhile share this question.
            await asyncio.sleep(max(0.0, self._asked_at + _SPACING - time.monotonic()))
        self._asked_at = time.monotonic()
        self._asking, self._asked_next = self._asked_next, None
        await self.check()

    # -- watching ------------------------------------------------------------------------------------------------------

    async def supervise(self) -> TunnelError:
        """Keep the tunnel serving for as long as it can be; returns why it cannot."""
        while True:
            trouble = await self._trouble()
            self._note_outage(trouble)
            self.state = State.RESTARTING  # whoever comes now waits for what becomes of it
            self._settled.clear()
            logger.warning(
                "tunnel %s: its %s\n%s", self.process.tunnel_id, trouble, await self.process.output(), extra=_STAGE
            )
            failure = self._no_restart(trouble) or await self._restart(trouble)
            if failure is not None:
                return await self._obituary(failure)

    async def check(self) -> None:
        """Ask the service about the tunnel and let `supervise` act on it. An answer that fails is no verdict."""
        asked_about = self.restarts
        try:
            registration = await self.process.status(timeout=self._limits.status_timeout)
        except TunnelError as error:
            logger.warning("tunnel %s: its status is not known: %s", self.process.tunnel_id, error, extra=_STAGE)
            return
        if self.state is State.SERVING and self.restarts == asked_about:  # else it tells about the time before
            self._judge(registration)

    def _judge(self, registration: Registration) -> None:
        self._registration = registration
        if registration is Registration.DISCONNECTED:
            self._disconnected += 1
        elif registration is Registration.CONNECTED:
            self._disconnected, self._restarted_disconnected = 0, False
            self._connected_at = time.monotonic()
        elif registration is Registration.PENDING:
            self._disconnected = 0
        self._nudged.set()

    async def _trouble(self) -> Trouble:
        while True:
            if found := self._look():
                return found
            self._good_at = time.monotonic()
            self._nudged.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(self._limits.watch_interval):
                    await self._nudged.wait()

    def _look(self) -> Trouble | None:
        if self.process.gone:
            return Trouble.GONE
        if not self.process.running:
            return Trouble.EXITED
        return Trouble.DISCONNECTED if self._disconnected >= _DISCONNECTED_IN_A_ROW else None

    # -- restarting ----------------------------------------------------------------------------------------------------

    def _no_restart(self, trouble: Trouble) -> TunnelError | None:
        """Say why a restart would be of no use, and count what decides about the next one."""
        if trouble is Trouble.GONE:
            return RegistrationGoneError("its registration is gone")
        if trouble is Trouble.DISCONNECTED:
            if self._restarted_disconnected:
                return TunnelError("it stayed disconnected after a restart")
            self._restarted_disconnected = True
        if time.monotonic() - self._serving_since >= self._limits.stable_after:
            self._tries = 0
        return None

    async def _restart(self, trouble: Trouble) -> TunnelError | None:
        """Try until it serves again (None) or until there is no sense in going on (why)."""
        limits, why = self._limits, TunnelError(f"its {trouble}, time after time")
        end = time.monotonic() + limits.restart_budget
        while self._tries < limits.restart_attempts and (left := end - time.monotonic()) > 0:
            self._tries += 1
            try:
                await self.process.restart(timeout=min(left, limits.restart_timeout))
            except RegistrationGoneError as error:
                return error
            except TunnelError as error:
                why, self.last_error = error, error.message
                logger.warning("tunnel %s: not restarted: %s", self.process.tunnel_id, error, extra=_STAGE)
                await asyncio.sleep(jittered(limits, self._tries))
            else:
                self._serve_again()
                return None
        return why

    def _serve_again(self) -> None:
        self.restarts += 1
        self.state = State.SERVING
        self._disconnected = 0
        now = time.monotonic()
        self._serving_since = self._good_at = self._connected_at = now
        self._registration = Registration.CONNECTED
        self._settled.set()
        logger.info("tunnel %s: restarted, same URL", self.process.tunnel_id, extra=_STAGE)

    async def _obituary(self, failure: TunnelError) -> TunnelError:
        words = [failure.detail or "", await self.process.output()]
        return TunnelError(
            f"tunnel {self.process.tunnel_id} (generation {self.number}) is dead: {failure.message}",
            detail="\n".join(filter(None, words)) or None,
            retryable=True,
        )


_STAGE = {"stage": "tunnel_health_monitor"}


def jittered(limits: Limits, failures: int) -> float:
    """Return the delay in seconds after that many failures: doubling, bounded, half of it random."""
    full = min(limits.backoff_max, limits.backoff * 2.0 ** min(failures - 1, 30))
    return full * random.uniform(0.5, 1.0)  # noqa: S311 - no secret
