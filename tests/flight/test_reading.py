"""Record batches have the content of the records, for every kind of stored batch and every window."""

from __future__ import annotations

import datetime
from itertools import pairwise
from typing import Any

import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.flight.reading import ArrowBatches, below
from headrace.flight.request import STORED, decode_place
from headrace.records import NEVER, Batch, Record, RecordBatch
from headrace.storage.batch import StoredBatch
from headrace.storage.encoding import encode

EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
HEADERS = st.lists(st.tuples(st.text(max_size=3), st.binary(max_size=3)), max_size=2).map(tuple)
LATE = 1 << 40


@st.composite
def batches(draw: st.DrawFn) -> list[Batch]:
    """Draw adjacent batches of one log, each with its own columns."""
    made: list[Batch] = []
    base = draw(st.integers(0, 1 << 40))
    for _ in range(draw(st.integers(1, 4))):
        count = draw(st.integers(1, 12))

        def column(items: st.SearchStrategy[Any], count: int = count) -> list[Any]:
            return draw(st.lists(items, min_size=count, max_size=count))

        record_batch = RecordBatch(
            column(st.one_of(st.none(), st.binary(max_size=9))),
            column(st.one_of(st.none(), st.binary(max_size=9))) if draw(st.booleans()) else None,
            column(HEADERS) if draw(st.booleans()) else None,
            column(st.integers(0, 1 << 41)) if draw(st.booleans()) else None,
            column(st.sampled_from([NEVER, 1, LATE])) if draw(st.booleans()) else None,
        )
        span, deltas = count, None
        if draw(st.booleans()):
            deltas = sorted(draw(st.sets(st.integers(0, 40), min_size=count, max_size=count)))
            span = 41
        raw = encode(1, base, record_batch, now=7, compress=draw(st.booleans()), deltas=deltas, span=span)
        whole = StoredBatch.parse(raw)
        start = draw(st.integers(0, count))
        made.append(whole.window(start, draw(st.integers(start, count))))
        base += span
    return made


def row(record: Record) -> dict[str, Any]:
    return {
        "key": record.key,
        "value": record.value,
        "offset": record.offset,
        "timestamp": EPOCH + datetime.timedelta(milliseconds=record.timestamp),
        "headers": [{"key": name, "value": value} for name, value in record.headers] or None,
    }


def sent(arrows: ArrowBatches, found: list[Batch], now: int = 0) -> list[tuple[pa.RecordBatch, int]]:
    return [(batch, decode_place(pa.py_buffer(place))) for batch, place in (*arrows.feed(found, now), *arrows.flush())]


@settings(max_examples=300)
@given(batches(), st.integers(1, 30), st.sampled_from([0, 1, LATE]), st.permutations(STORED), st.integers(1, 5))
def test_rows_are_the_records_that_live(found: list[Batch], rows_max: int, now: int, columns: list[str], count: int) -> None:
    chosen = tuple(columns[:count])
    records = [record for batch in found for record in batch.records() if record.expiry == NEVER or record.expiry > now]
    out = sent(ArrowBatches(chosen, rows_max, bytes_max=25), found, now)
    assert [line for batch, _ in out for line in batch.to_pylist()] == [{name: row(record)[name] for name in chosen} for record in records]
    assert all(0 < batch.num_rows <= rows_max for batch, _ in out)
    for batch, _ in out:
        batch.validate(full=True)


@settings(max_examples=200)
@given(batches(), st.integers(1, 30))
def test_reading_on_at_any_place_gives_the_rest(found: list[Batch], rows_max: int) -> None:
    out = sent(ArrowBatches(("offset",), rows_max), found)
    places = [place for _, place in out]
    assert all(before < after for before, after in pairwise(places))
    offsets = [offset for batch in found for offset in batch.offsets()]
    seen: list[int] = []
    for batch, place in out:
        seen += batch.column("offset").to_pylist()
        assert seen == [offset for offset in offsets if offset < place]


@settings(max_examples=200)
@given(batches(), st.integers(0, 60))
def test_a_stop_leaves_out_what_is_at_or_behind_it(found: list[Batch], distance: int) -> None:
    stop = found[0].base_offset + distance
    kept = [offset for batch in below(found, stop) for offset in batch.offsets()]
    assert kept == [offset for batch in found for offset in batch.offsets() if offset < stop]


def test_a_large_batch_is_not_copied_to_join_a_small_one() -> None:
    small, large = (StoredBatch.parse(encode(1, base, RecordBatch([bytes(1_000)] * count), now=7)) for base, count in ((0, 9), (9, 2_000)))
    out = sent(ArrowBatches(("value",), 10_000), [small, large])
    assert [batch.num_rows for batch, _ in out] == [9, 2_000]
    assert out[1][0].column("value").buffers()[2].address == pa.py_buffer(large.value_buffers()[1]).address


def test_values_are_not_copied() -> None:
    batch = StoredBatch.parse(encode(1, 0, RecordBatch([bytes(1_000)] * 2_000), now=7))
    ((out, _),) = sent(ArrowBatches(("value",), 10_000), [batch])
    content = pa.py_buffer(batch.value_buffers()[1])
    assert out.column("value").buffers()[2].address == content.address
