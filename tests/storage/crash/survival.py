"""Cut the power after every operation of a workload, recover each possible disk, and verify the result."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import cast

from headrace.errors import BrokerError
from headrace.records import Ack, Appended, RecordBatch
from headrace.storage.batch import MAGIC, REFERENCED, BatchHeader, parse_header
from headrace.storage.check import check
from headrace.storage.journal import HEADER_BYTES, SUFFIX, journal_number, read_journal
from headrace.storage.store import Store
from tests.storage.crash.history import Anomaly, Content, Event, Facts, Given, adopt, judge, read_log, read_store, view
from tests.storage.crash.workload import Shape, Workload
from tests.storage_faults.power_cut import PowerCuts, barest
from tests.storage_faults.simulated import Operation, SimulatedFiles

SECOND_LIFE_EVERY = 500
"""Interval of images on which the workload continues, with further power cuts."""
KILLED_EVERY = 70
"""Interval of cuts at which only the process is killed; a new process continues, and then the power is cut."""
SECOND_LIFE_STEPS = 3


@dataclass(slots=True)
class Survival:
    """The outcome of one workload, or of many."""

    images: int = 0
    operations: int = 0
    acked: int = 0
    second_lives: int = 0
    """Workloads that continued after a power cut or a kill."""


def survive(shape: Shape, seed: int, *, steps: Sequence[str] | None = None) -> Survival:
    """Take `steps`, or random ones of the shape, and cut the power everywhere.

    Raises `Anomaly`, with everything needed to reproduce it, unless every image recovers to a valid state.
    """
    rng = random.Random(f"{shape.name} {seed}")
    outcome = Survival()
    try:
        workload = Workload(shape, rng)
        if steps is None:
            workload.run()
        else:
            workload.take(steps)
        _cut_everywhere(workload, rng, outcome, lives=2)
    except (Anomaly, BrokerError, OSError) as failure:
        taken = "" if steps is None else f", steps {', '.join(steps)}"
        raise Anomaly(f"{shape.name!r}, seed {seed}{taken}: {failure}") from failure
    return outcome


def _cut_everywhere(workload: Workload, rng: random.Random, outcome: Survival, *, lives: int) -> None:
    operations = workload.files.operations
    facts, cuts = workload.facts.copy(), PowerCuts(workload.files)
    start = workload.began
    outcome.acked += workload.acked
    outcome.operations += len(operations) - start
    for cut in range(start, len(operations) + 1):
        if cut > start and operations[cut - 1].kind == "mark":
            cast(Event, operations[cut - 1].value)(facts)
        label = ""
        try:
            for label, image in cuts.images(cut, rng):  # noqa: B007  # used when it fails
                outcome.images += 1
                content = recover(image, workload.shape, workload.given, facts, now=workload.now)
                if lives > 1 and outcome.images % SECOND_LIFE_EVERY == 0:
                    _cut_everywhere(_live_on(image.rewound(), workload, cut, content, facts), rng, outcome, lives=lives - 1)
                    outcome.second_lives += 1
            if lives > 1 and cut % KILLED_EVERY == KILLED_EVERY - 1:
                label = f"killed at {cut}"
                content = recover(workload.files.killed(cut), workload.shape, workload.given, facts, now=workload.now)
                heir = _live_on(workload.files.killed(cut), workload, cut, content, facts)
                _cut_everywhere(heir, rng, outcome, lives=lives - 1)
                outcome.second_lives += 1
        except (Anomaly, BrokerError, OSError) as failure:
            raise Anomaly(f"{label}: {failure}") from failure


def recover(image: SimulatedFiles, shape: Shape, given: dict[int, Given], facts: Facts, *, now: int) -> Content:
    """Recover, verify, check, cut the power again, recover to the same state, and continue writing. Returns the recovered content."""
    store = Store.open(image, shape.store_options(), threads=False)
    adopt(store, given, facts)
    content = read_store(store)
    judge(content, given, facts)
    verify_segments(store)
    second = barest(image)
    _verify_journals(second)
    if not store.report.damages:
        _verify(second, shape)
    store = Store.open(second, shape.store_options(), threads=False)
    adopt(store, given, facts)
    again = read_store(store)
    if again != content:
        raise Anomaly(f"a second recovery finds {_differing(content, again)}")
    _go_on(store, content, now)
    if shape.compacted:
        compact_again(store, now)
    return content


def compact_again(store: Store, now: int) -> None:
    """Compact after a crash during compaction; the tables must stay the same."""
    before = read_store(store)
    store.maintain(now)
    for log, (bounds, records) in read_store(store).items():
        if not store.partitions[log].options.compact:
            continue
        offsets = [record.offset for record in records]
        if offsets != sorted(set(offsets)):
            raise Anomaly(f"log {log}: another compaction leaves the offsets {offsets}")
        if bounds != before[log][0] or view(records) != view(before[log][1]):
            raise Anomaly(f"log {log}: another compaction changes {before[log]} to {records}")


def verify_segments(store: Store) -> None:
    """Check that replaced segments are removed. Readers would not notice them, but their space would never be freed."""
    for partition in store.partitions.values():
        for one, following in pairwise(partition.segments):
            if one.covers_to > following.base_offset:
                raise Anomaly(f"{following.path} is there, although {one.path} has replaced it")


def _verify(files: SimulatedFiles, shape: Shape) -> None:
    """Check that recovery and the checker report the same gaps of unsynced frames, and none where there is none."""
    report = check(files, shape.store_options().key)
    if not report.clean:
        raise Anomaly(f"the checker says: {report.problems[0]}")


def _verify_journals(files: SimulatedFiles) -> None:
    """Check that old frames in a reused journal file are ignored."""
    for name in files.list("journal"):
        number = journal_number(name)
        assert number is not None, "nothing else is in that directory"
        for frame in read_journal(files, number, None, lambda damage: None):
            if frame.journal != number:
                raise Anomaly(f"frame {frame.number} of journal {frame.journal} is read in journal {number}")


def _verify_nonces(first: Workload, upto: int, heir: Workload) -> None:
    """Check that no nonce is used twice."""
    again = _nonces(first.files.operations[:upto]) & _nonces(heir.files.operations[heir.began :])
    if again:
        raise Anomaly(f"the nonce {min(again).hex()} is used twice")


def _nonces(operations: Sequence[Operation]) -> set[bytes]:
    """Return the nonces of all batches in journals, and of the large appends in segments."""
    found: set[bytes] = set()
    for operation in operations:
        if operation.kind != "write":
            continue
        if operation.path.endswith(SUFFIX):
            found.update(
                header.nonce for header in _headers(operation, HEADER_BYTES + 48 * int.from_bytes(operation.data[36:40], "little"))
            )
        elif operation.data.startswith(MAGIC):
            found.update(header.nonce for header in _headers(operation, 0) if header.flags & REFERENCED)
    return found


def _headers(operation: Operation, at: int) -> Iterator[BatchHeader]:
    while at < len(operation.data):
        header = parse_header(operation.data, at, operation.path)
        yield header
        at += header.size


def _differing(one: Content, other: Content) -> str:
    logs = sorted(one.keys() | other.keys())
    return next((f"log {log} {other.get(log)} where it was {one.get(log)}" for log in logs if one.get(log) != other.get(log)), "the same")


def _go_on(store: Store, content: Content, now: int) -> None:
    """Append to each log: the record gets the next offset and can be read after all others."""
    outcomes: list[list[Appended] | BrokerError] = []
    for log in content:
        store.stage([(log, RecordBatch([b"after"], [b"key 1"]))], ack=Ack.DURABLE, now=now, done=outcomes.append, size_bytes=10)
    store.flush()
    for (log, (bounds, records)), outcome in zip(content.items(), outcomes, strict=True):
        if isinstance(outcome, BrokerError) or outcome[0].base_offset != bounds.end:
            raise Anomaly(f"log {log} ended at {bounds.end}, an append after recovery gave {outcome}")
        after, found = read_log(store, log)
        if after.end != bounds.end + 1 or found[:-1] != records or found[-1].value != b"after":
            raise Anomaly(f"log {log}: an append after recovery changed what was there")


def _live_on(image: SimulatedFiles, first: Workload, cut: int, content: Content, before: Facts) -> Workload:
    """Continue the workload on the recovered store."""
    given = {log: Given(known.options) for log, known in first.given.items() if log in before.created}
    for log, (bounds, records) in content.items():
        if image.operations:  # only the process was killed: a power cut may still restore compacted records
            given[log].records = first.given[log].records[: bounds.end]
            continue
        given[log].records = [None] * bounds.end
        for record in records:
            given[log].records[record.offset] = record
    facts = before.copy()
    facts.unsure, facts.maintained = [], True
    facts.may = {log: bounds.end for log, (bounds, _) in content.items()}
    facts.floor = {log: bounds.first for log, (bounds, _) in content.items()}
    if not image.operations:  # after a power cut the recovered records are durable
        facts.must = dict(facts.may)
    workload = Workload(replace(first.shape, steps=SECOND_LIFE_STEPS), first.rng, image, given, facts, now=first.now + 1000)
    workload.run()
    if first.shape.encrypted:
        _verify_nonces(first, cut, workload)
    return workload
