"""Typed values: record batches with bytes become record batches with typed values, for `headrace.arrow.read` and the tasks of Spark.

`bad_records` decides what happens to a value that cannot be decoded. A move to the dead letters is durable before the batch is returned,
and idempotent: a repeated read moves no record twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import pyarrow as pa

from headrace.arrow.reader_spec import ReaderSpec
from headrace.errors import BrokerError, HeadraceError
from headrace.flight.client import FlightClient, TopicSchema
from headrace.limits import DEAD_LETTERS_MOVED_MAX
from headrace.schemas.shapes import Decimal, Kind, ListOf, MapOf, Record, Shape

BAD_RECORDS: Final = ("fail", "dlq", "null")
REASON: Final = "unreadable"
"""Reason stored with the dead letters."""
ERROR_COLUMN: Final = "_error"
_CONVERSION_ERRORS: Final = (pa.ArrowException, ValueError, TypeError, OverflowError)
_SCALARS: Final = {
    Kind.BOOLEAN: pa.bool_(),
    Kind.INT8: pa.int8(),
    Kind.INT16: pa.int16(),
    Kind.INT32: pa.int32(),
    Kind.INT64: pa.int64(),
    Kind.FLOAT32: pa.float32(),
    Kind.FLOAT64: pa.float64(),
    Kind.STRING: pa.string(),
    Kind.BINARY: pa.binary(),
    Kind.DATE: pa.date32(),
    Kind.TIMESTAMP: pa.timestamp("us", "UTC"),
    Kind.TIMESTAMP_NTZ: pa.timestamp("us"),
    Kind.JSON: pa.string(),
}


def arrow_type(shape: Shape) -> pa.DataType:
    """Return the Arrow type. All fields are nullable, because an older version may lack a field that the schema requires."""
    match shape:
        case Kind():
            return _SCALARS[shape]
        case Decimal():
            return pa.decimal128(shape.precision, shape.scale)
        case ListOf():
            return pa.list_(arrow_type(shape.item))
        case MapOf():
            return pa.map_(_SCALARS[shape.key], arrow_type(shape.value))
        case Record():
            return pa.struct([(field.name, arrow_type(field.shape)) for field in shape.fields])


class UnreadableRecord(HeadraceError):
    """A value cannot be decoded, and bad records are an error."""

    def __init__(self, topic: str, partition: int, offset: int, fault: str, format: str) -> None:
        super().__init__(
            f"topic {topic}, partition {partition}, offset {offset}: the value cannot be read as {format}: {fault} "
            '(badRecords, in Python bad_records: "dlq" moves such records to the dead letters, "null" sets their value to null)'
        )
        self.topic, self.partition, self.offset, self.fault, self.format = topic, partition, offset, fault, format

    def __reduce__(self) -> tuple[type[UnreadableRecord], tuple[str, int, int, str, str]]:
        return UnreadableRecord, (self.topic, self.partition, self.offset, self.fault, self.format)


def _once(request: Callable[[], int]) -> int:
    return request()


@dataclass(slots=True)
class Decoder:
    """Decoder of values. Spark creates it on the driver and pickles it to the tasks."""

    spec: ReaderSpec
    schema: pa.Schema
    """Schema of the output."""
    value_type: pa.DataType
    """Type of the values; needed even if the output has only the column `_error`."""
    bad_records: str
    """One of `BAD_RECORDS`."""
    retry: Callable[[Callable[[], int]], int] = _once
    """Repeats a move to the dead letters while the broker is unavailable."""
    refreshes_schema: bool = False
    """Whether to look for newer versions of the schema in the registry."""

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns to read."""
        output = [name for name in self.schema.names if name != ERROR_COLUMN]
        needed = ["value"] if self._is_needed() else []
        if needed and self.bad_records != "null":
            needed += ["partition", "offset"]  # for errors and dead letters
        return tuple(dict.fromkeys(output + needed))

    def _is_needed(self) -> bool:
        return "value" in self.schema.names or ERROR_COLUMN in self.schema.names

    def decode(self, batch: pa.RecordBatch, topic: str, client: FlightClient) -> pa.RecordBatch:
        """Decode a batch. The client is asked for new versions of the schema, and moves dead letters.

        Raises `UnreadableRecord` for a bad record if `bad_records` is `fail`.
        """
        if not self._is_needed():
            return self._output(batch, None, {})
        values, faults = self._values(batch.column("value"), topic, client)
        if faults and self.bad_records == "fail":
            first = min(faults)
            place = (batch.column("partition")[first].as_py(), batch.column("offset")[first].as_py())
            raise UnreadableRecord(topic, *place, faults[first], self.spec.format)
        if faults and self.bad_records == "dlq":
            self._move_to_dead_letters(batch, topic, faults, client)
            mask = pa.array([index not in faults for index in range(batch.num_rows)], pa.bool_())
            return self._output(batch.filter(mask), values.filter(mask), {})
        return self._output(batch, values, faults)

    # Values

    def _values(self, column: pa.Array, topic: str, client: FlightClient) -> tuple[pa.Array, dict[int, str]]:
        if self.spec.format == "string":
            try:
                return column.cast(pa.string()), {}
            except pa.ArrowInvalid:
                pass  # some value is not UTF-8: decode one by one to find it
        wanted = self.value_type
        raw = column.to_pylist()
        rows, faults = self.spec.reader().read(raw)
        if faults and self.refreshes_schema:
            self._refresh_schema(client.schema, topic, raw, rows, faults)
        try:
            return pa.array(rows, wanted), faults
        except _CONVERSION_ERRORS:
            _null_unconvertible(rows, wanted, 0, len(rows), faults)
            return pa.array(rows, wanted), faults

    def _refresh_schema(
        self,
        registered: Callable[[str], TopicSchema | None],
        topic: str,
        raw: Sequence[bytes | None],
        rows: list[Any],
        faults: dict[int, str],
    ) -> None:
        """Decode the failed values again if the registry has new versions of the schema."""
        try:
            found = registered(topic)
        except BrokerError:
            return  # without the registry, the known versions apply
        if found is None or found.kind != self.spec.format:
            return
        known = (self.spec.definition, *self.spec.others)
        new = tuple(one for one in (found.definition, *found.others) if one not in known)
        if not new:
            return
        self.spec = replace(self.spec, others=(*self.spec.others, *new))
        again = sorted(faults)
        better, worse = self.spec.reader().read([raw[index] for index in again])
        for place, index in enumerate(again):
            rows[index] = better[place]
            if place in worse:
                faults[index] = worse[place]
            else:
                del faults[index]

    # Output

    def _output(self, batch: pa.RecordBatch, values: pa.Array | None, faults: dict[int, str]) -> pa.RecordBatch:
        arrays: list[pa.Array] = []
        for field in self.schema:
            if field.name == "value":
                arrays.append(values)
            elif field.name == ERROR_COLUMN:
                arrays.append(pa.array([faults.get(index) for index in range(batch.num_rows)] if faults else _nulls(batch), pa.string()))
            else:
                column = batch.column(field.name)
                arrays.append(column if column.type == field.type else column.cast(field.type))
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)

    def _move_to_dead_letters(self, batch: pa.RecordBatch, topic: str, faults: dict[int, str], client: FlightClient) -> None:
        indexes = sorted(faults)
        for start in range(0, len(indexes), DEAD_LETTERS_MOVED_MAX):
            some = indexes[start : start + DEAD_LETTERS_MOVED_MAX]
            letters = {
                "partition": batch.column("partition").take(pa.array(some)),
                "offset": batch.column("offset").take(pa.array(some)),
                "error": pa.array([f"as {self.spec.format}: {faults[index]}" for index in some], pa.string()),
                "reason": pa.array([REASON] * len(some), pa.string()),
            }
            moved = pa.RecordBatch.from_pydict(letters)
            self.retry(partial(client.dead_letters, topic, moved))


def _nulls(batch: pa.RecordBatch) -> pa.Array:
    return pa.nulls(batch.num_rows, pa.string())


def _null_unconvertible(rows: list[Any], wanted: pa.DataType, start: int, stop: int, faults: dict[int, str]) -> None:
    """Set rows that Arrow cannot convert to null, by bisection: a decimal with too many digits, a type of another version."""
    try:
        pa.array(rows[start:stop], wanted)
    except _CONVERSION_ERRORS as error:
        if stop - start == 1:
            rows[start] = None
            faults[start] = str(error)[:300]
            return
        middle = (start + stop) // 2
        _null_unconvertible(rows, wanted, start, middle, faults)
        _null_unconvertible(rows, wanted, middle, stop, faults)
