"""FlyMQ calls for dead letters, delayed messages, time to live, transactions and the cluster.

    async with client.transaction() as transaction:
        await transaction.publish("orders", b"paid", key=b"user-1")
        await transaction.commit_offset("payments", 42, group="billing")
    print(transaction.receipts)

A transaction belongs to its connection and is lost with it: its calls then raise `InvalidTransaction`, and a commit without a reply raises
`OutcomeUnknown`.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, TypeVar

from headrace.clients.errors import NotSupported
from headrace.clients.messages import DelayedReceipt, Receipt
from headrace.errors import BrokerError, InvalidTransaction
from headrace.records import Headers
from headrace.wire.flymq import advanced_messages as v
from headrace.wire.flymq import messages as m
from headrace.wire.flymq.schema_messages import ProduceWithSchema

_Answer = TypeVar("_Answer")


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A dead-lettered record. Times are in Unix ms."""

    id: str
    value: bytes
    key: bytes | None
    headers: Headers
    reason: str
    attempts: int
    source_partition: int | None = None
    source_offset: int | None = None
    first_failure: int = 0
    last_failure: int = 0
    replayed_at: int | None = None


class AdvancedCalls(ABC):
    """Advanced calls of `FlyMqClient`."""

    @abstractmethod
    async def _request(self, request: m.Request, answer: type[_Answer]) -> _Answer: ...

    # Dead letters.

    async def dead_letters(self, topic: str, *, records_max: int = 100, after: str = "", replayed: bool = False) -> list[DeadLetter]:
        """Return dead letters, oldest first, after the id `after` if given."""
        reply = await self._request(v.FetchDlq(topic, records_max, after, replayed), v.DlqEntries)
        details = reply.details or [v.DlqDetail(b"", v.NOWHERE, v.NOWHERE, 0, 0, v.NOWHERE)] * len(reply.entries)
        return [_dead_letter(entry, detail) for entry, detail in zip(reply.entries, details, strict=True)]

    async def replay_dead_letter(self, topic: str, id: str) -> None:
        """Publish a dead letter again with its key and headers. Raises `UnknownMessage` if it does not exist or was replayed."""
        await self._request(v.ReplayDlq(topic, id), m.Done)

    async def purge_dead_letters(self, topic: str) -> None:
        """Delete all dead letters of a topic."""
        await self._request(v.PurgeDlq(topic), m.Done)

    # Delay and time to live.

    async def publish_delayed(
        self, topic: str, value: bytes, *, delay_ms: int, key: bytes | None = None, partition: int | None = None
    ) -> DelayedReceipt:
        """Publish a record after a delay. Durable on return."""
        request = v.ProduceDelayed(topic, value, delay_ms, key or b"", m.AUTO if partition is None else partition)
        reply = await self._request(request, v.Scheduled)
        return DelayedReceipt(reply.message, topic, reply.deliver_at)

    async def cancel_delayed(self, id: str, *, topic: str = "") -> None:
        """Cancel a delayed message. Raises `UnknownMessage` if it is not waiting."""
        await self._request(v.CancelDelayed(id, topic), m.Done)

    async def publish_with_ttl(
        self, topic: str, value: bytes, *, ttl_ms: int, key: bytes | None = None, partition: int | None = None
    ) -> Receipt:
        """Publish a record that expires after `ttl_ms`; 0 uses the topic's setting."""
        request = v.ProduceWithTtl(topic, value, ttl_ms, key or b"", m.AUTO if partition is None else partition)
        return _receipt(await self._request(request, v.Placed))

    # Transactions.

    def transaction(self, *, timeout_ms: int = 0) -> Transaction:
        """Return a transaction. Entering it begins, leaving it commits, or rolls back after an exception."""
        return Transaction(self, timeout_ms)

    # The broker.

    async def cluster_status(self) -> v.ClusterReport:
        return await self._request(v.ClusterStatus(), v.ClusterReport)

    async def call(self, operation: str, **arguments: object) -> Any:
        """Call one of Headrace's own operations (see docs/protocols/flymq.md)."""
        reply = await self._request(v.BrokerCall(operation, json.dumps(arguments).encode()), v.BrokerReply)
        return json.loads(reply.body)


@dataclass(slots=True)
class Transaction:
    """Records of several topics and offsets of groups that become visible atomically."""

    _client: AdvancedCalls
    _timeout_ms: int
    id: str = ""
    receipts: list[Receipt] = field(default_factory=list)
    """Receipts of the records after the commit."""

    async def __aenter__(self) -> Transaction:
        await self.begin()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, failure: BaseException | None, trace: TracebackType | None) -> None:
        if failure is None:
            await self.commit()
            return
        try:
            await self.rollback()
        except BrokerError:
            pass  # timed out or lost with its connection: the broker has rolled it back

    async def begin(self) -> None:
        self.id = (await self._client._request(v.TxnBegin(self._timeout_ms), v.TxnBegun)).transaction

    async def publish(
        self, topic: str, value: bytes, *, key: bytes | None = None, partition: int | None = None, headers: Headers = ()
    ) -> None:
        """Stage a record. It becomes visible with the commit."""
        if headers:
            raise NotSupported("FlyMQ", "headers", "fujin:// has them")
        partitions = None if partition is None else [partition]
        await self._client._request(v.TxnProduceBatch(self._begun(), topic, [value], [key] if key else None, partitions), v.Placed)

    async def commit_offset(self, topic: str, offset: int, *, group: str, partition: int = 0) -> None:
        """Stage the next offset of a group, which takes effect with the commit."""
        await self._client._request(m.Commit(topic, group, partition, offset, self._begun()), m.Done)

    async def commit(self) -> list[Receipt]:
        """Commit the transaction. Durable on return."""
        reply = await self._client._request(v.TxnCommit(self._begun()), v.TxnEnded)
        self.receipts = [_receipt(placed) for placed in reply.records]
        return self.receipts

    async def rollback(self) -> None:
        await self._client._request(v.TxnRollback(self._begun()), v.TxnEnded)

    def _begun(self) -> str:
        if not self.id:
            raise InvalidTransaction("the transaction has not begun")
        return self.id


def is_unrepeatable(request: m.Request) -> bool:
    """Return whether repeating the request has another effect: its transaction ended with the connection or the first request."""
    if isinstance(request, m.Commit):
        return bool(request.transaction)
    return isinstance(request, v.TxnCommit | v.TxnProduceBatch | v.TxnRollback)


def is_write(request: m.Request) -> bool:
    """Return whether repeating the request may write a second record."""
    return isinstance(request, v.ProduceDelayed | v.ProduceWithTtl | v.ReplayDlq | ProduceWithSchema)


def _receipt(placed: v.Placed) -> Receipt:
    return Receipt(placed.topic, placed.partition, placed.offset, placed.timestamp)


def _dead_letter(entry: v.DlqEntry, detail: v.DlqDetail) -> DeadLetter:
    return DeadLetter(
        entry.id,
        entry.value,
        detail.key or None,
        tuple((header.name, header.value) for header in detail.headers),
        entry.error,
        entry.attempts,
        None if detail.partition == v.NOWHERE else detail.partition,
        None if detail.offset == v.NOWHERE else detail.offset,
        detail.first_failure,
        detail.last_failure,
        None if detail.replayed_at == v.NOWHERE else detail.replayed_at,
    )
