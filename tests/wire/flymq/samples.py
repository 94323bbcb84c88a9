"""Messages of every kind, and ways to cut a stream, for the tests of this directory."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator

from headrace.wire.flymq import Dialect, ReplyDecoder, RequestDecoder
from headrace.wire.flymq.advanced_messages import DelayedBatch, ProduceWithTtl, TxnBeginBatch, TxnProduceBatch, TxnWholeBatch
from headrace.wire.flymq.framing import BINARY, HEADER, MAGIC, VERSION
from headrace.wire.flymq.messages import (
    AUTO,
    ClusterMetadata,
    ClusterTopics,
    Commit,
    CommitBatch,
    Consume,
    Consumed,
    ConsumeZeroCopy,
    CreateTopic,
    DeleteGroup,
    DeleteTopic,
    DescribeGroup,
    Done,
    Fetch,
    FetchBinary,
    Fetched,
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
    ListTopics,
    Metadata,
    Mode,
    OffsetReply,
    PartitionBounds,
    PartitionLeadership,
    PartitionOffset,
    ProduceBatch,
    ProduceMany,
    RecordMetadataBatch,
    Reply,
    ReplyEvent,
    Request,
    RequestEvent,
    ResetOffset,
    SeekToTimestamp,
    Subscribe,
    TakenRecord,
    TopicLeadership,
    TopicList,
    TopicMetadata,
)
from tests.wire.flymq import access_samples, advanced_samples, schema_samples

REQUESTS: list[Request] = [
    ProduceBatch("orders", [b"one"]),
    ProduceBatch("orders", [b"", b"two"], [b"k", None], [3, AUTO]),
    Consume("orders", 2, 41),
    CreateTopic("größe", 12),
    Metadata("orders"),
    Subscribe("orders", "readers", 0, Mode("earliest")),
    Subscribe("orders", "readers", 0, Mode("latest", narrow=True)),
    Subscribe("orders", "readers", 0, Mode("")),
    Subscribe("orders", "readers", 0, Mode("", narrow=True)),
    Commit("orders", "readers", 1, 2**64 - 1),
    Fetch("orders", 0, 7, 100),
    Fetch("orders", 0, 7, 100, ""),
    Fetch("orders", 0, 7, -1, "$.user.id"),
    ListTopics(),
    DeleteTopic("orders"),
    ConsumeZeroCopy("orders", -1, 0),
    FetchBinary("orders", 0, 7, 100),
    ClusterMetadata(),
    ClusterMetadata("orders"),
    GetOffset("orders", "readers", 0),
    ResetOffset("orders", "readers", 0, Mode("earliest")),
    ResetOffset("orders", "readers", 0, Mode("latest", narrow=True)),
    ResetOffset("orders", "readers", 0, Mode("offset"), 99),
    ResetOffset("orders", "readers", 0, Mode("timestamp", narrow=True), -1),
    ListGroups(),
    DescribeGroup("readers", "orders"),
    DescribeGroup("readers"),
    GetLag("orders", "readers", 0),
    DeleteGroup("readers", "orders"),
    SeekToTimestamp("orders", 0, 1_706_615_843_840, "readers"),
    SeekToTimestamp("orders", 0, 1_706_615_843_840),
    GroupJoin("orders", "readers"),
    GroupJoin("orders", "readers", "shared", 3, "timestamp", -5),
    GroupTake(1 << 60, 100, 500),
    GroupSettle(1 << 60, 2, [PartitionOffset(0, 5), PartitionOffset(1, 1 << 40)]),
    GroupLeave(1 << 60),
    *access_samples.REQUESTS,
    *advanced_samples.REQUESTS,
    *schema_samples.REQUESTS,
]

_ENTRY = GroupEntry("orders", "readers", 0, [PartitionOffset(0, 5), PartitionOffset(1, 0)])

REPLIES: list[tuple[int, Reply]] = [
    (0x01, RecordMetadataBatch("orders", [0, 1], [7, 0], [1_706_615_843_840, 0], [-1, 3], [5, 0])),
    (0x02, Consumed(b"k", b"value")),
    (0x03, Done()),
    (0x04, TopicMetadata("orders", [PartitionBounds(0, 1, 5, 9), PartitionBounds(1, 1, 0, 0)])),
    (0x05, OffsetReply(2**64 - 1)),
    (0x06, Done(True, "committed")),
    (0x07, Fetched([], [], 12)),
    (0x07, Fetched([5], [b"value"], 6)),
    (0x07, Fetched([5, 9], [b"", b"value"], 10, [b"k", None])),
    (0x08, TopicList(["a", "orders"])),
    (0x09, Done(False, "no")),
    (0x0A, Consumed(b"", b"")),
    (0x0B, Fetched([5, 6], [b"a", b"b"], 7)),
    (0x53, ClusterTopics("standalone", [TopicLeadership("orders", [PartitionLeadership(0, "n", "h:1", 1, "online", ["n"], ["n"])])])),
    (0x60, OffsetReply(3)),
    (0x61, Done()),
    (0x62, GroupList([_ENTRY, GroupEntry("other", "readers", 2, [])])),
    (0x63, _ENTRY),
    (0x64, LagReply(1, 1, 9, 8)),
    (0x65, Done()),
    (0x66, OffsetReply(0)),
    (0x67, GroupJoined(1 << 60, "ordered")),
    (0x68, GroupTaken([TakenRecord(0, 5, 1, 1_706_615_843_840, b"k", b"value"), TakenRecord(1, 6, 2, 0, b"", b"")])),
    (0x69, GroupSettled([True, False])),
    (0x6A, Done(True, "left the group")),
    *access_samples.REPLIES,
    *advanced_samples.REPLIES,
    *schema_samples.REPLIES,
]

DIALECTS = list(Dialect)


def raw(
    opcode: int, payload: bytes, *, flags: int = BINARY, length: int | None = None, magic: int = MAGIC, version: int = VERSION
) -> bytes:
    """A frame whose header may lie."""
    return HEADER.pack(magic, version, opcode, flags, len(payload) if length is None else length) + payload


def flat(events: Iterable[RequestEvent]) -> list[object]:
    """Split batches into records. The size of a batch depends on the cuts, its records do not."""
    records: list[object] = []
    for event in events:
        if isinstance(event, ProduceMany):
            records += flat(event.batches())
        elif isinstance(event, TxnBeginBatch):
            records += event.requests()
        elif isinstance(event, TxnWholeBatch):
            records += flat(event.split(len(event))[0])
        elif isinstance(event, CommitBatch):
            records += event.commits()
        elif isinstance(event, DelayedBatch):
            records += event.messages()
        elif isinstance(event, ProduceBatch) and event.ttls is not None:
            assert event.keys is None and event.partitions is None
            records += [ProduceWithTtl(event.topic, value, ttl_ms) for value, ttl_ms in zip(event.values, event.ttls, strict=True)]
        elif isinstance(event, ProduceBatch):
            keys = event.keys or [None] * len(event)
            partitions = event.partitions or [AUTO] * len(event)
            assert len(event.values) == len(keys) == len(partitions)
            records += [(event.topic, *row) for row in zip(keys, event.values, partitions, strict=True)]
        elif isinstance(event, TxnProduceBatch):
            keys = event.keys or [None] * len(event)
            partitions = event.partitions or [AUTO] * len(event)
            records += [(event.transaction, event.topic, *row) for row in zip(keys, event.values, partitions, strict=True)]
        else:
            records.append(event)
    return records


def flat_replies(events: Iterable[ReplyEvent]) -> list[object]:
    rows: list[object] = []
    for event in events:
        if isinstance(event, RecordMetadataBatch):
            columns = (event.partitions, event.offsets, event.timestamps, event.key_sizes, event.value_sizes)
            rows += [(event.topic, *row) for row in zip(*columns, strict=True)]
        else:
            rows.append(event)
    return rows


def chunks(stream: bytes, seed: int, longest: int = 64) -> Iterator[bytes]:
    """The stream, cut at random."""
    dice, position = random.Random(seed), 0
    while position < len(stream):
        size = dice.randint(1, longest)
        yield stream[position : position + size]
        position += size


def decoded(parts: Iterable[bytes]) -> list[object]:
    decoder = RequestDecoder()
    events: list[RequestEvent] = []
    for part in parts:
        events += decoder.feed(part)
        while decoder.more:
            events += decoder.feed(b"")
    return flat(events)


def decoded_replies(parts: Iterable[bytes]) -> list[object]:
    decoder = ReplyDecoder()
    return flat_replies(event for part in parts for event in decoder.feed(part))


def bytewise(stream: bytes) -> Iterator[bytes]:
    return (stream[index : index + 1] for index in range(len(stream)))
