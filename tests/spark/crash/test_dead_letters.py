"""Moves of bad records while the broker is killed: retries duplicate no dead letter and lose none."""

from __future__ import annotations

import threading
from pathlib import Path

import pyarrow as pa
import pytest

from headrace.errors import BrokerError
from headrace.flight.client import FlightClient, Servers
from tests.spark.serving import FlightBroker

pytestmark = pytest.mark.kill_loop

MOMENTS = (0.03, 0.06, 0.12, 0.4)
"""Seconds into the moves at which the broker is killed."""
RECORDS = 3_000
STEP = 50


def letters(start: int) -> pa.RecordBatch:
    offsets = list(range(start, start + STEP))
    return pa.record_batch(
        {
            "partition": pa.array([0] * STEP, pa.int32()),
            "offset": pa.array(offsets, pa.int64()),
            "error": pa.array([f"bad {offset}" for offset in offsets]),
            "reason": pa.array(["unreadable"] * STEP),
        }
    )


def move_until_it_dies(client: FlightClient, done: set[int]) -> None:
    """Move from the first record in every process, like a repeated batch."""
    try:
        for start in range(0, RECORDS, STEP):
            moved = client.dead_letters("t", letters(start))
            assert moved == 0 or start not in done, "what was acknowledged was moved again"
            done.add(start)
    except BrokerError:
        pass


def kept(client: FlightClient) -> list[tuple[int, int]]:
    """Return (value, original offset) of every dead letter."""
    end = client.describe(["t.dlq"])["t.dlq"].partitions[0].end
    found = [row for batch in client.read("t.dlq", 0, 0, end, columns=["value", "headers"]) for row in batch.to_pylist()]
    origins = [{header["key"]: header["value"] for header in row["headers"]}["x-headrace-source-offset"] for row in found]
    return [(int(row["value"]), int(origin)) for row, origin in zip(found, origins, strict=True)]


def test_a_move_that_was_interrupted_is_finished_without_doubles(tmp_path: Path) -> None:
    done, interrupted = set[int](), 0
    for life, moment in enumerate(MOMENTS):
        with (
            FlightBroker(tmp_path, data=tmp_path / "data") as broker,
            FlightClient(Servers.parse(broker.address, timeout_seconds=5.0)) as client,
        ):
            if not life:
                client.create_topic("t")
                client.append("t", [pa.record_batch({"value": pa.array([b"%d" % number for number in range(RECORDS)], pa.binary())})])
            moving = threading.Thread(target=move_until_it_dies, args=(client, done))
            moving.start()
            moving.join(moment)
            interrupted += moving.is_alive()
            broker.process.kill()
            broker.process.wait()
            moving.join()
    assert interrupted, "no kill came in the middle"
    with FlightBroker(tmp_path, data=tmp_path / "data") as broker, FlightClient(Servers.parse(broker.address)) as client:
        move_until_it_dies(client, done)
        assert len(done) == RECORDS // STEP
        assert sorted(kept(client)) == [(number, number) for number in range(RECORDS)]
