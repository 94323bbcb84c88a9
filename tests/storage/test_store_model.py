"""The store against a simple model: after any sequence of writes, reads, maintenance, crashes and power cuts both hold the same records.

HEADRACE_STORE_MODEL_EXAMPLES=2000 takes many other examples; the normal suite takes few and always the same.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headrace.errors import BrokerError, OffsetOutOfRange
from headrace.records import Ack, AnyBatch, Appended, ColumnBatch, Record, RecordBatch
from headrace.storage.check import check
from headrace.storage.partition import LogOptions
from headrace.storage.segment import log_directory
from headrace.storage.staged import LateBatch
from headrace.storage.store import Store, StoreOptions
from tests.storage.stores import crashed, opened, records
from tests.storage_faults.power_cut import barest
from tests.storage_faults.simulated import SimulatedFiles

EXAMPLES = int(os.environ.get("HEADRACE_STORE_MODEL_EXAMPLES", "0"))
OPTIONS = StoreOptions(journal_bytes=12 * 1024, headroom_bytes=0)
KINDS = {
    "plain": LogOptions(segment_bytes=500),
    "compressed": LogOptions(segment_bytes=500, compress=True),
    "aged": LogOptions(segment_bytes=400, retention_ms=5_000),
    "sized": LogOptions(segment_bytes=400, retention_bytes=900),
    "table": LogOptions(segment_bytes=700, compact=True, tombstone_retention_ms=3_000),
}
LOGS_MAX = 4
KEYS = [b"a", b"b", b"c", b"d"]

Outcome: TypeAlias = list[list[Appended] | BrokerError]
Columns: TypeAlias = list[tuple[bytes | None, bytes | None]]
"""(value, key) of each record."""


@dataclass(slots=True)
class Held:
    """One log as a list, with a record for each offset below `end` that still exists."""

    options: LogOptions
    first: int = 0
    end: int = 0
    safe: int = 0
    """Offsets below this were acknowledged as durable."""
    records: list[Record] = field(default_factory=list)
    given: list[Record] = field(default_factory=list)
    """All records ever written below `end`, including those that compaction removed."""

    def put(self, record_batch: RecordBatch, now: int) -> Appended:
        base, count = self.end, len(record_batch)
        stamps = [now] * count if record_batch.timestamps is None else record_batch.timestamps
        keys = [None] * count if record_batch.keys is None else record_batch.keys
        fresh = list(map(Record, range(base, base + count), stamps, keys, record_batch.values))
        self.records += fresh
        self.given += fresh
        self.end += count
        return Appended(base, count, stamps[0])

    def cut(self, end: int) -> None:
        """Remove the newest records; their offsets are free again."""
        self.end = self.safe = end
        self.records = [record for record in self.records if record.offset < end]
        self.given = [record for record in self.given if record.offset < end]


@dataclass(slots=True)
class Waiting:
    """A staged append, and its outcome."""

    appends: list[tuple[int, RecordBatch]]
    ack: Ack
    now: int
    outcome: Outcome


def table(found: Sequence[Record]) -> dict[bytes | None, bytes]:
    """Return the newest value of each key that was not deleted."""
    newest = {record.key: record.value for record in found}
    return {key: value for key, value in newest.items() if value is not None}


VALUES = st.sampled_from([b"", b"x", b"value" * 4, b"long " * 30, b"longer " * 90])
PICK = st.integers(0, 1 << 16)
STAMPS = st.none() | st.integers(-4_000, 4_000)
COLUMNS = st.lists(st.tuples(st.none() | VALUES, st.sampled_from([None, *KEYS])), min_size=1, max_size=6)
FORMS = st.sampled_from(["plain", "late", "columns"])
"""Form of the last batch of an append."""
ACKS = st.sampled_from([Ack.DURABLE, Ack.DURABLE, Ack.WRITTEN, Ack.NONE])


class StoreModel(RuleBasedStateMachine):
    """State machine without threads: each rule is a step of a writer, a reader, maintenance, a crash or a power cut."""

    def __init__(self) -> None:
        super().__init__()
        self.files = SimulatedFiles()
        self.store: Store = opened(self.files, OPTIONS)
        self.held: dict[int, Held] = {}
        self.doomed: dict[int, LogOptions] = {}
        """Logs deleted since the last checkpoint. A crash may restore them, and their owner deletes them again."""
        self.numbers = 0
        self.waiting: list[Waiting] = []
        self.now = 1_000_000

    def _log(self, pick: int) -> int:
        return sorted(self.held)[pick % len(self.held)]

    def _batch(self, log: int, columns: Columns, shift: int | None) -> RecordBatch:
        """Make a batch. Only a table has tombstones, and all its records have keys."""
        compact = self.held[log].options.compact
        keys = [key or KEYS[0] if compact else key for _, key in columns]
        values = [value if compact else value or b"" for value, _ in columns]
        stamps = None if shift is None else [self.now + shift + index * 7 for index in range(len(columns))]
        return RecordBatch(values, keys if any(key is not None for key in keys) else None, None, stamps)

    # Logs.

    @initialize()
    def begin(self) -> None:
        """Create a table and another log, so that few examples use an empty store."""
        self.create("table")
        self.create("aged")

    @precondition(lambda self: len(self.held) < LOGS_MAX)
    @rule(kind=st.sampled_from(sorted(KINDS)))
    def create(self, kind: str) -> None:
        log = self.store.create_log(KINDS[kind])
        assert log == self.numbers, "a number is given once"
        self.numbers += 1
        self.held[log] = Held(KINDS[kind])

    @precondition(lambda self: len(self.held) > 2)
    @rule(pick=PICK)
    def delete(self, pick: int) -> None:
        self.flush()
        log = self._log(pick)
        self.store.delete_logs([log])
        self.doomed[log] = self.held.pop(log).options

    # Writers.

    def _stage(self, appends: list[tuple[int, RecordBatch]], ack: Ack, form: str) -> None:
        outcome: Outcome = []
        built: list[tuple[int, AnyBatch | LateBatch]] = [*appends]
        *others, (log, last) = appends

        def build(landed: Sequence[Appended]) -> RecordBatch:
            assert [appended.count for appended in landed] == [len(record_batch) for _, record_batch in others]
            return last

        if form == "late":
            built[-1] = (log, build)
        elif form == "columns":
            built[-1] = (log, ColumnBatch.of(last))
        self.store.stage(built, ack=ack, now=self.now, done=outcome.append, size_bytes=1000)
        self.waiting.append(Waiting(appends, ack, self.now, outcome))

    @rule(pick=PICK, columns=COLUMNS, shift=STAMPS, ack=ACKS, form=FORMS, flush=st.booleans())
    def append(self, pick: int, columns: Columns, shift: int | None, ack: Ack, form: str, flush: bool) -> None:
        log = self._log(pick)
        self._stage([(log, self._batch(log, columns, shift))], ack, form)
        if flush:
            self.flush()

    @rule(picks=st.lists(st.tuples(PICK, COLUMNS, STAMPS), min_size=2, max_size=4), form=FORMS, flush=st.booleans())
    def append_to_several(self, picks: list[tuple[int, Columns, int | None]], form: str, flush: bool) -> None:
        logs = [self._log(pick) for pick, _, _ in picks]
        appends = [(log, self._batch(log, columns, shift)) for log, (_, columns, shift) in zip(logs, picks, strict=True)]
        self._stage(appends, Ack.DURABLE, form)
        if flush:
            self.flush()

    @rule()
    def flush(self) -> None:
        """Flush: one frame, one time. A sync covers all earlier frames."""
        self.store.flush()
        now = max((staged.now for staged in self.waiting), default=0)
        for staged in self.waiting:
            landed = [self.held[log].put(record_batch, now) for log, record_batch in staged.appends]
            assert staged.outcome == [landed]
        if any(staged.ack is Ack.DURABLE for staged in self.waiting):
            self._all_safe()
        self.waiting.clear()

    def _all_safe(self) -> None:
        for held in self.held.values():
            held.safe = held.end

    @rule(ms=st.integers(0, 9_000))
    def time_passes(self, ms: int) -> None:
        self.now += ms

    # Readers.

    @rule(pick=PICK)
    def read_outside(self, pick: int) -> None:
        log = self._log(pick)
        held = self.held[log]
        for offset in (held.first - 1, held.end + 1):
            with pytest.raises(OffsetOutOfRange) as refused:
                self.store.read(log, offset, bytes_max=1)
            assert (refused.value.wanted, refused.value.first, refused.value.end) == (offset, held.first, held.end)

    @rule(pick=PICK, at=PICK, bytes_max=st.integers(1, 2_000), records_max=st.integers(1, 12))
    def read(self, pick: int, at: int, bytes_max: int, records_max: int) -> None:
        log = self._log(pick)
        held = self.held[log]
        offset = held.first + at % (held.end - held.first + 1)
        batches = self.store.read(log, offset, bytes_max=bytes_max, records_max=records_max)
        found = [record for batch in batches for record in batch.records()]
        wanted = [record for record in held.records if record.offset >= offset]
        assert found == wanted[: len(found)]
        assert bool(found) == bool(wanted), "a read at a record returns at least that"
        size = sum(len(record.value or b"") + len(record.key or b"") for record in found)
        assert len(found) <= 1 or size <= bytes_max
        assert len(found) <= records_max
        if batches:
            behind = [record.offset for record in wanted[len(found) :]]
            assert found[-1].offset < batches[-1].next_offset <= min(behind, default=held.end), "reading on misses nothing"

    @rule(pick=PICK, back=st.integers(-5_000, 12_000))
    def find_time(self, pick: int, back: int) -> None:
        log = self._log(pick)
        held, wanted = self.held[log], self.now - back
        after = [record.offset for record in held.records if record.timestamp >= wanted]
        assert self.store.partitions[log].offset_for_time(wanted) == min(after, default=held.end)

    # Maintenance.

    @rule()
    def checkpoint(self) -> None:
        """A checkpoint makes everything written durable, regardless of `ack`, and deletions permanent."""
        self.store.checkpoint()
        assert self.store.failure is None
        self.doomed.clear()
        self._all_safe()

    @rule()
    def maintain(self) -> None:
        self.store.maintain(self.now)
        assert self.store.failure is None
        for log, held in self.held.items():
            assert self.store.bounds(log).end == held.end
            if held.options.compact:
                self._compacted(log, held)
            else:
                self._retained(log, held)

    def _retained(self, log: int, held: Held) -> None:
        first, options = self.store.bounds(log).first, held.options
        taken = [record for record in held.records if record.offset < first]
        if options.retention_ms:
            due = [record for record in held.records if record.timestamp < self.now - options.retention_ms]
            assert all(record in due for record in taken), "nothing goes before its time"
            assert len(due) < len(held.records) or first == held.end, "what is past its time goes once all of it is"
        elif taken:
            assert 0 < options.retention_bytes <= self.store.partitions[log].size_bytes, "no more goes than must"
        held.first = first
        held.records = held.records[len(taken) :]

    def _compacted(self, log: int, held: Held) -> None:
        """Compare the resulting table only; the store decides which segments to compact."""
        found = records(self.store, log)
        known = {record.offset: record for record in held.records}
        assert all(known.get(record.offset) == record for record in found)
        assert table(found) == table(held.given)
        held.records = found

    # Crashes.

    def _open(self, files: SimulatedFiles) -> None:
        """Delete logs again, as the owner of a store does, who knows the existing logs."""
        self.files, self.store = files, opened(files, OPTIONS)
        damages = [damage for damage in self.store.report.damages if not damage.path.startswith(tuple(map(log_directory, self.doomed)))]
        assert not damages, damages
        assert self.store.partitions.keys() <= self.held.keys() | self.doomed.keys(), "a deleted log is back"
        for log, options in self.doomed.items():
            self.store.open_log(log, options)
            self.store.delete_logs([log])
        for log, held in self.held.items():
            self.store.open_log(log, held.options)
        assert self.store.next_log <= self.numbers

    def _check(self, files: SimulatedFiles) -> None:
        """Check the files. The checker misses a log that is being removed until a checkpoint lists it as deleted."""
        problems = check(files).problems
        assert self.doomed or not problems, problems

    @rule()
    def restart(self) -> None:
        self.flush()
        self.store.close()
        self.doomed.clear()
        self._check(self.files)
        self._all_safe()
        self._open(self.files)

    @rule()
    def process_dies(self) -> None:
        """Kill the process: staged records are gone, written ones stay, and recovery syncs them before use."""
        self.waiting.clear()
        self._check(crashed(self.files))
        self.files.close()
        self._open(self.files)
        self._all_safe()

    @rule()
    def power_fails(self) -> None:
        """Cut the power: only synced records stay, at least those acknowledged as durable."""
        self.waiting.clear()
        files = barest(self.files)
        self._check(files)
        self._open(files)
        for log, held in self.held.items():
            end = self.store.bounds(log).end
            assert held.safe <= end <= held.end, f"log {log}: {held.safe} of {held.end} were safe, {end} are there"
            held.cut(end)
            if held.options.compact:
                assert table(held.records) == table(held.given), "compaction never trusts what a power cut may take"

    @invariant()
    def both_hold_the_same(self) -> None:
        for log, held in self.held.items():
            bounds = self.store.bounds(log)
            assert (bounds.first, bounds.end) == (held.first, held.end)
            assert records(self.store, log, bytes_max=1 << 16) == held.records

    def teardown(self) -> None:
        self.store.close()
        report = check(self.files)
        assert report.clean, report.problems


StoreModel.TestCase.settings = settings(
    max_examples=EXAMPLES or 250,
    stateful_step_count=40,
    derandomize=not EXAMPLES,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
)
TestStoreModel = StoreModel.TestCase
