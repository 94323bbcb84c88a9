"""Metrics of a broker in the formats of Prometheus.

    hot path ─► plain integers ◄── Readings (one call on the event loop) ◄── MetricsCollector ◄── scrape, on a thread of the HTTP listener

Nothing is counted here: a scrape reads the counters of broker, storage, network and Flight endpoint. A label set per partition, group or
topic costs the scraper memory, so their number is bounded (`metrics.series`), and `headrace_series_left_out` counts the others.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, InfoMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from headrace import __version__
from headrace.broker.measuring import Readings
from headrace.broker.meters import Meters
from headrace.engine.contract import Engine, HealthState
from headrace.histogram import FEW_SECONDS, Histogram
from headrace.net.counters import NetCounters
from headrace.server.loop_lag import BOUNDS_MS, LoopLag
from headrace.storage.store import Store

_STATES: Final = (HealthState.OK, HealthState.DEGRADED, HealthState.FAILED)
_SERIES_CACHED_MAX: Final = 1 << 14
"""Names with labels that are kept as text between scrapes."""
_PIPELINE_STATES: Final = ("starting", "running", "waiting", "stopping", "finished", "stopped", "failed", "lost")


@dataclass(frozen=True, slots=True)
class Sources:
    """Where the numbers come from. `read` returns the readings of this moment; it is called on the thread of a scrape and waits for the
    event loop."""

    read: Callable[[], Readings]
    meters: Meters
    engine: Engine
    net: NetCounters
    connections_max: int
    loop_lag: LoopLag
    disk: Callable[[], tuple[int, int]]
    """Returns the free and the total bytes of the file system."""
    headroom_bytes: int
    flight_calls: Callable[[], tuple[int, int, Counter[str]]] = lambda: (0, 0, Counter())
    """Returns the Flight calls in progress, those since the start, and the failed ones by error code."""
    pipelines: Callable[[], list[dict[str, Any]]] = list
    """Returns the executions of pipelines on this machine."""
    kafka_names: bool = False


class MetricsCollector(Collector):
    """Converts the counters to metric families, at each scrape."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources

    def collect(self) -> Iterator[Metric]:
        readings = self._sources.read()
        yield from self._process(readings)
        yield from self._traffic(readings)
        yield from self._logs(readings)
        yield from self._groups(readings)
        yield from self._network()
        yield from self._storage()
        yield from self._kafka()
        yield from self._pipelines()

    def _process(self, readings: Readings) -> Iterator[Metric]:
        yield InfoMetricFamily("headrace_build", "Version of the broker.", {"version": __version__})
        yield _gauge("headrace_uptime_seconds", "Time since the start.", readings.uptime_ms / 1000)
        states = [((state.value,), int(readings.health is state)) for state in _STATES]
        yield _gauges("headrace_health", "1 for the current state of background threads and tasks.", ["state"], states)
        lag = self._sources.loop_lag
        bounds = [bound / 1000 for bound in BOUNDS_MS]
        yield _histograms(
            "headrace_loop_lag_seconds", "Delays of the event loop.", [], [((), _copied(bounds, lag.counts, lag.sum_seconds))]
        )
        yield _gauge("headrace_loop_lag_recent_max_seconds", "Longest delay of the last one to two minutes.", lag.recent_max_seconds)
        left_out = [((name,), number) for name, number in readings.left_out.items()]
        yield _gauges(
            "headrace_series_left_out", "Partitions, groups and topics beyond metrics.series, without a series.", ["of"], left_out
        )

    def _traffic(self, readings: Readings) -> Iterator[Metric]:
        labels = ["topic", "protocol"]
        for name, words in (
            ("published_records", "Records published and acknowledged."),
            ("published_bytes", "Bytes of keys and values published and acknowledged."),
            ("published_batches", "Batches published and acknowledged: the count of publish_seconds."),
            ("publish_seconds", "Sum of the times from publish to acknowledgement, over batches."),
            ("delivered_records", "Records delivered; a record delivered to two readers counts twice."),
            ("delivered_bytes", "Bytes of keys and values delivered."),
        ):
            rows = [((topic, protocol), getattr(meter, name)) for topic, protocol, meter in readings.traffic]
            yield _counters(f"headrace_{name}", words, labels, rows)
        summed: dict[tuple[str, str], Histogram] = {}
        for topic, protocol, durations in readings.latencies:
            summed.setdefault((topic, protocol), Histogram()).add(durations)
        latencies = [(place, durations.coarse(FEW_SECONDS)) for place, durations in summed.items()]
        yield _histograms("headrace_topic_publish_duration_seconds", "Time from publish to acknowledgement by topic.", labels, latencies)
        meters = self._sources.meters
        publishes = [((protocol,), one) for protocol, one in list(meters.publish_durations.items())]
        yield _histograms("headrace_publish_duration_seconds", "Time from publish to acknowledgement.", ["protocol"], publishes)
        fetches = [((protocol,), one) for protocol, one in list(meters.fetch_durations.items())]
        yield _histograms("headrace_fetch_duration_seconds", "Duration of fetches that do not wait.", ["protocol"], fetches)
        refused = [*meters.refused.items(), *((("flight", code), count) for code, count in self._sources.flight_calls()[2].items())]
        yield _counters("headrace_refused_requests", "Requests that failed, by error code.", ["protocol", "reason"], refused)
        yield _gauge("headrace_appends_in_flight", "Appends that wait for the disk.", readings.appends_in_flight)
        yield _gauge("headrace_staged_bytes", "Bytes of exactly-once writers that are not yet published.", readings.staged_bytes)
        yield _gauge("headrace_delayed_messages", "Delayed messages that wait.", readings.delayed)

    def _logs(self, readings: Readings) -> Iterator[Metric]:
        labels = ["topic", "partition"]
        places = [((topic, str(partition)), rest) for topic, partition, *rest in readings.partitions]
        yield _gauge("headrace_topics", "Topics, without internal ones.", readings.topics)
        words = ("First offset of the partition.", "End offset of the partition: the next to be assigned.", "Stored size of the partition.")
        for index, (name, text) in enumerate(zip(("first_offset", "end_offset", "size_bytes"), words, strict=True)):
            yield _gauges(f"headrace_partition_{name}", text, labels, [(place, rest[index]) for place, rest in places])
        letters = [((topic,), count) for topic, count in readings.dead_letters.items()]
        yield _gauges("headrace_dead_letters", "Dead letters that wait for a decision.", ["topic"], letters)

    def _groups(self, readings: Readings) -> Iterator[Metric]:
        labels = ["group", "topic", "partition"]
        lags = [((group, topic, str(partition)), lag) for group, topic, partition, lag in readings.lags]
        yield _gauges("headrace_group_lag", "End offset minus committed offset.", labels, lags)
        if self._sources.kafka_names:
            kafka = ["consumergroup", "topic", "partition"]
            yield _gauges("kafka_consumergroup_lag", "The same as headrace_group_lag, for existing dashboards.", kafka, lags)
        labels = ["group", "topic"]
        members = [((group, topic), count) for group, topic, count, _ in readings.unsettled]
        yield _gauges("headrace_group_members", "Members of the group.", labels, members)
        unsettled = [((group, topic), count) for group, topic, _, count in readings.unsettled]
        yield _gauges("headrace_group_unsettled", "Deliveries that wait for an ack or a redelivery.", labels, unsettled)

    def _network(self) -> Iterator[Metric]:
        net, (under_way, begun, _) = self._sources.net, self._sources.flight_calls()
        open_now = [((name,), count) for name, count in list(net.open_by_protocol.items())]
        yield _gauges("headrace_connections", "Open connections whose protocol is known.", ["protocol"], open_now)
        yield _gauge("headrace_connections_open", "Open connections.", net.open)
        yield _gauge("headrace_connections_max", "Limit of open connections.", self._sources.connections_max)
        yield _counter("headrace_connections_accepted", "Connections accepted.", net.accepted)
        yield _gauge("headrace_relays_open", "Open connections that the coordinator serves, which is another broker.", net.relays_open)
        yield _counter("headrace_connections_relayed", "Connections handed over to the coordinator.", net.relayed)
        rejected = [((reason,), count) for reason, count in list(net.rejected.items())]
        yield _counters("headrace_connections_rejected", "Connections closed with an error, by reason.", ["reason"], rejected)
        yield _counter("headrace_received_bytes", "Bytes received from peers.", net.bytes_in)
        yield _counter("headrace_sent_bytes", "Bytes sent to peers.", net.bytes_out)
        yield _gauge("headrace_unsent_bytes", "Bytes that wait to be sent to slow peers.", net.output.unsent_bytes)
        throttled = [
            (("reading_paused",), net.reading_pauses),
            (("accepting_paused",), net.accept_pauses),
            (("slow_peer_disconnected",), net.output.disconnected),
        ]
        yield _counters("headrace_throttled", "Times that the broker slowed peers down, by reason.", ["reason"], throttled)
        yield _gauge("headrace_flight_calls", "Calls in progress on the Flight endpoint.", under_way)
        yield _counter("headrace_flight_calls_begun", "Calls on the Flight endpoint.", begun)

    def _storage(self) -> Iterator[Metric]:
        free, total = self._sources.disk()
        yield _gauge("headrace_disk_free_bytes", "Free space of the file system of the data directory.", free)
        yield _gauge("headrace_disk_total_bytes", "Size of the file system of the data directory.", total)
        yield _gauge("headrace_disk_headroom_bytes", "Free space below which publishing stops.", self._sources.headroom_bytes)
        store: Store | None = getattr(self._sources.engine, "opened_store", None)
        if store is None:
            return
        counters = store.counters
        yield _histograms("headrace_append_duration_seconds", "Duration of a flush.", [], [((), counters.append_duration)])
        yield _histograms("headrace_flush_bytes", "Size of a flush.", [], [((), counters.flush_bytes)])
        yield _histograms("headrace_fsync_duration_seconds", "Duration of a sync of the journal.", [], [((), counters.sync_duration)])
        yield _counter("headrace_checkpoints", "Checkpoints of the log.", counters.checkpoints)
        yield _gauge("headrace_write_queue_bytes", "Bytes of appends that wait for the writer.", store.staged_bytes)

    def _kafka(self) -> Iterator[Metric]:
        """Yield the counters of an engine that has some: requests and errors by name, and its epoch."""
        counters = getattr(self._sources.engine, "counters", None)
        if counters is None:
            return
        for name, of in (("requests", counters.requests), ("errors", counters.errors)):
            rows = [((kind,), count) for kind, count in list(of.items())]
            yield _counters(f"headrace_kafka_{name}", f"{name.capitalize()} of the Kafka engine by kind.", ["kind"], rows)
        yield _gauge("headrace_kafka_epoch", "Epoch of this broker as the writer of the cluster.", self._sources.engine.epoch)

    def _pipelines(self) -> Iterator[Metric]:
        executions, labels = self._sources.pipelines(), ["pipeline", "query"]
        queries = [((str(one["name"]), str(query["name"])), query) for one in executions for query in one["queries"]]
        states = [((str(one["name"]), state), int(one["state"] == state)) for one in executions for state in _PIPELINE_STATES]
        yield _gauges("headrace_pipeline_state", "1 for the current state of the pipeline.", ["pipeline", "state"], states)
        rows = [(where, query["rows_total"]) for where, query in queries]
        yield _counters("headrace_pipeline_rows", "Rows read by the query in this execution.", labels, rows)
        rows = [(where, query["batch_ms"] / 1000) for where, query in queries]
        yield _gauges("headrace_pipeline_batch_seconds", "Duration of the last micro-batch.", labels, rows)
        rows = [(where, query["lag"]) for where, query in queries if query["lag"] is not None]
        yield _gauges("headrace_pipeline_lag", "Records that the query has not read.", labels, rows)
        rows = [(where, query["failures"]) for where, query in queries]
        yield _counters("headrace_pipeline_restarts", "Failures after which the query was restarted.", labels, rows)


def registry(sources: Sources) -> CollectorRegistry:
    """Return a registry with the metrics of the broker and of its process (memory, CPU time, open files)."""
    found = CollectorRegistry(auto_describe=False)
    found.register(MetricsCollector(sources))
    ProcessCollector(registry=found)
    return found


def rendered(registry: CollectorRegistry, accept: str) -> tuple[bytes, str]:
    """Return the metrics and their content type: OpenMetrics if the scraper accepts it, else the text format of Prometheus.

    The encoders of the library take four times as long, because they escape and sort the labels of every sample at every scrape.
    """
    _, content_type = choose_encoder(accept)
    is_open = content_type.startswith("application/openmetrics-text")
    lines: list[str] = []
    for family in registry.collect():
        name, kind = family.name, family.type
        if not is_open and kind == "counter":
            name += "_total"
        elif not is_open and kind == "info":
            name, kind = f"{name}_info", "gauge"
        lines.append(f"# HELP {name} {_escaped(family.documentation)}\n# TYPE {name} {kind}\n")
        lines += [f"{_series(one.name, tuple(one.labels.items()))} {_number(one.value)}\n" for one in family.samples]
    if is_open:
        lines.append("# EOF\n")
    return "".join(lines).encode(), content_type


@lru_cache(_SERIES_CACHED_MAX)
def _series(name: str, labels: tuple[tuple[str, str], ...]) -> str:
    return name + "{" + ",".join(f'{label}="{_escaped(value)}"' for label, value in labels) + "}" if labels else name


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _number(value: float) -> str:
    return repr(value) if math.isfinite(value) else "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"


Labels = Sequence[str]
Rows = Iterable[tuple[Sequence[str], float]]


def _gauge(name: str, words: str, value: float) -> Metric:
    return GaugeMetricFamily(name, words, value)


def _counter(name: str, words: str, value: float) -> Metric:
    return CounterMetricFamily(name, words, value)


def _gauges(name: str, words: str, labels: Labels, rows: Rows) -> Metric:
    family = GaugeMetricFamily(name, words, labels=labels)
    for values, value in rows:
        family.add_metric(values, value)
    return family


def _counters(name: str, words: str, labels: Labels, rows: Rows) -> Metric:
    family = CounterMetricFamily(name, words, labels=labels)
    for values, value in rows:
        family.add_metric(values, value)
    return family


def _histograms(name: str, words: str, labels: Labels, rows: Iterable[tuple[Sequence[str], Histogram]]) -> Metric:
    family = HistogramMetricFamily(name, words, labels=labels)
    for values, histogram in rows:
        family.add_metric(values, histogram.cumulative(), histogram.total)
    return family


def _copied(bounds: Sequence[float], counts: Sequence[int], total: float) -> Histogram:
    found = Histogram(bounds)
    found.counts, found.total = list(counts), total
    return found
