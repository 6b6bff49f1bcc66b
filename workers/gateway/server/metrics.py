"""What Prometheus is told. Counted in plain numbers, as a model call has no time to spare; collected when asked."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

#: Seconds; a model call takes from a tenth of a second to many minutes.
_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


class Histogram:
    """Observed seconds."""

    __slots__ = ("counts", "total")

    def __init__(self) -> None:
        self.counts = [0] * (len(_BUCKETS) + 1)
        self.total = 0.0

    def observe(self, seconds: float) -> None:
        """Count an observation."""
        self.counts[bisect_left(_BUCKETS, seconds)] += 1
        self.total += seconds

    def family(self, name: str, text: str) -> HistogramMetricFamily:
        """Return it as Prometheus has it."""
        buckets: list[Any] = []
        so_far = 0
        for bound, count in zip([*map(str, _BUCKETS), "+Inf"], self.counts, strict=True):
            so_far += count
            buckets.append((bound, so_far))
        return HistogramMetricFamily(name, text, buckets=buckets, sum_value=self.total)


class Metrics:
    """The gateway's numbers; ``state`` gives those that are not counted but read."""

    def __init__(self, state: Any) -> None:
        self.calls: Counter[tuple[str, str]] = Counter()  # by dialect and outcome
        self.prompt_tokens = 0
        self.completion_tokens = 0
        self.seconds = Histogram()
        self.first_byte = Histogram()
        self._state = state
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def text(self) -> bytes:
        """Return the answer of ``/metrics``."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Yield all families, as prometheus-client's collectors do."""
        calls = CounterMetricFamily("rollouts_gateway_calls", "Model calls that ended.", labels=["dialect", "outcome"])
        for labels, count in self.calls.items():
            calls.add_metric(labels, count)
        yield calls
        tokens = CounterMetricFamily("rollouts_gateway_tokens", "Tokens, as model servers counted.", labels=["kind"])
        tokens.add_metric(["prompt"], self.prompt_tokens)
        tokens.add_metric(["completion"], self.completion_tokens)
        yield tokens
        yield self.seconds.family("rollouts_gateway_call_seconds", "How long answered model calls took.")
        yield self.first_byte.family("rollouts_gateway_first_byte_seconds", "Until a stream's first part came.")
        yield from self._read()

    def _read(self) -> Iterator[Metric]:
        state = self._state
        yield GaugeMetricFamily("rollouts_gateway_rollouts", "Registered rollouts.", len(state.recorder))
        yield GaugeMetricFamily("rollouts_gateway_in_flight", "Model calls that run.", state.upstreams.in_flight)
        yield GaugeMetricFamily("rollouts_gateway_waiting", "Model calls that wait for room.", state.upstreams.waiting)
        yield GaugeMetricFamily("rollouts_gateway_paused", "1 while new model calls are held.", state.gate.is_paused)
        size = state.journal.size if state.journal else 0
        yield GaugeMetricFamily("rollouts_gateway_journal_bytes", "Size of the journal's files.", size)
        for name, text, of in (
            (
                "rollouts_gateway_upstream_up",
                "1 unless a model server is left alone because it fails.",
                lambda server: not server.ejected,
            ),
            (
                "rollouts_gateway_upstream_in_flight",
                "Model calls that run at a model server.",
                lambda server: server.in_flight,
            ),
        ):
            gauge = GaugeMetricFamily(name, text, labels=["upstream"])
            for server in state.upstreams.servers:
                gauge.add_metric([server.name], of(server))
            yield gauge
        failed = CounterMetricFamily("rollouts_gateway_upstream_failures", "Calls it failed.", labels=["upstream"])
        for server in state.upstreams.servers:
            failed.add_metric([server.name], server.failed)
        yield failed
