"""Journal: frames are complete or ignored, stale frames are ignored, damage does not hide later frames."""

from __future__ import annotations

import errno

import pytest

from headrace.records import RecordBatch
from headrace.storage.batch import Built
from headrace.storage.encoding import build
from headrace.storage.journal import ALIGN, Damage, Journal, JournalStart, SyncFailed, journal_number, journal_path, read_journal
from tests.storage_faults.simulated import Fault, SimulatedFiles

FILE_BYTES = 8 * ALIGN


def journal(files: SimulatedFiles, number: int = 1, frame: int = 0, spares: list[int] | None = None) -> Journal:
    opened = Journal(files, FILE_BYTES, JournalStart(number, frame, spares or []))
    opened.start()
    return opened


def batch(number: int, size: int = 10) -> Built:
    return build(3, number, RecordBatch([b"x" * size]), now=number)


def offsets(files: SimulatedFiles, number: int = 1, damages: list[Damage] | None = None) -> list[int]:
    found = read_journal(files, number, None, (damages if damages is not None else []).append)
    return [batch.header.base_offset for frame in found for batch in frame.batches]


def overwrite(files: SimulatedFiles, path: str, position: int, content: bytes) -> None:
    files.open(path).write_at(position, [content])


def test_frames_are_read_in_order_and_start_on_their_boundary() -> None:
    files = SimulatedFiles()
    log = journal(files)
    log.append([batch(0), batch(1)])
    log.append([batch(2, ALIGN)])
    log.append([batch(3)])
    frames = list(read_journal(files, 1, None, lambda damage: None))
    assert [frame.position for frame in frames] == [0, ALIGN, 3 * ALIGN]
    assert [frame.number for frame in frames] == [0, 1, 2]
    assert offsets(files) == [0, 1, 2, 3]


def test_a_full_file_is_synced_before_the_next_one_is_begun() -> None:
    files = SimulatedFiles()
    log = journal(files)
    for number in range(9):
        log.append([batch(number)])
    assert log.current == 2
    assert (offsets(files, 1), offsets(files, 2)) == (list(range(8)), [8])
    kinds = [(operation.kind, operation.path) for operation in files.operations]
    assert kinds.index(("sync", journal_path(1))) < kinds.index(("create", journal_path(2)))


def test_a_frame_larger_than_a_file_gets_a_file_of_its_own() -> None:
    files = SimulatedFiles()
    log = journal(files)
    log.append([batch(0)])
    log.append([batch(1, 3 * FILE_BYTES)])
    log.append([batch(2)])
    assert [offsets(files, number) for number in (1, 2, 3)] == [[0], [1], [2]]


def test_frames_of_an_earlier_life_end_a_file_that_is_used_again() -> None:
    files = SimulatedFiles()
    log = journal(files)
    for number in range(8):
        log.append([batch(number)])
    log.close()
    again = journal(files, 2, 8, spares=[1])
    again.append([batch(100)])
    assert files.list("journal") == ["0000000002.hrj"]
    assert offsets(files, 2) == [100]


def test_a_torn_end_is_the_end_and_no_damage() -> None:
    files, damages = SimulatedFiles(), list[Damage]()
    log = journal(files)
    log.append([batch(0)])
    log.append([batch(1)])
    overwrite(files, journal_path(1), ALIGN + 60, b"torn")
    assert offsets(files, 1, damages) == [0]
    assert damages == []


def test_damage_before_an_intact_frame_is_reported_and_stepped_over() -> None:
    files, damages = SimulatedFiles(), list[Damage]()
    log = journal(files)
    for number in range(3):
        log.append([batch(number)])
    overwrite(files, journal_path(1), ALIGN + 60, b"flip")
    assert offsets(files, 1, damages) == [0, 2]
    assert [(damage.path, damage.position) for damage in damages] == [("journal/0000000001.hrj", ALIGN)]


def test_a_payload_that_looks_like_a_frame_is_not_taken_for_one() -> None:
    files = SimulatedFiles()
    log = journal(files)
    log.append([batch(0)])
    inner = files.open(journal_path(1)).read_at(0, ALIGN)
    log.append([build(3, 1, RecordBatch([inner * 3]), now=0)])
    overwrite(files, journal_path(1), ALIGN + 8, b"\xff\xff\xff\x7f")
    assert offsets(files) == [0]


def test_recycling_keeps_a_few_files_and_removes_the_rest() -> None:
    files = SimulatedFiles()
    log = journal(files)
    for number in range(8 * 5 + 1):
        log.append([batch(number)])
    log.recycle(log.current, keep=2)
    assert len(files.list("journal")) == 3
    before = log.current
    for number in range(8):
        log.append([batch(number)])
    assert log.current == before + 1
    assert len(files.list("journal")) == 3


def test_a_failed_sync_is_told_apart_from_a_failed_write() -> None:
    files = SimulatedFiles()
    log = journal(files)
    log.append([batch(0)])
    files.inject(Fault("sync", error=errno.EIO))
    with pytest.raises(SyncFailed):
        log.sync()


@pytest.mark.parametrize(("name", "number"), [("0000000007.hrj", 7), ("7.hrj", None), ("0000000007.tmp", None), ("LOCK", None)])
def test_only_journal_names_are_journal_files(name: str, number: int | None) -> None:
    assert journal_number(name) == number
