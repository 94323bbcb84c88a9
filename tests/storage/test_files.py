"""Files on disk: the directory lock, reserved descriptors, syncs without threads."""

from __future__ import annotations

import _thread
import errno
import fcntl
import os
import random
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from headrace.limits import LOG_DESCRIPTORS_RESERVED
from headrace.storage.files import DirectoryLocked, DiskFile, DiskFiles
from headrace.storage.health import HealthState
from headrace.storage.store import Store
from tests.storage.stores import SMALL, new_log, put, values


@contextmanager
def no_descriptors_left() -> Iterator[list[int]]:
    """Use up all descriptors of this process, as idle peers do."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(map(int, os.listdir("/proc/self/fd")))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 20, hard))
    peers: list[int] = []
    try:
        while True:
            try:
                peers.append(os.open(os.devnull, os.O_RDONLY))
            except OSError:
                break
        yield peers
    finally:
        for fd in peers:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_second_process_stays_out_after_the_lock_file_was_removed(tmp_path: Path) -> None:
    files = DiskFiles(tmp_path)
    files.lock()
    (tmp_path / "LOCK").unlink()
    program = "import sys; from headrace.storage.files import DiskFiles; DiskFiles(sys.argv[1]).lock()"
    second = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, timeout=120, check=False)
    assert second.returncode and "DirectoryLocked" in second.stderr
    files.close()
    DiskFiles(tmp_path).lock()


def test_the_refusal_names_the_process_that_holds_the_directory(tmp_path: Path) -> None:
    files = DiskFiles(tmp_path)
    files.lock()
    with pytest.raises(DirectoryLocked, match=f"process {os.getpid()}"):
        DiskFiles(tmp_path).lock()
    files.close()


def test_a_release_that_locks_only_the_file_is_respected(tmp_path: Path) -> None:
    with (tmp_path / "LOCK").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        files = DiskFiles(tmp_path)
        with pytest.raises(DirectoryLocked):
            files.lock()
    files.lock()
    files.close()


def test_the_file_is_locked_where_directories_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flock = fcntl.flock

    def files_only(fd: int, operation: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{fd}"):
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        flock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", files_only)
    files = DiskFiles(tmp_path)
    files.lock()
    with pytest.raises(DirectoryLocked):
        DiskFiles(tmp_path).lock()
    files.close()


def test_a_directory_that_is_given_back_leaves_no_descriptor_open(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    files = DiskFiles(tmp_path)
    files.lock()
    assert len(os.listdir("/proc/self/fd")) == before + LOG_DESCRIPTORS_RESERVED + 2
    files.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_the_log_opens_files_when_peers_have_used_up_the_descriptors(tmp_path: Path) -> None:
    files = DiskFiles(tmp_path)
    files.lock()
    with no_descriptors_left():
        opened = [files.open(f"{number}", create=True) for number in range(LOG_DESCRIPTORS_RESERVED)]
        assert not files.reserve()
        with pytest.raises(OSError, match="Too many open files"):
            files.open("one more", create=True)
        opened.pop().close()
        files.sync_dir("")
        assert "0" in files.list("")
        for file in opened:
            file.close()
    assert files.reserve()
    files.close()


def test_a_store_survives_peers_that_use_up_the_descriptors(tmp_path: Path) -> None:
    store = Store.open(DiskFiles(tmp_path), SMALL, threads=False)
    logs = [new_log(store) for _ in range(3 * LOG_DESCRIPTORS_RESERVED)]
    with no_descriptors_left():
        for turn in range(3):
            for log in logs:
                put(store, log, b"%d" % turn * 2000)
            store.maintenance.attempt()
            store.checkpoint()
            store.maintain(0)
        assert store.failure is None
        assert [values(store, log)[0] for log in logs[:5]] == [b"0" * 2000] * 5
    for _ in range(10):
        store.maintenance.attempt()
    assert store.health.report().state is HealthState.OK
    put(store, logs[0], b"after")
    store.close()
    again = Store.open(DiskFiles(tmp_path), SMALL, threads=False)
    assert all(values(again, log)[:3] == [b"%d" % turn * 2000 for turn in range(3)] for log in logs)
    assert again.report.frames == 0, "the last checkpoint reached everything"
    again.close()


def _refuse(work: Callable[[], None], arguments: tuple[()]) -> int:
    raise RuntimeError("can't start new thread")


def _lose(work: Callable[[], None], arguments: tuple[()]) -> int:
    """Start a thread that has no memory to begin."""
    return 0


@pytest.mark.parametrize("start", [_refuse, _lose])
def test_many_files_are_synced_when_no_thread_can_be_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: Callable[[Callable[[], None], tuple[()]], int]
) -> None:
    synced: list[DiskFile] = []
    monkeypatch.setattr(_thread, "start_new_thread", start)
    monkeypatch.setattr(DiskFile, "sync", lambda file: synced.append(file))
    files = DiskFiles(tmp_path)
    opened = [files.open(f"{number}", create=True) for number in range(20)]
    files.sync_many(opened)
    assert set(synced) == set(opened)


def test_all_files_are_synced_before_a_failure_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = DiskFiles(tmp_path)
    for count in (2, 20):
        opened = [files.open(f"{count}-{number}", create=True) for number in range(count)]
        synced: list[DiskFile] = []

        def sync(file: DiskFile, first: DiskFile = opened[0], synced: list[DiskFile] = synced) -> None:
            synced.append(file)
            if file is first:
                raise OSError(errno.EIO, "broken")

        monkeypatch.setattr(DiskFile, "sync", sync)
        with pytest.raises(OSError, match="broken"):
            files.sync_many(opened)
        assert set(synced) == set(opened)


def test_a_directory_whose_name_could_not_be_synced_is_not_taken_for_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files, fsync, failing = DiskFiles(tmp_path), os.fsync, [True]

    def sync(fd: int) -> None:
        if failing:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        synced.append(os.readlink(f"/proc/self/fd/{fd}"))
        fsync(fd)

    synced: list[str] = []
    monkeypatch.setattr(os, "fsync", sync)
    with pytest.raises(OSError, match="No space left"):
        files.make_dir("logs")
    failing.clear()
    files.make_dir("logs")
    assert synced == [str(tmp_path)]


def test_directories_made_together_share_the_sync_of_their_parent_and_a_failure_leaves_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, fsync, failing = DiskFiles(tmp_path), os.fsync, [True]
    synced: list[str] = []

    def sync(fd: int) -> None:
        path = os.readlink(f"/proc/self/fd/{fd}")
        if failing and path.endswith("logs"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        synced.append(path)
        fsync(fd)

    monkeypatch.setattr(os, "fsync", sync)
    with pytest.raises(OSError, match="Input/output"):
        files.make_dir("logs/1", "logs/2", "logs/3")
    assert files.list("logs") == []
    failing.clear()
    synced.clear()
    files.make_dir("logs/1", "logs/2", "logs/3")
    assert synced == [str(tmp_path / "logs")]
    assert files.list("logs") == ["1", "2", "3"]


def _reserved(files: DiskFiles, size_bytes: int) -> DiskFile:
    file = files.open("reserved", create=True)
    file.allocate(size_bytes)
    return file


def test_a_sync_seldom_waits_for_the_first_write_to_a_block_of_a_reserved_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = _reserved(DiskFiles(tmp_path), 1 << 20)
    written: list[tuple[int, int]] = []
    pwrite = os.pwrite

    def noted(fd: int, data: bytes, position: int) -> int:
        written.append((position, position + len(data)))
        return pwrite(fd, data, position)

    monkeypatch.setattr(os, "pwrite", noted)
    fresh = 0
    for number in range(256):
        before = max((end for _, end in written), default=0)
        file.write_at(4096 * number, [b"x" * 200])
        fresh += 4096 * number + 200 > before
    assert fresh < 4, "almost every write is to blocks that were written before"
    assert max(end for _, end in written) <= 1 << 20
    file.close()


@pytest.mark.parametrize("reserved_bytes", [1 << 20, (1 << 20) + 4096, 300_000])
def test_writes_to_a_reserved_file_leave_zeros_and_never_each_other(tmp_path: Path, reserved_bytes: int) -> None:
    file = _reserved(DiskFiles(tmp_path), reserved_bytes)
    expected, dice, position = bytearray(reserved_bytes), random.Random(reserved_bytes), 0
    while position < reserved_bytes:
        buffers = [dice.randbytes(dice.choice([1, 200, 4096, 70_000])) for _ in range(dice.choice([1, 1, 2]))]
        whole = b"".join(buffers)[: reserved_bytes - position]
        for _ in range(dice.choice([1, 2])):  # a write that failed is repeated at the same place
            file.write_at(position, [whole] if len(buffers) == 1 else [whole[:1], whole[1:]])
        expected[position : position + len(whole)] = whole
        assert file.read_at(0, reserved_bytes) == expected
        position += len(whole) + dice.choice([0, 3000])
    assert file.size() == reserved_bytes
    file.close()


def test_a_file_that_is_used_again_keeps_what_is_behind_a_write(tmp_path: Path) -> None:
    files = DiskFiles(tmp_path)
    first = _reserved(files, 1 << 20)
    first.write_at(8192, [b"old"])
    first.close()
    again = files.open("reserved")
    again.write_at(0, [b"new"])
    assert (again.read_at(0, 3), again.read_at(8192, 3)) == (b"new", b"old")
    again.close()


def test_a_write_succeeds_if_the_zeros_behind_it_find_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = _reserved(DiskFiles(tmp_path), 1 << 20)
    pwrite = os.pwrite

    def full(fd: int, data: bytes, position: int) -> int:
        if position:
            raise OSError(errno.ENOSPC, "no room")
        return pwrite(fd, data, position)

    monkeypatch.setattr(os, "pwrite", full)
    file.write_at(0, [b"x"])
    assert file.read_at(0, 2) == b"x\0"
    file.close()
