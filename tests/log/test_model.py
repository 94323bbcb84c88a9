"""A stateful model test: the store against a plain dictionary of lists.

Hypothesis chooses the steps and their arguments, and shrinks what fails to a short script. HEADRACE_MODEL_EXAMPLES=2000 makes it
search for longer.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headrace.errors import BrokerError, OffsetOutOfRange
from headrace.log.check import check
from headrace.log.partition import LogOptions
from headrace.log.power_cut import PowerCuts
from headrace.log.simulated import SimulatedFiles
from headrace.log.store import Store, StoreOptions
from headrace.records import NEVER, Ack, Appended, Record, Run

EXAMPLES = int(os.environ.get("HEADRACE_MODEL_EXAMPLES", "200"))
OPTIONS = StoreOptions(journal_bytes=16 * 1024, headroom_bytes=0)
EVENTS, AGED, PACKED, TABLE = range(4)
"""A plain log, one with retention by age, a compressed one, and a table that is compacted."""
LOGS = {
    EVENTS: LogOptions(segment_bytes=700),
    AGED: LogOptions(segment_bytes=300, retention_ms=1000),
    PACKED: LogOptions(segment_bytes=500, compress=True),
    TABLE: LogOptions(segment_bytes=700, compact=True, tombstone_retention_ms=2000),
}
VALUES = st.binary(max_size=60) | st.integers(100, 3000).map(lambda size: b"%d " % size * (size // 5))
GROUPS = st.sampled_from([b"payments", b"search", b"mail"])


@dataclass
class Log:
    """One log of the model. `records[offset]` is None where a power cut took what no acknowledgement stood for."""

    records: list[Record | None] = field(default_factory=list)
    first: int = 0
    durable: int = 0
    """Everything below was acknowledged as durable, or came before something that was."""

    def kept(self) -> list[Record]:
        return [record for record in self.records[self.first :] if record is not None]


class StoreMachine(RuleBasedStateMachine):
    """The rules. Staged appends wait in `staged` until a flush, as the writer's queue does."""

    @initialize()
    def open(self) -> None:
        self.files = SimulatedFiles()
        self.now = 1_000_000
        self.model = {log: Log() for log in LOGS}
        self.staged: list[tuple[Ack, list[tuple[int, Run]], list[list[Appended] | BrokerError]]] = []
        self._start(self.files)

    def _start(self, files: SimulatedFiles) -> None:
        self.files = files
        self.store = Store.open(files, OPTIONS, threads=False)
        for log, options in LOGS.items():
            self.store.open_log(log, options)

    # Writing.

    @rule(log=st.sampled_from([EVENTS, AGED, PACKED]), values=st.lists(VALUES, min_size=1, max_size=4), ack=st.sampled_from(Ack))
    def append(self, log: int, values: list[bytes], ack: Ack) -> None:
        self._stage(ack, [(log, Run(values))])

    @rule(group=GROUPS, offset=st.none() | st.integers(0, 9))
    def commit(self, group: bytes, offset: int | None) -> None:
        """A group's offset, or its deletion, goes to the table."""
        self._stage(Ack.DURABLE, [(TABLE, _commit(group, offset))])

    @rule(log=st.sampled_from([EVENTS, PACKED]), value=VALUES, group=GROUPS, offset=st.integers(10, 99))
    def transaction(self, log: int, value: bytes, group: bytes, offset: int) -> None:
        """Records of two logs and a group's offset, together or not at all."""
        self._stage(Ack.DURABLE, [(log, Run([value])), (AGED, Run([value, b""])), (TABLE, _commit(group, offset))])

    def _stage(self, ack: Ack, appends: list[tuple[int, Run]]) -> None:
        outcome: list[list[Appended] | BrokerError] = []
        self.staged.append((ack, appends, outcome))
        self.store.stage(appends, ack=ack, now=self.now, done=outcome.append, size_bytes=sum(run.size_bytes for _, run in appends))

    @precondition(lambda self: self.staged)
    @rule()
    def flush(self) -> None:
        self.store.flush()
        for _, appends, outcome in self.staged:
            (landed,) = outcome
            assert isinstance(landed, list), landed
            assert [appended.base_offset for appended in landed] == [self._note(log, run) for log, run in appends]
        if any(ack is Ack.DURABLE for ack, _, _ in self.staged):  # one sync for all that was flushed with it
            for model in self.model.values():
                model.durable = len(model.records)
        self.staged.clear()

    def _note(self, log: int, run: Run) -> int:
        """Add to the model; the offset of the first record."""
        records = self.model[log].records
        base = len(records)
        for value, key in zip(run.values, run.keys or [None] * len(run), strict=True):
            records.append(Record(len(records), self.now, key, value, (), NEVER))
        return base

    # Upkeep.

    @rule(milliseconds=st.integers(1, 1500))
    def wait(self, milliseconds: int) -> None:
        self.flush_if_staged()
        self.now += milliseconds

    def flush_if_staged(self) -> None:
        if self.staged:
            self.flush()

    @rule()
    def checkpoint(self) -> None:
        self.store.checkpoint()

    @rule()
    def maintain(self) -> None:
        self.store.maintain(self.now)
        model, bounds = self.model[AGED], self.store.bounds(AGED)
        gone = [record for record in model.records[model.first : bounds.first] if record]
        assert all(record.timestamp < self.now - 1000 for record in gone), "retention takes nothing before its time"
        model.first = bounds.first

    # Endings.

    @rule()
    def restart(self) -> None:
        self.flush_if_staged()
        self._close()
        self._start(self.files)

    @rule()
    def die(self) -> None:
        """The process dies. What was staged is gone; what was written shows."""
        self.staged.clear()
        self.files.close()
        self._start(self.files)

    @rule(choice=st.integers(0, 10_000), seed=st.integers(0, 100))
    def lose_power(self, choice: int, seed: int) -> None:
        """One of the disks that a power cut may leave."""
        self.staged.clear()
        images = list(PowerCuts(self.files).images(len(self.files.operations), random.Random(seed)))
        self._start(images[choice % len(images)][1])
        for log, model in self.model.items():
            bounds = self.store.bounds(log)
            assert model.durable <= bounds.end <= len(model.records), "no more is lost than was not promised"
            found = {record.offset for record in _read_all(self.store, log)}
            model.records = [record if _stays(record, model, found) else None for record in model.records[: bounds.end]]
            model.durable = bounds.end

    # Reading.

    @rule(
        log=st.sampled_from([EVENTS, AGED, PACKED]),
        part=st.floats(0, 1),
        bytes_max=st.sampled_from([1, 50, 1000, 1 << 20]),
        records_max=st.sampled_from([1, 3, 1 << 20]),
    )
    def read(self, log: int, part: float, bytes_max: int, records_max: int) -> None:
        bounds, model = self.store.bounds(log), self.model[log]
        offset = bounds.first + round(part * (bounds.end - bounds.first))
        batches = self.store.read(log, offset, bytes_max=bytes_max, records_max=records_max)
        found = [record for batch in batches for record in batch.records()]
        wanted = [record for record in model.records[offset : bounds.end] if record]
        assert found == wanted[: len(found)]
        assert bool(found) == bool(wanted)
        assert len(found) <= records_max
        assert len(found) <= 1 or sum(len(record.value or b"") + len(record.key or b"") for record in found) <= bytes_max

    @rule(log=st.sampled_from([EVENTS, AGED]), back=st.integers(0, 3000))
    def seek_by_time(self, log: int, back: int) -> None:
        wanted = next(
            (record.offset for record in self.model[log].kept() if record.timestamp >= self.now - back), self.store.bounds(log).end
        )
        assert self.store.partitions[log].offset_for_time(self.now - back) == wanted

    @rule(log=st.sampled_from(list(LOGS)), beyond=st.integers(1, 5))
    def read_outside(self, log: int, beyond: int) -> None:
        bounds = self.store.bounds(log)
        for offset in (bounds.end + beyond, bounds.first - beyond):
            with pytest.raises(OffsetOutOfRange, match=rf"{offset} is outside \[{bounds.first}, {bounds.end}\)"):
                self.store.read(log, offset, bytes_max=100)

    # What always holds.

    @invariant()
    def every_log_holds_what_the_model_holds(self) -> None:
        for log, model in self.model.items():
            bounds, found = self.store.bounds(log), _read_all(self.store, log)
            assert (bounds.first, bounds.end) == (model.first, len(model.records))
            if log == TABLE:
                assert _view(found) == _view(model.kept()), "compaction changes no answer"
                assert all(record == model.records[record.offset] for record in found)
            else:
                assert found == model.kept()

    def _close(self) -> None:
        self.store.close()
        gaps = any(record is None for model in self.model.values() for record in model.records)
        assert gaps or check(self.files).clean, "the checker agrees, unless a power cut left a gap among unsynced frames"

    def teardown(self) -> None:
        self._close()


def _commit(group: bytes, offset: int | None) -> Run:
    return Run([None if offset is None else b"%d" % offset], [group])


def _stays(record: Record | None, model: Log, found: set[int]) -> bool:
    """Below what was promised the model is right, whatever is found; above it, the disk is."""
    return record is not None and (record.offset < model.durable or record.offset in found)


def _read_all(store: Store, log: int) -> list[Record]:
    bounds = store.bounds(log)
    found: list[Record] = []
    offset = bounds.first
    while offset < bounds.end and (batches := store.read(log, offset, bytes_max=1 << 20)):
        found += [record for batch in batches for record in batch.records()]
        offset = batches[-1].next_offset
    return found


def _view(records: Sequence[Record]) -> dict[bytes | None, bytes]:
    table: dict[bytes | None, bytes] = {}
    for record in records:
        if record.value is None:
            table.pop(record.key, None)
        else:
            table[record.key] = record.value
    return table


TestStore: Callable[[], object] = StoreMachine.TestCase
StoreMachine.TestCase.settings = settings(
    max_examples=EXAMPLES,
    stateful_step_count=40,
    deadline=None,
    derandomize=EXAMPLES == 200,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
