"""The Flight endpoint returns the same rows for every form of storage: on disk, compressed, encrypted, compacted, expired."""

from __future__ import annotations

import datetime
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from headrace.engine.contract import Cleanup
from headrace.errors import InvalidRecord, OffsetOutOfRange, UnknownTopic
from headrace.flight.request import HEADERS
from headrace.records import RecordBatch
from headrace.schemas import SchemaType
from headrace.storage.check import check
from headrace.storage.files import DiskFiles
from tests.flight.harness import NOW, ROOT, Harness, rows, running_harness, values

KEY = bytes(range(32))


@pytest.fixture(params=[True, False], ids=["files", "endpoint"])
def disk(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Harness]:
    with running_harness(tmp_path) as harness:
        harness.local_files = request.param
        yield harness
    assert check(DiskFiles(tmp_path), None).problems == []


def sample(count: int) -> pa.RecordBatch:
    return values(
        *(None if number % 9 == 0 else b"value %d " % number * (number % 7) for number in range(count)),
        key=pa.array([None if number % 5 == 0 else b"key %d" % (number % 11) for number in range(count)], pa.binary()),
        headers=pa.array([[{"key": "n", "value": b"%d" % number}] if number % 3 else None for number in range(count)], HEADERS),
        timestamp=pa.array([NOW + number for number in range(count)], pa.timestamp("ms")),
    )


def same(found: list[dict[str, Any]], batch: pa.RecordBatch, picked: range) -> None:
    wanted = batch.to_pylist()
    assert [row["value"] for row in found] == [wanted[index]["value"] for index in picked]
    assert [row["key"] for row in found] == [wanted[index]["key"] for index in picked]
    assert [row["headers"] for row in found] == [wanted[index]["headers"] for index in picked]
    assert [row["timestamp"] for row in found] == [wanted[index]["timestamp"].replace(tzinfo=datetime.UTC) for index in picked]
    assert [row["offset"] for row in found] == list(picked)


@pytest.mark.parametrize("kind", ["plain", "compressed", "encrypted", "both"])
def test_rows_come_back_as_they_went_in_and_after_a_restart(tmp_path: Path, kind: str) -> None:
    key = KEY if kind in ("encrypted", "both") else None
    batch = sample(1_000)
    with running_harness(tmp_path, key=key) as harness, harness.client() as flight_client:
        harness.topic("t", compress=kind in ("compressed", "both"))
        flight_client.append("t", [batch.slice(0, 300), batch.slice(300)])
        same(rows(flight_client, "t"), batch, range(1_000))
        same(rows(flight_client, "t", 0, 123, 777, rows_max=50), batch, range(123, 777))
    with running_harness(tmp_path, key=key) as harness, harness.client() as flight_client:
        same(rows(flight_client, "t", 0, 299, 301), batch, range(299, 301))
        same(rows(flight_client, "t"), batch, range(1_000))
    assert check(DiskFiles(tmp_path), key).problems == []


def test_columns_become_batches_of_the_target_size(disk: Harness) -> None:
    disk.topic("t")
    with disk.client() as flight_client:
        batch = values(*[bytes(1_000)] * 20_000)
        assert flight_client.append("t", [batch]).placements == [(0, 0, 20_000)]
        fetched = disk.run(disk.broker.fetch(ROOT, "t", 0, 0, bytes_max=8 << 20))
        assert 1_000 < len(fetched.batches[0]) <= 1_048
        assert sum(found.num_rows for found in flight_client.read("t", 0, 0, 20_000, columns=["value"])) == 20_000


def test_a_compacted_topic_has_gaps_and_its_own_offsets(disk: Harness) -> None:
    disk.topic("t", cleanup=Cleanup.COMPACT, segment_bytes=64 * 1024)
    for turn in range(40):
        disk.publish("t", RecordBatch([b"%d" % turn * 200] * 10, [b"key %d" % number for number in range(10)]))
    disk.run(disk.broker.maintain())
    with disk.client() as flight_client:
        kept = rows(flight_client, "t")
        offsets = [row["offset"] for row in kept]
        assert len(kept) < 400 and offsets == sorted(offsets)
        assert {row["key"] for row in kept[-10:]} == {b"key %d" % number for number in range(10)}
        assert {row["value"] for row in kept[-10:]} == {b"39" * 200}
        held = {record.offset: record for record in _records(disk, "t")}
        assert {row["offset"]: (row["key"], row["value"]) for row in kept} == {
            offset: (record.key, record.value) for offset, record in held.items()
        }
        middle = offsets[len(offsets) // 2]
        assert [row["offset"] for row in rows(flight_client, "t", 0, 1, middle)] == [offset for offset in offsets if 1 <= offset < middle]


def _records(harness: Harness, topic: str) -> list[Any]:
    found: list[Any] = []
    bounds = harness.call(lambda: harness.broker.bounds(ROOT, topic, 0))
    offset = bounds.first
    while offset < bounds.end:
        fetched = harness.run(harness.broker.fetch(ROOT, topic, 0, offset, bytes_max=1 << 20))
        found += [record for batch in fetched.batches for record in batch.records()]
        offset = fetched.next_offset
    return found


def test_expired_records_are_left_out(disk: Harness) -> None:
    disk.topic("t")
    disk.publish(
        "t", RecordBatch([b"%d" % number for number in range(100)], expiries=[NOW + 1 + number % 3 * 1_000 for number in range(100)])
    )
    disk.publish("t", RecordBatch([b"for ever"]))
    with disk.client() as flight_client:
        assert len(rows(flight_client, "t")) == 101
        disk.now = NOW + 500
        assert [row["offset"] for row in rows(flight_client, "t")] == [number for number in range(100) if number % 3] + [100]
        disk.now = NOW + 5_000
        assert [row["value"] for row in rows(flight_client, "t")] == [b"for ever"]
        assert rows(flight_client, "t", 0, 0, 100) == []


def test_records_appended_to_a_topic_with_a_time_to_live_expire(disk: Harness) -> None:
    disk.topic("t", ttl_ms=1_000)
    with disk.client() as flight_client:
        flight_client.append("t", [values(b"a", b"b")])
        assert len(rows(flight_client, "t")) == 2
        disk.now += 1_000
        assert rows(flight_client, "t") == []


def test_a_topic_that_goes_under_a_reader_ends_the_read(disk: Harness) -> None:
    disk.topic("t")
    with disk.client() as flight_client:
        flight_client.append("t", [values(*[bytes(100_000)] * 400)])
        reading = flight_client.read("t", 0, 0, 400, columns=["value"])
        assert next(reading).num_rows > 0
        disk.run(disk.broker.delete_topic(ROOT, "t"))
        with pytest.raises(UnknownTopic):
            list(reading)


def test_retention_that_overtakes_a_reader_is_an_error_with_the_bounds(disk: Harness) -> None:
    disk.topic("t", segment_bytes=1 << 20, retention_bytes=1 << 20)
    with disk.client() as flight_client:
        flight_client.append("t", [values(*[bytes(100_000)] * 20) for _ in range(30)])
        reading = flight_client.read("t", 0, 0, 600, columns=["value"], rows_max=10)
        assert next(reading).num_rows == 10
        disk.run(disk.broker.maintain())
        first = flight_client.describe(["t"])["t"].partitions[0].first
        assert first > 100
        with pytest.raises(OffsetOutOfRange) as caught:
            list(reading)
        assert caught.value.first == first
        with pytest.raises(OffsetOutOfRange):
            list(flight_client.read("t", 0, 0, 1))


def test_readers_and_writers_at_once_see_a_prefix_in_order(disk: Harness) -> None:
    disk.topic("t")
    done = threading.Event()

    def write() -> None:
        with disk.client() as mine:
            for turn in range(30):
                mine.append("t", [values(*(b"%d" % (turn * 100 + number) for number in range(100)))])
        done.set()

    writer = threading.Thread(target=write)
    writer.start()
    with disk.client() as flight_client:
        seen = 0
        while not done.is_set():
            end = flight_client.describe(["t"])["t"].partitions[0].end
            found = rows(flight_client, "t", 0, seen, end, columns=["value"])
            assert [int(row["value"]) for row in found] == list(range(seen, end))
            seen = end
        writer.join()
        assert flight_client.describe(["t"])["t"].partitions[0].end == 3_000


def test_a_topic_that_requires_a_schema_is_kept_to_it(disk: Harness) -> None:
    disk.topic("t")
    schema = b'{"type": "object", "required": ["a"]}'
    disk.run(disk.broker.schemas.register(ROOT, "s", SchemaType.JSON, schema))
    disk.run(disk.broker.schemas.require(ROOT, "t", "s"))
    with disk.client() as flight_client:
        found = flight_client.schema("t")
        assert found is not None and (found.name, found.version, found.kind, found.definition) == ("s", 1, "json", schema)
        flight_client.append("t", [values(b'{"a": 1}')])
        with pytest.raises(InvalidRecord, match="schema validation failed"):
            flight_client.append("t", [values(b'{"b": 1}')])
        assert flight_client.describe(["t"])["t"].partitions[0].end == 1
