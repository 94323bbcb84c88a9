"""Writes that bypass the page cache leave the same bytes as any other write, whatever the kernel supports."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from headrace.limits import KIB, MIB
from headrace.storage import direct
from headrace.storage.direct import BLOCK_BYTES, DIRECT_BYTES_MIN
from headrace.storage.files import DiskFile, DiskFiles

if TYPE_CHECKING:
    from _typeshed import SizedBuffer

SIZES = [BLOCK_BYTES, 100, 0, 3 * MIB + 5, 64 * KIB, 1]
BEFORE = b"before"


def parts(sizes: Sequence[int]) -> list[bytes]:
    return [random.Random(size).randbytes(size) for size in sizes]


@pytest.fixture
def file(tmp_path: Path) -> DiskFile:
    return DiskFiles(tmp_path).open("file", create=True)


def content(tmp_path: Path) -> bytes:
    return (tmp_path / "file").read_bytes()


def opened_directly(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Note the files that are opened. The kernel takes any write to them, as on a file system without direct writes."""
    opened: list[str] = []
    real = os.open

    def open_(path: str, flags: int, *mode: int) -> int:
        if flags & os.O_DIRECT:
            opened.append(path)
        return real(path, flags & ~os.O_DIRECT, *mode)

    monkeypatch.setattr(os, "open", open_)
    return opened


@pytest.mark.parametrize("position", [0, 6, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1])
@pytest.mark.parametrize("more", [0, 1, BLOCK_BYTES - 1, BLOCK_BYTES])
def test_a_direct_write_leaves_the_same_bytes_at_any_position(tmp_path: Path, file: DiskFile, position: int, more: int) -> None:
    file.write_at(0, [bytes(position)])
    buffers = parts([*SIZES, more])
    if not file.write_direct(position, buffers):
        file.write_at(position, buffers)  # the directory of the tests may be on a file system without direct writes
    file.sync()
    assert content(tmp_path) == bytes(position) + b"".join(buffers)


def test_writes_after_a_direct_one_continue_its_last_block(tmp_path: Path, file: DiskFile) -> None:
    expected = b""
    for number in range(4):
        buffers = parts([2 * MIB + number, 77])
        if number % 2 or not file.write_direct(len(expected), buffers):
            file.write_at(len(expected), buffers)
        expected += b"".join(buffers)
        assert file.read_at(0, len(expected)) == expected
    assert content(tmp_path) == expected


def test_whole_blocks_are_written_past_the_cache_and_the_rest_through_it(
    tmp_path: Path, file: DiskFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, placed = opened_directly(monkeypatch), list[tuple[int, int]]()
    real = os.pwritev

    def noted(fd: int, buffers: Sequence[SizedBuffer], position: int) -> int:
        placed.append((position, sum(map(len, buffers))))
        return real(fd, buffers, position)

    monkeypatch.setattr(os, "pwritev", noted)
    size_bytes = 5 * MIB
    assert file.write_direct(10, parts([size_bytes]))
    assert len(opened) == 1
    (head, *middle, rest) = placed
    assert head == (10, BLOCK_BYTES - 10)
    assert rest == (size_bytes, 10)
    assert all(position % BLOCK_BYTES == size % BLOCK_BYTES == 0 for position, size in middle)
    assert sum(size for _, size in placed) == size_bytes


def test_few_bytes_are_left_to_the_page_cache(tmp_path: Path, file: DiskFile) -> None:
    assert not file.write_direct(1, parts([DIRECT_BYTES_MIN]))
    assert content(tmp_path) == b""


def test_nothing_is_written_directly_if_that_is_switched_off(tmp_path: Path) -> None:
    assert not DiskFiles(tmp_path, direct_writes=False).open("file", create=True).write_direct(0, parts(SIZES))
    assert content(tmp_path) == b""


@pytest.mark.parametrize("error", [errno.EINVAL, errno.EMFILE, errno.ENOENT])
def test_nothing_is_written_where_a_file_cannot_be_opened_for_direct_writes(
    tmp_path: Path, file: DiskFile, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    def refuse(path: str, flags: int) -> int:
        raise OSError(error, os.strerror(error), path)

    monkeypatch.setattr(os, "open", refuse)
    assert not file.write_direct(0, parts(SIZES))
    monkeypatch.undo()
    assert content(tmp_path) == b""


@pytest.mark.parametrize("taken", [None, 0, BLOCK_BYTES, MIB + 5])
def test_bytes_that_the_kernel_refuses_or_leaves_are_written_through_the_cache(
    tmp_path: Path, file: DiskFile, monkeypatch: pytest.MonkeyPatch, taken: int | None
) -> None:
    opened_directly(monkeypatch)
    real = os.pwritev

    def short(fd: int, buffers: Sequence[SizedBuffer], position: int) -> int:
        if fd == file_fd:
            return real(fd, buffers, position)
        if taken is None:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(fd, [memoryview(buffers[0])[:taken]], position) if taken else 0

    file_fd = file._fd
    monkeypatch.setattr(os, "pwritev", short)
    buffers = parts(SIZES)
    assert file.write_direct(3, buffers)
    assert content(tmp_path)[3:] == b"".join(buffers)


def test_a_failed_direct_write_raises_its_error_and_leaves_no_descriptor(
    tmp_path: Path, file: DiskFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened_directly(monkeypatch)

    def fail(fd: int, buffers: Sequence[SizedBuffer], position: int) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(os, "pwritev", fail)
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        file.write_direct(0, parts(SIZES))
    assert len(os.listdir("/proc/self/fd")) == before


def test_the_bytes_of_several_buffers_are_taken_in_order() -> None:
    source = direct.Source([b"abc", b"", b"defg"])
    assert [bytes(view) for view in source.take(4)] == [b"abc", b"d"]
    target = bytearray(2)
    source.copy(memoryview(target))
    assert target == b"ef"
    assert [bytes(view) for view in source.take(9)] == [b"g"]


@pytest.mark.parametrize("has_huge_pages", [True, False])
def test_the_memory_of_direct_writes_is_aligned_to_huge_pages(monkeypatch: pytest.MonkeyPatch, has_huge_pages: bool) -> None:
    class Mapped(mmap.mmap):
        def madvise(self, *arguments: int) -> None:
            if not has_huge_pages:
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            super().madvise(*arguments)

    monkeypatch.setattr(mmap, "mmap", Mapped)
    memory = direct._huge_pages(3 * MIB)
    assert len(memory) == 3 * MIB
    assert ctypes.addressof(ctypes.c_char.from_buffer(memory)) % (2 * MIB) == 0
    memory[-1] = 1
