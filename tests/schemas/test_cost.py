"""Validation costs a bounded amount of work for any value and schema."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from headrace.errors import InvalidSchema
from headrace.limits import SCHEMA_FAULTS_MAX
from headrace.schemas import Compatibility, SchemaType, compile_schema
from headrace.schemas.json_document import Document
from headrace.schemas.json_schema import steps_per_place
from headrace.schemas.worker import Job, answer

MEGABYTE = b"[" + b"0," * (1 << 19) + b"0]"
WORDS = [f"word{number}" for number in range(250)]


def json_schema(definition: Any) -> Any:
    return compile_schema(SchemaType.JSON, msgspec.json.encode(definition))


def cpu_seconds(call: Callable[[], object]) -> float:
    before = time.process_time()
    call()
    return time.process_time() - before


@pytest.mark.parametrize(
    "definition",
    [
        {"items": {"type": "string"}},
        {"items": {"enum": WORDS}},
        {"anyOf": [{"items": {"type": "string"}}]},
        {"oneOf": [{"items": {"enum": WORDS}}, {"items": {"type": "null"}}]},
        {"not": {"items": {"type": "integer"}}},
        {"contains": {"enum": WORDS}},
        {"allOf": [{"maxItems": 0}] * 1000},
    ],
)
def test_a_value_that_is_wrong_everywhere_costs_no_more_than_one_that_is_wrong_once(definition: Any) -> None:
    schema = json_schema(definition)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    faults: list[str] = []
    assert cpu_seconds(lambda: faults.extend(schema.faults(MEGABYTE))) < 2
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 * 1024
    assert 1 <= len(faults) <= SCHEMA_FAULTS_MAX and all(len(fault) <= 200 for fault in faults)


def test_a_small_value_gets_several_faults() -> None:
    assert len(json_schema({"items": {"type": "string"}}).faults(b"[1,2,3]")) == 3


def test_missing_protobuf_fields_are_looked_for_until_enough_are_found() -> None:
    source = b'syntax="proto2"; message M { repeated N n=1; } message N { required int32 a=1; }'
    schema = compile_schema(SchemaType.PROTOBUF, source)
    faults = schema.faults(b"\x0a\x00" * 100_000)
    assert faults == [f"/n[{index}].a: missing" for index in range(SCHEMA_FAULTS_MAX)]


def test_comparing_large_enumerations_takes_linear_time() -> None:
    schema = json_schema({"enum": list(range(40_000))})
    assert cpu_seconds(lambda: schema.conflicts(schema)) < 5
    assert schema.conflicts(json_schema({"enum": [1.0, True]})) == [
        "/: the writer may write True, the reader's enumeration does not have it"
    ]


@pytest.mark.parametrize(
    ("definition", "least", "most"),
    [
        ({}, 1, 2),
        ({"properties": {f"p{number}": {"type": "string"} for number in range(500)}}, 2, 8),
        ({"items": {"anyOf": [{"const": number} for number in range(500)]}}, 1_000, 2_000),
        ({"items": {"enum": list(range(100))}}, 10_000, 20_000),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"allOf": [{"minLength": 1}] * 100}}}, 200, 400),
        ({"patternProperties": {f"^{number}": {} for number in range(100)}, "properties": {"x": {}}}, 100, 300),
        ({"properties": {"left": {"$ref": "#"}, "right": {"$ref": "#"}}}, 2, 10),
    ],
)
def test_the_steps_at_one_place_are_counted(definition: Any, least: int, most: int) -> None:
    assert least <= steps_per_place(Document(definition)) <= most


def test_an_avro_byte_pays_for_the_parts_that_take_none() -> None:
    fields = [{"name": f"f{number}", "type": "null"} for number in range(1000)]
    record = {"type": "record", "name": "r", "fields": [*fields, {"name": "b", "type": "boolean"}]}
    assert compile_schema(SchemaType.AVRO, msgspec.json.encode(record)).steps_per_byte > 1000
    assert compile_schema(SchemaType.AVRO, b'"string"').steps_per_byte < 20


def test_the_worker_answers_values_and_definitions() -> None:
    definition = b'{"type":"string"}'
    assert answer(Job(SchemaType.JSON, definition, [b'"a"', b"1"]), {}).faults == [[], ['/: 1 is not of type "string"']]
    old = (SchemaType.JSON, b'{"type":"integer"}')
    assert answer(Job(SchemaType.JSON, definition, old=old, mode=Compatibility.BACKWARD), {}).faults[0]
    assert answer(Job(SchemaType.JSON, b"{", mode=Compatibility.NONE), {}).invalid.startswith("the schema is not JSON")
    with pytest.raises(InvalidSchema):
        compile_schema(SchemaType.JSON, b"{")
