"""Where batches lie in files: what the broker tells a reader on the same machine that reads the files itself.

The positions of the columns are all that the reader learns about the format of a batch.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class BinaryColumn:
    """Positions of a column of bytes in the layout of Arrow: u32 offsets, data, and validity bits unless every item is valid."""

    offsets: int
    content: int
    content_bytes: int
    validity: int | None


@dataclass(frozen=True, slots=True)
class FileBatch:
    """A batch in a file. The positions of its columns count from `position`."""

    path: str
    """For other processes of this machine."""
    position: int
    size_bytes: int
    checksum: int
    """CRC-32C of these bytes."""
    base_offset: int
    count: int
    values: BinaryColumn
    keys: BinaryColumn | None
    timestamps: int | None
    """Position of i64 × count, Unix ms; None: every record has `min_timestamp`."""
    min_timestamp: int
    has_headers: bool

    @property
    def content_bytes(self) -> int:
        return self.values.content_bytes + (0 if self.keys is None else self.keys.content_bytes)


@dataclass(slots=True)
class Located:
    """Batches with records of a range. All other records below `next_offset` have to be read through the broker."""

    next_offset: int
    batches: list[FileBatch] = field(default_factory=list)
