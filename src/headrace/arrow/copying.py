"""Copies of partitions between two brokers over their Flight endpoints.

The rows of the target must be the first rows of the source: a copy that was interrupted counts them and continues after them, so it
needs no file of its own. `verify` reads both sides and compares their number and a SHA-256 of keys, values, headers and times. It also
translates offsets, which differ where the source has lost its oldest records, or where one side has holes.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from headrace.flight.client import FlightClient, PartitionState

COPIED: Final = ("key", "value", "headers", "timestamp")
BATCH_ROWS_MAX: Final = 65_536
PUT_BYTES_MAX: Final = 32 << 20
"""Size of one append: what a copy that is interrupted has to send again at most."""
_PARTS: Final = 10
Progress: TypeAlias = Callable[[int], None]
"""Gets the number of rows done since the last call."""


@dataclass(frozen=True, slots=True)
class Place:
    """One partition at one broker, up to an end offset."""

    client: FlightClient
    topic: str
    partition: int
    bounds: PartitionState

    def rows(self, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        if self.bounds.first < self.bounds.end:
            yield from self.client.read(
                self.topic, self.partition, self.bounds.first, self.bounds.end, columns=columns, rows_max=BATCH_ROWS_MAX
            )


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Number and checksum of the rows of a partition, and the rows before each of the requested offsets."""

    rows: int
    sha256: str
    offsets: dict[int, int]


def count_rows(place: Place) -> int:
    """Return how many rows the partition holds. Offsets do not tell: they may have holes."""
    return sum(batch.num_rows for batch in place.rows(("offset",)))


def copy(source: Place, target: Place, progress: Progress = lambda rows: None) -> int:
    """Append to the target the rows of the source that it does not have. Returns their number."""
    present = to_skip = count_rows(target)
    progress(present)
    copied, waiting, waiting_bytes = 0, list[pa.RecordBatch](), 0

    def put() -> None:
        nonlocal copied, waiting, waiting_bytes
        rows = target.client.append(target.topic, waiting, partition=target.partition).records
        copied, waiting, waiting_bytes = copied + rows, [], 0
        progress(rows)

    for batch in source.rows(COPIED):
        rest = batch.slice(min(to_skip, batch.num_rows))
        to_skip -= batch.num_rows - rest.num_rows
        if rest.num_rows:
            waiting.append(rest)
            waiting_bytes += rest.nbytes
        if waiting_bytes >= PUT_BYTES_MAX:
            put()
    if waiting:
        put()
    return copied


def fingerprint(
    place: Place, offsets: Sequence[int] = (), rows_max: int | None = None, progress: Progress = lambda rows: None
) -> Fingerprint:
    """Read the partition, at most its first `rows_max` rows. `offsets` of the result has the number of rows before each given offset."""
    digests = [hashlib.sha256() for _ in range(_PARTS)]
    rows, before = 0, dict.fromkeys(offsets, 0)
    for batch in place.rows((*COPIED, "offset")):
        if rows_max is not None:
            batch = batch.slice(0, rows_max - rows)
        rows += batch.num_rows
        seen = batch.column("offset").to_pylist() if before else []
        for offset in before:
            before[offset] += bisect_left(seen, offset)
        for digest, part in zip(digests, _parts(batch), strict=True):
            digest.update(part)
        progress(batch.num_rows)
        if rows == rows_max:
            break
    return Fingerprint(rows, hashlib.sha256(b"".join(digest.digest() for digest in digests)).hexdigest(), before)


def offsets_of_rows(place: Place, rows: Sequence[int]) -> dict[int, int]:
    """Return the offset of each row, counted from 0; the end offset for a row after the last."""
    found = dict.fromkeys(rows, place.bounds.end)
    done = 0
    for batch in place.rows(("offset",)):
        for row in found:
            if done <= row < done + batch.num_rows:
                found[row] = batch.column("offset")[row - done].as_py()
        done += batch.num_rows
    return found


def _parts(batch: pa.RecordBatch) -> Iterator[bytes]:
    """Yield lengths and contents of the columns, each of which can be hashed across batch boundaries."""
    yield from _of_binary(batch.column("key"))
    yield from _of_binary(batch.column("value"))
    # To milliseconds: Flight reads microseconds, but brokers keep milliseconds.
    yield _plain(pc.divide(batch.column("timestamp").cast(pa.int64()), 1000))
    headers = batch.column("headers")
    yield _plain(pc.fill_null(pc.list_value_length(headers), 0).cast(pa.int64()))
    pairs = pc.list_flatten(headers)
    yield from _of_binary(pc.struct_field(pairs, 0).cast(pa.binary()))
    yield from _of_binary(pc.struct_field(pairs, 1))


def _of_binary(column: pa.Array) -> tuple[bytes, bytes]:
    """Return the lengths, -1 for null, and the joined bytes."""
    lengths = pc.fill_null(pc.binary_length(column).cast(pa.int64()), -1)
    return _plain(lengths), b"".join(value for value in column.to_pylist() if value is not None)


def _plain(numbers: Any) -> bytes:
    """Return 64-bit integers without nulls as bytes."""
    made = pa.array(numbers.to_numpy(zero_copy_only=False))
    return bytes(made.buffers()[1])[: 8 * len(made)]
