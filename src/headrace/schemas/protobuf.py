"""Protobuf schemas: a .proto source or a serialized FileDescriptorSet. The protobuf runtime (upb) parses values and bounds their nesting.

The message of the values is the first one of the file (of the last file in a set). Unknown fields are valid, because newer versions add
fields. Every schema has its own descriptor pool, so that two versions of one message do not collide.

Protobuf comparison: conflicts between a writer's and a reader's message, whose fields are identified by number.

Fields may be added and removed. A field in both must have types that decode the same bytes to the same meaning. Its name may change:
the wire does not carry it. A change of both name and type is a reused number, which is a conflict.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, Final

from google.protobuf import descriptor_pool, message_factory
from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor
from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet
from google.protobuf.message import DecodeError, EncodeError, Message

from headrace.errors import InvalidSchema
from headrace.limits import SCHEMA_COMPARISONS_MAX, SCHEMA_DEPTH_MAX, SCHEMA_FAULTS_MAX, SCHEMA_PARTS_MAX
from headrace.schemas.contract import Schema, SchemaType, present
from headrace.schemas.proto_source import parse_source

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


_FILES_MAX: Final = 100
_FAULT_CHARACTERS_MAX: Final = 200


class ProtobufSchema:
    """Compiled Protobuf schema. The constructor raises `InvalidSchema`."""

    type = SchemaType.PROTOBUF
    steps_per_byte = 4

    def __init__(self, definition: bytes) -> None:
        self.definition = definition
        files = _files(definition)
        pool = descriptor_pool.DescriptorPool()
        try:
            for file in files:
                pool.Add(file)
            last = pool.FindFileByName(files[-1].name)
            names = [message.name for message in files[-1].message_type]
            if not names:
                raise InvalidSchema("the schema declares no message")
            self.message: Descriptor = last.message_types_by_name[names[0]]
            self.message_class: type[Message] = message_factory.GetMessageClass(self.message)
        except (TypeError, KeyError, ValueError) as error:
            raise InvalidSchema(f"not a Protobuf schema: {str(error).strip()[:200]}") from error

    def accepts(self, values: Sequence[bytes | None]) -> bool:
        from_bytes = self.message_class.FromString
        try:
            return all(from_bytes(value).IsInitialized() for value in present(values))
        except DecodeError:
            return False

    def faults(self, value: bytes) -> list[str]:
        try:
            message = self.message_class.FromString(value)
        except (DecodeError, EncodeError) as error:
            return [f"not a {self.message.full_name}: {str(error)[:200]}"]
        return [f"/{path}: missing"[:_FAULT_CHARACTERS_MAX] for path in islice(missing_fields(message), SCHEMA_FAULTS_MAX)]

    def conflicts(self, written: Schema) -> list[str]:
        assert isinstance(written, ProtobufSchema)
        return conflicts(written.message, self.message)


def missing_fields(message: Any, path: str = "") -> Iterator[str]:
    """Yield the paths of missing required fields one by one; `FindInitializationErrors` would build all of them."""
    if message.IsInitialized():
        return
    for field in message.DESCRIPTOR.fields:
        if field.is_required and not message.HasField(field.name):
            yield path + field.name
    for field, value in message.ListFields():
        inner = field.message_type
        if inner is None:
            continue
        if inner.GetOptions().map_entry:
            if inner.fields_by_name["value"].message_type is not None:
                for key, entry in value.items():
                    yield from missing_fields(entry, f"{path}{field.name}[{key}].")
        elif field.is_repeated:
            for index, item in enumerate(value):
                yield from missing_fields(item, f"{path}{field.name}[{index}].")
        else:
            yield from missing_fields(value, f"{path}{field.name}.")


def _files(definition: bytes) -> list[FileDescriptorProto]:
    """Decode the definition. A serialized set starts with the tag of its first file (0x0A), which in a source would be a line end."""
    found = FileDescriptorSet()
    if definition[:1] == b"\n":
        try:
            found.ParseFromString(definition)
        except DecodeError:
            found.Clear()
    if not found.file:
        try:
            found.file.append(parse_source(definition.decode()))
        except UnicodeDecodeError as error:
            raise InvalidSchema("the schema is neither a .proto source nor a serialized FileDescriptorSet") from error
    if len(found.file) > _FILES_MAX or found.ByteSize() > 64 * SCHEMA_PARTS_MAX:
        raise InvalidSchema("the schema has too many parts")
    for file in found.file:
        _check_depth(list(file.message_type), SCHEMA_DEPTH_MAX)
    return list(found.file)


def _check_depth(messages: list[Any], left: int) -> None:
    if messages and not left:
        raise InvalidSchema(f"the schema is nested more than {SCHEMA_DEPTH_MAX} levels deep")
    for message in messages:
        _check_depth(list(message.nested_type), left - 1)
