"""`headrace bench …`: what the log and the doors can do on this machine, and others beside them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import click

from headrace.bench import options
from headrace.bench.children import Address, cpu_seconds
from headrace.bench.report import Figure, NoteValue, Target, cpu_note
from headrace.extras import needs

if TYPE_CHECKING:
    from headrace.bench.fujin import QuicTraffic

Step: TypeAlias = Callable[[str], AbstractContextManager[Any]]
DOORS = ["figg", "blipmq", "flymq", "rustlog", "rustlog-json"]
QUIC_DOORS = ["fujin"]
"""Over QUIC, and so with a load generator of their own."""
COMPARED_DOORS = "figg,blipmq,flymq,rustlog"
LOG_PARTS = ["raw", "append", "read", "spread", "recovery", "memory"]
SPARK_PARTS = ["batch", "stream", "sink", "latency"]
PEERS = ["nats", "redis"]
CONSUME_TARGETS = {"figg": Target(at_least=1_000_000)}


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def bench() -> None:
    """Measure the log, the doors, and others beside them.

    A broker is started on an empty directory and a free port, and is gone when the run ends. The cost of the client is kept out:
    frames are built before the clock starts, and answers are only counted.
    """


@bench.command()
@options.common
@options.records(2_000_000)
@options.size()
@click.option("--run", "run_records", type=click.IntRange(1), default=1_000, show_default=True, help="Records of one append.")
@options.size("--log-size", "log_bytes", "1 GiB", "Size of the log that is recovered and idles.")
@click.option("--partitions", type=click.IntRange(2, 1_000), default=1_000, show_default=True, help="Partitions where there are many.")
@click.option("--only", type=click.Choice(LOG_PARTS), multiple=True, help="Measure only this part; may be repeated.")
def log(
    repeat: int, output: str, parent: Path | None, records: int, value_bytes: int, run_records: int, log_bytes: int, partitions: int,
    only: tuple[str, ...],
) -> None:  # fmt: skip
    """The log without a network, beside what the disk and the memory can do.

    raw: pwrite + fdatasync and memcpy. append: durable, 64 runs in flight. read: as columns and as values. spread: a flush to all
    partitions and one of the same bytes to one. recovery: opening a log whose process was killed with a full journal. memory: a
    broker that idles on that log.
    """
    from headrace.bench.logfigures import figures as log_figures
    from headrace.bench.logs import LogPlan

    config: dict[str, NoteValue] = {
        "records": records, "value_bytes": value_bytes, "run_records": run_records, "log_bytes": log_bytes, "partitions": partitions,
    }  # fmt: skip
    plan = LogPlan(records, value_bytes, run_records, log_bytes, partitions)
    with options.measuring("log", repeat, output, parent, config) as run:
        for figure in log_figures(plan, only or LOG_PARTS, run.directory, repeat, run.steps):
            run.report.add(figure)


@bench.command()
@options.door([*DOORS, *QUIC_DOORS])
@options.records(1_000_000)
@options.connections()
@click.option(
    "--window", type=click.IntRange(0), default=0, show_default=True, help="Unacknowledged records per connection; 0: as TCP allows."
)
@options.streams()
@click.option("--against-one", is_flag=True, help="Take turns with a single connection that publishes as much, and show the ratio.")
@click.option("--schema", type=click.Choice(["json"]), help="Take turns with a topic that requires a schema, and show the ratio (FlyMQ).")
@click.option(
    "--transactions",
    type=click.IntRange(1, 10_000),
    help="Take turns with transactions of so many records each, and show the ratio (FlyMQ).",
)
@click.option(
    "--access", type=click.Choice(["enforced"]), help="Take turns with a broker that looks at users and rules, and show the ratio."
)
def publish(
    door_name: str, value_bytes: int, ack: str, server: str | None, key: str | None, profile: Path | None,
    repeat: int, output: str, parent: Path | None, records: int, connections: int, window: int, streams: int, against_one: bool,
    schema: str | None, transactions: int | None, access: str | None,
) -> None:  # fmt: skip
    """Publish through a door, from the first byte to the last acknowledgement.

    BlipMQ publishes with QoS 1 and is acknowledged by a PONG after every 256 KiB, RustLog publishes batches of 500 records. Fujin is
    shown beside its QUIC library with a sink that only reads. Transactions have 48 under way on
    each connection, and are shown beside plain records without a window and with as many under way.
    """
    from headrace.bench import traffic
    from headrace.bench.doors import DOORS as loads
    from headrace.bench.publishing import Beside, figures_of, take_turns, ways_of

    config: dict[str, NoteValue] = {
        "door": door_name,
        "records": records,
        "value_bytes": value_bytes,
        "ack": ack,
        "connections": connections,
        "window": window,
    }
    chosen = options.Chosen(ack, server, key, profile)
    beside = Beside(against_one, schema, transactions, access)
    beside.check(door_name, connections, server)
    if door_name in QUIC_DOORS:
        _quic_only(server, window, against_one)
        _publish_over_quic(chosen, repeat, output, parent, config, streams)
        return
    _tcp_only(streams)
    with options.measuring("publish", repeat, output, parent, config) as run, ExitStack() as brokers:
        target = brokers.enter_context(run.broker(chosen))
        plan = traffic.Traffic(loads[door_name], target.address, target.key, records, value_bytes, connections, window)
        traffic.warm_up(plan)
        ways = ways_of(run, brokers, chosen, target, plan, beside)
        take_turns(run, ways)
        for figure in figures_of(ways, plan, beside):
            run.report.add(figure)


@bench.command()
@options.door([*DOORS, *QUIC_DOORS])
@options.records(1_000_000)
@options.connections()
@options.streams()
def consume(
    door_name: str, value_bytes: int, ack: str, server: str | None, key: str | None, profile: Path | None,
    repeat: int, output: str, parent: Path | None, records: int, connections: int, streams: int,
) -> None:  # fmt: skip
    """Read a topic from its start through a door; with several connections, each reads all of it.

    Figg attaches at the start, FlyMQ and RustLog fetch pages of up to 5,000 records with two under way, BlipMQ polls and acknowledges
    with 2,000 under way. Fujin is pushed with auto commit, each stream a topic of its own, beside a source that only writes.
    """
    from headrace.bench import traffic
    from headrace.bench.doors import DOORS as loads

    config: dict[str, NoteValue] = {"door": door_name, "records": records, "value_bytes": value_bytes, "connections": connections}
    if door_name in QUIC_DOORS:
        _quic_only(server)
        _consume_over_quic(options.Chosen(ack, server, key, profile), repeat, output, parent, config, streams)
        return
    _tcp_only(streams)
    with options.measuring("consume", repeat, output, parent, config) as run:
        with run.broker(options.Chosen(ack, server, key, profile)) as target:
            plan = traffic.Traffic(loads[door_name], target.address, target.key, records, value_bytes, connections)
            place = traffic.new_topic(plan, readers=repeat * connections)
            with run.steps.step("fill", records) as tick:
                traffic.publish(replace(plan, connections=1), place, tick)
            traffic.warm_up(plan)
            rates, cpu_before = [], target.cpu_seconds()
            for turn in range(repeat):
                with run.steps.step(f"consume {turn + 1}/{repeat}", records * connections) as tick:
                    rates.append(records * connections / traffic.consume(plan, place, tick, turn=turn))
            notes = cpu_note(target.cpu_seconds() - cpu_before, records * connections * repeat)
        run.report.add(Figure(f"{door_name} consume, history", "records/s", rates, CONSUME_TARGETS.get(door_name), notes))


@bench.command()
@options.door([*DOORS, *QUIC_DOORS])
@click.option(
    "--rate", type=click.IntRange(1, 1_000_000), default=10_000, show_default=True, help="Records a second, sent whatever happens."
)
@click.option("--duration", type=click.FloatRange(0.01, 3_600), default=10.0, show_default=True, help="Seconds of the open loop.")
@click.option("--round-trips", type=click.IntRange(1), default=2_000, show_default=True, help="Records sent one at a time.")
@needs("headrace bench latency", "hdrh")
def latency(
    door_name: str, value_bytes: int, ack: str, server: str | None, key: str | None, profile: Path | None,
    repeat: int, output: str, parent: Path | None, rate: int, duration: float, round_trips: int,
) -> None:  # fmt: skip
    """Answer times: an open loop at a fixed rate, and one record at a time."""
    from headrace.bench import latency as answers
    from headrace.bench import traffic
    from headrace.bench.doors import DOORS as loads
    from headrace.bench.raw import SyncProbe

    config: dict[str, NoteValue] = {
        "door": door_name,
        "value_bytes": value_bytes,
        "ack": ack,
        "rate": rate,
        "duration": duration,
        "round_trips": round_trips,
    }
    if door_name in QUIC_DOORS:
        _quic_only(server)
        _latency_over_quic(options.Chosen(ack, server, key, profile), repeat, output, parent, config)
        return
    load, records = loads[door_name], max(1, round(rate * duration))
    with options.measuring("latency", repeat, output, parent, config) as run:
        with run.broker(options.Chosen(ack, server, key, profile)) as target:
            plan = traffic.Traffic(load, target.address, target.key, records, value_bytes)
            traffic.warm_up(plan)
            open_loops, trips, machine = [], [], []
            for turn in range(repeat):
                topic = traffic.new_topic(plan).topic
                with run.steps.step(f"open loop {turn + 1}/{repeat}", records) as tick, traffic.entered(plan) as (sock,):
                    open_loops.append(answers.open_loop(sock, load, topic, rate=rate, records=records, value_bytes=value_bytes, tick=tick))
                topic = traffic.new_topic(plan).topic
                with run.steps.step(f"round trips {turn + 1}/{repeat}", round_trips), traffic.entered(plan) as (sock,):
                    with closing(SyncProbe(run.directory, value_bytes + answers.RECORD_OVERHEAD_BYTES, round_trips)) as probe:
                        times, own = answers.round_trips(sock, load, topic, count=round_trips, value_bytes=value_bytes, probe=probe.once)
                    trips.append(times)
                    machine.append(own)
        for figure in answers.figures(door_name, ack, rate, open_loops, trips, machine):
            run.report.add(figure)


@bench.command()
@options.common
@options.size()
@click.option("--rows", type=click.IntRange(1), default=5_000_000, show_default=True, help="Rows of a run.")
@click.option("--batch", "batch_rows", type=click.IntRange(1), default=65_536, show_default=True, help="Rows of a record batch.")
@click.option(
    "--ack", type=click.Choice(["durable", "written", "none"]), default="durable", show_default=True, help="What an answer promises."
)
@click.option(
    "--profile",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    help="Run the broker under cProfile, which slows it down, and write the profile here.",
)
@needs("headrace bench bulk", "numpy", "pyarrow")
def bulk(
    value_bytes: int, repeat: int, output: str, parent: Path | None, rows: int, batch_rows: int, ack: str, profile: Path | None
) -> None:
    """Append and read through the bulk lane, beside a bare Flight server.

    The bare server serves and sinks ready-made record batches from memory. Both are met by the same plain Flight client.
    """
    from headrace.bench import bulk as lanes

    config: dict[str, NoteValue] = {"rows": rows, "value_bytes": value_bytes, "batch_rows": batch_rows, "ack": ack}
    traffic, rates = lanes.BulkTraffic(rows, value_bytes, batch_rows), lanes.BulkRates()
    with options.measuring("bulk", repeat, output, parent, config) as run:
        with lanes.bulk_broker(run.directory, ack, profile) as lane, lanes.bare_server(run.directory, traffic) as bare:
            for number in range(repeat):
                with run.steps.step(f"turn {number + 1}/{repeat}", rows):
                    lanes.turn(lane, bare, traffic, rates)
        for figure in lanes.figures(ack, traffic, rates):
            run.report.add(figure)


@bench.command()
@options.common
@click.option("--messages", type=click.IntRange(1, 100_000), default=500, show_default=True, help="Delayed messages of a run.")
@click.option("--rate", type=click.FloatRange(0.1, 10_000), default=100.0, show_default=True, help="Messages handed in a second.")
@click.option("--delay", "delay_ms", type=click.IntRange(1, 60_000), default=1_000, show_default=True, help="Milliseconds each one waits.")
@click.option("--profile", type=click.Path(dir_okay=False, writable=True, path_type=Path), help="Run the broker under cProfile.")
@needs("headrace bench delayed", "hdrh")
def delayed(repeat: int, output: str, parent: Path | None, messages: int, rate: float, delay_ms: int, profile: Path | None) -> None:
    """How late delayed messages arrive, alone and while another client publishes at full speed.

    From the time a message was due to its arrival at a reader that is pushed. One that comes early ends the run.
    """
    from headrace.bench import delayed as lateness

    config: dict[str, NoteValue] = {"messages": messages, "rate": rate, "delay_ms": delay_ms}
    quiet, busy, machine = [], [], []
    with options.measuring("delayed", repeat, output, parent, config) as run:
        with run.broker(options.Chosen("durable", None, None, profile)) as target:

            def once(name: str, turn: int) -> list[float]:
                with run.steps.step(f"{name} {turn + 1}/{repeat}", messages) as tick:
                    return lateness.lateness(
                        target.address, f"delayed-{name}-{turn}", messages=messages, rate=rate, delay_ms=delay_ms, tick=tick
                    )

            for turn in range(repeat):
                quiet.append(once("quiet", turn))
                with lateness.loaded(target.address, run.directory), lateness.Pulse(run.directory) as pulse:
                    busy.append(once("busy", turn))
                machine.append(pulse.late)
        for figure in lateness.figures(quiet, busy, machine):
            run.report.add(figure)


@bench.command()
@options.common
@options.size()
@options.records(1_000_000)
@click.option(
    "--doors", default=COMPARED_DOORS, show_default=True, metavar="NAMES", help=f"Doors, with commas between: {', '.join(DOORS)}."
)
@click.option("--against", default="nats", show_default=True, metavar="NAMES", help="Peers, with commas between: nats, redis.")
def compare(value_bytes: int, repeat: int, output: str, parent: Path | None, records: int, doors: str, against: str) -> None:
    """Headrace beside other brokers, in one run.

    nats: JetStream, file storage, its default sync. redis: Streams with appendfsync everysec and always.
    """
    from headrace.bench import compare as contest
    from headrace.bench.doors import DOORS as loads

    door_names, peers = _names(doors, DOORS, "--doors"), _names(against, PEERS, "--against")
    found = contest.contenders([loads[name] for name in door_names], peers)
    config: dict[str, NoteValue] = {
        "doors": ",".join(door_names),
        "against": ",".join(peers),
        "records": records,
        "value_bytes": value_bytes,
    }
    with options.measuring("compare", repeat, output, parent, config) as run:
        contest.rounds(contest.Contest(records, value_bytes, run.directory), found, repeat, run.steps)
        for figure in contest.figures(found):
            run.report.add(figure)


def _quic_only(server: str | None, window: int = 0, against_one: bool = False) -> None:
    if server is not None or window or against_one:
        raise click.UsageError("--server, --window and --against-one are for doors over TCP")


def _tcp_only(streams: int) -> None:
    if streams != 1:
        raise click.UsageError("--streams is for doors over QUIC")


def _publish_over_quic(
    chosen: options.Chosen, repeat: int, output: str, parent: Path | None, config: dict[str, NoteValue], streams: int
) -> None:
    from headrace.bench import fujin

    traffic = _quic_traffic(config, streams)

    def turn(address: Address, pid: int, raw: Address, step: Step) -> tuple[float, float, float]:
        with step("raw"):
            ceiling = traffic.records / fujin.on_loop(fujin.publish_raw(raw, traffic))
        before = cpu_seconds(pid)
        with step("fujin"):
            rate = traffic.records / fujin.on_loop(fujin.publish(address, fujin.new_topic(), traffic))
        return rate, ceiling, cpu_seconds(pid) - before

    def warm_up(address: Address) -> None:
        fujin.on_loop(fujin.publish(address, fujin.new_topic(), replace(traffic, records=min(traffic.records, 20_000))))

    _turns_over_quic("publish", f"fujin publish, {chosen.ack}", chosen, repeat, output, parent, config, turn, warm_up)


def _consume_over_quic(
    chosen: options.Chosen, repeat: int, output: str, parent: Path | None, config: dict[str, NoteValue], streams: int
) -> None:
    from headrace.bench import fujin

    traffic = _quic_traffic(config, streams)

    def turn(address: Address, pid: int, raw: Address, step: Step) -> tuple[float, float, float]:
        topics = [fujin.new_topic() for _ in range(traffic.connections * streams)]
        share = replace(traffic, records=traffic.records // len(topics), connections=1, streams=1)
        with step("fill"):
            for topic in topics:
                fujin.on_loop(fujin.publish(address, topic, share))
        with step("raw"):
            ceiling = traffic.records / fujin.on_loop(fujin.consume_raw(raw, traffic))
        before = cpu_seconds(pid)
        with step("fujin"):
            rate = traffic.records / fujin.on_loop(fujin.consume(address, topics, traffic))
        return rate, ceiling, cpu_seconds(pid) - before

    _turns_over_quic("consume", "fujin consume, pushed", chosen, repeat, output, parent, config, turn)


def _quic_traffic(config: dict[str, NoteValue], streams: int) -> QuicTraffic:
    from headrace.bench.fujin import QuicTraffic

    config["streams"] = streams
    return QuicTraffic(int(str(config["records"])), int(str(config["value_bytes"])), int(str(config["connections"])), streams)


def _turns_over_quic(
    command: str, name: str, chosen: options.Chosen, repeat: int, output: str, parent: Path | None, config: dict[str, NoteValue],
    turn: Callable[[Address, int, Address, Step], tuple[float, float, float]], warm_up: Callable[[Address], None] = lambda address: None,
) -> None:  # fmt: skip
    """`turn` gives the rate, the ceiling beside it, and the broker's processor time."""
    from headrace.bench import fujin

    records = int(str(config["records"]))
    with options.measuring(command, repeat, output, parent, config) as run:
        with fujin.quic_broker(run.directory, chosen.ack, chosen.profile) as (address, pid), fujin.raw_peer(run.directory) as raw:
            warm_up(address)
            turns = [
                turn(address, pid, raw, lambda part, number=number: run.steps.step(f"{part} {number}/{repeat}", records))  # type: ignore[misc]  # the default binds the number
                for number in range(1, repeat + 1)
            ]
        rates, ceilings, cpu = zip(*turns, strict=True)
        for figure in fujin.share_figures(name, list(rates), list(ceilings), cpu_note(sum(cpu), records * repeat)):
            run.report.add(figure)


def _latency_over_quic(chosen: options.Chosen, repeat: int, output: str, parent: Path | None, config: dict[str, NoteValue]) -> None:
    """Round trips alone: an open loop over QUIC would measure the load generator's own half of the library."""
    from headrace.bench import fujin
    from headrace.bench.latency import RECORD_OVERHEAD_BYTES
    from headrace.bench.raw import SyncProbe

    count, value_bytes = int(str(config["round_trips"])), int(str(config["value_bytes"]))
    trips, machine = [], []
    with options.measuring("latency", repeat, output, parent, config) as run:
        with fujin.quic_broker(run.directory, chosen.ack, chosen.profile) as (address, _):
            for turn in range(repeat):
                with run.steps.step(f"round trips {turn + 1}/{repeat}", count):
                    with closing(SyncProbe(run.directory, value_bytes + RECORD_OVERHEAD_BYTES, count)) as probe:
                        times, own = fujin.on_loop(fujin.round_trips(address, fujin.new_topic(), count, value_bytes, probe.once))
                trips.append(times)
                machine.append(own)
        for figure in fujin.latency_figures(chosen.ack, trips, machine):
            run.report.add(figure)


def _names(text: str, known: list[str], flag: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise click.BadParameter(f"{unknown[0]!r} is none of {', '.join(known)}", param_hint=flag)
    return names


@bench.command()
@options.common
@options.size()
@click.option("--rows", type=click.IntRange(1_000), default=4_000_000, show_default=True, help="Rows of one turn.")
@click.option("--per-trigger", type=click.IntRange(1_000), default=1_000_000, show_default=True, help="Rows of one micro-batch.")
@click.option(
    "--seconds", type=click.FloatRange(1), default=10.0, show_default=True, help="How long micro-batches of few rows are watched."
)
@click.option("--only", type=click.Choice(SPARK_PARTS), multiple=True, help="Measure only this part; may be repeated.")
@click.option("--master", metavar="URL", default="local[2]", show_default=True, help="Where Spark runs.")
@needs("headrace bench spark", "pyspark", "pyarrow", "pandas")
def spark(
    value_bytes: int, repeat: int, output: str, parent: Path | None, rows: int, per_trigger: int, seconds: float, only: tuple[str, ...],
    master: str,
) -> None:  # fmt: skip
    """Spark over topics, beside the most that Spark takes from any Python source and gives to any Python sink.

    batch: a topic into nothing. stream: the same in micro-batches. sink: constant rows into a topic, durable. latency: micro-batches of
    the rows that arrive, about a hundred a second. The ceilings are constant record batches and a writer that only counts.
    """
    from headrace.bench import bulk as lanes
    from headrace.bench import spark as streams
    from headrace.bench import spark_ceiling
    from headrace.spark import session

    config: dict[str, NoteValue] = {"rows": rows, "value_bytes": value_bytes, "per_trigger": per_trigger, "master": master}
    plan = streams.SparkPlan(rows, value_bytes, per_trigger, seconds)
    with options.measuring("spark", repeat, output, parent, config) as run, lanes.bulk_broker(run.directory, "durable", None) as lane:
        running = session("headrace bench", master, **{"spark.log.level": "OFF"})
        spark_ceiling.register(running)
        stage = streams.Stage(running, lane.address, run.directory, plan)
        try:
            for figure in streams.measured(stage, only or tuple(SPARK_PARTS), repeat, lambda name: run.steps.step(name, 1)):
                run.report.add(figure)
        finally:
            stage.close()
            running.stop()
