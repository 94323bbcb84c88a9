"""Layouts of the group requests (0x60–0x6A) and of their replies.

    GET_OFFSET          topic s16, group s16, partition i32                              → offset u64
    RESET_OFFSET        topic s16, group s16, partition i32, mode, [target u64 / i64]    → done
    LIST_GROUPS         –                                                                → list of entries
    DESCRIBE_GROUP      [topic s16], group s16                                           → entry
    GET_LAG             topic s16, group s16, partition i32                              → current u64, committed u64, latest u64, lag u64
    DELETE_GROUP        [topic s16], group s16                                           → done
    SEEK_TO_TIMESTAMP   topic s16, [group s16], partition i32, timestamp i64             → offset u64
    GROUP_JOIN          topic s16, group s16, mode s16, partition i32, start s16, target i64    → member u64, mode s16
    GROUP_TAKE          member u64, records_max i32, wait_ms i32                         → list of records
    GROUP_SETTLE        member u64, kind u8, list of (partition i32, offset u64)         → list of bool
    GROUP_LEAVE         member u64                                                       → done

An entry is topic s16, group s16, members u32, list of (partition i32, offset u64). The target is present only in the modes "offset"
(u64) and "timestamp" (i64, Unix ms). A record of GROUP_TAKE is partition i32, offset u64, attempt u32, timestamp i64, key b32, value b32.
The specification names the opcodes up to DELETE_GROUP without a layout. Only Headrace has the others.
"""

from __future__ import annotations

from typing import Generic, TypeVar

from headrace.wire.flymq.core import MODE
from headrace.wire.flymq.fields import B32, BOOL, I32, I64, S16, U8, U32, U64, Integer, Layout, Reader, Repeated
from headrace.wire.flymq.messages import (
    DeleteGroup,
    DescribeGroup,
    GetLag,
    GetOffset,
    GroupEntry,
    GroupJoin,
    GroupJoined,
    GroupLeave,
    GroupList,
    GroupSettle,
    GroupSettled,
    GroupTake,
    GroupTaken,
    LagReply,
    ListGroups,
    PartitionOffset,
    ResetOffset,
    SeekToTimestamp,
    TakenRecord,
)

G = TypeVar("G", bound=DescribeGroup)

RESET_TARGETS: dict[str, Integer] = {"offset": U64, "timestamp": I64}
"""Modes with a target."""

_SEEK_TAIL_BYTES = 12
"""Partition and timestamp: the rest after the topic if there is no group."""


class ResetLayout:
    def read(self, reader: Reader, /) -> ResetOffset:
        topic, group, partition, mode = S16.read(reader), S16.read(reader), I32.read(reader), MODE.read(reader)
        target = RESET_TARGETS.get(mode.word)
        return ResetOffset(topic, group, partition, mode, 0 if target is None else target.read(reader))

    def write(self, value: ResetOffset, /) -> bytes:
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
    def read(self, reader: Reader, /) -> SeekToTimestamp:
        topic = S16.read(reader)
        group = "" if reader.left == _SEEK_TAIL_BYTES else S16.read(reader)
        return SeekToTimestamp(topic, I32.read(reader), I64.read(reader), group)

    def write(self, value: SeekToTimestamp, /) -> bytes:
        return S16.write(value.topic) + S16.write(value.group) + I32.write(value.partition) + I64.write(value.timestamp)


GET_OFFSET = Layout(GetOffset, topic=S16, group=S16, partition=I32)
RESET_OFFSET = ResetLayout()
LIST_GROUPS = Layout(ListGroups)
DESCRIBE_GROUP = GroupLayout(DescribeGroup)
GET_LAG = Layout(GetLag, topic=S16, group=S16, partition=I32)
DELETE_GROUP = GroupLayout(DeleteGroup)
SEEK_TO_TIMESTAMP = SeekLayout()

_PLACES = Repeated(Layout(PartitionOffset, partition=I32, offset=U64))
GROUP_ENTRY = Layout(
    GroupEntry,
    topic=S16,
    group=S16,
    members=U32,
    offsets=_PLACES,
)
GROUP_LIST = Layout(GroupList, groups=Repeated(GROUP_ENTRY))
GROUP_JOIN = Layout(GroupJoin, topic=S16, group=S16, mode=S16, partition=I32, start=S16, target=I64)
GROUP_TAKE = Layout(GroupTake, member=U64, records_max=I32, wait_ms=I32)
GROUP_SETTLE = Layout(GroupSettle, member=U64, kind=U8, places=_PLACES)
GROUP_LEAVE = Layout(GroupLeave, member=U64)
GROUP_JOINED = Layout(GroupJoined, member=U64, mode=S16)
GROUP_TAKEN = Layout(
    GroupTaken,
    records=Repeated(Layout(TakenRecord, partition=I32, offset=U64, attempt=U32, timestamp=I64, key=B32, value=B32)),
)
GROUP_SETTLED = Layout(GroupSettled, known=Repeated(BOOL))
LAG = Layout(LagReply, current=U64, committed=U64, latest=U64, lag=U64)
