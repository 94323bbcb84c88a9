"""Joining of small batches: fewer batches hold the same records, in segments, after a crash, compressed and encrypted."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from headrace.limits import BATCH_JOINED_BYTES_MAX
from headrace.records import NEVER, AnyBatch, ColumnBatch, Headers, Record, RecordBatch
from headrace.storage.batch import COMPRESSED, ENCRYPTED, Built, StoredBatch
from headrace.storage.check import check
from headrace.storage.crypt import Keyring
from headrace.storage.encoding import build
from headrace.storage.joining import join
from headrace.storage.segment import HEADER_BYTES
from headrace.storage.store import Store, StoreOptions
from tests.storage.crash.workload import KEY
from tests.storage.stores import crashed, new_log, opened, put, records, values
from tests.storage_faults.simulated import SimulatedFiles


def keyring() -> Keyring:
    ring = Keyring(KEY)
    ring.start_epoch(1)
    return ring


def some_batch(rng: random.Random, now: int) -> AnyBatch:
    count = rng.choice((1, 1, 1, 2, 9))

    def some(*choices: bytes | None) -> list[bytes | None]:
        return [rng.choice(choices) for _ in range(count)]

    headers: list[Headers] | None = [(("name", b"x"),) * rng.randrange(3) for _ in range(count)] if rng.random() < 0.3 else None
    batch = RecordBatch(
        some(b"value", b"", None) if rng.random() < 0.3 else some(b"value", b"another", b""),
        some(b"key", b"", None) if rng.random() < 0.3 else some(b"key") if rng.random() < 0.5 else None,
        headers,
        [now + rng.randrange(50) for _ in range(count)] if rng.random() < 0.3 else None,
        [rng.choice((NEVER, now + 5)) for _ in range(count)] if rng.random() < 0.3 else None,
    )
    return ColumnBatch.of(batch) if rng.random() < 0.3 else batch


def built(batches: list[AnyBatch], ring: Keyring | None = None, *, compress: bool = False) -> list[Built]:
    found, offset = list[Built](), 100
    for number, batch in enumerate(batches):
        found.append(build(7, offset, batch, now=1_000 + number, compress=compress, keyring=ring))
        offset += len(batch)
    return found


def contents(batches: list[Built], ring: Keyring | None = None) -> list[Record]:
    """The records as a reader finds them: encoded, verified, decoded."""
    return [record for header, parts in batches for record in StoredBatch.parse(b"".join(parts), keyring=ring).records()]


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("form", ["plain", "compressed", "encrypted"])
def test_a_joined_batch_holds_the_same_records(form: str, seed: int) -> None:
    rng = random.Random(seed)
    ring = keyring() if form == "encrypted" else None
    batches = built([some_batch(rng, 1_000) for _ in range(rng.randrange(2, 30))], ring, compress=form == "compressed")
    joined = join(batches, 1 << 20, compress=form == "compressed", keyring=ring)
    assert len(joined) == 1
    assert contents(joined, ring) == contents(batches, ring)
    assert joined[0][0].flags & ENCRYPTED == (ENCRYPTED if ring else 0)


@pytest.mark.parametrize("values_only", [True, False])
def test_records_of_one_time_need_no_column_of_times(values_only: bool) -> None:
    one = RecordBatch([b"value"], None if values_only else [b"key"])
    batches = [build(7, offset, one, now=5) for offset in range(10)]
    (joined,) = join(batches, 1 << 20, compress=False, keyring=None)
    bulk = build(7, 0, RecordBatch([b"value"] * 10, None if values_only else [b"key"] * 10), now=5)
    assert b"".join(joined[1]) == b"".join(bulk[1])


def test_batches_are_joined_up_to_a_size_and_large_ones_stay_as_they_are() -> None:
    sizes = [100] * 50 + [5_000] + [100] * 3
    batches = built([RecordBatch([bytes(size)]) for size in sizes])
    joined = join(batches, 2_400, compress=False, keyring=None)
    assert contents(joined) == contents(batches)
    assert all(header.raw_size <= 2_400 for header, _ in joined if header.count > 1)
    assert [header.count for header, _ in joined] == [21, 21, 8, 1, 3]
    # A compiled function returns another tuple of the same objects.
    assert all(kept is given for kept, given in zip(joined[3], batches[50], strict=True))


@pytest.mark.parametrize("bytes_max", [0, 100, 127, 128, 200, 255, 256, 1 << 20])
@pytest.mark.parametrize("count", [2, 16])
@pytest.mark.parametrize("gap_at", [0, 1])
def test_batches_of_one_kind_are_joined_as_far_as_each_may_be(bytes_max: int, count: int, gap_at: int) -> None:
    batches = [build(7, offset + (gap_at and offset >= gap_at), RecordBatch([bytes(8)]), now=0) for offset in range(count)]
    joined = [header.count for header, _ in join(batches, bytes_max, compress=False, keyring=None)]
    room = min(bytes_max // 16, count) if bytes_max >= 8 * 16 else 1
    tail = count - gap_at
    full, rest = divmod(tail, min(room, tail))
    assert joined == [1] * gap_at + [min(room, tail)] * full + [rest] * bool(rest)


def test_without_a_size_nothing_is_joined() -> None:
    batches = built([RecordBatch([b"x"])] * 10)
    assert join(batches, 0, compress=False, keyring=None) == batches


def test_neither_gaps_nor_encryption_are_bridged() -> None:
    ring, one = keyring(), RecordBatch([b"x"])
    batches = [build(7, offset, one, now=0, keyring=ring if offset in (4, 5) else None) for offset in (0, 1, 3, 4, 5)]
    joined = join(batches, 1 << 20, compress=False, keyring=ring)
    assert [(header.base_offset, header.count) for header, _ in joined] == [(0, 2), (3, 1), (4, 2)]
    sparse = [build(7, 0, one, now=0, deltas=[3], span=5), build(7, 5, one, now=0), build(7, 6, one, now=0)]
    assert [header.count for header, _ in join(sparse, 1 << 20, compress=False, keyring=None)] == [1, 2]


def segment_batches(store: Store, log: int) -> list[StoredBatch]:
    segments = store.partitions[log].segments
    return [batch for segment in segments for _, batch in segment.scan(HEADER_BYTES, segment.size, store.keyring, lambda damage: None)]


def test_a_log_filled_one_record_at_a_time_takes_as_much_space_as_one_filled_in_bulk() -> None:
    store = opened(SimulatedFiles())
    single, bulk = new_log(store), new_log(store)
    given = [b"%0100d" % number for number in range(600)]
    for now, value in enumerate(given):
        put(store, single, value, now=now)
    put(store, bulk, *given)
    store.checkpoint()
    assert values(store, single) == given
    assert [record.timestamp for record in records(store, single)] == list(range(600)), "each keeps its own time"
    assert len(segment_batches(store, single)) == 1
    assert store.partitions[single].size_bytes <= 1.2 * store.partitions[bulk].size_bytes


@pytest.mark.parametrize("options", [{"compress": True}, {"encrypt": True}, {"compress": True, "encrypt": True}])
def test_joined_batches_are_compressed_and_encrypted_as_their_log_is(options: dict[str, bool]) -> None:
    files = SimulatedFiles()
    store = opened(files, StoreOptions(journal_bytes=64 * 1024, headroom_bytes=0, key=KEY))
    log = new_log(store, **options)
    for _ in range(50):
        put(store, log, b"a value that nobody may see" * 2)
    store.checkpoint()
    (batch,) = segment_batches(store, log)
    assert bool(batch.header.flags & COMPRESSED) == options.get("compress", False)
    assert bool(batch.header.flags & ENCRYPTED) == options.get("encrypt", False)
    assert values(store, log) == [b"a value that nobody may see" * 2] * 50
    if options.get("encrypt"):
        assert not any(b"nobody" in content for content in files.contents().values())


def test_joined_batches_and_the_journal_they_came_from_are_one_log_after_a_crash() -> None:
    files = SimulatedFiles()
    store = opened(files)
    log = new_log(store)
    given = [b"value %d" % number for number in range(30)]
    for number, value in enumerate(given):
        put(store, log, value)
        if number in (9, 19):
            store.maintenance.spill()
    for _ in range(3):  # each time maintenance joins other batches than before
        files = crashed(files)
        assert check(crashed(files)).clean
        store = opened(files)
        assert values(store, log) == given
        assert store.report.damages == []
        given.append(b"one more")
        put(store, log, b"one more")
        store.maintenance.spill()
    store.close()
    assert check(crashed(files)).clean
    assert values(opened(crashed(files)), log) == given


def test_a_joined_batch_stands_in_for_a_damaged_frame_of_the_journal() -> None:
    """The frame of the sixth record is damaged. The batch that was joined from it has nine others that the journal has, too."""
    files = SimulatedFiles()
    store = opened(files)
    log = new_log(store)
    given = [b"value %d" % number for number in range(15)]
    for number, value in enumerate(given):
        put(store, log, value)
        if number == 9:
            store.maintenance.spill()
    broken = crashed(files)
    broken.open("journal/0000000001.hrj").write_at(5 * 4096 + 50, [b"damage"])
    again = opened(broken)
    assert values(again, log) == given
    once_more = crashed(broken)
    assert values(opened(once_more), log) == given


def test_a_rewritten_segment_has_no_rest_of_its_earlier_content() -> None:
    """After a crash the batches of the journal are joined with later ones, and take less space than what the segment had before."""
    files = SimulatedFiles()
    store = opened(files)
    log = new_log(store, segment_bytes=2_000)
    for number in range(15):
        put(store, log, b"%020d" % number)
        store.maintenance.spill()  # fifteen batches
    files = crashed(files)
    store = opened(files)
    store.open_log(log, store.partitions[log].options)
    store.maintenance.spill()
    store.partitions[log].roll()
    store.close()
    assert check(crashed(files)).clean
    assert not any("unreadable" in note for note in check(crashed(files)).notes)
    assert values(opened(crashed(files)), log) == [b"%020d" % number for number in range(15)]
    for one, following in pairwise(store.partitions[log].segments):
        assert len(files.contents()[one.path]) == one.size, following.path


def test_small_tails_wait_for_the_checkpoint_and_large_ones_do_not() -> None:
    store = opened(SimulatedFiles(), StoreOptions(journal_bytes=1 << 20, headroom_bytes=0))
    small, large = new_log(store), new_log(store)
    for _ in range(5):
        put(store, small, b"x")
    put(store, large, bytes(BATCH_JOINED_BYTES_MAX))
    store.maintenance.tick(urgent=True)
    assert (len(store.partitions[small].tail), len(store.partitions[large].tail)) == (5, 0)
    store.checkpoint()
    assert store.partitions[small].tail == []
    assert [len(batch) for batch in segment_batches(store, small)] == [5]
