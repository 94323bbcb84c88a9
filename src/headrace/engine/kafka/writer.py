"""Appends to Kafka: order, record batches, transactions and unknown outcomes.

An append to one partition of a user topic is sent by an idempotent producer, with all appends to this partition that wait, as one record
batch; if the topic asks for less (`ack = written` or `none`), by a producer with acks=1 or 0, which is not idempotent. Every other append
(several partitions, or a table) is part of a Kafka transaction, together with all others that wait. The transactional id is that of the
coordinator, so Kafka refuses the tables' writes of a broker that was replaced. A broker that is not the coordinator writes no tables, and
has a transactional id of its own.

Appends to one partition are written in call order: each partition has a queue, and an append is sent when it is at the head of all its
queues.

Nothing that was handed to the producer is given up: it repeats a batch, with the same sequence number, until Kafka answers. An append
that takes longer than the deadline fails with `AppendUnknown`, whose `outcome` resolves with the answer. An append that still waits in
a queue at its deadline fails with `Unavailable`: nothing was written.

With acks=1 a batch whose answer is lost is repeated until the deadline and may be written twice. With acks=0 Kafka does not say where the
records are: their offsets are counted from the end as last seen.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from aiokafka import errors as kafka_errors

from headrace.engine.contract import Ack, Appended
from headrace.engine.kafka.cluster import Cluster, broker_error
from headrace.engine.kafka.codec import Decoded
from headrace.engine.kafka.offsets import KafkaOffsets
from headrace.engine.kafka.partition import PartitionLog
from headrace.engine.kafka.parts import Append, Invalid, Part, built, grouped, listed, note, phases
from headrace.engine.kafka.producer import Producer
from headrace.errors import AppendUnknown, BrokerError, Unavailable, UnknownTopic
from headrace.limits import MIB
from headrace.records import RecordBatch
from headrace.storage.health import Health

_BATCH_BYTES: Final = 1 * MIB
"""Appends are joined in one record batch up to this size."""
_TRANSACTION_APPENDS_MAX: Final = 500
_TRANSACTION_BYTES_MAX: Final = 32 * MIB
_TRANSACTION_MS: Final = 10_000
"""Time after which Kafka aborts a transaction of a broker that is not the owner. If it is killed, no other ends it, and readers wait."""
_OWNER_TRANSACTION_MS: Final = 60_000
"""The same for the owner, whose transaction the next owner aborts at once. The owner gives up the tables when Kafka does so."""
_RECONCILE_SECONDS: Final = 0.2
_GONE_SECONDS: Final = 0.2
_METADATA_SECONDS: Final = 0.02
_STEP: Final = "writing to Kafka"


class Writer:
    """Writes to all partitions. `advanced` is called with the partitions whose end has moved; `fenced` when another broker has taken over
    the transactional id."""

    def __init__(
        self,
        cluster: Cluster,
        offsets: KafkaOffsets,
        *,
        deadline_ms: int,
        health: Health,
        advanced: Callable[[Iterable[PartitionLog]], None],
        fenced: Callable[[], None],
    ) -> None:
        self._cluster = cluster
        self._offsets = offsets
        self._transactional_id = ""
        self._is_owner = False
        self._turn = asyncio.Lock()
        """Held during a transaction."""
        self._deadline_seconds = deadline_ms / 1000
        self._health = health
        self._advanced = advanced
        self._fenced = fenced
        self._plain: dict[Ack, Producer] = {}
        """Producers outside of transactions. The weaker ones are started when a topic asks for them."""
        self._starting = asyncio.Lock()
        self._transactional: Producer | None = None
        self._is_fenced = False
        self._transactions: deque[Append] = deque()
        self._is_committing = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closing = False

    async def open(self, transactional_id: str) -> None:
        """Start. The id is for transactions that write no table, until `own`."""
        self._is_closing = self._is_fenced = self._is_owner = False
        self._transactional_id = transactional_id
        self._plain = {Ack.DURABLE: await self._producer(None)}

    async def own(self, transactional_id: str) -> None:
        """Use the id of the coordinator from now on. Kafka refuses later transactions of the coordinator before."""
        async with self._turn:
            await self._drop_transactional()
            self._transactional_id, self._is_owner = transactional_id, True
            self._transactional = await self._producer(transactional_id)

    @property
    def epoch(self) -> int:
        """Epoch of the transactional id, counted over its producer ids: it rises with each owner."""
        return 0 if self._transactional is None else self._transactional.epoch

    @property
    def _takeover(self) -> tuple[type[Exception], ...]:
        """Errors after another broker has taken over the id. Only that of the owner is shared: Kafka fences another broker when it has
        aborted a transaction that took too long."""
        return (kafka_errors.ProducerFenced,) if self._is_owner else ()

    def stop_transactions(self) -> None:
        """Refuse transactions from now on."""
        self._is_fenced = True

    async def close(self) -> None:
        """Finish what was staged, within the deadline."""
        self._is_closing = True
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=self._deadline_seconds)
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        for producer in (*self._plain.values(), self._transactional):
            if producer is not None:
                await producer.discard()
        self._plain, self._transactional = {}, None

    async def _producer(self, transactional_id: str | None, ack: Ack = Ack.DURABLE) -> Producer:
        transaction_ms = _OWNER_TRANSACTION_MS if self._is_owner else _TRANSACTION_MS
        return await Producer.start(self._cluster, transactional_id, 2 * self._deadline_seconds, ack, transaction_ms=transaction_ms)

    # Staging

    def stage(self, append: Append) -> None:
        """Queue an append. Its future resolves later."""
        loop = append.future.get_loop()
        if self._is_closing or (append.is_transaction and self._is_fenced):
            append.resolve(Unavailable("this broker does not own the tables: another one has taken over" if self._is_fenced else "closing"))
            return
        append.appended = [None] * len(append.writes)
        self._offsets.stage(append.commits)
        append.timer = loop.call_later(self._deadline_seconds, self._late, append)
        for log in append.logs:
            log.queue.append(append)
        if append.is_transaction:
            self._transactions.append(append)
            self._commit_soon()
        else:
            self._pump(append.writes[0][0])

    def _late(self, append: Append) -> None:
        """The deadline of an append has passed."""
        self._health.failed(_STEP, f"Kafka did not acknowledge within {self._deadline_seconds:g} s")
        if append.future.done():
            return
        if append.is_sent:
            self._doubt(append, f"Kafka did not answer within {self._deadline_seconds:g} s")
            return
        self._give_up(append, Unavailable(f"Kafka did not answer within {self._deadline_seconds:g} s; nothing was written"))

    def _give_up(self, append: Append, error: BrokerError) -> None:
        """Fail an append that was not sent. What waits behind it goes on."""
        self._remove(append)
        self._offsets.finish(append.commits, is_done=False)
        append.resolve(error)
        for log in append.logs:
            self._pump(log)
        self._commit_soon()

    async def finish(self, logs: Sequence[PartitionLog]) -> None:
        """Wait until the appends to these partitions have an outcome, known or not. The client library repeats requests, also after the
        topic was deleted and another one of its name was created."""
        if waiting := {append.future for log in logs for append in log.queue}:
            await asyncio.wait(waiting, timeout=self._deadline_seconds)

    def topic_gone(self, log: PartitionLog) -> None:
        """Fail the appends to a partition that was deleted."""
        for append in [append for append in log.queue if not append.is_sent]:
            self._give_up(append, UnknownTopic(log.topic))
        if log.queue:
            self._start(self._purge(log))

    async def _purge(self, log: PartitionLog) -> None:
        while log.queue and not log.queue[0].is_transaction and not self._is_closing:
            for producer in self._plain.values():
                producer.forget(*log.place)
            await asyncio.sleep(_GONE_SECONDS)

    def _doubt(self, append: Append, text: str) -> None:
        """Tell the caller that the outcome is unknown, unless it has been told. The append resolves the outcome later."""
        if append.is_doubtful or append.future.done():
            return
        append.is_doubtful = True
        outcome: asyncio.Future[list[Appended]] = append.future.get_loop().create_future()
        outcome.add_done_callback(lambda done: done.cancelled() or done.exception())  # a caller may ignore it
        append.future.set_exception(AppendUnknown(text, outcome))
        append.future = outcome

    def _remove(self, append: Append) -> None:
        for log in append.logs:
            log.queue.remove(append)
        if append.is_transaction:
            self._transactions.remove(append)

    def _start(self, work: Any) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # One partition

    def _pump(self, log: PartitionLog) -> None:
        if not log.is_sending and log.queue and not log.queue[0].is_transaction:
            log.is_sending = True
            self._start(self._send_all(log))

    async def _send_all(self, log: PartitionLog) -> None:
        """Send the appends at the head of a partition's queue, batch by batch, until there is none or a transaction."""
        try:
            while log.queue and not log.queue[0].is_transaction:
                appends, size_bytes = [log.queue[0]], log.queue[0].size_bytes
                for append in list(log.queue)[1:]:
                    size_bytes += append.size_bytes
                    if append.is_transaction or append.ack is not appends[0].ack or size_bytes > min(_BATCH_BYTES, log.batch_bytes_max):
                        break
                    appends.append(append)
                await self._send(log, appends)
        finally:
            log.is_sending = False
        self._commit_soon()

    async def _send(self, log: PartitionLog, appends: list[Append]) -> None:
        parts = [
            Part.of(append, index, batch)
            for append in appends
            for index, (_, batch) in enumerate(append.writes)
            if isinstance(batch, RecordBatch)
        ]
        for append in appends:
            append.is_sent = True
        outcome: BrokerError | None = None
        ack = appends[0].ack
        try:
            await self._write(await self._plain_producer(ack), log, parts)
        except BrokerError as error:
            outcome = error
        except (kafka_errors.KafkaError, OSError) as failure:
            self._cluster.counters.errors[type(failure).__name__] += 1
            outcome = UnknownTopic(log.topic) if log.is_gone else broker_error(failure)
            if self._plain[ack].is_broken or (ack is not Ack.DURABLE and isinstance(outcome, Unavailable)):
                # The producer is beyond repair, or gave up repeating. Whether its last batch was written is unknown.
                outcome = AppendUnknown(f"Kafka: {failure}", None)
        for append in appends:
            log.queue.remove(append)
        for append in appends:
            append.resolve(append.results() if outcome is None else outcome)
        if outcome is None:
            self._health.succeeded(_STEP)
            self._advance({log: parts})

    async def _plain_producer(self, ack: Ack) -> Producer:
        """Return the producer of an ack level. Starts one at the first use, and instead of one that has failed for good."""
        found = self._plain.get(ack)
        if found is not None and not found.is_broken:
            return found
        async with self._starting:
            found = self._plain.get(ack)
            if found is None or found.is_broken:
                self._plain[ack] = await self._producer(None, ack)
                if found is not None:
                    await found.discard()
            return self._plain[ack]

    async def _write(self, producer: Producer, log: PartitionLog, parts: list[Part]) -> None:
        """Write the parts as few record batches, in order, and note where each landed."""
        while not producer.knows(*log.place):
            if log.is_gone:
                raise UnknownTopic(log.topic)
            await asyncio.sleep(_METADATA_SECONDS)
        offset = log.end
        for group in grouped(parts, min(_BATCH_BYTES, log.batch_bytes_max), log.batch_bytes_max):
            batch = producer.encode([(part.batch, part.timestamps) for part in group])
            self._cluster.counters.requests["produce"] += 1
            metadata = await producer.send(batch, log.kafka_topic, log.number)
            offset = metadata.offset if metadata is not None else offset
            log.note_size(batch.record_count(), batch.size())
            if offset < 0:
                raise AppendUnknown("Kafka has written the records before and does not say where", None)
            for part in group:
                if metadata is not None and metadata.timestamp_type == 1 and metadata.timestamp >= 0:  # the topic stamps records itself
                    part.timestamps = [metadata.timestamp] * len(part.batch)
                note(part, offset)
                offset += len(part.batch)

    def _advance(self, written: dict[PartitionLog, list[Part]]) -> None:
        """Move the ends, keep the records for readers at the end, and wake them."""
        moved: list[PartitionLog] = []
        for log, parts in written.items():
            last = parts[-1].append.appended[parts[-1].index]
            first = parts[0].append.appended[parts[0].index]
            assert last is not None and first is not None
            end = last.last_offset + 1
            if parts[0].append.ack is Ack.NONE:
                continue  # whether and where Kafka has written them is not known
            # Records of others between ours would be missing in the cache.
            if log.watchers and first.base_offset == log.end and end - log.end == sum(len(part.batch) for part in parts):
                log.remember(log.end, [listed(part) for part in parts])
            if log.advance(end):
                moved.append(log)
        self._advanced(moved)

    # Transactions

    def _commit_soon(self) -> None:
        if not self._is_committing and self._transactions:
            self._is_committing = True
            self._start(self._commit_all())

    async def _commit_all(self) -> None:
        try:
            while appends := self._ready():
                async with self._turn:
                    await self._commit(appends)
                for log in {log for append in appends for log in append.logs}:
                    self._pump(log)
            # What remains waits for the appends of one partition; `_send_all` calls again.
        finally:
            self._is_committing = False

    def _ready(self) -> list[Append]:
        """Return the transactions that are at the head of all their queues, or behind others of the list."""
        ready: list[Append] = []
        ahead: dict[PartitionLog, int] = {}
        size_bytes = 0
        for append in self._transactions:
            logs = append.logs
            if any(log.queue[ahead.get(log, 0)] is not append for log in logs):
                continue
            size_bytes += append.size_bytes
            if ready and (len(ready) >= _TRANSACTION_APPENDS_MAX or size_bytes > _TRANSACTION_BYTES_MAX):
                break
            ready.append(append)
            for log in logs:
                ahead[log] = ahead.get(log, 0) + 1
        return ready

    async def _commit(self, appends: list[Append]) -> None:
        """Write appends in one Kafka transaction. If one of them is invalid, the others are written without it."""
        for append in appends:
            append.is_sent = True
        outcome: BrokerError | None = None
        written: dict[PartitionLog, list[Part]] = {}
        is_ending = False
        try:
            if self._is_fenced:
                raise kafka_errors.ProducerFenced  # a new producer would take the tables back
            if self._transactional is None:
                self._transactional = await self._producer(self._transactional_id)
            producer = self._transactional
            await producer.begin()
            try:
                await self._write_while_there(producer, appends, written)
            except Invalid as invalid:
                await self._drop_transactional()
                self._finish([invalid.append], invalid.error)
                rest = [append for append in appends if append is not invalid.append]
                if rest:
                    await self._commit(rest)
                else:  # Kafka shows readers nothing after the records of an open transaction, which the next producer aborts
                    with contextlib.suppress(kafka_errors.KafkaError, OSError, BrokerError):
                        self._transactional = await self._producer(self._transactional_id)
                return
            commits = [commit for append in appends for commit in append.commits]
            for group, places in self._offsets.to_kafka(commits).items():
                await producer.commit_offsets(group, places)
            await self._offsets.delete(commits)
            is_ending = True
            await producer.commit()
        except self._takeover:
            self._is_fenced = True
            self._fenced()
            outcome = AppendUnknown("another broker took over during the commit", None) if is_ending else _taken_over()
            self._finish(appends, outcome)
            self._finish(list(self._transactions), _taken_over())
            if self._transactional is not None:
                await self._transactional.discard()
                self._transactional = None
            return
        except (kafka_errors.KafkaError, OSError, BrokerError) as failure:
            self._health.failed(_STEP, str(failure) or type(failure).__name__)
            await self._drop_transactional()
            outcome = failure if isinstance(failure, BrokerError) else Unavailable(f"Kafka: the transaction failed: {failure!r}")
            if is_ending:
                outcome = await self._reconciled(appends, written, failure)
        else:
            if producer.is_doubtful:
                # A request of this transaction had no answer. If it arrives late, it must not meet the next transaction.
                await self._drop_transactional()
        self._finish(appends, outcome)
        if outcome is None:
            self._health.succeeded(_STEP)
            self._advance(written)

    async def _write_while_there(self, producer: Producer, appends: list[Append], written: dict[PartitionLog, list[Part]]) -> None:
        """Write the appends, unless a topic is deleted meanwhile: the library would wait for it for ever."""
        writing = asyncio.get_running_loop().create_task(self._write_phases(producer, appends, written))
        try:
            while not (await asyncio.wait([writing], timeout=_GONE_SECONDS))[0]:
                for append in appends:
                    for log in append.logs:
                        if log.is_gone:
                            raise Invalid(append, UnknownTopic(log.topic))
        finally:
            writing.cancel()
        await writing

    async def _drop_transactional(self) -> None:
        """Drop the producer. The next one begins with a new epoch, which aborts what this one left open."""
        broken, self._transactional = self._transactional, None
        if broken is not None:
            await broken.discard()

    async def _reconciled(self, appends: list[Append], written: dict[PartitionLog, list[Part]], failure: Exception) -> BrokerError | None:
        """Find out whether a transaction was committed whose commit failed. The callers learn at once that it is unknown.

        A producer with a new epoch ends the transaction one way or the other; then the first of its records is there, or it is not.
        """
        for append in appends:
            self._doubt(append, f"Kafka: the commit failed: {failure}")
        while not self._is_closing:
            try:
                self._transactional = await self._producer(self._transactional_id)
                for log, parts in written.items():
                    first = parts[0].append.appended[parts[0].index]
                    assert first is not None
                    answer = await self._cluster.fetch(*log.place, first.base_offset, bytes_max=1, wait_ms=0)
                    found = Decoded(answer.content, answer.aborted, first.base_offset).batches
                    is_there = any(first.base_offset in batch.offsets() for batch in found)
                    return None if is_there else Unavailable("Kafka: the transaction was aborted; nothing was written")
                return Unavailable("Kafka: the commit failed; commit the offsets again")
            except BrokerError:
                await self._drop_transactional()
                await asyncio.sleep(_RECONCILE_SECONDS)
        return Unavailable("closing")

    def _finish(self, appends: list[Append], outcome: BrokerError | None) -> None:
        for append in appends:
            self._remove(append)
            self._offsets.finish(append.commits, is_done=outcome is None)
        for append in appends:
            append.resolve(append.results() if outcome is None else outcome)

    async def _write_phases(self, producer: Producer, appends: list[Append], written: dict[PartitionLog, list[Part]]) -> None:
        """Write all appends. A batch that depends on the positions of earlier writes is written in a later phase than those."""
        for phase in phases(appends):
            by_log: dict[PartitionLog, list[Part]] = {}
            for append, index in phase:
                log, batch = append.writes[index]
                if log.is_gone:
                    raise Invalid(append, UnknownTopic(log.topic))
                if not isinstance(batch, RecordBatch):
                    batch = built(append, index, batch)
                by_log.setdefault(log, []).append(Part.of(append, index, batch))
            outcomes = await asyncio.gather(*(self._write(producer, log, parts) for log, parts in by_log.items()), return_exceptions=True)
            for failure in outcomes:
                if failure is not None:
                    raise failure
            for log, parts in by_log.items():
                written.setdefault(log, []).extend(parts)


def _taken_over() -> Unavailable:
    return Unavailable("another broker has taken over the tables; nothing was written")
