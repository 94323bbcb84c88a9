"""Topics: creation, partitions, deletion, limits."""

from __future__ import annotations

import asyncio

import pytest

from headrace import limits
from headrace.engine.contract import Ack, Bounds, Cleanup, Topic, TopicConfig, Write
from headrace.errors import InvalidRequest, LimitExceeded, TopicExists, UnknownPartition, UnknownTopic
from headrace.records import RecordBatch
from tests.engine.subjects import Subject, within

CONFIG = TopicConfig(ack=Ack.WRITTEN, cleanup=Cleanup.COMPACT, retention_ms=5, compress=True)


async def test_a_created_topic_is_listed_as_it_was_asked_for(subject: Subject) -> None:
    view = subject.engine.topics()
    created = await subject.engine.create_topic("t", 3, CONFIG)
    await subject.engine.create_topic("__table", 1, TopicConfig(), internal=True)
    assert created == Topic("t", 3, CONFIG, internal=False)
    assert dict(view) == {"t": created, "__table": Topic("__table", 1, TopicConfig(), internal=True)}


async def test_the_list_of_topics_is_read_only(subject: Subject) -> None:
    with pytest.raises(TypeError):
        subject.engine.topics()["t"] = Topic("t", 1)  # type: ignore[index]  # that it is refused is the claim


async def test_a_name_is_taken_once(subject: Subject) -> None:
    await subject.topic()
    with pytest.raises(TopicExists):
        await subject.topic()


async def test_of_two_that_create_a_topic_at_once_one_wins(subject: Subject) -> None:
    outcomes = await asyncio.gather(subject.topic(), subject.topic(), return_exceptions=True)
    assert [type(outcome) for outcome in outcomes if isinstance(outcome, Exception)] == [TopicExists]


@pytest.mark.needs("any_topic_name")
async def test_names_are_only_names(subject: Subject) -> None:
    names = ["../../etc/passwd", "a/b", "größe", "名前", "x" * limits.TOPIC_NAME_BYTES_MAX, "CON", "nul\x00", "."]
    for name in names:
        await subject.topic(name)
        await subject.put(name, topic=name)
    await subject.reopen()
    assert set(subject.engine.topics()) == set(names)
    for name in names:
        assert await subject.values(name) == [name.encode()]


async def test_added_partitions_are_empty_and_old_ones_stay_as_they_are(subject: Subject) -> None:
    await subject.topic(partitions=2)
    await subject.put("a", partition=1)
    assert (await subject.engine.alter_topic("t", partitions=4)).partitions == 4
    assert subject.engine.topics()["t"].partitions == 4
    assert await subject.values(partition=1) == [b"a"]
    assert subject.engine.bounds("t", 3) == Bounds(0, 0)
    assert (await subject.put("b", partition=3)).base_offset == 0


async def test_partitions_are_never_removed(subject: Subject) -> None:
    await subject.topic(partitions=2)
    with pytest.raises(InvalidRequest):
        await subject.engine.alter_topic("t", partitions=1)
    assert subject.engine.topics()["t"].partitions == 2


async def test_a_new_configuration_replaces_the_old_one(subject: Subject) -> None:
    await subject.topic()
    assert (await subject.engine.alter_topic("t", config=CONFIG)).config == CONFIG
    assert subject.engine.topics()["t"] == Topic("t", 1, CONFIG)


async def test_a_topic_that_is_not_there_cannot_be_changed(subject: Subject) -> None:
    with pytest.raises(UnknownTopic):
        await subject.engine.alter_topic("t", partitions=2)
    with pytest.raises(UnknownTopic):
        await subject.engine.delete_topic("t")


async def test_deleting_frees_the_name_and_a_new_topic_of_that_name_is_empty(subject: Subject) -> None:
    await subject.topic(partitions=2)
    await subject.put("old", "older")
    await subject.engine.delete_topic("t")
    assert "t" not in subject.engine.topics()
    with pytest.raises(UnknownTopic):
        await subject.engine.read("t", 0, 0, bytes_max=100)
    with pytest.raises(UnknownTopic):
        subject.engine.append([Write("t", 0, RecordBatch([b"late"]))])
    await subject.topic(partitions=1)
    assert subject.engine.bounds("t", 0) == Bounds(0, 0)
    await subject.put("new")
    await subject.reopen()
    assert await subject.values() == [b"new"]
    with pytest.raises(UnknownPartition):
        subject.engine.bounds("t", 1)


async def test_deleting_wakes_those_who_watch(subject: Subject) -> None:
    await subject.topic(partitions=2)
    woken = [asyncio.Event(), asyncio.Event()]
    for partition, event in enumerate(woken):
        subject.engine.watch("t", partition, event.set)
    await subject.engine.delete_topic("t")
    for event in woken:
        await within(60, event.wait())
    assert "t" not in subject.engine.topics()


async def test_records_staged_when_their_topic_is_deleted_never_reach_its_successor(subject: Subject) -> None:
    await subject.topic()
    staged = subject.engine.append([Write("t", 0, RecordBatch([b"old"]))])
    await subject.engine.delete_topic("t")
    await subject.topic()
    await asyncio.wait([staged])
    staged.exception()
    await subject.put("new")
    assert await subject.values() == [b"new"]


@pytest.mark.parametrize("partitions", [0, -1])
async def test_a_topic_has_at_least_one_partition(subject: Subject, partitions: int) -> None:
    with pytest.raises(InvalidRequest):
        await subject.topic(partitions=partitions)
    assert dict(subject.engine.topics()) == {}


async def test_a_topic_has_at_most_so_many_partitions(subject: Subject) -> None:
    await subject.topic("most", partitions=limits.PARTITIONS_PER_TOPIC_MAX)
    with pytest.raises(LimitExceeded):
        await subject.topic("more", partitions=limits.PARTITIONS_PER_TOPIC_MAX + 1)
    with pytest.raises(LimitExceeded):
        await subject.engine.alter_topic("most", partitions=limits.PARTITIONS_PER_TOPIC_MAX + 1)
    assert set(subject.engine.topics()) == {"most"}


@pytest.mark.local("a Kafka node takes minutes for so many partitions")
async def test_all_topics_together_have_at_most_so_many_partitions(subject: Subject) -> None:
    whole, rest = divmod(limits.PARTITIONS_MAX, limits.PARTITIONS_PER_TOPIC_MAX)
    for number in range(whole):
        await subject.topic(f"t{number}", partitions=limits.PARTITIONS_PER_TOPIC_MAX)
    if rest:
        await subject.topic("rest", partitions=rest)
    await subject.reopen()
    with pytest.raises(LimitExceeded):
        await subject.topic("one more")
    await subject.engine.create_topic("__table", 1, TopicConfig(), internal=True)  # internal topics do not count
    await subject.engine.delete_topic("t0")
    await subject.topic("one more")
    await subject.engine.alter_topic("one more", partitions=limits.PARTITIONS_PER_TOPIC_MAX)
    with pytest.raises(LimitExceeded):
        await subject.topic("two more")
