"""Appending: order, offsets, atomicity, limits."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from headrace import limits
from headrace.engine.contract import Ack, Appended, Bounds, Write
from headrace.errors import BrokerError, InvalidRequest, LimitExceeded, RecordTooLarge, UnknownPartition, UnknownTopic
from headrace.records import Record, RecordBatch
from tests.engine.subjects import Subject


async def test_offsets_are_dense_from_zero(subject: Subject) -> None:
    await subject.topic()
    assert (await subject.put("a", "b", "c")).base_offset == 0
    assert (await subject.put("d")).base_offset == 3
    assert await subject.offsets() == [0, 1, 2, 3]
    assert subject.engine.bounds("t", 0) == Bounds(0, 4)


async def test_a_run_is_answered_with_its_place_count_and_the_clocks_time(subject: Subject) -> None:
    await subject.topic()
    await subject.put("a")
    assert await subject.put("b", "c") == Appended(base_offset=1, count=2, timestamp=subject.clock.now)


async def test_partitions_count_on_their_own(subject: Subject) -> None:
    await subject.topic(partitions=3)
    await subject.put("a", "b", partition=1)
    assert (await subject.put("c", partition=2)).base_offset == 0
    assert subject.engine.bounds("t", 0) == Bounds(0, 0)
    assert subject.engine.bounds("t", 1) == Bounds(0, 2)


async def test_call_order_is_log_order_and_resolution_order(subject: Subject) -> None:
    await subject.topic()
    resolved: list[int] = []
    futures = [subject.engine.append([Write("t", 0, RecordBatch([b"%d" % number]))]) for number in range(50)]
    for future in futures:
        future.add_done_callback(lambda future: resolved.append(future.result()[0].base_offset))
    answers = await asyncio.gather(*futures)
    assert [answer[0].base_offset for answer in answers] == list(range(50))
    assert await subject.values() == [b"%d" % number for number in range(50)]
    await asyncio.sleep(0)
    assert resolved == list(range(50))


async def test_a_run_without_timestamps_is_stamped_by_the_clock_when_it_is_staged(subject: Subject) -> None:
    await subject.topic()
    before = subject.clock.now
    await subject.put("a")
    subject.clock.advance(5)
    await subject.put("b")
    assert [record.timestamp for record in await subject.records()] == [before, before + 5]


async def test_a_records_whole_content_comes_back(subject: Subject) -> None:
    await subject.topic()
    batch = RecordBatch(
        values=[b"one", None, b""],
        keys=[b"k", b"k", None],
        headers=[(("trace", b"1"), ("trace", b"2"), ("größe", b"\x00\xff")), (), (("", b""),)],
        timestamps=[1_000, 3_000, 2_000],
        expiries=[0, 9_000, 0],
    )
    await subject.append(batch)
    assert await subject.records() == [
        Record(0, 1_000, b"k", b"one", (("trace", b"1"), ("trace", b"2"), ("größe", b"\x00\xff")), 0),
        Record(1, 3_000, b"k", None, (), 9_000),
        Record(2, 2_000, None, b"", (("", b""),), 0),
    ]


async def test_an_empty_key_is_not_a_missing_key(subject: Subject) -> None:
    await subject.topic()
    await subject.append(RecordBatch([b"a", b"b"], [b"", None]))
    assert [record.key for record in await subject.records()] == [b"", None]


async def test_the_writes_of_one_call_are_seen_together(subject: Subject) -> None:
    await subject.topic("t", partitions=2)
    await subject.topic("u")
    seen: list[tuple[int, int, int]] = []

    def look() -> None:
        seen.append((subject.engine.bounds("t", 0).end, subject.engine.bounds("t", 1).end, subject.engine.bounds("u", 0).end))

    for topic, partition in (("t", 0), ("t", 1), ("u", 0)):
        subject.engine.watch(topic, partition, look)
    await subject.engine.append(
        [Write("t", 0, RecordBatch([b"a"])), Write("t", 1, RecordBatch([b"b", b"c"])), Write("u", 0, RecordBatch([b"d"]))]
    )
    assert seen, "no watcher was woken"
    if subject.engine.capabilities.dense_offsets:
        assert set(seen) == {(1, 2, 1)}
    assert all(t0 >= 1 and t1 >= 2 and u0 >= 1 for t0, t1, u0 in seen)


async def test_one_call_may_write_to_a_partition_twice(subject: Subject) -> None:
    await subject.topic()
    appended = await subject.engine.append([Write("t", 0, RecordBatch([b"a", b"b"])), Write("t", 0, RecordBatch([b"c"]))])
    assert [answer.base_offset for answer in appended] == [0, 2]
    assert await subject.values() == [b"a", b"b", b"c"]


async def test_a_callable_run_is_built_from_the_places_of_the_writes_before_it(subject: Subject) -> None:
    await subject.topic("t", partitions=2)
    await subject.topic("table")
    await subject.put("x", "y")

    def entry(appended: Sequence[Appended]) -> RecordBatch:
        return RecordBatch([repr([(answer.base_offset, answer.count) for answer in appended]).encode()])

    appended = await subject.engine.append(
        [
            Write("t", 0, RecordBatch([b"a"])),
            Write("t", 1, RecordBatch([b"b", b"c"])),
            Write("table", 0, entry),
            Write("t", 0, RecordBatch([b"d"])),
        ]
    )
    assert await subject.values("table") == [b"[(2, 1), (0, 2)]"]
    assert [answer.base_offset for answer in appended] == [2, 0, 0, 3]


async def test_callable_runs_of_calls_staged_together_each_see_their_own_places(subject: Subject) -> None:
    await subject.topic("t")
    await subject.topic("table")
    futures = [
        subject.engine.append(
            [Write("t", 0, RecordBatch([b"v"])), Write("table", 0, lambda appended: RecordBatch([b"%d" % appended[0].base_offset]))]
        )
        for _ in range(20)
    ]
    await asyncio.gather(*futures)
    assert await subject.values("table") == [b"%d" % number for number in range(20)]


async def test_a_callable_run_that_is_refused_takes_the_whole_call_with_it(subject: Subject) -> None:
    await subject.topic("t")
    await subject.topic("table")
    too_large = RecordBatch([b"v"], [bytes(limits.KEY_BYTES_MAX + 1)])
    with pytest.raises(RecordTooLarge):
        await subject.engine.append([Write("t", 0, RecordBatch([b"a"])), Write("table", 0, lambda _: too_large)])
    async with asyncio.timeout(45):  # Kafka would hide later records for 60 s if the transaction stayed open
        await subject.put("b")
        assert await subject.values("t") == [b"b"]
    if subject.engine.capabilities.dense_offsets:
        assert await subject.offsets("t") == [0]
    assert await subject.values("table") == []


@pytest.mark.parametrize(
    ("write", "error"),
    [
        (Write("nowhere", 0, RecordBatch([b"a"])), UnknownTopic),
        (Write("t", 1, RecordBatch([b"a"])), UnknownPartition),
        (Write("t", -1, RecordBatch([b"a"])), UnknownPartition),
        (Write("t", 0, RecordBatch([])), InvalidRequest),
        (Write("t", 0, RecordBatch([b"a"], keys=[bytes(limits.KEY_BYTES_MAX + 1)])), RecordTooLarge),
        (Write("t", 0, RecordBatch([b"a"], headers=[(("h", b""),) * (limits.HEADERS_MAX + 1)])), LimitExceeded),
        (Write("t", 0, RecordBatch([b"a"], headers=[(("h", bytes(limits.HEADERS_BYTES_MAX)),)])), LimitExceeded),
    ],
)
async def test_a_call_with_one_bad_write_is_refused_at_once_and_whole(subject: Subject, write: Write, error: type[BrokerError]) -> None:
    await subject.topic()
    with pytest.raises(error):
        subject.engine.append([Write("t", 0, RecordBatch([b"good"])), write])
    await subject.put("after")
    assert await subject.values() == [b"after"]


async def test_records_at_every_limit_are_kept(subject: Subject) -> None:
    await subject.topic()
    headers = (("h", bytes(limits.HEADERS_BYTES_MAX - limits.HEADERS_MAX)),) + (("h", b""),) * (limits.HEADERS_MAX - 1)
    key = b"k" * limits.KEY_BYTES_MAX
    await subject.append(RecordBatch([b"v"], keys=[key], headers=[headers]))
    (record,) = await subject.records()
    assert record.key == key
    assert record.headers == headers


async def test_a_value_of_32_mib_is_kept_and_one_byte_more_is_refused(subject: Subject) -> None:
    await subject.topic()
    value = bytes(range(256)) * (limits.VALUE_BYTES_MAX // 256)
    await subject.append(RecordBatch([value]))
    with pytest.raises(RecordTooLarge) as caught:
        subject.engine.append([Write("t", 0, RecordBatch([value + b"!"]))])
    assert (caught.value.size_bytes, caught.value.bytes_max) == (limits.VALUE_BYTES_MAX + 1, limits.VALUE_BYTES_MAX)
    assert await subject.values() == [value]


async def test_a_run_larger_than_any_batch_may_be_is_kept(subject: Subject) -> None:
    await subject.topic()
    values = [bytes([number]) * (16 * limits.MIB) for number in range(5)]
    assert sum(map(len, values)) > limits.BATCH_BYTES_MAX
    assert (await subject.append(RecordBatch(values))).count == 5
    assert await subject.values() == values
    assert await subject.offsets() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("ack", list(Ack))
async def test_every_kind_of_ack_is_followed_by_the_record(subject: Subject, ack: Ack) -> None:
    await subject.topic("t", ack=ack)
    await subject.topic("u")
    await subject.put("by topic")
    await subject.append(RecordBatch([b"by call"]), "u", ack=ack)
    await subject.put("flush", topic="t")
    await subject.put("flush", topic="u")
    async with asyncio.timeout(60):
        while subject.engine.bounds("t", 0).end < 2:  # noqa: ASYNC110  # Kafka with acks=0 tells nobody when the records are there
            await asyncio.sleep(0.01)
    assert await subject.values("t") == [b"by topic", b"flush"]
    assert await subject.values("u") == [b"by call", b"flush"]


async def test_a_caller_that_gives_up_waiting_takes_nothing_back(subject: Subject) -> None:
    await subject.topic()
    subject.engine.append([Write("t", 0, RecordBatch([b"a"]))]).cancel()
    await subject.put("b")
    assert await subject.values() == [b"a", b"b"]


async def test_a_call_without_writes_resolves_to_nothing(subject: Subject) -> None:
    assert await subject.engine.append([]) == []


async def test_independent_records_go_to_their_partitions_in_order(subject: Subject) -> None:
    await subject.topic(partitions=2)
    await subject.topic("u")
    places = [("t", 0), ("u", 0), ("t", 1), ("t", 0), ("u", 0)]
    appended = await subject.engine.append_each(places, [b"0", b"1", b"2", b"3", b"4"])
    assert (appended.offsets, appended.timestamp, appended.failed) == ([0, 0, 0, 1, 1], subject.clock.now, {})
    keyed = await subject.engine.append_each(places[:2], [b"5", b"6"], [b"k", None])
    assert keyed.offsets == [2, 2]
    assert await subject.values() == [b"0", b"3", b"5"]
    assert [record.key for record in await subject.records()] == [None, None, b"k"]
    assert subject.engine.bounds("u", 0) == Bounds(0, 3)


async def test_independent_records_keep_their_order_among_other_appends(subject: Subject) -> None:
    await subject.topic()
    staged: list[asyncio.Future[object]] = []
    for number in range(9):
        if number % 3 == 1:
            staged.append(subject.engine.append([Write("t", 0, RecordBatch([b"%d" % number]))]))  # type: ignore[arg-type]
        else:
            keys = [b"k"] if number % 3 else None
            staged.append(subject.engine.append_each([("t", 0)], [b"%d" % number], keys))  # type: ignore[arg-type]
    await asyncio.gather(*staged)
    assert await subject.values() == [b"%d" % number for number in range(9)]
    assert [record.key for record in await subject.records()] == [None, None, b"k"] * 3


async def test_independent_records_of_an_unknown_topic_are_refused_with_nothing_staged(subject: Subject) -> None:
    await subject.topic()
    with pytest.raises(UnknownTopic):
        subject.engine.append_each([("t", 0), ("missing", 0)], [b"0", b"1"])
    with pytest.raises(UnknownPartition):
        subject.engine.append_each([("t", 0), ("t", 1)], [b"0", b"1"])
    assert subject.engine.bounds("t", 0) == Bounds(0, 0)


async def test_a_topic_deleted_before_the_write_fails_only_its_own_records(subject: Subject) -> None:
    await subject.topic()
    await subject.topic("gone")
    places = [("t", 0), ("gone", 0)] * 20
    staged = subject.engine.append_each(places, [b"%d" % number for number in range(40)])
    deleting = asyncio.ensure_future(subject.engine.delete_topic("gone"))
    appended = await staged
    await deleting
    assert appended.offsets[::2] == list(range(20))
    assert set(appended.failed) <= set(range(1, 40, 2))
    with pytest.raises(UnknownTopic):
        subject.engine.append_each(places, [b"%d" % number for number in range(40)])
    assert subject.engine.bounds("t", 0) == Bounds(0, 20)


async def test_a_callback_gets_what_the_future_of_the_same_append_would_have(subject: Subject) -> None:
    await subject.topic(partitions=2)
    await subject.put("a", partition=1)
    called: asyncio.Future[list[Appended] | BaseException] = asyncio.get_running_loop().create_future()
    write = Write("t", 1, RecordBatch([b"b", b"cc"], [b"k", None]))
    subject.engine.append_then(write, called.set_result)
    after = subject.engine.append([Write("t", 1, RecordBatch([b"d"]))])
    assert await called == [Appended(base_offset=1, count=2, timestamp=subject.clock.now)]
    assert (await after)[0].base_offset == 3
    assert write.size_bytes == 4
    assert [record.key for record in await subject.records(partition=1)] == [None, b"k", None, None]


async def test_a_callback_is_not_called_for_an_append_that_is_refused_at_once(subject: Subject) -> None:
    await subject.topic()
    called: list[object] = []
    for topic, partition, error in (("missing", 0, UnknownTopic), ("t", 1, UnknownPartition)):
        with pytest.raises(error):
            subject.engine.append_then(Write(topic, partition, RecordBatch([b"a"])), called.append)
    with pytest.raises(RecordTooLarge):
        subject.engine.append_then(Write("t", 0, RecordBatch([bytes(limits.VALUE_BYTES_MAX + 1)])), called.append)
    await subject.put("b")
    assert called == []
    assert await subject.values() == [b"b"]
