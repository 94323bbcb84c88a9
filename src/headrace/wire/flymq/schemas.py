"""Layouts of the schema requests (0x10–0x15) and of their replies.

    REGISTER_SCHEMA       name s16, type, definition b32, [compatibility s8]             → name s16, type s8, version u32
    GET_SCHEMA            name s16, [version u32]                                        → list of one entry, id s16, definition b32,
                                                                                           compatibility s8, created i64
    LIST_SCHEMAS          [name s16]                                                     → list of (id s16, type s8, version u32)
    VALIDATE_SCHEMA       name s16, value b32                                            → valid bool, list of error s16
    PRODUCE_WITH_SCHEMA   topic s16, schema s16, value b32, [key b32, partition i32]     → RecordMetadata
    DELETE_SCHEMA         name s16, version u32                                          → done

An entry is name s16, type s8, version u32. A type is s8, or s16 by the specification's rule for strings. The original's
clients and its server disagree about PRODUCE_WITH_SCHEMA: the former send the value before the schema. Both orders are accepted: one of
them fits the payload exactly. Only Headrace has compatibility, key, partition and the fields after the entry in the reply to GET_SCHEMA.
"""

from __future__ import annotations

from headrace.errors import WireError
from headrace.wire.flymq.core import MODE
from headrace.wire.flymq.fields import B32, BOOL, I32, I64, S8, S16, U32, Layout, Reader, Repeated, Trailing
from headrace.wire.flymq.messages import AUTO, Mode
from headrace.wire.flymq.schema_messages import (
    DeleteSchema,
    GetSchema,
    ListSchemas,
    ProduceWithSchema,
    RegisterSchema,
    SchemaEntries,
    SchemaEntry,
    SchemaReply,
    SchemaWord,
    Validated,
    ValidateSchema,
)


class TypeField:
    """A word whose first byte tells how its length is encoded, like `ModeField`."""

    def read(self, reader: Reader, /) -> SchemaWord:
        mode = MODE.read(reader)
        return SchemaWord(mode.word, mode.narrow)

    def write(self, value: SchemaWord, /) -> bytes:
        return MODE.write(Mode(value.word, value.narrow))


class ProduceLayout:
    """Two orders of fields, each with or without a tail. The one that fits the payload exactly is used."""

    def read(self, reader: Reader, /) -> ProduceWithSchema:
        topic = S16.read(reader)
        start = reader.at
        for with_tail in (False, True):
            found: list[ProduceWithSchema] = []
            for value_first in (False, True):
                reader.at = start
                try:
                    read = _read_order(reader, topic, value_first=value_first, with_tail=with_tail)
                except WireError:
                    continue
                if not reader.left:
                    found.append(read)
            if found:
                reader.at = reader.end
                first, *others = found
                return ProduceWithSchema(first.topic, first.schema, first.value, first.key, first.partition, others[0] if others else None)
        raise WireError("neither order of schema and value fits the payload")

    def write(self, value: ProduceWithSchema, /) -> bytes:
        tail = b"" if not value.key and value.partition == AUTO else B32.write(value.key) + I32.write(value.partition)
        return S16.write(value.topic) + S16.write(value.schema) + B32.write(value.value) + tail


def _read_order(reader: Reader, topic: str, *, value_first: bool, with_tail: bool) -> ProduceWithSchema:
    if value_first:
        value = B32.read(reader)
        schema = S16.read(reader)
    else:
        schema = S16.read(reader)
        value = B32.read(reader)
    key, partition = (B32.read(reader), I32.read(reader)) if with_tail else (b"", AUTO)
    return ProduceWithSchema(topic, schema, value, key, partition)


REGISTER_SCHEMA = Layout(RegisterSchema, name=S16, type=TypeField(), definition=B32, compatibility=Trailing(S8, ""))
GET_SCHEMA = Layout(GetSchema, name=S16, version=Trailing(U32, 0, always=True))
LIST_SCHEMAS = Layout(ListSchemas, name=Trailing(S16, "", always=True))
VALIDATE_SCHEMA = Layout(ValidateSchema, name=S16, value=B32)
PRODUCE_WITH_SCHEMA = ProduceLayout()
DELETE_SCHEMA = Layout(DeleteSchema, name=S16, version=Trailing(U32, 0, always=True))

SCHEMA_ENTRY = Layout(SchemaEntry, name=S16, type=S8, version=U32)
SCHEMA_ENTRIES = Layout(SchemaEntries, schemas=Repeated(SCHEMA_ENTRY))
SCHEMA_REPLY = Layout(
    SchemaReply,
    entries=Repeated(SCHEMA_ENTRY),
    id=Trailing(S16, "", always=True),
    definition=Trailing(B32, b"", always=True),
    compatibility=Trailing(S8, "", always=True),
    created=Trailing(I64, 0, always=True),
)
VALIDATED = Layout(Validated, valid=BOOL, errors=Repeated(S16))
