"""`headrace bench …`: measure the protocols of Headrace and other brokers on this machine."""

from __future__ import annotations

from contextlib import ExitStack, closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from headrace.bench import options
from headrace.bench.children import Address, cpu_seconds
from headrace.bench.report import Figure, NoteValue, Target, cpu_note
from headrace.extras import needs

if TYPE_CHECKING:
    from headrace.bench.fujin import QuicTraffic

PROTOCOLS = ["figg", "blipmq", "flymq", "rustlog", "rustlog-json"]
QUIC_PROTOCOLS = ["fujin"]
"""Protocols over QUIC have their own load generator."""
COMPARED_PROTOCOLS = "figg,blipmq,flymq,rustlog"
PEERS = ["nats", "redis"]
OPERATIONS = ["publish", "fetch-1", "fetch-10", "fetch-500", "consume"]
TENANTS = ["small-batches", "flight-append", "figg-flood", "figg-history", "topic-list"]
PUBLISH_TARGETS = {"figg": Target(at_least=600_000)}


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def bench() -> None:
    """Measure the protocols, and other brokers for comparison.

    Each command starts a broker on an empty directory and a free port, and stops it at the end. Client cost is excluded: frames are
    built before the clock starts, and replies are only counted.
    """


@bench.command()
@options.protocol([*PROTOCOLS, *QUIC_PROTOCOLS])
@options.records(1_000_000)
@options.connections()
@click.option(
    "--window", type=click.IntRange(0), default=0, show_default=True, help="Unacknowledged records per connection; 0: limited by TCP only."
)
@options.streams()
def publish(
    protocol_name: str, value_bytes: int, ack: str, server: str | None, key: str | None, profile: Path | None,
    repeat: int, output: str, parent: Path | None, records: int, connections: int, window: int, streams: int,
) -> None:  # fmt: skip
    """Publish through a protocol. Measures from the first byte to the last acknowledgement.

    BlipMQ publishes with QoS 1 and is acknowledged by a PONG after every 256 KiB. RustLog publishes batches of 500 records.
    """
    from headrace.bench import traffic
    from headrace.bench.protocols import PROTOCOLS as loads

    config: dict[str, NoteValue] = {
        "protocol": protocol_name,
        "records": records,
        "value_bytes": value_bytes,
        "ack": ack,
        "connections": connections,
        "window": window,
    }
    chosen = options.Chosen(ack, server, key, profile)
    if protocol_name in QUIC_PROTOCOLS:
        _quic_only(server, window)
        _publish_over_quic(chosen, repeat, output, parent, config, streams)
        return
    _tcp_only(streams)
    name = f"{protocol_name} publish, {ack}" + (f", {connections} connections" if connections > 1 else "")
    figure = Figure(name, "records/s", [], PUBLISH_TARGETS.get(protocol_name) if connections == 1 else None)
    used_seconds = 0.0
    with options.measuring("publish", repeat, output, parent, config) as running, running.broker(chosen) as target:
        plan = traffic.Traffic(loads[protocol_name], target.address, target.key, records, value_bytes, connections, window)
        traffic.warm_up(plan)
        for turn in range(repeat):
            topic, before = traffic.new_topic(plan), target.cpu_seconds()
            with running.steps.step(f"{name} {turn + 1}/{repeat}", records) as tick:
                figure.runs.append(records / traffic.publish(plan, topic, tick))
            used_seconds += target.cpu_seconds() - before
        figure.notes = cpu_note(used_seconds, records * repeat)
        running.report.add(figure)


@bench.command()
@options.protocol([*PROTOCOLS, *QUIC_PROTOCOLS])
@options.records(1_000_000)
@options.connections()
@options.streams()
@click.option("--singles", "has_singles", is_flag=True, help="Compare with a topic that was filled one record at a time (TCP only).")
def consume(
    protocol_name: str, value_bytes: int, ack: str, server: str | None, key: str | None, profile: Path | None,
    repeat: int, output: str, parent: Path | None, records: int, connections: int, streams: int, has_singles: bool,
) -> None:  # fmt: skip
    """Read a topic from its first record through a protocol. Each connection reads the whole topic.

    Figg attaches at the first record. FlyMQ and RustLog fetch pages of up to 5,000 records, two in flight. BlipMQ polls and acknowledges
    with 2,000 deliveries in flight. Fujin pushes with auto commit, one topic per stream.
    """
    from headrace.bench import history

    config: dict[str, NoteValue] = {"protocol": protocol_name, "records": records, "value_bytes": value_bytes, "connections": connections}
    if protocol_name in QUIC_PROTOCOLS:
        _quic_only(server)
        if has_singles:
            raise click.UsageError("--singles is for protocols over TCP")
        _consume_over_quic(options.Chosen(ack, server, key, profile), repeat, output, parent, config, streams)
        return
    _tcp_only(streams)
    with options.measuring("consume", repeat, output, parent, config) as running:
        workload = history.Workload(protocol_name, records, value_bytes, connections, has_singles)
        for figure in history.measure(running, options.Chosen(ack, server, key, profile), workload):
            running.report.add(figure)


@bench.command()
@options.protocol([*PROTOCOLS, *QUIC_PROTOCOLS])
@click.option(
    "--rate", type=click.IntRange(1, 1_000_000), default=10_000, show_default=True, help="Records per second, sent at fixed times."
)
@click.option(
    "--load-percent",
    type=click.IntRange(1, 100),
    help="Instead of --rate: percentage of the maximum rate, which is measured first.",
)
@options.duration(10.0, "Duration of the open loop in seconds.")
@click.option("--round-trips", type=click.IntRange(1), default=2_000, show_default=True, help="Records sent one at a time.")
@needs("headrace bench latency", "hdrh")
def latency(
    protocol_name: str, value_bytes: int, ack: str, server: str | None, key: str | None, profile: Path | None,
    repeat: int, output: str, parent: Path | None, rate: int, load_percent: int | None, duration: float, round_trips: int,
) -> None:  # fmt: skip
    """Measure reply times: an open loop at a fixed rate, and one record at a time. Fujin: only one record at a time.

    At a load of 50 % of the maximum, the p99 of Figg and FlyMQ has a target of 15 ms, and a bare group commit gets the same bytes.
    """
    from headrace.bench import latency as replies
    from headrace.bench import traffic
    from headrace.bench.bare import bare_server
    from headrace.bench.facts import SyncProbe
    from headrace.bench.protocols import PROTOCOLS as loads

    config: dict[str, NoteValue] = {
        "protocol": protocol_name,
        "value_bytes": value_bytes,
        "ack": ack,
        "rate": rate,
        "duration": duration,
        "round_trips": round_trips,
    }
    if protocol_name in QUIC_PROTOCOLS:
        _quic_only(server)
        _no_open_loop()
        _latency_over_quic(options.Chosen(ack, server, key, profile), repeat, output, parent, config)
        return
    load = loads[protocol_name]
    if load_percent is not None:
        config["rate"], config["load_percent"] = "measured", load_percent
    with options.measuring("latency", repeat, output, parent, config) as running:
        with running.broker(options.Chosen(ack, server, key, profile)) as target, ExitStack() as others:
            bare = None if load_percent is None else others.enter_context(bare_server(running.directory))
            plan = traffic.Traffic(load, target.address, target.key, replies.maximum_records(value_bytes), value_bytes)
            traffic.warm_up(plan)
            open_loops, commits, trips, machine = [], [], [], []
            maximum = 0
            if load_percent is not None:
                with running.steps.step("maximum rate", 1):
                    maximum = replies.maximum_rate(plan)
                rate = max(1, round(maximum * load_percent / 100))
            records = max(1, round(rate * duration))
            for turn in range(repeat):
                topic = traffic.new_topic(plan).name
                slots = replies.publish_slots(load, topic, rate=rate, records=records, value_bytes=value_bytes)
                with running.steps.step(f"open loop {turn + 1}/{repeat}", records) as tick, traffic.logged_in(plan) as (sock,):
                    open_loops.append(replies.open_loop(sock, slots, load.acks(topic), tick))
                if bare is not None:
                    with running.steps.step(f"bare group commit {turn + 1}/{repeat}", 1):
                        commits.append(replies.commit_loop(bare.tcp, load, topic, rate=rate, records=records, value_bytes=value_bytes))
                topic = traffic.new_topic(plan).name
                with running.steps.step(f"round trips {turn + 1}/{repeat}", round_trips), traffic.logged_in(plan) as (sock,):
                    with closing(SyncProbe(running.directory, value_bytes + replies.RECORD_OVERHEAD_BYTES, round_trips)) as probe:
                        times, own = replies.round_trips(sock, load, topic, count=round_trips, value_bytes=value_bytes, probe=probe.once)
                    trips.append(times)
                    machine.append(own)
        if load_percent is not None:
            running.report.add(replies.loaded_figure(protocol_name, ack, load_percent, maximum, open_loops))
            running.report.add(replies.commit_figure(commits))
        for figure in replies.figures(protocol_name, ack, rate, open_loops, trips, machine):
            running.report.add(figure)


@bench.command()
@options.protocol([*PROTOCOLS[:-1], *QUIC_PROTOCOLS])
@click.option(
    "--connections",
    default="1,16,64,256",
    show_default=True,
    metavar="NUMBERS",
    callback=options.parse_numbers,
    help="Comma-separated numbers of connections; for fujin, of streams.",
)
@click.option("--operations", default=",".join(OPERATIONS), show_default=True, metavar="NAMES", help="Comma-separated operations.")
@options.records(100_000)
@options.duration(2.0, "Duration of each measurement in seconds.")
def requests(
    protocol_name: str, value_bytes: int, ack: str, server: str | None, key: str | None, profile: Path | None,
    repeat: int, output: str, parent: Path | None, connections: list[int], operations: str, records: int, duration: float,
) -> None:  # fmt: skip
    """Measure requests one at a time on many connections, beside a bare server.

    publish: one durable record. fetch-N: N records of a topic with --records records. consume: the next record (FlyMQ, BlipMQ). The bare
    server receives and sends as many bytes; for a publish it also writes and syncs them, many at once.
    """
    from headrace.bench import requests as measurements

    names = _names(operations, list(OPERATIONS), "--operations")
    config: dict[str, NoteValue] = {
        "protocol": protocol_name,
        "connections": ",".join(map(str, connections)),
        "operations": ",".join(names),
        "records": records,
        "value_bytes": value_bytes,
        "ack": ack,
        "duration": duration,
    }
    if protocol_name in QUIC_PROTOCOLS:
        _quic_only(server)
    workload = measurements.Workload(protocol_name, names, connections, duration, records, value_bytes)
    with options.measuring("requests", repeat, output, parent, config) as running:
        for point in measurements.measure(running, options.Chosen(ack, server, key, profile), workload):
            for figure in point.figures():
                running.report.add(figure)


@bench.command()
@options.common
@click.option("--protocol", "protocol_name", type=click.Choice(["figg", "fujin"]), default="figg", show_default=True, help="Wire protocol.")
@click.option(
    "--subscribers",
    type=click.IntRange(1, options.CONNECTIONS_MAX),
    help="Connections that receive every record (default: 1,000 with figg, 100 with fujin).",
)
@click.option("--rate", type=click.IntRange(1, 100_000), help="Records per second (default: 100 with figg, 1,000 with fujin).")
@options.duration(5.0, "Duration of each repetition in seconds.")
@options.size()
@options.ack()
@options.profile()
def fanout(
    repeat: int, output: str, parent: Path | None, protocol_name: str, subscribers: int | None, rate: int | None, duration: float,
    value_bytes: int, ack: str, profile: Path | None,
) -> None:  # fmt: skip
    """Measure the delivery of each record to many subscribers.

    Figg: attachments. Fujin: push readers with auto commit, each in a group of its own. Measures from the intended time of the publish to
    the arrival at each subscriber.
    """
    from headrace.bench import fanout as measurements

    shape = measurements.Fanout(
        protocol_name,
        subscribers or (100 if protocol_name == "fujin" else 1_000),
        rate or (1_000 if protocol_name == "fujin" else 100),
        duration,
        value_bytes,
    )
    config: dict[str, NoteValue] = {**asdict(shape), "ack": ack}
    with options.measuring("fanout", repeat, output, parent, config) as running:
        for figure in measurements.measure(running, options.Chosen(ack, None, None, profile), shape).figures():
            running.report.add(figure)


@bench.command()
@options.common
@options.size()
@options.ack()
@options.profile()
@options.records(500_000)
@click.option(
    "--topics",
    default="2,100,9900",
    show_default=True,
    metavar="NUMBERS",
    callback=options.parse_topics,
    help="Comma-separated numbers of topics that records go to in turn.",
)
@click.option("--only", default="", metavar="TEXT", help="Measure only requests whose name contains this text.")
def topics(
    value_bytes: int, ack: str, profile: Path | None, repeat: int, output: str, parent: Path | None, records: int, topics: list[int],
    only: str,
) -> None:  # fmt: skip
    """Measure pipelined FlyMQ requests beside PRODUCE to one topic.

    Single records to many topics in turn, COMMIT, PRODUCE_DELAYED, PRODUCE_WITH_TTL, and transactions of 1 and of 100 records, on one
    connection.
    """
    from headrace.bench import topics as measurements

    config: dict[str, NoteValue] = {
        "records": records,
        "value_bytes": value_bytes,
        "ack": ack,
        "topics": ",".join(map(str, topics)),
    }
    with options.measuring("topics", repeat, output, parent, config) as running:
        for figure in measurements.measure(running, options.Chosen(ack, None, None, profile), records, value_bytes, topics, only):
            running.report.add(figure)


@bench.command()
@options.common
@click.option("--tenants", default=",".join(TENANTS), show_default=True, metavar="NAMES", help="Comma-separated tenants.")
@click.option(
    "--rate", type=click.IntRange(1, 10_000), default=200, show_default=True, help="Requests per second of the publisher and of the reader."
)
@options.duration(5.0, "Duration of each measurement in seconds.")
@click.option(
    "--small-batches", type=click.IntRange(1), default=20_000, show_default=True, help="Records of the topic filled one at a time."
)
@click.option("--history", type=click.IntRange(1), default=500_000, show_default=True, help="Records of the Figg history and flood.")
@click.option("--topics", type=click.IntRange(1), default=9_900, show_default=True, help="Topics to list.")
def interference(
    repeat: int, output: str, parent: Path | None, tenants: str, rate: int, duration: float, small_batches: int, history: int, topics: int
) -> None:
    """Measure a small publisher and reader beside a busy tenant.

    small-batches reads a topic that was filled one record at a time, flight-append appends, figg-flood publishes at full speed,
    figg-history reads a topic, topic-list lists topics. The control has the tenant on a second broker. The target of each p99 is twice
    that of its control plus one fdatasync.
    """
    from headrace.bench import interference as measurements
    from headrace.bench.tenants import Sizes

    names = _names(tenants, TENANTS, "--tenants")
    if "flight-append" in names:
        with needs("the tenant flight-append", "pyarrow"):
            import pyarrow.flight  # noqa: F401  # fails before anything is measured
    config: dict[str, NoteValue] = {
        "tenants": ",".join(names),
        "rate": rate,
        "duration": duration,
        "small_batches": small_batches,
        "history": history,
        "topics": topics,
    }
    with options.measuring("interference", repeat, output, parent, config) as running:
        pace, sizes = measurements.Pace(rate, duration), Sizes(small_batches, history, topics)
        for found in measurements.measure(running, names, pace, sizes):
            for figure in [*found.figures(running.report.facts.fdatasync_p50_ms), *found.loop_figures()]:
                running.report.add(figure)


@bench.command()
@options.common
@options.size()
@options.records(1_000_000)
@click.option(
    "--protocols",
    default=COMPARED_PROTOCOLS,
    show_default=True,
    metavar="NAMES",
    help=f"Comma-separated protocols: {', '.join(PROTOCOLS)}.",
)
@click.option("--against", default="nats", show_default=True, metavar="NAMES", help="Comma-separated brokers: nats, redis.")
@click.option("--engine", type=click.Choice(["embedded", "kafka"]), default="embedded", show_default=True, help="Engine of Headrace.")
@click.option("--nodes", type=click.Choice(["1", "3"]), default="1", show_default=True, help="Kafka nodes, with --engine kafka.")
def compare(
    value_bytes: int, repeat: int, output: str, parent: Path | None, records: int, protocols: str, against: str, engine: str, nodes: str
) -> None:
    """Compare Headrace with other brokers.

    nats: JetStream with file storage and its default sync. redis: Streams with appendfsync everysec and always. With --engine kafka,
    Headrace on a Kafka cluster is compared with aiokafka and with Kafka's load generator in Java on the same cluster instead.
    """
    from headrace.bench import compare as comparison
    from headrace.bench.protocols import PROTOCOLS as loads

    protocol_names, peers = _names(protocols, PROTOCOLS, "--protocols"), _names(against, PEERS, "--against")
    if engine == "kafka":
        _compare_on_kafka(protocol_names, int(nodes), repeat, output, parent, records, value_bytes)
        return
    found = comparison.candidates([loads[name] for name in protocol_names], peers)
    config: dict[str, NoteValue] = {
        "protocols": ",".join(protocol_names),
        "against": ",".join(peers),
        "records": records,
        "value_bytes": value_bytes,
    }
    with options.measuring("compare", repeat, output, parent, config) as running:
        comparison.rounds(comparison.Comparison(records, value_bytes, running.directory), found, repeat, running.steps)
        for figure in comparison.figures(found):
            running.report.add(figure)


@bench.command()
@options.common
@options.size()
@click.option("--against", type=click.Choice(["kafka"]), default="kafka", show_default=True, help="Source to compare with.")
@click.option("--rows", type=click.IntRange(1_000), default=4_000_000, show_default=True, help="Rows of one turn.")
@click.option("--per-trigger", type=click.IntRange(1_000), default=1_000_000, show_default=True, help="Rows of one micro-batch.")
@click.option("--master", metavar="URL", default="local[2]", show_default=True, help="Spark master.")
@needs("headrace bench spark", "pyspark", "pyarrow", "pandas", "aiokafka")
def spark(
    value_bytes: int, repeat: int, output: str, parent: Path | None, against: str, rows: int, per_trigger: int, master: str
) -> None:  # fmt: skip
    """Read topics with Spark, beside Spark's Kafka connector.

    Starts a Kafka node, copies a topic to it, and reads the same rows from both in turns: in batches and in micro-batches, with all seven
    columns and with the value alone. The notes show the median duration of each phase of a micro-batch.
    """
    from headrace.bench import spark as measurements

    config: dict[str, NoteValue] = {
        "against": against, "rows": rows, "value_bytes": value_bytes, "per_trigger": per_trigger, "master": master
    }  # fmt: skip
    with options.measuring("spark", repeat, output, parent, config) as running:
        for figure in measurements.against_kafka(running, measurements.Comparison(rows, value_bytes, per_trigger, master)):
            running.report.add(figure)


def _compare_on_kafka(
    protocol_names: list[str], nodes: int, repeat: int, output: str, parent: Path | None, records: int, value_bytes: int
) -> None:
    from headrace.bench import compare as comparison
    from headrace.bench.peers import kafka
    from headrace.bench.protocols import PROTOCOLS as loads

    kafka.check()
    config: dict[str, NoteValue] = {
        "engine": "kafka", "nodes": nodes, "protocols": ",".join(protocol_names), "records": records, "value_bytes": value_bytes
    }  # fmt: skip
    with options.measuring("compare", repeat, output, parent, config) as running, kafka.server(running.directory, nodes) as cluster:
        found = comparison.on_kafka([loads[name] for name in protocol_names], cluster)
        comparison.rounds(comparison.Comparison(records, value_bytes, running.directory), found, repeat, running.steps)
        for figure in comparison.figures(found):
            running.report.add(figure)


def _quic_only(server: str | None, window: int = 0) -> None:
    if server is not None or window:
        raise click.UsageError("--server and --window are for protocols over TCP")


def _no_open_loop() -> None:
    given = click.get_current_context().get_parameter_source
    for name in ("rate", "load_percent", "duration"):
        if given(name) is ParameterSource.COMMANDLINE:
            raise click.UsageError(f"--{name.replace('_', '-')} is for the open loop, which is not measured over QUIC")


def _tcp_only(streams: int) -> None:
    if streams != 1:
        raise click.UsageError("--streams is for protocols over QUIC")


def _publish_over_quic(
    chosen: options.Chosen, repeat: int, output: str, parent: Path | None, config: dict[str, NoteValue], streams: int
) -> None:
    from headrace.bench import fujin
    from headrace.bench.traffic import warm_up_records

    traffic = _quic_traffic(config, streams)

    def publish(address: Address, records: int) -> float:
        return fujin.on_loop(fujin.publish(address, fujin.new_topic(), replace(traffic, records=records)))

    with options.measuring("publish", repeat, output, parent, config) as running:
        with fujin.quic_broker(running.directory, chosen.ack, chosen.profile) as (address, pid):
            publish(address, warm_up_records(traffic.records, traffic.value_bytes))
            rates, cpu_before = [], cpu_seconds(pid)
            for number in range(1, repeat + 1):
                with running.steps.step(f"publish {number}/{repeat}", traffic.records):
                    rates.append(traffic.records / publish(address, traffic.records))
            notes = cpu_note(cpu_seconds(pid) - cpu_before, traffic.records * repeat)
        running.report.add(Figure(f"fujin publish, {chosen.ack}", "records/s", rates, None, notes))


def _consume_over_quic(
    chosen: options.Chosen, repeat: int, output: str, parent: Path | None, config: dict[str, NoteValue], streams: int
) -> None:
    from headrace.bench import fujin

    traffic = _quic_traffic(config, streams)
    rates, cpu = [], 0.0
    with options.measuring("consume", repeat, output, parent, config) as running:
        with fujin.quic_broker(running.directory, chosen.ack, chosen.profile) as (address, pid):
            for number in range(1, repeat + 1):
                with running.steps.step(f"fill {number}/{repeat}", traffic.records):
                    topics = fujin.filled_topics(address, traffic)
                before = cpu_seconds(pid)
                with running.steps.step(f"consume {number}/{repeat}", traffic.records):
                    rates.append(traffic.records / fujin.on_loop(fujin.consume(address, topics, traffic)))
                cpu += cpu_seconds(pid) - before
        running.report.add(Figure("fujin consume, pushed", "records/s", rates, None, cpu_note(cpu, traffic.records * repeat)))


def _quic_traffic(config: dict[str, NoteValue], streams: int) -> QuicTraffic:
    from headrace.bench.fujin import QuicTraffic

    config["streams"] = streams
    return QuicTraffic(int(str(config["records"])), int(str(config["value_bytes"])), int(str(config["connections"])), streams)


def _latency_over_quic(chosen: options.Chosen, repeat: int, output: str, parent: Path | None, config: dict[str, NoteValue]) -> None:
    """Measure round trips only: an open loop over QUIC would measure the load generator's half of the library."""
    from headrace.bench import fujin
    from headrace.bench.facts import SyncProbe
    from headrace.bench.latency import RECORD_OVERHEAD_BYTES

    count, value_bytes = int(str(config["round_trips"])), int(str(config["value_bytes"]))
    trips, machine = [], []
    with options.measuring("latency", repeat, output, parent, config) as running:
        with fujin.quic_broker(running.directory, chosen.ack, chosen.profile) as (address, _):
            for turn in range(repeat):
                with running.steps.step(f"round trips {turn + 1}/{repeat}", count):
                    with closing(SyncProbe(running.directory, value_bytes + RECORD_OVERHEAD_BYTES, count)) as probe:
                        times, own = fujin.on_loop(fujin.round_trips(address, fujin.new_topic(), count, value_bytes, probe.once))
                trips.append(times)
                machine.append(own)
        for figure in fujin.latency_figures(chosen.ack, trips, machine):
            running.report.add(figure)


def _names(text: str, known: list[str], flag: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise click.BadParameter(f"{unknown[0]!r} is none of {', '.join(known)}", param_hint=flag)
    return names
