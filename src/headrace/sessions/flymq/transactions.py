"""Handlers of TXN_BEGIN, TXN_COMMIT, TXN_ROLLBACK, TXN_PRODUCE, and of COMMIT inside a transaction.

A transaction belongs to the connection that began it, and is aborted when that connection is lost. Its id is unknown on any other
connection, so a client that repeats a request without a reply cannot stage a record twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Final, TypeAlias, TypeVar

from headrace.broker import Broker, Principal, PublishedTogether, Transaction
from headrace.broker.schema_checks import SchemaCheckPending
from headrace.errors import BrokerError, InvalidTransaction, LimitExceeded, NotCoordinator, RecordTooLarge, UnknownTopic
from headrace.limits import FLYMQ_TRANSACTIONS_MAX
from headrace.records import RecordBatch
from headrace.sessions.flymq.errors import error_reply, publish_error_reply
from headrace.sessions.flymq.staging import RECORD_BYTES_MAX, columns
from headrace.sessions.session import RECORD_OVERHEAD_BYTES as IN_FLIGHT_OVERHEAD_BYTES
from headrace.wire.flymq import Dialect, Opcode, encode_failure, encode_reply
from headrace.wire.flymq.advanced_messages import (
    PlacedBatch,
    TxnBegin,
    TxnBeginBatch,
    TxnCommit,
    TxnEnded,
    TxnProduceBatch,
    TxnRollback,
    TxnWholeBatch,
)
from headrace.wire.flymq.messages import AUTO, Commit, Done, RecordMetadataBatch, Reply
from headrace.wire.flymq.transactions import encode_begun, encode_staged, encode_whole

_COMMIT_BYTES: Final = 2_048
"""Memory of a commit in flight beside the records."""
_WHOLE_BYTES: Final = 512
"""The same for each of several that are committed together."""
TIMEOUT_MS_DEFAULT: Final = 60_000
TIMEOUT_MS_MAX: Final = 15 * 60_000


_Sizes: TypeAlias = tuple[str, list[int], list[int]]
"""Topic, sizes of the keys and sizes of the values of a published batch: what the reply to its commit needs."""


class Committing:
    """A commit in flight. `handlers` take note when it is answered."""

    __slots__ = ("_answer", "_handlers", "_sizes", "size_bytes", "transactions")

    def __init__(self, handlers: TransactionHandlers, transaction: Transaction, sizes: Sequence[_Sizes], answer: PublishedTogether) -> None:
        self._handlers, self._sizes, self._answer = handlers, sizes, answer
        self.transactions: Sequence[Transaction] = (transaction,)
        self.size_bytes = transaction.size_bytes + _COMMIT_BYTES

    @property
    def outcome(self) -> PublishedTogether | None:
        return None if self._answer.done() else self._answer

    def reply(self, dialect: Dialect) -> bytes:
        self._handlers.answered(self)
        error = self._answer.exception()
        if isinstance(error, BrokerError):
            return encode_failure(error_reply(error), dialect)
        rows = zip(self._answer.result(), self._sizes, strict=True)
        placed = [PlacedBatch(topic, *columns(one), key_sizes, value_sizes) for one, (topic, key_sizes, value_sizes) in rows]
        return encode_reply(Opcode.TXN_COMMIT, TxnEnded(self.transactions[0].id, True, placed), dialect)


class WholeCommitting:
    """Commits in flight of transactions whose records came with them."""

    __slots__ = ("_answer", "_batch", "_handlers", "_now", "_value_sizes", "size_bytes", "transactions")

    def __init__(
        self,
        handlers: TransactionHandlers,
        batch: TxnWholeBatch,
        transactions: Sequence[Transaction],
        answer: PublishedTogether,
        now: int,
    ) -> None:
        self._handlers, self._batch, self.transactions, self._answer, self._now = handlers, batch, transactions, answer, now
        self._value_sizes = list(map(len, batch.values))
        self.size_bytes = sum(self._value_sizes) + len(batch) * _WHOLE_BYTES + len(batch.values) * IN_FLIGHT_OVERHEAD_BYTES

    @property
    def outcome(self) -> PublishedTogether:
        return self._answer

    def reply(self, dialect: Dialect) -> bytes:
        batch, error = self._batch, self._answer.exception()
        if isinstance(error, BrokerError):
            return self._failed(encode_failure(error_reply(error), dialect))
        self._handlers.answered(self)
        (all_records,) = self._answer.result()
        if all_records.placements is None:
            placed = all_records.partition, all_records.base_offset, all_records.timestamp
            return encode_whole(batch.topic, batch.transactions, batch.counts, placed, self._value_sizes)
        frames, first = list[bytes](), 0
        for id, count in zip(batch.transactions, batch.counts, strict=True):
            # The log has gaps between the offsets.
            sizes, rows = self._value_sizes[first : first + count], all_records.placements[first : first + count]
            frames.append(encode_staged(batch.topic, all_records.partition, all_records.timestamp, sizes))
            columns = ([partition for partition, _ in rows], [offset for _, offset in rows], [all_records.timestamp] * count)
            ended = TxnEnded(id, True, [PlacedBatch(batch.topic, *columns, [AUTO] * count, sizes)])
            frames.append(encode_reply(Opcode.TXN_COMMIT, ended, dialect))
            first += count
        return b"".join(frames)

    def _failed(self, failure: bytes) -> bytes:
        """Answer each commit with the failure. The transactions hold their records if they are open again."""
        frames, first = list[bytes](), 0
        for transaction, count in zip(self.transactions, self._batch.counts, strict=True):
            sizes = self._value_sizes[first : first + count]
            self._handlers.published(transaction.id, self._batch.topic, [AUTO] * count, sizes)
            frames += (encode_staged(self._batch.topic, 0, self._now, sizes), failure)
            first += count
        self._handlers.answered(self)
        return b"".join(frames)


_Commit = TypeVar("_Commit", bound=Committing | WholeCommitting)


class TransactionHandlers:
    """Transactions of one connection. `who` returns the current principal.

    BEGIN, TXN_PRODUCE and TXN_COMMIT do not wait for earlier requests: staging and replies follow the order of the requests. So the commits
    of several concurrent transactions of a client share one sync of the disk.
    """

    def __init__(self, broker: Broker, who: Callable[[], Principal]) -> None:
        self._broker = broker
        self._who = who
        self._transactions: dict[str, Transaction] = {}
        """By id, until the end or until the commit is answered."""
        self._committing: set[Committing | WholeCommitting] = set()
        self._committing_count = 0
        """Transactions whose commit is not answered."""
        self._sizes: dict[str, list[_Sizes]] = {}
        """Of each published batch of these. Most transactions have no entry: `WholeCommitting`."""

    def abort_all(self) -> None:
        """Abort all: the connection is lost, or another user has logged in."""
        for transaction in self._transactions.values():
            transaction.abort()
        self._transactions.clear()
        self._sizes.clear()

    def stage_whole(self, batch: TxnWholeBatch) -> WholeCommitting | int:
        """Stage transactions with their commits. If some must be handled one by one, stage nothing and return how many of the first."""
        found = list(map(self._transactions.get, batch.transactions))
        known = [one for one in found if one is not None]
        if len(known) == len(found) and (answer := known[0].stage_whole(known[1:], batch.topic, batch.values, batch.counts)) is not None:
            return self._commits(WholeCommitting(self, batch, known, answer, self._broker.now))
        alone = [index for index, one in enumerate(found) if one is None or not one.is_empty]
        return alone[-1] + 1 if alone else len(batch)

    def begin_all(self, batch: TxnBeginBatch, dialect: Dialect) -> bytes:
        """Begin as many transactions as possible. Return one frame for each request. Raises `NotCoordinator`."""
        begun: list[str] = []
        try:
            while len(begun) < len(batch):
                begun += self._begin(batch.timeout_ms, len(batch) - len(begun))
        except NotCoordinator:
            raise
        except BrokerError as error:
            return encode_begun(begun) + encode_failure(error_reply(error), dialect) * (len(batch) - len(begun))
        return encode_begun(begun)

    def stage(self, request: TxnProduceBatch | TxnBegin | TxnCommit, dialect: Dialect) -> Committing | bytes | None:
        """Answer the request without waiting. Return None if its topic must be created first. Raises `NotCoordinator`."""
        try:
            match request:
                case TxnProduceBatch():
                    return self._produce(request, dialect)
                case TxnBegin():
                    return encode_begun(self._begin(request.timeout_ms, 1))
                case TxnCommit():
                    return self._commit(request)
        except NotCoordinator:
            raise
        except BrokerError as error:
            return encode_failure(error_reply(error), dialect)

    def _begin(self, timeout_ms: int, count: int) -> list[str]:
        """Begin up to `count` transactions, at least one, and return their ids."""
        if self._open + count > FLYMQ_TRANSACTIONS_MAX:
            for id in [id for id, transaction in self._transactions.items() if transaction.has_ended]:
                self._forget(id)
            if self._open >= FLYMQ_TRANSACTIONS_MAX:
                raise LimitExceeded(f"{FLYMQ_TRANSACTIONS_MAX} transactions are open on this connection: the limit is reached")
        count = min(count, FLYMQ_TRANSACTIONS_MAX - self._open)
        begun = self._broker.begin_all(self._who(), count, timeout_ms=min(timeout_ms or TIMEOUT_MS_DEFAULT, TIMEOUT_MS_MAX))
        ids = [transaction.id for transaction in begun]
        self._transactions.update(zip(ids, begun, strict=True))
        return ids

    def _commit(self, request: TxnCommit) -> Committing:
        id, transaction = request.transaction, self._find(request.transaction)
        try:
            answer = transaction.stage_commit()
        except BrokerError:
            if transaction.has_ended:
                self._forget(id)
            raise
        return self._commits(Committing(self, transaction, self._sizes.get(id, ()), answer))

    @property
    def _open(self) -> int:
        """Number of transactions without a commit in flight."""
        return len(self._transactions) - self._committing_count

    def _commits(self, commit: _Commit) -> _Commit:
        """Note that a commit is in flight."""
        self._committing.add(commit)
        self._committing_count += len(commit.transactions)
        return commit

    def answered(self, commit: Committing | WholeCommitting) -> None:
        """Note that a commit is answered. After a retriable error its transactions are open again."""
        self._committing.discard(commit)
        self._committing_count -= len(commit.transactions)
        known, sizes = self._transactions, self._sizes
        for transaction in commit.transactions:
            if not transaction.is_open:
                known.pop(transaction.id, None)
                if sizes:
                    sizes.pop(transaction.id, None)

    def published(self, id: str, topic: str, key_sizes: list[int], value_sizes: list[int]) -> None:
        """Note what the reply to the commit needs of a batch."""
        self._sizes.setdefault(id, []).append((topic, key_sizes, value_sizes))

    def _forget(self, id: str) -> None:
        """Forget a transaction that has ended, unless its commit is not answered yet."""
        transaction = self._transactions[id]
        if not any(transaction in commit.transactions for commit in self._committing):
            del self._transactions[id]
            self._sizes.pop(id, None)

    async def rollback(self, request: TxnRollback) -> Reply:
        transaction = self._find(request.transaction)
        transaction.abort()
        if transaction.has_ended:
            self._forget(request.transaction)
        return TxnEnded(request.transaction)

    async def commit_offset(self, request: Commit) -> Reply:
        self._find(request.transaction).commit_offsets(request.group, {(request.topic, request.partition): request.offset})
        return Done(True, "offset staged")

    async def produce_to_new_topic(self, request: TxnProduceBatch, dialect: Dialect) -> bytes:
        try:
            await self._broker.prepare(self._who(), request.topic, request.values)
        except BrokerError as error:
            return encode_failure(publish_error_reply(error), dialect) * len(request)
        # In case the topic was deleted again in between.
        unknown = encode_failure(publish_error_reply(UnknownTopic(request.topic)), dialect) * len(request)
        return self._produce(request, dialect) or unknown

    def _produce(self, request: TxnProduceBatch, dialect: Dialect) -> bytes | None:
        """Stage the records, and return one frame for each, in order. A record that fails does not fail the others. Return None if the
        topic does not exist or its schema check takes longer."""
        transaction = self._transactions.get(request.transaction)
        if transaction is None:
            unknown = InvalidTransaction(f"transaction not found: {request.transaction}")
            return encode_failure(publish_error_reply(unknown), dialect) * len(request)
        try:
            self._broker.check_ready(self._who(), request.topic, request.values)
        except (UnknownTopic, SchemaCheckPending):
            return None
        except BrokerError as error:
            return encode_failure(publish_error_reply(error), dialect) * len(request)
        try:
            return b"".join(
                [
                    frames
                    for partition, batch in _batches(request)
                    for frames in self._stage(transaction, request.topic, batch, partition, dialect)
                ]
            )
        except UnknownTopic:
            return None

    def _stage(self, transaction: Transaction, topic: str, batch: RecordBatch, partition: int | None, dialect: Dialect) -> list[bytes]:
        count, value_sizes = len(batch), list(map(len, batch.values))  # type: ignore[arg-type]  # FlyMQ knows no null values
        key_sizes = [AUTO] * count if batch.keys is None else [len(key) if key else AUTO for key in batch.keys]
        try:
            if sum(value_sizes) > RECORD_BYTES_MAX or (batch.keys is not None and batch.size_bytes > RECORD_BYTES_MAX):
                raise RecordTooLarge(size_bytes=batch.size_bytes, bytes_max=RECORD_BYTES_MAX)
            placing = transaction.publish(topic, batch, partition)
        except UnknownTopic:
            raise
        except BrokerError as error:
            if count == 1:
                return [encode_failure(publish_error_reply(error), dialect)]
            # One record, or all together, exceed a limit: stage each one on its own.
            return [
                frame for index in range(count) for frame in self._stage(transaction, topic, batch[index : index + 1], partition, dialect)
            ]
        self.published(transaction.id, topic, key_sizes, value_sizes)
        if batch.keys is None and placing.rule is None:
            return [encode_staged(topic, placing.partition, self._broker.now, value_sizes)]
        times = [self._broker.now] * count
        rows = RecordMetadataBatch(topic, placing.partitions(count), [0] * count, times, key_sizes, value_sizes)
        return [encode_reply(Opcode.TXN_PRODUCE, rows)]

    def _find(self, id: str) -> Transaction:
        transaction = self._transactions.get(id)
        if transaction is None:
            raise InvalidTransaction(f"transaction not found: {id}")
        return transaction


def _batches(request: TxnProduceBatch) -> list[tuple[int | None, RecordBatch]]:
    """Split the records where the named partition changes."""
    if request.partitions is None:
        return [(None, RecordBatch(request.values, request.keys))]
    chosen = request.partitions
    batches: list[tuple[int | None, RecordBatch]] = []
    for partition, indexes in groupby(range(len(request)), lambda index: chosen[index]):
        picked = list(indexes)
        part = slice(picked[0], picked[-1] + 1)
        keys = None if request.keys is None else request.keys[part]
        batches.append((None if partition == AUTO else partition, RecordBatch(request.values[part], keys if keys and any(keys) else None)))
    return batches
