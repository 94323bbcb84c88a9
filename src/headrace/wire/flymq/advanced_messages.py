"""Messages about dead letters, delays and expiry, transactions, and the cluster."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

NOWHERE = -1
"""Source offset or partition of a record that was never written, or a time that is not set."""


# Requests.


@dataclass(frozen=True, slots=True)
class FetchDlq:
    topic: str
    records_max: int
    after: str = ""
    """Only in Headrace: continue after this id."""
    replayed: bool = False
    """Only in Headrace: include replayed letters."""


@dataclass(frozen=True, slots=True)
class ReplayDlq:
    topic: str
    message: str


@dataclass(frozen=True, slots=True)
class PurgeDlq:
    topic: str


@dataclass(frozen=True, slots=True)
class ProduceDelayed:
    topic: str
    value: bytes
    delay_ms: int
    key: bytes = b""
    partition: int = -1


@dataclass(slots=True)
class DelayedBatch:
    """Adjacent PRODUCE_DELAYED frames for one topic. `keys` and `partitions` are as in `ProduceBatch`."""

    topic: str
    values: list[bytes]
    delays: list[int]
    """In ms."""
    keys: list[bytes | None] | None = None
    partitions: list[int] | None = None

    def __len__(self) -> int:
        return len(self.values)

    def messages(self) -> list[ProduceDelayed]:
        keys, partitions = self.keys or [None] * len(self), self.partitions or [-1] * len(self)
        rows = zip(self.values, self.delays, keys, partitions, strict=True)
        return [ProduceDelayed(self.topic, value, delay, key or b"", partition) for value, delay, key, partition in rows]


@dataclass(frozen=True, slots=True)
class CancelDelayed:
    message: str
    topic: str = ""
    """Empty: any topic."""


@dataclass(frozen=True, slots=True)
class ProduceWithTtl:
    topic: str
    value: bytes
    ttl_ms: int
    key: bytes = b""
    partition: int = -1


@dataclass(frozen=True, slots=True)
class TxnBegin:
    timeout_ms: int = 0
    """Only in Headrace. Zero: the broker's default."""


@dataclass(frozen=True, slots=True)
class TxnCommit:
    transaction: str


@dataclass(frozen=True, slots=True)
class TxnRollback:
    transaction: str


@dataclass(slots=True)
class TxnProduceBatch:
    """Adjacent TXN_PRODUCE frames for one transaction and topic. Each record is answered by one RecordMetadata, in order.

    `keys` and `partitions` are as in `ProduceBatch`.
    """

    transaction: str
    topic: str
    values: list[bytes]
    keys: list[bytes | None] | None = None
    partitions: list[int] | None = None

    def __len__(self) -> int:
        return len(self.values)

    def extend(self, other: TxnProduceBatch) -> None:
        """Append the records of `other`, a batch for the same transaction and topic."""
        if other.keys is not None and self.keys is None:
            self.keys = [None] * len(self)
        if self.keys is not None:
            self.keys += other.keys or [None] * len(other)
        if other.partitions is not None and self.partitions is None:
            self.partitions = [-1] * len(self)
        if self.partitions is not None:
            self.partitions += other.partitions or [-1] * len(other)
        self.values += other.values


@dataclass(frozen=True, slots=True)
class TxnBeginBatch:
    """Adjacent TXN_BEGIN frames with one timeout."""

    count: int
    timeout_ms: int = 0

    def __len__(self) -> int:
        return self.count

    def requests(self) -> list[TxnBegin]:
        return [TxnBegin(self.timeout_ms)] * self.count


@dataclass(slots=True)
class TxnWholeBatch:
    """Adjacent transactions, each with all its frames after TXN_BEGIN: TXN_PRODUCE frames for one topic, without keys and partitions, and
    TXN_COMMIT."""

    topic: str
    transactions: list[str]
    counts: list[int]
    """Records of each transaction."""
    values: list[bytes]
    """Of all transactions."""

    def __len__(self) -> int:
        return len(self.transactions)

    def split(self, index: int) -> tuple[list[TxnProduceBatch | TxnCommit], TxnWholeBatch | None]:
        """Return the requests of the first `index` transactions, and the others."""
        requests: list[TxnProduceBatch | TxnCommit] = []
        first = 0
        for id, count in zip(self.transactions[:index], self.counts[:index], strict=True):
            requests += (TxnProduceBatch(id, self.topic, self.values[first : first + count]), TxnCommit(id))
            first += count
        if index == len(self):
            return requests, None
        return requests, TxnWholeBatch(self.topic, self.transactions[index:], self.counts[index:], self.values[first:])


@dataclass(frozen=True, slots=True)
class ClusterJoin:
    peer: str


@dataclass(frozen=True, slots=True)
class ClusterLeave:
    pass


@dataclass(frozen=True, slots=True)
class ClusterStatus:
    pass


@dataclass(frozen=True, slots=True)
class BrokerCall:
    """An operation that only Headrace has, with its arguments in JSON."""

    operation: str
    body: bytes = b"{}"


# Replies.


@dataclass(frozen=True, slots=True)
class DlqEntry:
    id: str
    value: bytes
    error: str
    attempts: int


@dataclass(frozen=True, slots=True)
class Header:
    name: str
    value: bytes


@dataclass(frozen=True, slots=True)
class DlqDetail:
    """Fields that the original's entry does not have."""

    key: bytes
    partition: int
    offset: int
    """Source of the record; −1: none."""
    first_failure: int
    last_failure: int
    replayed_at: int
    """Unix ms; −1: not replayed."""
    headers: list[Header] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class DlqEntries:
    entries: list[DlqEntry]
    details: list[DlqDetail] = field(default_factory=list)
    """One for each entry; empty from the original's servers."""


@dataclass(frozen=True, slots=True)
class Placed:
    """RecordMetadata of one record."""

    topic: str
    partition: int
    offset: int
    timestamp: int
    key_size: int
    value_size: int


@dataclass(frozen=True, slots=True)
class Scheduled(Placed):
    """As for a record at offset 0: the real offset is unknown before delivery."""

    message: str = ""
    deliver_at: int = 0


@dataclass(frozen=True, slots=True)
class TxnBegun:
    transaction: str
    success: bool = True


@dataclass(slots=True)
class PlacedBatch:
    """RecordMetadata of adjacent records of one topic, in columns."""

    topic: str
    partitions: Sequence[int]
    offsets: Sequence[int]
    timestamps: Sequence[int]
    key_sizes: Sequence[int]
    value_sizes: Sequence[int]

    def __len__(self) -> int:
        return len(self.offsets)

    def rows(self) -> Iterator[Placed]:
        columns = (self.partitions, self.offsets, self.timestamps, self.key_sizes, self.value_sizes)
        return (Placed(self.topic, *row) for row in zip(*columns, strict=True))


@dataclass(frozen=True, slots=True)
class TxnEnded:
    transaction: str
    success: bool = True
    batches: list[PlacedBatch] = field(default_factory=list)
    """Offsets of the records of a committed transaction, in the order in which they were sent."""

    @property
    def records(self) -> list[Placed]:
        return [row for batch in self.batches for row in batch.rows()]


@dataclass(frozen=True, slots=True)
class ClusterNode:
    id: str
    address: str
    cluster_address: str
    state: str
    role: str
    is_leader: bool
    uptime: str


@dataclass(frozen=True, slots=True)
class ClusterReport:
    cluster: str
    leader: str
    term: int
    commit_index: int
    node_count: int
    topic_count: int
    message_count: int
    nodes: list[ClusterNode]


@dataclass(frozen=True, slots=True)
class BrokerReply:
    body: bytes


AdvancedRequest: TypeAlias = (
    FetchDlq
    | ReplayDlq
    | PurgeDlq
    | ProduceDelayed
    | CancelDelayed
    | ProduceWithTtl
    | TxnBegin
    | TxnCommit
    | TxnRollback
    | TxnProduceBatch
    | ClusterJoin
    | ClusterLeave
    | ClusterStatus
    | BrokerCall
)
AdvancedReply: TypeAlias = DlqEntries | Placed | TxnBegun | TxnEnded | ClusterReport | BrokerReply
