"""Reads of the files of a broker on the same machine.

    client ── locate ──► broker: authorizes, counts, returns positions          client ── pread ──► file

A client that may open the files reads a range like this instead of receiving it: Arrow wraps the columns in the bytes read. Rows that do
not lie in a file in this form, and those of a file that is gone or does not match its checksum, are fetched as usual.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
from google_crc32c import implementation
from google_crc32c import value as crc32c

from headrace.flight.arrays import equal_timestamps, nulls, timestamps
from headrace.flight.joining import Joiner
from headrace.flight.request import Range, stored_schema
from headrace.limits import FLIGHT_BATCH_BYTES_TARGET
from headrace.located import BinaryColumn, FileBatch, Located

Rows = Iterator[tuple[pa.RecordBatch, int]]
"""Record batches, each with the offset after it."""
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

    def read(self, batch: FileBatch) -> pa.Buffer | None:
        """Return the bytes of a batch; None if the file does not hold it."""
        content = os.pread(self._fd, batch.size_bytes, batch.position)
        return pa.py_buffer(content) if crc32c(content) == batch.checksum else None

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
    joiner = Joiner(stored_schema(columns), wanted.rows_max, FLIGHT_BATCH_BYTES_TARGET)

    def fetched(stop: int) -> Rows:
        yield from joiner.flush()
        yield from fetch(Range(wanted.topic, wanted.partition, position, stop, wanted.columns, wanted.rows_max))

    while position < wanted.stop:
        located = locate(wanted, position)
        for batch in located.batches:
            content = None if batch.has_headers and "headers" in columns else _content(batch, files)
            if content is None:
                continue
            if batch.base_offset > position:
                yield from fetched(batch.base_offset)
                position = batch.base_offset
            stop = min(batch.base_offset + batch.count, wanted.stop)
            whole = _record_batch(batch, content, columns, position, stop)
            for part, size_bytes in _parts(whole, batch.size_bytes * (stop - position) // batch.count, wanted.rows_max):
                position += part.num_rows
                yield from joiner.take(part, size_bytes, position)
        if position < located.next_offset:
            yield from fetched(located.next_offset)
            position = located.next_offset
    yield from joiner.flush()


def _content(batch: FileBatch, files: dict[str, File]) -> pa.Buffer | None:
    try:
        if batch.path not in files:
            files[batch.path] = File(batch.path)
        return files[batch.path].read(batch)
    except OSError:  # retention or compaction has removed the file, or no descriptor is left
        return None


def _record_batch(batch: FileBatch, content: pa.Buffer, columns: tuple[str, ...], start: int, stop: int) -> pa.RecordBatch:
    """Return the rows with start <= offset < stop."""
    first, count = start - batch.base_offset, stop - start

    def binary(column: BinaryColumn) -> pa.Array:
        validity = None if column.validity is None else content.slice(column.validity, (batch.count + 7) // 8)
        offsets, data = content.slice(column.offsets, 4 * (batch.count + 1)), content.slice(column.content, column.content_bytes)
        return pa.Array.from_buffers(pa.binary(), count, [validity, offsets, data], offset=first)

    def array(name: str) -> pa.Array:
        if name == "value":
            return binary(batch.values)
        if name == "key" and batch.keys is not None:
            return binary(batch.keys)
        if name == "offset":
            return pa.array(np.arange(start, stop, dtype=np.int64))
        if name == "timestamp":
            if batch.timestamps is None:
                return equal_timestamps(batch.min_timestamp, count)
            return timestamps(np.frombuffer(content, np.int64, count, batch.timestamps + 8 * first))
        return nulls(count, name)

    return pa.RecordBatch.from_arrays([array(name) for name in columns], schema=stored_schema(columns))


def _parts(whole: pa.RecordBatch, size_bytes: int, rows_max: int) -> Iterator[tuple[pa.RecordBatch, int]]:
    """Divide rows of about this size into record batches within the limits; a single row may exceed them."""
    rows = whole.num_rows
    step = min(rows_max, max(rows * FLIGHT_BATCH_BYTES_TARGET // max(size_bytes, 1), 1))
    if step >= rows:
        yield whole, size_bytes
        return
    for begin in range(0, rows, step):
        part = whole.slice(begin, step)
        yield part, size_bytes * part.num_rows // rows
