"""Spans of micro-batches with OpenTelemetry, made from Spark's progress reports.

They are sent if the standard variable `OTEL_EXPORTER_OTLP_TRACES_ENDPOINT` or `OTEL_EXPORTER_OTLP_ENDPOINT` is set. The exporter reads
these and the other standard variables itself.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from datetime import datetime
from functools import cache
from typing import Any, Final, TypeAlias

from headrace.extras import needs

Report: TypeAlias = Callable[[str, str, str], None]
"""Called with pipeline, query and progress report (JSON)."""
_VARIABLES: Final = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")


def is_wanted(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether spans are to be sent."""
    return any(environment.get(name) for name in _VARIABLES)


@cache
def report() -> Report | None:
    """Return the function that makes a span of a progress report; None without a receiver. Raises `MissingExtra`."""
    if not is_wanted():
        return None
    with needs("traces of a pipeline", "opentelemetry"):
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    # The provider sends what is left when the process exits.
    provider = TracerProvider(resource=Resource.create({"service.name": "headrace-pipeline"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    tracer = provider.get_tracer("headrace")

    def send(pipeline: str, query: str, progress: str) -> None:
        if (batch := batch_of(progress)) is not None:
            start, end, attributes = batch
            attributes |= {"headrace.pipeline": pipeline, "headrace.query": query}
            tracer.start_span(f"batch {query}", attributes=attributes, start_time=start).end(end)

    return send


def batch_of(progress: str) -> tuple[int, int, dict[str, Any]] | None:
    """Return start and end (Unix ns) and attributes of the batch in a report; None if no batch has run."""
    report: dict[str, Any] = json.loads(progress)
    durations = report.get("durationMs") or {}
    if "addBatch" not in durations:
        return None
    start = round(datetime.fromisoformat(str(report["timestamp"]).replace("Z", "+00:00")).timestamp() * 1e9)
    end = start + int(durations.get("triggerExecution", 0)) * 1_000_000
    return start, end, {"headrace.batch": int(report["batchId"]), "headrace.rows": int(report.get("numInputRows") or 0)}
