"""The demo from start to verification.

broker ─► console ─► topics ─► pipeline on Spark ─┐
                       └► orders through five protocols ─► (until the duration ends, or Ctrl-C) ─► the pipeline catches up ─► verification

Verification: every published order is in the log once, and the totals of the pipeline match the orders.

The checks read the topics through the Flight endpoint and the table from its files. They include earlier executions on the same data
directory, which the pipeline has counted too.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from headrace.demo.orders import DEAD_LETTER_TOPIC, TOPIC, TOTALS_TOPIC, Sums, Total, read_totals
from headrace.demo.screen import DemoState, Screen
from headrace.demo.traffic import ProtocolTraffic, Traffic, publish
from headrace.errors import HeadraceError, UnknownTopic
from headrace.flight.client import FlightClient, Servers
from headrace.kafka_server import Cluster, JarsUnavailable, KafkaFailed
from headrace.programs import last_line, started, stop


@dataclass(frozen=True, slots=True)
class Check:
    """A claim, whether it holds, and the numbers that show it."""

    claim: str
    holds: bool
    numbers: str


def values_of(flight_client: FlightClient, topic: str, positions: dict[int, int] | None = None) -> Iterator[bytes | None]:
    """Yield all values of a topic, or those from `positions`, which it advances."""
    try:
        partitions = flight_client.describe([topic])[topic].partitions
    except UnknownTopic:
        return
    for number, bounds in enumerate(partitions):
        first = bounds.first if positions is None else max(positions.get(number, 0), bounds.first)
        if first < bounds.end:
            for batch in flight_client.read(topic, number, first, bounds.end, columns=["value"]):
                yield from batch.column(0).to_pylist()
        if positions is not None:
            positions[number] = bounds.end


def verify(flight_client: FlightClient, sent: Iterable[bytes], table: Path) -> list[Check]:
    """Return all checks. `sent` contains every record acknowledged in this execution."""
    kept = Counter(value for value in values_of(flight_client, TOPIC) if value is not None)
    expected = Sums()
    expected.add(kept.elements())
    dead = frozenset(value for value in values_of(flight_client, DEAD_LETTER_TOPIC) if value is not None)
    return [_sent_once(Counter(sent), kept, dead), *_totals(flight_client, expected, table), _dead_letters(flight_client, expected)]


def _sent_once(sent: Counter[bytes], kept: Counter[bytes], dead: frozenset[bytes]) -> Check:
    """`dead` are dead letters: one that a user replays meanwhile is in the log again."""
    lost = sum((sent - kept).values())
    doubled = sum(kept[value] - count for value, count in sent.items() if kept[value] > count and value not in dead)
    return Check(
        "every acknowledged order is in the log exactly once",
        not lost and not doubled,
        f"{sum(sent.values()):,} sent, {lost:,} lost, {doubled:,} doubled",
    )


def _totals(flight_client: FlightClient, expected: Sums, table: Path) -> Iterator[Check]:
    published = {total.minute: total for total in read_totals(values_of(flight_client, TOTALS_TOPIC))}
    yield _compare(f"the totals in topic {TOTALS_TOPIC} match", published, expected)
    yield _compare(f"the totals in the Delta table {table.name} match", _in_table(table), expected)


def _compare(claim: str, found: dict[str, Total], expected: Sums) -> Check:
    wrong = sorted(minute for minute in found.keys() | expected.by_minute.keys() if found.get(minute) != expected.by_minute.get(minute))
    counted = sum(total.orders for total in found.values())
    cents = sum(total.amount_cents for total in found.values())
    numbers = f"{counted:,} of {expected.orders:,} orders, {cents / 100:,.2f} of {expected.amount_cents / 100:,.2f} in {len(found)} minutes"
    return Check(claim, not wrong, numbers + (f"; wrong: {', '.join(wrong[:3])}" if wrong else ""))


def _in_table(path: Path) -> dict[str, Total]:
    from deltalake import DeltaTable

    if not DeltaTable.is_deltatable(str(path)):
        return {}
    rows = DeltaTable(str(path)).to_pyarrow_table().to_pylist()
    return {row["minute"]: Total(row["minute"], row["orders"], row["amount_cents"]) for row in rows}


def _dead_letters(flight_client: FlightClient, expected: Sums) -> Check:
    dead = sum(1 for _ in values_of(flight_client, DEAD_LETTER_TOPIC))
    return Check("every malformed order is dead-lettered exactly once", dead == expected.malformed, f"{dead:,} of {expected.malformed:,}")


START_SECONDS_MAX: Final = 60.0
STOP_SECONDS_MAX: Final = 30.0
_POLL_SECONDS: Final = 0.05
CATCH_UP_SECONDS_MAX: Final = 180.0
UPDATE_SECONDS: Final = 0.5
_KEY_VARIABLE: Final = "HEADRACE_DEMO_BLIPMQ_KEY"


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """Options of one demo execution."""

    pipeline: Path
    data: Path
    duration_seconds: float | None = None
    """Duration of sending orders; None: until Ctrl-C."""
    per_second: float = 500.0
    listen: tuple[str, ...] = ()
    quic: str = "127.0.0.1:4848"
    flight: str = "127.0.0.1:8815"
    console: str = "127.0.0.1:9645"
    serve_arguments: tuple[str, ...] = ()
    is_on_kafka: bool = False
    """Whether the log is in a Kafka node that is started for the demo."""


def run_demo(options: DemoOptions, console: Console) -> bool:
    """Run the demo and return whether all checks hold. Raises `DemoFailed`."""
    return _run_on_kafka(options, console) if options.is_on_kafka else _run(options, console)


def _run_on_kafka(options: DemoOptions, console: Console) -> bool:
    """Run the demo on a Kafka node. All files are deleted at the end: the next execution has another Kafka, to which no progress fits."""
    options.data.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.data, prefix="on-kafka-") as folder:
        console.print("starting Kafka; the first time it is downloaded", highlight=False)
        try:
            with Cluster(Path(folder)) as cluster:
                engine = ("--engine", "kafka", "--set", f"kafka.bootstrap={cluster.bootstrap}")
                return _run(replace(options, data=Path(folder) / "demo", serve_arguments=(*options.serve_arguments, *engine)), console)
        except (JarsUnavailable, KafkaFailed) as failure:
            raise DemoFailed(str(failure)) from failure


def _run(options: DemoOptions, console: Console) -> bool:
    work = options.data
    work.mkdir(parents=True, exist_ok=True)
    key = secrets.token_urlsafe()
    broker = _start_broker(options, work, key)
    web_console: Program | None = None
    try:
        protocols = broker.wait_for_file(work / "ready.json")["protocols"]
        web_console = _start_console(options, work, protocols["tcp"][0])
        url = web_console.wait_for_file(work / "console.json")["url"]
        console.print(f"console: {url}", style="bold", highlight=False, soft_wrap=True)
        console.print(_banner(broker), highlight=False, soft_wrap=True)
        with FlightClient(Servers.parse(protocols["flight"][0])) as flight_client:
            _make_topics(flight_client)
            pipeline = _start_pipeline(options, work, protocols["flight"][0])
            try:
                addresses = _addresses(protocols)
                traffic = Traffic({name: ProtocolTraffic(url) for name, url in addresses.items()})
                state = DemoState(traffic, hints=_hints(options, protocols))
                demo = _Demo(options, state, flight_client, (broker, pipeline, web_console))
                with Screen(console, state) as screen:
                    asyncio.run(demo.send(addresses, key, screen.show))
                    demo.catch_up(screen.show)
            finally:
                pipeline.stop()
            holds = _conclude(console, flight_client, traffic, work / "orders_by_minute")
            if not options.is_on_kafka:
                console.print(f"the data is in {work}; the next execution continues with it", highlight=False, soft_wrap=True)
            return holds
    finally:
        if web_console is not None:
            web_console.stop()
        broker.stop()


class _Demo:
    """Sends orders and waits for the pipeline."""

    def __init__(self, options: DemoOptions, state: DemoState, flight_client: FlightClient, programs: tuple[Program, ...]) -> None:
        self._options, self._state, self._client, self._programs = options, state, flight_client, programs
        self._seen: dict[int, int] = {}

    async def send(self, addresses: dict[str, str], key: str, show: Callable[[], None]) -> None:
        """Send orders through every protocol until the duration ends or a signal arrives, and update the screen."""
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop.set)
        if self._options.duration_seconds is not None:
            loop.call_later(self._options.duration_seconds, stop.set)
        self._state.phase = "sending orders; Spark is starting"
        prefix = secrets.token_hex(3)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._follow(stop, show))
            rate, seed = self._options.per_second, time.time_ns()
            group.create_task(publish(addresses, self._state.traffic, stop, prefix=prefix, per_second=rate, api_key=key, seed=seed))
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)

    async def _follow(self, stop: asyncio.Event, show: Callable[[], None]) -> None:
        while not stop.is_set():
            try:
                await asyncio.to_thread(self._update)
            except HeadraceError:
                stop.set()
                raise
            show()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), UPDATE_SECONDS)

    def _update(self) -> None:
        for program in self._programs:
            program.check_alive()
        state = self._state
        for total in read_totals(values_of(self._client, TOTALS_TOPIC, self._seen)):
            state.totals[total.minute] = total
            state.phase = "sending orders; the pipeline counts them"
        with contextlib.suppress(HeadraceError):  # the topic does not exist before the first dead letter
            topic = self._client.describe([DEAD_LETTER_TOPIC])[DEAD_LETTER_TOPIC]
            state.dead_letters = sum(partition.end - partition.first for partition in topic.partitions)

    def catch_up(self, show: Callable[[], None]) -> None:
        """Wait until the pipeline has counted every order; a second Ctrl-C aborts. After a timeout the verification fails."""
        self._state.phase = "waiting for the pipeline to count the last orders"
        expected = Sums()
        expected.add(value for value in values_of(self._client, TOPIC) if value is not None)
        deadline = time.monotonic() + CATCH_UP_SECONDS_MAX
        while time.monotonic() < deadline:
            self._update()
            show()
            if self._state.totals == expected.by_minute and self._state.dead_letters >= expected.malformed:
                return
            time.sleep(UPDATE_SECONDS)


def _start_broker(options: DemoOptions, work: Path, key: str) -> Program:
    ready = work / "ready.json"
    ready.unlink(missing_ok=True)
    listen = [argument for address in options.listen for argument in ("--listen", address)]
    addresses = [*listen, "--listen-quic", options.quic, "--listen-flight", options.flight]
    arguments = ["serve", "--data", str(work / "broker"), *addresses, "--ready-file", str(ready), *options.serve_arguments]
    return Program("the broker", arguments, work / "broker.log", {"HEADRACE__BLIPMQ__KEYS": f"env:{_KEY_VARIABLE}", _KEY_VARIABLE: key})


def _start_console(options: DemoOptions, work: Path, address: str) -> Program:
    ready = work / "console.json"
    ready.unlink(missing_ok=True)
    arguments = ["console", "--listen", options.console, "--server", f"flymq://{address}", "--ready-file", str(ready)]
    return Program("the console", arguments, work / "console.log")


def _start_pipeline(options: DemoOptions, work: Path, flight_client: str) -> Program:
    """Run a copy of the pipeline in the data directory, since its output is stored beside its file."""
    file = work / options.pipeline.name
    shutil.copyfile(options.pipeline, file)
    return Program("the pipeline", ["pipeline", "run", str(file), "--servers", flight_client], work / "pipeline.log")


def _make_topics(flight_client: FlightClient) -> None:
    for name in (TOPIC, TOTALS_TOPIC):
        flight_client.ensure_topic(name)


def _addresses(protocols: dict[str, list[str]]) -> dict[str, str]:
    """Return the URLs. The first TCP address serves every TCP protocol; Fujin uses QUIC."""
    return {name: f"{name}://{protocols['tcp'][0]}" for name in ("figg", "rustlog", "blipmq", "flymq")} | {
        "fujin": f"fujin://{protocols['quic'][0]}"
    }


def _banner(broker: Program) -> str:
    """Return the broker's startup message."""
    text = broker.wait_for_output("ready in ")
    return "\n".join(line for line in text.splitlines() if line.startswith(("headrace ", "  ")) and "shown this once" not in line)


def _hints(options: DemoOptions, protocols: dict[str, list[str]]) -> tuple[str, ...]:
    """Return commands to try, with addresses only if they are not the defaults."""
    headrace = "headrace" if shutil.which("headrace") else os.path.relpath(sys.argv[0])
    server = "" if protocols["tcp"][0] == "127.0.0.1:9092" else f" --server flymq://{protocols['tcp'][0]}"
    servers = "" if protocols["flight"][0] == "127.0.0.1:8815" else f" --servers {protocols['flight'][0]}"
    sql = f"select country, count(*) as orders from {TOPIC} group by country order by orders desc"
    metrics = [f"curl http://{address}/metrics" for address in protocols.get("http", ())[:1]]
    return (
        f"{headrace} top{server}",
        *metrics,
        f"{headrace} fetch {TOTALS_TOPIC} --protocol flymq{server}",
        f"{headrace} dlq fetch {TOPIC}{server}",
        f"{headrace} group list{server}",
        f"{headrace} pipeline status",
        f'{headrace} sql "{sql}" --format json --schema "country string"{servers}',
        f"less {options.pipeline}",
    )


def _conclude(console: Console, flight_client: FlightClient, traffic: Traffic, table: Path) -> bool:
    checks = verify(flight_client, traffic.values, table)
    console.print("verification:", highlight=False)
    for check in checks:
        console.print(f"  {'yes' if check.holds else 'NO '}  {check.claim}: {check.numbers}", highlight=False, soft_wrap=True)
    return all(check.holds for check in checks)


class DemoFailed(HeadraceError):
    """A child process failed. The text names it and its log."""


class Program:
    """A running `headrace` command."""

    def __init__(self, name: str, arguments: Sequence[str], log: Path, environment: Mapping[str, str] | None = None) -> None:
        self.name, self.log = name, log
        self._process = started([sys.executable, "-m", "headrace", *arguments], log, environment)

    def check_alive(self) -> None:
        """Raise `DemoFailed` if the process has ended."""
        if self._process.poll() is not None:
            raise DemoFailed(f"{self.name} ended with exit code {self._process.returncode}: {last_line(self.log)} (see {self.log})")

    def wait_for_file(self, ready: Path) -> Any:
        """Wait for the ready file and return its content. Raises `DemoFailed`."""
        self._wait(ready.exists)
        return json.loads(ready.read_text("utf-8"))

    def wait_for_output(self, text: str) -> str:
        """Wait until the output contains `text` and return it. Raises `DemoFailed`."""
        self._wait(lambda: text in self.output)
        return self.output

    @property
    def output(self) -> str:
        return self.log.read_text("utf-8", "replace")

    def _wait(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + START_SECONDS_MAX
        while not condition():
            self.check_alive()
            if time.monotonic() > deadline:
                raise DemoFailed(f"{self.name} was not ready after {START_SECONDS_MAX:.0f} s (see {self.log})")
            time.sleep(_POLL_SECONDS)

    def stop(self) -> None:
        """Stop the process and its children: Spark starts several."""
        stop(self._process, STOP_SECONDS_MAX)
