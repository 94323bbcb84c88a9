"""Cut the power at every moment of a workload, recover each disk this may leave, and judge what came back."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

from headrace.errors import BrokerError
from headrace.log.check import check
from headrace.log.power_cut import PowerCuts, barest
from headrace.log.simulated import SimulatedFiles
from headrace.log.store import Store
from headrace.records import Ack, Appended, Run
from tests.log.crash.history import Anomaly, Content, Event, Facts, Given, adopt, judge, read_log, read_store
from tests.log.crash.workload import Shape, Workload

SECOND_LIFE_EVERY = 300
"""How many images pass until one of them lives on: the workload continues on it and the power is cut at every moment again."""
SECOND_LIFE_STEPS = 4


@dataclass(slots=True)
class Survival:
    """The outcome of one workload, or of many."""

    images: int = 0
    operations: int = 0
    acked: int = 0
    second_lives: int = 0


def survive(shape: Shape, seed: int, *, steps: Sequence[str] | None = None) -> Survival:
    """Live `steps`, or random ones of the shape, and cut the power everywhere.

    Raise `Anomaly`, with all that is needed to see it again, unless every image recovers to something it may be.
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
        told = "" if steps is None else f", steps {', '.join(steps)}"
        raise Anomaly(f"{shape.name!r}, seed {seed}{told}: {failure}") from failure
    return outcome


def _cut_everywhere(workload: Workload, rng: random.Random, outcome: Survival, *, lives: int) -> None:
    operations = workload.files.operations
    facts, cuts = workload.facts.copy(), PowerCuts(workload.files)
    outcome.acked += workload.acked
    outcome.operations += len(operations)
    for cut in range(len(operations) + 1):
        if cut and operations[cut - 1].kind == "mark":
            cast(Event, operations[cut - 1].value)(facts)
        for label, image in cuts.images(cut, rng):
            outcome.images += 1
            try:
                content = recover(image, workload.shape, workload.given, facts, now=workload.now)
                if lives > 1 and outcome.images % SECOND_LIFE_EVERY == 0:
                    outcome.second_lives += 1
                    _cut_everywhere(_live_on(image.rewound(), workload, content, facts), rng, outcome, lives=lives - 1)
            except (Anomaly, BrokerError, OSError) as failure:
                raise Anomaly(f"{label}: {failure}") from failure


def recover(image: SimulatedFiles, shape: Shape, given: dict[int, Given], facts: Facts, *, now: int) -> Content:
    """Recover, judge, verify, lose the power once more, recover to the same, and go on writing. What was recovered."""
    store = Store.open(image, shape.store_options(), threads=False)
    adopt(store, given, facts)
    content = read_store(store)
    judge(content, given, facts)
    second = barest(image)
    if not store.report.damages and facts.deleting == facts.deleted:
        _verify(second, shape)
    store = Store.open(second, shape.store_options(), threads=False)
    adopt(store, given, facts)
    again = read_store(store)
    if again != content:
        raise Anomaly(f"a second recovery finds {_differing(content, again)}")
    _go_on(store, content, now)
    return content


def _verify(files: SimulatedFiles, shape: Shape) -> None:
    """A gap that unsynced frames left is reported by recovery and by the checker alike; where there is none, neither may complain."""
    report = check(files, shape.store_options().key)
    if not report.clean:
        raise Anomaly(f"the checker says: {report.problems[0]}")


def _differing(one: Content, other: Content) -> str:
    logs = sorted(one.keys() | other.keys())
    return next((f"log {log} {other.get(log)} where it was {one.get(log)}" for log in logs if one.get(log) != other.get(log)), "the same")


def _go_on(store: Store, content: Content, now: int) -> None:
    """The next record of each log gets the next offset, and can be read back behind all the others."""
    outcomes: list[list[Appended] | BrokerError] = []
    for log in content:
        store.stage([(log, Run([b"after"], [b"key 1"]))], ack=Ack.DURABLE, now=now, done=outcomes.append, size_bytes=10)
    store.flush()
    for (log, (bounds, records)), outcome in zip(content.items(), outcomes, strict=True):
        if isinstance(outcome, BrokerError) or outcome[0].base_offset != bounds.end:
            raise Anomaly(f"log {log} ended at {bounds.end}, an append after recovery gave {outcome}")
        after, found = read_log(store, log)
        if after.end != bounds.end + 1 or found[:-1] != records or found[-1].value != b"after":
            raise Anomaly(f"log {log}: an append after recovery changed what was there")


def _live_on(image: SimulatedFiles, first: Workload, content: Content, before: Facts) -> Workload:
    """The workload goes on where the recovered store stands: all that it found counts as kept from now on."""
    given = {log: Given(known.options) for log, known in first.given.items() if log in before.created}
    for log, (bounds, records) in content.items():
        given[log].records = [None] * bounds.end
        for record in records:
            given[log].records[record.offset] = record
    ends = {log: bounds.end for log, (bounds, _) in content.items()}
    facts = Facts(
        must=dict(ends),
        may=ends,
        floor={log: bounds.first for log, (bounds, _) in content.items()},
        created=set(before.created),
        deleting=set(before.deleting),
        deleted=set(before.deleted),
        maintained=True,
    )
    workload = Workload(replace(first.shape, steps=SECOND_LIFE_STEPS), first.rng, image, given, facts, now=first.now + 1000)
    workload.run()
    return workload
