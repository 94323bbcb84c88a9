"""Reads of the files of a broker on the same machine.

    client ── locate ──► broker: authorizes, counts, returns positions          client ── pread ──► file

A client that may open the files reads a range like this instead of receiving it: Arrow wraps the columns in the bytes read. Rows that do
not lie in a file in this form, and those of a file that is gone or does not match its checksum, are fetched as usual.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
from google_crc32c import extend, implementation

from headrace.flight.arrays import Bytes, Int64s, nulls, timestamps
from headrace.flight.request import Range, stored_schema
from headrace.limits import FLIGHT_BATCH_BYTES_TARGET, MIB
from headrace.located import BinaryColumn, FileBatch, Located

Rows = Iterator[tuple[pa.RecordBatch, int]]
"""Record batches, each with the offset after it."""
_GROUP_BYTES_MAX: Final = 8 * MIB
"""Size of the batches that become one record batch; a larger one is read alone. The heap keeps memory up to this size (`heap.py`)."""
_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")


@lru_cache(1)
def machine() -> str:
    """Return an id of this machine, new after each start; empty if there is none, or if checksums would take longer than a fetch."""
    try:
        return _BOOT.read_text("ascii").strip() if implementation == "c" else ""
    except (OSError, UnicodeDecodeError):
        return ""


class File:
    """A regular file that is open for reading. Raises `OSError`."""

    def __init__(self, path: str) -> None:
        self._fd = -1
        # O_NONBLOCK: the open of a pipe would wait for a writer.
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        if not stat.S_ISREG(os.fstat(self._fd).st_mode):
            raise OSError(f"{path} is not a regular file")

    def read(self, batch: FileBatch, contents: Sequence[tuple[int, Bytes]]) -> Bytes | None:
        """Read the bytes of a batch, those at each position of `contents` (ascending) into the array beside it.

        Returns an array of the whole batch that has all others; None if the file does not hold this batch.
        """
        rest = np.empty(batch.size_bytes, np.uint8)
        parts, end = list[Bytes](), 0
        for position, content in contents:
            parts += (rest[end:position], content)
            end = position + len(content)
        parts.append(rest[end:])
        size_bytes = os.preadv(self._fd, [part.data for part in parts], batch.position)
        checksum = 0
        for part in parts:
            checksum = extend(checksum, part)
        return rest if size_bytes == batch.size_bytes and checksum == batch.checksum else None

    def __del__(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)


def can_open(path: str | None) -> bool:
    if path is None:
        return False
    try:
        File(path)
    except OSError:
        return False
    return True


def rows(wanted: Range, locate: Callable[[Range, int], Located], fetch: Callable[[Range], Rows]) -> Rows:
    """Yield the rows of a range that is not empty. `locate` returns where batches from an offset on lie, `fetch` the rows of a range."""
    assert wanted.start is not None and wanted.stop is not None and wanted.columns is not None
    position, columns, files = wanted.start, tuple(wanted.columns), dict[str, File]()

    def fetched(stop: int) -> Rows:
        return fetch(Range(wanted.topic, wanted.partition, position, stop, wanted.columns, wanted.rows_max))

    while position < wanted.stop:
        located = locate(wanted, position)
        for group in _groups(located.batches, columns, wanted.rows_max):
            whole = _record_batch(group, columns, files)
            if whole is None:
                continue
            if group[0].base_offset > position:
                yield from fetched(group[0].base_offset)
                position = group[0].base_offset
            before = position - group[0].base_offset
            for part in _parts(whole.slice(before, wanted.stop - position), wanted.rows_max):
                position += part.num_rows
                yield part, position
        if position < located.next_offset:
            yield from fetched(located.next_offset)
            position = located.next_offset


def _groups(batches: list[FileBatch], columns: tuple[str, ...], rows_max: int) -> Iterator[list[FileBatch]]:
    """Divide batches into groups that make one record batch each. A record batch costs the reader as much as thousands of rows."""
    group = list[FileBatch]()
    count = size_bytes = 0
    for batch in batches:
        if batch.has_headers and "headers" in columns:
            continue
        count, size_bytes = count + batch.count, size_bytes + batch.size_bytes
        if group and (count > rows_max or size_bytes > _GROUP_BYTES_MAX or not _follows(batch, group[-1])):
            yield group
            group, count, size_bytes = [], batch.count, batch.size_bytes
        group.append(batch)
    if group:
        yield group


def _follows(batch: FileBatch, before: FileBatch) -> bool:
    is_next = batch.path == before.path and batch.base_offset == before.base_offset + before.count
    return is_next and (batch.keys is None) == (before.keys is None)


class _Binary:
    """A binary column of a group, with the content of all batches in one array."""

    def __init__(self, columns: list[BinaryColumn]) -> None:
        self._columns = columns
        ends = [0, *accumulate(column.content_bytes for column in columns)]
        content = self._content = np.empty(ends[-1], np.uint8)
        self.contents = [(column.content, content[begin:end]) for column, (begin, end) in zip(columns, pairwise(ends), strict=True)]
        """Where the content of each batch lies in the batch, and where it goes."""

    def array(self, counts: list[int], batches: list[Bytes]) -> pa.Array:
        """Return the column of batches with these numbers of rows, of which all but the content was read into `batches`."""
        rows, before = sum(counts), 0
        ends, valid = np.zeros(rows + 1, np.int32), np.ones(rows, np.bool_)
        first = 0
        for column, count, batch in zip(self._columns, counts, batches, strict=True):
            np.add(np.frombuffer(batch, np.int32, count, column.offsets + 4), before, out=ends[first + 1 : first + count + 1])
            if column.validity is not None:
                bits = batch[column.validity : column.validity + (count + 7) // 8]
                valid[first : first + count] = np.unpackbits(bits, count=count, bitorder="little")
            first, before = first + count, before + column.content_bytes
        validity = None if valid.all() else pa.py_buffer(np.packbits(valid, bitorder="little"))
        return pa.Array.from_buffers(pa.binary(), rows, [validity, pa.py_buffer(ends), pa.py_buffer(self._content)])


def _record_batch(group: list[FileBatch], columns: tuple[str, ...], files: dict[str, File]) -> pa.RecordBatch | None:
    """Read a group; None if its file is gone or does not hold it."""
    known = {"value": [batch.values for batch in group], "key": [batch.keys for batch in group if batch.keys is not None]}
    binaries = {name: _Binary(known[name]) for name in ("value", "key") if name in columns and known[name]}
    try:
        file = files.get(group[0].path) or files.setdefault(group[0].path, File(group[0].path))
        read = [file.read(batch, [binary.contents[index] for binary in binaries.values()]) for index, batch in enumerate(group)]
    except OSError:  # retention or compaction has removed the file, or no descriptor is left
        return None
    batches = [batch for batch in read if batch is not None]
    if len(batches) < len(group):
        return None
    counts = [batch.count for batch in group]

    def array(name: str) -> pa.Array:
        if name in binaries:
            return binaries[name].array(counts, batches)
        if name == "offset":
            return pa.array(np.arange(group[0].base_offset, group[-1].base_offset + group[-1].count, dtype=np.int64))
        if name == "timestamp":
            return timestamps(np.concatenate([_times(*one) for one in zip(group, batches, strict=True)]))
        return nulls(sum(counts), name)

    return pa.RecordBatch.from_arrays([array(name) for name in columns], schema=stored_schema(columns))


def _times(batch: FileBatch, content: Bytes) -> Int64s:
    if batch.timestamps is None:
        return np.full(batch.count, batch.min_timestamp, np.int64)
    return np.frombuffer(content, np.int64, batch.count, batch.timestamps)


def _parts(whole: pa.RecordBatch, rows_max: int) -> Iterator[pa.RecordBatch]:
    """Divide rows into record batches within the limits; a single row may exceed them."""
    step = min(rows_max, max(whole.num_rows * FLIGHT_BATCH_BYTES_TARGET // max(whole.nbytes, 1), 1))
    for begin in range(0, whole.num_rows, step):
        yield whole.slice(begin, step)
