"""Runs one batch to its end for a person at a terminal: progress, a file of results, Ctrl-C, and a summary."""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn

from producer.batch import Batch, Counts
from producer.client import Producer
from producer.connection import FleetConnection, end
from producer.contract import InvalidRequestError, RolloutRequest, StopCondition
from producer.errors import FleetError, RunBrokenError, first_of
from producer.files.errors import ResultsFileError
from producer.files.output import ResultsOutput, prepare_results
from producer.ids import new_batch_id
from producer.progress import Progress, plain_or_rich
from producer.resume import Resumption
from producer.settings import ProducerSettings
from producer.source import Requests
from producer.stalled import Stalled
from producer.summary import Summary
from producer.worker_report import count

_IDS_AT_ONCE = 1000


@dataclass(frozen=True)
class RunOptions:
    """How a batch is run.

    ``total`` is the number of requests, for progress. ``fresh_ids`` are rollout ids that must not be in Redis yet, or
    nothing is submitted. ``resume_hint`` is printed after a Ctrl-C. ``wind_down`` is for how many seconds the
    cancelled rollouts are waited for. ``overwrite`` applies when the results' file is given by its path. ``on_open`` is
    called once results are about to be written. ``resumption`` takes over what an earlier process had submitted.
    """

    settings: ProducerSettings
    batch_id: str = field(default_factory=lambda: new_batch_id("run"))
    total: int | None = None
    max_in_flight: int | None = None
    fresh_ids: Iterable[str] = ()
    resume_hint: str | None = None
    wind_down: float = 20.0
    overwrite: bool = False
    on_open: Callable[[], None] | None = None
    resumption: Resumption | None = None


class Interrupts:
    """Turns SIGINT, SIGTERM and SIGHUP (a closed terminal) into two events: stop tidily, and then leave at once."""

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()

    @contextmanager
    def installed(self) -> Iterator[Interrupts]:
        """Handle the signals for as long as the context lasts; elsewhere than in the main thread, not at all."""
        signals = (
            (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
            if threading.current_thread() is threading.main_thread()
            else ()
        )
        loop = asyncio.get_running_loop()
        before = {number: signal.getsignal(number) for number in signals}
        for number in signals:
            loop.add_signal_handler(number, self._arrived)
        try:
            yield self
        finally:
            for number, handler in before.items():
                loop.remove_signal_handler(number)
                signal.signal(number, handler if handler is not None else signal.SIG_DFL)

    def _arrived(self) -> None:
        (self.second if self.first.is_set() else self.first).set()


def run_batch(requests: Iterable[RolloutRequest], out: Path | ResultsOutput, options: RunOptions) -> Summary:
    """Run a batch to its end, write each finished result to ``out`` as it comes, and return what it amounted to.

    The first Ctrl-C cancels what is in flight and keeps what is done, the second leaves at once; both give a summary
    that says ``interrupted``. Cancelled rollouts are counted and not written, so that resuming runs them.

    ``out`` given by its path is Parquet when that is its suffix, and else one JSON object a line.

    Raises:
        FleetUnreachableError: Redis does not answer at the start; nothing was submitted.
        ResultsFileError: ``out`` cannot be used; nothing was submitted.
        RunBrokenError: the run ended early, because ``out`` cannot be written any more, an id was taken or Redis
            refuses us; what was in flight is cancelled, and the results that were written stay.
    """
    return asyncio.run(run_batch_async(requests, out, options))


async def run_batch_async(
    requests: Iterable[RolloutRequest], out: Path | ResultsOutput, options: RunOptions
) -> Summary:
    """Do what `run_batch` does, on the running event loop."""
    file = prepare_results(out, overwrite=options.overwrite) if isinstance(out, Path) else out
    summary = Summary(batch_id=options.batch_id, kept=len(file.kept), kept_failed=file.kept_failed)
    with Interrupts().installed() as interrupts:
        async with Producer(options.settings, tell=lambda text: _say(f"warning: {text}")) as producer:
            await _refuse_known(producer.connection, options.fresh_ids)
            with suppress(FleetError):  # it is told again when something is submitted
                await producer.served.warn()
            with file, plain_or_rich(options.total) as progress:
                if options.on_open is not None:
                    options.on_open()
                run = _Run(producer, file, summary, options)
                async with Stalled(producer.connection, run.counts, _say).watching():
                    await run.to_the_end(requests, interrupts, progress)
    if options.resumption is not None and options.resumption.taken_over:
        _say(f"taken over of what was submitted before: {count(options.resumption.taken_over, 'rollout')}")
    if summary.interrupted and options.resume_hint:
        _say(f"to run the rest: {options.resume_hint}")
    return summary


class _Run:
    def __init__(self, producer: Producer, file: ResultsOutput, summary: Summary, options: RunOptions) -> None:
        self._producer = producer
        self._file = file
        self._summary = summary
        self._options = options
        self._batch: Batch | None = None

    def counts(self) -> Counts | None:
        """Return where the batch stands; None before it is submitted."""
        return self._batch.counts if self._batch else None

    async def to_the_end(self, requests: Iterable[RolloutRequest], interrupts: Interrupts, progress: Progress) -> None:
        work = asyncio.create_task(self._work(requests))
        first = asyncio.create_task(interrupts.first.wait())
        ticker = asyncio.create_task(self._tick(progress))
        try:
            await asyncio.wait({work, first}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                self._summary.interrupted = True
                _say("stopping: what is in flight is being cancelled; Ctrl-C again leaves at once")
                await self._wind_down(work, interrupts.second)
            elif work.exception() is not None:
                await self._cancel_batch()
        finally:
            await end(first, ticker, work)
        self._show(progress)
        if not work.cancelled() and (error := work.exception()) is not None:
            self._raise(error)

    def _raise(self, error: BaseException) -> NoReturn:
        # Without a batch, `submit_many` raised, and has cancelled what it had sent: nothing came of the run.
        if self._batch is not None and isinstance(error, (FleetError, ResultsFileError, InvalidRequestError)):
            raise RunBrokenError(f"the run ended early, and what was in flight is cancelled: {error}") from error
        raise error

    async def _work(self, requests: Iterable[RolloutRequest]) -> None:
        options = self._options
        named: Requests = requests
        if options.resumption is not None:
            named = options.resumption.requests(self._producer.connection.lasting(), requests)
        self._batch = await self._producer.submit_many(
            named, batch_id=options.batch_id, max_in_flight=options.max_in_flight
        )
        async for result in self._batch:
            if result.stop_condition is not StopCondition.CANCELLED:
                self._file.write(result)
                if self._file.is_full:
                    await asyncio.to_thread(self._file.roll)
            self._summary.add(result)

    async def _wind_down(self, work: asyncio.Task[None], second: asyncio.Event) -> None:
        """Cancel the batch and take its last results; for a bounded time, and no longer than the user waits."""
        leave = asyncio.create_task(second.wait())
        cancel = asyncio.create_task(self._cancel_batch())
        if self._batch is None:
            work.cancel()  # still submitting the first window: that cleans up after itself
        ended = asyncio.gather(cancel, asyncio.wait({work}))
        either: set[asyncio.Future[Any]] = {ended, leave}
        await asyncio.wait(either, timeout=self._options.wind_down, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            left = self._batch.counts.in_flight if self._batch else 0
            _say(f"left without waiting for {left} rollouts; their workers cancel them")
        await end(leave, cancel, ended)

    async def _cancel_batch(self) -> None:
        if self._batch is None:
            return
        with suppress(FleetError, TimeoutError):
            async with asyncio.timeout(self._options.wind_down):
                await self._batch.cancel()

    async def _tick(self, progress: Progress) -> None:
        while True:
            self._show(progress)
            await asyncio.sleep(progress.interval)

    def _show(self, progress: Progress) -> None:
        if (counts := self.counts()) is not None:
            progress.show(counts)


async def _refuse_known(connection: FleetConnection, rollout_ids: Iterable[str]) -> None:
    known: list[str] = []
    some = iter(rollout_ids)
    while not known and (chunk := list(islice(some, _IDS_AT_ONCE))):
        known = [i for i, state in (await connection.states(chunk)).items() if state is not None]
    if known:
        raise FleetError(
            f"rollout id used by an earlier run: {first_of(known)}; leave rollout_id out of the tasks or change it, or "
            "use --resume, which gives what runs again an id of its own"
        )


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


__all__ = ["Interrupts", "ResultsFileError", "RunOptions", "run_batch", "run_batch_async"]
