"""Fields of payloads.

    u8 i32 u32 u64 i64    big-endian integers
    bool                  one byte, 0 = false
    s8  s16               u8 / u16 length, UTF-8
    b32                   u32 length, bytes
    list                  u32 count, then the items

A `Layout` names the fields of a message in wire order. It is a field itself, so rows of lists are layouts too. Bytes after the last field
are ignored, as in every known peer, so that the protocol can grow.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Any, Generic, Protocol, TypeVar

from headrace.errors import InvalidRequest, WireError
from headrace.wire.flymq.reader import Reader

T = TypeVar("T")
M = TypeVar("M")


class Field(Protocol[T]):
    """Encoder and decoder of one field. `read` raises `WireError`, `write` raises `InvalidRequest`."""

    def read(self, reader: Reader, /) -> T: ...

    def write(self, value: T, /) -> bytes: ...


class Integer:
    """A fixed-width integer, defined by its `struct` letter."""

    def __init__(self, letter: str) -> None:
        self._layout = struct.Struct(">" + letter)

    def read(self, reader: Reader, /) -> int:
        return reader.unpack(self._layout)

    def write(self, value: int, /) -> bytes:
        try:
            return self._layout.pack(value)
        except struct.error as error:
            raise InvalidRequest(f"{value} does not fit its field of {self._layout.size} bytes") from error


class Flag:
    """One byte; any value but zero is true."""

    def read(self, reader: Reader, /) -> bool:
        return U8.read(reader) != 0

    def write(self, value: bool, /) -> bytes:
        return b"\x01" if value else b"\x00"


class Text:
    """UTF-8 after its length."""

    def __init__(self, length: Integer) -> None:
        self._length = length

    def read(self, reader: Reader, /) -> str:
        encoded = reader.take(self._length.read(reader))
        try:
            return encoded.decode()
        except UnicodeDecodeError as error:
            raise WireError("text is not UTF-8") from error

    def write(self, value: str, /) -> bytes:
        encoded = value.encode()
        return self._length.write(len(encoded)) + encoded


class Blob:
    """Bytes after their length."""

    def read(self, reader: Reader, /) -> bytes:
        return reader.take(U32.read(reader))

    def write(self, value: bytes, /) -> bytes:
        return U32.write(len(value)) + value


class Repeated(Generic[T]):
    """A count, then that many items. A wrong count fails at the first missing item, and nothing is allocated for it."""

    def __init__(self, item: Field[T]) -> None:
        self._item = item

    def read(self, reader: Reader, /) -> list[T]:
        return [self._item.read(reader) for _ in range(U32.read(reader))]

    def write(self, value: Iterable[T], /) -> bytes:
        items = [self._item.write(item) for item in value]
        return U32.write(len(items)) + b"".join(items)


class Trailing(Generic[T]):
    """A newer field that may be missing at the end of the payload. It then decodes as `absent`.

    `absent` is not encoded unless `always` is set, so that older peers do not see the field.
    """

    def __init__(self, field: Field[T], absent: T, *, always: bool = False) -> None:
        self._field, self._absent, self._always = field, absent, always

    def read(self, reader: Reader, /) -> T:
        return self._field.read(reader) if reader.left else self._absent

    def write(self, value: T, /) -> bytes:
        return b"" if value == self._absent and not self._always else self._field.write(value)


class Layout(Generic[M]):
    """Fields of a message, by name, in wire order."""

    def __init__(self, message: type[M], /, **fields: Field[Any]) -> None:
        self.message = message
        self._fields = tuple(fields.items())

    def read(self, reader: Reader, /) -> M:
        return self.message(**{name: field.read(reader) for name, field in self._fields})

    def write(self, value: M, /) -> bytes:
        return b"".join([field.write(getattr(value, name)) for name, field in self._fields])


U8, U16, U32, U64 = Integer("B"), Integer("H"), Integer("I"), Integer("Q")
I32, I64 = Integer("i"), Integer("q")
BOOL = Flag()
S8, S16 = Text(U8), Text(U16)
B32 = Blob()
