"""A change of the rules reaches open connections, cursors, queues, long polls and transactions."""

from __future__ import annotations

import asyncio

import pytest

from headrace.access.administration import Caller
from headrace.access.policy import Effect, Grant, Match, Rule, decide
from headrace.broker import Action, Batch, Principal, SettlementPolicy
from headrace.errors import BrokerError, NotAuthorized
from headrace.records import Record, RecordBatch
from tests.access.harness import ADMIN, PASSWORD, Guarded, guarded
from tests.broker.harness import turns

ROOT = ADMIN.who


def grant(kind: str, name: str, *actions: Action) -> Grant:
    return Grant(frozenset(actions), kind, Match.LITERAL, name)


async def reader(harness: Guarded) -> Principal:
    """Create a user that may read `t` for group `g`, by rules only."""
    await harness.broker.create_topic(ROOT, "t")
    who = await harness.user("ann")
    await harness.administration.add_rule(ADMIN, Rule("user:ann", Effect.ALLOW, grant("topic", "t", Action.READ, Action.PUBLISH)))
    await harness.administration.add_rule(ADMIN, Rule("user:ann", Effect.ALLOW, grant("group", "g", Action.COMMIT)))
    return who


async def take_away(harness: Guarded, how: str) -> None:
    match how:
        case "rule removed":
            await harness.administration.remove_rule(
                ADMIN, Rule("user:ann", Effect.ALLOW, grant("topic", "t", Action.READ, Action.PUBLISH))
            )
        case "denied":
            await harness.administration.add_rule(ADMIN, Rule("user:ann", Effect.DENY, grant("topic", "t", Action.READ, Action.PUBLISH)))
        case "disabled":
            await harness.administration.update_user(ADMIN, "ann", [], enabled=False)
        case "deleted":
            await harness.administration.delete_user(ADMIN, "ann")
        case "deleted and created again":
            await harness.administration.delete_user(ADMIN, "ann")
            harness.clock.tick(1)
            await harness.administration.create_user(ADMIN, "ann", PASSWORD, ["consumer", "producer"])
        case "password changed":
            await harness.administration.change_password(ADMIN, "ann", "another password", "")


WAYS = ["rule removed", "denied", "disabled", "deleted", "deleted and created again", "password changed"]


@pytest.mark.parametrize("how", WAYS)
async def test_an_open_cursor_ends_and_delivers_nothing_more(how: str) -> None:
    async with guarded() as harness:
        who = await reader(harness)
        got: list[bytes | None] = []
        failures: list[BrokerError] = []

        def deliver(batches: list[Batch]) -> None:
            got.extend(value for batch in batches for value in batch.values())

        harness.broker.cursor(who, "t", 0, 0, deliver, credit_bytes=1 << 20, failed=failures.append)
        await harness.broker.publish(ROOT, "t", RecordBatch([b"before"]))
        await turns()
        await take_away(harness, how)
        await harness.broker.publish(ROOT, "t", RecordBatch([b"after"]))
        await turns()
        assert got == [b"before"]
        assert len(failures) == 1 and isinstance(failures[0], NotAuthorized)


async def test_a_cursor_that_is_still_allowed_does_not_notice() -> None:
    async with guarded() as harness:
        who = await reader(harness)
        got: list[int] = []
        harness.broker.cursor(who, "t", 0, 0, lambda batches: got.append(sum(map(len, batches))), credit_bytes=1 << 20)
        await harness.user("bob", "consumer")
        await harness.broker.publish(ROOT, "t", RecordBatch([b"after"]))
        await turns()
        assert got == [1]


@pytest.mark.parametrize("how", WAYS)
async def test_an_open_connection_may_publish_and_fetch_no_more(how: str) -> None:
    async with guarded() as harness:
        who = await reader(harness)
        await harness.broker.publish(who, "t", RecordBatch([b"x"]))
        await take_away(harness, how)
        with pytest.raises(NotAuthorized):
            harness.broker.publish(who, "t", RecordBatch([b"x"]))
        with pytest.raises(NotAuthorized):
            await harness.broker.fetch(who, "t", 0, 0, bytes_max=1)


@pytest.mark.parametrize("how", WAYS)
async def test_a_long_poll_that_outlives_its_permission_brings_nothing(how: str) -> None:
    async with guarded() as harness:
        who = await reader(harness)
        poll = asyncio.ensure_future(harness.broker.fetch(who, "t", 0, 0, bytes_max=100, wait_ms=10_000))
        await turns()
        await take_away(harness, how)
        await harness.broker.publish(ROOT, "t", RecordBatch([b"secret"]))
        with pytest.raises(NotAuthorized):
            await poll


@pytest.mark.parametrize("how", WAYS)
async def test_a_settlement_queue_hands_out_nothing_more(how: str) -> None:
    async with guarded() as harness:
        who = await reader(harness)
        queue = harness.broker.join(who, "g", "t", policy=SettlementPolicy(), start="earliest")
        await harness.broker.publish(ROOT, "t", RecordBatch([b"one"]))
        assert [delivery.value for delivery in await queue.take(10)] == [b"one"]
        waiting = asyncio.ensure_future(queue.take(10, wait_ms=10_000))
        await turns()
        await take_away(harness, how)
        with pytest.raises(NotAuthorized):
            await waiting
        await harness.broker.publish(ROOT, "t", RecordBatch([b"two"]))
        with pytest.raises(NotAuthorized):
            await queue.take(10)
        await queue.close()


@pytest.mark.parametrize("how", WAYS)
async def test_an_open_transaction_cannot_be_committed_any_more(how: str) -> None:
    async with guarded() as harness:
        who = await reader(harness)
        await harness.administration.add_rule(ADMIN, Rule("user:ann", Effect.ALLOW, Grant(frozenset({Action.PUBLISH}), "transaction")))
        transaction = harness.broker.begin(who, id="x")
        transaction.publish("t", RecordBatch([b"x"]))
        await take_away(harness, how)
        with pytest.raises(NotAuthorized):
            await transaction.commit()
        assert harness.engine.bounds("t", 0).end == 0
        transaction.abort()


@pytest.mark.parametrize("how", ["rule removed", "denied", "disabled", "deleted"])
async def test_a_delayed_message_whose_owner_may_not_publish_when_it_is_due_becomes_a_dead_letter(how: str) -> None:
    async with guarded() as harness:
        who = await reader(harness)
        await harness.broker.publish_delayed(who, "t", b"too late", delay_ms=100, key=b"k", headers=(("h", b"1"),))
        await harness.broker.publish_delayed(ROOT, "t", b"in time", delay_ms=100)
        await take_away(harness, how)
        harness.clock.tick(100)
        await turns()
        harness.clock.tick(50)  # the first dead letter of a topic waits until its topic exists
        await turns()
        assert [record.value for record in await everything(harness, "t")] == [b"in time"]
        (letter,) = await harness.broker.dead_letters(ROOT, "t", records_max=10)
        assert (letter.value, letter.key, letter.headers) == (b"too late", b"k", (("h", b"1"),))
        assert (letter.reason, letter.error) == ("rejected", "ann may not publish topic 't'")
        assert harness.broker.delayed(ROOT) == []


@pytest.mark.parametrize("how", ["deleted and created again", "password changed"])
async def test_a_delayed_message_is_its_owners_by_name(how: str) -> None:
    async with guarded() as harness:
        who = await reader(harness)
        await harness.broker.publish_delayed(who, "t", b"in time", delay_ms=100)
        await take_away(harness, how)
        harness.clock.tick(100)
        await turns()
        assert [record.value for record in await everything(harness, "t")] == [b"in time"]


async def test_what_is_due_at_the_start_waits_for_the_rules() -> None:
    async with guarded() as harness:
        who = await reader(harness)
        await harness.broker.publish_delayed(who, "t", b"x", delay_ms=100)
        harness.clock.forget_timers()
        harness.clock.now += 1_000
        again = Guarded(engine=harness.engine, clock=harness.clock)
        await again.broker.open()
        harness.clock.tick(10)
        await turns()
        assert len(again.broker._schedule._waiting) == 1, "no request is denied before the rules are loaded"
        await again.access.open()
        harness.clock.tick(100)
        await turns()
        assert [record.value for record in await everything(again, "t")] == [b"x"]
        again.passwords.close()


async def everything(harness: Guarded, topic: str) -> list[Record]:
    batches = await harness.engine.read(topic, 0, 0, bytes_max=1 << 20)
    return [record for batch in batches for record in batch.records()]


async def test_a_key_that_expires_ends_what_it_had_opened() -> None:
    async with guarded() as harness:
        await reader(harness)
        made = await harness.administration.create_key(ADMIN, "ann", [], expires_ms=harness.clock.now + 60_000)
        who = harness.access.verify_key(made.text, Caller(Principal("anonymous", "blipmq"), "a"))
        assert who is not None
        failures: list[BrokerError] = []
        harness.broker.cursor(who, "t", 0, 0, lambda _: None, credit_bytes=1, failed=failures.append)
        await harness.broker.publish(who, "t", RecordBatch([b"x"]))
        harness.clock.tick(59_999)
        assert failures == []
        harness.clock.tick(1)
        assert len(failures) == 1
        with pytest.raises(NotAuthorized):
            harness.broker.publish(who, "t", RecordBatch([b"x"]))


async def test_a_revoked_key_ends_at_once_and_its_owner_s_other_keys_stay_valid() -> None:
    async with guarded() as harness:
        await reader(harness)
        caller = Caller(Principal("anonymous", "blipmq"), "a")
        made = [await harness.administration.create_key(ADMIN, "ann", []) for _ in range(2)]
        first, second = (harness.access.verify_key(key.text, caller) for key in made)
        assert first is not None and second is not None
        await harness.administration.revoke_key(ADMIN, made[0].id)
        with pytest.raises(NotAuthorized):
            harness.broker.publish(first, "t", RecordBatch([b"x"]))
        await harness.broker.publish(second, "t", RecordBatch([b"x"]))


async def test_a_change_counts_even_if_its_caller_was_cancelled() -> None:
    async with guarded() as harness:
        who = await reader(harness)
        harness.engine.hold()
        change = asyncio.ensure_future(take_away(harness, "denied"))
        await turns()
        change.cancel()
        await turns()
        await_publish = harness.broker.publish(who, "t", RecordBatch([b"not yet denied"]))
        harness.engine.let_go()
        await await_publish
        await turns()
        with pytest.raises(NotAuthorized):
            harness.broker.publish(who, "t", RecordBatch([b"x"]))


async def test_the_rules_are_asked_once_however_much_is_published(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cached answers cost a publish one dictionary lookup, with rules or without."""
    async with guarded() as harness:
        who = await reader(harness)
        asked: list[Action] = []

        def counting(*question: object) -> bool:
            asked.append(question[2])  # type: ignore[arg-type]  # (policy, who, action, resource)
            return decide(*question)  # type: ignore[arg-type]

        monkeypatch.setattr("headrace.access.access.decide", counting)
        for _ in range(1_000):
            await harness.broker.publish(who, "t", RecordBatch([b"x"]))
        assert asked == [Action.PUBLISH]
