"""Protobuf schemas: a .proto source or a serialized FileDescriptorSet. The protobuf runtime (upb) parses values and bounds their nesting.

The message of the values is the first one of the file (of the last file in a set). Unknown fields are valid, because newer versions add
fields. Every schema has its own descriptor pool, so that two versions of one message do not collide.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, Final

from google.protobuf import descriptor_pool, message_factory
from google.protobuf.descriptor import Descriptor
from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet
from google.protobuf.message import DecodeError, EncodeError, Message

from headrace.errors import InvalidSchema
from headrace.limits import SCHEMA_DEPTH_MAX, SCHEMA_FAULTS_MAX, SCHEMA_PARTS_MAX
from headrace.schemas.contract import Schema, SchemaType, present
from headrace.schemas.proto_source import parse_source
from headrace.schemas.protobuf_comparison import conflicts

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
