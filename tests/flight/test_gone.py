"""Disconnected and stalled callers: their unfinished stages are dropped, and their calls end."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import flight

import headrace.flight.calls
import headrace.flight.client
from headrace.errors import DiskFull, InvalidRequest, UnknownPartition, UnknownStage
from headrace.flight.client import FlightClient
from headrace.flight.request import Range, encode
from tests.flight.harness import ROOT, Harness, rows, running_harness, values
from tests.flight.test_bounds import eventually

_HALF_A_STAGE = """
import json, sys
import pyarrow as pa
from pyarrow import flight

client = flight.connect("grpc://" + sys.argv[1])
batch = pa.RecordBatch.from_pydict({"value": pa.array([b"a", b"b"], pa.binary())})
command = {"operation": sys.argv[2], "topic": sys.argv[3]} | ({"handle": "half", "writer": "a"} if sys.argv[2] == "stage" else {})
writer, answers = client.do_put(flight.FlightDescriptor.for_command(json.dumps(command).encode()), batch.schema)
writer.write_batch(batch)
print("sent", flush=True)
sys.stdin.read()
"""


def killed_half_way(harness: Harness, operation: str, topic: str, sent: Any) -> None:
    """A writer that dies between two batches of its put."""
    arguments = [sys.executable, "-c", _HALF_A_STAGE, harness.endpoint.address, operation, topic]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as writer:
        try:
            eventually(sent, "the first batch is not there")
        finally:
            writer.kill()


def handles(harness: Harness) -> list[tuple[str, bool]]:
    return harness.call(lambda: [(stage.handle, stage.is_sealed) for stage in harness.broker.stages(ROOT)])


def test_the_stage_of_a_writer_that_dies_is_gone_and_stays_gone(
    harness: Harness, flight_client: FlightClient, topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    killed_half_way(harness, "stage", topic, lambda: handles(harness) == [("half", False)])
    eventually(lambda: handles(harness) == [], "it is still there")
    eventually(lambda: not harness.endpoint._server.calls.carriers_under_way, "the call does not end")
    with pytest.raises(UnknownStage, match="half"):
        flight_client.stage("half", [values(b"a", b"b")], topic=topic, writer="a")
    assert "defect" not in caplog.text


def test_what_a_writer_that_dies_has_appended_stays(
    harness: Harness, flight_client: FlightClient, topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    killed_half_way(harness, "append", topic, lambda: flight_client.describe([topic])[topic].partitions[0].end == 2)
    eventually(lambda: not harness.endpoint._server.calls.carriers_under_way, "the call does not end")
    assert [row["value"] for row in rows(flight_client, topic)] == [b"a", b"b"]
    assert "defect" not in caplog.text


def test_a_stage_that_fails_half_way_is_gone_at_once(harness: Harness, flight_client: FlightClient, topic: str) -> None:
    good, bad = values(b"a", partition=pa.array([0])), values(b"b", partition=pa.array([9]))
    with pytest.raises(UnknownPartition):
        flight_client.stage("failing", [good, bad], topic=topic, writer="a")
    assert handles(harness) == []


def test_a_stage_whose_rows_fail_on_their_way_is_gone_too(harness: Harness, flight_client: FlightClient, topic: str) -> None:
    def failing() -> Iterator[pa.RecordBatch]:
        yield values(b"a")
        eventually(lambda: handles(harness) == [("cut short", False)], "nothing is staged")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        flight_client.stage("cut short", failing(), topic=topic, writer="a")
    assert handles(harness) == []
    with pytest.raises(UnknownStage):
        flight_client.publish("a", 100, ["cut short"])


def test_a_put_that_is_rejected_leaves_the_stage_of_another_alone(harness: Harness, flight_client: FlightClient, topic: str) -> None:
    flight_client.stage("whole", [values(b"a")], topic=topic, writer="a")
    with pytest.raises(InvalidRequest, match="is sealed"):
        flight_client.stage("whole", [values(b"b")], topic=topic, writer="a")
    assert flight_client.publish("a", 1, ["whole"]).records == 1
    assert [row["value"] for row in rows(flight_client, topic)] == [b"a"]


def test_two_puts_at_once_do_not_share_a_handle(harness: Harness, flight_client: FlightClient, topic: str) -> None:
    """Publishing would mix the rows of a task and of an attempt that was presumed dead."""

    def first() -> Iterator[pa.RecordBatch]:
        yield values(b"a")
        eventually(lambda: handles(harness) == [("shared", False)], "nothing is staged")
        with harness.client() as other, pytest.raises(InvalidRequest, match="'shared' is being written by another put"):
            other.stage("shared", [values(b"b")], topic=topic, writer="two")
        yield values(b"c")

    assert flight_client.stage("shared", first(), topic=topic, writer="two").records == 2
    assert flight_client.publish("two", 1, ["shared"]).records == 2
    assert [row["value"] for row in rows(flight_client, topic)] == [b"a", b"c"]


def spread(count: int) -> pa.RecordBatch:
    """A record for each partition, all in one record batch."""
    return values(*[b"x"] * count, partition=pa.array(range(count)))


@pytest.mark.parametrize(("at_once", "durable"), [(True, 3), (False, 4)])
def test_a_failure_of_one_partition_does_not_hide_what_others_have_taken(at_once: bool, durable: int) -> None:
    """A caller that relies on the number sends the rest again."""
    with running_harness() as harness, harness.client() as flight_client:
        harness.topic("t", 5)
        inner = harness.broker.publish

        def publish(who: Any, topic: str, record_batch: Any, *, partition: int) -> Any:
            if partition != 3:
                return inner(who, topic, record_batch, partition=partition)
            if at_once:
                raise DiskFull
            refused: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            refused.set_exception(DiskFull())
            return refused

        harness.broker.publish = publish  # type: ignore[method-assign, assignment]  # as much of it as a put uses
        with pytest.raises(DiskFull) as caught:
            flight_client.append("t", [spread(5)])
        assert caught.value.durable_records == durable  # type: ignore[attr-defined]  # what a put adds to whatever it raises
        assert sum(held.end for held in flight_client.describe(["t"])["t"].partitions) == durable


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> Iterator[Harness]:
    """An endpoint with one call at a time and no stall time; 40 MB in topic `t`."""
    with running_harness() as harness:
        harness.topic("t")
        with harness.client() as flight_client:
            flight_client.append("t", [values(*[bytes(10_000)] * 2_000)] * 2)
        monkeypatch.setattr(headrace.flight.calls, "FLIGHT_STALL_SECONDS_MAX", 0.2)
        harness.endpoint._server.calls._count_max = 1
        yield harness


def test_a_reader_that_does_not_read_loses_its_place_to_one_that_wants_it(impatient: Harness) -> None:
    calls = impatient.endpoint._server.calls
    with flight.FlightClient(f"grpc://{impatient.endpoint.address}") as plain:
        reader = plain.do_get(flight.Ticket(encode(Range("t"))))
        reader.read_chunk()
        eventually(lambda: calls.carriers_under_way == 1, "it is not being read")
        with impatient.client() as flight_client:
            assert flight_client.topics() == ["t"]
        eventually(lambda: not calls.under_way, "its place is not free")
        with pytest.raises(flight.FlightUnavailableError):
            reader.read_all()


def test_a_writer_that_does_not_write_loses_its_place_and_its_stage(impatient: Harness) -> None:
    batch = values(b"x")
    command = {"operation": "stage", "handle": "h", "writer": "a", "topic": "t"}
    with flight.FlightClient(f"grpc://{impatient.endpoint.address}") as plain:
        writer, _ = plain.do_put(flight.FlightDescriptor.for_command(json.dumps(command).encode()), batch.schema)
        writer.write_batch(batch)
        eventually(lambda: handles(impatient) == [("h", False)], "nothing is staged")
        with impatient.client() as flight_client:
            assert flight_client.topics() == ["t"]
        eventually(lambda: handles(impatient) == [], "the stage is still there")
        with pytest.raises(flight.FlightError):
            writer.close()


def test_a_reader_that_was_cut_off_reads_on(impatient: Harness) -> None:
    with impatient.client() as slow, impatient.client() as flight_client:
        reading = slow.read("t", 0, 0, 4_000, columns=["offset", "value"])
        seen = [next(reading)]
        assert flight_client.topics() == ["t"]
        seen += reading
    assert [offset for batch in seen for offset in batch.column("offset").to_pylist()] == list(range(4_000))


def test_no_connection_is_closed_while_there_is_room(impatient: Harness) -> None:
    impatient.endpoint._server.calls._count_max = 2
    with impatient.client() as slow, impatient.client() as flight_client:
        reading = slow.read("t", 0, 0, 4_000, columns=["value"])
        next(reading)
        connection = slow._flight
        impatient.run(asyncio.sleep(0.5))  # not to wait for something, but for nothing
        assert flight_client.topics() == ["t"]
        assert sum(batch.num_rows for batch in reading) < 4_000
        assert slow._flight is connection


def test_the_client_pings_no_more_often_than_a_server_of_grpc_takes() -> None:
    """gRPC accepts one ping in five minutes on an idle connection (gRFC A8), and closes the connection at the third early one."""
    assert dict(headrace.flight.client._OPTIONS)["grpc.keepalive_time_ms"] > 300_000
