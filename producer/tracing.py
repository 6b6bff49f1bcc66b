"""OpenTelemetry (extra ``otel``, ``ROLLOUTS_TRACING=true``): one trace for each rollout, from the producer to its end.

    rollout                      from its submission to its end; by the worker that ended it
    ├── submit                   by the producer
    ├── queue                    until it was claimed for the first time
    ├── attempt                  one each, by its worker
    │   ├── register … cleanup   a phase each

Nothing is carried along for it: the ids of the trace and of its root are made from the rollout's id, which producer and
workers know. So attempts on several workers, and a retry days later, are in one trace, and a request stays what it is.
Where the spans go is said by OpenTelemetry's own variables, such as ``OTEL_EXPORTER_OTLP_ENDPOINT``.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from producer.contract import RolloutRequest

#: Seconds that the last spans have to be sent when a process ends.
_CLOSE_LIMIT = 3.0

#: The ids of the span that is made next: of its trace, where it has no parent, and its own; None for random ones.
_next_ids: ContextVar[tuple[int | None, int | None]] = ContextVar("next_ids", default=(None, None))


class TracingUnavailableError(Exception):
    """Tracing was asked for, and the packages for it are not installed."""

    def __init__(self, missing: ImportError) -> None:
        super().__init__(f"ROLLOUTS_TRACING: {missing}; pip install 'rollout-fleet[otel]', or unset it")


class Traces:
    """Makes spans of rollouts, and sends them behind the caller's back; thread-safe, and none of it raises.

    ``exporter`` is OTLP over HTTP by default. Raises `TracingUnavailableError`.
    """

    def __init__(self, service: str, exporter: Any = None, **attributes: str) -> None:
        try:
            from opentelemetry import trace
            from opentelemetry.context import Context
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.sdk.trace.id_generator import RandomIdGenerator

            if exporter is None:
                from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

                exporter = OTLPSpanExporter()
        except ImportError as error:
            raise TracingUnavailableError(error) from None
        self._trace = trace
        self._nothing = Context()

        class Ids(RandomIdGenerator):  # type: ignore[misc]  # the SDK may not be there
            """Random ids, where none are given."""

            def generate_trace_id(self) -> int:
                return _next_ids.get()[0] or int(super().generate_trace_id())

            def generate_span_id(self) -> int:
                return _next_ids.get()[1] or int(super().generate_span_id())

        resource = Resource.create({"service.name": service, **attributes})
        self._provider = TracerProvider(resource=resource, id_generator=Ids())
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("rollouts")

    def close(self) -> None:
        """Send what is left, for a few seconds at most."""
        sending = threading.Thread(target=self._provider.shutdown, name="tracing-end", daemon=True)
        sending.start()
        sending.join(_CLOSE_LIMIT)

    def submitted(self, requests: Iterable[RolloutRequest], began: float) -> None:
        """Note that rollouts were submitted, between ``began`` (Unix seconds) and now."""
        for request in requests:
            self.span("submit", request.rollout_id, began, kind="PRODUCER", attributes=identity(request))

    def ended(self, rollout_id: str, began: float, attributes: Mapping[str, Any], error: str | None = None) -> None:
        """Note that a rollout has ended which was submitted at ``began``: the root of its trace."""
        with _ids(*root_of(rollout_id)):
            self._make("rollout", None, began, attributes=attributes, error=error)

    def span(
        self,
        name: str,
        rollout_id: str,
        began: float,
        ended: float | None = None,
        *,
        span_id: int | None = None,
        parent: int | None = None,
        kind: str = "INTERNAL",
        attributes: Mapping[str, Any] | None = None,
        error: str | None = None,
    ) -> None:
        """Make one span of a rollout; times are Unix seconds, ``parent`` is the root by default."""
        with _ids(None, span_id):
            context = self._context(rollout_id, parent)
            self._make(name, context, began, ended, kind=kind, attributes=attributes or {}, error=error)

    def _context(self, rollout_id: str, parent: int | None) -> Any:
        """Return what has ``parent``, or the root, for its current span; sampled where the root is, or will be."""
        trace = self._trace
        trace_id, root_id = root_of(rollout_id)
        sampled = self._provider.sampler.should_sample(None, trace_id, "rollout").decision.is_sampled()
        flags = trace.TraceFlags(trace.TraceFlags.SAMPLED if sampled else trace.TraceFlags.DEFAULT)
        context = trace.SpanContext(trace_id, parent or root_id, is_remote=True, trace_flags=flags)
        return trace.set_span_in_context(trace.NonRecordingSpan(context))

    def _make(
        self,
        name: str,
        context: Any,
        began: float,
        ended: float | None = None,
        *,
        kind: str = "INTERNAL",
        attributes: Mapping[str, Any],
        error: str | None = None,
    ) -> None:
        known = {key: value for key, value in attributes.items() if value is not None}
        span: Any = self._tracer.start_span(
            name,
            self._nothing if context is None else context,
            self._trace.SpanKind[kind],
            attributes=known,
            start_time=_nanoseconds(began),
        )
        if error is not None:
            span.set_status(self._trace.StatusCode.ERROR, error)
        span.end(_nanoseconds(time.time() if ended is None else ended))


def root_of(rollout_id: str) -> tuple[int, int]:
    """Return the ids of a rollout's trace and of its root: the same wherever they are asked for."""
    digest = hashlib.sha256(f"rollout {rollout_id}".encode()).digest()
    return int.from_bytes(digest[:16], "big") or 1, int.from_bytes(digest[16:24], "big") or 1


def identity(request: RolloutRequest) -> dict[str, Any]:
    """Return the attributes by which a rollout's spans are found."""
    found = {"rollout.id": request.rollout_id, "rollout.batch": request.batch_id, "rollout.group": request.group_id}
    return found | {"rollout.environment": request.environment, "gen_ai.request.model": request.model}


@contextmanager
def _ids(trace_id: int | None, span_id: int | None) -> Iterator[None]:
    token = _next_ids.set((trace_id, span_id))
    try:
        yield
    finally:
        _next_ids.reset(token)


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1_000_000_000)
