"""Random, reproducible workloads of a store on a simulated disk, one step at a time and without threads."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from headrace.errors import BrokerError
from headrace.limits import LARGE_APPEND_BYTES
from headrace.records import NEVER, Ack, AnyBatch, Appended, AppendedEach, ColumnBatch, Headers, Record, RecordBatch
from headrace.storage.partition import LogOptions
from headrace.storage.staged import LateBatch
from headrace.storage.store import Store, StoreOptions
from tests.storage.crash.history import (
    Anomaly,
    Facts,
    Given,
    Part,
    adopt,
    created,
    deleted,
    deleting,
    durable,
    forgotten,
    maintaining,
    staged,
)
from tests.storage_faults.simulated import SimulatedFiles

KEY = bytes(range(32))
NOW = 1_700_000_000_000
SIZES = (0, 1, 20, 100, 100, 700, 5000)


@dataclass(frozen=True, slots=True)
class Shape:
    """Parameters of a workload. `weights` are the frequencies of steps, by method name."""

    name: str
    weights: Mapping[str, int]
    logs: int = 3
    steps: int = 12
    options: LogOptions = LogOptions(segment_bytes=16 * 1024, joined_bytes_max=2_400)
    compacted: int = 0
    """Number of logs that are compacted tables."""
    journal_bytes: int = 64 * 1024
    encrypted: bool = False
    sizes: Sequence[int] = SIZES
    counts: Sequence[int] = (1, 1, 2, 3, 8)
    """Records of one batch."""
    large_bytes: int = LARGE_APPEND_BYTES
    tombstones: float = 0.2
    """Fraction of a table's records that are tombstones."""

    def store_options(self) -> StoreOptions:
        return StoreOptions(
            journal_bytes=self.journal_bytes, headroom_bytes=0, large_bytes=self.large_bytes, key=KEY if self.encrypted else None
        )


@dataclass
class Workload:
    """One store and the knowledge of its writers. Every step is marked on the disk for `history.judge`."""

    shape: Shape
    rng: random.Random
    files: SimulatedFiles = field(default_factory=SimulatedFiles)
    given: dict[int, Given] = field(default_factory=dict)
    facts: Facts = field(default_factory=Facts)
    """At the start of this process."""
    now: int = NOW
    staged: list[tuple[Part, ...]] = field(default_factory=list)
    staged_now: int = NOW
    unstamped: list[tuple[int, int]] = field(default_factory=list)
    """(log, offset) of staged records that are stamped by the flush."""
    anomalies: list[str] = field(default_factory=list)
    acked: int = 0

    def __post_init__(self) -> None:
        self.began = len(self.files.operations)
        """Start of this process in the history of the disk."""
        self.store = self._open()
        adopt(self.store, self.given, self.facts)
        self.live = sorted(self.facts.created - self.facts.deleting)

    def run(self) -> None:
        names = list(self.shape.weights)
        self.take(self.rng.choices(names, [self.shape.weights[name] for name in names], k=self.shape.steps))

    def take(self, steps: Iterable[str]) -> None:
        """Take these steps, by method name."""
        while len(self.live) < self.shape.logs:
            self.create()
        for name in steps:
            self.now += self.rng.randrange(0, 2000)
            getattr(self, name)()
        self.flush()

    # Steps.

    def create(self) -> None:
        options = replace(self.shape.options, encrypt=self.shape.encrypted)
        if sum(self.given[known].options.compact for known in self.live) < self.shape.compacted:
            options = replace(options, compact=True)
        log = self.store.create_log(options)
        if log in self.given:
            raise Anomaly(f"log number {log} was given twice")
        self.given[log] = Given(options)
        self._mark(created(log))
        self.live.append(log)

    def delete(self) -> None:
        if len(self.live) < 2:
            return
        self.flush()
        log = self.live.pop(self.rng.randrange(len(self.live)))
        self._mark(deleting(log))
        self.store.delete_logs([log])
        self.store.checkpoint()
        self._mark(deleted(log))
        self.create()

    def append(self) -> None:
        self._stage([self.rng.choice(self.live)], Ack.DURABLE)
        self._maybe_flush()

    def append_written(self) -> None:
        self._stage([self.rng.choice(self.live)], Ack.WRITTEN)
        self._maybe_flush()

    def append_unacked(self) -> None:
        self._stage([self.rng.choice(self.live)], Ack.NONE)
        self._maybe_flush()

    def atomic(self) -> None:
        self._stage(self.rng.choices(self.live, k=self.rng.randrange(2, 5)), Ack.DURABLE)
        self._maybe_flush()

    def each(self) -> None:
        """Append independent records to several logs."""
        logs = self.rng.choices(self.live, k=self.rng.randrange(2, 9))
        values = [self.rng.randbytes(self.rng.choice(self.shape.sizes)) for _ in logs]
        keys = [self.rng.choice((None, b"", b"k")) for _ in logs] if self.rng.random() < 0.3 else None
        parts: list[Part] = []
        for index, (log, value) in enumerate(zip(logs, values, strict=True)):
            base = len(self.given[log].records)
            parts.append(Part(log, base, 1))
            self.given[log].records += _records(RecordBatch([value], None if keys is None else [keys[index]]), base, self.now)
            self.unstamped.append((log, base))
        self._promise(tuple(parts))
        self.staged_now = self.now
        done = partial(self._each_answered, tuple(parts))
        self.store.stage_each(logs, values, keys, ack=Ack.DURABLE, now=self.now, done=done, size_bytes=1000)
        self._maybe_flush()

    def flush(self) -> None:
        """Flush. All its records get the latest of their times."""
        for log, offset in self.unstamped:
            record = self.given[log].records[offset]
            assert record is not None, "it was staged in this life"
            self.given[log].records[offset] = replace(record, timestamp=self.staged_now)
        self.unstamped.clear()
        self.store.flush()
        if self.staged:
            self.anomalies.append(f"{len(self.staged)} appends were not answered by a flush")
        if self.anomalies:
            raise Anomaly(self.anomalies[0])

    def checkpoint(self) -> None:
        self.store.checkpoint()

    def singles(self) -> None:
        """Append single records, each flushed by itself."""
        for _ in range(self.rng.randrange(2, 7)):
            self._stage([self.rng.choice(self.live)], self.rng.choice((Ack.DURABLE, Ack.WRITTEN)))
            self.flush()

    def spill(self) -> None:
        """Write the tails to segments without a checkpoint, as a busy store does."""
        self.store.maintenance.spill()

    def maintain(self) -> None:
        """Apply retention and verify it against the state before."""
        floor: dict[int, int] = {}
        self._mark(maintaining(floor))
        self.store.maintain(self.now)
        for log in self.live:
            bounds = self.store.bounds(log)
            floor[log] = bounds.first
            self._judge_retention(log, bounds.first)

    def reopen(self) -> None:
        self.flush()
        self.store.close()
        self.store = self._open()
        for log in self.live:
            self.store.open_log(log, self.given[log].options)

    def die(self) -> None:
        """Kill the process and start another: memory is lost, written data is still in the page cache."""
        self._forget(self.staged)
        self.staged.clear()
        self.files.close()
        self.store = self._open()
        for log in self.live:
            self.store.open_log(log, self.given[log].options)
            if (end := self.store.bounds(log).end) != len(self.given[log].records):
                raise Anomaly(f"log {log} ended at {len(self.given[log].records)}, after the death of the process at {end}")

    def _forget(self, appends: Sequence[tuple[Part, ...]]) -> None:
        """Take back the newest records, which never reached the disk; their offsets are free again."""
        for part in (part for parts in appends for part in parts):
            del self.given[part.log].records[part.base :]
        self.unstamped = [(log, offset) for log, offset in self.unstamped if offset < len(self.given[log].records)]
        self._mark(forgotten(appends))

    def _open(self) -> Store:
        return Store.open(self.files, self.shape.store_options(), threads=False)

    def _judge_retention(self, log: int, first: int) -> None:
        given = self.given[log]
        options, taken = given.options, [record for record in given.records[:first] if record]
        if options.retention_bytes or not options.retention_ms:
            return
        young = [record.offset for record in taken if record.timestamp > self.now - options.retention_ms]
        if young:
            raise Anomaly(f"log {log}: retention took offset {young[0]} before its time")

    # Staging.

    def _maybe_flush(self) -> None:
        if self.rng.random() < 0.6:
            self.flush()

    def _mark(self, event: Callable[[Facts], None]) -> None:
        self.files.mark(event)

    def _stage(self, logs: Sequence[int], ack: Ack) -> None:
        appends: list[tuple[int, AnyBatch | LateBatch]] = []
        parts: list[Part] = []
        for log in logs:
            batch = self._batch(log)
            base = len(self.given[log].records)
            parts.append(Part(log, base, len(batch)))
            self.given[log].records += _records(batch, base, self.now)
            if batch.timestamps is None:
                self.unstamped += [(log, offset) for offset in range(base, base + len(batch))]
            form = self.rng.random()
            appends.append((log, ColumnBatch.of(batch) if form < 0.2 else batch if form < 0.7 else _late(batch, parts[:-1])))
        self._commit(appends, tuple(parts), ack)
        if tuple(parts) in self.staged:
            self.staged_now = self.now

    def _commit(self, appends: list[tuple[int, AnyBatch | LateBatch]], parts: tuple[Part, ...], ack: Ack) -> None:
        self._promise(parts)
        done = partial(self._answered, parts, ack)
        self.store.stage(appends, ack=ack, now=self.now, done=done, size_bytes=1000)

    def _promise(self, parts: tuple[Part, ...]) -> None:
        self.staged.append(parts)
        self._mark(staged(parts))

    def _each_answered(self, parts: tuple[Part, ...], outcome: AppendedEach | BrokerError) -> None:
        if isinstance(outcome, AppendedEach) and not outcome.failed:
            self._answered(parts, Ack.DURABLE, [Appended(offset, 1, outcome.timestamp) for offset in outcome.offsets])
        else:
            self._answered(parts, Ack.DURABLE, outcome if isinstance(outcome, BrokerError) else next(iter(outcome.failed.values())))

    def _answered(self, parts: tuple[Part, ...], ack: Ack, outcome: list[Appended] | BrokerError) -> None:
        """Called by the store. A failed check must not disturb it, so `flush` raises it later."""
        if parts not in self.staged:
            return
        self.staged.remove(parts)
        if isinstance(outcome, BrokerError):
            self.anomalies.append(f"an append to a healthy disk failed: {outcome}")
            return
        landed = [(appended.base_offset, appended.count) for appended in outcome]
        if landed != [(part.base, part.count) for part in parts]:
            self.anomalies.append(f"an append to {parts} was acknowledged at {landed}")
        elif ack is Ack.DURABLE:
            self._mark(durable(parts))
            self.acked += 1

    def _batch(self, log: int) -> RecordBatch:
        count, rng = self.rng.choice(self.shape.counts), self.rng
        values: list[bytes | None] = [rng.randbytes(rng.choice(self.shape.sizes)) for _ in range(count)]
        keys: list[bytes | None] | None = None
        if self.given[log].options.compact:
            keys = [b"key %d" % rng.randrange(5) for _ in range(count)]
            values = [None if rng.random() < self.shape.tombstones else value for value in values]
        elif rng.random() < 0.3:
            keys = [rng.choice((None, b"", b"k")) for _ in range(count)]
        headers: list[Headers] | None = None
        if rng.random() < 0.2:
            headers = [(("name", rng.randbytes(3)),) * rng.randrange(3) for _ in range(count)]
        timestamps = [self.now + rng.randrange(100) for _ in range(count)] if rng.random() < 0.2 else None
        expiries = [rng.choice((NEVER, self.now + 10_000_000)) for _ in range(count)] if rng.random() < 0.1 else None
        return RecordBatch(values, keys, headers, timestamps, expiries)


def _late(batch: RecordBatch, before: Sequence[Part]) -> LateBatch:
    """Return a batch that is built when the offsets of the batches before it are known."""
    wanted = [(part.base, part.count) for part in before]

    def build(landed: Sequence[Appended]) -> RecordBatch:
        found = [(appended.base_offset, appended.count) for appended in landed]
        if found != wanted:
            raise Anomaly(f"a late batch got {found}, expected {wanted}")
        return batch

    return build


def _records(batch: RecordBatch, base: int, now: int) -> list[Record]:
    count = len(batch)
    return list(
        map(
            Record,
            range(base, base + count),
            [now] * count if batch.timestamps is None else batch.timestamps,
            [None] * count if batch.keys is None else batch.keys,
            batch.values,
            [()] * count if batch.headers is None else batch.headers,
            [NEVER] * count if batch.expiries is None else batch.expiries,
        )
    )
