"""Starting a tunnel: one start for all who wait for it, at the fleet's rate, tried again with backoff."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable
from contextvars import Context

from workers.aio import off_the_clock
from workers.errors import TunnelError
from workers.tunnels.backend import (
    Limits,
    RateLimitedError,
    StartLimit,
    StartRefusedError,
    TunnelBackend,
    TunnelProcess,
)
from workers.tunnels.generation import jittered

logger = logging.getLogger(__name__)

#: Gets what a start that did not work may have left: a process, and a registration under its label if there is one.
Discard = Callable[[TunnelProcess, str | None], None]


class Start:
    """One start of a tunnel to ``host:port``, in a task of its own: nobody who waits for it can cancel it.

    ``failures`` is how many starts have failed before it, one after the other.
    """

    def __init__(
        self,
        backend: TunnelBackend,
        host: str,
        port: int,
        *,
        limits: Limits,
        throttle: StartLimit | None,
        discard: Discard,
        failures: int = 0,
    ) -> None:
        self._backend = backend
        self._host = host
        self._port = port
        self._limits = limits
        self._throttle = throttle
        self._discard = discard
        self._failures = failures
        self._admitted = asyncio.Event()
        self.tries = 0
        # In a context of its own: deadlines and log fields of whoever came first are not those of the others.
        self.task = asyncio.get_running_loop().create_task(
            self._run(), name=f"tunnel to {host}:{port}", context=Context()
        )
        self.task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[tuple[TunnelProcess, str]]) -> None:
        self._admitted.set()
        if not task.cancelled():
            task.exception()  # retrieved: perhaps nobody waits any more

    async def wait(self) -> None:
        """Wait for the end of the start; raises `TunnelError` if it failed. Queueing in the fleet is off the clock."""
        async with off_the_clock():
            await self._admitted.wait()
        try:
            await asyncio.shield(self.task)
        except TunnelError as error:
            raise error.again() from None
        except asyncio.CancelledError:
            # Ours, or that of the start, which only the closing of the pool cancels.
            if self.task.cancelled() and not _being_cancelled():
                raise pool_closed() from None
            raise

    async def _run(self) -> tuple[TunnelProcess, str]:
        await self._take()
        self._admitted.set()
        if self._failures:
            await asyncio.sleep(jittered(self._limits, self._failures))
        end = time.monotonic() + self._limits.start_budget
        while True:
            try:
                return await self._try(end - time.monotonic())
            except StartRefusedError as error:
                raise self._failed(error) from None
            except RateLimitedError as error:
                delay = error.retry_after
                failure: TunnelError = error
                if self._throttle is not None:
                    await self._throttle.pause(delay)
            except TunnelError as error:
                delay, failure = jittered(self._limits, self._failures + self.tries), error
            if self.tries >= self._limits.start_attempts or time.monotonic() + delay >= end:
                raise self._failed(failure) from None
            logger.warning("no tunnel to %s:%s yet: %s", self._host, self._port, failure, extra=_STAGE)
            await asyncio.sleep(delay)
            await self._take()

    async def _try(self, left: float) -> tuple[TunnelProcess, str]:
        self.tries += 1
        label = f"start:{secrets.token_hex(8)}"
        process = self._backend.open(self._host, self._port, label)
        try:
            await process.start(timeout=max(0.0, min(left, self._limits.start_timeout)))
        except BaseException as error:
            # Also when cancelled, and also when the answer to the registration was lost: it may exist. Only whom the
            # service turns away has none, and would be turned away from looking as well.
            turned_away = isinstance(error, StartRefusedError) and not error.retryable
            self._discard(process, None if turned_away else label)
            raise
        return process, label

    def _failed(self, error: TunnelError) -> TunnelError:
        tries = f" after {self.tries} tries" if self.tries > 1 else ""
        message = f"no tunnel to {self._host}:{self._port}{tries}: {error.message}"
        kind = StartRefusedError if isinstance(error, StartRefusedError) else TunnelError
        return kind(message, detail=error.detail, retryable=error.retryable)

    async def _take(self) -> None:
        if self._throttle is not None:
            await self._throttle.take()


_STAGE = {"stage": "start_tunnel"}


def pool_closed() -> TunnelError:
    """Return the error of those who hold, want or wait for a tunnel when the worker's pool closes."""
    return TunnelError("the worker's tunnels are closed: it is shutting down")


def _being_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
