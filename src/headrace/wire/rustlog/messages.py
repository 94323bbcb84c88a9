"""The messages of RustLog, the same in both dialects.

A request travels as JSON (`Dialect.JSON`, the published specification) or as big-endian fields (`Dialect.BINARY`, what the
original client sends). Records are columns: one `Produce` or `FetchReply` holds many, and no object is made for a single one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from headrace.errors import WireError


class Dialect(Enum):
    """How a frame's payload is written. Every frame chooses; the reply follows its request."""

    JSON = "json"
    BINARY = "binary"


class Undecodable(WireError):
    """A frame whose payload is no message. The text is what the peer gets to read, without the dialect's prefix."""


# Requests


@dataclass(slots=True)
class Produce:
    """Append these records to a partition, all or none."""

    topic: str
    partition: int
    records: Sequence[bytes]


@dataclass(slots=True)
class Fetch:
    """Read from an offset, or from the group's committed offset if that is higher. An empty `group_id` means no group."""

    topic: str
    partition: int
    offset: int
    max_bytes: int
    group_id: str = ""


@dataclass(slots=True)
class OffsetCommit:
    """The group will read on at `offset`."""

    topic: str
    partition: int
    group_id: str
    offset: int


@dataclass(slots=True)
class OffsetFetch:
    """Where will the group read on?"""

    topic: str
    partition: int
    group_id: str


@dataclass(slots=True)
class CreateTopic:
    topic: str
    partition_count: int


@dataclass(slots=True)
class ListTopics:
    pass


@dataclass(slots=True)
class DescribeTopic:
    topic: str


@dataclass(slots=True)
class DescribePartition:
    topic: str
    partition: int


@dataclass(slots=True)
class MetricsFetch:
    pass


@dataclass(slots=True)
class Ping:
    pass


Request: TypeAlias = (
    Produce | Fetch | OffsetCommit | OffsetFetch | CreateTopic | ListTopics | DescribeTopic | DescribePartition | MetricsFetch | Ping
)

# Replies


@dataclass(slots=True)
class ProduceReply:
    """One offset a record, in the order of the request; a `range` wherever they are dense, which the binary dialect requires."""

    offsets: Sequence[int]


@dataclass(slots=True)
class FetchReply:
    """Records and where to read on. The binary dialect sends no offsets: there they must be dense and end at `next_offset`."""

    offsets: Sequence[int]
    values: Sequence[bytes]
    next_offset: int


@dataclass(slots=True)
class OffsetCommitReply:
    success: bool


@dataclass(slots=True)
class OffsetFetchReply:
    """None: the group has never committed an offset there."""

    offset: int | None


@dataclass(slots=True)
class CreateTopicReply:
    success: bool


@dataclass(slots=True)
class ListTopicsReply:
    """Names and partition counts, sorted by name."""

    topics: list[tuple[str, int]]


@dataclass(slots=True)
class DescribeTopicReply:
    """`partitions` holds (partition, high watermark): the offset the next record will get."""

    topic: str
    partition_count: int
    partitions: list[tuple[int, int]]


@dataclass(slots=True)
class DescribePartitionReply:
    topic: str
    partition: int
    high_watermark: int


@dataclass(slots=True)
class MetricsReply:
    """Prometheus text."""

    metrics: str


@dataclass(slots=True)
class Pong:
    pass


@dataclass(slots=True)
class ErrorReply:
    """`code` travels in the binary dialect only; it is 0 when it came as JSON."""

    message: str
    code: int = 0


Reply: TypeAlias = (
    ProduceReply
    | FetchReply
    | OffsetCommitReply
    | OffsetFetchReply
    | CreateTopicReply
    | ListTopicsReply
    | DescribeTopicReply
    | DescribePartitionReply
    | MetricsReply
    | Pong
    | ErrorReply
)
