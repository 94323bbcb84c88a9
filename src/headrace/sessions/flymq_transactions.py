"""TXN_BEGIN, TXN_COMMIT, TXN_ROLLBACK, TXN_PRODUCE, and COMMIT inside a transaction.

A transaction belongs to the connection that began it, and is aborted when that is lost: whoever comes back with its id on another
connection learns that it is gone, and nothing can be staged twice by a client that sends again what had no reply.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from typing import Final

from headrace.broker import Broker, Principal, Published, Transaction
from headrace.errors import BrokerError, InvalidTransaction, RecordTooLarge
from headrace.records import Run
from headrace.sessions.flymq_refusals import publish_refusal
from headrace.sessions.flymq_staging import RECORD_BYTES_MAX, columns
from headrace.wire.flymq import Dialect, Opcode, encode_failure, encode_reply
from headrace.wire.flymq.advanced_messages import PlacedRun, TxnBegin, TxnBegun, TxnCommit, TxnEnded, TxnProduceRun, TxnRollback
from headrace.wire.flymq.messages import AUTO, Commit, Done, RecordMetadataRun, Reply

TIMEOUT_MS_DEFAULT: Final = 60_000
TIMEOUT_MS_MAX: Final = 15 * 60_000


class _Open:
    """A transaction and what its reply will need."""

    __slots__ = ("key_sizes", "topics", "transaction", "value_sizes")

    def __init__(self, transaction: Transaction) -> None:
        self.transaction = transaction
        self.topics: list[str] = []
        """Of each run published in it."""
        self.key_sizes: list[list[int]] = []
        self.value_sizes: list[list[int]] = []

    def placed(self, published: list[Published]) -> list[PlacedRun]:
        rows = zip(published, self.topics, self.key_sizes, self.value_sizes, strict=True)
        return [PlacedRun(topic, *columns(one), key_sizes, value_sizes) for one, topic, key_sizes, value_sizes in rows]


class TransactionVerbs:
    """The transactions of one connection. `who` tells who asks."""

    def __init__(self, broker: Broker, who: Callable[[], Principal]) -> None:
        self._broker = broker
        self._who = who
        self._open: dict[str, _Open] = {}

    def abort_all(self) -> None:
        """The connection is gone, or is somebody else's from now on."""
        for held in self._open.values():
            held.transaction.abort()
        self._open.clear()

    async def begin(self, request: TxnBegin) -> Reply:
        timeout_ms = min(request.timeout_ms or TIMEOUT_MS_DEFAULT, TIMEOUT_MS_MAX)
        transaction = self._broker.begin(self._who(), timeout_ms=timeout_ms)
        self._open = {id: held for id, held in self._open.items() if held.transaction.is_open}
        self._open[transaction.id] = _Open(transaction)
        return TxnBegun(transaction.id)

    async def commit(self, request: TxnCommit) -> Reply:
        held = self._find(request.transaction)
        try:
            published = await held.transaction.commit()
        except BrokerError:
            if not held.transaction.is_open:
                self._open.pop(request.transaction, None)
            raise
        self._open.pop(request.transaction, None)
        return TxnEnded(request.transaction, True, held.placed(published))

    async def rollback(self, request: TxnRollback) -> Reply:
        held = self._find(request.transaction)
        held.transaction.abort()
        del self._open[request.transaction]
        return TxnEnded(request.transaction)

    async def commit_offset(self, request: Commit) -> Reply:
        held = self._find(request.transaction)
        held.transaction.commit_offsets(request.group, {(request.topic, request.partition): request.offset})
        return Done(True, "offset staged")

    async def produce(self, request: TxnProduceRun, dialect: Dialect) -> bytes:
        """Stage the records; one frame for each, in order. A record that is refused takes no other down with it."""
        held = self._open.get(request.transaction)
        try:
            if held is None:
                raise InvalidTransaction(f"transaction not found: {request.transaction}")
            await self._broker.ensure_topic(self._who(), request.topic)
        except BrokerError as error:
            return encode_failure(publish_refusal(error), dialect) * len(request)
        return b"".join(
            [frames for partition, run in _runs(request) for frames in self._stage(held, request.topic, run, partition, dialect)]
        )

    def _stage(self, held: _Open, topic: str, run: Run, partition: int | None, dialect: Dialect) -> list[bytes]:
        count, value_sizes = len(run), [len(value or b"") for value in run.values]
        key_sizes = [AUTO] * count if run.keys is None else [len(key) if key else AUTO for key in run.keys]
        try:
            if run.size_bytes > RECORD_BYTES_MAX:
                raise RecordTooLarge(size_bytes=run.size_bytes, bytes_max=RECORD_BYTES_MAX)
            placing = held.transaction.publish(topic, run, partition)
        except BrokerError as error:
            if count == 1:
                return [encode_failure(publish_refusal(error), dialect)]
            # One record, or all of them together, are too much: each one is tried for itself.
            return [frame for index in range(count) for frame in self._stage(held, topic, run[index : index + 1], partition, dialect)]
        held.topics.append(topic)
        held.key_sizes.append(key_sizes)
        held.value_sizes.append(value_sizes)
        times = [self._broker.now] * count
        rows = RecordMetadataRun(topic, placing.partitions(count), [0] * count, times, key_sizes, value_sizes)
        return [encode_reply(Opcode.TXN_PRODUCE, rows)]

    def _find(self, id: str) -> _Open:
        held = self._open.get(id)
        if held is None:
            raise InvalidTransaction(f"transaction not found: {id}")
        return held


def _runs(request: TxnProduceRun) -> list[tuple[int | None, Run]]:
    """The records in order, cut where the partition that is named changes."""
    if request.partitions is None:
        return [(None, Run(request.values, request.keys))]
    chosen = request.partitions
    runs: list[tuple[int | None, Run]] = []
    for partition, indexes in groupby(range(len(request)), lambda index: chosen[index]):
        picked = list(indexes)
        part = slice(picked[0], picked[-1] + 1)
        keys = None if request.keys is None else request.keys[part]
        runs.append((None if partition == AUTO else partition, Run(request.values[part], keys if keys and any(keys) else None)))
    return runs
