"""The HTTP listener: metrics, health and overview of a running server, read as Prometheus and a supervisor do."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import ssl
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trustme
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_metrics
from prometheus_client.parser import text_string_to_metric_families as prometheus_text

from headrace.broker.authorizer import Principal
from headrace.clients.connect import connect
from headrace.errors import ConfigError, HeadraceError
from headrace.overview import Overview
from headrace.records import RecordBatch
from headrace.server.addresses import require_caution
from headrace.server.config_sources import resolve
from headrace.server.http import LoopCalls, Pages
from headrace.server.wiring import Server, StartFailed

WHO = Principal("ann", "figg")
Samples = dict[str, list[tuple[dict[str, str], float]]]


@asynccontextmanager
async def serving(directory: Path, **keys: object) -> AsyncIterator[tuple[Server, str]]:
    """A server in this process with nothing but TCP and HTTP, and the address of the latter."""
    chosen: dict[str, object] = {
        "storage.path": str(directory / "data"),
        "listen.tcp": ["127.0.0.1:0"],
        "listen.quic": [],
        "listen.flight": [],
    }
    chosen |= {"listen.http": ["127.0.0.1:0"], **keys}
    config = resolve(flags={name: (name, value) for name, value in chosen.items()}).config
    server = Server(config, key=None, clock=lambda: time.time_ns() // 1_000_000, blipmq_keys={"k" * 32: "ann"})
    opened = await server.open()
    try:
        yield server, next(found.address for found in opened if found.kind == "http")
    finally:
        await server.close()


def get(address: str, path: str, **headers: str) -> tuple[int, str, str]:
    """Return status, content type and body."""
    connection = http.client.HTTPConnection(address, timeout=300)
    try:
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.getheader("Content-Type") or "", answer.read().decode()
    finally:
        connection.close()


async def fetched(address: str, path: str, **headers: str) -> tuple[int, str, str]:
    return await asyncio.to_thread(get, address, path, **headers)


async def scraped(address: str) -> Samples:
    status, _, body = await fetched(address, "/metrics")
    assert status == 200, body
    found: Samples = {}
    for family in prometheus_text(body):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((dict(sample.labels), sample.value))
    return found


def value(samples: Samples, name: str, **labels: str) -> float:
    (found,) = [number for given, number in samples[name] if labels.items() <= given.items()]
    return found


async def test_a_scrape_has_the_traffic_the_offsets_and_the_lag(tmp_path: Path) -> None:
    async with serving(tmp_path) as (server, address):
        broker = server._broker
        await broker.create_topic(WHO, "orders", partitions=2)
        await broker.publish(WHO, "orders", RecordBatch([b"one", b"three"]), partition=1)
        await broker.fetch(Principal("bob", "rustlog"), "orders", 1, 0, bytes_max=1 << 20)
        await broker.commit(WHO, "billing", {("orders", 1): 1})
        await broker.move_to_dead_letters(WHO, "orders", 1, 0)
        found = await scraped(address)
        assert value(found, "headrace_published_records_total", topic="orders", protocol="figg") == 2
        assert value(found, "headrace_published_bytes_total", topic="orders", protocol="figg") == 8
        assert value(found, "headrace_delivered_records_total", topic="orders", protocol="rustlog") == 2
        assert value(found, "headrace_delivered_bytes_total", topic="orders", protocol="rustlog") == 8
        assert value(found, "headrace_publish_duration_seconds_count", protocol="figg") == 1
        assert value(found, "headrace_topic_publish_duration_seconds_bucket", topic="orders", protocol="figg", le="+Inf") == 1
        assert value(found, "headrace_fetch_duration_seconds_count", protocol="rustlog") == 1
        assert value(found, "headrace_partition_end_offset", topic="orders", partition="1") == 2
        assert value(found, "headrace_partition_first_offset", topic="orders", partition="1") == 0
        assert value(found, "headrace_group_lag", group="billing", topic="orders", partition="1") == 1
        assert value(found, "headrace_dead_letters", topic="orders") == 1
        assert value(found, "headrace_health", state="ok") == 1
        assert value(found, "headrace_fsync_duration_seconds_count") > 0
        assert value(found, "headrace_flush_bytes_sum") > 0
        assert value(found, "process_open_fds") > 0 and value(found, "process_resident_memory_bytes") > 0


async def test_the_scraper_chooses_the_format(tmp_path: Path) -> None:
    async with serving(tmp_path) as (_, address):
        _, plain, body = await fetched(address, "/metrics")
        assert plain.startswith("text/plain; version=") and list(prometheus_text(body))
        _, kind, body = await fetched(address, "/metrics", Accept="application/openmetrics-text; version=1.0.0")
        assert kind.startswith("application/openmetrics-text")
        assert "headrace_published_records" in {family.name for family in open_metrics(body)}  # type: ignore[no-untyped-call]  # untyped library


async def test_names_of_topics_and_groups_cannot_forge_a_series(tmp_path: Path) -> None:
    group = 'g"} 1 forged{x="\\'
    async with serving(tmp_path) as (server, address):
        await server._broker.create_topic(WHO, "t")
        await server._broker.publish(WHO, "t", RecordBatch([b"a"]))
        await server._broker.commit(WHO, group, {("t", 0): 0})
        found = await scraped(address)
        assert value(found, "headrace_group_lag", group=group) == 1 and "forged" not in found


async def test_series_beyond_the_limit_are_left_out_and_counted(tmp_path: Path) -> None:
    async with serving(tmp_path, **{"metrics.series": 10}) as (server, address):
        for number in range(12):
            await server._broker.create_topic(WHO, f"t{number:02}")
            await server._broker.publish(WHO, f"t{number:02}", RecordBatch([b"x"]))
            await server._broker.commit(WHO, f"g{number:02}", {(f"t{number:02}", 0): 0})
        found = await scraped(address)
        assert len(found["headrace_partition_end_offset"]) == len(found["headrace_group_lag"]) == 10
        assert {labels["of"]: count for labels, count in found["headrace_series_left_out"]} == {"partitions": 2, "groups": 2, "topics": 2}
        assert value(found, "headrace_published_records_total", topic="(other)") == 2
        assert sum(count for _, count in found["headrace_published_records_total"]) == 12
        topics = {labels["topic"]: count for labels, count in found["headrace_topic_publish_duration_seconds_count"]}
        assert topics == {"t00": 1, "(other)": 11}  # a histogram has eight series


@pytest.mark.parametrize("protocol", ["figg", "rustlog", "blipmq", "flymq"])
async def test_a_refused_request_is_counted_by_its_reason(tmp_path: Path, protocol: str) -> None:
    async with serving(tmp_path, **{"topics.auto_create": False}) as (server, address):
        tcp = next(found.address for found in server._opened if found.kind == "tcp")
        client = await connect(f"{protocol}://{tcp}", api_key="k" * 32 if protocol == "blipmq" else None)
        with pytest.raises(HeadraceError):
            await client.publish("none", b"x")
        client.abandon()
        found = await scraped(address)
        assert value(found, "headrace_refused_requests_total", protocol=protocol, reason="unknown_topic") >= 1


async def test_the_lag_has_the_name_of_kafka_exporters_if_wanted(tmp_path: Path) -> None:
    async with serving(tmp_path, **{"metrics.kafka_names": True}) as (server, address):
        await server._broker.create_topic(WHO, "t")
        await server._broker.commit(WHO, "g", {("t", 0): 0})
        assert value(await scraped(address), "kafka_consumergroup_lag", consumergroup="g", topic="t", partition="0") == 0


async def test_pipelines_of_this_machine_have_their_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = tmp_path / "checkpoint"
    monkeypatch.setenv("HEADRACE_PIPELINES", str(tmp_path / "entries"))
    execution: Any = pytest.importorskip("headrace.spark.pipelines.executions").Execution
    query = {"name": "totals", "rows_total": 7, "batch_ms": 250, "lag": 3, "failures": 1}
    with execution("orders", str(checkpoint), file="p.toml", now_ms=0) as running:
        running.write("running", [query], now_ms=1)
        async with serving(tmp_path) as (_, address):
            found = await scraped(address)
    assert value(found, "headrace_pipeline_state", pipeline="orders", state="running") == 1
    assert value(found, "headrace_pipeline_rows_total", pipeline="orders", query="totals") == 7
    assert value(found, "headrace_pipeline_batch_seconds", query="totals") == 0.25
    assert (value(found, "headrace_pipeline_lag"), value(found, "headrace_pipeline_restarts_total")) == (3, 1)


async def test_the_overview_has_the_documented_shape(tmp_path: Path) -> None:
    async with serving(tmp_path, **{"access.mode": "enforced"}) as (_, address):
        _, kind, body = await fetched(address, "/status.json")
        found = msgspec.json.decode(body, type=Overview)
        assert kind == "application/json" and found.server is not None
        assert [one.kind for one in found.server.listeners] == ["tcp", "http"]
        assert found.server.activity.flushes_total > 0 and found.server.activity.open_files > 0
        shape = json.loads(msgspec.json.encode(found))
        assert json.loads(body) == shape, "the broker sends no field that the shape does not have"


async def test_a_broker_is_ready_until_it_drains(tmp_path: Path) -> None:
    async with serving(tmp_path) as (server, address):
        assert (await fetched(address, "/healthz"))[0] == 200
        assert await fetched(address, "/readyz") == (200, "text/plain; charset=utf-8", "ready\n")
        server._is_draining = True
        assert (await fetched(address, "/readyz"))[::2] == (503, "the broker is draining\n")


async def test_a_broker_whose_log_fails_is_not_ready(tmp_path: Path) -> None:
    async with serving(tmp_path) as (server, address):
        server._engine.health.failed("log maintenance", "retried")
        assert (await fetched(address, "/readyz"))[0] == 200, "a step that is retried does not stop publishing"
        server._engine.health.ended("syncing the journal failed")
        status, _, body = await fetched(address, "/readyz")
        assert status == 503 and "syncing the journal failed" in body
        assert (await fetched(address, "/healthz"))[0] == 200
        assert value(await scraped(address), "headrace_health", state="failed") == 1


@pytest.fixture
def blocked() -> Iterator[Pages]:
    """Pages of a loop that never runs."""
    loop = asyncio.new_event_loop()
    yield Pages(LoopCalls(loop, seconds=0.05), None, lambda: asyncio.sleep(0, []), lambda: asyncio.sleep(0))  # type: ignore[arg-type]
    loop.close()


@pytest.mark.filterwarnings("ignore:coroutine")
@pytest.mark.parametrize("path", ["/healthz", "/readyz", "/status.json"])
def test_a_blocked_event_loop_is_not_healthy(blocked: Pages, path: str) -> None:
    assert blocked.answer(path, "")[0] == 503


async def test_other_paths_and_foreign_host_names_are_refused(tmp_path: Path) -> None:
    async with serving(tmp_path) as (_, address):
        assert (await fetched(address, "/"))[0] == 404
        assert (await fetched(address, "/metrics", Host="evil.example"))[0] == 421
        assert (await fetched(address, "/healthz", Host="localhost:9644"))[0] == 200
        assert (await fetched(address, "/healthz", Host="[::1]:9644"))[0] == 200


async def test_silent_connections_do_not_keep_scrapers_out_for_ever(tmp_path: Path) -> None:
    async with serving(tmp_path) as (_, address):
        host, _, port = address.rpartition(":")
        silent = [socket.create_connection((host, int(port)), timeout=300) for _ in range(12)]
        try:
            assert (await fetched(address, "/healthz"))[0] == 200
        finally:
            for one in silent:
                one.close()


async def test_the_event_loop_serves_while_a_scrape_is_rendered(tmp_path: Path) -> None:
    """The rendering runs on another thread: the loop takes turns meanwhile."""
    async with serving(tmp_path) as (server, address):
        for number in range(50):
            await server._broker.create_topic(WHO, f"t{number}")
        threads: set[str] = set()
        collect = server._broker.measure

        async def measured(series_max: int) -> Any:
            threads.add(threading.current_thread().name)
            return await collect(series_max)

        server._broker.measure = measured  # type: ignore[method-assign]
        await scraped(address)
        assert threads == {threading.current_thread().name}


def config_of(**keys: object) -> Any:
    return resolve(flags={name.replace("__", "."): (name, value) for name, value in keys.items()}).config


def test_an_address_beyond_loopback_needs_tls_and_client_certificates(tmp_path: Path) -> None:
    files = {"tls__certificate": str(tmp_path / "c"), "tls__key": str(tmp_path / "k")}
    beyond = {"listen__http": ["192.0.2.1:9644"], "access__mode": "enforced"}
    with pytest.raises(ConfigError, match="nothing is encrypted"):
        require_caution(config_of(**beyond))
    with pytest.raises(ConfigError, match=r"not authenticated \(http\)"):
        require_caution(config_of(**beyond, **files))
    require_caution(config_of(**beyond, **files, tls__client_ca=str(tmp_path / "ca")))


async def test_a_configured_address_that_is_taken_stops_the_start(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        taken = f"127.0.0.1:{holder.getsockname()[1]}"
        with pytest.raises(StartFailed, match=f"cannot listen on {taken}: .*--listen-http"):
            async with serving(tmp_path, **{"listen.http": [taken]}):
                pass


async def test_the_broker_starts_without_the_extra_and_says_so_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("operators", "http", "metrics"):
        monkeypatch.delitem(sys.modules, f"headrace.server.{name}")
    monkeypatch.setitem(sys.modules, "prometheus_client", None)  # as for a library that is not installed
    chosen: dict[str, object] = {
        "storage.path": str(tmp_path / "data"),
        "listen.tcp": ["127.0.0.1:0"],
        "listen.quic": [],
        "listen.flight": [],
    }
    config = resolve(flags={name: (name, value) for name, value in chosen.items()}).config
    server = Server(config, key=None, clock=lambda: 1, blipmq_keys={"k" * 32: "ann"})
    opened = await server.open()
    await server.close()
    assert [found.kind for found in opened] == ["tcp"]
    (line,) = server.unavailable
    assert line == "no HTTP listener: listen.http needs prometheus-client: pip install 'headrace[metrics]'"


@pytest.fixture
def certificates(tmp_path: Path) -> dict[str, str]:
    """Certificates of a server and of a client, with their CA."""
    ca = trustme.CA()
    ca.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    for name, cert in (("server", ca.issue_cert("127.0.0.1")), ("client", ca.issue_cert("scraper.example"))):
        cert.cert_chain_pems[0].write_to_path(str(tmp_path / f"{name}.pem"))
        key = tmp_path / f"{name}.key"
        key.touch(0o600)
        key.write_bytes(cert.private_key_pem.bytes())
    return {name: str(tmp_path / name) for name in ("ca.pem", "server.pem", "server.key", "client.pem", "client.key")}


async def test_with_tls_a_scraper_needs_a_client_certificate(tmp_path: Path, certificates: dict[str, str]) -> None:
    keys = {"tls.certificate": certificates["server.pem"], "tls.key": certificates["server.key"], "tls.client_ca": certificates["ca.pem"]}

    def status(context: ssl.SSLContext, address: str) -> int:
        connection = http.client.HTTPSConnection(address, timeout=300, context=context)
        try:
            connection.request("GET", "/healthz")
            return connection.getresponse().status
        finally:
            connection.close()

    stranger = ssl.create_default_context(cafile=certificates["ca.pem"])
    scraper = ssl.create_default_context(cafile=certificates["ca.pem"])
    scraper.load_cert_chain(certificates["client.pem"], certificates["client.key"])
    async with serving(tmp_path, **keys) as (_, address):
        assert await asyncio.to_thread(status, scraper, address) == 200
        with pytest.raises((ssl.SSLError, OSError, http.client.HTTPException)):
            await asyncio.to_thread(status, stranger, address)
        with pytest.raises((OSError, http.client.HTTPException)):
            await fetched(address, "/healthz")
