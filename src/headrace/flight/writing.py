"""Conversion of Arrow record batches to column batches, whole columns at a time.

    record batch ─ cast columns ─ partition of each row ─ group rows by partition (one `take`) ─ split at the batch size ─ column batches

The partition of a row is its `partition`, else the hash of its key (the same FNV-1a as in every protocol), else the next in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from google_crc32c import value as crc32c

from headrace.broker.publishing.partitioner import hashes
from headrace.engine.contract import Placement
from headrace.errors import InvalidRequest, LimitExceeded, RecordTooLarge, UnknownPartition
from headrace.flight.arrays import Binary, Int64s, as_binary, cast, checked, fnv1a, header_blobs, texts_as_bytes
from headrace.flight.put_schema import check_put_schema, column_names
from headrace.flight.request import HEADERS
from headrace.limits import (
    BATCH_BYTES_TARGET,
    BATCH_RECORDS_MAX,
    FLIGHT_IN_FLIGHT_BYTES_MAX,
    FLIGHT_PUT_ROWS_MAX,
    KEY_BYTES_MAX,
    KIB,
    VALUE_BYTES_MAX,
)
from headrace.records import Column, ColumnBatch

_STORED: Final = ("key", "value", "headers", "timestamp")
_CHECKSUM_BYTES_MIN: Final = 512 * KIB
"""Size of a column from which on its checksum is computed on this thread, while the log writes earlier chunks."""
_MILLIS_MAX: Final = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class Chunk:
    """One batch of records with its topic and partition."""

    topic: str
    partition: int
    batch: ColumnBatch


@dataclass(frozen=True, slots=True)
class Target:
    """The destination of rows that have no `topic` or `partition` of their own."""

    topic: str | None
    """None: the column `topic` has it."""
    partition: int | None
    turn: int
    """Selects the partition of rows without a key, modulo the partition count."""


class Splitter:
    """Splits the record batches of a put into chunks. The schema is checked once. `partitions` returns the partition count of a topic."""

    def __init__(self, schema: pa.Schema, target: Target, partitions: Callable[[str], int], placement: Placement = Placement.FNV1A) -> None:
        check_put_schema(schema, topic=target.topic)
        self._names = column_names(schema)
        self._target = target
        self._partitions = partitions
        self._placement = placement
        self._known: dict[str, int] = {}
        if target.topic is not None:
            self._count(target.topic)

    def chunks(self, batch: pa.RecordBatch) -> Iterator[Chunk]:
        """Yield chunks, in the order of the rows within each partition.

        Raises `InvalidRequest`, `RecordTooLarge`, `LimitExceeded`, `UnknownPartition`.
        """
        if not batch.num_rows:
            return
        check_rows(batch)
        columns = {name: _plain(batch.column(index), name) for index, name in enumerate(self._names)}
        if self._target.topic is not None:
            yield from self._of_topic(self._target.topic, columns)
            return
        topics = columns["topic"]
        if topics.null_count:
            raise InvalidRequest("column 'topic' is null in a row, and the request names no topic")
        coded = columns.pop("topic").dictionary_encode()
        names = coded.dictionary.to_pylist()
        if len(names) == 1:
            yield from self._of_topic(names[0], columns)
            return
        for code, rows in _grouped(coded.indices.to_numpy(), columns):
            yield from self._of_topic(names[code], rows)

    def _of_topic(self, topic: str, columns: dict[str, pa.Array]) -> Iterator[Chunk]:
        partitions = self._partitions_of(topic, columns)
        chosen = {name: array for name, array in columns.items() if name in _STORED}
        if isinstance(partitions, int):
            yield from _split(topic, partitions, chosen)
            return
        for partition, part in _grouped(partitions, chosen):
            yield from _split(topic, partition, part)

    def _partitions_of(self, topic: str, columns: dict[str, pa.Array]) -> int | npt.NDArray[np.int64]:
        """Return the partition of each row, or one for all rows."""
        count = self._count(topic)
        if self._target.partition is not None:
            return _within(topic, self._target.partition, count)
        given = columns.get("partition")
        if given is not None and given.null_count < len(given):
            return self._given_partitions(topic, count, given, columns.get("key"))
        return self._keyed_partitions(count, columns.get("key"))

    def _given_partitions(self, topic: str, count: int, given: pa.Array, keys: pa.Array | None) -> int | npt.NDArray[np.int64]:
        lowest, highest = pc.min_max(given).as_py().values()
        _within(topic, lowest, count)
        _within(topic, highest, count)
        if lowest == highest and not given.null_count:
            return int(lowest)
        otherwise = self._keyed_partitions(count, keys)
        placed: npt.NDArray[np.int64] = pc.fill_null(given.cast(pa.int64()), 0).to_numpy(zero_copy_only=False)
        if given.null_count:
            placed = np.where(pc.is_valid(given).to_numpy(zero_copy_only=False), placed, otherwise)
        return placed

    def _keyed_partitions(self, count: int, keys: pa.Array | None) -> int | npt.NDArray[np.int64]:
        turn = self._target.turn % count
        if count == 1 or keys is None or keys.null_count == len(keys):
            return turn
        column = Binary(keys)
        _check_sizes(column, KEY_BYTES_MAX)  # before hashing, whose time grows with the size
        places: npt.NDArray[np.int64]
        if self._placement is Placement.FNV1A:
            places = (fnv1a(column) % np.uint32(count)).astype(np.int64)
        else:
            places = np.array(hashes([key or b"" for key in keys.to_pylist()], self._placement), np.int64) % count
        return places if column.valid is None else np.where(column.valid, places, turn)

    def _count(self, topic: str) -> int:
        count = self._known.get(topic)
        if count is None:
            count = self._known[topic] = self._partitions(topic)
        return count


def _grouped(labels: npt.NDArray[Any], columns: dict[str, pa.Array]) -> Iterator[tuple[int, dict[str, pa.Array]]]:
    """Yield the rows of each label, in their order. All rows are moved once, for any number of labels."""
    order = np.argsort(labels, kind="stable")
    picked, ordered = pa.array(order), labels[order]
    moved = {name: array.take(picked) for name, array in columns.items()}
    borders = (np.flatnonzero(np.diff(ordered)) + 1).tolist()
    for start, stop in zip([0, *borders], [*borders, len(order)], strict=True):
        yield int(ordered[start]), {name: array.slice(start, stop - start) for name, array in moved.items()}


def _within(topic: str, partition: int, count: int) -> int:
    if not 0 <= partition < count:
        raise UnknownPartition(topic, partition)
    return partition


def check_rows(batch: pa.RecordBatch) -> None:
    if batch.num_rows > FLIGHT_PUT_ROWS_MAX:
        raise LimitExceeded(f"a record batch of {batch.num_rows} rows exceeds the limit of {FLIGHT_PUT_ROWS_MAX}")


def _plain(array: pa.Array, name: str) -> pa.Array:
    """Convert a column to its canonical type. Raises `InvalidRequest`, `LimitExceeded`."""
    if name in ("value", "key"):
        return as_binary(checked(texts_as_bytes(array), name), name)
    array = checked(array, name)
    if name == "timestamp":
        return _times(array)
    wanted = {"headers": HEADERS, "topic": pa.string()}.get(name, array.type)
    return array if array.type == wanted else cast(array, wanted, name)


def _times(array: pa.Array) -> pa.Array:
    """Convert timestamps to Unix ms, rounded down."""
    if array.null_count:
        raise InvalidRequest("column 'timestamp' is null in a row; omit the column to use the broker's clock")
    plain = array.cast(pa.int64())  # units since 1970 in UTC, in any time zone
    per_ms = {"s": (1000, 1), "ms": (1, 1), "us": (1, 1000), "ns": (1, 1_000_000)}[array.type.unit]
    numbers = plain.to_numpy(zero_copy_only=False)
    if per_ms[0] > 1 and len(numbers) and int(numbers.max()) > _MILLIS_MAX // per_ms[0]:
        raise InvalidRequest("column 'timestamp' has a time beyond the range of Unix ms")
    return pa.array(numbers * per_ms[0] // per_ms[1])


def _split(topic: str, partition: int, rows: dict[str, pa.Array]) -> Iterator[Chunk]:
    """Split the rows of one partition into batches of the target size, or of one larger record."""
    values = Binary(rows["value"])
    keys = Binary(rows["key"]) if "key" in rows and rows["key"].null_count < len(rows["key"]) else None
    headers = header_blobs(rows["headers"]) if "headers" in rows else None
    times: Int64s | None = rows["timestamp"].to_numpy() if "timestamp" in rows else None
    _check_sizes(values, VALUE_BYTES_MAX)
    # Chunks that are not copied keep the whole record batch in memory until they are written.
    in_place = len(values.content) <= FLIGHT_IN_FLIGHT_BYTES_MAX
    total: Int64s = values.ends - values.ends[0]
    for column in (keys, headers):
        if column is not None:
            total = total + (column.ends - column.ends[0])
    if keys is not None:
        _check_sizes(keys, KEY_BYTES_MAX)
    start, count = 0, len(values)
    while start < count:
        stop = int(np.searchsorted(total, total[start] + BATCH_BYTES_TARGET, "right")) - 1
        stop = min(max(stop, start + 1), start + BATCH_RECORDS_MAX, count)
        record_batch = ColumnBatch(
            _column(values, start, stop, in_place=in_place),
            None if keys is None else _column(keys, start, stop),
            None if headers is None else _column(headers, start, stop),
            None if times is None else times[start:stop].tobytes(),
        )
        yield Chunk(topic, partition, record_batch)
        start = stop


def _check_sizes(column: Binary, bytes_max: int) -> None:
    if int(column.ends[-1] - column.ends[0]) > bytes_max and (largest := int(column.lengths.max())) > bytes_max:
        raise RecordTooLarge(size_bytes=largest, bytes_max=bytes_max)


def _column(column: Binary, start: int, stop: int, *, in_place: bool = False) -> Column:
    """Return some items. `checked` has validated them, and Arrow never changes a buffer."""
    begin, end = int(column.ends[start]), int(column.ends[stop])
    offsets = (column.ends[start : stop + 1] - begin).astype(np.uint32)
    validity = None if column.valid is None else np.packbits(column.valid[start:stop], bitorder="little").tobytes()
    content = column.content[begin:end]
    if not in_place:
        return Column(offsets.tobytes(), content.tobytes(), validity, is_checked=True)
    buffer = pa.py_buffer(content)
    checksum = crc32c(buffer) if len(content) >= _CHECKSUM_BYTES_MIN else None
    return Column(offsets.tobytes(), buffer, validity, is_checked=True, checksum=checksum)
