"""What a FlyMQ client can ask beyond records and groups: dead letters, delay, time to live, transactions, the cluster.

    async with client.transaction() as transaction:
        await transaction.publish("orders", b"paid", key=b"user-1")
        await transaction.commit_offset("payments", 42, group="billing")
    print(transaction.receipts)

A transaction belongs to its connection. When that is lost, the transaction is too: what was under way raises `InvalidTransaction`, or
`OutcomeUnknown` if it was the commit.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, TypeVar

from headrace.clients.messages import Receipt
from headrace.errors import BrokerError, InvalidTransaction
from headrace.records import Headers
from headrace.wire.flymq import advanced_messages as v
from headrace.wire.flymq import messages as m
from headrace.wire.flymq.schema_messages import ProduceWithSchema

_Answer = TypeVar("_Answer")


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A record nobody could use. Times are in Unix ms."""

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


@dataclass(frozen=True, slots=True)
class DelayedReceipt:
    """A record that will be published at `deliver_at` (Unix ms), unless it is cancelled by its id."""

    id: str
    topic: str
    deliver_at: int


class AdvancedCalls(ABC):
    """The base of `FlyMqClient`."""

    @abstractmethod
    async def _ask(self, request: m.Request, answer: type[_Answer]) -> _Answer: ...

    # Dead letters.

    async def dead_letters(self, topic: str, *, records_max: int = 100, after: str = "", replayed: bool = False) -> list[DeadLetter]:
        """The oldest first, or those behind the id `after`. Empty where there are none."""
        reply = await self._ask(v.FetchDlq(topic, records_max, after, replayed), v.DlqEntries)
        details = reply.details or [v.DlqDetail(b"", v.NOWHERE, v.NOWHERE, 0, 0, v.NOWHERE)] * len(reply.entries)
        return [_dead_letter(entry, detail) for entry, detail in zip(reply.entries, details, strict=True)]

    async def replay_dead_letter(self, topic: str, id: str) -> None:
        """Publish it again, with its key and headers. Raises `UnknownMessage` for one that is not there or was replayed."""
        await self._ask(v.ReplayDlq(topic, id), m.Done)

    async def purge_dead_letters(self, topic: str) -> None:
        """Forget them all."""
        await self._ask(v.PurgeDlq(topic), m.Done)

    # Delay and time to live.

    async def publish_delayed(
        self, topic: str, value: bytes, *, delay_ms: int, key: bytes | None = None, partition: int | None = None
    ) -> DelayedReceipt:
        """Durable when it returns; in the topic after the delay."""
        request = v.ProduceDelayed(topic, value, delay_ms, key or b"", m.AUTO if partition is None else partition)
        reply = await self._ask(request, v.Scheduled)
        return DelayedReceipt(reply.message, topic, reply.deliver_at)

    async def cancel_delayed(self, id: str, *, topic: str = "") -> None:
        """Raises `UnknownMessage` for one that is not waiting any more."""
        await self._ask(v.CancelDelayed(id, topic), m.Done)

    async def publish_with_ttl(
        self, topic: str, value: bytes, *, ttl_ms: int, key: bytes | None = None, partition: int | None = None
    ) -> Receipt:
        """Nobody sees the record after `ttl_ms`; zero is what the topic says."""
        request = v.ProduceWithTtl(topic, value, ttl_ms, key or b"", m.AUTO if partition is None else partition)
        return _receipt(await self._ask(request, v.Placed))

    # Transactions.

    def transaction(self, *, timeout_ms: int = 0) -> Transaction:
        """Enter it to begin; leaving commits, or rolls back after an exception."""
        return Transaction(self, timeout_ms)

    # The broker.

    async def cluster_status(self) -> v.ClusterReport:
        return await self._ask(v.ClusterStatus(), v.ClusterReport)

    async def call(self, verb: str, **arguments: object) -> Any:
        """A verb of Headrace's own (see docs/protocols/flymq.md)."""
        reply = await self._ask(v.BrokerCall(verb, json.dumps(arguments).encode()), v.BrokerReply)
        return json.loads(reply.body)


@dataclass(slots=True)
class Transaction:
    """Records for several topics and offsets of groups that become visible together, or not at all."""

    _client: AdvancedCalls
    _timeout_ms: int
    id: str = ""
    receipts: list[Receipt] = field(default_factory=list)
    """Where the records are, once it is committed."""

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
            pass  # it has timed out or was lost with its connection: rolled back all the same

    async def begin(self) -> None:
        self.id = (await self._client._ask(v.TxnBegin(self._timeout_ms), v.TxnBegun)).transaction

    async def publish(self, topic: str, value: bytes, *, key: bytes | None = None, partition: int | None = None) -> None:
        """Stage a record. Nobody sees it before the commit."""
        partitions = None if partition is None else [partition]
        await self._client._ask(v.TxnProduceBatch(self._begun(), topic, [value], [key] if key else None, partitions), v.Placed)

    async def commit_offset(self, topic: str, offset: int, *, group: str, partition: int = 0) -> None:
        """The group will read on at `offset`, if the transaction is committed."""
        await self._client._ask(m.Commit(topic, group, partition, offset, self._begun()), m.Done)

    async def commit(self) -> list[Receipt]:
        """Durable when it returns, all of it."""
        reply = await self._client._ask(v.TxnCommit(self._begun()), v.TxnEnded)
        self.receipts = [_receipt(placed) for placed in reply.records]
        return self.receipts

    async def rollback(self) -> None:
        await self._client._ask(v.TxnRollback(self._begun()), v.TxnEnded)

    def _begun(self) -> str:
        if not self.id:
            raise InvalidTransaction("the transaction has not begun")
        return self.id


def is_unrepeatable(request: m.Request) -> bool:
    """Whether a second one would not mean the same: the transaction is gone with its connection, or was committed by the first."""
    if isinstance(request, m.Commit):
        return bool(request.transaction)
    return isinstance(request, v.TxnCommit | v.TxnProduceBatch | v.TxnRollback)


def is_write(request: m.Request) -> bool:
    """Whether a second one may write a second record."""
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
