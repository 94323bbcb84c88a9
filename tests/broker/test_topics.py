from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Sequence
from typing import Any

import pytest

from headrace.broker import BrokerSettings, ProducerStamp, SettlementPolicy
from headrace.broker.groups.offsets import ROWS_A_TURN
from headrace.broker.topics import LISTED_A_TURN
from headrace.engine.contract import Ack, Appended, Bounds, Topic, TopicConfig, Write
from headrace.errors import DiskFull, InvalidRequest, InvalidTopicName, OutOfSequence, TopicExists, UnknownPartition, UnknownTopic
from headrace.records import RecordBatch
from tests.broker.harness import ANN, Harness, turns


async def test_topics_are_listed_by_name_without_the_internal_ones(harness: Harness) -> None:
    for name in ("b", "a", "c"):
        await harness.broker.create_topic(ANN, name)
    assert [topic.name for topic in harness.broker.topics(ANN)] == ["a", "b", "c"]


async def many_topics(harness: Harness, counts: Sequence[int]) -> None:
    for number, partitions in enumerate(counts):
        await harness.engine.create_topic(f"t{number:04d}", partitions, TopicConfig())


async def test_a_listing_shows_a_bounded_number_of_partitions_in_one_turn(harness: Harness) -> None:
    await many_topics(harness, [1] * 3 * LISTED_A_TURN + [LISTED_A_TURN] * 3)
    slices = await harness.broker.listed(ANN, lambda topics: topics)
    assert [sum(topic.partitions for topic in topics) for topics in slices] == [LISTED_A_TURN] * 6
    assert [topic for topics in slices for topic in topics] == harness.broker.topics(ANN)


async def test_two_listings_share_the_turns_of_the_loop(harness: Harness) -> None:
    await many_topics(harness, [1] * 3 * LISTED_A_TURN)
    shown = 0

    def show(topics: list[Topic]) -> None:
        nonlocal shown
        shown += len(topics)

    listings = [asyncio.ensure_future(harness.broker.listed(ANN, show)) for _ in range(4)]
    counts = [0]
    while counts[-1] < 12 * LISTED_A_TURN:
        await asyncio.sleep(0)
        counts.append(shown)
    assert max(after - before for before, after in itertools.pairwise(counts)) == LISTED_A_TURN
    await asyncio.gather(*listings)


async def test_a_topic_deleted_during_a_listing_is_not_shown(harness: Harness) -> None:
    await many_topics(harness, [1] * 2 * LISTED_A_TURN)
    listing = asyncio.ensure_future(harness.broker.listed(ANN, lambda topics: [topic.name for topic in topics]))
    await asyncio.sleep(0)
    await harness.engine.delete_topic(f"t{2 * LISTED_A_TURN - 1:04d}")
    assert [len(names) for names in await listing] == [LISTED_A_TURN, LISTED_A_TURN - 1]


async def test_a_topic_is_created_as_asked_or_with_the_defaults() -> None:
    defaults = TopicConfig(ack=Ack.WRITTEN)
    harness = Harness(BrokerSettings(topic_defaults=defaults))
    await harness.broker.open()
    mine = TopicConfig(retention_ms=5)
    assert (await harness.broker.create_topic(ANN, "a", partitions=3, config=mine)).config == mine
    assert (await harness.broker.create_topic(ANN, "b")).config == defaults
    assert harness.broker.topic(ANN, "a").partitions == 3
    await harness.broker.close()


async def test_bad_names_and_counts_are_refused(harness: Harness) -> None:
    with pytest.raises(InvalidTopicName):
        await harness.broker.create_topic(ANN, "a b")
    with pytest.raises(InvalidTopicName):
        await harness.broker.ensure_topic(ANN, "__mine")
    with pytest.raises(InvalidRequest):
        await harness.broker.create_topic(ANN, "a", partitions=0)
    await harness.broker.create_topic(ANN, "a", partitions=2)
    with pytest.raises(TopicExists):
        await harness.broker.create_topic(ANN, "a")
    with pytest.raises(InvalidRequest):
        await harness.broker.alter_topic(ANN, "a", partitions=1)


@pytest.mark.parametrize("name", ["nowhere", "__offsets"])
async def test_unknown_and_internal_topics_are_alike_to_users(harness: Harness, name: str) -> None:
    broker = harness.broker
    with pytest.raises(UnknownTopic):
        broker.topic(ANN, name)
    with pytest.raises(UnknownTopic):
        broker.publish(ANN, name, RecordBatch([b"x"]))
    with pytest.raises(UnknownTopic):
        await broker.fetch(ANN, name, 0, 0, bytes_max=1)
    with pytest.raises(UnknownTopic):
        broker.bounds(ANN, name, 0)
    with pytest.raises(UnknownTopic):
        await broker.offset_for_time(ANN, name, 0, 0)
    with pytest.raises(UnknownTopic):
        broker.cursor(ANN, name, 0, 0, lambda _: None, credit_bytes=1)
    with pytest.raises(UnknownTopic):
        await broker.commit(ANN, "g", {(name, 0): 0})
    with pytest.raises(UnknownTopic):
        broker.join(ANN, "g", name, policy=SettlementPolicy())
    with pytest.raises(UnknownTopic):
        await broker.alter_topic(ANN, name, partitions=2)
    with pytest.raises(UnknownTopic):
        await broker.delete_topic(ANN, name)
    with pytest.raises(UnknownTopic):
        broker.begin(ANN).publish(name, RecordBatch([b"x"]))


async def test_partitions_that_are_not_there_are_named(harness: Harness) -> None:
    await harness.broker.create_topic(ANN, "t", partitions=2)
    with pytest.raises(UnknownPartition, match="no partition 2"):
        harness.broker.publish(ANN, "t", RecordBatch([b"x"]), partition=2)
    with pytest.raises(UnknownPartition):
        await harness.broker.fetch(ANN, "t", -1, 0, bytes_max=1)
    with pytest.raises(UnknownPartition):
        await harness.broker.commit(ANN, "g", {("t", 2): 0})
    with pytest.raises(UnknownPartition):
        harness.broker.join(ANN, "g", "t", policy=SettlementPolicy(), partitions=[0, 2])


async def test_many_that_ensure_one_topic_create_it_once(harness: Harness) -> None:
    topics = await asyncio.gather(*(harness.broker.ensure_topic(ANN, "t") for _ in range(20)))
    assert len({id(topic) for topic in topics}) == 1
    assert await harness.broker.ensure_topic(ANN, "t") is topics[0]


async def test_ensure_follows_the_settings() -> None:
    harness = Harness(BrokerSettings(auto_create=False))
    await harness.broker.open()
    with pytest.raises(UnknownTopic):
        await harness.broker.ensure_topic(ANN, "t")
    await harness.broker.create_topic(ANN, "t")
    assert (await harness.broker.ensure_topic(ANN, "t")).name == "t"
    await harness.broker.close()
    harness = Harness(BrokerSettings(auto_create_partitions=4))
    await harness.broker.open()
    assert (await harness.broker.ensure_topic(ANN, "t")).partitions == 4
    await harness.broker.close()


async def test_a_publish_knows_of_partitions_added_a_moment_ago(harness: Harness) -> None:
    await harness.broker.create_topic(ANN, "t")
    await harness.put("a")
    await harness.broker.alter_topic(ANN, "t", partitions=3)
    await harness.put("b", partition=2)
    for _ in range(6):
        await harness.put("c")
    assert [len(await harness.values("t", partition)) for partition in range(3)] == [3, 2, 3]


async def test_a_deleted_topic_leaves_no_offsets_to_its_successor(harness: Harness) -> None:
    await harness.broker.create_topic(ANN, "t")
    await harness.broker.create_topic(ANN, "other")
    await harness.broker.commit(ANN, "g", {("t", 0): 5, ("other", 0): 7})
    await harness.broker.commit(ANN, "only here", {("t", 0): 1})
    await harness.broker.delete_topic(ANN, "t")
    assert harness.broker.groups(ANN) == ["g"]
    await harness.broker.create_topic(ANN, "t")
    assert harness.broker.committed(ANN, "g", "t", 0) is None
    await harness.restart()
    assert harness.broker.committed(ANN, "g", "t", 0) is None
    assert harness.broker.committed(ANN, "g", "other", 0) == 7


async def test_the_offsets_of_a_deleted_topic_are_removed_in_slices(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    await harness.broker.create_topic(ANN, "t", partitions=100)
    for number in range(ROWS_A_TURN // 100 * 3):
        await harness.broker.commit(ANN, f"g{number}", {("t", partition): 0 for partition in range(100)})
    sizes: list[int] = []
    append = harness.engine.append

    def counted(writes: Sequence[Write], **options: Any) -> asyncio.Future[list[Appended]]:
        sizes.extend(len(write.batch) for write in writes if isinstance(write.batch, RecordBatch))
        return append(writes, **options)

    monkeypatch.setattr(harness.engine, "append", counted)
    await harness.broker.delete_topic(ANN, "t")
    assert (sum(sizes), max(sizes)) == (3 * ROWS_A_TURN, ROWS_A_TURN)
    assert harness.broker.groups(ANN) == []


async def test_a_commit_in_flight_when_its_topic_is_deleted_leaves_nothing_either(harness: Harness) -> None:
    await harness.broker.create_topic(ANN, "t")
    committing = asyncio.ensure_future(harness.broker.commit(ANN, "g", {("t", 0): 5}))
    await asyncio.sleep(0)
    await harness.broker.delete_topic(ANN, "t")
    await committing
    await harness.broker.create_topic(ANN, "t")
    assert harness.broker.committed(ANN, "g", "t", 0) is None
    await harness.crash()
    assert harness.broker.committed(ANN, "g", "t", 0) is None


async def test_a_deleted_topic_leaves_no_producer_memory_to_its_successor(harness: Harness) -> None:
    await harness.broker.create_topic(ANN, "t")
    for number in range(7):
        await harness.broker.publish(ANN, "t", RecordBatch([b"x"]), producer=ProducerStamp("p", number))
    in_flight = harness.broker.publish(ANN, "t", RecordBatch([b"x"]), producer=ProducerStamp("p", 7))
    with pytest.raises(OutOfSequence):
        harness.broker.publish(ANN, "t", RecordBatch([b"x"]), producer=ProducerStamp("p", 0))
    await harness.broker.delete_topic(ANN, "t")
    with contextlib.suppress(UnknownTopic):
        await in_flight
    await harness.broker.create_topic(ANN, "t")
    await harness.crash()
    published = await harness.broker.publish(ANN, "t", RecordBatch([b"new"]), producer=ProducerStamp("p", 0))
    assert published.base_offset == 0
    assert await harness.values() == ["new"]


@pytest.mark.parametrize("table", ["__offsets", "__producers"])
async def test_a_deletion_the_log_refused_to_finish_is_finished_before_the_name_is_used_again(harness: Harness, table: str) -> None:
    await harness.broker.create_topic(ANN, "t")
    await harness.broker.commit(ANN, "g", {("t", 0): 5})
    await harness.broker.publish(ANN, "t", RecordBatch([b"x"]), producer=ProducerStamp("p", 0))
    harness.engine.error, harness.engine.topic = DiskFull("full"), table
    with pytest.raises(DiskFull):
        await harness.broker.delete_topic(ANN, "t")
    with pytest.raises(DiskFull):
        await harness.broker.create_topic(ANN, "t")
    harness.engine.error = None
    await harness.broker.create_topic(ANN, "t")
    assert harness.broker.groups(ANN) == []
    await harness.crash()
    assert harness.broker.groups(ANN) == []
    assert (await harness.broker.publish(ANN, "t", RecordBatch([b"y"]), producer=ProducerStamp("p", 0))).base_offset == 0
    assert await harness.values() == ["y"]


async def test_leftovers_of_a_deletion_that_a_crash_cut_short_are_removed_at_the_start(harness: Harness) -> None:
    await harness.broker.create_topic(ANN, "t")
    await harness.broker.commit(ANN, "g", {("t", 0): 5})
    await harness.broker.publish(ANN, "t", RecordBatch([b"x"]), producer=ProducerStamp("p", 0))
    await harness.engine.delete_topic("t")
    await harness.crash()
    await harness.broker.create_topic(ANN, "t")
    assert harness.broker.groups(ANN) == []
    assert (await harness.broker.publish(ANN, "t", RecordBatch([b"y"]), producer=ProducerStamp("p", 0))).base_offset == 0
    assert await harness.values() == ["y"]


async def test_a_name_stays_taken_until_its_deletion_is_complete(harness: Harness) -> None:
    await harness.broker.create_topic(ANN, "t")
    await harness.put("old")
    await harness.broker.commit(ANN, "g", {("t", 0): 1})
    harness.engine.hold()
    deleting = asyncio.ensure_future(harness.broker.delete_topic(ANN, "t"))
    creating = asyncio.ensure_future(harness.broker.ensure_topic(ANN, "t"))
    await turns()
    assert not deleting.done() and not creating.done()
    harness.engine.let_go()
    await asyncio.gather(deleting, creating)
    assert harness.broker.bounds(ANN, "t", 0) == Bounds(0, 0)
    assert harness.broker.committed(ANN, "g", "t", 0) is None
