"""Protobuf comparison: conflicts between a writer's and a reader's message, whose fields are identified by number.

Fields may be added and removed. A field in both must have types that decode the same bytes to the same meaning. Its name may change:
the wire does not carry it. A change of both name and type is a reused number, which is a conflict.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor

from headrace.limits import SCHEMA_COMPARISONS_MAX

_F = FieldDescriptor
_GROWS_TO: Final = {
    _F.TYPE_INT32: {_F.TYPE_INT64},
    _F.TYPE_UINT32: {_F.TYPE_UINT64, _F.TYPE_INT64},
    _F.TYPE_SINT32: {_F.TYPE_SINT64},
    _F.TYPE_BOOL: {_F.TYPE_INT32, _F.TYPE_INT64, _F.TYPE_UINT32, _F.TYPE_UINT64},
    _F.TYPE_ENUM: {_F.TYPE_INT32, _F.TYPE_INT64},
    _F.TYPE_STRING: {_F.TYPE_BYTES},
}
"""Types that decode the same bytes without loss. A uint64 read as int64 may become negative; fixed32 and uint32 differ on the wire."""
_NAMES: Final = {getattr(_F, name): name.removeprefix("TYPE_").lower() for name in dir(_F) if name.startswith("TYPE_")}
_CONFLICTS_MAX: Final = 8


class _TooLarge(Exception):
    """The comparison exceeds `SCHEMA_COMPARISONS_MAX`."""


def conflicts(writer: Descriptor, reader: Descriptor) -> list[str]:
    try:
        return list(_Comparison().gaps(writer, reader, ""))[:_CONFLICTS_MAX]
    except (_TooLarge, RecursionError):
        return [f"/: proving the two compatible takes more than {SCHEMA_COMPARISONS_MAX} comparisons"]


class _Comparison:
    def __init__(self) -> None:
        self._seen: set[tuple[str, str]] = set()
        self._comparisons = 0

    def gaps(self, writer: Descriptor, reader: Descriptor, path: str) -> Iterator[str]:
        if (writer.full_name, reader.full_name) in self._seen:
            return
        self._seen.add((writer.full_name, reader.full_name))
        for number, field in reader.fields_by_number.items():
            self._comparisons += 1
            if self._comparisons > SCHEMA_COMPARISONS_MAX:
                raise _TooLarge
            written = writer.fields_by_number.get(number)
            where = f"{path}/{field.name}"
            if written is not None:
                yield from self._field_gaps(written, field, where)
            elif field.is_required:
                yield f"{where}: required by the reader, the writer does not have it"
            elif field.name in writer.fields_by_name:
                yield f"{where}: number {writer.fields_by_name[field.name].number} for the writer, {number} for the reader"

    def _field_gaps(self, written: FieldDescriptor, read: FieldDescriptor, path: str) -> Iterator[str]:
        if read.is_required and not written.is_required:
            yield f"{path}: required by the reader, the writer may leave it out"
        if written.is_repeated and not read.is_repeated:
            yield f"{path}: the writer may write several, the reader keeps the last"
        elif read.is_repeated and not written.is_repeated and written.type == _F.TYPE_MESSAGE and _is_map(read):
            yield f"{path}: a map for the reader only"
        if written.type != read.type:
            if read.type not in _GROWS_TO.get(written.type, ()):
                yield f"{path}: the writer writes {_NAMES[written.type]}, the reader takes {_NAMES[read.type]}"
        elif read.message_type is not None and written.message_type is not None:
            if _is_map(written) != _is_map(read):
                yield f"{path}: a map on one side only"
            elif written.message_type.name != read.message_type.name:
                yield f"{path}: {written.message_type.full_name} is written, {read.message_type.full_name} is read"
            else:
                yield from self.gaps(written.message_type, read.message_type, path)
        elif read.enum_type is not None and written.enum_type is not None:
            yield from _enum_gaps(written.enum_type, read.enum_type, path)
        yield from _oneof_gaps(written, read, path)


def _oneof_gaps(written: FieldDescriptor, read: FieldDescriptor, path: str) -> Iterator[str]:
    """Yield fields that the writer may set together and that are alternatives for the reader, which would keep only one."""
    oneof = read.containing_oneof
    if oneof is None or len(oneof.fields) < 2:
        return
    together = [
        field.name
        for field in oneof.fields
        if (other := written.containing_type.fields_by_number.get(field.number)) is not None
        and other.number != written.number
        and (written.containing_oneof is None or other.containing_oneof is not written.containing_oneof)
    ]
    if together:
        yield f"{path}: an alternative to {together[0]} for the reader, the writer may write both"


def _is_map(field: FieldDescriptor) -> bool:
    return field.message_type is not None and bool(field.message_type.GetOptions().map_entry)


def _enum_gaps(writer: EnumDescriptor, reader: EnumDescriptor, path: str) -> Iterator[str]:
    for value in writer.values:
        known = reader.values_by_number.get(value.number)
        if known is None:
            yield f"{path}: the reader does not know {value.name} = {value.number}"
        elif value.name not in reader.values_by_name:
            yield f"{path}: {value.number} is {value.name} for the writer, {known.name} for the reader"
