"""Delayed messages, and those of them that were stored together, in columns.

The rows of the table `__delayed` and the objects of the schedule cost more than everything else that is done for a delayed message. So
messages that are stored together become rows with a few operations on whole columns, and an object for each only when one of them is
delivered, cancelled or listed.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from itertools import repeat
from typing import Final, cast

import msgspec

from headrace.columns import Column, equal_items, equal_size, headers_bytes
from headrace.limits import BATCH_BYTES_TARGET
from headrace.records import AnyBatch, ColumnBatch, Headers, RecordBatch

ENTRY_BYTES: Final = 256
"""Memory of a message beside its content."""
RETRY_MS_MIN: Final = 20
"""First retry delay of a message that could not be written; it doubles each time. The dead-letter topic may still be in creation."""


class Delayed(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A message and its delivery time. Stored in this order of fields: add new fields at the end, with a default.

    `gc=False` here and in `Waiting`: neither can be part of a cycle, and a collection over 100,000 of them would block the loop for
    longer than a message may be late.
    """

    topic: str
    due: int
    """Unix ms."""
    owner: str
    value: bytes | None
    key: bytes | None = None
    headers: Headers = ()
    partition: int | None = None
    """None: chosen at delivery."""
    ttl_ms: int = 0
    """Time to live after delivery. Zero: the topic's."""

    @property
    def size_bytes(self) -> int:
        headers = headers_bytes(self.headers) if self.headers else 0
        return len(self.value or b"") + len(self.key or b"") + headers + ENTRY_BYTES


_FIELDS: Final = Delayed.__struct_fields__
assert _FIELDS == ("topic", "due", "owner", "value", "key", "headers", "partition", "ttl_ms"), "the order in `MessageBatch._values`"
_ARRAY: Final = bytes((0x90 | len(_FIELDS),))
"""First byte of a row: MessagePack's array of so many fields."""


class Waiting(msgspec.Struct, eq=False, gc=False):
    """A message in the schedule."""

    id: str
    message: Delayed
    is_leaving: bool = False
    """Whether an append that removes it is in progress."""
    pause_ms: int = RETRY_MS_MIN
    """Delay of the next retry."""


class MessageBatch:
    """Messages of one topic and owner that were stored together."""

    __slots__ = ("dues", "headers", "ids", "keys", "owner", "partitions", "topic", "ttl_ms", "values")

    def __init__(
        self,
        ids: list[str],
        topic: str,
        owner: str,
        values: Sequence[bytes | None],
        dues: Sequence[int],
        keys: Sequence[bytes | None],
        partitions: Sequence[int | None],
        headers: Headers,
        ttl_ms: int,
    ) -> None:
        self.ids, self.topic, self.owner, self.values, self.dues = ids, topic, owner, values, dues
        self.keys, self.partitions, self.headers, self.ttl_ms = keys, partitions, headers, ttl_ms

    def waiting(self) -> list[Waiting]:
        """Return an object for each message, in the order of `ids`."""
        return list(map(Waiting, self.ids, self._messages()))

    def rows(self, encode: Callable[[object], bytes]) -> AnyBatch:
        """Return the rows of the table. `encode` returns MessagePack."""
        keys = ('["' + '"]["'.join(self.ids) + '"]').encode()
        values = self._values(encode) if all(map(_are_same, (self.dues, self.keys, self.partitions))) else None
        if values is not None and len(values) + len(keys) <= BATCH_BYTES_TARGET:
            return ColumnBatch(_equal_items(values, len(self.ids)), _equal_items(keys, len(self.ids)))
        return RecordBatch(list(map(encode, self._messages())), equal_items(keys, len(keys) // len(self.ids), len(self.ids)))

    def _values(self, encode: Callable[[object], bytes]) -> bytes | None:
        """Return the values of all rows, which differ in nothing but the value of the message. None: its size differs, too."""
        if None in self.values or (size := equal_size(values := cast("Sequence[bytes]", self.values))) is None:
            return None
        front = _ARRAY + encode((self.topic, self.dues[0], self.owner))[1:] + encode(bytes(size))[: -size or None]
        behind = encode((self.keys[0], self.headers, self.partitions[0], self.ttl_ms))[1:]
        return b"".join((front, (behind + front).join(values), behind))

    def _messages(self) -> list[Delayed]:
        same = repeat(self.topic), repeat(self.owner), repeat(self.headers), repeat(self.ttl_ms)
        return list(map(Delayed, same[0], self.dues, same[1], self.values, self.keys, same[2], self.partitions, same[3]))


def _are_same(items: Sequence[object]) -> bool:
    return items.count(items[0]) == len(items)


def _equal_items(data: bytes, count: int) -> Column:
    """Return a column of items of one size."""
    return Column(array("I", range(0, len(data) + 1, len(data) // count)).tobytes(), data, is_checked=True)
