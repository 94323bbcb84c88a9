"""Layouts that the list of fields in `table.py` cannot express: fields whose form depends on others or on the rest of the payload."""

from __future__ import annotations

from typing import Final, Generic, TypeVar

from headrace.errors import InvalidRequest, WireError
from headrace.wire.flymq import advanced_messages as v
from headrace.wire.flymq import messages as m
from headrace.wire.flymq import schema_messages as s
from headrace.wire.flymq.fields import B32, BOOL, I32, I64, S8, S16, U32, U64, Field, Integer, Layout
from headrace.wire.flymq.reader import Reader

T = TypeVar("T")
G = TypeVar("G", bound=m.DescribeGroup)

RESET_TARGETS: Final[dict[str, Integer]] = {"offset": U64, "timestamp": I64}
"""Modes of RESET_OFFSET with a target: an offset, or a time in Unix ms."""
_SEEK_TAIL_BYTES: Final = 12
"""Partition and timestamp: the rest after the topic if there is no group."""
_OFFSET_BYTES: Final = 8
_SAME_LENGTH_ID: Final = b"\x00\x06"


class ModeField:
    """A word as s16 (the specification) or s8 (the original).

    No word is longer than 255 bytes, so an s16 starts with a zero byte. An s8 that starts with a zero byte is an empty word at the end.
    """

    def read(self, reader: Reader, /) -> m.Mode:
        narrow = reader.peek() != 0 or reader.left == 1
        return m.Mode((S8 if narrow else S16).read(reader), narrow)

    def write(self, value: m.Mode, /) -> bytes:
        if len(value.word.encode()) > 255:
            raise InvalidRequest("a mode has at most 255 bytes")
        return (S8 if value.narrow else S16).write(value.word)


MODE: Final = ModeField()


class ExactText:
    """An optional text after the last field. It fills the rest of the payload; anything else there is ignored."""

    def read(self, reader: Reader, /) -> str:
        if reader.left < 2 or int.from_bytes(reader.payload[reader.at : reader.at + 2], "big") != reader.left - 2:
            return ""
        return S16.read(reader)

    def write(self, value: str, /) -> bytes:
        return S16.write(value) if value else b""


class Sized(Generic[T]):
    """A u32 size, then a field of that many bytes. Bytes after the field are ignored."""

    def __init__(self, inner: Field[T]) -> None:
        self._inner = inner

    def read(self, reader: Reader, /) -> T:
        size = U32.read(reader)
        if size > reader.left:
            raise WireError(f"{size} bytes announced, {reader.left} left")
        inside = Reader(reader.payload, reader.at, reader.at + size)
        reader.at += size
        return self._inner.read(inside)

    def write(self, value: T, /) -> bytes:
        return B32.write(self._inner.write(value))


class ResetLayout:
    message = m.ResetOffset

    def read(self, reader: Reader, /) -> m.ResetOffset:
        topic, group, partition, mode = S16.read(reader), S16.read(reader), I32.read(reader), MODE.read(reader)
        target = RESET_TARGETS.get(mode.word)
        return m.ResetOffset(topic, group, partition, mode, 0 if target is None else target.read(reader))

    def write(self, value: m.ResetOffset, /) -> bytes:
        target = RESET_TARGETS.get(value.mode.word)
        head = S16.write(value.topic) + S16.write(value.group) + I32.write(value.partition) + MODE.write(value.mode)
        return head if target is None else head + target.write(value.target)


class GroupLayout(Generic[G]):
    """Some clients send the group alone: the only text is then the group."""

    def __init__(self, message: type[G]) -> None:
        self.message = message

    def read(self, reader: Reader, /) -> G:
        first = S16.read(reader)
        return self.message(S16.read(reader), first) if reader.left else self.message(first)

    def write(self, value: G, /) -> bytes:
        return S16.write(value.topic) + S16.write(value.group)


class SeekLayout:
    message = m.SeekToTimestamp

    def read(self, reader: Reader, /) -> m.SeekToTimestamp:
        topic = S16.read(reader)
        group = "" if reader.left == _SEEK_TAIL_BYTES else S16.read(reader)
        return m.SeekToTimestamp(topic, I32.read(reader), I64.read(reader), group)

    def write(self, value: m.SeekToTimestamp, /) -> bytes:
        return S16.write(value.topic) + S16.write(value.group) + I32.write(value.partition) + I64.write(value.timestamp)


class ReplayLayout:
    """Some clients replay by the offset in the dead-letter topic: eight bytes, which could also be an id of six bytes with its length."""

    message = v.ReplayDlq

    def read(self, reader: Reader, /) -> v.ReplayDlq:
        topic = S16.read(reader)
        if reader.left == _OFFSET_BYTES and not reader.payload.startswith(_SAME_LENGTH_ID, reader.at):
            return v.ReplayDlq(topic, f"0-{U64.read(reader)}")
        return v.ReplayDlq(topic, S16.read(reader))

    def write(self, value: v.ReplayDlq, /) -> bytes:
        return S16.write(value.topic) + S16.write(value.message)


class CancelLayout:
    """A topic and an id, or the id alone."""

    message = v.CancelDelayed

    def read(self, reader: Reader, /) -> v.CancelDelayed:
        first = S16.read(reader)
        return v.CancelDelayed(S16.read(reader), first) if reader.left else v.CancelDelayed(first)

    def write(self, value: v.CancelDelayed, /) -> bytes:
        return (S16.write(value.topic) if value.topic else b"") + S16.write(value.message)


class TypeField:
    """A word whose first byte tells how its length is encoded, like `ModeField`."""

    def read(self, reader: Reader, /) -> s.SchemaWord:
        mode = MODE.read(reader)
        return s.SchemaWord(mode.word, mode.narrow)

    def write(self, value: s.SchemaWord, /) -> bytes:
        return MODE.write(m.Mode(value.word, value.narrow))


class ProduceLayout:
    """PRODUCE_WITH_SCHEMA. The original's clients send the value before the schema, its server expects it after. Both orders are accepted,
    each with or without a tail: the one that fits the payload exactly is used."""

    message = s.ProduceWithSchema

    def read(self, reader: Reader, /) -> s.ProduceWithSchema:
        topic = S16.read(reader)
        start = reader.at
        for with_tail in (False, True):
            found: list[s.ProduceWithSchema] = []
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
                return s.ProduceWithSchema(
                    first.topic, first.schema, first.value, first.key, first.partition, others[0] if others else None
                )
        raise WireError("neither order of schema and value fits the payload")

    def write(self, value: s.ProduceWithSchema, /) -> bytes:
        tail = b"" if not value.key and value.partition == m.AUTO else B32.write(value.key) + I32.write(value.partition)
        return S16.write(value.topic) + S16.write(value.schema) + B32.write(value.value) + tail


def _read_order(reader: Reader, topic: str, *, value_first: bool, with_tail: bool) -> s.ProduceWithSchema:
    if value_first:
        value = B32.read(reader)
        schema = S16.read(reader)
    else:
        schema = S16.read(reader)
        value = B32.read(reader)
    key, partition = (B32.read(reader), I32.read(reader)) if with_tail else (b"", m.AUTO)
    return s.ProduceWithSchema(topic, schema, value, key, partition)


_NODE = Layout(v.ClusterNode, id=S16, address=S16, cluster_address=S16, state=S16, role=S16, is_leader=BOOL, uptime=S16)


class ReportLayout:
    """List of nodes whose count comes before other fields."""

    def read(self, reader: Reader, /) -> v.ClusterReport:
        cluster, leader, term, index = S16.read(reader), S16.read(reader), U64.read(reader), U64.read(reader)
        nodes, topics, messages = U32.read(reader), U32.read(reader), U64.read(reader)
        return v.ClusterReport(cluster, leader, term, index, nodes, topics, messages, [_NODE.read(reader) for _ in range(nodes)])

    def write(self, value: v.ClusterReport, /) -> bytes:
        head = S16.write(value.cluster) + S16.write(value.leader) + U64.write(value.term) + U64.write(value.commit_index)
        counts = U32.write(value.node_count) + U32.write(value.topic_count) + U64.write(value.message_count)
        return head + counts + b"".join(map(_NODE.write, value.nodes))
