"""The task's part of typed values: record batches with bytes go in, record batches with typed values come out.

A value that cannot be read goes where `badRecords` says. Moving it to the dead letters is durable before the batch is handed on, and may be
asked for again: a task that is retried, or a batch that is replayed, moves nothing twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import pyarrow as pa

from headrace.errors import BrokerError, HeadraceError
from headrace.flight.client import FlightClient, Servers
from headrace.limits import DEAD_LETTERS_MOVED_MAX
from headrace.spark.connection import connect
from headrace.spark.endurance import Endurance
from headrace.spark.values.recipe import Recipe

REASON: Final = "unreadable"
"""What the dead letters say."""
ERROR_COLUMN: Final = "_error"
_CONVERSION_ERRORS: Final = (pa.ArrowException, ValueError, TypeError, OverflowError)


class UnreadableRecord(HeadraceError):
    """A value is not what its format says, and nobody said what to do about it."""

    def __init__(self, topic: str, partition: int, offset: int, fault: str, format: str) -> None:
        super().__init__(
            f"topic {topic}, partition {partition}, offset {offset}: the value cannot be read as {format}: {fault} "
            '(option badRecords "dlq" moves such records to the dead letters, "null" leaves their value out)'
        )
        self.topic, self.partition, self.offset, self.fault, self.format = topic, partition, offset, fault, format

    def __reduce__(self) -> tuple[type[UnreadableRecord], tuple[str, int, int, str, str]]:
        return UnreadableRecord, (self.topic, self.partition, self.offset, self.fault, self.format)


@dataclass(slots=True)
class Decoder:
    """Made on the driver, pickled to the tasks."""

    recipe: Recipe
    schema: pa.Schema
    """Of what comes out: exactly these columns, in this order."""
    value_type: pa.DataType
    """Also where the values themselves do not come out, but what is wrong with them."""
    bad_records: str
    """fail, dlq or null."""
    servers: Servers
    endurance: Endurance
    asks_again: bool = False
    """Whether the registry may know a version of the schema that it did not know when the query began."""

    @property
    def columns(self) -> tuple[str, ...]:
        """What has to be read for it."""
        asked = [name for name in self.schema.names if name != ERROR_COLUMN]
        needed = ["value"] if self._is_needed() else []
        if needed and self.bad_records != "null":
            needed += ["partition", "offset"]  # what an error or a dead letter has to name
        return tuple(dict.fromkeys(asked + needed))

    def _is_needed(self) -> bool:
        return "value" in self.schema.names or ERROR_COLUMN in self.schema.names

    def decode(self, batch: pa.RecordBatch, topic: str) -> pa.RecordBatch:
        """Raises `UnreadableRecord` if bad records are to fail the task."""
        if not self._is_needed():
            return self._dressed(batch, None, {})
        values, faults = self._values(batch.column("value"), topic)
        if faults and self.bad_records == "fail":
            first = min(faults)
            place = (batch.column("partition")[first].as_py(), batch.column("offset")[first].as_py())
            raise UnreadableRecord(topic, *place, faults[first], self.recipe.format)
        if faults and self.bad_records == "dlq":
            self._bury(batch, topic, faults)
            mask = pa.array([index not in faults for index in range(batch.num_rows)], pa.bool_())
            return self._dressed(batch.filter(mask), values.filter(mask), {})
        return self._dressed(batch, values, faults)

    # Values

    def _values(self, column: pa.Array, topic: str) -> tuple[pa.Array, dict[int, str]]:
        if self.recipe.format == "string":
            try:
                return column.cast(pa.string()), {}
            except pa.ArrowInvalid:
                pass  # not all of them are UTF-8: one by one, to say which
        wanted = self.value_type
        raw = column.to_pylist()
        rows, faults = self.recipe.reader().read(raw)
        if faults and self.asks_again:
            self._learn(topic, raw, rows, faults)
        try:
            return pa.array(rows, wanted), faults
        except _CONVERSION_ERRORS:
            _weed(rows, wanted, 0, len(rows), faults)
            return pa.array(rows, wanted), faults

    def _learn(self, topic: str, raw: Sequence[bytes | None], rows: list[Any], faults: dict[int, str]) -> None:
        """Somebody may have registered a new version since the query began."""
        try:
            found = connect(self.servers).schema(topic)
        except BrokerError:
            return  # whoever is not there, or may not be asked, leaves things as they were
        if found is None or found.kind != self.recipe.format:
            return
        known = (self.recipe.definition, *self.recipe.others)
        new = tuple(one for one in (found.definition, *found.others) if one not in known)
        if not new:
            return
        self.recipe = replace(self.recipe, others=(*self.recipe.others, *new))
        again = sorted(faults)
        better, worse = self.recipe.reader().read([raw[index] for index in again])
        for place, index in enumerate(again):
            rows[index] = better[place]
            if place in worse:
                faults[index] = worse[place]
            else:
                del faults[index]

    # What comes out

    def _dressed(self, batch: pa.RecordBatch, values: pa.Array | None, faults: dict[int, str]) -> pa.RecordBatch:
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

    def _bury(self, batch: pa.RecordBatch, topic: str, faults: dict[int, str]) -> None:
        client: FlightClient = connect(self.servers)
        indexes = sorted(faults)
        for start in range(0, len(indexes), DEAD_LETTERS_MOVED_MAX):
            some = indexes[start : start + DEAD_LETTERS_MOVED_MAX]
            letters = {
                "partition": batch.column("partition").take(pa.array(some)),
                "offset": batch.column("offset").take(pa.array(some)),
                "error": pa.array([f"as {self.recipe.format}: {faults[index]}" for index in some], pa.string()),
                "reason": pa.array([REASON] * len(some), pa.string()),
            }
            moved = pa.RecordBatch.from_pydict(letters)
            self.endurance.throughout(partial(client.dead_letters, topic, moved))


def _nulls(batch: pa.RecordBatch) -> pa.Array:
    return pa.nulls(batch.num_rows, pa.string())


def _weed(rows: list[Any], wanted: pa.DataType, start: int, stop: int, faults: dict[int, str]) -> None:
    """Find the rows that Arrow does not take (a decimal with too many digits, a type that another version had) by halves."""
    try:
        pa.array(rows[start:stop], wanted)
    except _CONVERSION_ERRORS as error:
        if stop - start == 1:
            rows[start] = None
            faults[start] = str(error)[:300]
            return
        middle = (start + stop) // 2
        _weed(rows, wanted, start, middle, faults)
        _weed(rows, wanted, middle, stop, faults)
