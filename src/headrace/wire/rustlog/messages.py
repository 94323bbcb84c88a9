"""Messages of RustLog, the same in both dialects.

A request is encoded as JSON (`Dialect.JSON`, the published specification) or as big-endian fields (`Dialect.BINARY`, used by the original
client). Records are columns: one `Produce` or `FetchReply` holds many of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeAlias

from headrace.errors import WireError


class Dialect(Enum):
    """Encoding of a payload. Every frame selects it; a reply uses that of its request."""

    JSON = "json"
    BINARY = "binary"


class Undecodable(WireError):
    """A payload that is no message. The peer gets the text after the dialect's prefix."""


# Requests


@dataclass(slots=True, init=False)
class Produce:
    """Append these records to a partition, all or none."""

    topic: str
    partition: int
    records: Sequence[bytes]

    # Written out, here and below, because mypyc does not compile a generated constructor, and a client sends these one at a time.
    def __init__(self, topic: str, partition: int, records: Sequence[bytes]) -> None:
        self.topic, self.partition, self.records = topic, partition, records


@dataclass(slots=True, init=False)
class Fetch:
    """Read from an offset, or from the group's committed offset if that is higher. An empty `group_id` means no group."""

    topic: str
    partition: int
    offset: int
    max_bytes: int
    group_id: str = ""

    def __init__(self, topic: str, partition: int, offset: int, max_bytes: int, group_id: str = "") -> None:
        self.topic, self.partition, self.offset, self.max_bytes, self.group_id = topic, partition, offset, max_bytes, group_id


@dataclass(slots=True)
class OffsetCommit:
    """Commit `offset` as the next one to read."""

    topic: str
    partition: int
    group_id: str
    offset: int


@dataclass(slots=True)
class OffsetFetch:
    """Return the group's committed offset."""

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


@dataclass(slots=True, init=False)
class ProduceReply:
    """Offsets of the records, in the order of the request. A `range` if they are dense, which the binary dialect requires."""

    offsets: Sequence[int]

    def __init__(self, offsets: Sequence[int]) -> None:
        self.offsets = offsets


@dataclass(slots=True, init=False)
class FetchReply:
    """Records and the next offset. The binary dialect sends no offsets: they must be dense and end at `next_offset`."""

    offsets: Sequence[int]
    values: Sequence[bytes]
    next_offset: int
    value_size: int | None = field(default=None, compare=False)
    """Size of each value, if all have one and the sender has found it out."""

    def __init__(self, offsets: Sequence[int], values: Sequence[bytes], next_offset: int, value_size: int | None = None) -> None:
        self.offsets, self.values, self.next_offset, self.value_size = offsets, values, next_offset, value_size

    @property
    def value_bytes(self) -> int:
        """Size of all values."""
        return sum(map(len, self.values)) if self.value_size is None else self.value_size * len(self.values)


@dataclass(slots=True)
class OffsetCommitReply:
    success: bool


@dataclass(slots=True)
class OffsetFetchReply:
    """Committed offset. None: the group has never committed."""

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
    """`partitions` holds (partition, high watermark). The high watermark is the offset of the next record."""

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
    """Metrics as Prometheus text."""

    metrics: str


@dataclass(slots=True)
class Pong:
    pass


@dataclass(slots=True)
class ErrorReply:
    """An error. Only the binary dialect transmits `code`; it is 0 in JSON."""

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
