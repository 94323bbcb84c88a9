"""Traces with OpenTelemetry: one span per traced batch. Imported only when configured: the library is an extra.

    publish   from the request to the acknowledgement; its parent is the `traceparent` of the first record
    └ append  from the append to the completion on disk
    deliver   one delivery, linked to the `traceparent` of its records

A batch whose sender decided to trace it is traced; of the others one in `traces.one_in`. Spans leave on a thread of their own. A receiver
that does not answer costs spans, not requests.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Iterable
from typing import Any, Final

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from headrace import __version__
from headrace.broker.tracing import first_headers, traceparent
from headrace.records import AnyBatch, Headers

_LINKS_MAX: Final = 16
_EXPORT_SECONDS_MAX: Final = 5
_PROPAGATOR: Final = TraceContextTextMapPropagator()


class OpenTelemetryTracer:
    """Implements `headrace.broker.tracing.Tracer`."""

    def __init__(self, endpoint: str, one_in: int) -> None:
        self._provider = TracerProvider(
            resource=Resource.create({"service.name": "headrace", "service.version": __version__}), shutdown_on_exit=False
        )
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint, timeout=_EXPORT_SECONDS_MAX)))
        self._tracer = self._provider.get_tracer("headrace", __version__)
        self._one_in, self._turns = one_in, itertools.count(1)

    def publish(self, topic: str, protocol: str, batch: AnyBatch) -> Callable[[asyncio.Future[Any]], None] | None:
        parent = _parent(traceparent(first_headers(batch)))
        if not self._is_traced(parent):
            return None
        attributes = {**_attributes(topic, protocol), "messaging.batch.message_count": len(batch)}
        context = None if parent is None else trace.set_span_in_context(trace.NonRecordingSpan(parent))
        span = self._tracer.start_span(f"publish {topic}", context, SpanKind.SERVER, attributes)
        append = self._tracer.start_span("append", trace.set_span_in_context(span), SpanKind.INTERNAL)

        def done(staged: asyncio.Future[Any]) -> None:
            failure = staged.exception()
            if failure is not None:
                span.set_status(Status(StatusCode.ERROR, str(failure)))
            append.end()
            span.end()

        return done

    def deliver(self, topic: str, protocol: str, records: int, headers: Iterable[Headers]) -> None:
        contexts = {found for one in headers if (found := traceparent(one)) is not None}
        parents = [parent for text in itertools.islice(contexts, _LINKS_MAX) if (parent := _parent(text)) is not None]
        traced = [parent for parent in parents if parent.trace_flags.sampled]
        if not traced and (parents or not self._is_traced(None)):
            return
        attributes = {**_attributes(topic, protocol), "messaging.batch.message_count": records}
        now = time.time_ns()
        links = [Link(parent) for parent in traced]
        self._tracer.start_span(f"deliver {topic}", None, SpanKind.SERVER, attributes, links, now).end()

    def _is_traced(self, parent: SpanContext | None) -> bool:
        return next(self._turns) % self._one_in == 0 if parent is None else bool(parent.trace_flags.sampled)

    def close(self) -> None:
        """Send what is left and stop. Blocks: not for the event loop."""
        self._provider.shutdown()


def _attributes(topic: str, protocol: str) -> dict[str, str | int]:
    return {"messaging.system": "headrace", "messaging.destination.name": topic, "network.protocol.name": protocol}


def _parent(text: str | None) -> SpanContext | None:
    """Return the context of a `traceparent`; None if there is none or it is invalid."""
    if text is None:
        return None
    found = trace.get_current_span(_PROPAGATOR.extract({"traceparent": text})).get_span_context()
    return found if found.is_valid else None
