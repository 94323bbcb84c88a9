"""Manifest file: the state that the last checkpoint made durable.

    0       4       8       12        14         16        24      32      36     40
    +-------+-------+-------+---------+----------+---------+-------+-------+------+-----------+
    | magic | crc   | size  | version | reserved | journal | frame | next  | logs | entries … |
    | 4 B   | u32   | u32   | u16     | u16      | u64     | u64   | u32   | u32  |           |
    +-------+-------+-------+---------+----------+---------+-------+-------+------+-----------+
    entry: log u32, reserved u32, first offset u64, end offset u64, segment base u64, segment size u64       (40 bytes)
    then, up to `size`, deleted logs: log u32, reserved u32, journal u64                                     (16 bytes)

All batches in journal files numbered below `journal` are in synced segments. `next` is the lowest unused log number.
An entry holds the offsets of its log at the checkpoint, and the base and synced size of its last segment. A log without an entry is
younger than the checkpoint. A deleted log is listed as long as journal files that are still needed, up to its `journal`, may hold
batches of it.

The file is replaced by rename, so it is always complete. Without it, recovery reads every segment and every journal file.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import Final

from google_crc32c import value as crc32c

from headrace.storage.files import Files

PATH: Final = "MANIFEST"
_TEMPORARY: Final = "MANIFEST.tmp"
MAGIC: Final = b"HRM\x01"
VERSION: Final = 1
_HEADER = struct.Struct("<4sIIHHQQII")
_ENTRY = struct.Struct("<IIQQQQ")
_DELETED = struct.Struct("<IIQ")
assert _HEADER.size == 40 and _ENTRY.size == 40 and _DELETED.size == 16, "the drawing says 40, 40 and 16"


@dataclass(frozen=True, slots=True)
class Checkpointed:
    """State of one log at the checkpoint."""

    first: int
    end: int
    segment_base: int
    segment_size: int


@dataclass(frozen=True, slots=True)
class Manifest:
    journal: int = 0
    frame: int = 0
    next_log: int = 0
    logs: dict[int, Checkpointed] = field(default_factory=dict)
    deleted: dict[int, int] = field(default_factory=dict)
    """Deleted logs, each with the last journal file that may hold batches of it."""

    def encode(self) -> bytes:
        entries = b"".join(
            _ENTRY.pack(log, 0, known.first, known.end, known.segment_base, known.segment_size) for log, known in sorted(self.logs.items())
        )
        entries += b"".join(_DELETED.pack(log, 0, journal) for log, journal in sorted(self.deleted.items()))
        size = _HEADER.size + len(entries)
        header = _HEADER.pack(MAGIC, 0, size, VERSION, 0, self.journal, self.frame, self.next_log, len(self.logs))
        tail = header[8:] + entries
        return MAGIC + struct.pack("<I", crc32c(tail)) + tail

    @classmethod
    def decode(cls, content: bytes) -> Manifest | None:
        """Decode the manifest; None if it is damaged."""
        if len(content) < _HEADER.size:
            return None
        magic, crc, size, version, _, journal, frame, next_log, count = _HEADER.unpack_from(content)
        if magic != MAGIC or version != VERSION or size != len(content) or crc != crc32c(content[8:]):
            return None
        gone = _HEADER.size + count * _ENTRY.size
        if gone > size or (size - gone) % _DELETED.size:
            return None
        logs = {
            log: Checkpointed(first, end, base, segment_size)
            for log, _, first, end, base, segment_size in _ENTRY.iter_unpack(content[_HEADER.size : gone])
        }
        return cls(journal, frame, next_log, logs, {log: number for log, _, number in _DELETED.iter_unpack(content[gone:])})


def write_manifest(files: Files, manifest: Manifest) -> None:
    """Write the manifest. It is durable when this returns."""
    files.remove(_TEMPORARY)
    file = files.open(_TEMPORARY, create=True)
    try:
        file.write_at(0, [manifest.encode()])
        file.sync()
    finally:
        file.close()
    files.rename(_TEMPORARY, PATH)
    files.sync_dir("")


def read_manifest(files: Files) -> tuple[Manifest | None, bool]:
    """Return (the manifest or None, whether the file exists and is unreadable)."""
    try:
        file = files.open_readonly(PATH)
    except FileNotFoundError:
        return None, False
    try:
        manifest = Manifest.decode(file.read_at(0, file.size()))
    finally:
        file.close()
    return manifest, manifest is None
