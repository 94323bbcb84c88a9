"""What FlyMQ peers say to each other.

Requests and replies are plain data; `core.py`, `groups.py` and `cluster.py` give their layouts. Two of them are columns, because
there are millions: `ProduceRun` (adjacent PRODUCE frames for one topic) and `RecordMetadataRun` (their replies).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from headrace.wire.flymq.access_messages import AccessReplies, AccessRequest
from headrace.wire.flymq.advanced_messages import AdvancedReply, AdvancedRequest
from headrace.wire.flymq.schema_messages import SchemaReplies, SchemaRequest

AUTO = -1
"""The partition of a PRODUCE that leaves the choice to the broker; the key size of a record without a key."""


# What a decoder reports besides messages.


@dataclass(frozen=True, slots=True)
class UnknownOpcode:
    """The opcode is nowhere in the specification."""

    opcode: int


@dataclass(frozen=True, slots=True)
class Malformed:
    """A whole frame whose payload cannot be read. The stream is intact: answer ERROR and go on."""

    opcode: int
    reason: str


@dataclass(frozen=True, slots=True)
class Packed:
    """A whole frame whose compressed payload is too large to be unpacked by the decoder. `RequestDecoder.unpacked` reads it afterwards."""

    opcode: int
    payload: bytes


@dataclass(frozen=True, slots=True)
class Broken:
    """The stream cannot be followed any further: close. `answer` is what to say in an ERROR frame first, if anything."""

    reason: str
    answer: str | None = None


# Core requests.


@dataclass(slots=True)
class ProduceRun:
    """Adjacent PRODUCE frames for one topic. Each record is owed one RecordMetadata, in order.

    `keys` is None when no record has a key, and so is a single key that is empty. `partitions` is None when the broker chooses for all.
    """

    topic: str
    values: list[bytes]
    keys: list[bytes | None] | None = None
    partitions: list[int] | None = None

    def __len__(self) -> int:
        return len(self.values)

    def extend(self, other: ProduceRun) -> None:
        """Put the records of `other`, a run for the same topic, behind these."""
        if other.keys is not None and self.keys is None:
            self.keys = [None] * len(self)
        if self.keys is not None:
            self.keys += other.keys or [None] * len(other)
        if other.partitions is not None and self.partitions is None:
            self.partitions = [AUTO] * len(self)
        if self.partitions is not None:
            self.partitions += other.partitions or [AUTO] * len(other)
        self.values += other.values


@dataclass(frozen=True, slots=True)
class Consume:
    topic: str
    partition: int
    offset: int


@dataclass(frozen=True, slots=True)
class ConsumeZeroCopy(Consume):
    """As `Consume`; the name is about the original's insides."""


@dataclass(frozen=True, slots=True)
class CreateTopic:
    topic: str
    partitions: int


@dataclass(frozen=True, slots=True)
class Metadata:
    topic: str


@dataclass(frozen=True, slots=True)
class Mode:
    """A word whose length the specification gives as u16 and the original as u8. `narrow` is what the peer wrote."""

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
    """Headrace's own: not now, but with this transaction."""


@dataclass(frozen=True, slots=True)
class Fetch:
    topic: str
    partition: int
    offset: int
    records_max: int
    pattern: str | None = None
    """The filter; an empty one lets everything pass, but its presence asks for the original's reply layout."""


@dataclass(frozen=True, slots=True)
class FetchBinary(Fetch):
    """As `Fetch`, answered in the original's layout in both dialects."""


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
    """An offset in mode "offset", Unix ms in mode "timestamp", without meaning (and not on the wire) in any other."""


@dataclass(frozen=True, slots=True)
class ListGroups:
    pass


@dataclass(frozen=True, slots=True)
class DescribeGroup:
    group: str
    topic: str = ""
    """Empty: the first topic the group is known for."""


@dataclass(frozen=True, slots=True)
class DeleteGroup(DescribeGroup):
    pass


@dataclass(frozen=True, slots=True)
class SeekToTimestamp:
    topic: str
    partition: int
    timestamp: int
    group: str = ""
    """Empty: only ask, move nothing."""


# Replies.


@dataclass(slots=True)
class RecordMetadataRun:
    """Where the records of adjacent PRODUCE frames went: one row a record, columns of one length."""

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


@dataclass(slots=True)
class Fetched:
    """Columns again. A key of None and an empty one look the same on the wire; they read as None."""

    offsets: Sequence[int]
    values: Sequence[bytes]
    next_offset: int
    keys: Sequence[bytes | None] | None = None
    """None when no record has a key."""


@dataclass(frozen=True, slots=True)
class Done:
    """The answer to everything that has no better one."""

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
    """The next offset to be written."""


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
class LagReply:
    current: int
    committed: int
    latest: int
    lag: int


@dataclass(frozen=True, slots=True)
class Failure:
    """An ERROR frame. `code` exists in the original's dialect only."""

    message: str
    code: int = 1


Request: TypeAlias = (
    ProduceRun
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
    | AccessRequest
    | SchemaRequest
    | AdvancedRequest
)
RequestEvent: TypeAlias = Request | UnknownOpcode | Malformed | Packed | Broken
Reply: TypeAlias = (
    RecordMetadataRun
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
    | AccessReplies
    | SchemaReplies
    | AdvancedReply
    | Failure
)


@dataclass(frozen=True, slots=True)
class ReplyFrame:
    """A reply other than RecordMetadata, undecoded: its layout depends on the request, which only the caller remembers."""

    opcode: int
    payload: bytes


ReplyEvent: TypeAlias = RecordMetadataRun | ReplyFrame | Broken


def speaks_sdk(request: RequestEvent) -> bool:
    """Does only a client of the original implementation send this? Then its connection is latched to the SDK dialect."""
    if isinstance(request, Subscribe | ResetOffset):
        return request.mode.narrow
    if isinstance(request, Fetch):
        return request.pattern is not None
    return isinstance(request, ClusterMetadata)
