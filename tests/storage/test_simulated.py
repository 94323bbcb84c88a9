"""The simulated disk is at least as strict as the real one: its rules are tested here, and against the real disk."""

from __future__ import annotations

import errno
import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.storage.files import DirectoryLocked, DiskFiles, File, Files, NotCached
from tests.storage_faults.power_cut import SECTOR_BYTES, PowerCuts, barest
from tests.storage_faults.simulated import Fault, SimulatedFiles


@pytest.fixture(params=["disk", "simulated"])
def files(request: pytest.FixtureRequest, tmp_path: Path) -> Files:
    return DiskFiles(tmp_path) if request.param == "disk" else SimulatedFiles()


def images(files: SimulatedFiles, upto: int | None = None) -> dict[str, dict[str, bytes]]:
    """Return label → contents of every image after the last operation, or after `upto` of them."""
    cut = len(files.operations) if upto is None else upto
    return {label: image.contents() for label, image in PowerCuts(files).images(cut, random.Random(1))}


def put(files: Files, path: str, data: bytes) -> File:
    file = files.open(path, create=True)
    file.write_at(0, [data])
    return file


def test_a_file_reads_back_what_was_written(files: Files) -> None:
    files.make_dir("logs/7")
    file = files.open("logs/7/a", create=True)
    file.write_at(0, [b"hello ", b"", b"world"])
    file.write_at(6, [b"there"])
    file.write_at(14, [b"!"])
    file.sync()
    assert file.read_at(0, 100) == b"hello there\0\0\0!"
    assert file.read_at(6, 5) == b"there"
    assert file.read_at(99, 5) == b""
    assert file.size() == 15
    file.truncate(5)
    assert file.read_at(0, 100) == b"hello"
    file.allocate(8)
    file.allocate(2)
    assert file.read_at(0, 100) == b"hello\0\0\0"
    file.close()
    assert files.open_readonly("logs/7/a").read_at(0, 3) == b"hel"


def test_names_behave_as_on_a_disk(files: Files) -> None:
    files.make_dir("logs/7")
    files.make_dir("logs/7")
    put(files, "logs/7/b", b"b").close()
    put(files, "logs/7/a", b"a").close()
    assert files.list("logs/7") == ["a", "b"]
    assert files.list("logs") == ["7"]
    assert files.list("absent") == []
    files.rename("logs/7/a", "logs/7/b")
    assert files.list("logs/7") == ["b"]
    assert files.open("logs/7/b").read_at(0, 9) == b"a"
    with pytest.raises(OSError, match="not empty"):
        files.remove_dir("logs/7")
    files.remove("logs/7/b")
    files.remove("logs/7/b")
    files.remove_dir("logs/7")
    files.remove_dir("logs/7")
    files.sync_dir("logs")
    assert files.list("logs") == []
    assert files.free_bytes() > 0


@pytest.mark.parametrize(
    "act",
    [
        lambda files: files.open("absent"),
        lambda files: files.open_readonly("absent"),
        lambda files: files.open("absent/a", create=True),
        lambda files: files.rename("absent", "b"),
        lambda files: files.sync_dir("absent"),
    ],
)
def test_an_absent_name_is_an_error(files: Files, act: Callable[[Files], object]) -> None:
    with pytest.raises(FileNotFoundError):
        act(files)


def test_a_name_is_created_once(files: Files) -> None:
    put(files, "a", b"")
    with pytest.raises(FileExistsError):
        files.open("a", create=True)


def test_a_readonly_or_closed_file_takes_no_write(files: Files) -> None:
    file = put(files, "a", b"x")
    with pytest.raises(OSError) as refused:
        files.open_readonly("a").write_at(0, [b"y"])
    assert refused.value.errno == errno.EBADF
    file.close()
    file.close()
    with pytest.raises(OSError) as refused:
        file.read_at(0, 1)
    assert refused.value.errno == errno.EBADF


def test_a_removed_file_stays_readable_while_it_is_open(files: Files) -> None:
    file = put(files, "a", b"still here")
    files.remove("a")
    assert file.read_at(0, 99) == b"still here"


def test_a_directory_is_locked_once() -> None:
    files = SimulatedFiles()
    files.lock()
    with pytest.raises(DirectoryLocked):
        files.lock()
    files.close()
    files.lock()


def test_a_cold_file_is_not_read_on_the_loop() -> None:
    files = SimulatedFiles({"a": b"x"})
    file = files.open("a")
    assert bytes(file.read_cached(0, 1)) == b"x"
    files.cold = True
    with pytest.raises(NotCached):
        file.read_cached(0, 1)
    assert file.read_at(0, 1) == b"x"


def test_an_image_is_not_changed_by_writing_to_another_one() -> None:
    files = SimulatedFiles({"a": b"xy"})
    [(_, one), *_] = PowerCuts(files).images(0, random.Random(1))
    [(_, two), *_] = PowerCuts(files).images(0, random.Random(1))
    one.open("a").write_at(0, [b"!"])
    assert (one.contents()["a"], two.contents()["a"], files.contents()["a"]) == (b"!y", b"xy", b"xy")


# Images after a power cut.


def test_synced_content_under_a_synced_name_is_in_every_image() -> None:
    files = SimulatedFiles()
    file = put(files, "a", b"kept")
    file.sync()
    files.sync_dir("")
    put(files, "b", b"other")
    file.write_at(4, [b" and more"])
    for image in images(files).values():
        assert image["a"][:4] == b"kept"


def test_an_unsynced_write_is_lost_kept_or_torn() -> None:
    files = SimulatedFiles({"a": b""})
    files.open("a").write_at(0, [b"x" * 1500])
    found = {image["a"] for image in images(files).values()}
    assert {b"", b"x" * 1500, b"x" * 512, b"x" * 1024, bytes(1500)} <= found
    assert bytes(512) + b"x" * 988 in found, "its end may land before its beginning"
    assert any(len(content) == 1500 and content.strip(b"x\0") for content in found), "garbage where the write was"


def test_writes_to_one_file_land_in_any_order() -> None:
    files = SimulatedFiles({"a": bytes(3)})
    file = files.open("a")
    for position, data in enumerate((b"1", b"2", b"3")):
        file.write_at(position, [data])
    found = {image["a"] for image in images(files).values()}
    assert {b"\0\0\0", b"1\0\0", b"12\0", b"123", b"\x0023", b"1\x003", b"\0\x003", b"\x002\0"} <= found


def test_writes_to_two_files_land_independently() -> None:
    files = SimulatedFiles({"a": b"", "b": b""})
    files.open("a").write_at(0, [b"1"])
    files.open("b").write_at(0, [b"1"])
    found = {(image["a"], image["b"]) for image in images(files).values()}
    assert {(b"", b""), (b"1", b""), (b"", b"1"), (b"1", b"1")} <= found


def test_a_sync_covers_its_own_file_only() -> None:
    files = SimulatedFiles({"a": b"", "b": b""})
    one, other = files.open("a"), files.open("b")
    one.write_at(0, [b"1"])
    other.write_at(0, [b"1"])
    one.sync()
    found = {(image["a"], image["b"]) for image in images(files).values()}
    assert {content for content, _ in found} == {b"1"}
    assert {b"", b"1"} <= {content for _, content in found}


def test_truncation_is_durable_only_after_a_sync() -> None:
    files = SimulatedFiles({"a": b"long"})
    file = files.open("a")
    file.truncate(1)
    assert {image["a"] for image in images(files).values()} == {b"long", b"l"}
    file.sync()
    assert {image["a"] for image in images(files).values()} == {b"l"}


def test_a_created_name_is_lost_until_its_directory_is_synced() -> None:
    files = SimulatedFiles()
    put(files, "a", b"x").sync()
    assert {tuple(image) for image in images(files).values()} == {(), ("a",)}
    files.sync_dir("")
    assert list(images(files).values()) == [{"a": b"x"}]


def test_a_name_may_outlive_the_content_it_was_made_for() -> None:
    files = SimulatedFiles()
    put(files, "a", b"x")
    files.sync_dir("")
    assert {b"", b"x"} <= {image["a"] for image in images(files).values()}


def test_a_rename_is_seen_before_or_after_never_half() -> None:
    files = SimulatedFiles({"new": b"2", "kept": b"1"})
    files.rename("new", "kept")
    assert sorted(map(sorted, (image.items() for image in images(files).values()))) == [[("kept", b"1"), ("new", b"2")], [("kept", b"2")]]


def test_a_rename_without_a_content_sync_may_leave_an_empty_file() -> None:
    files = SimulatedFiles({"kept": b"1"})
    put(files, "new", b"2")
    files.rename("new", "kept")
    files.sync_dir("")
    assert {b"", b"2"} <= {image["kept"] for image in images(files).values()}


def test_a_removed_name_may_come_back_with_what_was_written_since() -> None:
    files = SimulatedFiles({"5": b"old"})
    files.rename("5", "6")
    file = files.open("6")
    file.write_at(0, [b"new"])
    file.sync()
    assert list(images(files).values()) == [{"5": b"new"}, {"6": b"new"}]


def test_directory_entries_are_lost_one_by_one() -> None:
    files = SimulatedFiles()
    for name in "abc":
        put(files, name, b"")
    found = {"".join(image) for image in images(files).values()}
    assert found == {"", "a", "ab", "abc", "bc", "ac"}


def test_a_made_directory_is_durable_and_a_removed_one_takes_its_files() -> None:
    files = SimulatedFiles()
    files.make_dir("logs/7")
    put(files, "logs/7/a", b"").sync()
    files.sync_dir("logs/7")
    made = [operation.kind for operation in files.operations].index("sync_dir") + 1
    assert [image.directories() for _, image in PowerCuts(files).images(made, random.Random(1))] == [{"", "logs"}]
    files.remove("logs/7/a")
    files.remove_dir("logs/7")
    files.sync_dir("logs")
    assert list(images(files).values()) == [{}]


def test_no_image_comes_twice_unless_something_was_acknowledged_between() -> None:
    files = SimulatedFiles({"a": b""})
    file = files.open("a")
    file.write_at(0, [b"1"])
    file.sync()
    file.sync()
    files.mark("acknowledged")
    cuts = PowerCuts(files)
    found = [(cut, label) for cut in range(len(files.operations) + 1) for label, _ in cuts.images(cut, random.Random(1))]
    assert [cut for cut, _ in found].count(3) == 0
    assert [cut for cut, _ in found].count(4) == 1


def test_the_barest_image_holds_what_was_synced_and_no_more() -> None:
    files = SimulatedFiles({"a": b"1"})
    file = files.open("a")
    file.write_at(1, [b"2"])
    file.sync()
    file.write_at(2, [b"3"])
    put(files, "b", b"").sync()
    assert barest(files).contents() == {"a": b"12"}
    assert barest(files).rewound().contents() == {"a": b"12"}
    assert files.rewound().contents() == {"a": b"1"}


def test_another_process_sees_what_a_dead_one_wrote_and_a_power_cut_may_still_take_it() -> None:
    files = SimulatedFiles({"a": b"1", "gone": b""})
    files.make_dir("d")
    file = put(files, "d/new", b"x")
    file.write_at(1, [b"y"])
    file.truncate(1)
    file.allocate(3)
    files.rename("a", "b")
    files.remove("gone")
    files.sync_dir("")
    upto = len(files.operations)
    files.remove("b")
    after = files.killed(upto)
    assert after.contents() == {"b": b"1", "d/new": b"x\0\0"}
    assert after.operations == files.operations[:upto]
    put(after, "d/next", b"z").sync()
    assert images(after, upto) == images(files, upto)
    assert barest(after).contents() == {"b": b"1"}
    after.sync_dir("d")
    assert barest(after).contents() == {"b": b"1", "d/new": b"", "d/next": b"z"}


def test_a_failed_sync_is_not_mended_by_a_second_one() -> None:
    files = SimulatedFiles({"a": b""})
    file = files.open("a")
    files.inject(Fault("sync"))
    file.write_at(0, [b"1"])
    with pytest.raises(OSError):
        file.sync()
    file.write_at(1, [b"2"])
    file.sync()
    found = {image["a"] for image in images(files).values()}
    assert {b"\x002", b"12"} <= found
    assert all(content[1:] == b"2" for content in found)


def test_images_come_fast() -> None:
    files = SimulatedFiles({f"{number}": bytes(65536) for number in range(20)})
    file = files.open("3")
    for frame in range(100):
        file.write_at(frame * 512, [b"%d" % frame * 1500])
        file.sync()
    cuts, dice, count = PowerCuts(files), random.Random(1), 0
    start = time.process_time()
    for upto in range(len(files.operations) + 1):
        count += sum(1 for _ in cuts.images(upto, dice))
    assert count > 1500
    assert count / (time.process_time() - start) > 2000, "thousands of images a second, or the normal suite becomes slow"


# Faults.


def test_the_planned_call_fails_and_no_other() -> None:
    files = SimulatedFiles({"a": b"", "b": b""})
    files.inject(Fault("write_at", nth=2, path="a", error=errno.ENOSPC))
    one, other = files.open("a"), files.open("b")
    one.write_at(0, [b"1"])
    other.write_at(0, [b"1"])
    with pytest.raises(OSError) as failed:
        one.write_at(1, [b"2"])
    assert (failed.value.errno, failed.value.filename) == (errno.ENOSPC, "a")
    one.write_at(1, [b"3"])
    assert one.read_at(0, 9) == b"13"
    assert files.calls["write_at"] == 4
    assert [(fired.kind, fired.path, fired.after) for fired in files.fired] == [("write_at", "a", 2)]


def test_a_failing_read_is_an_os_error() -> None:
    files = SimulatedFiles({"a": b"x"})
    files.inject(Fault("read_at"))
    with pytest.raises(OSError):
        files.open("a").read_at(0, 1)


def test_a_lasting_fault_stays_until_it_is_healed() -> None:
    files = SimulatedFiles()
    files.inject(Fault("*", nth=2, persistent=True))
    files.open("a", create=True)
    for _ in range(3):
        with pytest.raises(OSError):
            files.open("b", create=True)
    files.heal()
    files.open("b", create=True)


def test_a_failing_write_may_have_landed_in_part() -> None:
    files = SimulatedFiles({"a": b""})
    files.inject(Fault("write_at", kept_bytes=2))
    file = files.open("a")
    with pytest.raises(OSError):
        file.write_at(0, [b"abc"])
    assert file.read_at(0, 9) == b"ab"


def test_many_files_are_synced_even_if_one_fails() -> None:
    files = SimulatedFiles({name: b"" for name in "abc"})
    opened: list[File] = [files.open(name) for name in "abc"]
    for file in opened:
        file.write_at(0, [b"x"])
    files.inject(Fault("sync", path="b"))
    with pytest.raises(OSError) as failed:
        files.sync_many(opened)
    assert failed.value.filename == "b"
    assert {(image["a"], image["c"]) for image in images(files).values()} == {(b"x", b"x")}


def test_a_lying_disk_raises_nothing() -> None:
    files = SimulatedFiles({"a": b"abc"})
    files.inject(Fault("read_at", kept_bytes=1, silent=True), Fault("write_at", kept_bytes=1, silent=True), Fault("sync", silent=True))
    file = files.open("a")
    assert file.read_at(0, 3) == b"a"
    file.write_at(0, [b"xyz"])
    assert file.read_at(0, 3) == b"xbc"
    file.sync()
    assert b"abc" in {image["a"] for image in images(files).values()}


def test_a_full_disk_refuses_growth_and_nothing_else() -> None:
    files = SimulatedFiles({"a": b"abc"})
    files.room_bytes = 2
    file = files.open("a")
    file.write_at(0, [b"xyz12"])
    assert files.free_bytes() == 0
    with pytest.raises(OSError) as full:
        file.write_at(3, [b"3456"])
    assert full.value.errno == errno.ENOSPC
    assert file.read_at(0, 9) == b"xyz34"
    with pytest.raises(OSError):
        file.allocate(6)
    file.truncate(1)
    assert files.free_bytes() == 4
    files.remove("a")
    assert files.free_bytes() == 5


def test_call_sites_are_counted_by_line() -> None:
    files = SimulatedFiles({"a": b""})
    files.trace_sites = True
    file = files.open("a")
    for _ in range(3):
        file.sync()
    files.open("b", create=True)
    assert {kind for kind, _ in files.sites} == {"open", "sync", "create"}
    assert sorted(files.sites.values()) == [1, 1, 3]
    assert all(site.startswith("test_simulated.py:") for _, site in files.sites)


def test_the_sector_is_the_unit_of_tearing() -> None:
    files = SimulatedFiles({"a": bytes(2048)})
    files.open("a").write_at(100, [b"x" * 1000])
    torn = {image["a"].rstrip(b"\0") for label, image in images(files).items() if "torn" in label and "end first" not in label}
    assert {len(content) for content in torn if len(content) % SECTOR_BYTES == 0} == {512, 1024}
