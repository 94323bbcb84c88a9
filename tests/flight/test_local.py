"""Reads of the files of a broker on the same machine: the same rows as through the endpoint, whatever lies in the files."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import flight

from headrace.engine.contract import Cleanup
from headrace.engine.embedded import EmbeddedEngine
from headrace.errors import OffsetOutOfRange, UnknownTopic
from headrace.flight import local, request
from headrace.flight.client import ALL, FlightClient
from headrace.flight.endpoint import EndpointSettings
from headrace.limits import FLIGHT_BATCH_BYTES_TARGET, LOCATED_BATCHES_MAX
from headrace.located import FileBatch, Located
from headrace.records import RecordBatch
from tests.flight.harness import NOW, ROOT, Harness, running_harness, values

_numbers = itertools.count()
_KEY: Final = bytes(32)


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harness]:
    with running_harness(tmp_path_factory.mktemp("local"), key=_KEY) as made:
        yield made


class Counted:
    """Counts the batches that were read from files, and the ranges that were fetched."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.batches = 0
        self.fetched: list[tuple[int | None, int | None]] = []
        read, stream = local.File.read, FlightClient._stream

        def counted_read(file: local.File, batch: FileBatch, contents: Any) -> Any:
            content = read(file, batch, contents)
            self.batches += content is not None
            return content

        def counted_stream(client: FlightClient, wanted: request.Range) -> Any:
            if client._servers.local_files:
                self.fetched.append((wanted.start, wanted.stop))
            return stream(client, wanted)

        monkeypatch.setattr(local.File, "read", counted_read)
        monkeypatch.setattr(FlightClient, "_stream", counted_stream)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    return Counted(monkeypatch)


def topic_of(harness: Harness, **config: Any) -> str:
    return harness.topic(f"local-{next(_numbers)}", **{"encrypt": False, **config})


def spill(harness: Harness) -> None:
    """Move all tails to segments."""
    assert isinstance(harness.engine, EmbeddedEngine)
    harness.engine.store.maintenance.checkpoint()


def segments_of(harness: Harness, topic: str) -> list[Path]:
    assert isinstance(harness.engine, EmbeddedEngine)
    log = harness.engine._log(topic, 0)
    return [Path(harness.engine._files.absolute(segment.path)) for segment in harness.engine.store.partitions[log].segments]


def table(client: FlightClient, topic: str, start: int, stop: int, **more: Any) -> pa.Table:
    columns = more.get("columns", ALL)
    batches = list(client.read(topic, 0, start, stop, **more))
    for batch in batches:
        batch.validate(full=True)
    return pa.Table.from_batches(batches, schema=pa.schema([request.READ_SCHEMA.field(name) for name in columns]))


@contextmanager
def both(harness: Harness) -> Iterator[tuple[FlightClient, FlightClient]]:
    """Yield a client that may read files, and one that may not."""
    with harness.client() as reader, harness.client(local_files=False) as remote:
        yield reader, remote


def assert_same(harness: Harness, topic: str, start: int, stop: int, **more: Any) -> pa.Table:
    """Read a range in both ways, and return its rows."""
    with both(harness) as (reader, remote):
        found = table(reader, topic, start, stop, **more)
        assert found.equals(table(remote, topic, start, stop, **more))
    return found


def plain(count: int) -> RecordBatch:
    return RecordBatch([b"%d" % number * (number % 7) for number in range(count)])


def mixed(count: int) -> RecordBatch:
    """Return records with keys and times, every third key and value null."""
    return RecordBatch(
        [None if number % 3 == 0 else b"v%d" % number for number in range(count)],
        keys=[None if number % 3 == 1 else b"k%d" % number for number in range(count)],
        timestamps=[NOW + number for number in range(count)],
    )


@pytest.mark.parametrize("columns", [("value",), ("offset",), ("key", "timestamp"), ("topic",), ALL])
@pytest.mark.parametrize("kind", [plain, mixed])
def test_rows_in_files_are_read_from_them(
    harness: Harness, counted: Counted, kind: Callable[[int], RecordBatch], columns: tuple[str, ...]
) -> None:
    topic = topic_of(harness)
    harness.publish(topic, kind(1_000))
    spill(harness)
    assert assert_same(harness, topic, 0, 1_000, columns=columns).num_rows == 1_000
    assert counted.batches == 1
    assert counted.fetched == []


def test_a_large_append_is_read_from_its_segment(harness: Harness, counted: Counted) -> None:
    topic = topic_of(harness)
    with harness.client() as client:
        client.append(topic, [values(*[b"x" * 1_000] * 5_000)])
    assert assert_same(harness, topic, 7, 4_990, columns=("offset", "value")).num_rows == 4_983
    assert counted.batches > 1
    assert counted.fetched == []


@given(data=st.data())
def test_every_range_has_the_same_rows_in_both_ways(mixture: tuple[Harness, str, int], data: st.DataObject) -> None:
    harness, topic, end = mixture
    start = data.draw(st.integers(0, end))
    stop = data.draw(st.integers(start, end))
    columns = data.draw(st.lists(st.sampled_from(ALL), min_size=1, unique=True))
    found = assert_same(harness, topic, start, stop, columns=tuple(columns), rows_max=data.draw(st.integers(1, 2_000)))
    assert found.num_rows == stop - start


@pytest.fixture(scope="module")
def mixture(harness: Harness) -> tuple[Harness, str, int]:
    """Return a topic with small and large batches, with headers, in several segments and in the tail, and its end."""
    topic = topic_of(harness, segment_bytes=1 << 20)
    headers = RecordBatch([b"h"] * 40, headers=[(("name", b"1"),) if number % 2 else () for number in range(40)])
    for record_batch in (plain(10), mixed(500), headers, RecordBatch([b"y" * 1_000] * 3_000), mixed(3), headers, plain(2_000), mixed(30)):
        harness.publish(topic, record_batch)
        spill(harness)
    harness.publish(topic, mixed(100))
    return harness, topic, 5_723


def test_the_tail_is_fetched(harness: Harness, counted: Counted) -> None:
    topic = topic_of(harness)
    harness.publish(topic, plain(50))
    spill(harness)
    harness.publish(topic, plain(20))
    assert assert_same(harness, topic, 10, 70).num_rows == 60
    assert counted.batches == 1
    assert counted.fetched == [(50, 70)]


@pytest.mark.parametrize("config", [{"compress": True}, {"encrypt": True}])
def test_records_that_are_not_plain_are_fetched(harness: Harness, counted: Counted, config: dict[str, Any]) -> None:
    topic = topic_of(harness, **config)
    harness.publish(topic, RecordBatch([b"a" * 100] * 500))
    spill(harness)
    assert assert_same(harness, topic, 0, 500).num_rows == 500
    assert (counted.batches, counted.fetched) == (0, [(0, 500)])


def test_compressed_batches_between_others_are_fetched(harness: Harness, counted: Counted) -> None:
    topic = topic_of(harness)
    for compress in (False, True, False):
        config = harness.engine.topics()[topic].config
        harness.run(harness.broker.alter_topic(ROOT, topic, config=replace(config, compress=compress)))
        harness.publish(topic, RecordBatch([b"a" * 100] * 500))
        spill(harness)
    assert assert_same(harness, topic, 0, 1_500).num_rows == 1_500
    assert (counted.batches, counted.fetched) == (2, [(500, 1_000)])


def test_records_that_expire_are_fetched(harness: Harness, counted: Counted) -> None:
    topic = topic_of(harness)
    harness.publish(topic, RecordBatch([b"a", b"b", b"c"], expiries=[0, NOW - 1, NOW + 1_000]))
    spill(harness)
    assert assert_same(harness, topic, 0, 3, columns=("offset",))["offset"].to_pylist() == [0, 2]
    assert (counted.batches, counted.fetched) == (0, [(0, 3)])


def test_headers_are_fetched_and_batches_without_them_are_not(harness: Harness, counted: Counted) -> None:
    topic = topic_of(harness)
    harness.publish(topic, RecordBatch([b"a"], headers=[(("name", b"1"),)]))
    spill(harness)
    assert assert_same(harness, topic, 0, 1, columns=("value",)).num_rows == 1
    assert (counted.batches, counted.fetched) == (1, [])
    assert assert_same(harness, topic, 0, 1, columns=("headers",))["headers"].to_pylist() == [[{"key": "name", "value": b"1"}]]
    assert (counted.batches, counted.fetched) == (1, [(0, 1)])


def test_a_compacted_topic_is_fetched(harness: Harness, counted: Counted) -> None:
    topic = topic_of(harness, cleanup=Cleanup.COMPACT)
    harness.publish(topic, RecordBatch([b"a", b"b"], keys=[b"k", b"k"]))
    spill(harness)
    assert assert_same(harness, topic, 0, 2, columns=("offset",)).num_rows >= 1
    assert counted.batches == 0


def test_many_batches_are_located_in_steps_and_joined(harness: Harness, counted: Counted) -> None:
    topic = topic_of(harness)
    count = LOCATED_BATCHES_MAX + 10
    for number in range(count):
        harness.publish(topic, RecordBatch([b"%d" % number], keys=[b"k"]))
        if number % 7 == 0:
            spill(harness)
    spill(harness)
    found = assert_same(harness, topic, 0, count)
    assert found["value"].to_pylist() == [b"%d" % number for number in range(count)]
    assert counted.fetched == []
    with harness.client() as client:
        assert len(list(client.read(topic, 0, 0, count))) == 1


def test_record_batches_keep_the_limits_of_rows_and_bytes(harness: Harness) -> None:
    topic = topic_of(harness)
    with harness.client() as client:
        client.append(topic, [values(*[b"x" * (1 << 20)] * 20)])
        sizes = [batch.nbytes for batch in client.read(topic, 0, 0, 20, columns=("value",))]
        assert max(sizes) <= FLIGHT_BATCH_BYTES_TARGET + (1 << 20)
        assert max(batch.num_rows for batch in client.read(topic, 0, 0, 20, columns=("value",), rows_max=3)) <= 3


# What happens between the answer and the read


def located_then(monkeypatch: pytest.MonkeyPatch, step: Callable[[], None]) -> None:
    """Run `step` after each answer of the broker, before the client opens a file."""
    locate = FlightClient._locate

    def located(client: FlightClient, wanted: request.Range, position: int) -> Located:
        found = locate(client, wanted, position)
        step()
        return found

    monkeypatch.setattr(FlightClient, "_locate", located)


def test_a_file_that_is_gone_is_fetched(harness: Harness, counted: Counted, monkeypatch: pytest.MonkeyPatch) -> None:
    topic = topic_of(harness)
    harness.publish(topic, plain(100))
    spill(harness)
    (path,) = segments_of(harness, topic)
    hidden = path.with_suffix(".hidden")
    located_then(monkeypatch, lambda: os.rename(path, hidden) if path.exists() else None)
    try:
        assert assert_same(harness, topic, 0, 100).num_rows == 100  # the broker has the file open
    finally:
        os.rename(hidden, path)
    assert (counted.batches, counted.fetched) == (0, [(0, 100)])


def test_records_that_retention_deletes_meanwhile_are_out_of_range(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    topic = topic_of(harness, retention_bytes=1, segment_bytes=1 << 20)
    for _ in range(3):
        harness.publish(topic, RecordBatch([b"x" * 1_000] * 2_000))
        spill(harness)

    located_then(monkeypatch, lambda: harness.run(harness.engine.maintain()))
    with harness.client() as client, pytest.raises(OffsetOutOfRange):
        table(client, topic, 0, 6_000)


@pytest.mark.parametrize("damaged_at", [60, 200])
def test_a_damaged_batch_is_left_to_the_broker(harness: Harness, counted: Counted, damaged_at: int) -> None:
    topic = topic_of(harness)
    harness.publish(topic, RecordBatch([b"x" * 100] * 1_000))
    harness.publish(topic, RecordBatch([b"y" * 100] * 1_000))
    spill(harness)
    (path,) = segments_of(harness, topic)
    with open(path, "r+b") as file:
        file.seek(damaged_at)
        (byte,) = file.read(1)
        file.seek(damaged_at)
        file.write(bytes([byte ^ 1]))
    found = assert_same(harness, topic, 0, 2_000, columns=("offset",))
    assert counted.fetched[0][0] == 0, "the broker reports the damage and skips it"
    assert found.num_rows < 2_000


def test_what_is_not_a_regular_file_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").write_bytes(b"x")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    assert local.can_open(str(tmp_path / "file"))
    for name in ("pipe", "link", "absent", ""):
        assert not local.can_open(str(tmp_path / name)), name
    assert not local.can_open(None)


# Who may


def can_read(harness: Harness, **more: Any) -> bool:
    topic = topic_of(harness)
    harness.publish(topic, plain(1))
    with harness.client(**more) as client:
        table(client, topic, 0, 1)
        assert client._local is not None
        return client._local[1]


def test_a_client_asks_once_for_each_connection(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    topic = topic_of(harness)
    harness.publish(topic, plain(10))
    asked: list[str | None] = []
    can_open = local.can_open

    def counted_open(path: str | None) -> bool:
        asked.append(path)
        return can_open(path)

    monkeypatch.setattr(local, "can_open", counted_open)
    with harness.client() as client:
        for _ in range(3):
            table(client, topic, 0, 10)
        assert len(asked) == 1
        client._drop_connection()
        table(client, topic, 0, 10)
        assert len(asked) == 2


def test_a_client_on_another_machine_fetches(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    assert can_read(harness)
    with harness.client() as client:
        assert client._ask("local_file", request.LocalFile("another")) is None
        assert client._ask("local_file", request.LocalFile("")) is None
    monkeypatch.setattr(local, "machine", lambda: "")
    assert not can_read(harness)


def test_a_client_that_may_not_open_the_files_fetches(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def refusing(path: Any, *rest: Any, **more: Any) -> int:
        if str(path).endswith(("IDENTITY", ".seg")):
            raise PermissionError(13, "Permission denied", path)
        return real(path, *rest, **more)

    monkeypatch.setattr(os, "open", refusing)
    assert not can_read(harness)


def test_both_sides_can_switch_it_off(harness: Harness, tmp_path: Path) -> None:
    assert not can_read(harness, local_files=False)
    with running_harness(tmp_path, settings=EndpointSettings(local_files=False)) as other:
        topic = topic_of(other)
        other.publish(topic, plain(1))
        with other.client() as client:
            assert table(client, topic, 0, 1).num_rows == 1
            assert client._ask("local_file", request.LocalFile(local.machine())) is None


def test_a_broker_without_files_and_an_older_broker_are_read_as_usual(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    with running_harness() as memory:
        assert not can_read(memory)
    monkeypatch.delitem(request.ACTIONS, "local_file")
    assert not can_read(harness)


# The answer of the broker


def ask(harness: Harness, action: str, **fields: Any) -> Any:
    with flight.connect(f"grpc://{harness.endpoint.address}") as client:
        (answer,) = client.do_action(flight.Action(action, json.dumps(fields).encode()))
        return json.loads(answer.body.to_pybytes())


def test_located_records_count_as_delivered(harness: Harness) -> None:
    topic = topic_of(harness)
    harness.publish(topic, RecordBatch([b"x" * 10] * 100))
    spill(harness)
    located = ask(harness, "locate", topic=topic, partition=0, start=20, stop=70)
    assert located["next_offset"] == 70
    assert [(batch["base_offset"], batch["count"]) for batch in located["batches"]] == [(0, 100)]
    meter = harness.broker.meters.meter(topic, "flight")
    assert (meter.delivered_records, meter.delivered_bytes) == (50, 500)


def test_locate_checks_the_range_as_a_read_does(harness: Harness) -> None:
    topic = topic_of(harness)
    harness.publish(topic, plain(10))
    with harness.client() as client:
        for start, stop in ((0, 11), (11, 11)):
            with pytest.raises(OffsetOutOfRange):
                list(client.read(topic, 0, start, stop))
            with pytest.raises(OffsetOutOfRange):
                client._locate(request.Range(topic, 0, start, stop), start)
        with pytest.raises(UnknownTopic):
            list(client.read("absent", 0, 0, 1))


def test_a_topic_with_traces_is_fetched(harness: Harness, counted: Counted, monkeypatch: pytest.MonkeyPatch) -> None:
    topic = topic_of(harness)
    harness.publish(topic, plain(10))
    spill(harness)
    monkeypatch.setattr(harness.broker._publisher, "tracer", object())
    located = harness.run(harness.broker.locate(ROOT, topic, 0, 0, 10))
    assert located == Located(10)
