"""The columns of a written DataFrame: errors on the driver, and conversion for the Flight endpoint."""

from __future__ import annotations

import pickle
from collections.abc import Mapping

import pyarrow as pa
import pytest
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    DoubleType,
    IntegerType,
    LongType,
    MapType,
    NullType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from headrace.errors import ConfigError, InvalidRequest
from headrace.spark.sink_columns import COLUMNS, SinkColumns

TEXT, BYTES, INT, LONG = StringType(), BinaryType(), IntegerType(), LongType()
HEADERS = "array<struct<key:string,value:binary>>"


def pairs(name: str = "key", value: DataType = BYTES) -> ArrayType:
    return ArrayType(StructType().add(name, TEXT).add("value", value))


def columns(fields: Mapping[str, DataType], *, topic: str = "orders", headers: bool = True) -> SinkColumns:
    schema = StructType([StructField(name, kind) for name, kind in fields.items()])
    return SinkColumns.of(schema, topic=topic, headers=headers)


def error_of(fields: Mapping[str, DataType], *, topic: str = "orders") -> str:
    with pytest.raises(ConfigError) as failure:
        columns(fields, topic=topic)
    return str(failure.value)


@pytest.mark.parametrize(
    ("column", "kind", "found", "wanted"),
    [
        ("value", INT, "int", "string or binary"),
        ("value", StructType().add("a", INT), "struct<a:int>", "string or binary"),
        ("value", NullType(), "void", "string or binary"),
        ("key", LONG, "bigint", "string or binary"),
        ("partition", LONG, "bigint", "int"),
        ("partition", TEXT, "string", "int"),
        ("headers", TEXT, "string", HEADERS),
        ("headers", MapType(TEXT, BYTES), "map<string,binary>", HEADERS),
        ("headers", pairs(value=TEXT), "array<struct<key:string,value:string>>", HEADERS),
        ("headers", pairs("name"), "array<struct<name:string,value:binary>>", HEADERS),
    ],
)
def test_a_column_of_the_wrong_type_is_rejected_with_its_name_its_type_and_the_right_one(
    column: str, kind: DataType, found: str, wanted: str
) -> None:
    assert error_of({"value": TEXT, column: kind}) == f"column '{column}' has type {found}, expected {wanted}: cast it before the write"


def test_a_topic_column_has_to_be_text_unless_the_option_overrides_it() -> None:
    assert error_of({"value": TEXT, "topic": INT}, topic="") == "column 'topic' has type int, expected string: cast it before the write"
    assert columns({"value": TEXT, "topic": INT}).names == ("value",)


def test_a_missing_value_column_is_rejected_with_the_columns_there_are() -> None:
    text = error_of({"id": INT, "amount": DoubleType()})
    assert "no column 'value'" in text and "'id', 'amount'" in text and "to_json(struct(*))" in text


def test_without_option_and_column_there_is_no_topic_to_write_to() -> None:
    assert "no topic to write to" in error_of({"value": TEXT}, topic="")


def test_two_columns_of_one_name_are_rejected() -> None:
    twice = StructType().add("value", TEXT).add("value", TEXT)
    with pytest.raises(ConfigError, match="two columns 'value'"):
        SinkColumns.of(twice, topic="orders")


def test_columns_that_a_record_does_not_have_are_ignored() -> None:
    fields = {
        "offset": LONG,
        "value": BYTES,
        "timestamp": TimestampType(),
        "key": TEXT,
        "topic": TEXT,
        "headers": pairs(),
        "partition": INT,
    }
    assert columns(fields, topic="").names == COLUMNS
    assert columns(fields, headers=False).names == ("key", "value", "partition")


def test_rows_keep_their_order_and_get_the_types_of_the_flight_endpoint() -> None:
    batch = pa.RecordBatch.from_pydict(
        {
            "amount": [1.5, 2.5, 3.5],
            "topic": ["a", "b", "a"],
            "value": ["ü", None, ""],
            "key": [b"k", None, b"\xff"],
            "partition": pa.array([1, None, 0], pa.int32()),
            "headers": pa.array(
                [[{"key": "h", "value": b"1"}, {"key": "h", "value": None}], None, []],
                pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())])),
            ),
        }
    )
    shaped = columns(
        {"amount": DoubleType(), "topic": TEXT, "value": TEXT, "key": BYTES, "partition": INT, "headers": pairs()}, topic=""
    ).shape(batch)
    assert shaped.schema.names == ["key", "value", "headers", "topic", "partition"]
    assert shaped.schema.field("value").type == shaped.schema.field("key").type == pa.binary()
    assert shaped.to_pydict() == {
        "key": [b"k", None, b"\xff"],
        "value": ["ü".encode(), None, b""],
        "headers": [[{"key": "h", "value": b"1"}, {"key": "h", "value": None}], None, []],
        "topic": ["a", "b", "a"],
        "partition": [1, None, 0],
    }


def test_texts_become_bytes_without_a_copy() -> None:
    batch = pa.RecordBatch.from_pydict({"value": ["text"] * 1000})
    shaped = columns({"value": TEXT}).shape(batch)
    assert shaped.column("value").buffers()[2].address == batch.column("value").buffers()[2].address


def test_large_arrow_types_are_taken_too() -> None:
    batch = pa.RecordBatch.from_pydict({"value": pa.array(["a"], pa.large_string()), "key": pa.array([b"k"], pa.large_binary())})
    assert columns({"value": TEXT, "key": BYTES}).shape(batch).to_pydict() == {"key": [b"k"], "value": [b"a"]}


def test_a_row_without_a_topic_is_rejected() -> None:
    batch = pa.RecordBatch.from_pydict({"topic": ["a", None, None], "value": ["x", "y", "z"]})
    with pytest.raises(InvalidRequest, match="column 'topic' is null in 2 of 3 rows"):
        columns({"topic": TEXT, "value": TEXT}, topic="").shape(batch)


@pytest.mark.parametrize("header", [None, {"key": None, "value": b"x"}])
def test_a_header_without_a_name_is_rejected(header: object) -> None:
    kind = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
    batch = pa.RecordBatch.from_pydict({"value": ["x", "y"], "headers": pa.array([None, [header]], kind)})
    with pytest.raises(InvalidRequest, match="header without a name"):
        columns({"value": TEXT, "headers": pairs()}).shape(batch)


def test_the_columns_travel_to_the_tasks() -> None:
    chosen = columns({"value": TEXT, "key": TEXT})
    assert pickle.loads(pickle.dumps(chosen)) == chosen
