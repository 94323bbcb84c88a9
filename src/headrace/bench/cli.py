"""`headrace bench …`: what the log and the doors can do on this machine, and others beside them."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import click

from headrace.bench import options
from headrace.bench.report import Figure, NoteValue, Target

DOORS = ["figg"]
LOG_PARTS = ["raw", "append", "read", "spread", "recovery", "memory"]
PEERS = ["nats", "redis"]
PUBLISH_TARGETS = {"figg": Target(at_least=600_000)}
CONSUME_TARGETS = {"figg": Target(at_least=1_000_000)}


def cpu_note(seconds: float, records: int) -> dict[str, NoteValue]:
    """What the broker's process spent per record: it says more than a rate when the machine has other work to do."""
    return {"broker CPU µs/record": round(seconds / records * 1e6, 3)} if seconds else {}


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
@options.door(DOORS)
@options.records(1_000_000)
@options.connections()
@click.option(
    "--window", type=click.IntRange(0), default=0, show_default=True, help="Unacknowledged records per connection; 0: as TCP allows."
)
def publish(
    door_name: str, value_bytes: int, ack: str, server: str | None, profile: Path | None,
    repeat: int, output: str, parent: Path | None, records: int, connections: int, window: int,
) -> None:  # fmt: skip
    """Publish through a door, from the first byte to the last acknowledgement."""
    from headrace.bench import traffic
    from headrace.bench.doors import DOORS as loads

    config: dict[str, NoteValue] = {
        "door": door_name,
        "records": records,
        "value_bytes": value_bytes,
        "ack": ack,
        "connections": connections,
        "window": window,
    }
    with options.measuring("publish", repeat, output, parent, config) as run:
        with run.broker(server, ack, profile) as target:
            plan = traffic.Traffic(loads[door_name], target.address, records, value_bytes, connections, window)
            traffic.warm_up(plan)
            rates, cpu_before = [], target.cpu_seconds()
            for turn in range(repeat):
                with run.steps.step(f"publish {turn + 1}/{repeat}", records) as tick:
                    rates.append(records / traffic.publish(plan, traffic.new_topic(), tick))
            notes = cpu_note(target.cpu_seconds() - cpu_before, records * repeat)
        run.report.add(Figure(f"{door_name} publish, {ack}", "records/s", rates, PUBLISH_TARGETS.get(door_name), notes))


@bench.command()
@options.door(DOORS)
@options.records(1_000_000)
@options.connections()
def consume(
    door_name: str, value_bytes: int, ack: str, server: str | None, profile: Path | None,
    repeat: int, output: str, parent: Path | None, records: int, connections: int,
) -> None:  # fmt: skip
    """Read a topic's history through a door; with several connections, each reads all of it."""
    from headrace.bench import traffic
    from headrace.bench.doors import DOORS as loads

    config: dict[str, NoteValue] = {"door": door_name, "records": records, "value_bytes": value_bytes, "connections": connections}
    with options.measuring("consume", repeat, output, parent, config) as run:
        with run.broker(server, ack, profile) as target:
            load = loads[door_name]
            topic = traffic.new_topic()
            with run.steps.step("fill", records) as tick:
                traffic.publish(traffic.Traffic(load, target.address, records, value_bytes), topic, tick)
            plan = traffic.Traffic(load, target.address, records, value_bytes, connections)
            traffic.warm_up(plan)
            rates, cpu_before = [], target.cpu_seconds()
            for turn in range(repeat):
                with run.steps.step(f"consume {turn + 1}/{repeat}", records * connections) as tick:
                    rates.append(records * connections / traffic.consume(plan, topic, tick))
            notes = cpu_note(target.cpu_seconds() - cpu_before, records * connections * repeat)
        run.report.add(Figure(f"{door_name} consume, history", "records/s", rates, CONSUME_TARGETS.get(door_name), notes))


@bench.command()
@options.door(DOORS)
@click.option(
    "--rate", type=click.IntRange(1, 1_000_000), default=10_000, show_default=True, help="Records a second, sent whatever happens."
)
@click.option("--duration", type=click.FloatRange(0.01, 3_600), default=10.0, show_default=True, help="Seconds of the open loop.")
@click.option("--round-trips", type=click.IntRange(1), default=2_000, show_default=True, help="Records sent one at a time.")
def latency(
    door_name: str, value_bytes: int, ack: str, server: str | None, profile: Path | None,
    repeat: int, output: str, parent: Path | None, rate: int, duration: float, round_trips: int,
) -> None:  # fmt: skip
    """Answer times: an open loop at a fixed rate, and one record at a time."""
    from headrace.bench import latency as answers
    from headrace.bench import traffic
    from headrace.bench.doors import DOORS as loads
    from headrace.bench.load import connected
    from headrace.bench.raw import SyncProbe

    config: dict[str, NoteValue] = {
        "door": door_name,
        "value_bytes": value_bytes,
        "ack": ack,
        "rate": rate,
        "duration": duration,
        "round_trips": round_trips,
    }
    load, records = loads[door_name], max(1, round(rate * duration))
    with options.measuring("latency", repeat, output, parent, config) as run:
        with run.broker(server, ack, profile) as target:
            traffic.warm_up(traffic.Traffic(load, target.address, records, value_bytes))
            open_loops, trips, machine = [], [], []
            for turn in range(repeat):
                with run.steps.step(f"open loop {turn + 1}/{repeat}", records) as tick, connected(target.address) as (sock,):
                    load.handshake(sock)
                    open_loops.append(
                        answers.open_loop(sock, load, traffic.new_topic(), rate=rate, records=records, value_bytes=value_bytes, tick=tick)
                    )
                with run.steps.step(f"round trips {turn + 1}/{repeat}", round_trips), connected(target.address) as (sock,):
                    load.handshake(sock)
                    with closing(SyncProbe(run.directory, value_bytes + answers.RECORD_OVERHEAD_BYTES, round_trips)) as probe:
                        times, own = answers.round_trips(
                            sock, load, traffic.new_topic(), count=round_trips, value_bytes=value_bytes, probe=probe.once
                        )
                    trips.append(times)
                    machine.append(own)
        for figure in answers.figures(door_name, ack, rate, open_loops, trips, machine):
            run.report.add(figure)


@bench.command()
@options.common
@options.size()
@options.records(1_000_000)
@click.option(
    "--door",
    "door_names",
    type=click.Choice(DOORS),
    multiple=True,
    default=["figg"],
    show_default=True,
    help="Doors to compare; may be repeated.",
)
@click.option("--against", default="nats", show_default=True, help="Peers, with commas between: nats, redis.")
def compare(
    value_bytes: int, repeat: int, output: str, parent: Path | None, records: int, door_names: tuple[str, ...], against: str
) -> None:
    """Headrace beside other brokers, in one run.

    nats: JetStream, file storage, its default sync. redis: Streams with appendfsync everysec and always.
    """
    from headrace.bench import compare as contest
    from headrace.bench.doors import DOORS as loads

    peers = [name.strip() for name in against.split(",")]
    unknown = [name for name in peers if name not in PEERS]
    if unknown:
        raise click.BadParameter(f"{unknown[0]!r} is none of {', '.join(PEERS)}", param_hint="--against")
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
