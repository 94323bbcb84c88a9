"""Users, roles, rules and keys: what changes, what cannot, what survives, and that every change has its line in the audit log."""

from __future__ import annotations

import asyncio
import inspect

import pytest

from headrace.access.access import AccessSettings, Mode
from headrace.access.administration import Administration, Caller, TopicAcl
from headrace.access.audit import TOPIC, Found, Noted, Query
from headrace.access.policy import Effect, Grant, Match, Rule
from headrace.broker import Action, Principal, Resource
from headrace.errors import (
    BrokerError,
    DiskFull,
    EntryExists,
    InvalidRequest,
    InvalidTopicName,
    LoginFailed,
    NoSuchEntry,
    NotAuthorized,
    UnknownTopic,
)
from headrace.limits import AUDIT_EVENTS_WAITING_MAX, AUDIT_QUERY_EVENTS_MAX, SCOPES_PER_KEY_MAX
from headrace.records import RecordBatch
from tests.access.stand import ADMIN, ADMIN_PASSWORD, PASSWORD, Guarded, guarded
from tests.broker.stand import turns

READ = frozenset({Action.READ})
ALLOW = Rule("user:ann", Effect.ALLOW, Grant(READ, "topic", Match.LITERAL, "t"))


async def found(stand: Guarded, **query: object) -> list[Noted]:
    return (await stand.administration.audit(ADMIN, Query(**query))).events  # type: ignore[arg-type]  # names of its fields


async def test_everything_survives_a_restart() -> None:
    async with guarded() as stand:
        await stand.administration.put_role(ADMIN, "clerk", [Grant(READ, "topic", Match.PREFIX, "orders")], "reads orders")
        await stand.administration.create_user(ADMIN, "ann", PASSWORD, ["clerk"])
        await stand.administration.add_rule(ADMIN, ALLOW)
        key = await stand.administration.create_key(ADMIN, "ann", [Grant(READ)], description="for the lorry")
        again = Guarded(engine=stand.engine, clock=stand.clock)
        assert await again.access.open() is None
        assert again.access.policy == stand.access.policy
        who = await again.log_in("ann")
        assert again.access.authorize(who, Action.READ, Resource("topic", "orders.eu"))
        assert again.access.authorize(who, Action.READ, Resource("topic", "t"))
        assert again.access.verify_key(key.text, Caller(Principal("anonymous", "blipmq"))) is not None
        await again.access.close()


@pytest.mark.parametrize("name", ["", "anonymous", "*", " ann", "ann ", "a\nb", "a\0b", "x" * 250, "cafe\u0301"])
async def test_a_name_that_could_be_mistaken_is_refused(name: str) -> None:
    async with guarded() as stand:
        with pytest.raises(InvalidRequest):
            await stand.administration.create_user(ADMIN, name, PASSWORD, [])
        if name != "anonymous":
            with pytest.raises(InvalidRequest):
                await stand.administration.put_role(ADMIN, name, [], "")


async def test_users_are_made_once_even_if_asked_for_twice_at_the_same_time() -> None:
    async with guarded() as stand:
        made = await asyncio.gather(
            *(stand.administration.create_user(ADMIN, "ann", f"password {n}", []) for n in range(5)), return_exceptions=True
        )
        assert sum(isinstance(outcome, EntryExists) for outcome in made) == 4
        with pytest.raises(NoSuchEntry, match='role "clerk" not found'):
            await stand.administration.create_user(ADMIN, "bob", PASSWORD, ["clerk"])


async def test_there_is_always_somebody_who_can_administer() -> None:
    async with guarded() as stand:
        other = Caller(await stand.user("ann", "admin"))
        with pytest.raises(InvalidRequest, match="cannot delete your own account"):
            await stand.administration.delete_user(ADMIN, "admin")
        await stand.administration.update_user(other, "admin", ["admin"], enabled=False)
        for change in (
            stand.administration.update_user(other, "ann", ["admin"], enabled=False),
            stand.administration.update_user(other, "ann", ["producer"], enabled=True),
        ):
            with pytest.raises(InvalidRequest, match="last user who can administer"):
                await change
        await stand.administration.delete_user(other, "admin")
        with pytest.raises(InvalidRequest, match="never the broker or everything"):
            await stand.administration.add_rule(other, Rule("*", Effect.DENY, Grant(frozenset(Action), "*", Match.PREFIX, "")))
        with pytest.raises(InvalidRequest, match="built in"):
            await stand.administration.put_role(other, "admin", [], "")
        with pytest.raises(InvalidRequest, match="built in"):
            await stand.administration.delete_role(other, "admin")


async def test_one_changes_ones_own_password_with_the_old_one_and_others_by_right() -> None:
    async with guarded() as stand:
        ann = Caller(await stand.user("ann"))
        for name, old in (("ann", ""), ("admin", ADMIN_PASSWORD), ("admin", "")):
            with pytest.raises(NotAuthorized):
                await stand.administration.change_password(ann, name, "new password", old)
        with pytest.raises(LoginFailed):
            await stand.administration.change_password(ann, "ann", "new password", "wrong password")
        stand.clock.tick(1)
        await stand.administration.change_password(ann, "ann", "new password", PASSWORD)
        await stand.log_in("ann", "new password")
        with pytest.raises(NotAuthorized):
            await stand.administration.change_password(ann, "ann", PASSWORD, "")
        await stand.administration.change_password(ADMIN, "ann", PASSWORD, "")
        await stand.log_in("ann", PASSWORD)


async def test_a_user_s_rules_and_keys_go_with_it_and_a_successor_inherits_nothing() -> None:
    async with guarded() as stand:
        await stand.user("ann", "producer")
        await stand.administration.add_rule(ADMIN, ALLOW)
        await stand.administration.create_key(ADMIN, "ann", [])
        await stand.administration.delete_user(ADMIN, "ann")
        assert stand.administration.rules(ADMIN) == [] and stand.administration.keys(ADMIN) == []
        stand.clock.tick(1)
        who = await stand.user("ann")
        assert not stand.access.authorize(who, Action.READ, Resource("topic", "t"))


async def test_a_role_that_goes_takes_its_rules_with_it() -> None:
    async with guarded() as stand:
        await stand.administration.put_role(ADMIN, "clerk", [Grant(READ)], "")
        who = await stand.user("ann", "clerk")
        await stand.administration.add_rule(ADMIN, Rule("role:clerk", Effect.ALLOW, Grant(frozenset({Action.PUBLISH}), "topic")))
        assert stand.access.authorize(who, Action.PUBLISH, Resource("topic", "t"))
        await stand.administration.delete_role(ADMIN, "clerk")
        assert not any(stand.access.authorize(who, action, Resource("topic", "t")) for action in Action)
        assert stand.administration.user(ADMIN, "ann").roles == []


async def test_actions_of_a_rule_are_added_and_taken_away_one_by_one() -> None:
    async with guarded() as stand:
        write = Rule(ALLOW.subject, ALLOW.effect, Grant(frozenset({Action.PUBLISH}), "topic", Match.LITERAL, "t"))
        await stand.administration.add_rule(ADMIN, ALLOW)
        await stand.administration.add_rule(ADMIN, write)
        (rule,) = stand.administration.rules(ADMIN)
        assert rule.grant.actions == {Action.READ, Action.PUBLISH}
        await stand.administration.remove_rule(ADMIN, ALLOW)
        assert stand.administration.rules(ADMIN) == [write]
        with pytest.raises(NoSuchEntry):
            await stand.administration.remove_rule(ADMIN, ALLOW)
        await stand.administration.remove_rule(ADMIN, write)
        assert stand.administration.rules(ADMIN) == []


@pytest.mark.parametrize(
    "rule",
    [
        Rule("ann", Effect.ALLOW, Grant(READ, "topic")),
        Rule("user:", Effect.ALLOW, Grant(READ, "topic")),
        Rule("group:x", Effect.ALLOW, Grant(READ, "topic")),
        Rule("*", Effect.ALLOW, Grant(frozenset(), "topic")),
        Rule("*", Effect.ALLOW, Grant(READ, "planet")),
        Rule("*", Effect.ALLOW, Grant(READ, "topic", Match.LITERAL, "x" * 250)),
        Rule("*", Effect.ALLOW, Grant(READ, "topic", Match.LITERAL, "cafe\u0301")),
        Rule("*", Effect.DENY, Grant(READ, "broker")),
    ],
)
async def test_a_rule_that_makes_no_sense_is_refused(rule: Rule) -> None:
    async with guarded() as stand:
        with pytest.raises(InvalidRequest):
            await stand.administration.add_rule(ADMIN, rule)


async def test_a_key_has_a_greatest_number_of_scopes() -> None:
    async with guarded() as stand:
        await stand.administration.create_user(ADMIN, "ann", "", [])
        await stand.administration.create_key(ADMIN, "ann", [Grant(READ)] * SCOPES_PER_KEY_MAX)
        with pytest.raises(BrokerError, match="at most"):
            await stand.administration.create_key(ADMIN, "ann", [Grant(READ)] * (SCOPES_PER_KEY_MAX + 1))
        with pytest.raises(NoSuchEntry):
            await stand.administration.create_key(ADMIN, "bob", [])


async def test_the_acl_of_a_topic_is_a_view_of_its_rules() -> None:
    async with guarded() as stand:
        acl = TopicAcl("t", True, ["ann"], ["producer"])
        await stand.administration.set_topic_acl(ADMIN, acl)
        assert stand.administration.topic_acl(ADMIN, "t") == acl
        assert stand.access.authorize(Principal("anonymous", "figg"), Action.PUBLISH, Resource("topic", "t"))
        narrower = TopicAcl("t", False, ["bob"], [])
        await stand.administration.set_topic_acl(ADMIN, narrower)
        assert stand.administration.topic_acls(ADMIN) == [narrower]
        assert not stand.access.authorize(Principal("anonymous", "figg"), Action.PUBLISH, Resource("topic", "t"))
        await stand.administration.delete_topic_acl(ADMIN, "t")
        assert stand.administration.topic_acl(ADMIN, "t") is None
        with pytest.raises(NoSuchEntry):
            await stand.administration.delete_topic_acl(ADMIN, "t")
        with pytest.raises(InvalidTopicName):
            await stand.administration.set_topic_acl(ADMIN, TopicAcl("__audit", True, [], []))


async def test_where_access_is_open_everybody_administers_and_the_rules_can_be_tried() -> None:
    async with guarded(AccessSettings(Mode.OPEN)) as stand:
        anybody = Caller(Principal("anonymous", "flymq"))
        assert await stand.log_in("whoever", "whatever") == Principal("whoever", "flymq")
        await stand.administration.create_user(anybody, "ann", PASSWORD, ["consumer"])
        assert stand.administration.explain(anybody, "ann", Action.READ, Resource("topic", "t"))
        assert not stand.administration.explain(anybody, "ann", Action.PUBLISH, Resource("topic", "t"))
        assert stand.access.authorize(anybody.who, Action.PUBLISH, Resource("topic", "t"))


# The audit log.

SILENT = {"users", "user", "roles", "rules", "topic_acl", "topic_acls", "keys", "key", "explain", "audit"}
"""What only shows something is not written down, unless it is refused."""


async def test_every_change_has_its_line() -> None:
    async with guarded() as stand:
        administration = stand.administration
        await administration.put_role(ADMIN, "clerk", [], "")
        await administration.create_user(ADMIN, "ann", PASSWORD, ["clerk"])
        await administration.update_user(ADMIN, "ann", [], enabled=True)
        await administration.change_password(ADMIN, "ann", PASSWORD, "")
        await administration.add_rule(ADMIN, ALLOW)
        await administration.remove_rule(ADMIN, ALLOW)
        await administration.set_topic_acl(ADMIN, TopicAcl("t", True, [], []))
        await administration.delete_topic_acl(ADMIN, "t")
        key = await administration.create_key(ADMIN, "ann", [])
        await administration.alter_key(ADMIN, key.id, expires_ms=None, description="x")
        await administration.revoke_key(ADMIN, key.id)
        await administration.delete_key(ADMIN, key.id)
        await administration.delete_role(ADMIN, "clerk")
        await administration.delete_user(ADMIN, "ann")
        changing = {name for name, _ in inspect.getmembers(Administration, inspect.isfunction) if not name.startswith("_")} - SILENT
        lines = [noted.event for noted in await found(stand, limit=1000) if noted.event.user == "admin"]
        assert len(lines) == len(changing) == 14
        assert {(line.address, line.protocol, line.result) for line in lines} == {("10.0.0.1", "flymq", "success")}


async def test_a_change_and_its_line_are_one_append() -> None:
    async with guarded() as stand:
        before = stand.engine.appends
        await stand.administration.add_rule(ADMIN, ALLOW)
        assert stand.engine.appends == before + 1
        stand.engine.error = DiskFull("no room")
        with pytest.raises(DiskFull):
            await stand.administration.remove_rule(ADMIN, ALLOW)
        stand.engine.error = None
        assert stand.administration.rules(ADMIN) == [ALLOW]
        assert [noted.event.action for noted in await found(stand, types=["acl"])] == ["create"]


async def test_logins_denials_and_changes_of_topics_are_written_down() -> None:
    async with guarded() as stand:
        ann = await stand.user("ann")
        with pytest.raises(LoginFailed):
            await stand.log_in("ann", "wrong password", address="10.6.6.6")
        for _ in range(5):
            with pytest.raises(NotAuthorized):
                stand.broker.publish(ann, "t", RecordBatch([b"x"]))
        with pytest.raises(NotAuthorized):
            await stand.administration.delete_user(Caller(ann, "10.0.0.9"), "admin")
        await stand.broker.create_topic(ADMIN.who, "t")
        await stand.broker.delete_topic(ADMIN.who, "t")
        lines = [(n.event.type, n.event.action, n.event.user, n.event.resource, n.event.result) for n in await found(stand)][::-1]
        assert lines[2:] == [
            ("login", "login", "ann", "user:ann", "success"),
            ("login", "login", "ann", "user:ann", "failure"),
            ("denial", "publish", "ann", "topic:t", "denied"),
            ("user", "delete", "ann", "user:admin", "denied"),
            ("topic", "create", "admin", "topic:t", "allowed"),
            ("topic", "delete", "admin", "topic:t", "allowed"),
        ]


async def test_what_the_gate_writes_down_says_where_it_came_from() -> None:
    async with guarded() as stand:
        await stand.user("ann")
        for address in ("10.1.1.1", "10.2.2.2"):
            ann = await stand.log_in("ann", address=address)
            with pytest.raises(NotAuthorized):
                stand.broker.publish(ann, "t", RecordBatch([b"x"]))
        root = await stand.log_in("admin", ADMIN_PASSWORD, address="10.3.3.3")
        await stand.broker.create_topic(root, "t")
        lines = [(n.event.type, n.event.address) for n in await found(stand, types=["denial", "topic"])][::-1]
        assert lines == [("denial", "10.1.1.1"), ("topic", "10.3.3.3")], "a denial is written once, wherever else it comes from"


async def test_nobody_reads_writes_or_deletes_the_audit_log_as_a_topic() -> None:
    async with guarded() as stand:
        assert TOPIC in stand.engine.topics()
        for attempt in (
            lambda: stand.broker.delete_topic(ADMIN.who, TOPIC),
            lambda: stand.broker.alter_topic(ADMIN.who, TOPIC, partitions=2),
            lambda: stand.broker.fetch(ADMIN.who, TOPIC, 0, 0, bytes_max=100),
            lambda: stand.broker.publish(ADMIN.who, TOPIC, RecordBatch([b"x"])),
            lambda: stand.broker.cursor(ADMIN.who, TOPIC, 0, 0, lambda _: None, credit_bytes=1),
        ):
            with pytest.raises((NotAuthorized, UnknownTopic)):
                answer = attempt()
                if inspect.isawaitable(answer):
                    await answer
        ann = Caller(await stand.user("ann", "producer", "consumer"))
        with pytest.raises(NotAuthorized):
            await stand.administration.audit(ann, Query())


async def test_a_query_finds_the_newest_first_page_by_page() -> None:
    async with guarded() as stand:
        for number in range(25):
            stand.clock.tick(1_000)
            await stand.administration.add_rule(ADMIN, Rule(f"user:u{number}", Effect.ALLOW, Grant(READ, "topic")))
        names: list[str] = []
        for page in range(3):
            query = Query(types=["acl"], limit=10, skip=page * 10)
            answer: Found = await stand.administration.audit(ADMIN, query)
            assert answer.total == 25 and answer.has_more(query) is (page < 2)
            names += [noted.event.resource.split()[1] for noted in answer.events]
        assert names == [f"user:u{number}" for number in reversed(range(25))]
        middle = stand.clock.now - 4_500
        assert len(await found(stand, types=["acl"], start_ms=middle)) == 5
        assert len(await found(stand, types=["acl"], end_ms=middle)) == 20
        assert len(await found(stand, search="USER:U2")) == 6
        assert await found(stand, user="nobody") == []


@pytest.mark.parametrize(
    ("limit", "is_taken"), [(1, True), (AUDIT_QUERY_EVENTS_MAX, True), (AUDIT_QUERY_EVENTS_MAX + 1, False), (0, False)]
)
async def test_a_query_has_a_greatest_size(limit: int, is_taken: bool) -> None:
    async with guarded() as stand:
        if is_taken:
            await found(stand, limit=limit)
        else:
            with pytest.raises(InvalidRequest):
                await found(stand, limit=limit)


async def test_denials_beyond_what_the_disk_takes_are_counted() -> None:
    async with guarded() as stand:
        stand.engine.hold()
        for number in range(AUDIT_EVENTS_WAITING_MAX + 7):
            stand.access.record_decision(Principal("mallory", "figg"), Action.READ, "topic", f"t{number}", False)
        stand.engine.let_go()
        await turns()
        stand.access.record_decision(Principal("mallory", "figg"), Action.READ, "topic", "last", False)
        (noted,) = await found(stand, types=["audit"])
        assert noted.event.details == {"events": "7"}


async def test_audit_lines_are_kept_as_long_as_the_configuration_says() -> None:
    async with guarded(AccessSettings(Mode.ENFORCED, audit_retention_ms=123_000)) as stand:
        assert stand.engine.topics()[TOPIC].config.retention_ms == 123_000
        again = Guarded(AccessSettings(Mode.ENFORCED, audit_retention_ms=456_000), stand.engine, stand.clock)
        await again.access.open()
        assert stand.engine.topics()[TOPIC].config.retention_ms == 456_000
        await again.access.close()
