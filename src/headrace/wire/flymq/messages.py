"""Messages of FlyMQ.

Requests and replies are plain dataclasses; `table.py` has their layouts. The most frequent two are
columns: `ProduceBatch` (adjacent PRODUCE frames for one topic) and `RecordMetadataBatch` (their replies).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Final, TypeAlias

from headrace.wire.flymq.access_messages import AccessReplies, AccessRequest
from headrace.wire.flymq.advanced_messages import AdvancedReply, AdvancedRequest, DelayedBatch, TxnBeginBatch, TxnWholeBatch
from headrace.wire.flymq.schema_messages import SchemaReplies, SchemaRequest

AUTO = -1
"""Partition of a PRODUCE for which the broker chooses; key size of a record without a key."""


# Other results of a decoder.


@dataclass(frozen=True, slots=True)
class UnknownOpcode:
    """The opcode is not in the specification."""

    opcode: int


@dataclass(frozen=True, slots=True)
class Malformed:
    """A complete frame whose payload cannot be decoded. The server answers ERROR, and the stream continues."""

    opcode: int
    reason: str


@dataclass(frozen=True, slots=True)
class Packed:
    """A complete frame whose compressed payload is too large for the decoder. `RequestDecoder.unpacked` decodes it later."""

    opcode: int
    payload: bytes


@dataclass(frozen=True, slots=True)
class Broken:
    """The stream cannot be decoded further and must be closed. `answer` is the text of a last ERROR frame, if any."""

    reason: str
    answer: str | None = None


# Core requests.


@dataclass(slots=True)
class ProduceBatch:
    """Adjacent PRODUCE frames for one topic. Each record is answered by one RecordMetadata, in order.

    `keys` is None if no record has a key; a single empty key is also None. `partitions` is None if the broker chooses for all.
    """

    topic: str
    values: list[bytes]
    keys: list[bytes | None] | None = None
    partitions: list[int] | None = None
    ttls: list[int] | None = None
    """Times to live in ms: the frames are PRODUCE_WITH_TTL. Such a batch is not extended."""

    def __len__(self) -> int:
        return len(self.values)

    def extend(self, other: ProduceBatch) -> None:
        """Append the records of `other`, a batch for the same topic."""
        if other.keys is not None and self.keys is None:
            self.keys = [None] * len(self)
        if self.keys is not None:
            self.keys += other.keys or [None] * len(other)
        if other.partitions is not None and self.partitions is None:
            self.partitions = [AUTO] * len(self)
        if self.partitions is not None:
            self.partitions += other.partitions or [AUTO] * len(other)
        self.values += other.values


@dataclass(slots=True)
class ProduceMany:
    """Adjacent PRODUCE frames for several topics, of which none names a partition. Each is answered as in `ProduceBatch`."""

    topics: list[str]
    values: list[bytes]
    keys: list[bytes | None] | None = None

    def __len__(self) -> int:
        return len(self.values)

    def batches(self) -> list[ProduceBatch]:
        """Return the same frames as one batch for each change of the topic."""
        found: list[ProduceBatch] = []
        for topic, indexes in groupby(range(len(self)), self.topics.__getitem__):
            picked = list(indexes)
            part = slice(picked[0], picked[-1] + 1)
            keys = None if self.keys is None else self.keys[part]
            found.append(ProduceBatch(topic, self.values[part], keys if keys and any(keys) else None))
        return found


@dataclass(slots=True, init=False)
class Consume:
    topic: str
    partition: int
    offset: int

    # Written out, here and below, because mypyc does not compile a generated constructor, and a client sends these one at a time.
    def __init__(self, topic: str, partition: int, offset: int) -> None:
        self.topic, self.partition, self.offset = topic, partition, offset


@dataclass(slots=True, init=False)
class ConsumeZeroCopy(Consume):
    """Same as `Consume`. The name refers to internals of the original."""


@dataclass(frozen=True, slots=True)
class CreateTopic:
    topic: str
    partitions: int


@dataclass(frozen=True, slots=True)
class Metadata:
    topic: str


@dataclass(frozen=True, slots=True)
class Mode:
    """A word with a u16 length in the specification and a u8 length in the original. `narrow`: the peer sent u8."""

    word: str
    narrow: bool = False


@dataclass(frozen=True, slots=True)
class Subscribe:
    topic: str
    group: str
    partition: int
    mode: Mode


@dataclass(frozen=True, slots=True)
class Commit:
    topic: str
    group: str
    partition: int
    offset: int
    transaction: str = ""
    """Only in Headrace: commit with this transaction."""


@dataclass(frozen=True, slots=True)
class CommitBatch:
    """Adjacent COMMIT frames for one topic and group, outside a transaction."""

    topic: str
    group: str
    partitions: list[int]
    offsets: list[int]

    def __len__(self) -> int:
        return len(self.offsets)

    def commits(self) -> list[Commit]:
        return [Commit(self.topic, self.group, *place) for place in zip(self.partitions, self.offsets, strict=True)]


@dataclass(slots=True, init=False)
class Fetch:
    topic: str
    partition: int
    offset: int
    records_max: int
    pattern: str | None = None
    """Filter. An empty one passes everything, but its presence selects the original's reply layout."""

    def __init__(self, topic: str, partition: int, offset: int, records_max: int, pattern: str | None = None) -> None:
        self.topic, self.partition, self.offset, self.records_max, self.pattern = topic, partition, offset, records_max, pattern


@dataclass(slots=True, init=False)
class FetchBinary(Fetch):
    """Same as `Fetch`, answered in the original's layout in both dialects."""


@dataclass(frozen=True, slots=True)
class ListTopics:
    pass


@dataclass(frozen=True, slots=True)
class DeleteTopic:
    topic: str


# Cluster and group requests.


@dataclass(frozen=True, slots=True)
class ClusterMetadata:
    topic: str = ""
    """Empty: all topics."""


@dataclass(frozen=True, slots=True)
class GetOffset:
    topic: str
    group: str
    partition: int


@dataclass(frozen=True, slots=True)
class GetLag(GetOffset):
    pass


@dataclass(frozen=True, slots=True)
class ResetOffset:
    topic: str
    group: str
    partition: int
    mode: Mode
    target: int = 0
    """Offset in mode "offset", Unix ms in mode "timestamp", unused (and not sent) in any other mode."""


@dataclass(frozen=True, slots=True)
class ListGroups:
    pass


@dataclass(frozen=True, slots=True)
class DescribeGroup:
    group: str
    topic: str = ""
    """Empty: the first topic of the group."""


@dataclass(frozen=True, slots=True)
class DeleteGroup(DescribeGroup):
    pass


@dataclass(frozen=True, slots=True)
class SeekToTimestamp:
    topic: str
    partition: int
    timestamp: int
    group: str = ""
    """Empty: return the offset without committing it."""


@dataclass(frozen=True, slots=True)
class GroupJoin:
    """Join a group as a member. The member belongs to the connection and leaves with it."""

    topic: str
    group: str
    mode: str = ""
    """`ordered` or `shared`. Empty: that of the group, and ordered for the first member."""
    partition: int = -1
    """-1: all partitions."""
    start: str = "latest"
    """Where a new group begins: `earliest`, `latest`, `offset` or `timestamp` (Unix ms)."""
    target: int = 0
    """Offset or time."""


@dataclass(frozen=True, slots=True)
class GroupTake:
    member: int
    records_max: int
    wait_ms: int = 0


@dataclass(frozen=True, slots=True)
class GroupSettle:
    member: int
    kind: int
    """One of `ACK`, `NACK` and `ACK_UP_TO`."""
    places: list[PartitionOffset]


@dataclass(frozen=True, slots=True)
class GroupLeave:
    member: int


ACK: Final = 0
NACK: Final = 1
ACK_UP_TO: Final = 2
"""Kinds of `GroupSettle`: settle these records, deliver them again, or settle all records of their partitions up to them."""


# Replies.


@dataclass(slots=True)
class RecordMetadataBatch:
    """Partitions and offsets of the records of adjacent PRODUCE frames: one row for each record, columns of one length."""

    topic: str
    partitions: Sequence[int]
    offsets: Sequence[int]
    timestamps: Sequence[int]
    key_sizes: Sequence[int]
    """`AUTO` (-1) for a record without a key."""
    value_sizes: Sequence[int]

    def __len__(self) -> int:
        return len(self.offsets)


@dataclass(frozen=True, slots=True)
class Consumed:
    key: bytes
    value: bytes


@dataclass(slots=True, init=False)
class Fetched:
    """Records in columns. None and an empty key have the same encoding and decode as None."""

    offsets: Sequence[int]
    values: Sequence[bytes]
    next_offset: int
    keys: Sequence[bytes | None] | None = None
    """None if no record has a key."""
    value_size: int | None = field(default=None, compare=False)
    """Size of each value, if all have one and the sender has found it out."""

    def __init__(
        self,
        offsets: Sequence[int],
        values: Sequence[bytes],
        next_offset: int,
        keys: Sequence[bytes | None] | None = None,
        value_size: int | None = None,
    ) -> None:
        self.offsets, self.values, self.next_offset, self.keys, self.value_size = offsets, values, next_offset, keys, value_size


@dataclass(frozen=True, slots=True)
class Done:
    """Reply to every request without a reply of its own."""

    success: bool = True
    message: str = ""


@dataclass(frozen=True, slots=True)
class OffsetReply:
    offset: int


@dataclass(frozen=True, slots=True)
class TopicList:
    topics: list[str]


@dataclass(frozen=True, slots=True)
class PartitionBounds:
    partition: int
    leader: int
    first: int
    end: int
    """Offset of the next record."""


@dataclass(frozen=True, slots=True)
class TopicMetadata:
    topic: str
    partitions: list[PartitionBounds]


@dataclass(frozen=True, slots=True)
class PartitionLeadership:
    partition: int
    leader: str
    address: str
    epoch: int = 1
    state: str = "online"
    replicas: list[str] = field(default_factory=list)
    in_sync: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class TopicLeadership:
    topic: str
    partitions: list[PartitionLeadership]


@dataclass(frozen=True, slots=True)
class ClusterTopics:
    cluster: str
    topics: list[TopicLeadership]


@dataclass(frozen=True, slots=True)
class PartitionOffset:
    partition: int
    offset: int


@dataclass(frozen=True, slots=True)
class GroupEntry:
    """One group on one topic."""

    topic: str
    group: str
    members: int
    offsets: list[PartitionOffset]


@dataclass(frozen=True, slots=True)
class GroupList:
    groups: list[GroupEntry]


@dataclass(frozen=True, slots=True)
class GroupJoined:
    member: int
    mode: str


@dataclass(frozen=True, slots=True)
class TakenRecord:
    partition: int
    offset: int
    attempt: int
    timestamp: int
    key: bytes
    value: bytes


@dataclass(frozen=True, slots=True)
class GroupTaken:
    records: list[TakenRecord]


@dataclass(frozen=True, slots=True)
class GroupSettled:
    """For each record: False if the member no longer has it."""

    known: list[bool]


@dataclass(frozen=True, slots=True)
class LagReply:
    current: int
    committed: int
    latest: int
    lag: int


@dataclass(frozen=True, slots=True)
class Failure:
    """An ERROR frame. `code` exists only in the original's dialect."""

    message: str
    code: int = 1


Request: TypeAlias = (
    ProduceBatch
    | Consume
    | CreateTopic
    | Metadata
    | Subscribe
    | Commit
    | Fetch
    | ListTopics
    | DeleteTopic
    | ClusterMetadata
    | GetOffset
    | ResetOffset
    | ListGroups
    | DescribeGroup
    | SeekToTimestamp
    | GroupJoin
    | GroupTake
    | GroupSettle
    | GroupLeave
    | AccessRequest
    | SchemaRequest
    | AdvancedRequest
)
RequestEvent: TypeAlias = (
    Request | ProduceMany | CommitBatch | DelayedBatch | TxnBeginBatch | TxnWholeBatch | UnknownOpcode | Malformed | Packed | Broken
)
Reply: TypeAlias = (
    RecordMetadataBatch
    | Consumed
    | Fetched
    | Done
    | OffsetReply
    | TopicList
    | TopicMetadata
    | ClusterTopics
    | GroupList
    | GroupEntry
    | LagReply
    | GroupJoined
    | GroupTaken
    | GroupSettled
    | AccessReplies
    | SchemaReplies
    | AdvancedReply
    | Failure
)


@dataclass(frozen=True, slots=True)
class ReplyFrame:
    """An undecoded reply other than RecordMetadata. Its layout depends on the request, which the caller knows."""

    opcode: int
    payload: bytes


ReplyEvent: TypeAlias = RecordMetadataBatch | ReplyFrame | Broken


def speaks_sdk(request: RequestEvent) -> bool:
    """Return whether only clients of the original send this. The connection then switches to the SDK dialect."""
    if isinstance(request, Subscribe | ResetOffset):
        return request.mode.narrow
    if isinstance(request, Fetch):
        return request.pattern is not None
    return isinstance(request, ClusterMetadata)
