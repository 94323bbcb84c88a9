"""Invalid Arrow messages: offsets, views and indices outside their buffers, invalid UTF-8, columns that are large when unpacked.

Arrow decodes them without validation. The broker returns an error, stores nothing, and continues.
"""

from __future__ import annotations

import json
import struct
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import flight

import headrace.flight.arrays
import headrace.flight.writing
from headrace.errors import InvalidRequest, LimitExceeded
from headrace.flight.arrays import as_binary, checked
from headrace.flight.client import FlightClient
from headrace.flight.puts import LettersPut
from headrace.flight.writing import Splitter, Target
from headrace.limits import MIB
from tests.flight.harness import ROOT, Harness, rows, values

TWO = pa.array([b"a", b"b"], pa.binary())
PAIR = pa.struct([("key", pa.string()), ("value", pa.binary())])


def binary(kind: pa.DataType, ends: list[int], content: bytes) -> pa.Array:
    """Return an array with these offsets, valid or not."""
    width = np.int64 if kind in (pa.large_binary(), pa.large_string()) else np.int32
    return pa.Array.from_buffers(kind, len(ends) - 1, [None, pa.py_buffer(np.array(ends, width).tobytes()), pa.py_buffer(content)])


def view(kind: pa.DataType, length: int, buffer: int, offset: int) -> pa.Array:
    """Return an array with one valid view and this one, of a buffer of 100 bytes."""
    views = struct.pack("<i12s", 2, b"ok") + struct.pack("<i4sii", length, b"xxxx", buffer, offset)
    return pa.Array.from_buffers(kind, 2, [None, pa.py_buffer(views), pa.py_buffer(b"x" * 100)])


def indices(*places: int) -> pa.Array:
    return pa.DictionaryArray.from_arrays(pa.array(places, pa.int32()), pa.array([b"aa", b"b"]), safe=False)


def headers(ends: list[int], names: pa.Array) -> pa.Array:
    pairs = pa.StructArray.from_arrays([names, pa.array([b"x"] * len(names), pa.binary())], fields=list(PAIR))
    lists = [None, pa.py_buffer(np.array(ends, np.int32).tobytes())]
    return pa.Array.from_buffers(pa.list_(PAIR), len(ends) - 1, lists, children=[pairs])


LIES: dict[str, dict[str, pa.Array]] = {
    "an offset beyond the end": {"value": binary(pa.binary(), [0, 1_000_000, 5], b"hello")},
    "an offset below zero": {"value": binary(pa.binary(), [0, -5, 5], b"hello")},
    "offsets that fall": {"value": binary(pa.string(), [0, 4, 2, 5], b"hello")},
    "a large offset beyond the end": {"value": binary(pa.large_binary(), [0, 1 << 40, 5], b"hello")},
    "keys beyond the end": {"value": TWO, "key": binary(pa.string(), [0, 1_000_000, 5], b"hello")},
    "a view beyond its buffer": {"value": view(pa.binary_view(), 100, 0, 50_000_000)},
    "a view of no buffer": {"value": view(pa.binary_view(), 100, 77, 0)},
    "a view of a negative length": {"value": view(pa.binary_view(), -100, 0, 0)},
    "a key that is a view beyond its buffer": {"value": TWO, "key": view(pa.string_view(), 100, 0, 50_000_000)},
    "an index beyond the dictionary": {"value": indices(0, 7_000_000)},
    "an index below zero": {"value": indices(0, -7_000_000)},
    "headers beyond the end": {"value": TWO, "headers": headers([0, 60, 1], pa.array(["k"]))},
    "header names that are no text": {"value": TWO, "headers": headers([0, 1, 1], binary(pa.string(), [0, 2], b"\xff\xfe"))},
    "header names beyond the end": {"value": TWO, "headers": headers([0, 2, 2], binary(pa.string(), [0, 9_000_000, 2], b"kk"))},
    "a topic that is no text": {"value": TWO, "topic": binary(pa.string(), [0, 2, 4], b"\xff\xfe\xff\xfe")},
}


def put(harness: Harness, command: dict[str, Any], columns: dict[str, pa.Array]) -> None:
    batch = pa.RecordBatch.from_arrays(list(columns.values()), list(columns))
    with flight.FlightClient(f"grpc://{harness.endpoint.address}") as plain:
        writer, answers = plain.do_put(flight.FlightDescriptor.for_command(json.dumps(command).encode()), batch.schema)
        writer.write_batch(batch)
        writer.done_writing()
        answers.read()
        writer.close()


@pytest.mark.parametrize("lie", LIES)
def test_columns_that_lie_are_rejected_by_name_and_nothing_is_written(
    harness: Harness, flight_client: FlightClient, wide: str, lie: str
) -> None:
    with pytest.raises(flight.FlightServerError, match="invalid_request: column '(value|key|headers|topic)' is damaged"):
        put(harness, {"operation": "append", "topic": wide}, LIES[lie])
    assert [rows(flight_client, wide, partition) for partition in range(5)] == [[]] * 5
    assert flight_client.append(wide, [values(b"x")]).records == 1


@pytest.mark.parametrize("rest", [0, 1, 3, 17])
def test_a_buffer_of_views_may_be_longer_than_its_views(rest: int) -> None:
    views = struct.pack("<i12s", 2, b"ok") * 3 + bytes(rest)
    column = pa.Array.from_buffers(pa.binary_view(), 2, [None, pa.py_buffer(views)], offset=1)
    assert checked(column, "value") is column
    assert as_binary(column, "value").to_pylist() == [b"ok", b"ok"]


def test_a_column_whose_name_is_no_text_is_rejected() -> None:
    named = pa.ipc.read_schema(pa.py_buffer(pa.schema([("value", pa.binary())]).serialize().to_pybytes().replace(b"value", b"val\x85e")))
    with pytest.raises(InvalidRequest, match="not UTF-8"):
        Splitter(named, Target("t", None, 0), lambda topic: 1)
    headers = pa.schema([("value", pa.binary()), ("headers", pa.list_(PAIR))]).serialize().to_pybytes().replace(b"key", b"\xf6ey")
    with pytest.raises(InvalidRequest, match="'headers' is"):
        Splitter(pa.ipc.read_schema(pa.py_buffer(headers)), Target("t", None, 0), lambda topic: 1)
    with pytest.raises(InvalidRequest, match="not UTF-8"):
        LettersPut(None, None, ROOT, named, "t")  # type: ignore[arg-type]  # the schema is looked at first


def test_dead_letters_that_lie_are_rejected(harness: Harness, flight_client: FlightClient, topic: str) -> None:
    flight_client.append(topic, [values(b"x")])
    column = {
        "partition": pa.array([0]),
        "offset": pa.array([0]),
        "error": binary(pa.string(), [0, 2], b"\xff\xfe"),
        "reason": pa.array(["r"]),
    }
    with pytest.raises(flight.FlightServerError, match="column 'error' is damaged"):
        put(harness, {"operation": "dead_letters", "topic": topic}, column)


@pytest.mark.parametrize("last", [6, 1 << 30])
def test_a_last_offset_beyond_the_bytes_is_rejected(last: int) -> None:
    honest = pa.RecordBatch.from_arrays([binary(pa.binary(), [0, 5, 7], b"hello!!")], ["value"])
    message = honest.serialize().to_pybytes()
    assert message.count(struct.pack("<3i", 0, 5, 7)) == 1
    lying = message.replace(struct.pack("<3i", 0, 5, 7), struct.pack("<3i", 0, 5, last + 7))
    batch = pa.ipc.read_record_batch(pa.py_buffer(lying), honest.schema)
    splitter = Splitter(honest.schema, Target("t", 0, 0), lambda topic: 1)
    with pytest.raises(InvalidRequest, match="column 'value' is damaged"):
        list(splitter.chunks(batch))


def test_values_of_text_need_not_be_utf_8_since_they_are_kept_as_bytes(harness: Harness, flight_client: FlightClient, topic: str) -> None:
    put(harness, {"operation": "append", "topic": topic}, {"value": binary(pa.string(), [0, 2], b"\xff\xfe")})
    assert [row["value"] for row in rows(flight_client, topic)] == [b"\xff\xfe"]


LONG = bytes(MIB)
REPEATED = pa.DictionaryArray.from_arrays(pa.array([0] * 300, pa.int32()), pa.array([LONG], pa.large_binary()))


@pytest.mark.parametrize(
    "column",
    [
        REPEATED,
        pa.Array.from_buffers(
            pa.binary_view(), 300, [None, pa.py_buffer(struct.pack("<i4sii", MIB, LONG[:4], 0, 0) * 300), pa.py_buffer(LONG)]
        ),
        pa.ListArray.from_arrays(
            pa.array([0, 300], pa.int32()), pa.StructArray.from_arrays([pa.array(["k"] * 300), REPEATED], ["key", "value"])
        ),
    ],
    ids=["dictionary", "views", "headers"],
)
def test_a_little_that_unpacks_to_a_lot_is_rejected_before_it_does(column: pa.Array) -> None:
    with pytest.raises(LimitExceeded, match=f"takes {300 * MIB} bytes unpacked"):
        checked(column, "value")


@pytest.mark.parametrize(("bytes_max", "fits"), [(30, True), (29, False)])
def test_what_a_column_unpacks_to_is_bounded_exactly(monkeypatch: pytest.MonkeyPatch, bytes_max: int, fits: bool) -> None:
    monkeypatch.setattr(headrace.flight.arrays, "FLIGHT_UNPACKED_BYTES_MAX", bytes_max)
    column = pa.array([b"0123456789", None, b"0123456789", b"", b"0123456789"]).dictionary_encode()
    for one in (column, column.cast(pa.binary()).cast(pa.binary_view())):
        if fits:
            assert checked(one, "value") is one
        else:
            with pytest.raises(LimitExceeded):
                checked(one, "value")


@pytest.mark.parametrize(("count", "fits"), [(5, True), (6, False)])
def test_rows_that_take_no_bytes_are_bounded_too(monkeypatch: pytest.MonkeyPatch, count: int, fits: bool) -> None:
    monkeypatch.setattr(headrace.flight.writing, "FLIGHT_PUT_ROWS_MAX", 5)
    splitter = Splitter(pa.schema({"value": pa.null()}), Target("t", 0, 0), lambda topic: 1)
    batch = pa.RecordBatch.from_arrays([pa.nulls(count)], ["value"])
    if fits:
        assert sum(len(chunk.batch) for chunk in splitter.chunks(batch)) == count
    else:
        with pytest.raises(LimitExceeded, match="6 rows exceeds the limit of 5"):
            list(splitter.chunks(batch))


def test_dead_letters_are_moved_in_pieces_however_many_come_at_once(harness: Harness, flight_client: FlightClient, topic: str) -> None:
    flight_client.append(topic, [values(*[b"x"] * 10)])
    count = 25_000
    batch = pa.RecordBatch.from_pydict(
        {
            "partition": pa.array([0] * count),
            "offset": pa.array([number % 10 for number in range(count)]),
            "error": pa.array(["e"] * count),
            "reason": pa.array(["r"] * count),
        }
    )
    letters = LettersPut(harness.endpoint._bridge, harness.broker, ROOT, batch.schema, topic)
    letters.take(batch)
    assert letters.finish() == {"moved": 10}
