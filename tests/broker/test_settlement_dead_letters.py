"""Settlement: records without attempts left, and the end of queues."""

from __future__ import annotations

import asyncio

import pytest

from headrace.broker import BrokerSettings, Member, SettlementPolicy
from headrace.errors import (
    DiskFull,
    InvalidRequest,
    InvalidTopicName,
    LimitExceeded,
    UnknownTopic,
)
from headrace.limits import HEADERS_MAX
from headrace.records import RecordBatch
from tests.broker.harness import ANN, Harness, turns
from tests.broker.settling import ids_of, let_pass, offsets_of, open_queue, progress_of


@pytest.fixture
async def harness(harness: Harness) -> Harness:
    await harness.broker.create_topic(ANN, "t")
    return harness


# Dead letters


async def _use_up(harness: Harness, queue: Member, attempts: int) -> None:
    for _ in range(attempts):
        queue.nack(ids_of(await queue.take(10)), delay_ms=0)
    await turns()


async def test_a_record_that_used_up_its_attempts_goes_to_the_dead_letters(harness: Harness) -> None:
    await harness.put("first")
    await harness.broker.publish(ANN, "t", RecordBatch([b"bad"], [b"k"], [(("own", b"1"),)]))
    queue = open_queue(harness)
    queue.ack([(await queue.take(1))[0].id])
    await _use_up(harness, queue, 4)
    (letter,) = await harness.records("t.dlq")
    assert (letter.key, letter.value, letter.timestamp) == (b"k", b"bad", harness.clock.now)
    assert letter.headers == (
        ("own", b"1"),
        ("x-headrace-reason", b"refused"),
        ("x-headrace-source-topic", b"t"),
        ("x-headrace-source-partition", b"0"),
        ("x-headrace-source-offset", b"1"),
        ("x-headrace-attempts", b"4"),
        ("x-headrace-first-failure", b"%d" % harness.clock.now),
        ("x-headrace-last-failure", b"%d" % harness.clock.now),
    )
    assert await queue.take(10) == []
    assert await progress_of(harness) == 2


async def test_time_outs_use_up_attempts_without_any_call(harness: Harness) -> None:
    await harness.put("a")
    queue = open_queue(harness, SettlementPolicy(ack_timeout_ms=1_000, attempts_max=1))
    await queue.take(1)
    await let_pass(harness, 1_000)
    assert await harness.values("t.dlq") == ["a"]
    assert dict((await harness.records("t.dlq"))[0].headers)["x-headrace-reason"] == b"timed out"


async def test_a_dead_letter_counts_as_settled_only_when_it_is_durable(harness: Harness) -> None:
    await harness.put("bad", "good")
    queue = open_queue(harness, SettlementPolicy(attempts_max=1))
    bad, good = await queue.take(10)
    await harness.broker.create_topic(ANN, "t.dlq")
    harness.engine.error, harness.engine.topic = DiskFull("full"), "t.dlq"
    queue.nack([bad.id])
    queue.ack([good.id])
    assert await progress_of(harness) == 0
    await let_pass(harness, 5_000)
    assert harness.broker.committed(ANN, "g", "t", 0) == 0
    harness.engine.error = None
    await let_pass(harness, 1_000)
    assert await harness.values("t.dlq") == ["bad"]
    assert await progress_of(harness) == 2


async def test_many_dead_letters_are_written_together(harness: Harness) -> None:
    await harness.put(*(f"{number}" for number in range(250)))
    queue = open_queue(harness, SettlementPolicy(attempts_max=1, credit=250))
    taken = await queue.take(250)
    before = harness.engine.appends
    queue.nack(ids_of(taken))
    await turns(100)
    assert await harness.values("t.dlq") == [f"{number}" for number in range(250)]
    assert harness.engine.appends - before <= 4


async def test_without_dead_letters_the_record_is_dropped(harness: Harness) -> None:
    await harness.put("a")
    queue = open_queue(harness, SettlementPolicy(attempts_max=2, dead_letters=False))
    await _use_up(harness, queue, 2)
    assert await queue.take(1) == []
    assert "t.dlq" not in harness.engine.topics()
    assert await progress_of(harness) == 1


async def test_without_a_limit_a_record_comes_for_ever(harness: Harness) -> None:
    await harness.put("a")
    queue = open_queue(harness, SettlementPolicy(attempts_max=0))
    await _use_up(harness, queue, 100)
    assert (await queue.take(1))[0].attempt == 101


async def test_a_late_ack_of_a_dying_record_is_accepted(harness: Harness) -> None:
    await harness.put("a")
    queue = open_queue(harness, SettlementPolicy(attempts_max=1))
    taken = await queue.take(1)
    await harness.broker.create_topic(ANN, "t.dlq")
    harness.engine.error, harness.engine.topic = DiskFull("full"), "t.dlq"
    queue.nack(ids_of(taken))
    await turns()
    assert queue.nack(ids_of(taken)) == [True]
    assert queue.ack(ids_of(taken)) == [True]
    assert await progress_of(harness) == 1


async def test_leaving_counts_as_an_attempt_where_dead_letters_are_kept(harness: Harness) -> None:
    await harness.put("poison")
    policy = SettlementPolicy(attempts_max=2)
    for _ in range(2):
        queue = open_queue(harness, policy)
        other = open_queue(harness, policy)
        assert offsets_of(await queue.take(1)) == [0]
        await queue.close()
    assert await harness.values("t.dlq") == ["poison"]
    assert await other.take(1) == []


async def test_leaving_never_drops_a_record(harness: Harness) -> None:
    await harness.put("a")
    policy = SettlementPolicy(attempts_max=1, dead_letters=False)
    leaving, staying = open_queue(harness, policy), open_queue(harness, policy)
    await leaving.take(1)
    await leaving.close()
    assert offsets_of(await staying.take(1)) == [0]


async def test_the_notes_find_room_among_too_many_headers(harness: Harness) -> None:
    own = tuple((f"h{number}", b"x" * 100) for number in range(HEADERS_MAX))
    await harness.broker.publish(ANN, "t", RecordBatch([b"a"], headers=[own]))
    queue = open_queue(harness, SettlementPolicy(attempts_max=1))
    await _use_up(harness, queue, 1)
    (letter,) = await harness.records("t.dlq")
    assert len(letter.headers) == HEADERS_MAX
    assert letter.headers[:10] == own[:10]
    assert dict(letter.headers)["x-headrace-attempts"] == b"1"


async def test_a_topic_whose_name_leaves_no_room_for_its_dead_letters_is_refused(harness: Harness) -> None:
    name = "x" * 247
    await harness.broker.create_topic(ANN, name)
    with pytest.raises(InvalidTopicName):
        open_queue(harness, topic=name)
    open_queue(harness, SettlementPolicy(dead_letters=False), topic=name)


# The end


async def test_when_the_topic_goes_the_queue_says_so(harness: Harness) -> None:
    await harness.put("a")
    queue = open_queue(harness)
    taken = await queue.take(1)
    taking = asyncio.ensure_future(queue.take(1, wait_ms=1_000))
    await turns()
    await harness.broker.delete_topic(ANN, "t")
    await harness.broker.create_topic(ANN, "t")
    with pytest.raises(UnknownTopic):
        await taking
    with pytest.raises(UnknownTopic):
        await queue.take(1)
    queue.ack(ids_of(taken))
    await queue.close()
    await let_pass(harness, 10_000)
    assert harness.broker.groups(ANN) == [], "the successor inherits no offset"
    assert await open_queue(harness).take(1) == []


@pytest.mark.parametrize(
    "policy",
    [
        SettlementPolicy(ack_timeout_ms=0),
        SettlementPolicy(in_flight_max=0),
        SettlementPolicy(credit=0),
        SettlementPolicy(backoff_ms=-1),
        SettlementPolicy(backoff_max_ms=-1),
        SettlementPolicy(attempts_max=-1),
    ],
)
async def test_a_policy_that_cannot_work_is_refused(harness: Harness, policy: SettlementPolicy) -> None:
    with pytest.raises(InvalidRequest):
        open_queue(harness, policy)


async def test_only_so_many_groups_consume_at_once() -> None:
    harness = Harness(BrokerSettings(groups_max=1))
    await harness.broker.open()
    await harness.broker.create_topic(ANN, "t")
    queue = open_queue(harness, group="one")
    with pytest.raises(LimitExceeded):
        open_queue(harness, group="two")
    await queue.close()
    await harness.broker.delete_group(ANN, "one")
    open_queue(harness, group="two")
    await harness.broker.close()
