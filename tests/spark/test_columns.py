"""The columns of the source, and their selection by a schema."""

from __future__ import annotations

import pyarrow as pa
import pytest
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import BinaryType, LongType, StringType, StructField, StructType

from headrace.errors import ConfigError
from headrace.flight.client import READ_SCHEMA
from headrace.spark.columns import check_columns, raw_schema


def test_the_columns_are_those_of_kafkas_source_in_its_order() -> None:
    assert raw_schema(headers=False).simpleString() == (
        "struct<key:binary,value:binary,topic:string,partition:int,offset:bigint,timestamp:timestamp,timestampType:int>"
    )
    assert raw_schema(headers=True).fieldNames()[-1] == "headers"
    assert raw_schema(headers=True)["headers"].dataType.simpleString() == "array<struct<key:string,value:binary>>"


def test_what_the_flight_endpoint_sends_is_what_spark_expects() -> None:
    expected: pa.Schema = to_arrow_schema(raw_schema(headers=True), timezone="UTC")
    assert expected.equals(READ_SCHEMA)


def test_a_schema_picks_columns_in_any_order() -> None:
    picked = StructType([StructField("offset", LongType()), StructField("value", BinaryType())])
    assert check_columns(picked) == ("offset", "value")


@pytest.mark.parametrize(
    "field, message",
    [
        (StructField("ofset", LongType()), "the schema has an unknown column ofset; a topic has key, value, topic"),
        (StructField("Value", BinaryType()), "the schema has an unknown column Value"),
        (StructField("value", StringType()), "the schema has value as string, expected binary; cast it after load"),
        (StructField("key", BinaryType(), nullable=False), "the schema has key as not null, but it may be null in a record"),
    ],
)
def test_a_schema_that_does_not_fit_is_rejected(field: StructField, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_columns(StructType([field]))


def test_a_column_that_is_never_null_may_say_so() -> None:
    assert check_columns(StructType([StructField("offset", LongType(), nullable=False)])) == ("offset",)
