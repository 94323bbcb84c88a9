"""The story from beginning to end.

broker ─► topics ─► pipeline on Spark ─┐
            └► orders through five protocols ─► (until the time is over, or Ctrl-C) ─► the pipeline catches up ─► the reckoning
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rich.console import Console

from headrace.demo.children import DemoFailed, Program
from headrace.demo.orders import DEAD_LETTER_TOPIC, TOPIC, TOTALS_TOPIC, Sums, read_totals
from headrace.demo.screen import DemoState, Screen
from headrace.demo.traffic import ProtocolTraffic, Traffic, publish
from headrace.demo.verification import verify, values_of
from headrace.errors import HeadraceError
from headrace.flight.client import FlightClient, Servers

CATCH_UP_SECONDS_MAX: Final = 180.0
LOOK_SECONDS: Final = 0.5
_KEY_VARIABLE: Final = "HEADRACE_DEMO_BLIPMQ_KEY"


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """What the command line says about one telling."""

    pipeline: Path
    data: Path
    duration_seconds: float | None = None
    """How long orders are sent; None: until Ctrl-C."""
    per_second: float = 500.0
    listen: tuple[str, ...] = ()
    quic: str = "127.0.0.1:4848"
    flight: str = "127.0.0.1:8815"
    serve_arguments: tuple[str, ...] = ()


def tell(plot: DemoOptions, console: Console) -> bool:
    """Whether everything added up. Raises `DemoFailed`."""
    work = plot.data
    work.mkdir(parents=True, exist_ok=True)
    key = secrets.token_urlsafe()
    broker = _start_broker(plot, work, key)
    try:
        protocols = broker.wait_for_file(work / "ready.json")["protocols"]
        console.print(_banner(broker), highlight=False, soft_wrap=True)
        with FlightClient(Servers.parse(protocols["flight"][0])) as flight_client:
            _make_topics(flight_client)
            pipeline = _start_pipeline(plot, work, protocols["flight"][0])
            try:
                addresses = _addresses(protocols)
                traffic = Traffic({name: ProtocolTraffic(url) for name, url in addresses.items()})
                scene = DemoState(traffic, hints=_hints(plot, protocols))
                teller = _Teller(plot, scene, flight_client, (broker, pipeline))
                with Screen(console, scene) as screen:
                    asyncio.run(teller.send(addresses, key, screen.show))
                    teller.catch_up(screen.show)
            finally:
                pipeline.stop()
            return _conclude(console, flight_client, traffic, work / "orders_by_minute")
    finally:
        broker.stop()


class _Teller:
    """Sends, watches and waits."""

    def __init__(self, plot: DemoOptions, scene: DemoState, flight_client: FlightClient, programs: tuple[Program, ...]) -> None:
        self._plot, self._scene, self._client, self._programs = plot, scene, flight_client, programs
        self._seen: dict[int, int] = {}

    async def send(self, addresses: dict[str, str], key: str, show: Callable[[], None]) -> None:
        """Orders through every protocol until the time is over or a signal comes; the screen follows."""
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop.set)
        if self._plot.duration_seconds is not None:
            loop.call_later(self._plot.duration_seconds, stop.set)
        self._scene.phase = "orders are sent; Spark is starting"
        run = secrets.token_hex(3)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._follow(stop, show))
            group.create_task(
                publish(addresses, self._scene.traffic, stop, run=run, per_second=self._plot.per_second, api_key=key, seed=time.time_ns())
            )
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)

    async def _follow(self, stop: asyncio.Event, show: Callable[[], None]) -> None:
        while not stop.is_set():
            try:
                await asyncio.to_thread(self._look)
            except HeadraceError:
                stop.set()
                raise
            show()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), LOOK_SECONDS)

    def _look(self) -> None:
        for program in self._programs:
            program.check_alive()
        scene = self._scene
        for total in read_totals(values_of(self._client, TOTALS_TOPIC, self._seen)):
            scene.totals[total.minute] = total
            scene.phase = "orders are sent, the pipeline counts them"
        with contextlib.suppress(HeadraceError):  # there is none before the first dead letter
            state = self._client.describe([DEAD_LETTER_TOPIC])[DEAD_LETTER_TOPIC]
            scene.dead_letters = sum(partition.end - partition.first for partition in state.partitions)

    def catch_up(self, show: Callable[[], None]) -> None:
        """Wait until the pipeline has counted everything; a second Ctrl-C ends the waiting. Too slow is for the reckoning to say."""
        self._scene.phase = "no more orders; waiting for the pipeline to count the last of them"
        expected = Sums()
        expected.add(value for value in values_of(self._client, TOPIC) if value is not None)
        deadline = time.monotonic() + CATCH_UP_SECONDS_MAX
        while time.monotonic() < deadline:
            self._look()
            show()
            if self._scene.totals == expected.by_minute and self._scene.dead_letters >= expected.malformed:
                return
            time.sleep(LOOK_SECONDS)


def _start_broker(plot: DemoOptions, work: Path, key: str) -> Program:
    ready = work / "ready.json"
    ready.unlink(missing_ok=True)
    listen = [argument for address in plot.listen for argument in ("--listen", address)]
    addresses = [*listen, "--listen-quic", plot.quic, "--listen-flight", plot.flight]
    arguments = ["serve", "--data", str(work / "broker"), *addresses, "--ready-file", str(ready), *plot.serve_arguments]
    return Program("the broker", arguments, work / "broker.log", {"HEADRACE__BLIPMQ__KEYS": f"env:{_KEY_VARIABLE}", _KEY_VARIABLE: key})


def _start_pipeline(plot: DemoOptions, work: Path, flight_client: str) -> Program:
    """A copy runs: what it writes lies beside its file, and that belongs to the data."""
    file = work / plot.pipeline.name
    shutil.copyfile(plot.pipeline, file)
    return Program("the pipeline", ["pipeline", "run", str(file), "--servers", flight_client], work / "pipeline.log")


def _make_topics(flight_client: FlightClient) -> None:
    for name in (TOPIC, TOTALS_TOPIC):
        flight_client.ensure_topic(name)


def _addresses(protocols: dict[str, list[str]]) -> dict[str, str]:
    """The first TCP address takes every protocol; Fujin has its own."""
    return {name: f"{name}://{protocols['tcp'][0]}" for name in ("figg", "rustlog", "blipmq", "flymq")} | {
        "fujin": f"fujin://{protocols['quic'][0]}"
    }


def _banner(broker: Program) -> str:
    """What the broker says when it has started."""
    text = broker.wait_for_word("ready in ")
    return "\n".join(line for line in text.splitlines() if line.startswith(("headrace ", "  ")) and "shown this once" not in line)


def _hints(plot: DemoOptions, protocols: dict[str, list[str]]) -> tuple[str, ...]:
    """Commands as they can be pasted: with addresses only where they are not the usual ones."""
    headrace = "headrace" if shutil.which("headrace") else os.path.relpath(sys.argv[0])
    server = "" if protocols["tcp"][0] == "127.0.0.1:9092" else f" --server flymq://{protocols['tcp'][0]}"
    servers = "" if protocols["flight"][0] == "127.0.0.1:8815" else f" --servers {protocols['flight'][0]}"
    sql = f"select country, count(*) as orders from {TOPIC} group by country order by orders desc"
    return (
        f"{headrace} fetch {TOTALS_TOPIC} --protocol flymq{server}",
        f"{headrace} dlq fetch {TOPIC}{server}",
        f"{headrace} group list{server}",
        f"{headrace} pipeline status",
        f'{headrace} sql "{sql}" --format json --schema "country string"{servers}',
        f"less {plot.pipeline}",
    )


def _conclude(console: Console, flight_client: FlightClient, traffic: Traffic, table: Path) -> bool:
    checks = verify(flight_client, traffic.values, table)
    console.print("the reckoning:", highlight=False)
    for check in checks:
        console.print(f"  {'yes' if check.holds else 'NO '}  {check.claim}: {check.numbers}", highlight=False, soft_wrap=True)
    console.print(f"the data stays in {table.parent}; the next run goes on from there", highlight=False, soft_wrap=True)
    return all(check.holds for check in checks)


__all__ = ["DemoFailed", "DemoOptions", "tell"]
