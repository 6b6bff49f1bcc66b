"""One trace for each rollout, through producer, queue, attempts and phases; off unless it is asked for."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
import redis
from celery import Celery
from helm.binaries import development_module

from producer import Producer, ProducerSettings, RolloutRequest, StopCondition, broker
from producer.contract import ErrorInfo, ErrorKind, Phase
from producer.tracing import Traces, root_of
from workers import results
from workers.attempt import in_phase
from workers.history import HandBack
from workers.jobs import Claim, JobStore
from workers.registry import ConfigurationError
from workers.settings import WorkerSettings
from workers.state import Rollout
from workers.tracing import Spans, tracing


@pytest.fixture
def sdk() -> Any:
    return development_module("opentelemetry.sdk.trace.export.in_memory_span_exporter")


@pytest.fixture
def store(redis_url: str) -> Iterator[JobStore]:
    app = Celery("test", set_as_current=False)
    app.config_from_object(broker.celery_config(redis_url) | {"result_backend": results.PREFIX + redis_url})
    with redis.Redis.from_url(redis_url) as client:
        yield JobStore(client, app, lease_ttl=60)
    app.close()


async def attempt(store: JobStore, spans: Spans, worker: str, *, fails: bool) -> Rollout:
    """Run one attempt of the rollout, as the fleet does, and end it or give it back."""
    claim = store.claim("r1", worker)
    assert isinstance(claim, Claim)
    rollout = Rollout(claim.parsed(), "http://g", attempt=claim.attempt, worker=worker)
    with spans.attempt(rollout, claim):
        for phase in (Phase.REGISTER, Phase.SANDBOX):
            async with in_phase(rollout, phase):
                pass
        if fails:
            rollout.fail(ErrorInfo(kind=ErrorKind.SANDBOX, message="it died"))
    if fails:
        store.release(rollout.request, claim.attempt, worker, HandBack.over("it failed"))
    else:
        spans.ended(rollout, claim, StopCondition.COMPLETED)
    return rollout


def test_a_rollout_has_one_trace_from_its_submission_through_each_attempt(
    redis_url: str, store: JobStore, sdk: Any
) -> None:
    exporters = [sdk.InMemorySpanExporter() for _ in range(3)]
    producer_side, first, second = (Traces(f"part {n}", exporter) for n, exporter in enumerate(exporters))

    async def story() -> None:
        async with Producer(ProducerSettings(redis_url=redis_url)) as producer:
            producer.connection.traces = producer_side
            request = RolloutRequest(rollout_id="r1", model="m", batch_id="b", group_id="g")
            await producer.submit(request)
            await producer.submit(request)  # which changes nothing
        await attempt(store, Spans(first), "w1", fails=True)
        await attempt(store, Spans(second), "w2", fails=False)

    asyncio.run(story())
    for traces in (producer_side, first, second):
        traces.close()
    found = [span for exporter in exporters for span in exporter.get_finished_spans()]

    trace_id, root_id = root_of("r1")
    assert {span.context.trace_id for span in found} == {trace_id}
    names = sorted(span.name for span in found)
    assert names == sorted(["rollout", "submit", "queue", *("attempt", "register", "sandbox") * 2])
    (root,) = [span for span in found if span.name == "rollout"]
    assert (root.context.span_id, root.parent) == (root_id, None)
    attempts = {span.context.span_id: span for span in found if span.name == "attempt"}
    for span in found:
        if span.name in {"submit", "queue", "attempt"}:
            assert span.parent.span_id == root_id
        elif span is not root:
            assert attempts[span.parent.span_id].attributes["rollout.worker"] == span.attributes["rollout.worker"]
        assert span.attributes["rollout.id"] == "r1"
        assert span.start_time <= span.end_time
    assert root.attributes["rollout.outcome"] == "completed"
    assert {span.attributes["rollout.attempt"]: span.status.is_ok for span in attempts.values()} == {1: False, 2: True}
    assert root.start_time == min(span.start_time for span in found if span.name == "queue")


def test_what_is_sampled_is_so_in_all_of_its_parts(sdk: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0.5")
    exporter = sdk.InMemorySpanExporter()
    traces = Traces("a worker", exporter)
    for number in range(40):
        traces.span("attempt", f"r{number}", 1.0)
        traces.ended(f"r{number}", 1.0, {})
    traces.close()

    spans = exporter.get_finished_spans()
    roots, attempts = ({s.context.trace_id for s in spans if s.name == name} for name in ("rollout", "attempt"))
    assert roots == attempts
    assert 0 < len(roots) < 40


def test_spans_go_where_opentelemetrys_own_variables_say(
    redis_url: str, sdk: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    received: list[tuple[str, bytes]] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Collector)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "none")

    async def story() -> None:
        async with Producer(ProducerSettings(redis_url=redis_url, tracing=True)) as producer:
            await producer.submit(RolloutRequest(rollout_id="r1", model="m"))

    asyncio.run(story())
    server.shutdown()
    server.server_close()

    assert {path for path, _ in received} == {"/v1/traces"}
    body = b"".join(part for _, part in received)  # in one, unless the submission took long
    assert root_of("r1")[0].to_bytes(16, "big") in body
    assert b"submit" in body


def test_without_the_packages_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigurationError, match="rollout-fleet\\[otel\\]"), tracing(WorkerSettings(tracing=True), "w"):
        pass


def test_nothing_is_loaded_unless_it_is_asked_for() -> None:
    program = "import sys, workers.app, producer.client; print('opentelemetry.exporter' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout == "False\n"
    )
