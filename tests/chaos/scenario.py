"""One chaos run on one of the systems, and what it came to."""

from __future__ import annotations

import asyncio
import secrets
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

from fleets import Agents, install_agent

from chaos import agents, leaks
from chaos.fleet import Fleet
from chaos.recovery import Recoveries, Recovery, percentile
from chaos.script import Script, round_of, steps, wait_calm
from producer import Producer, RolloutRequest, RolloutResult, broker, queues
from producer.contract import ErrorKind
from producer.settings import ProducerSettings

#: Seconds between two lines of progress.
_PROGRESS = 5.0
#: Seconds that the workers have at the end until all of them take work again.
_CALM_LIMIT = 60.0
_TICK = 0.05
#: Processes that want to run, for each core, on a machine that is busy with tests alone.
_CROWD = 4.0
#: Lease times after which a killed worker's rollouts must run again.
BOUND = 1.5


@dataclass(frozen=True, kw_only=True)
class Options:
    """How much is run, and what is broken for how long; times are seconds.

    ``chaos_limit`` ends the breaking when the rollouts have not ended by then, ``drain_limit`` the wait for the rest.
    With fewer in flight than the workers' slots but one worker's, a killed worker's rollouts find room elsewhere.
    ``slack`` is what may be added to the time in which they run again; `_allowed` adds more on a busy machine.
    ``sweep_limit`` is for the workers' own sweeps at the end; what is left then, `Fleet.sweep` has to clear.
    With a ``pace``, each action is done once, and a rollout comes every so often until that is over.
    An agent with more ``patience`` than a gateway or a tunnel is away for goes on with what that has kept, or lost.
    """

    rollouts: int = 1000
    workers: int = 3
    seed: int = 1
    systems: tuple[str, ...] = ("local", "prime")
    concurrency: int = 8
    in_flight: int = 14
    lease_ttl: float = 4.0
    chaos_limit: float = 420.0
    drain_limit: float = 120.0
    sweep_limit: float = 20.0
    slack: float = 0.0
    patience: float = 30.0
    pace: float | None = None
    side_by_side: bool = False
    keep: Path | None = None


@dataclass
class Outcome:
    """What one run came to."""

    systems: str
    submitted: list[str] = field(default_factory=list)
    results: list[RolloutResult] = field(default_factory=list)
    announced: Counter[str] = field(default_factory=Counter)
    calm_results: int = 0
    calm_submitted: int = 0
    deaf: list[str] = field(default_factory=list)
    leaked: dict[str, list[str]] = field(default_factory=dict)
    left_to_the_command: dict[str, int] = field(default_factory=dict)
    queue_left: dict[str, int] = field(default_factory=dict)
    load: float = 0.0
    recovery: list[Recovery] = field(default_factory=list)
    recovery_disturbed: list[Recovery] = field(default_factory=list)
    bad_scrapes: list[str] = field(default_factory=list)
    scrapes: int = 0
    crashes: list[str] = field(default_factory=list)
    late_exits: list[str] = field(default_factory=list)
    drains: list[float] = field(default_factory=list)
    actions: dict[str, int] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)
    seconds: float = 0.0


class Scenario:
    """Runs rollouts on a fleet while a script breaks it, then looks for what is missing, twice there, or left over."""

    def __init__(self, systems: str, count: int, options: Options) -> None:
        self.outcome = Outcome(systems)
        self._systems = systems
        self._count = count
        self._options = options
        self._seed = f"{options.seed}-{systems}"
        self._token = secrets.token_hex(8)
        self._began = time.monotonic()
        self._delivered: list[RolloutResult] = []

    def run(self) -> Outcome:
        options = self._options
        with tempfile.TemporaryDirectory(prefix="rollouts-chaos-", dir="/var/tmp", ignore_cleanup_errors=True) as home:
            directory = (options.keep or Path(home)) / self._systems
            fleet = Fleet(
                self._systems,
                directory,
                workers=options.workers,
                concurrency=options.concurrency,
                lease_ttl=options.lease_ttl,
                tell=self._tell,
            )
            with fleet:
                self._tell(f"{options.workers} workers, seed {options.seed}")
                # Not below /tmp: a sandbox of the platform has a /tmp of its own.
                self._home = Path(home)
                self._break(fleet)
                self._inspect(fleet)
        self.outcome.seconds = round(time.monotonic() - self._began, 1)
        return self.outcome

    # -- while it breaks -----------------------------------------------------------------------------------------------

    def _break(self, fleet: Fleet) -> None:
        recoveries = Recoveries(fleet)
        script = self._script(fleet, recoveries)
        recoveries.start()
        script.start()
        try:
            asyncio.run(self._consume(fleet, script))
        finally:
            script.stop()
            fleet.settle()
            recoveries.stop()
        outcome = self.outcome
        outcome.results = self._delivered
        outcome.actions, outcome.load = script.done, recoveries.load
        outcome.errors += [f"the script stopped: {script.failure}"] if script.failure else []
        outcome.recovery, outcome.recovery_disturbed = recoveries.found(quiet=True), recoveries.found(quiet=False)

    def _script(self, fleet: Fleet, recoveries: Recoveries) -> Script:
        platform, brief = fleet.emulator is not None, self._options.pace is not None
        sequence = round_of if brief else steps
        return Script(fleet, recoveries, sequence(self._seed, platform=platform), self._tell, insists=brief)

    def _wanted(self) -> Iterator[RolloutRequest]:
        agent = install_agent(self._home)
        for request in agents.requests(self._seed, agent, self._token, self._options.patience):
            self.outcome.submitted.append(request.rollout_id)
            yield request

    async def _paced(self, script: Script, pace: float) -> AsyncIterator[RolloutRequest]:
        for request in self._wanted():
            yield request
            await asyncio.sleep(pace)
            if script.is_over:
                return

    async def _consume(self, fleet: Fleet, script: Script) -> None:
        limits, pace = (self._options.chaos_limit, self._options.drain_limit), self._options.pace
        wanted: Iterable[RolloutRequest] | AsyncIterable[RolloutRequest]
        wanted = islice(self._wanted(), self._count) if pace is None else self._paced(script, pace)

        async def calm_down() -> None:
            await asyncio.sleep(limits[0])
            self._tell("the chaos ends before the rollouts have")
            await asyncio.to_thread(script.stop)
            fleet.settle()

        async def progress() -> None:
            while True:
                await asyncio.sleep(_PROGRESS)
                alive = sum(part.alive and not part.stopped for part in fleet.workers)
                done = f"{len(self._delivered)} of {len(self.outcome.submitted)} submitted are done"
                self._tell(f"{done}, {alive}/{len(fleet.workers)} workers alive, last: {script.last}")

        beside = [asyncio.create_task(calm_down()), asyncio.create_task(progress())]
        try:
            async with asyncio.timeout(sum(limits)):
                await self._collect(fleet, wanted, self._options.in_flight, self._delivered.append)
        except TimeoutError:
            left = len(self.outcome.submitted) - len(self._delivered)
            self.outcome.errors.append(f"{left} rollouts have not ended in time")
            self._tell(f"FAULT: {left} rollouts have not ended")
        finally:
            for task in beside:
                task.cancel()
            await asyncio.gather(*beside, return_exceptions=True)

    async def _collect(
        self,
        fleet: Fleet,
        wanted: Iterable[RolloutRequest] | AsyncIterable[RolloutRequest],
        in_flight: int,
        deliver: Callable[[RolloutResult], object],
    ) -> None:
        async with Producer(ProducerSettings(redis_url=fleet.stack.redis_url), patience=120) as producer:
            async for result in await producer.submit_many(wanted, max_in_flight=in_flight):
                deliver(result)

    # -- afterwards ----------------------------------------------------------------------------------------------------

    def _inspect(self, fleet: Fleet) -> None:
        outcome, options = self.outcome, self._options
        self._noting("calm", lambda: wait_calm(fleet, _CALM_LIMIT))
        self._noting("deaf", lambda: self._find_the_deaf(fleet))
        for batch in {result.batch_id for result in outcome.results}:
            entries = fleet.redis.xrange(broker.stream_key(batch))
            outcome.announced.update(fields[b"id"].decode() for _, fields in entries)
        outcome.queue_left = _queue_left(fleet.redis)
        left = leaks.wait_until_none(fleet, self._token, outcome.results, options.sweep_limit, self._tell)
        outcome.left_to_the_command = {what: len(each) for what, each in left.items()}
        if left:
            self._tell(f"rollouts leaks --delete: {fleet.sweep()}")
            left = leaks.while_it_runs(fleet, self._token, outcome.results)
        self._tell("ending the workers")
        fleet.end_workers()
        after = leaks.after_its_end(fleet, self._token)
        outcome.leaked = {what: sorted({*left.get(what, []), *after.get(what, [])}) for what in {*left, *after}}
        trouble = fleet.trouble
        outcome.crashes, outcome.late_exits, outcome.drains = trouble.crashes, trouble.late_exits, trouble.drains
        outcome.scrapes, outcome.bad_scrapes = fleet.scrapes.good, fleet.scrapes.bad

    def _find_the_deaf(self, fleet: Fleet) -> None:
        """Run as many rollouts at once as there are slots: a worker that takes none of them has stopped consuming."""
        count = self._options.workers * self._options.concurrency
        patient = Agents(self._home)
        about = {"model": "stand-in", "run_command": patient.command(), "env": {agents.RUN_VARIABLE: self._token}}
        requests = [RolloutRequest.parse({**about, "example_id": number}) for number in range(count)]
        names = {part.name: fleet.worker_name(part) for part in fleet.workers}
        results: list[RolloutResult] = []

        async def release() -> None:
            """Let them end when all have begun, or will not."""
            end = time.monotonic() + _CALM_LIMIT
            while len(patient.starts()) < count and time.monotonic() < end:
                await asyncio.sleep(_TICK)
            patient.release()

        async def collect() -> None:
            async with asyncio.timeout(2 * _CALM_LIMIT), asyncio.TaskGroup() as together:
                together.create_task(release())
                await self._collect(fleet, requests, count, results.append)

        self.outcome.calm_submitted = count
        try:
            asyncio.run(collect())
        finally:
            patient.close()
            self.outcome.calm_results = sum(result.completed for result in results)
        busy = {result.worker for result in results}
        self.outcome.deaf = [part for part, name in names.items() if name not in busy]
        self._tell(f"a calm round: {len(results)} of {count} by {len(busy)} workers")

    def _noting(self, what: str, check: Callable[[], object]) -> None:
        """Run a check; one that fails is told with the others, which run all the same."""
        try:
            check()
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # pytest's failures are none of Exception
            self.outcome.errors.append(f"{what}: {error!r}")
            self._tell(f"FAULT {what}: {error!r}")

    def _tell(self, what: str) -> None:
        stamp = time.strftime("%H:%M:%S") + f".{int(time.time() * 1000) % 1000:03}"
        thread = threading.current_thread().name
        print(f"{stamp} [{self._systems} {time.monotonic() - self._began:6.1f}s {thread}] {what}", file=sys.stderr)
        sys.stderr.flush()


def _queue_left(client: Any) -> dict[str, int]:
    each = queues.pending_key, queues.running_key, queues.delayed_key
    sets = {key(queue): int(client.zcard(key(queue))) for key in each for queue in agents.QUEUES}
    lists = {repr(key): int(client.llen(key)) for queue in agents.QUEUES for key in queues.queue_keys(queue)}
    return {key: count for key, count in (sets | lists).items() if count}


def run(options: Options) -> list[Outcome]:
    """Run the scenario on each of the systems, the rollouts split between them."""
    share, rest = divmod(options.rollouts, len(options.systems))
    counts = [share + (number < rest) for number in range(len(options.systems))]
    scenarios = [Scenario(name, count, options) for name, count in zip(options.systems, counts, strict=True)]
    if not options.side_by_side:
        return [scenario.run() for scenario in scenarios]
    with ThreadPoolExecutor(len(scenarios)) as threads:
        return list(threads.map(Scenario.run, scenarios))


def brief(seed: int) -> Options:
    """Return the options of the test suite's round: everything is broken once on two small fleets side by side.

    Beside other tests a step may take seconds that takes milliseconds alone, so limits are generous, and what runs
    again may take four TTLs more: whenever a worker or Redis stands still for half of one, no lease is believed to have
    lapsed for another. What is passed by for good is late all the same.
    """
    ttl = 3.0
    size = Options(seed=seed, workers=2, concurrency=12, in_flight=8, lease_ttl=ttl, slack=4 * ttl, side_by_side=True)
    return replace(size, pace=0.15, patience=8.0, chaos_limit=100.0, drain_limit=80.0, sweep_limit=5.0)


def report(options: Options, outcomes: list[Outcome]) -> dict[str, Any]:
    """Return the counts of all runs together; what must be empty or zero comes first."""
    results = [result for outcome in outcomes for result in outcome.results]
    submitted = [rollout_id for outcome in outcomes for rollout_id in outcome.submitted]
    delivered = Counter(result.rollout_id for result in results)
    announced = Counter[str]()
    for outcome in outcomes:
        announced += outcome.announced
    leaked = {f"{o.systems} {what}": len(left) for o in outcomes for what, left in sorted(o.leaked.items())}
    quiet = [recovery for outcome in outcomes for recovery in outcome.recovery]
    disturbed = [recovery for outcome in outcomes for recovery in outcome.recovery_disturbed]
    wrong = [result for result in results if not agents.is_right(result)]
    return {
        "seed": options.seed,
        "submitted": len(submitted),
        "results": len(results),
        "lost": len(set(submitted) - delivered.keys()),
        "duplicates": sum(delivered.values()) - len(delivered),
        "announced_twice": sum(announced.values()) - len(announced),
        "unknown": len(delivered.keys() - set(submitted)),
        "leaked": sum(leaked.values()),
        "leaks": leaked,
        "left_to_the_command": {o.systems: o.left_to_the_command for o in outcomes if o.left_to_the_command},
        "deaf_workers": [f"{o.systems} {name}" for o in outcomes for name in o.deaf],
        "calm_round": f"{sum(o.calm_results for o in outcomes)}/{sum(o.calm_submitted for o in outcomes)}",
        "crashes": [f"{o.systems} {what}" for o in outcomes for what in o.crashes],
        "late_exits": [f"{o.systems} {what}" for o in outcomes for what in o.late_exits],
        "bad_scrapes": [f"{o.systems} {what}" for o in outcomes for what in o.bad_scrapes],
        "scrapes": sum(o.scrapes for o in outcomes),
        "queue_left": {o.systems: o.queue_left for o in outcomes if o.queue_left},
        "errors": [f"{o.systems} {what}" for o in outcomes for what in o.errors],
        "attempts": _histogram(result.attempt for result in results),
        "outcomes": _histogram(_ending(result) for result in results),
        "failed_attempts": _histogram(a.error.kind.value for r in results for a in r.failed_attempts),
        "lease_errors": [r.rollout_id for r in results if r.error and r.error.kind is ErrorKind.LEASE],
        "wrong_outcomes": [_described(result) for result in wrong],
        "recovery": _times(recovery.took for recovery in quiet),
        "recovery_after_lapse": _times(recovery.after_lapse for recovery in quiet),
        "recovery_sweeps": _histogram(recovery.sweeps for recovery in quiet),
        "recovery_disturbed": _times(recovery.took for recovery in disturbed),
        "recovery_disturbed_sweeps": _histogram(recovery.sweeps for recovery in disturbed),
        "recovery_bound": BOUND * options.lease_ttl,
        "recovery_slack": {o.systems: round(_slack(options, o, swept_at_once=True), 2) for o in outcomes},
        "recovered_late": sum(_is_late(recovery, options, o) for o in outcomes for recovery in o.recovery),
        "load_per_core": {outcome.systems: round(outcome.load, 1) for outcome in outcomes},
        "drain_max": round(max((s for o in outcomes for s in o.drains), default=0.0), 1),
        "actions": dict(sum((Counter(outcome.actions) for outcome in outcomes), Counter[str]())),
        "seconds": {outcome.systems: outcome.seconds for outcome in outcomes},
    }


def _is_late(recovery: Recovery, options: Options, outcome: Outcome) -> bool:
    slack = _slack(options, outcome, swept_at_once=recovery.sweeps <= 1)
    return recovery.took > BOUND * options.lease_ttl + slack


def _slack(options: Options, outcome: Outcome, *, swept_at_once: bool) -> float:
    """Return what may be added to the bound: the options' slack, and the lateness that a crowded machine excuses.

    It excuses none unless the first sweep after the lease had lapsed sent the rollout again: then what took so long are
    threads and processes that wait for a core.
    """
    crowd = max(1.0, outcome.load / _CROWD)
    return options.slack * crowd + (crowd - 1 if swept_at_once else 0)


#: What must be zero or empty in a report.
FAULTS = (
    *("lost", "duplicates", "announced_twice", "unknown", "leaked"),
    *("recovered_late", "deaf_workers", "crashes", "late_exits", "errors", "bad_scrapes"),
    *("wrong_outcomes", "lease_errors", "queue_left", "left_to_the_command"),
)


def passed(numbers: dict[str, Any]) -> bool:
    """Whether nothing was lost, delivered twice or left over."""
    return numbers["results"] == numbers["submitted"] and not any(numbers[fault] for fault in FAULTS)


def _histogram(values: Any) -> dict[str, int]:
    return {str(value): count for value, count in sorted(Counter(values).items(), key=lambda item: str(item[0]))}


def _ending(result: RolloutResult) -> str:
    return f"{result.stop_condition}{f' {result.error.kind}' if result.error else ''}"


def _described(result: RolloutResult) -> str:
    error = f": {result.error}" if result.error else ""
    return f"{result.info.get('kind')} {result.rollout_id} attempt {result.attempt} {result.stop_condition}{error}"


def _times(found: Iterable[float]) -> dict[str, Any]:
    seconds = sorted(found)
    p50, p95 = percentile(seconds, 0.5), percentile(seconds, 0.95)
    return {"count": len(seconds), "p50": p50, "p95": p95, "max": round(seconds[-1], 2) if seconds else None}
