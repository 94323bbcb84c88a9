"""Chunks contain the rows of a put once, in order, in the partitions that every protocol selects, within the batch size."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from google_crc32c import value as crc32c
from hypothesis import given, settings
from hypothesis import strategies as st

import headrace.flight.writing
from headrace.broker.publishing.partitioner import partition_of
from headrace.errors import InvalidRequest, RecordTooLarge
from headrace.flight.request import HEADERS
from headrace.flight.writing import Splitter, Target
from headrace.limits import BATCH_BYTES_TARGET, BATCH_RECORDS_MAX, FLIGHT_IN_FLIGHT_BYTES_MAX, KEY_BYTES_MAX
from headrace.records import RecordBatch
from headrace.storage.batch import StoredBatch
from headrace.storage.encoding import build, build_large
from tests.flight.harness import values

PARTITIONS = {"a": 1, "b": 4}
ROWS = st.lists(
    st.fixed_dictionaries(
        {
            "topic": st.sampled_from(["a", "b"]),
            "key": st.one_of(st.none(), st.binary(max_size=6)),
            "value": st.one_of(st.none(), st.binary(max_size=9)),
            "headers": st.lists(st.tuples(st.text(max_size=3), st.binary(max_size=3)), max_size=2).map(tuple),
            "partition": st.one_of(st.none(), st.just(0)),
            "timestamp": st.integers(0, 1 << 41),
        }
    ),
    min_size=1,
    max_size=40,
)


def arrow(rows: list[dict[str, Any]], names: list[str], before: int) -> pa.RecordBatch:
    """Return these columns of the rows, with other rows before them in the same buffers."""
    types = {
        "topic": pa.string(),
        "key": pa.large_binary(),
        "value": pa.binary(),
        "headers": HEADERS,
        "partition": pa.int32(),
        "timestamp": pa.timestamp("ms"),
    }
    shown = [{**row, "headers": [{"key": name, "value": value} for name, value in row["headers"]] or None} for row in rows]
    filled = [shown[0]] * before + shown
    return pa.RecordBatch.from_pydict({name: pa.array([row[name] for row in filled], types[name]) for name in names}).slice(before)


def place(row: dict[str, Any], names: list[str], turn: int) -> int:
    count = PARTITIONS[row["topic"]]
    if "partition" in names and row["partition"] is not None:
        return int(row["partition"])
    if "key" in names and row["key"] is not None:
        return partition_of(row["key"], count)
    return turn % count


@settings(max_examples=400)
@given(ROWS, st.sets(st.sampled_from(["key", "headers", "partition", "timestamp"])), st.integers(0, 9), st.integers(0, 3))
def test_every_row_is_in_one_piece_in_its_place_and_its_order(rows: list[dict[str, Any]], more: set[str], turn: int, before: int) -> None:
    names = ["value", "topic", *sorted(more)]
    batch = arrow(rows, names, before)
    found: dict[tuple[str, int], list[tuple[Any, ...]]] = {}
    for chunk in Splitter(batch.schema, Target(None, None, turn), PARTITIONS.__getitem__).chunks(batch):
        record_batch: RecordBatch = chunk.batch.record_batch()
        count = len(record_batch)
        lists: list[Any] = [
            record_batch.values,
            record_batch.keys or [None] * count,
            record_batch.headers or [()] * count,
            record_batch.timestamps or [None] * count,
        ]
        found.setdefault((chunk.topic, chunk.partition), []).extend(zip(*lists, strict=True))
    wanted: dict[tuple[str, int], list[tuple[Any, ...]]] = {}
    for row in rows:
        columns = (
            row["value"],
            row["key"] if "key" in more else None,
            row["headers"] if "headers" in more else (),
            row["timestamp"] if "timestamp" in more else None,
        )
        wanted.setdefault((row["topic"], place(row, names, turn)), []).append(columns)
    assert found == wanted


@pytest.mark.parametrize("size", [10, 1_000, 100_000, BATCH_BYTES_TARGET, BATCH_BYTES_TARGET + 1, 3 * BATCH_BYTES_TARGET])
def test_a_piece_is_a_batch(size: int) -> None:
    count = max(3, 3 * BATCH_BYTES_TARGET // size)
    batch = values(*[bytes(size)] * count)
    chunks = list(Splitter(batch.schema, Target("a", None, 0), PARTITIONS.__getitem__).chunks(batch))
    assert sum(len(chunk.batch) for chunk in chunks) == count
    assert all(chunk.batch.size_bytes <= BATCH_BYTES_TARGET or len(chunk.batch) == 1 for chunk in chunks)
    if size <= BATCH_BYTES_TARGET:
        assert all(chunk.batch.size_bytes > BATCH_BYTES_TARGET - size for chunk in chunks[:-1]), "no smaller than it must be"


def test_a_large_append_is_written_from_the_buffers_of_arrow() -> None:
    batch = values(*[bytes([number]) * 100_000 for number in range(20)])
    begin = batch.column(0).buffers()[2].address
    for chunk in Splitter(batch.schema, Target("a", None, 0), PARTITIONS.__getitem__).chunks(batch):
        content: Any = chunk.batch.values.content
        assert content.address == begin
        begin += len(content)
        _, parts = build_large(7, 0, chunk.batch, now=5)
        assert any(part is content for part in parts) and chunk.batch.values.content is content
        stored = StoredBatch.parse(b"".join(parts)).record_batch()
        assert stored.values == chunk.batch.record_batch().values


@pytest.mark.parametrize(("value_bytes", "is_known"), [(100_000, True), (1_000, False)])
def test_the_checksum_of_a_large_chunk_is_known(value_bytes: int, is_known: bool) -> None:
    batch = values(*[bytes([number]) * value_bytes for number in range(20)])
    chunks = list(Splitter(batch.schema, Target("a", None, 0), PARTITIONS.__getitem__).chunks(batch))
    for chunk in chunks:
        column = chunk.batch.values
        assert column.checksum == (crc32c(column.data) if is_known else None)


def test_a_batch_that_stays_in_memory_does_not_keep_the_buffers_of_arrow() -> None:
    batch = values(b"x" * 100_000)
    (chunk,) = Splitter(batch.schema, Target("a", None, 0), PARTITIONS.__getitem__).chunks(batch)
    _, parts = build(7, 0, chunk.batch, now=5)
    assert all(isinstance(part, bytes) for part in parts) and isinstance(chunk.batch.values.content, bytes)


@pytest.mark.parametrize("more", [0, 1])
def test_chunks_keep_a_record_batch_in_memory_up_to_the_size_of_the_window(more: int) -> None:
    size = FLIGHT_IN_FLIGHT_BYTES_MAX // 16
    batch = values(*[bytes(size)] * 15, bytes(size + more))
    chunks = list(Splitter(batch.schema, Target("a", None, 0), PARTITIONS.__getitem__).chunks(batch))
    assert {isinstance(chunk.batch.values.content, bytes) for chunk in chunks} == {bool(more)}


def test_empty_values_are_cut_by_their_number() -> None:
    count = BATCH_RECORDS_MAX + 1
    batch = pa.RecordBatch.from_arrays([pa.repeat(pa.scalar(b"", pa.binary()), count)], names=["value"])
    chunks = list(Splitter(batch.schema, Target("a", None, 0), PARTITIONS.__getitem__).chunks(batch))
    assert [len(chunk.batch) for chunk in chunks] == [BATCH_RECORDS_MAX, 1]


def test_a_topic_that_is_given_wins_over_the_column() -> None:
    batch = values(b"x", topic=pa.array(["b"]))
    (chunk,) = Splitter(batch.schema, Target("a", None, 0), PARTITIONS.__getitem__).chunks(batch)
    assert chunk.topic == "a"


def test_a_time_before_the_epoch_is_rejected() -> None:
    batch = values(b"x", timestamp=pa.array([-1], pa.timestamp("ms")))
    with pytest.raises(InvalidRequest, match="before 1970"):
        list(Splitter(batch.schema, Target("a", None, 0), PARTITIONS.__getitem__).chunks(batch))


def test_a_column_that_is_there_twice_is_rejected() -> None:
    batch = pa.RecordBatch.from_arrays([pa.array([b"x"]), pa.array([b"y"])], names=["value", "value"])
    with pytest.raises(InvalidRequest, match="duplicate column"):
        Splitter(batch.schema, Target("a", None, 0), PARTITIONS.__getitem__)


@pytest.mark.parametrize("text", [pa.string(), pa.large_string(), pa.string_view()])
@pytest.mark.parametrize("outer", [pa.list_, pa.large_list])
def test_headers_may_be_of_any_text_and_bytes_even_where_rows_are_moved(text: pa.DataType, outer: Any) -> None:
    kind = outer(pa.struct([("key", text), ("value", pa.large_binary())]))
    headers = pa.array([[{"key": "h", "value": b"%d" % number}] for number in range(4)], kind)
    batch = values(*[b"x"] * 4, key=pa.array(["a", "b", "c", "d"], text), headers=headers)
    chunks = list(Splitter(batch.schema, Target("b", None, 0), PARTITIONS.__getitem__).chunks(batch))
    assert len(chunks) > 1
    found = sorted(pairs for chunk in chunks for pairs in chunk.batch.record_batch().headers or ())
    assert found == [(("h", b"%d" % number),) for number in range(4)]


def test_a_header_name_that_is_not_text_is_rejected() -> None:
    kind = pa.list_(pa.struct([("key", pa.binary()), ("value", pa.binary())]))
    batch = values(b"x", headers=pa.array([[{"key": b"\xff", "value": b""}]], kind))
    with pytest.raises(InvalidRequest, match="column 'headers' cannot be read"):
        list(Splitter(batch.schema, Target("a", None, 0), PARTITIONS.__getitem__).chunks(batch))


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int8(), pa.string())])
def test_the_topic_column_may_be_any_text(kind: pa.DataType) -> None:
    batch = values(b"x", b"y", b"z", topic=pa.array(["a", "b", "a"]).cast(kind))
    chunks = Splitter(batch.schema, Target(None, None, 0), PARTITIONS.__getitem__).chunks(batch)
    assert {chunk.topic: chunk.batch.record_batch().values for chunk in chunks} == {"a": [b"x", b"z"], "b": [b"y"]}


def test_rows_are_moved_once_however_many_topics_they_are_for(monkeypatch: pytest.MonkeyPatch) -> None:
    moves: list[int] = []
    inner = headrace.flight.writing._grouped

    def side_by_side(labels: Any, columns: dict[str, pa.Array]) -> Any:
        moves.append(len(labels))
        return inner(labels, columns)

    monkeypatch.setattr(headrace.flight.writing, "_grouped", side_by_side)
    names = [f"t{number % 50}" for number in range(500)]
    batch = pa.RecordBatch.from_pydict({"value": pa.array([b"x"] * 500, pa.binary()), "topic": names})
    chunks = list(Splitter(batch.schema, Target(None, None, 0), lambda topic: 1).chunks(batch))
    assert [(chunk.topic, len(chunk.batch)) for chunk in chunks] == [(f"t{number}", 10) for number in range(50)]
    assert moves == [500]


def test_a_key_that_is_too_large_is_rejected_before_it_is_hashed(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[int] = []
    monkeypatch.setattr(headrace.flight.writing, "fnv1a", lambda keys: hashed.append(len(keys)))
    batch = pa.RecordBatch.from_pydict({"value": pa.array([b"x"] * 2, pa.binary()), "key": [bytes(KEY_BYTES_MAX + 1), b"k"]})
    with pytest.raises(RecordTooLarge):
        list(Splitter(batch.schema, Target("t", None, 0), lambda topic: 2).chunks(batch))
    assert hashed == []
