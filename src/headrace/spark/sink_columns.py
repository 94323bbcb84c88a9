"""Columns of a written DataFrame, and their conversion for the Flight endpoint.

    column      Spark type                                   meaning
    value       string | binary, required                    the value; null is a tombstone
    key         string | binary                              the key, which selects the partition
    headers     array<struct<key: string, value: binary>>    the headers, in order
    topic       string, unless the option `topic` is set     the topic
    partition   int                                          the partition; null: the key selects it

Names, types and rules are those of Spark's Kafka sink. Other columns are ignored, including `timestamp`: a record has the time of its
publication, because consumers and retention rely on times that never exceed the time of the append.

The driver checks the schema before any task starts. A task checks only that each row has a topic and each header a name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from headrace.errors import ConfigError, InvalidRequest

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import DataType, StructType

COLUMNS: Final = ("key", "value", "headers", "topic", "partition")
HEADERS_TYPE: Final = "array<struct<key:string,value:binary>>"


@dataclass(frozen=True, slots=True)
class SinkColumns:
    """Names of the columns to write, in the order of `COLUMNS`."""

    names: tuple[str, ...]

    @classmethod
    def of(cls, schema: StructType, *, topic: str, headers: bool = True) -> SinkColumns:
        """Check the schema. The option `topic` overrides the column; without `headers` that column is omitted."""
        found = _written_fields(schema)
        if "value" not in found:
            raise ConfigError(_no_value(schema))
        if "topic" not in found and not topic:
            raise ConfigError("no topic to write to: set the option 'topic', or add a column 'topic' of type string")
        if topic:
            found.pop("topic", None)
        if not headers:
            found.pop("headers", None)
        for name, kind in found.items():
            wanted, fits = _RULES[name]
            if not fits(kind):
                raise ConfigError(f"column '{name}' has type {kind.simpleString()}, expected {wanted}: cast it before the write")
        return cls(tuple(name for name in COLUMNS if name in found))

    def shape(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return the rows with only these columns, in the types of the Flight endpoint. Strings become bytes without a copy."""
        import pyarrow as pa

        types = _arrow_types()
        columns = []
        for name in self.names:
            column = batch.column(batch.schema.get_field_index(name))
            columns.append(column if column.type == types[name] else column.cast(types[name]))
            _check_rows(name, column)
        return pa.RecordBatch.from_arrays(columns, schema=pa.schema([pa.field(name, types[name]) for name in self.names]))


def _written_fields(schema: StructType) -> dict[str, DataType]:
    found: dict[str, DataType] = {}
    for field in schema.fields:
        if field.name in found:
            raise ConfigError(f"the DataFrame has two columns '{field.name}'")
        if field.name in COLUMNS:
            found[field.name] = field.dataType
    return found


def _no_value(schema: StructType) -> str:
    names = ", ".join(f"'{name}'" for name in schema.fieldNames()) or "none"
    return f"no column 'value' of type string or binary among the columns ({names}); to_json(struct(*)) AS value makes one from the others"


def _is_text_or_bytes(kind: DataType) -> bool:
    from pyspark.sql.types import BinaryType, StringType

    return isinstance(kind, StringType | BinaryType)


def _is_text(kind: DataType) -> bool:
    from pyspark.sql.types import StringType

    return isinstance(kind, StringType)


def _is_int(kind: DataType) -> bool:
    from pyspark.sql.types import IntegerType

    return isinstance(kind, IntegerType)


def _is_headers(kind: DataType) -> bool:
    """Ignore nullability: few plans can prove that header names are not null, so tasks check the rows."""
    from pyspark.sql.types import ArrayType, StructType

    return isinstance(kind, ArrayType) and isinstance(kind.elementType, StructType) and kind.simpleString() == HEADERS_TYPE


_RULES: Final[dict[str, tuple[str, Callable[[Any], bool]]]] = {
    "key": ("string or binary", _is_text_or_bytes),
    "value": ("string or binary", _is_text_or_bytes),
    "headers": (HEADERS_TYPE, _is_headers),
    "topic": ("string", _is_text),
    "partition": ("int", _is_int),
}


def _arrow_types() -> dict[str, pa.DataType]:
    import pyarrow as pa

    return {
        "key": pa.binary(),
        "value": pa.binary(),
        "headers": pa.list_(pa.struct([pa.field("key", pa.string()), pa.field("value", pa.binary())])),
        "topic": pa.string(),
        "partition": pa.int32(),
    }


def _check_rows(name: str, column: pa.Array) -> None:
    if name == "topic" and column.null_count:
        raise InvalidRequest(
            f"column 'topic' is null in {column.null_count} of {len(column)} rows: give each row a topic, or set the option 'topic'"
        )
    if name == "headers" and len(column) > column.null_count:
        headers = column.flatten()
        if headers.null_count or headers.field("key").null_count:
            raise InvalidRequest("column 'headers' holds a header without a name")
