"""Workloads on a failing disk: rejected records are absent or unknown, acknowledged ones stay.

An append rejected for lack of space, descriptors or memory leaves nothing behind: its offsets are free again, and the next one may
succeed. The outcome of one that met a disk failure is unknown until the store is opened again. Until then the store rejects writes and
continues to serve reads.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import cast

from headrace.errors import BrokerError, CorruptData, Unavailable
from headrace.records import Ack, Appended
from headrace.storage.store import Store
from tests.storage.crash.history import Anomaly, Event, Facts, Given, Part, adopt, deleted, deleting, judge, read_store
from tests.storage.crash.survival import recover
from tests.storage.crash.workload import Shape, Workload
from tests.storage_faults.power_cut import PowerCuts
from tests.storage_faults.simulated import Fault, SimulatedFiles

SOON = 12
"""Operations after a fault within which a power cut is tested."""


@dataclass
class Troubled(Workload):
    """A workload that continues after errors, as clients do."""

    known: Facts = field(default_factory=lambda: Facts(strict=False))
    """Current facts."""
    archive: list[tuple[int, dict[int, Given]]] = field(default_factory=list)
    """(number of operations, facts) at the end of each process."""
    _outcomes: list[BrokerError] = field(default_factory=list)

    def _mark(self, event: Callable[[Facts], None]) -> None:
        super()._mark(event)
        event(self.known)

    def take(self, steps: Iterable[str]) -> None:
        while len(self.live) < self.shape.logs:
            self.create()
        for name in [*steps, "flush"]:
            self.now += self.rng.randrange(0, 2000)
            getattr(self, name)()

    def flush(self) -> None:
        """Flush: one frame for everything staged, so all of it is rejected together."""
        group, failed, acked = list(self.staged), self.store.failure is not None, self.acked
        super().flush()
        if failed and self.acked > acked:
            raise Anomaly("an append was acknowledged after the disk had failed")
        if any(outcome.retriable for outcome in self._outcomes):
            self._forget(group)
        self._outcomes.clear()

    def _commit(self, appends: Sequence[object], parts: tuple[Part, ...], ack: Ack) -> None:
        super()._commit(appends, parts, ack)  # type: ignore[arg-type]  # passed on unchanged
        if self._outcomes:  # rejected at once: nothing was staged
            self._outcomes.clear()
            self._forget([parts])

    def _answered(self, parts: tuple[Part, ...], ack: Ack, outcome: list[Appended] | BrokerError) -> None:
        if not isinstance(outcome, BrokerError):
            super()._answered(parts, ack, outcome)
        elif parts in self.staged:
            self.staged.remove(parts)
            self._outcomes.append(outcome)

    def maintain(self) -> None:
        super().maintain()
        self.known.floor.update({log: self.store.bounds(log).first for log in self.live})

    def delete(self) -> None:
        self.flush()
        if len(self.live) < 2 or self.store.failure is not None or self.store.full:
            return
        log = self.live.pop(self.rng.randrange(len(self.live)))
        self._mark(deleting(log))
        before = self.store.counters.checkpoints
        try:
            self.store.delete_logs([log])
            self.store.checkpoint()
        except OSError:
            pass
        else:
            if self.store.counters.checkpoints > before:
                self._mark(deleted(log))
        self.create()

    def reopen(self) -> None:
        self.flush()
        self.store.close()
        self._come_back()

    def die(self) -> None:
        self._forget(self.staged)
        self.staged.clear()
        self.files.close()
        self._come_back()

    def _come_back(self) -> None:
        """Restart: unknown outcomes become known, and the writers continue from there."""
        self.store = self._open()
        adopt(self.store, self.given, self.known)
        try:
            content = read_store(self.store)
        except (CorruptData, Unavailable):  # a read error is allowed
            self.files.heal()
            content = read_store(self.store)
        judge(content, self.given, self.known)
        self.archive.append(
            (len(self.files.operations), {log: Given(known.options, list(known.records)) for log, known in self.given.items()})
        )
        ends = {log: bounds.end for log, (bounds, _) in content.items()}
        for log, end in ends.items():
            del self.given[log].records[end:]
        self._mark(_settled(ends))

    def given_at(self, cut: int) -> dict[int, Given]:
        """Return the facts at that point. A restart resolves unknown outcomes of earlier processes."""
        return next((given for until, given in self.archive if cut <= until), self.given)

    def _open(self) -> Store:
        try:
            return super()._open()
        except (OSError, CorruptData):
            self.files.heal()
            return super()._open()


def _settled(ends: dict[int, int]) -> Callable[[Facts], None]:
    def change(facts: Facts) -> None:
        facts.unsure.clear()
        facts.may.update(ends)

    return change


def endure(
    shape: Shape, steps: Sequence[str], fault: Fault, *, images_max: int = 12, seed: int = 1, fences: bool = True
) -> tuple[SimulatedFiles, int]:
    """Take the steps with a fault injected. Raise `Anomaly` unless all guarantees hold: for readers now, after a restart, and on the disks
    that a power cut may leave soon after the fault or at the end. Without `fences`, the fault must not stop writing. Returns the disk and
    the number of recovered images."""
    files = SimulatedFiles()
    files.inject(fault)
    rng = random.Random(seed)
    try:
        workload = Troubled(shape, rng, files)
        workload.take(steps)
        files.heal()
        if workload.store.failure is not None and not fences:
            raise Anomaly(f"writing has ended: {workload.store.failure}")
        judge(read_store(workload.store), workload.given, workload.known)
        images = _recover_some(workload, rng, images_max)
        workload.die()
    except (Anomaly, BrokerError, OSError) as failure:
        raise Anomaly(f"{fault}: {failure}") from failure
    return files, images


def _recover_some(workload: Troubled, rng: random.Random, images_max: int) -> int:
    operations, cuts, facts = workload.files.operations, PowerCuts(workload.files), Facts(strict=False)
    fired = workload.files.fired[0].after if workload.files.fired else len(operations)
    chosen: list[tuple[int, Facts, SimulatedFiles]] = []
    for cut in range(len(operations) + 1):
        if cut and operations[cut - 1].kind == "mark":
            cast(Event, operations[cut - 1].value)(facts)
        if fired < cut < fired + SOON or cut == len(operations):
            chosen += [(cut, facts.copy(), image) for _, image in cuts.images(cut, rng)]
    for cut, then, image in chosen if len(chosen) <= images_max else rng.sample(chosen, images_max):
        recover(image, workload.shape, workload.given_at(cut), then, now=workload.now)
    return min(len(chosen), images_max)
