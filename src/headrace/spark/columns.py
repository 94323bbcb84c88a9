"""The columns of the source: those of Spark's Kafka source, in its order. A schema given by the user picks some of them.

Spark does not tell a Python source which columns a query uses, so `.schema("value binary")` is how a job says it: only those columns
leave the broker.
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
    """What `load()` gives without a schema of the user's."""
    return StructType([StructField(name, kind) for name, kind in COLUMNS.items() if headers or name != "headers"])


def check_columns(schema: StructType) -> tuple[str, ...]:
    """The names to read. Raises `ConfigError` for a column that is not there, or is of another type."""
    for field in schema.fields:
        kind = COLUMNS.get(field.name)
        if kind is None:
            raise ConfigError(f"the schema has a column {field.name}, and a topic has {', '.join(COLUMNS)}")
        if field.dataType != kind:
            raise ConfigError(
                f"the schema has {field.name} as {field.dataType.simpleString()}, and it is {kind.simpleString()}; cast it after load()"
            )
        if not field.nullable and field.name in _MAY_BE_NULL:
            raise ConfigError(f"the schema has {field.name} as not null, and a record may have none")
    return tuple(schema.fieldNames())
