"""What a worker process tells Prometheus: gauges that are read where the truth is, at the moment of the scrape."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any, Self

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

logger = logging.getLogger(__name__)

#: Metrics tell of machines and rollouts, and are served without a key: only this host may ask.
HOST = "127.0.0.1"


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


class LeakCollector(Collector):
    """Tells how much may have been left over in the whole fleet; ``leaked`` returns what is known of that."""

    def __init__(self, leaked: Callable[[], int]) -> None:
        self._leaked = leaked

    def collect(self) -> Iterator[Metric]:
        """Yield the gauge."""
        what = "Attempts of the fleet that may have left something behind, and things that could not be deleted."
        yield GaugeMetricFamily("rollouts_leaked", what, value=self._leaked())


class MetricsServer:
    """Serves ``/metrics`` on this host's loopback address while it is entered; port 0 serves nothing."""

    def __init__(self, port: int, *collectors: Collector) -> None:
        self.port = port
        self.registry = CollectorRegistry()
        for collector in collectors:
            self.registry.register(collector)

    def __enter__(self) -> Self:
        if self.port:
            try:
                self._server, self._thread = start_http_server(self.port, addr=HOST, registry=self.registry)
            except OSError as error:
                # Rollouts matter more: two workers of one host may have been given the same port.
                words = "no metrics: ROLLOUTS_METRICS_PORT=%d cannot be listened on (%s); each worker needs its own"
                logger.warning(words, self.port, error.strerror)
                self.port = 0
                return self
            logger.info("metrics at http://%s:%d/metrics", HOST, self.port)
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self.port:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()
