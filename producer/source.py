"""Where a batch's requests come from: an iterable, or an asynchronous one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator
from itertools import islice

from producer.contract import RolloutRequest

Requests = Iterable[RolloutRequest] | AsyncIterable[RolloutRequest]


class Source:
    """Takes requests from an iterable or an asynchronous one, several at once where they are there already."""

    def __init__(self, requests: Requests) -> None:
        self.is_async = isinstance(requests, AsyncIterable)
        self._sync: Iterator[RolloutRequest] | None = None
        self._async: AsyncIterator[RolloutRequest] | None = None
        self._next: asyncio.Task[RolloutRequest | None] | None = None
        self._error: Exception | None = None
        if isinstance(requests, AsyncIterable):
            self._async = aiter(requests)
        else:
            self._sync = iter(requests)

    async def take(self, limit: int) -> list[RolloutRequest]:
        """Return one to ``limit`` requests, or none at the end; waits for the first only.

        An error of the source is raised once everything that came before it was taken.
        """
        if self._sync is not None:
            return self._take_now(self._sync, limit)
        taken: list[RolloutRequest] = []
        while len(taken) < limit:
            if self._next is None:
                self._next = asyncio.create_task(self._anext())
            done, _ = await asyncio.wait({self._next}, timeout=0 if taken else None)
            if not done or (taken and self._next.exception() is not None):
                break
            request = self._next.result()
            if request is None:  # the task stays: every later call finds the end again
                break
            self._next = None
            taken.append(request)
        return taken

    def _take_now(self, source: Iterator[RolloutRequest], limit: int) -> list[RolloutRequest]:
        if self._error is not None:
            raise self._error
        taken: list[RolloutRequest] = []
        try:
            taken.extend(islice(source, limit))
        except Exception as error:
            if not taken:
                raise
            self._error = error
        return taken

    def close(self) -> None:
        """Stop waiting for the source."""
        if self._next is not None:
            self._next.cancel()

    async def _anext(self) -> RolloutRequest | None:
        assert self._async is not None  # noqa: S101
        return await anext(self._async, None)
