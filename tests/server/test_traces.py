"""Traces, received by a small OTLP/HTTP endpoint on loopback."""

from __future__ import annotations

import asyncio
import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from headrace.broker.authorizer import Principal
from headrace.broker.groups.progress import SettlementPolicy
from headrace.clients.connect import connect
from headrace.errors import ConfigError
from headrace.records import RecordBatch
from headrace.server.config_sources import resolve
from headrace.spark.pipelines import traces as pipeline_traces
from tests.server.test_http import serving

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
WHO = Principal("ann", "fujin")


class Receiver:
    """Collects the spans that an exporter sends."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.arrived = threading.Event()
        receiver = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                request = ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["Content-Length"])))
                receiver.spans += [span for one in request.resource_spans for scope in one.scope_spans for span in scope.spans]
                receiver.arrived.set()
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *arguments: Any) -> None: ...

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}/v1/traces"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def named(self, name: str) -> list[Any]:
        return [span for span in self.spans if span.name == name]


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    found = Receiver()
    yield found
    found.close()


def header(flags: str = "01") -> tuple[tuple[str, bytes], ...]:
    return (("traceparent", f"00-{TRACE}-{SPAN}-{flags}".encode()),)


async def test_a_publish_span_is_linked_to_its_fetch_span(tmp_path: Path, receiver: Receiver) -> None:
    async with serving(tmp_path, **{"traces.endpoint": receiver.endpoint, "traces.one_in": 1_000_000}) as (server, _):
        broker = server._broker
        await broker.create_topic(WHO, "orders")
        await broker.publish(WHO, "orders", RecordBatch([b"a", b"b"], headers=[header(), ()]))
        fetched = await broker.fetch(Principal("bob", "flymq"), "orders", 0, 0, bytes_max=1 << 20)
        assert [record.headers for record in fetched.batches[0].records()] == [header(), ()], "the header passes through unchanged"
    (publish,), (append,), (deliver,) = receiver.named("publish orders"), receiver.named("append"), receiver.named("deliver orders")
    assert (publish.trace_id.hex(), publish.parent_span_id.hex()) == (TRACE, SPAN)
    assert (append.trace_id, append.parent_span_id) == (publish.trace_id, publish.span_id)
    assert [(link.trace_id.hex(), link.span_id.hex()) for link in deliver.links] == [(TRACE, SPAN)]
    assert publish.start_time_unix_nano <= append.start_time_unix_nano <= append.end_time_unix_nano <= publish.end_time_unix_nano
    attributes = {one.key: one.value for one in deliver.attributes}
    assert attributes["messaging.batch.message_count"].int_value == 2
    assert attributes["network.protocol.name"].string_value == "flymq"


async def test_subscribers_and_groups_have_delivery_spans_too(tmp_path: Path, receiver: Receiver) -> None:
    async with serving(tmp_path, **{"traces.endpoint": receiver.endpoint}) as (server, _):
        broker, arrived = server._broker, asyncio.Event()
        await broker.create_topic(WHO, "pushed")
        cursor = broker.cursor(WHO, "pushed", 0, 0, lambda batches: arrived.set(), credit_bytes=1 << 20)
        member = broker.join(WHO, "g", "pushed", policy=SettlementPolicy(), start="earliest")
        await broker.publish(WHO, "pushed", RecordBatch([b"a"], headers=[header()]))
        async with asyncio.timeout(300):
            await arrived.wait()
            assert len(await member.take(1, wait_ms=30_000)) == 1
        cursor.close()
        await member.close()
    assert [len(span.links) for span in receiver.named("deliver pushed")] == [1, 1]


async def test_the_sender_decides_whether_its_batch_is_traced(tmp_path: Path, receiver: Receiver) -> None:
    async with serving(tmp_path, **{"traces.endpoint": receiver.endpoint, "traces.one_in": 1}) as (server, _):
        broker = server._broker
        await broker.create_topic(WHO, "quiet")
        await broker.publish(WHO, "quiet", RecordBatch([b"a"], headers=[header(flags="00")]))
        await broker.fetch(WHO, "quiet", 0, 0, bytes_max=1 << 20)
        await broker.create_topic(WHO, "open")
        await broker.publish(WHO, "open", RecordBatch([b"a"]))
    assert receiver.named("publish quiet") == receiver.named("deliver quiet") == []
    assert len(receiver.named("publish open")) == 1, "a batch without a traceparent is sampled by the broker"


async def test_one_in_so_many_batches_is_traced(tmp_path: Path, receiver: Receiver) -> None:
    async with serving(tmp_path, **{"traces.endpoint": receiver.endpoint, "traces.one_in": 5}) as (server, _):
        await server._broker.create_topic(WHO, "t")
        for _ in range(20):
            await server._broker.publish(WHO, "t", RecordBatch([b"a"]))
    assert len(receiver.named("publish t")) == 4


@pytest.mark.parametrize("value", [b"", b"00-zz", b"\xff" * 55, b"00-" + b"0" * 32 + b"-" + b"0" * 16 + b"-01", b"x" * 100_000])
async def test_a_hostile_traceparent_is_ignored(tmp_path: Path, receiver: Receiver, value: bytes) -> None:
    async with serving(tmp_path, **{"traces.endpoint": receiver.endpoint, "traces.one_in": 1}) as (server, _):
        await server._broker.create_topic(WHO, "t")
        if len(value) < 60_000:
            await server._broker.publish(WHO, "t", RecordBatch([b"a"], headers=[(("traceparent", value),)]))
            await server._broker.fetch(WHO, "t", 0, 0, bytes_max=1 << 20)
            assert server._broker.bounds(WHO, "t", 0).end == 1
    assert all(not span.links for span in receiver.spans)


async def test_a_receiver_that_is_gone_does_not_fail_a_publish(tmp_path: Path) -> None:
    async with serving(tmp_path, **{"traces.endpoint": "http://127.0.0.1:9/v1/traces", "traces.one_in": 1}) as (server, _):
        tcp = next(found.address for found in server._opened if found.kind == "tcp")
        client = await connect(f"flymq://{tcp}")
        await client.publish("t", b"a")
        client.abandon()


def test_an_endpoint_that_is_no_address_is_rejected() -> None:
    with pytest.raises(ConfigError, match=r"traces\.endpoint"):
        resolve(flags={"traces.endpoint": ("--set", "localhost:4318")})


async def test_a_micro_batch_of_a_pipeline_is_a_span(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", receiver.endpoint)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    report = pipeline_traces.report.__wrapped__()
    assert report is not None
    idle = {"timestamp": "2026-11-16T04:00:00.000Z", "batchId": 7, "durationMs": {"triggerExecution": 1}}
    report("orders", "totals", json.dumps(idle))
    report("orders", "totals", json.dumps({**idle, "numInputRows": 12, "durationMs": {"addBatch": 80, "triggerExecution": 250}}))
    assert await asyncio.to_thread(receiver.arrived.wait, 60)
    (span,) = receiver.spans
    assert span.name == "batch totals" and span.end_time_unix_nano - span.start_time_unix_nano == 250_000_000
    found = {one.key: one.value.int_value or one.value.string_value for one in span.attributes}
    assert found == {"headrace.batch": 7, "headrace.rows": 12, "headrace.pipeline": "orders", "headrace.query": "totals"}


def test_a_pipeline_sends_no_spans_without_a_receiver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", raising=False)
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    assert pipeline_traces.report.__wrapped__() is None
