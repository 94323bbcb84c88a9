"""Members of a group: who gets which records, and what happens when members come, go, or are slow."""

from __future__ import annotations

import asyncio
import heapq
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.broker import Delivery, Member, Mode, SettlementPolicy
from headrace.broker.groups.consumer import HANDOVER_MS, SILENCE_MS
from headrace.broker.groups.membership import CREDIT_RECORDS, PATIENCE_MS, ROUND_FAST_MS, ROUND_SLOW_MS, Credit, assign
from headrace.errors import GroupHasMembers, InvalidRequest, UnknownTopic
from headrace.limits import IN_FLIGHT_MAX
from headrace.records import RecordBatch
from tests.broker.harness import ANN, Harness, turns
from tests.broker.settling import ids_of, let_pass, offsets_of, progress_of

PARTITIONS = 4
POLICY = SettlementPolicy(ack_timeout_ms=10_000, attempts_max=0, dead_letters=False)
CHUNKS = SettlementPolicy(ack_timeout_ms=3_600_000, attempts_max=0, dead_letters=False, chunks=True)


@pytest.fixture
async def harness(harness: Harness) -> Harness:
    await harness.broker.create_topic(ANN, "t", partitions=PARTITIONS)
    return harness


def _join(harness: Harness, mode: Mode | None = "ordered", policy: SettlementPolicy = POLICY) -> Member:
    return harness.broker.join(ANN, "g", "t", policy=policy, mode=mode, start="earliest")


async def _fill(harness: Harness, count: int = 3) -> None:
    for partition in range(PARTITIONS):
        await harness.put(*(f"{partition}.{number}" for number in range(count)), partition=partition)


def _places(taken: list[Delivery]) -> list[tuple[int, int]]:
    return sorted((delivery.partition, delivery.offset) for delivery in taken)


# Assignment


@dataclass(eq=False)
class _Anyone:
    only: frozenset[int] | None = None

    def accepts(self, partition: int) -> bool:
        return self.only is None or partition in self.only


@given(st.integers(0, 40), st.lists(st.booleans(), min_size=1, max_size=30))
def test_partitions_are_spread_evenly_and_stay_where_they_are(partitions: int, comings: list[bool]) -> None:
    members: list[_Anyone] = [_Anyone()]
    owners = assign(range(partitions), members, {})
    for is_coming in comings:
        before = dict(owners)
        is_coming = is_coming or len(members) == 1
        if is_coming:
            members.append(_Anyone())
        else:
            members.pop(0)
        owners = assign(range(partitions), members, before)
        assert set(owners) == set(range(partitions))
        loads = [sum(owner is member for owner in owners.values()) for member in members]
        assert max(loads) - min(loads) <= 1
        moved = [partition for partition in before if before[partition] in members and owners[partition] is not before[partition]]
        assert len(moved) <= (partitions // len(members) + 1 if is_coming else 0), "only a newcomer takes from others"


def test_a_member_for_some_partitions_owns_no_others() -> None:
    anyone, limited = _Anyone(), _Anyone(frozenset({0}))
    assert assign(range(3), [limited, anyone], {}) == {0: limited, 1: anyone, 2: anyone}
    assert assign(range(3), [limited], {}) == {0: limited}
    assert assign(range(3), [anyone, limited], dict.fromkeys(range(3), anyone)) == {0: limited, 1: anyone, 2: anyone}


# Credit


def test_the_credit_of_a_fast_member_grows_up_to_the_limit() -> None:
    credit = Credit(CREDIT_RECORDS, 100, 0)
    for expected in (64, 100, 100):
        credit.used_up()
        credit.settled(credit.records, credit.records, ROUND_FAST_MS // 8)
        assert credit.records == expected


def test_the_credit_grows_only_if_it_was_used_up() -> None:
    credit = Credit(CREDIT_RECORDS, 100, 0)
    for _ in range(CREDIT_RECORDS):
        credit.settled(1, CREDIT_RECORDS, 1)
    assert credit.records == CREDIT_RECORDS


def test_the_credit_of_a_slow_member_shrinks_to_where_it_began() -> None:
    credit, now = Credit(CREDIT_RECORDS, 1_000, 0), 0
    for _ in range(3):
        credit.used_up()
        credit.settled(credit.records, credit.records, now)
    for expected in (128, 64, 32, 32):
        now += ROUND_SLOW_MS + 1
        credit.used_up()
        credit.settled(credit.records, credit.records, now)
        assert credit.records == expected


async def test_a_member_that_settles_many_records_at_once_gets_as_many(harness: Harness) -> None:
    await harness.broker.publish(ANN, "t", RecordBatch([b"x"] * 1_000), partition=0)
    member = _join(harness, "shared")
    taken: list[Delivery] = []
    for _ in range(2):
        while len(taken) < 100:
            taken += await member.take(1_000)
            await let_pass(harness, PATIENCE_MS)
        member.ack(ids_of(taken[:100]))
        del taken[:100]
    assert member.credit >= 128


async def test_a_member_that_is_only_slow_does_not_get_more_and_more(harness: Harness) -> None:
    await harness.broker.publish(ANN, "t", RecordBatch([b"x"] * 1_000), partition=0)
    member = _join(harness, "shared")
    held = await member.take(1_000)
    for _ in range(POLICY.ack_timeout_ms // PATIENCE_MS - 1):
        await let_pass(harness, PATIENCE_MS)
        held += await member.take(1_000)
        member.ack([held.pop(0).id])
        assert len(held) <= 2 * CREDIT_RECORDS


@pytest.mark.parametrize("mode", ["ordered", "shared"])
async def test_a_member_holds_no_more_than_its_credit(harness: Harness, mode: Mode) -> None:
    await harness.broker.publish(ANN, "t", RecordBatch([b"x"] * 2 * IN_FLIGHT_MAX), partition=0)
    member, held = _join(harness, mode), 0
    while member.credit < IN_FLIGHT_MAX:
        taken = await member.take(IN_FLIGHT_MAX)
        held = member.in_flight
        assert 0 < held <= member.credit
        assert await member.take(1) == []
        member.ack(ids_of(taken))
    assert held > CREDIT_RECORDS


@dataclass(order=True)
class _Worker:
    """Takes as much as it gets and works on one record at a time."""

    free_at: float
    number: int
    member: Member = field(compare=False)
    acks_at_once: int = field(compare=False)
    queue: list[Delivery] = field(default_factory=list, compare=False)
    finished: list[Delivery] = field(default_factory=list, compare=False)
    done: int = 0

    async def step(self, now: float) -> None:
        if self.queue:
            self.finished.append(self.queue.pop(0))
            self.done += 1
        if not self.queue or len(self.finished) >= self.acks_at_once:
            self.member.ack(ids_of(self.finished))
            self.finished.clear()
        self.queue += await self.member.take(1_000)
        self.free_at = now + 5


@pytest.mark.parametrize("head_start_ms", [0, 40])
@pytest.mark.parametrize("acks_at_once", [1, CREDIT_RECORDS])
async def test_two_members_with_5_ms_of_work_per_record_share_1000_records(harness: Harness, head_start_ms: int, acks_at_once: int) -> None:
    await harness.broker.publish(ANN, "t", RecordBatch([b"x"] * 1_000), partition=0)
    begin = float(harness.clock.now)
    workers = [_Worker(begin + number * head_start_ms, number, _join(harness, "shared"), acks_at_once) for number in range(2)]
    heapq.heapify(workers)
    while sum(worker.done for worker in workers) < 1_000:
        worker = heapq.heappop(workers)
        if worker.free_at > harness.clock.now:
            harness.clock.tick(int(worker.free_at - harness.clock.now))
        await worker.step(worker.free_at)
        heapq.heappush(workers, worker)
    assert all(400 <= worker.done <= 600 for worker in workers)


# Ordered groups


async def test_each_partition_of_an_ordered_group_goes_to_one_member_in_order(harness: Harness) -> None:
    await _fill(harness)
    one, other = _join(harness), _join(harness)
    taken = [await one.take(100), await other.take(100)]
    assert [sorted({delivery.partition for delivery in part}) for part in taken] == [one.partitions, other.partitions]
    assert sorted(one.partitions + other.partitions) == [0, 1, 2, 3] and len(one.partitions) == 2
    for part in taken:
        for partition in {delivery.partition for delivery in part}:
            assert [delivery.offset for delivery in part if delivery.partition == partition] == [0, 1, 2]


async def test_a_newcomer_waits_for_what_the_former_owner_holds(harness: Harness) -> None:
    await _fill(harness)
    one = _join(harness)
    held = await one.take(100)
    other = _join(harness)
    moved = other.partitions
    waiting = asyncio.ensure_future(other.take(100, wait_ms=10_000))
    await turns()
    assert not waiting.done(), "its partitions are still being worked on"
    await harness.put("next", partition=moved[0])
    one.ack(ids_of([delivery for delivery in held if delivery.partition == moved[0]]))
    assert _places(await waiting) == [(moved[0], 3)], "nothing is delivered twice"
    assert harness.clock.running, "and no time has passed"
    one.ack(ids_of(held))


async def test_a_newcomer_gets_its_partitions_within_a_second_if_the_former_owner_is_slow(harness: Harness) -> None:
    await _fill(harness)
    one = _join(harness)
    held = await one.take(100)
    other = _join(harness)
    waiting = asyncio.ensure_future(other.take(100, wait_ms=10_000))
    await let_pass(harness, HANDOVER_MS - 1)
    assert not waiting.done()
    await let_pass(harness, 1)
    again = await waiting
    assert _places(again) == [(partition, offset) for partition in other.partitions for offset in range(3)]
    assert {delivery.attempt for delivery in again} == {1}, "the first delivery did not fail"
    lost = [delivery for delivery in held if delivery.partition in other.partitions]
    assert not any(one.ack(ids_of(lost))), "another member has them now"
    assert HANDOVER_MS < 1_000


async def test_a_member_that_leaves_hands_over_what_it_has_not_settled_and_nothing_else(harness: Harness) -> None:
    await _fill(harness)
    one, other = _join(harness), _join(harness)
    mine = await one.take(100)
    one.ack(ids_of(mine[:4]))
    other.ack(ids_of(await other.take(100)))
    waiting = asyncio.ensure_future(other.take(100, wait_ms=10_000))
    await turns()
    assert not waiting.done()
    await one.close()
    assert _places(await waiting) == _places(mine[4:]), "at once, without a timer"
    assert other.partitions == [0, 1, 2, 3]


async def test_a_nacked_record_of_an_ordered_group_holds_back_the_ones_after_it(harness: Harness) -> None:
    await harness.put("a", "b", "c", "d", partition=0)
    member = _join(harness)
    first, second = await member.take(2)
    member.nack([second.id], delay_ms=200)
    member.nack([first.id], delay_ms=400)
    await let_pass(harness, 200)
    assert await member.take(100) == []
    await let_pass(harness, 200)
    assert offsets_of(await member.take(100)) == [0, 1, 2, 3]


async def test_a_member_that_does_not_settle_in_time_loses_its_partitions_until_it_settles(harness: Harness) -> None:
    await _fill(harness)
    slow, quick = _join(harness), _join(harness)
    held = await slow.take(100)
    quick.ack(ids_of(await quick.take(100)))
    waiting = asyncio.ensure_future(quick.take(100, wait_ms=60_000))
    await let_pass(harness, POLICY.ack_timeout_ms)
    taken = await waiting
    assert _places(taken) == _places(held)
    assert quick.partitions == [0, 1, 2, 3]
    assert [member.is_stalled for member in harness.broker.members(ANN, "g")] == [True, False]
    assert await slow.take(100) == [] and quick.partitions == [0, 1, 2, 3]
    slow.ack(ids_of(held))
    assert len(slow.partitions) == len(quick.partitions) == 2
    quick.ack(ids_of(taken))


async def test_a_member_that_asks_for_nothing_loses_its_partitions_until_it_asks(harness: Harness) -> None:
    silent, eager = _join(harness), _join(harness)
    waiting = asyncio.ensure_future(eager.take(100, wait_ms=60_000))
    await let_pass(harness, SILENCE_MS)
    assert len(silent.partitions) == 2, "there is nothing to take"
    await harness.put("a", partition=silent.partitions[0])
    await let_pass(harness, 1_000)
    assert len(await waiting) == 1 and eager.partitions == [0, 1, 2, 3]
    assert await silent.take(1) == []
    assert len(silent.partitions) == 2


async def test_a_member_that_works_longer_than_that_keeps_its_partitions(harness: Harness) -> None:
    patient = replace(POLICY, ack_timeout_ms=10 * SILENCE_MS)
    await _fill(harness)
    busy, eager = _join(harness, policy=patient), _join(harness, policy=patient)
    held = await busy.take(1)
    eager.ack(ids_of(await eager.take(100)))
    waiting = asyncio.ensure_future(eager.take(100, wait_ms=60_000))
    await let_pass(harness, 2 * SILENCE_MS)
    assert len(busy.partitions) == 2 and all(busy.ack(ids_of(held)))
    assert await waiting == []


async def test_a_single_member_keeps_its_partitions_however_slow_it_is(harness: Harness) -> None:
    await harness.put("a", partition=0)
    member = _join(harness)
    (first,) = await member.take(1)
    await let_pass(harness, POLICY.ack_timeout_ms)
    (again,) = await member.take(1)
    assert again.offset == first.offset and member.partitions == [0, 1, 2, 3]


async def test_more_members_than_partitions_leaves_some_in_reserve(harness: Harness) -> None:
    await _fill(harness)
    members = [_join(harness) for _ in range(PARTITIONS + 2)]
    assert [len(member.partitions) for member in members] == [1, 1, 1, 1, 0, 0]
    assert await members[-1].take(1) == []
    members[0].close()
    assert [len(member.partitions) for member in members[1:]] == [1, 1, 1, 1, 0]


# Shared groups


async def test_a_shared_group_hands_each_record_to_one_member(harness: Harness) -> None:
    await _fill(harness, 20)
    members = [_join(harness, "shared") for _ in range(3)]
    taken = [delivery for _ in range(10) for member in members for delivery in await member.take(4)]
    assert _places(taken) == [(partition, offset) for partition in range(PARTITIONS) for offset in range(20)]


async def test_arrivals_go_round_the_members_that_wait(harness: Harness) -> None:
    members = [_join(harness, "shared") for _ in range(3)]
    counts = [0, 0, 0]

    async def work(number: int) -> None:
        while taken := await members[number].take(1, wait_ms=10_000):
            counts[number] += len(taken)
            members[number].ack(ids_of(taken))

    tasks = [asyncio.ensure_future(work(number)) for number in range(3)]
    await turns()
    for number in range(30):
        await harness.put(f"{number}", partition=0)
        await turns()
    assert counts == [10, 10, 10]
    await let_pass(harness, 10_000)
    await asyncio.gather(*tasks)


async def test_a_member_that_returns_to_an_empty_group_gets_what_was_not_settled(harness: Harness) -> None:
    await harness.put("a", "b", "c", "d", partition=0)
    member = _join(harness, "shared")
    taken = await member.take(3)
    member.ack([taken[1].id])
    await member.close()
    assert await progress_of(harness) == 0, "the lowest unsettled offset"
    assert offsets_of(await _join(harness, "shared").take(100)) == [0, 2, 3]


async def test_what_an_empty_group_has_not_settled_is_forgotten_in_the_end(harness: Harness) -> None:
    await harness.put("a", "b", partition=0)
    member = _join(harness, "shared")
    taken = await member.take(2)
    member.ack([taken[1].id])
    await member.close()
    await let_pass(harness, 600_000)
    assert offsets_of(await _join(harness, "shared").take(100)) == [0, 1], "from the committed offset on"


# Chunks


async def test_a_chunk_is_settled_as_a_whole(harness: Harness) -> None:
    await harness.put("a", "b", "c", partition=0)
    member = _join(harness, "shared", CHUNKS)
    chunk = await member.take_chunk(100, 1_000)
    assert chunk is not None and chunk.values == [b"a", b"b", b"c"] and len(chunk.ids) == 1
    assert member.in_flight == 3 and await member.take_chunk(100, 1_000) is None
    assert await progress_of(harness) == 0
    member.ack(chunk.ids)
    assert await progress_of(harness) == 3


async def test_a_chunk_joins_adjacent_batches(harness: Harness) -> None:
    for value in "abc":
        await harness.put(value, partition=0)
    member = _join(harness, "shared", CHUNKS)
    chunk = await member.take_chunk(2, 1_000)
    assert chunk is not None and chunk.values == [b"a", b"b"] and len(chunk.ids) == 1
    rest = await member.take_chunk(2, 1_000)
    assert rest is not None and rest.values == [b"c"]
    member.ack(rest.ids)
    assert await progress_of(harness) == 0
    again = _join(harness, "shared", CHUNKS)
    await member.close()
    chunk = await again.take_chunk(100, 1_000)
    assert chunk is not None and chunk.values == [b"a", b"b"], "the records of a lost chunk are delivered again"
    again.ack(chunk.ids)
    assert await progress_of(harness) == 3


async def test_a_member_without_others_takes_chunks_beyond_its_credit(harness: Harness) -> None:
    await harness.put(*("x" for _ in range(10 * CREDIT_RECORDS)), partition=0)
    alone = _join(harness, "shared", CHUNKS)
    chunk = await alone.take_chunk(5 * CREDIT_RECORDS, 1_000_000)
    assert chunk is not None and len(chunk.values) == 5 * CREDIT_RECORDS
    other = _join(harness, "shared", CHUNKS)
    assert await alone.take_chunk(CREDIT_RECORDS, 1_000_000) is None, "it holds more than its credit"
    chunk = await other.take_chunk(10 * CREDIT_RECORDS, 1_000_000)
    assert chunk is not None and len(chunk.values) == CREDIT_RECORDS


async def test_an_ack_does_not_wake_a_member_that_waits_for_records_with_credit_left(harness: Harness) -> None:
    await harness.put("a", partition=0)
    member = _join(harness, "shared", CHUNKS)
    chunk = await member.take_chunk(10, 1_000)
    assert chunk is not None
    checks: list[str] = []
    member.guard(ANN, lambda who: checks.append(who.name))
    waiting = asyncio.ensure_future(member.take_chunk(10, 1_000, wait_ms=60_000))
    await turns()
    looks = len(checks)
    member.ack(chunk.ids)
    await turns()
    assert len(checks) == looks == 1
    await harness.put("b", partition=0)
    found = await waiting
    assert found is not None and found.values == [b"b"]


@pytest.mark.parametrize("mode", ["ordered", "shared"])
async def test_the_records_of_a_lost_chunk_go_to_members_of_any_kind(harness: Harness, mode: Mode) -> None:
    await harness.put(*"abcdef", partition=0)
    chunked = _join(harness, mode, CHUNKS)
    first, second = await chunked.take_chunk(2, 1_000), await chunked.take_chunk(2, 1_000)
    assert first is not None and second is not None
    chunked.ack(second.ids)
    single = _join(harness, mode)
    await chunked.close()
    (a,) = await single.take(1)
    assert (a.offset, a.value) == (0, b"a")
    single.ack([a.id])
    again = _join(harness, mode, CHUNKS)
    single.close()
    chunk = await again.take_chunk(100, 1_000)
    assert chunk is not None and chunk.values == [b"b", b"e", b"f"]
    again.ack(chunk.ids)
    assert await progress_of(harness) == 6


async def test_expired_records_of_a_chunk_are_left_out(harness: Harness) -> None:
    now = harness.clock.now
    await harness.broker.publish(ANN, "t", RecordBatch([b"a", b"b", b"c"], expiries=[now + 5, 0, now + 5]), partition=0)
    harness.clock.tick(5)
    member = _join(harness, "shared", CHUNKS)
    chunk = await member.take_chunk(100, 1_000)
    assert chunk is not None and chunk.values == [b"b"]
    member.ack(chunk.ids)
    assert await progress_of(harness) == 3


# The mode of a group


async def test_a_member_without_a_mode_takes_that_of_the_group(harness: Harness) -> None:
    shared = _join(harness, "shared")
    assert _join(harness, None).mode == "shared"
    with pytest.raises(InvalidRequest, match="is shared"):
        _join(harness, "ordered")
    await shared.close()


async def test_the_first_member_decides_and_ordered_is_the_default(harness: Harness) -> None:
    member = _join(harness, None)
    assert member.mode == "ordered"
    await member.close()
    shared = harness.broker.join(ANN, "g", "t", policy=POLICY, default_mode="shared")
    assert shared.mode == "shared"
    await shared.close()
    assert _join(harness, "ordered").mode == "ordered"


# Offsets that others commit


async def test_a_group_continues_where_someone_else_commits(harness: Harness) -> None:
    await harness.put(*"abcdef", partition=0)
    member = _join(harness)
    held = await member.take(3)
    await harness.broker.commit(ANN, "g", {("t", 0): 2})
    assert member.ack(ids_of(held)) == [False, False, True], "those below the offset are settled"
    await harness.broker.commit(ANN, "g", {("t", 0): 5})
    taken = await member.take(100)
    assert offsets_of(taken) == [5]
    await harness.broker.commit(ANN, "g", {("t", 0): 1})
    assert member.ack(ids_of(taken)) == [False], "the group was moved back"
    assert offsets_of(await member.take(100)) == [1, 2, 3, 4, 5]


async def test_its_own_commits_do_not_move_a_group(harness: Harness) -> None:
    await harness.put(*"abc", partition=0)
    member = _join(harness)
    first, second, third = await member.take(3)
    member.ack([first.id, third.id])
    assert await progress_of(harness) == 1
    assert member.in_flight == 1 and member.ack([second.id]) == [True]
    assert await progress_of(harness) == 3


async def test_a_group_with_members_is_neither_reset_nor_deleted(harness: Harness) -> None:
    await harness.put("a", partition=0)
    member = _join(harness)
    with pytest.raises(GroupHasMembers, match="1 active member"):
        await harness.broker.reset_group(ANN, "g", {("t", 0): 0})
    with pytest.raises(GroupHasMembers, match="1 active member"):
        await harness.broker.delete_group(ANN, "g")
    member.ack(ids_of(await member.take(1)))
    await harness.broker.reset_group(ANN, "g", {("t", 0): 0}, force=True)
    assert offsets_of(await member.take(1)) == [0]
    waiting = asyncio.ensure_future(member.take(1, wait_ms=10_000))
    await turns()
    await harness.broker.delete_group(ANN, "g", force=True)
    with pytest.raises(InvalidRequest, match="was deleted"):
        await waiting
    assert harness.broker.groups(ANN) == [] and harness.broker.members(ANN, "g") == []
    await member.close()


# Description


async def test_members_are_described(harness: Harness) -> None:
    await _fill(harness)
    one, _ = _join(harness), _join(harness)
    await one.take(5)
    first, second = harness.broker.members(ANN, "g")
    assert (first.topic, first.protocol, first.user, first.mode) == ("t", "internal", "ann", "ordered")
    assert (first.partitions, first.unsettled, first.credit) == (one.partitions, 5, CREDIT_RECORDS)
    assert second.unsettled == 0 and not second.is_stalled


async def test_a_deleted_topic_ends_its_members(harness: Harness) -> None:
    member = _join(harness)
    await harness.broker.delete_topic(ANN, "t")
    with pytest.raises(UnknownTopic):
        await member.take(1)
    assert harness.broker.members(ANN, "g") == []
