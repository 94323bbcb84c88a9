"""Recovery, step by step, and the result of the checker for the same directory."""

from __future__ import annotations

import pytest

from headrace.errors import CorruptData
from headrace.storage.batch import HEADER_BYTES as BATCH_HEADER_BYTES
from headrace.storage.batch import StoredBatch
from headrace.storage.check import check, dump
from headrace.storage.partition import LogOptions
from headrace.storage.segment import HEADER_BYTES, segment_path
from headrace.storage.store import Store
from tests.storage.stores import crashed, new_log, opened, put, values
from tests.storage_faults.simulated import SimulatedFiles


def damaged(files: SimulatedFiles, path: str, position: int, content: bytes = b"\xde\xad\xbe\xef") -> SimulatedFiles:
    copy = crashed(files)
    copy.open(path).write_at(position, [content])
    return copy


def kept_and_pending(files: SimulatedFiles, **options: int) -> tuple[Store, int]:
    """Ten records in a checkpointed segment, ten only in the journal."""
    store = opened(files)
    log = new_log(store, **options)
    for number in range(20):
        put(store, log, b"value %d" % number)
        if number == 9:
            store.checkpoint()
    return store, log


EXPECTED = [b"value %d" % number for number in range(20)]


def test_a_crash_loses_nothing_and_a_second_recovery_changes_nothing() -> None:
    files = SimulatedFiles()
    _, log = kept_and_pending(files)
    once = crashed(files)
    store = opened(once)
    assert values(store, log) == EXPECTED
    twice = crashed(once)
    assert values(opened(twice), log) == EXPECTED
    assert check(crashed(once)).clean


def test_a_damaged_manifest_is_reported_and_everything_is_read_instead() -> None:
    files = SimulatedFiles()
    _, log = kept_and_pending(files)
    broken = damaged(files, "MANIFEST", 20)
    assert not check(crashed(broken)).clean
    store = opened(broken)
    assert values(store, log) == EXPECTED
    assert [damage.path for damage in store.report.damages] == ["MANIFEST"]


def test_a_damaged_identity_is_reported_and_written_again() -> None:
    files = SimulatedFiles()
    _, log = kept_and_pending(files)
    broken = damaged(files, "IDENTITY", 3)
    store = opened(broken)
    assert values(store, log) == EXPECTED
    assert check(crashed(broken)).clean


def test_another_format_is_refused() -> None:
    from google_crc32c import value as crc32c

    text = b"headrace data directory\nformat 3\nkey none\n"
    files = SimulatedFiles({"IDENTITY": text + b"crc %08x\n" % crc32c(text)})
    with pytest.raises(CorruptData, match="format 3"):
        opened(files)


def test_damage_in_a_segment_costs_one_batch_and_is_named() -> None:
    files = SimulatedFiles()
    _, log = kept_and_pending(files, joined_bytes_max=0)
    path = segment_path(log, 0)
    size = len(files.contents()[path])
    step = (size - HEADER_BYTES) // 10
    broken = damaged(files, path, HEADER_BYTES + 3 * step + 80)
    report = check(crashed(broken))
    assert any(path in problem for problem in report.problems)
    store = opened(broken)
    assert values(store, log) == EXPECTED[:3] + EXPECTED[4:]
    assert [(damage.path, damage.position) for damage in store.report.damages] == [(path, HEADER_BYTES + 3 * step)]


def test_a_damaged_segment_header_costs_nothing() -> None:
    files = SimulatedFiles()
    _, log = kept_and_pending(files)
    store = opened(damaged(files, segment_path(log, 0), 5))
    assert values(store, log) == EXPECTED
    assert len(store.report.damages) == 1


def test_damage_at_the_end_of_a_checkpointed_segment_never_gives_an_offset_twice() -> None:
    files = SimulatedFiles()
    store = opened(files)
    log = new_log(store, joined_bytes_max=0)
    for number in range(10):
        put(store, log, b"value %d" % number)
    store.close()
    path = segment_path(log, 0)
    again = opened(damaged(files, path, len(files.contents()[path]) - 20))
    assert put(again, log, b"next").base_offset == 10
    assert values(again, log) == [*EXPECTED[:9], b"next"]


def test_what_the_segment_has_beyond_a_torn_journal_is_kept() -> None:
    files = SimulatedFiles()
    store = opened(files)
    log = new_log(store)
    for number in range(10):
        put(store, log, b"value %d" % number)
    store.partitions[log].spill()  # the tail is in the segment, but no checkpoint was taken
    broken = damaged(files, "journal/0000000001.hrj", 9 * 4096 + 50)
    assert values(opened(broken), log) == EXPECTED[:10]


def test_a_torn_segment_end_is_filled_from_the_journal() -> None:
    files = SimulatedFiles()
    store = opened(files)
    log = new_log(store, joined_bytes_max=0)
    for number in range(10):
        put(store, log, b"value %d" % number)
    store.partitions[log].spill()
    path = segment_path(log, 0)
    step = (len(files.contents()[path]) - HEADER_BYTES) // 10
    again = opened(damaged(files, path, HEADER_BYTES + 4 * step + 80))
    assert values(again, log) == EXPECTED[:10]
    assert again.report.damages == []
    again.checkpoint()
    assert values(again, log) == EXPECTED[:10]


def test_a_wrong_index_is_rebuilt() -> None:
    files = SimulatedFiles()
    store = opened(files)
    log = new_log(store, segment_bytes=100_000)
    for number in range(400):
        put(store, log, b"%04d" % number * 200)
    store.close()
    paths = [path for path in files.contents() if path.endswith(".idx")]
    assert len(paths) > 1
    for path in paths:
        for content in (b"", files.contents()[path][:-3], b"\0" * 500):
            copy = crashed(files)
            copy.remove(path)
            copy.open(path, create=True).write_at(0, [content])
            assert values(opened(copy), log) == [b"%04d" % number * 200 for number in range(400)]


def test_a_gap_after_unsynced_frames_is_reported_and_its_offsets_are_not_given_again() -> None:
    files = SimulatedFiles()
    store = opened(files)
    log = new_log(store)
    for number in range(3):
        put(store, log, b"value %d" % number)
    again = opened(damaged(files, "journal/0000000001.hrj", 4096 + 50))
    assert values(again, log) == [b"value 0", b"value 2"]
    assert any("offsets 1 to 1" in str(damage) for damage in again.report.damages)
    assert put(again, log, b"next").base_offset == 3


def test_a_log_of_which_the_manifest_says_nothing_is_no_deleted_one() -> None:
    files = SimulatedFiles()
    store = opened(files)
    early, late = new_log(store), new_log(store)
    put(store, late, b"late")
    again = crashed(files)
    store = opened(again)  # only the later log is known, from its record in the journal
    store.checkpoint()
    store.open_log(early, LogOptions())
    put(store, early, b"early")
    recovered = opened(crashed(again))
    assert values(recovered, early) == [b"early"]
    assert values(recovered, late) == [b"late"]


def test_a_deleted_log_stays_deleted_as_long_as_a_journal_file_could_bring_it_back() -> None:
    files = SimulatedFiles()
    store = opened(files)
    kept, gone = new_log(store), new_log(store)
    put(store, gone, b"gone")
    put(store, kept, b"kept")
    store.delete_logs([gone])
    for _ in range(3):
        put(store, kept, b"kept")
        store.checkpoint()
        assert gone not in opened(crashed(files)).partitions
        assert check(crashed(files)).clean


def test_dump_shows_batches_and_records_for_people() -> None:
    files = SimulatedFiles()
    store, log = kept_and_pending(files)
    lines = list(dump(files, segment_path(log, 0), records=True))
    assert lines[0].startswith(f"segment of log {log} from offset 0")
    assert any("value='value 3'" in line for line in lines)
    assert any(line.startswith("frame 12") for line in dump(files, "journal/0000000001.hrj"))
    with pytest.raises(CorruptData, match="neither a segment"):
        list(dump(files, "IDENTITY"))
    store.close()


@pytest.mark.parametrize("place", ["closed", "active"])
def test_a_flipped_bit_in_a_header_hides_no_other_batch(place: str) -> None:
    """For each flipped bit in offsets or size of a batch, the adjacent batches are read and the damage is reported."""
    files = SimulatedFiles()
    store = opened(files)
    log = new_log(store, segment_bytes=500, joined_bytes_max=0)
    for number in range(9):
        put(store, log, b"value %d" % number)
    store.close()
    base = store.partitions[log].segments[0 if place == "closed" else -1].base_offset
    path = segment_path(log, base)
    first = StoredBatch.parse(files.contents()[path], HEADER_BYTES)
    start = HEADER_BYTES + first.header.size
    kept = [value for number, value in enumerate([b"value %d" % number for number in range(9)]) if number != base + 1]
    for bit in range(8 * BATCH_HEADER_BYTES):
        flipped = files.contents()[path][start + bit // 8] ^ 1 << bit % 8
        found = opened(damaged(files, path, start + bit // 8, bytes((flipped,))))
        assert values(found, log) == kept, f"bit {bit}"
        assert [damage.path for damage in found.report.damages] == [path], f"bit {bit}"
