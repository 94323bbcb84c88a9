"""Planted bugs: each classic mistake of a log, planted by a test, must be caught by the crash harness.

A harness that never complains proves nothing. Every plant is hunted where it should show, and the hunt must end with an anomaly;
the same hunts over the code as it is find none.
"""

from __future__ import annotations

import errno
from collections.abc import Callable

import pytest

from headrace.log.simulated import Fault
from tests.conftest import Proof
from tests.log.crash import plants
from tests.log.crash.damage import inspect, original, units
from tests.log.crash.history import Anomaly
from tests.log.crash.plants import Plant
from tests.log.crash.shapes import SHAPES
from tests.log.crash.survival import survive
from tests.log.crash.test_faults import SHAPE, STEPS
from tests.log.crash.test_mutations import EMPTY, hit
from tests.log.crash.trouble import endure

Hunt = Callable[[], None]


def power_cuts(name: str, *, seeds: int = 3) -> Hunt:
    def hunt() -> None:
        for seed in range(1, seeds + 1):
            survive(next(shape for shape in SHAPES if shape.name == name), seed)

    return hunt


def faults(kind: str, error: int, count: int) -> Hunt:
    def hunt() -> None:
        for nth in range(1, count):
            endure(SHAPE, STEPS, Fault(kind, nth, error=error))

    return hunt


def flips(kind: str) -> Hunt:
    def hunt() -> None:
        directory = original("plain", closed=True)
        for path in directory.paths(kind):
            content = directory.contents[path]
            for bit in range(0, 8 * len(content), 21):
                flipped = bytearray(content)
                flipped[bit // 8] ^= 1 << bit % 8
                risk = hit(units(path, content), bit // 8, bit // 8 + 1) if kind == "segment" else EMPTY
                inspect(directory.damaged(path, bytes(flipped)), directory, risk, silent=False, thorough=False)

    return hunt


BUGS: list[tuple[Plant, Hunt]] = [
    (plants.ack_before_sync, power_cuts("several logs")),
    (plants.checksums_not_compared, power_cuts("several logs")),
    (plants.checksums_not_compared, flips("segment")),
    (plants.journal_name_not_synced, power_cuts("journal rolls")),
    (plants.segment_name_not_synced, power_cuts("segment rolls")),
    (plants.torn_frame_kept, power_cuts("several logs")),
    (plants.frame_in_pieces, power_cuts("several logs")),
    (plants.old_frames_believed, power_cuts("journal recycling")),
    (plants.recovery_ends_early, power_cuts("several logs")),
    (plants.offset_given_again, power_cuts("several logs")),
    (plants.index_believed, flips("index")),
    (plants.compacted_segment_not_synced, power_cuts("compaction")),
    (plants.manifest_not_synced, power_cuts("deletion")),
    (plants.journal_freed_before_segments_are_synced, power_cuts("journal recycling")),
    (plants.page_cache_believed, faults("sync", errno.EIO, 60)),
    (plants.retention_takes_the_active_segment, power_cuts("retention by bytes")),
    (plants.retention_takes_too_much, power_cuts("retention by age")),
    (plants.compaction_keeps_the_oldest, power_cuts("compaction")),
    (plants.deleted_logs_forgotten, power_cuts("deletion")),
    (plants.sync_tried_again, faults("sync", errno.EIO, 20)),
    (plants.offsets_not_taken_back, faults("write_at", errno.ENOSPC, 20)),
    (plants.recovery_trusts_unsynced_names, faults("*", errno.EIO, 100)),
    (plants.nonces_begin_again, power_cuts("encrypted")),
    (plants.checkpoint_claims_the_tail, power_cuts("a busy keeper")),
]


@pytest.mark.parametrize(("plant", "hunt"), BUGS, ids=lambda value: getattr(value, "__name__", ""))
def test_a_planted_bug_is_caught(plant: Plant, hunt: Hunt, monkeypatch: pytest.MonkeyPatch, proof: Proof) -> None:
    original("plain", closed=True)  # made before anything is planted
    plant(monkeypatch)
    with pytest.raises(Anomaly):
        hunt()
    proof("planted bugs caught", 1)


@pytest.mark.parametrize("hunt", [power_cuts("several logs", seeds=1), flips("index"), flips("segment"), faults("sync", errno.EIO, 20)])
def test_the_hunts_find_nothing_where_nothing_is_planted(hunt: Hunt) -> None:
    hunt()
