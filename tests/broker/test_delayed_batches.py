"""Rows of delayed messages that are stored together: the same bytes as if each were encoded alone."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.broker.delayed_batches import Delayed, MessageBatch
from headrace.limits import BATCH_BYTES_TARGET
from headrace.records import ColumnBatch, RecordBatch

_COUNT = 20
_ENCODE = msgspec.msgpack.Encoder().encode
_DECODE = msgspec.msgpack.Decoder(Delayed).decode


def _batch(values: list[bytes | None], **other: Any) -> MessageBatch:
    columns: dict[str, Any] = {"dues": [7] * len(values), "keys": [None] * len(values), "partitions": [None] * len(values)}
    rest: dict[str, Any] = {"topic": "t", "owner": "ann", "headers": (), "ttl_ms": 0}
    return MessageBatch([f"{number:032x}" for number in range(len(values))], values=values, **columns | rest | other)


def _rows(batch: MessageBatch) -> list[tuple[bytes | None, bytes | None]]:
    rows = batch.rows(_ENCODE)
    listed = rows.record_batch() if isinstance(rows, ColumnBatch) else rows
    assert listed.keys is not None
    return list(zip(listed.keys, listed.values, strict=True))


def _rows_alone(batch: MessageBatch) -> list[tuple[bytes, bytes]]:
    return [(msgspec.json.encode((waiting.id,)), _ENCODE(waiting.message)) for waiting in batch.waiting()]


@pytest.mark.parametrize("size", [0, 1, 255, 256, 1_000, 40_000])
@pytest.mark.parametrize(
    "other",
    [
        {},
        {"topic": "x" * 200, "owner": "ö" * 40, "headers": (("h", b"1"), ("h", b"")), "ttl_ms": 1 << 40},
        {"keys": [b"k"] * _COUNT, "partitions": [300] * _COUNT, "dues": [1 << 42] * _COUNT},
    ],
    ids=["plain", "long fields", "key and partition"],
)
def test_rows_in_columns_are_those_of_single_messages(size: int, other: dict[str, Any]) -> None:
    batch = _batch([bytes((number,)) * size for number in range(_COUNT)], **other)
    assert isinstance(batch.rows(_ENCODE), ColumnBatch)
    assert _rows(batch) == _rows_alone(batch)


_VALUES = st.lists(st.none() | st.binary(max_size=300), min_size=1, max_size=40)


@given(_VALUES, st.data())
def test_any_messages_become_the_same_rows(values: list[bytes | None], data: st.DataObject) -> None:
    count = len(values)
    batch = _batch(
        values,
        dues=data.draw(st.lists(st.integers(0, 1 << 45), min_size=count, max_size=count)),
        keys=data.draw(st.lists(st.none() | st.binary(max_size=3), min_size=count, max_size=count)),
        partitions=data.draw(st.lists(st.none() | st.integers(0, 3), min_size=count, max_size=count)),
    )
    assert _rows(batch) == _rows_alone(batch)
    assert [_DECODE(value or b"") for _, value in _rows(batch)] == [waiting.message for waiting in batch.waiting()]


def test_more_than_one_stored_batch_is_left_to_the_log_to_divide() -> None:
    batch = _batch([bytes(BATCH_BYTES_TARGET // _COUNT)] * _COUNT)
    assert isinstance(batch.rows(_ENCODE), RecordBatch)
    assert _rows(batch) == _rows_alone(batch)
