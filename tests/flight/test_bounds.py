"""Limits: slow readers, fast writers, the number of calls, and draining."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import flight

import headrace.flight.actions
import headrace.flight.endpoint
from headrace.errors import BrokerError, Unavailable
from headrace.flight.client import FlightClient, Servers
from headrace.flight.puts import window_bytes
from headrace.flight.request import Describe, Range, encode
from headrace.limits import FLIGHT_CALLS_MAX, FLIGHT_IN_FLIGHT_BYTES_MAX, FLIGHT_IN_FLIGHT_BYTES_MIN, FLIGHT_READ_AHEAD_BYTES, MIB
from headrace.records import RecordBatch
from tests.flight.harness import DEADLINE_SECONDS, ROOT, Harness, rows, running_harness, values
from tests.server.process import BrokerProcess


def eventually(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def settled(figure: Callable[[], int], quiet_seconds: float = 0.7) -> int:
    """Return the figure once it has been stable."""
    seen, since = figure(), time.monotonic()
    deadline = since + DEADLINE_SECONDS
    while time.monotonic() - since < quiet_seconds:
        assert time.monotonic() < deadline, "it never comes to rest"
        time.sleep(0.02)
        if (now := figure()) != seen:
            seen, since = now, time.monotonic()
    return seen


class Fetches:
    """Count the reads from the log."""

    def __init__(self, harness: Harness) -> None:
        self.size_bytes = 0
        inner = harness.broker.fetch

        async def fetch(*arguments: Any, **more: Any) -> Any:
            fetched = await inner(*arguments, **more)
            self.size_bytes += sum(batch.size_bytes for batch in fetched.batches)
            return fetched

        harness.broker.fetch = fetch  # type: ignore[method-assign]


@pytest.fixture
def full(tmp_path: Path) -> Iterator[Harness]:
    """200 MiB in topic `t`, which clients read through the endpoint."""
    with running_harness(tmp_path) as harness:
        harness.local_files = False
        harness.topic("t")
        with harness.client() as flight_client:
            flight_client.append("t", [values(*[bytes(10_000)] * 2_000)] * 10)
        yield harness


def test_a_reader_that_does_not_read_is_not_fed(full: Harness) -> None:
    fetches = Fetches(full)
    with full.client() as flight_client:
        reading = flight_client.read("t", 0, 0, 20_000, columns=["value"])
        next(reading)
        assert settled(lambda: fetches.size_bytes) <= 3 * FLIGHT_READ_AHEAD_BYTES + 16 * MIB
        assert sum(batch.num_rows for batch in reading) > 15_000
        assert fetches.size_bytes == 200_000_000


def test_a_reader_that_goes_away_stops_the_read(full: Harness) -> None:
    fetches = Fetches(full)
    with full.client() as flight_client:
        reading = flight_client.read("t", 0, 0, 20_000, columns=["value"])
        next(reading)
        del reading
        assert settled(lambda: fetches.size_bytes) < 100_000_000
        assert flight_client.topics() == ["t"]


def test_a_flood_is_not_read_while_the_disk_is_busy(tmp_path: Path) -> None:
    with running_harness(tmp_path) as harness:
        harness.topic("t")
        let_go = threading.Event()
        taken = 0
        inner = harness.broker.publish

        def publish(who: Any, topic: str, batch: Any, **more: Any) -> Any:
            nonlocal taken
            taken += batch.size_bytes
            published = inner(who, topic, batch, **more)

            async def late() -> Any:
                await asyncio.to_thread(let_go.wait, DEADLINE_SECONDS)
                return await published

            return late()

        harness.broker.publish = publish  # type: ignore[method-assign]
        sent = 0

        def flood() -> Iterator[pa.RecordBatch]:
            nonlocal sent
            for _ in range(100):
                sent += 2_000_000
                yield values(*[bytes(10_000)] * 200)

        answers: list[int] = []
        with harness.client() as flight_client:
            writer = threading.Thread(target=lambda: answers.append(flight_client.append("t", flood()).records))
            writer.start()
            held = settled(lambda: taken)
            assert 0 < held <= FLIGHT_IN_FLIGHT_BYTES_MAX
            assert sent <= held + 64 * MIB, "what is not taken waits in the buffers of the connection, which are bounded"
            let_go.set()
            writer.join(DEADLINE_SECONDS)
        assert answers == [20_000]


@pytest.mark.parametrize(("puts", "mebibytes"), [(0, 16), (1, 16), (16, 16), (17, 15), (32, 8), (64, 4), (FLIGHT_CALLS_MAX, 4)])
def test_many_puts_share_what_is_on_its_way(puts: int, mebibytes: int) -> None:
    assert window_bytes(puts) // MIB == mebibytes


def test_a_put_among_many_has_less_on_its_way(tmp_path: Path) -> None:
    with running_harness(tmp_path) as harness:
        harness.topic("t")
        alone = harness.endpoint._server._window()
        others = [harness.endpoint._server.calls.begin(carries_rows=True) for _ in range(100)]
        try:
            assert (alone, harness.endpoint._server._window()) == (FLIGHT_IN_FLIGHT_BYTES_MAX, FLIGHT_IN_FLIGHT_BYTES_MIN)
            with harness.client() as flight_client:
                assert flight_client.append("t", [values(*[bytes(10_000)] * 2_000)]).records == 2_000
        finally:
            for other in others:
                harness.endpoint._server.calls.end(other)


def test_one_call_too_many_is_told_to_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(headrace.flight.endpoint, "FLIGHT_CALLS_MAX", 3)
    with running_harness() as harness:
        harness.topic("t")
        threads = [threading.Thread(target=_wait, args=(harness,)) for _ in range(3)]
        for thread in threads:
            thread.start()
        with harness.client() as flight_client:
            eventually(lambda: _is_busy(flight_client), "the calls are never too many")
            harness.publish("t", RecordBatch([b"x"]))
            for thread in threads:
                thread.join(DEADLINE_SECONDS)
            assert flight_client.topics() == ["t"]
    assert FLIGHT_CALLS_MAX > 3


def _wait(harness: Harness) -> None:
    with harness.client() as flight_client:
        flight_client.wait({"t": {0: 0}}, 30_000)


def _is_busy(flight_client: FlightClient) -> bool:
    try:
        flight_client._connected().do_action(flight.Action("topics", b"")).__next__()
    except flight.FlightUnavailableError as failure:
        return "3 calls are already in progress" in str(failure)
    return False


def test_waits_beyond_their_number_are_answered_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(headrace.flight.actions, "FLIGHT_WAITS_MAX", 0)
    with running_harness() as harness:
        harness.topic("t")
        with harness.client() as flight_client:
            began = time.monotonic()
            assert flight_client.wait({"t": {0: 0}}, 60_000)["t"].partitions[0].end == 0
            assert time.monotonic() - began < 50


def test_a_drain_answers_those_who_wait_and_ends_those_who_read(full: Harness) -> None:
    with full.client() as waiting, full.client() as reading_client:
        ended: list[object] = []

        def wait() -> None:
            try:
                ended.append(waiting.wait({"t": {0: 20_000}}, 60_000))
            except BrokerError as error:
                ended.append(error)

        waiter = threading.Thread(target=wait)
        waiter.start()
        reading = reading_client.read("t", 0, 0, 20_000, columns=["value"])
        next(reading)
        eventually(lambda: full.call(lambda: len(full.broker._watermarks._waiting)) == 1, "no call waits")
        drained: list[int] = []
        drain = threading.Thread(target=lambda: drained.append(full.run(full.endpoint.drain(DEADLINE_SECONDS))))
        drain.start()
        full.call(full.broker._watermarks.drain)  # what the broker does when it closes
        with pytest.raises(Unavailable):
            for _ in reading:
                pass
        waiter.join(DEADLINE_SECONDS)
        drain.join(DEADLINE_SECONDS)
        assert drained == [0]
        assert len(ended) == 1


def test_a_broker_stops_although_a_reader_does_not_read(tmp_path: Path) -> None:
    with BrokerProcess(tmp_path, "--listen-flight", "127.0.0.1:0", "--set", "limits.drain_timeout=500ms") as broker:
        address = flight_address(broker)
        with FlightClient(Servers.parse(address)) as flight_client:
            flight_client.create_topic("t")
            flight_client.append("t", [values(*[bytes(10_000)] * 2_000)] * 5)
        with flight.FlightClient(f"grpc://{address}") as plain:
            reader = plain.do_get(flight.Ticket(encode(Range("t"))))
            reader.read_chunk()
            code, _, errors = broker.stop(signal.SIGTERM)
            assert code == 0, errors
            assert "stopped" in errors
            reader.cancel()


def test_a_broker_stops_although_a_writer_does_not_write(tmp_path: Path) -> None:
    with BrokerProcess(tmp_path, "--listen-flight", "127.0.0.1:0", "--set", "limits.drain_timeout=500ms") as broker:
        address = flight_address(broker)
        with FlightClient(Servers.parse(address)) as flight_client:
            flight_client.create_topic("t")
            with flight.FlightClient(f"grpc://{address}") as plain:
                batch = values(b"x")
                writer, _ = plain.do_put(flight.FlightDescriptor.for_path("t"), batch.schema)
                writer.write_batch(batch)
                eventually(lambda: flight_client.describe(["t"])["t"].partitions[0].end == 1, "it has not come")
                code, _, errors = broker.stop(signal.SIGTERM)
                assert code == 0, errors
                assert "stopped" in errors
                with pytest.raises(flight.FlightError):
                    writer.close()


def test_a_read_goes_on_where_it_was_when_the_broker_is_killed_and_comes_back(tmp_path: Path) -> None:
    with BrokerProcess(tmp_path, "--listen-flight", "127.0.0.1:0") as broker:
        address = flight_address(broker)
        with FlightClient(Servers.parse(address)) as flight_client:
            flight_client.create_topic("t")
            flight_client.append(
                "t", [values(*(b"%06d" % number * 1_000 for number in range(first, first + 500))) for first in range(0, 10_000, 500)]
            )
            reading = flight_client.read("t", 0, 0, 10_000, columns=["offset", "value"], rows_max=100)
            seen = [next(reading)]
            broker.process.kill()
            broker.process.wait()
            with BrokerProcess(tmp_path, "--listen-flight", address) as again:
                assert flight_address(again) == address
                seen += reading
    assert [offset for batch in seen for offset in batch.column("offset").to_pylist()] == list(range(10_000))
    assert seen[-1].column("value")[-1].as_py() == b"009999" * 1_000


def flight_address(broker: BrokerProcess) -> str:
    protocols = broker.ready["protocols"]
    assert isinstance(protocols, dict)
    (address,) = protocols["flight"]
    return str(address)


def test_a_put_under_way_is_finished_or_says_how_far_it_came(full: Harness) -> None:
    released = threading.Event()

    def batches() -> Iterator[pa.RecordBatch]:
        yield values(b"a", b"b")
        released.wait(DEADLINE_SECONDS)
        yield values(b"c")

    failures: list[BrokerError] = []

    def write() -> None:
        with full.client() as flight_client:
            try:
                flight_client.append("t", batches())
            except BrokerError as error:
                failures.append(error)

    writer = threading.Thread(target=write)
    writer.start()
    with full.client() as flight_client:
        eventually(lambda: flight_client.describe(["t"])["t"].partitions[0].end == 20_002, "the first batch is not there")
    full.endpoint._bridge.is_closed = True
    released.set()
    writer.join(DEADLINE_SECONDS)
    full.endpoint._bridge.is_closed = False
    assert isinstance(failures[0], Unavailable)
    assert failures[0].durable_records == 2  # type: ignore[attr-defined]  # what a put adds to whatever it raises
    with full.client() as flight_client:
        assert [row["value"] for row in rows(flight_client, "t", 0, 20_000)] == [b"a", b"b"]


def test_a_topic_that_is_named_a_thousand_times_is_described_once(
    harness: Harness, flight_client: FlightClient, wide: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked = 0
    inner = harness.broker.bounds

    def bounds(*arguments: Any) -> Any:
        nonlocal looked
        looked += 1
        return inner(*arguments)

    monkeypatch.setattr(harness.broker, "bounds", bounds)
    assert len(flight_client.describe([wide] * 1_000)) == 1
    assert looked == 5


async def turns_during(work: Callable[[], Awaitable[object]]) -> int:
    """Return how often other tasks ran meanwhile."""
    turns = 0

    async def watch() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    watching = asyncio.create_task(watch())
    await work()
    watching.cancel()
    return turns


def test_others_are_served_while_a_range_is_split_and_topics_are_described(tmp_path: Path) -> None:
    with running_harness(tmp_path) as harness:
        names = [harness.topic(f"t{number}") for number in range(20)]
        for _ in range(20):
            harness.publish("t0", RecordBatch([b"x"] * 10))
        server = harness.endpoint._server
        actions = server._actions
        assert harness.run(turns_during(lambda: actions.split(ROOT, "t0", 0, 0, 200, 20))) >= 19
        assert harness.run(turns_during(lambda: actions._describe(ROOT, Describe()))) >= len(names)
        assert harness.run(turns_during(lambda: server._flights(ROOT, ""))) >= len(names)
