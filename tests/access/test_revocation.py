"""A change of the rules reaches what is already open: connections, cursors, queues, long polls, transactions."""

from __future__ import annotations

import asyncio

import pytest

from headrace.access.administration import Caller
from headrace.access.policy import Effect, Grant, Match, Rule, decide
from headrace.broker import Action, Batch, Principal, SettlementPolicy
from headrace.errors import BrokerError, NotAuthorized
from headrace.records import Record, RecordBatch
from tests.access.stand import ADMIN, PASSWORD, Guarded, guarded
from tests.broker.stand import turns

ROOT = ADMIN.who


def grant(kind: str, name: str, *actions: Action) -> Grant:
    return Grant(frozenset(actions), kind, Match.LITERAL, name)


async def reader(stand: Guarded) -> Principal:
    """Somebody who may read `t` for group `g`, by rules alone."""
    await stand.broker.create_topic(ROOT, "t")
    who = await stand.user("ann")
    await stand.administration.add_rule(ADMIN, Rule("user:ann", Effect.ALLOW, grant("topic", "t", Action.READ, Action.PUBLISH)))
    await stand.administration.add_rule(ADMIN, Rule("user:ann", Effect.ALLOW, grant("group", "g", Action.COMMIT)))
    return who


async def take_away(stand: Guarded, how: str) -> None:
    match how:
        case "rule removed":
            await stand.administration.remove_rule(ADMIN, Rule("user:ann", Effect.ALLOW, grant("topic", "t", Action.READ, Action.PUBLISH)))
        case "denied":
            await stand.administration.add_rule(ADMIN, Rule("user:ann", Effect.DENY, grant("topic", "t", Action.READ, Action.PUBLISH)))
        case "disabled":
            await stand.administration.update_user(ADMIN, "ann", [], enabled=False)
        case "deleted":
            await stand.administration.delete_user(ADMIN, "ann")
        case "deleted and made anew":
            await stand.administration.delete_user(ADMIN, "ann")
            stand.clock.tick(1)
            await stand.administration.create_user(ADMIN, "ann", PASSWORD, ["consumer", "producer"])
        case "password changed":
            await stand.administration.change_password(ADMIN, "ann", "another password", "")


WAYS = ["rule removed", "denied", "disabled", "deleted", "deleted and made anew", "password changed"]


@pytest.mark.parametrize("how", WAYS)
async def test_an_open_cursor_ends_and_delivers_nothing_more(how: str) -> None:
    async with guarded() as stand:
        who = await reader(stand)
        got: list[bytes | None] = []
        failures: list[BrokerError] = []

        def deliver(batches: list[Batch]) -> None:
            got.extend(value for batch in batches for value in batch.values())

        stand.broker.cursor(who, "t", 0, 0, deliver, credit_bytes=1 << 20, failed=failures.append)
        await stand.broker.publish(ROOT, "t", RecordBatch([b"before"]))
        await turns()
        await take_away(stand, how)
        await stand.broker.publish(ROOT, "t", RecordBatch([b"after"]))
        await turns()
        assert got == [b"before"]
        assert len(failures) == 1 and isinstance(failures[0], NotAuthorized)


async def test_a_cursor_that_is_still_allowed_does_not_notice() -> None:
    async with guarded() as stand:
        who = await reader(stand)
        got: list[int] = []
        stand.broker.cursor(who, "t", 0, 0, lambda batches: got.append(sum(map(len, batches))), credit_bytes=1 << 20)
        await stand.user("bob", "consumer")
        await stand.broker.publish(ROOT, "t", RecordBatch([b"after"]))
        await turns()
        assert got == [1]


@pytest.mark.parametrize("how", WAYS)
async def test_an_open_connection_may_publish_and_fetch_no_more(how: str) -> None:
    async with guarded() as stand:
        who = await reader(stand)
        await stand.broker.publish(who, "t", RecordBatch([b"x"]))
        await take_away(stand, how)
        with pytest.raises(NotAuthorized):
            stand.broker.publish(who, "t", RecordBatch([b"x"]))
        with pytest.raises(NotAuthorized):
            await stand.broker.fetch(who, "t", 0, 0, bytes_max=1)


@pytest.mark.parametrize("how", WAYS)
async def test_a_long_poll_that_outlives_its_permission_brings_nothing(how: str) -> None:
    async with guarded() as stand:
        who = await reader(stand)
        poll = asyncio.ensure_future(stand.broker.fetch(who, "t", 0, 0, bytes_max=100, wait_ms=10_000))
        await turns()
        await take_away(stand, how)
        await stand.broker.publish(ROOT, "t", RecordBatch([b"secret"]))
        with pytest.raises(NotAuthorized):
            await poll


@pytest.mark.parametrize("how", WAYS)
async def test_a_settlement_queue_hands_out_nothing_more(how: str) -> None:
    async with guarded() as stand:
        who = await reader(stand)
        queue = stand.broker.queue(who, "g", "t", policy=SettlementPolicy(), start="earliest")
        await stand.broker.publish(ROOT, "t", RecordBatch([b"one"]))
        assert [delivery.value for delivery in await queue.take(10)] == [b"one"]
        waiting = asyncio.ensure_future(queue.take(10, wait_ms=10_000))
        await turns()
        await take_away(stand, how)
        with pytest.raises(NotAuthorized):
            await waiting
        await stand.broker.publish(ROOT, "t", RecordBatch([b"two"]))
        with pytest.raises(NotAuthorized):
            await queue.take(10)
        await queue.close()


@pytest.mark.parametrize("how", WAYS)
async def test_an_open_transaction_cannot_be_committed_any_more(how: str) -> None:
    async with guarded() as stand:
        who = await reader(stand)
        await stand.administration.add_rule(ADMIN, Rule("user:ann", Effect.ALLOW, Grant(frozenset({Action.PUBLISH}), "transaction")))
        transaction = stand.broker.begin(who, id="x")
        transaction.publish("t", RecordBatch([b"x"]))
        await take_away(stand, how)
        with pytest.raises(NotAuthorized):
            await transaction.commit()
        assert stand.engine.bounds("t", 0).end == 0
        transaction.abort()


@pytest.mark.parametrize("how", ["rule removed", "denied", "disabled", "deleted"])
async def test_a_delayed_message_whose_owner_may_not_publish_when_it_is_due_becomes_a_dead_letter(how: str) -> None:
    async with guarded() as stand:
        who = await reader(stand)
        await stand.broker.publish_delayed(who, "t", b"too late", delay_ms=100, key=b"k", headers=(("h", b"1"),))
        await stand.broker.publish_delayed(ROOT, "t", b"in time", delay_ms=100)
        await take_away(stand, how)
        stand.clock.tick(100)
        await turns()
        stand.clock.tick(50)  # the first dead letter of a topic waits until there is a place for it
        await turns()
        assert [record.value for record in await everything(stand, "t")] == [b"in time"]
        (letter,) = await stand.broker.dead_letters(ROOT, "t", records_max=10)
        assert (letter.value, letter.key, letter.headers) == (b"too late", b"k", (("h", b"1"),))
        assert (letter.reason, letter.error) == ("rejected", "ann may not publish topic 't'")
        assert stand.broker.delayed(ROOT) == []


@pytest.mark.parametrize("how", ["deleted and made anew", "password changed"])
async def test_a_delayed_message_is_its_owners_by_name(how: str) -> None:
    async with guarded() as stand:
        who = await reader(stand)
        await stand.broker.publish_delayed(who, "t", b"in time", delay_ms=100)
        await take_away(stand, how)
        stand.clock.tick(100)
        await turns()
        assert [record.value for record in await everything(stand, "t")] == [b"in time"]


async def test_what_is_due_at_the_start_waits_for_the_rules() -> None:
    async with guarded() as stand:
        who = await reader(stand)
        await stand.broker.publish_delayed(who, "t", b"x", delay_ms=100)
        stand.clock.forget_timers()
        stand.clock.now += 1_000
        again = Guarded(engine=stand.engine, clock=stand.clock)
        await again.broker.open()
        stand.clock.tick(10)
        await turns()
        assert len(again.broker._schedule._waiting) == 1, "nobody is refused because nobody has looked"
        await again.access.open()
        stand.clock.tick(100)
        await turns()
        assert [record.value for record in await everything(again, "t")] == [b"x"]
        again.passwords.close()


async def everything(stand: Guarded, topic: str) -> list[Record]:
    batches = await stand.engine.read(topic, 0, 0, bytes_max=1 << 20)
    return [record for batch in batches for record in batch.records()]


async def test_a_key_that_expires_ends_what_it_had_opened() -> None:
    async with guarded() as stand:
        await reader(stand)
        made = await stand.administration.create_key(ADMIN, "ann", [], expires_ms=stand.clock.now + 60_000)
        who = stand.access.verify_key(made.text, Caller(Principal("anonymous", "blipmq"), "a"))
        assert who is not None
        failures: list[BrokerError] = []
        stand.broker.cursor(who, "t", 0, 0, lambda _: None, credit_bytes=1, failed=failures.append)
        await stand.broker.publish(who, "t", RecordBatch([b"x"]))
        stand.clock.tick(59_999)
        assert failures == []
        stand.clock.tick(1)
        assert len(failures) == 1
        with pytest.raises(NotAuthorized):
            stand.broker.publish(who, "t", RecordBatch([b"x"]))


async def test_a_revoked_key_ends_at_once_and_its_owner_s_other_keys_go_on() -> None:
    async with guarded() as stand:
        await reader(stand)
        caller = Caller(Principal("anonymous", "blipmq"), "a")
        made = [await stand.administration.create_key(ADMIN, "ann", []) for _ in range(2)]
        first, second = (stand.access.verify_key(key.text, caller) for key in made)
        assert first is not None and second is not None
        await stand.administration.revoke_key(ADMIN, made[0].id)
        with pytest.raises(NotAuthorized):
            stand.broker.publish(first, "t", RecordBatch([b"x"]))
        await stand.broker.publish(second, "t", RecordBatch([b"x"]))


async def test_a_change_counts_even_if_whoever_made_it_has_gone_away() -> None:
    async with guarded() as stand:
        who = await reader(stand)
        stand.engine.hold()
        change = asyncio.ensure_future(take_away(stand, "denied"))
        await turns()
        change.cancel()
        await turns()
        await_publish = stand.broker.publish(who, "t", RecordBatch([b"not yet denied"]))
        stand.engine.let_go()
        await await_publish
        await turns()
        with pytest.raises(NotAuthorized):
            stand.broker.publish(who, "t", RecordBatch([b"x"]))


async def test_the_rules_are_asked_once_however_much_is_published(monkeypatch: pytest.MonkeyPatch) -> None:
    """That is why they cost a publish nothing: from the second on it is one look into a dictionary, with rules or without."""
    async with guarded() as stand:
        who = await reader(stand)
        asked: list[Action] = []

        def counting(*question: object) -> bool:
            asked.append(question[2])  # type: ignore[arg-type]  # (policy, who, action, resource)
            return decide(*question)  # type: ignore[arg-type]

        monkeypatch.setattr("headrace.access.access.decide", counting)
        for _ in range(1_000):
            await stand.broker.publish(who, "t", RecordBatch([b"x"]))
        assert asked == [Action.PUBLISH]
