"""The tables of docs/spark.md about typed values are correct."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql.types import StructType

from headrace.arrow.values import BAD_RECORDS
from headrace.spark.values import typed_schema
from tests.spark.values.registry import Registry, options

PAGE = (Path(__file__).parents[3] / "docs" / "spark.md").read_text(encoding="utf-8")
_ROW = re.compile(r"^\| `(?P<left>[^`]*)` \| `(?P<right>[^`]*)` \|$", re.MULTILINE)


def rows(heading: str) -> Iterator[tuple[str, str]]:
    """The rows of the first table under a heading."""
    section = PAGE.split(f"### {heading}\n", 1)[1].split("\n##", 1)[0]
    return ((row["left"], row["right"]) for row in _ROW.finditer(section))


CASES = [
    *(("json", *row) for row in rows("JSON Schema to Spark")),
    *(("avro", *row) for row in rows("Avro to Spark")),
    *(("protobuf", *row) for row in rows("Protobuf to Spark")),
]


@pytest.mark.parametrize(("format", "schema", "expected"), CASES, ids=[f"{format} {schema}" for format, schema, _ in CASES])
def test_a_row_of_the_page_is_true(format: str, schema: str, expected: str) -> None:
    text = f'syntax = "proto3"; message M {{ {schema} }}' if format == "protobuf" else schema
    value = typed_schema(options(value_format=format, value_schema=text), Registry().client)["value"].dataType
    if format == "protobuf":
        assert isinstance(value, StructType)
        value = value["f"].dataType
    assert value.simpleString() == expected


def test_the_tables_are_found() -> None:
    assert [sum(case[0] == format for case in CASES) for format in ("json", "avro", "protobuf")] == [17, 23, 13]


def test_every_way_to_treat_bad_records_is_described() -> None:
    section = PAGE.split("**Bad records.**", 1)[1].split("\n## ", 1)[0]
    for word in BAD_RECORDS:
        assert f"\n| `{word}` | " in section
