"""Columns of the source: those of Spark's Kafka source, in the same order. A schema from the user selects some of them.

Spark does not pass the columns that a query uses to a Python source. With `.schema("value binary")` the broker sends only that column.
"""

from __future__ import annotations

from typing import Final

from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from headrace.errors import ConfigError

HEADERS: Final = ArrayType(StructType([StructField("key", StringType()), StructField("value", BinaryType())]))
COLUMNS: Final[dict[str, DataType]] = {
    "key": BinaryType(),
    "value": BinaryType(),
    "topic": StringType(),
    "partition": IntegerType(),
    "offset": LongType(),
    "timestamp": TimestampType(),
    "timestampType": IntegerType(),
    "headers": HEADERS,
}
_MAY_BE_NULL: Final = ("key", "value", "headers")


def raw_schema(*, headers: bool) -> StructType:
    """Return the schema of `load()` when the user gives none."""
    return StructType([StructField(name, kind) for name, kind in COLUMNS.items() if headers or name != "headers"])


def check_columns(schema: StructType) -> tuple[str, ...]:
    """Return the names to read. Raises `ConfigError` for an unknown column or a wrong type."""
    for field in schema.fields:
        kind = COLUMNS.get(field.name)
        if kind is None:
            raise ConfigError(f"the schema has an unknown column {field.name}; a topic has {', '.join(COLUMNS)}")
        if field.dataType != kind:
            raise ConfigError(
                f"the schema has {field.name} as {field.dataType.simpleString()}, expected {kind.simpleString()}; cast it after load()"
            )
        if not field.nullable and field.name in _MAY_BE_NULL:
            raise ConfigError(f"the schema has {field.name} as not null, but it may be null in a record")
    return tuple(schema.fieldNames())
