"""What a worker process tells Prometheus: gauges that are read where the truth is, at the moment of the scrape."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from workers.breaker import State
from workers.loop_watch import LoopWatch


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
