"""Single records of one turn of the loop share an append, and keep everything a publish promises."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from headrace.broker import Outcome, Principal, Published, PublishedOne, PublishedTogether, TopicConfig, Transaction
from headrace.broker.authorizer import Action, Resource
from headrace.broker.publishing.gathering import LONE_AFTER, RECORD_BYTES_MAX
from headrace.broker.publishing.partitioner import partition_of
from headrace.engine.contract import Appended, Write
from headrace.errors import DiskFull, NotAuthorized, Unavailable, UnknownPartition, UnknownTopic
from headrace.records import RecordBatch
from tests.broker.harness import ANN, Harness, turns


async def landed(outcome: Outcome) -> Published:
    for _ in range(30):
        if outcome.done():
            return outcome.result()
        await asyncio.sleep(0)
    raise AssertionError("not done")


async def together(outcome: PublishedTogether) -> list[Published]:
    for _ in range(30):
        if outcome.done():
            return outcome.result()
        await asyncio.sleep(0)
    raise AssertionError("not done")


async def test_single_records_of_one_turn_share_an_append_in_call_order(harness: Harness) -> None:
    await harness.broker.create_topic(ANN, "t")
    before = harness.engine.appends
    outcomes = [harness.broker.publish_one(ANN, "t", b"%d" % number) for number in range(10)]
    assert harness.engine.appends == before, "nothing is appended before the turn ends"
    assert [await landed(outcome) for outcome in outcomes] == [Published(0, number, 1, harness.clock.now) for number in range(10)]
    assert harness.engine.appends == before + 1
    assert await harness.values() == [str(number) for number in range(10)]


async def test_a_lone_publisher_does_not_wait_for_the_end_of_the_turn(harness: Harness) -> None:
    await harness.broker.create_topic(ANN, "t")
    for number in range(LONE_AFTER):
        before = harness.engine.appends
        outcome = harness.broker.publish_one(ANN, "t", b"v")
        assert harness.engine.appends == before, "others may follow in this turn"
        assert (await landed(outcome)).base_offset == number
    lone = harness.broker.publish_one(ANN, "t", b"v")
    assert harness.engine.appends == before + 2, "it is appended at once"
    others = [harness.broker.publish_one(ANN, "t", b"v") for _ in range(2)]
    assert harness.engine.appends == before + 2, "no publisher is alone while a record is in flight"
    assert [(await landed(outcome)).base_offset for outcome in (lone, *others)] == [LONE_AFTER, LONE_AFTER + 1, LONE_AFTER + 2]
    outcome = harness.broker.publish_one(ANN, "t", b"v")
    assert harness.engine.appends == before + 3, "several records shared the last append, so others may follow again"
    await landed(outcome)


async def test_records_published_in_other_ways_keep_the_call_order(harness: Harness) -> None:
    await harness.broker.create_topic(ANN, "t")
    harness.broker.publish_one(ANN, "t", b"0")
    harness.broker.publish(ANN, "t", RecordBatch([b"1", b"2"]))
    harness.broker.publish_one(ANN, "t", b"3")
    harness.broker.publish_one(Principal("ann", "figg"), "t", b"4")
    each = harness.broker.publish_each(ANN, ["t"], [b"5"])
    harness.broker.publish_one(ANN, "t", b"6")
    transaction = harness.broker.begin(ANN)
    transaction.publish("t", RecordBatch([b"7"]))
    committed = transaction.stage_commit()
    last = harness.broker.publish_one(ANN, "t", b"8")
    assert each is not None
    await each
    assert [one.base_offset for one in await together(committed)] == [7]
    assert (await landed(last)).base_offset == 8
    assert await harness.values() == [str(number) for number in range(9)]


async def test_keys_and_partitions_are_respected(harness: Harness) -> None:
    await harness.broker.create_topic(ANN, "t", partitions=4)
    keyed = [harness.broker.publish_one(ANN, "t", b"v", key) for key in (b"a", b"b", b"c", b"")]
    named = harness.broker.publish_one(ANN, "t", b"v", partition=3)
    rotated = [harness.broker.publish_one(ANN, "t", b"v") for _ in range(4)]
    assert [(await landed(outcome)).partition for outcome in keyed] == [partition_of(key, 4) for key in (b"a", b"b", b"c", b"")]
    assert (await landed(named)).partition == 3
    assert sorted([(await landed(outcome)).partition for outcome in rotated]) == [0, 1, 2, 3]
    records = [record for partition in range(4) for record in await harness.records("t", partition)]
    assert sorted(record.key for record in records if record.key is not None) == [b"", b"a", b"b", b"c"]
    with pytest.raises(UnknownPartition):
        harness.broker.publish_one(ANN, "t", b"v", partition=4)


async def test_a_key_in_the_middle_of_a_batch_belongs_to_its_record(harness: Harness) -> None:
    await harness.broker.create_topic(ANN, "t")
    outcomes = [harness.broker.publish_one(ANN, "t", b"v", key) for key in (None, b"k", None)]
    await landed(outcomes[-1])
    assert [record.key for record in await harness.records()] == [None, b"k", None]


async def test_every_record_counts_in_the_metrics_of_its_protocol(harness: Harness) -> None:
    await harness.broker.create_topic(ANN, "t")
    figg = Principal("ann", "figg")
    outcomes = [harness.broker.publish_one(who, "t", b"12345", b"key") for who in (ANN, ANN, figg)]
    for outcome in outcomes:
        await landed(outcome)
    for protocol, count in (("internal", 2), ("figg", 1)):
        meter = harness.broker.meters.meter("t", protocol)
        assert (meter.published_batches, meter.published_records, meter.published_bytes) == (count, count, count * 8)
        assert harness.broker.meters.publish_durations[protocol].count == count


async def test_a_full_disk_fails_every_record_and_counts_each(harness: Harness) -> None:
    await harness.broker.create_topic(ANN, "t")
    harness.engine.error = DiskFull("no space")
    outcomes = [harness.broker.publish_one(ANN, "t", b"v") for _ in range(3)]
    await turns()
    assert [type(outcome.exception()) for outcome in outcomes] == [DiskFull] * 3
    assert harness.broker.meters.refused["internal", "disk_full"] == 3


async def test_a_topic_deleted_in_the_same_turn_fails_only_its_own_records(harness: Harness) -> None:
    await harness.broker.create_topic(ANN, "t")
    await harness.broker.create_topic(ANN, "u")
    gone, kept = harness.broker.publish_one(ANN, "t", b"v"), harness.broker.publish_one(ANN, "u", b"v")
    calls: list[object] = []
    gone.add_done_callback(calls.append)
    await harness.engine.delete_topic("t")  # does not suspend
    harness.broker.publish(ANN, "u", RecordBatch([b"w"]))
    assert calls == [], "a session is not called back while it publishes"
    assert (await landed(kept)).base_offset == 0
    await turns()
    assert isinstance(gone.exception(), UnknownTopic) and calls == [gone]


async def test_a_defect_in_one_callback_does_not_cost_the_others_theirs(harness: Harness) -> None:
    await harness.broker.create_topic(ANN, "t")
    reported: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
    calls: list[object] = []

    def defect(_: object) -> None:
        raise RuntimeError("defect")

    first, second = harness.broker.publish_one(ANN, "t", b"a"), harness.broker.publish_one(ANN, "t", b"b")
    first.add_done_callback(defect)
    second.add_done_callback(calls.append)
    await turns()
    assert calls == [second] and [str(context["exception"]) for context in reported] == ["defect"]


async def test_a_drain_waits_for_gathered_records_and_refuses_new_ones(harness: Harness) -> None:
    await harness.broker.create_topic(ANN, "t")
    outcome = harness.broker.publish_one(ANN, "t", b"v")
    harness.engine.hold()
    closing = asyncio.ensure_future(harness.broker.close())
    await turns()
    with pytest.raises(Unavailable):
        harness.broker.publish_one(ANN, "t", b"w")
    assert not closing.done() and not outcome.done()
    harness.engine.let_go()
    await closing
    assert outcome.result().base_offset == 0


async def test_the_permission_is_checked() -> None:
    def authorize(who: Principal, action: Action, resource: Resource) -> bool:
        return action is not Action.PUBLISH

    harness = Harness(authorize=authorize)
    await harness.broker.open()
    await harness.broker.create_topic(ANN, "t")
    with pytest.raises(NotAuthorized):
        harness.broker.publish_one(ANN, "t", b"v")
    await harness.broker.close()


class _Tracer:
    def __init__(self) -> None:
        self.published: list[str] = []

    def publish(self, topic: str, protocol: str, batch: object) -> Callable[[asyncio.Future[Any]], None] | None:
        self.published.append(topic)
        return None

    def deliver(self, *_: object) -> None: ...


async def test_records_that_need_more_than_a_place_are_published_one_by_one(harness: Harness) -> None:
    await harness.broker.create_topic(ANN, "t")
    await harness.broker.create_topic(ANN, "short", config=TopicConfig(ttl_ms=1_000))
    assert isinstance(harness.broker.publish_one(ANN, "t", bytes(RECORD_BYTES_MAX)), PublishedOne)
    assert not isinstance(harness.broker.publish_one(ANN, "t", bytes(RECORD_BYTES_MAX + 1)), PublishedOne)
    expiring = await landed(harness.broker.publish_one(ANN, "short", b"v"))
    assert (await harness.records("short"))[expiring.base_offset].expiry == harness.clock.now + 1_000
    harness.broker.tracer = tracer = _Tracer()
    await landed(harness.broker.publish_one(ANN, "t", b"v"))
    assert tracer.published == ["t"]


def begun(harness: Harness, *values: bytes, topic: str = "t") -> Transaction:
    transaction = harness.broker.begin(ANN)
    for value in values:
        transaction.publish(topic, RecordBatch([value]))
    return transaction


async def test_transactions_committed_in_one_turn_share_an_append_in_call_order(harness: Harness) -> None:
    await harness.broker.create_topic(ANN, "t")
    transactions = [begun(harness, b"%d" % number, b"%d'" % number) for number in range(5)]
    before = harness.engine.appends
    committed = [transaction.stage_commit() for transaction in transactions]
    last = harness.broker.publish_one(ANN, "t", b"last")
    assert [[one.base_offset for one in await together(outcome)] for outcome in committed] == [
        [2 * number, 2 * number + 1] for number in range(5)
    ]
    assert (await landed(last)).base_offset == 10
    assert harness.engine.appends == before + 2
    assert harness.broker.meters.meter("t", ANN.protocol).published_records == 11


async def test_large_transactions_of_one_turn_do_not_share_an_append(harness: Harness) -> None:
    await harness.broker.create_topic(ANN, "t")
    transactions = [begun(harness, b"x" * 200_000) for _ in range(3)]
    before = harness.engine.appends
    committed = [transaction.stage_commit() for transaction in transactions]
    assert [(await together(outcome))[0].base_offset for outcome in committed] == [0, 1, 2]
    assert harness.engine.appends == before + 3


async def test_transactions_that_share_a_failed_append_can_be_committed_again(harness: Harness) -> None:
    await harness.broker.create_topic(ANN, "t")
    transactions = [begun(harness, b"%d" % number) for number in range(3)]
    harness.engine.error = DiskFull("full")
    for outcome in [transaction.stage_commit() for transaction in transactions]:
        with pytest.raises(DiskFull):
            await together(outcome)
    harness.engine.error = None
    transactions[1].abort()
    assert (await transactions[2].commit())[0].base_offset == 0
    assert (await transactions[0].commit())[0].base_offset == 1
    assert await harness.values() == ["2", "0"]


async def test_a_topic_deleted_in_the_turn_fails_only_its_own_transaction(harness: Harness) -> None:
    await harness.broker.create_topic(ANN, "t")
    await harness.broker.create_topic(ANN, "gone")
    first, second, third = begun(harness, b"1"), begun(harness, b"2", topic="gone"), begun(harness, b"3")
    committed = [transaction.stage_commit() for transaction in (first, second, third)]
    await harness.engine.delete_topic("gone")
    assert (await together(committed[0]))[0].base_offset == 0
    with pytest.raises(UnknownTopic):
        await together(committed[1])
    assert (await together(committed[2]))[0].base_offset == 1
    assert second.has_ended


async def test_a_commit_of_offsets_follows_what_was_published_before_it(harness: Harness) -> None:
    await harness.broker.create_topic(ANN, "t")
    order: list[list[str]] = []
    append = harness.engine.append

    def recorded(writes: Any, **options: Any) -> Any:
        order.append([write.topic for write in writes])
        return append(writes, **options)

    harness.engine.append = recorded  # type: ignore[method-assign]
    harness.broker.publish_one(ANN, "t", b"0")
    begun(harness, b"1").stage_commit()
    await harness.broker.stage_commit(ANN, "g", {("t", 0): 1})
    assert order == [["t"], ["t"], ["__offsets"]]


async def test_a_cancelled_commit_that_fails_is_not_open_again(harness: Harness) -> None:
    await harness.broker.create_topic(ANN, "t")
    transaction = begun(harness, b"1")
    harness.engine.error = DiskFull("full")
    committing = asyncio.create_task(transaction.commit())
    await asyncio.sleep(0)
    committing.cancel()
    await turns()
    assert committing.cancelled() and transaction.has_ended


async def test_transactions_begun_together_share_a_timer_and_each_has_its_time(harness: Harness) -> None:
    await harness.broker.create_topic(ANN, "t")
    before = harness.clock.running
    early = [harness.broker.begin(ANN, timeout_ms=1000) for _ in range(3)]
    assert harness.clock.running == before + 1
    harness.clock.tick(10)
    late = harness.broker.begin(ANN, timeout_ms=1000)
    other = harness.broker.begin(ANN, timeout_ms=500)
    early[0].abort()
    harness.clock.tick(500)
    assert [one.has_ended for one in (other, *early, late)] == [True, True, False, False, False]
    harness.clock.tick(490)
    assert [one.has_ended for one in (*early, late)] == [True, True, True, False]
    late.abort()
    assert harness.clock.running == before


async def test_an_append_that_is_refused_at_once_fails_its_records_once_and_not_within_the_call(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    await harness.broker.create_topic(ANN, "t")

    def refuse(write: Write, done: Callable[[list[Appended] | BaseException], None]) -> None:
        done(DiskFull("no room"))
        done(DiskFull("a second result for the same append"))

    monkeypatch.setattr(harness.engine, "append_then", refuse)
    outcome = harness.broker.publish_one(ANN, "t", b"a")
    called: list[object] = []
    outcome.add_done_callback(called.append)
    later = harness.broker.publish(ANN, "t", RecordBatch([b"b"]))  # sends what was gathered
    assert not outcome.done()
    assert called == []
    with pytest.raises(DiskFull, match="no room"):
        await landed(outcome)
    assert called == [outcome]
    assert (await later).base_offset == 0
    await harness.broker.close()  # waits for nothing
