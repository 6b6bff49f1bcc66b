"""What a worker process tells Prometheus: gauges that are read where the truth is, at the moment of the scrape.

What the whole fleet shares (`QueueCollector`) each worker reads from Redis by itself: so it is told as long as any
worker lives, beat needs no port, and a question takes the ``max`` of the answers. What is counted stands in
`workers.instruments`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import redis
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from producer.contract import Phase
from producer.counts import Counting, QueueCounts, ask_what_there_is
from producer.queues import QUEUE
from workers import instruments
from workers.breaker import State
from workers.jobs import JobStore
from workers.loop_watch import LoopWatch
from workers.state import Rollout

logger = logging.getLogger(__name__)

#: Seconds that a scrape waits for Redis; Prometheus itself waits for ten.
SCRAPE_PATIENCE = 2.0
#: Seconds for which what Redis said, or that it said nothing, is told again.
_FRESH = 1.0


#: What is told of each queue: the metric's name, its meaning, and the figure.
_OF_A_QUEUE: tuple[tuple[str, str, Callable[[QueueCounts], float]], ...] = (
    ("rollouts_queued", "Rollouts of the fleet that wait for a worker.", lambda of: of.pending),
    ("rollouts_delayed", "Rollouts of the fleet that failed, and wait.", lambda of: of.delayed),
    ("rollouts_running", "Rollouts of the fleet that hold a lease.", lambda of: of.running),
    ("rollouts_lapsed", "Rollouts of the fleet whose lease lapsed.", lambda of: of.lapsed),
    (
        "rollouts_oldest_queued_seconds",
        "For how long the oldest of those that are queued has waited.",
        lambda of: of.oldest,
    ),
)


class RolloutCollector(Collector):
    """Tells what this worker runs: ``running`` returns its attempts, ``slots`` how many it may run at one time."""

    def __init__(self, running: Callable[[], list[Rollout]], slots: Callable[[], int]) -> None:
        self._running = running
        self._slots = slots

    def collect(self) -> Iterator[Metric]:
        """Yield the gauges; every phase has one, also when nothing is in it."""
        running = self._running()
        phases = Counter(rollout.phase for rollout in running)
        in_phase = GaugeMetricFamily("rollouts_in_phase", "Attempts that this worker runs, by phase.", labels=["phase"])
        for phase in Phase:
            in_phase.add_metric([phase.value], phases[phase])
        live = sum(rollout.sandbox is not None for rollout in running)
        yield in_phase
        yield GaugeMetricFamily("rollouts_concurrency", "Attempts that it runs at one time.", value=self._slots())
        yield GaugeMetricFamily("rollouts_sandboxes", "Sandboxes that its attempts hold.", value=live)


class QueueCollector(Collector):
    """Tells what the whole fleet shares, from Redis: its queues and its memory; and which queues this worker serves.

    ``store`` has a connection of its own, of little patience (`SCRAPE_PATIENCE`). Where Redis does not answer there is
    only ``rollouts_redis_up``, and the scrape goes on. Scrapes that come at one time share an answer.
    """

    def __init__(self, store: JobStore, serves: Sequence[str] = (QUEUE,)) -> None:
        self._store = store
        self._serves = serves
        self._lock = threading.Lock()
        self._found: list[Metric] = []
        self._read_at = float("-inf")

    def forget(self) -> None:
        """Have the next scrape ask Redis, however soon it comes."""
        self._read_at = float("-inf")

    def collect(self) -> Iterator[Metric]:
        """Yield the gauges."""
        with self._lock:
            if time.monotonic() - self._read_at > _FRESH:
                self._found = self._look()
                self._read_at = time.monotonic()
            found = self._found
        yield from found

    def _look(self) -> list[Metric]:
        up = GaugeMetricFamily("rollouts_redis_up", "Whether Redis answered this worker's scrape: 1 or 0.")
        try:
            found = [*self._queue(), *self._memory()]
        except redis.RedisError as error:
            logger.info("metrics without what Redis knows: %s", error, extra={"stage": "admin"})
            found = []
        up.add_metric([], float(bool(found)))
        return [up, *found]

    def _queue(self) -> Iterator[Metric]:
        pipe = self._store.client.pipeline(transaction=False)
        ask_what_there_is(pipe)
        with instruments.REDIS_ROUND_TRIP.time():
            counting = Counting(pipe.execute(), besides=self._serves)
        counting.ask(pipe)
        counts = counting.read(pipe.execute())
        for name, what, value in _OF_A_QUEUE:
            family = GaugeMetricFamily(name, what, labels=["queue"])
            for queue, of in counts.queues.items():
                family.add_metric([queue], value(of))
            yield family
        parked = "Rollouts of the fleet that wait for what is limited."
        yield GaugeMetricFamily("rollouts_parked", parked, value=counts.parked)
        serves = GaugeMetricFamily("rollouts_serves", "1 for each queue that this worker serves.", labels=["queue"])
        for queue in self._serves:
            serves.add_metric([queue], 1)
        yield serves

    def _memory(self) -> Iterator[Metric]:
        try:
            memory = self._store.client.info("memory")
        except redis.ResponseError:  # its user may not ask
            return
        used, limit = memory.get("used_memory", 0), memory.get("maxmemory", 0)
        yield GaugeMetricFamily("rollouts_redis_memory_used_bytes", "Memory that Redis uses.", value=used)
        yield GaugeMetricFamily("rollouts_redis_memory_limit_bytes", "Its maxmemory; 0 for no limit.", value=limit)


class TunnelCollector(Collector):
    """Turns the tunnels' report into metrics; ``report`` is `TunnelProvider.report`."""

    def __init__(self, report: Callable[[], list[dict[str, Any]]]) -> None:
        self._report = report

    def collect(self) -> Iterator[Metric]:
        """Yield one family for each figure, labelled by the gateway that the tunnel leads to."""
        alive = GaugeMetricFamily("rollouts_tunnel_alive", "Whether the tunnel works: 1 or 0.", labels=["gateway"])
        generation = GaugeMetricFamily(
            "rollouts_tunnel_generation",
            "Registrations so far; each has a new URL.",
            labels=["gateway"],
        )
        restarts = CounterMetricFamily(
            "rollouts_tunnel_restarts", "Restarts that kept the tunnel's URL.", labels=["gateway"]
        )
        rollouts = GaugeMetricFamily("rollouts_tunnel_rollouts", "Rollouts that hold the tunnel.", labels=["gateway"])
        for tunnel in self._report():
            gateway = [str(tunnel["gateway_url"])]
            alive.add_metric(gateway, float(tunnel["alive"]))
            generation.add_metric(gateway, tunnel["generation"])
            restarts.add_metric(gateway, tunnel["restarts"])
            rollouts.add_metric(gateway, tunnel["rollouts"])
        yield from (alive, generation, restarts, rollouts)


class BreakerCollector(Collector):
    """Turns the circuit breaker's report into metrics; ``report`` is `workers.breaker.Breaker.report`."""

    def __init__(self, report: Callable[[], dict[str, Any]]) -> None:
        self._report = report

    def collect(self) -> Iterator[Metric]:
        """Yield one family for each figure, labelled by the system that fails; the words of its error are no label."""
        state = GaugeMetricFamily(
            "rollouts_breaker_state",
            "1 for the state in which the breaker is for the system, 0 for the others.",
            labels=["system", "state"],
        )
        failures = GaugeMetricFamily("rollouts_breaker_failures", "Failures in a row.", labels=["system"])
        opened = CounterMetricFamily("rollouts_breaker_opened", "How often it opened.", labels=["system"])
        report = self._report()
        for system, of in report["systems"].items():
            for name in State:
                state.add_metric([system, name.value], float(of["state"] == name))
            failures.add_metric([system], of["failures"])
            opened.add_metric([system], of["opened"])
        what = "Seconds until one rollout is tried again; 0 while the breaker is not open."
        yield from (state, failures, opened)
        yield GaugeMetricFamily("rollouts_breaker_probe_in_seconds", what, value=report["seconds"])


class LoopCollector(Collector):
    """Tells how late the worker's event loop is and what has blocked it.

    ``lag`` returns the percentiles of the last minute in milliseconds, as ``{p50, p99, max}``.
    """

    def __init__(self, watch: LoopWatch, lag: Callable[[], dict[str, float]]) -> None:
        self._watch = watch
        self._lag = lag

    def collect(self) -> Iterator[Metric]:
        """Yield the families; they are read by the scrape's own thread, so they tell of a loop that hangs too."""
        what = "Seconds since the event loop last moved; it does so ten times a second."
        yield GaugeMetricFamily("rollouts_loop_behind_seconds", what, value=self._watch.behind())
        lag = GaugeMetricFamily(
            "rollouts_loop_lag_seconds", "How late the event loop woke in the last minute.", labels=["statistic"]
        )
        found = self._lag()
        for name in ("p50", "p99", "max"):
            lag.add_metric([name], found[name] / 1000)
        blocked = CounterMetricFamily(
            "rollouts_loop_blocked", "How often the event loop was blocked, by the hook that did.", labels=["hook"]
        )
        seconds = CounterMetricFamily(
            "rollouts_loop_blocked_seconds", "For how long it was blocked in all.", labels=["hook"]
        )
        for hook, episodes in list(self._watch.episodes.items()):
            blocked.add_metric([hook], episodes.count)
            seconds.add_metric([hook], episodes.seconds)
        yield from (lag, blocked, seconds)


class LeakCollector(Collector):
    """Tells how much may have been left over in the whole fleet; ``leaked`` returns what is known of that."""

    def __init__(self, leaked: Callable[[], int]) -> None:
        self._leaked = leaked

    def collect(self) -> Iterator[Metric]:
        """Yield the gauge."""
        what = "Attempts of the fleet that may have left something behind, and things that could not be deleted."
        yield GaugeMetricFamily("rollouts_leaked", what, value=self._leaked())
