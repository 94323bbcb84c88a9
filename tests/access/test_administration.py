"""Users, roles, rules and keys: changes, limits, persistence, and the audit event of every change."""

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
from tests.access.harness import ADMIN, ADMIN_PASSWORD, PASSWORD, Guarded, guarded
from tests.broker.harness import turns

READ = frozenset({Action.READ})
ALLOW = Rule("user:ann", Effect.ALLOW, Grant(READ, "topic", Match.LITERAL, "t"))


async def found(harness: Guarded, **query: object) -> list[Noted]:
    return (await harness.administration.audit(ADMIN, Query(**query))).events  # type: ignore[arg-type]  # names of its fields


async def test_everything_survives_a_restart() -> None:
    async with guarded() as harness:
        await harness.administration.put_role(ADMIN, "clerk", [Grant(READ, "topic", Match.PREFIX, "orders")], "reads orders")
        await harness.administration.create_user(ADMIN, "ann", PASSWORD, ["clerk"])
        await harness.administration.add_rule(ADMIN, ALLOW)
        key = await harness.administration.create_key(ADMIN, "ann", [Grant(READ)], description="for the lorry")
        again = Guarded(engine=harness.engine, clock=harness.clock)
        assert await again.access.open() is None
        assert again.access.policy == harness.access.policy
        who = await again.log_in("ann")
        assert again.access.authorize(who, Action.READ, Resource("topic", "orders.eu"))
        assert again.access.authorize(who, Action.READ, Resource("topic", "t"))
        assert again.access.verify_key(key.text, Caller(Principal("anonymous", "blipmq"))) is not None
        await again.access.close()


@pytest.mark.parametrize("name", ["", "anonymous", "*", " ann", "ann ", "a\nb", "a\0b", "x" * 250, "cafe\u0301"])
async def test_a_name_that_could_be_mistaken_is_refused(name: str) -> None:
    async with guarded() as harness:
        with pytest.raises(InvalidRequest):
            await harness.administration.create_user(ADMIN, name, PASSWORD, [])
        if name != "anonymous":
            with pytest.raises(InvalidRequest):
                await harness.administration.put_role(ADMIN, name, [], "")


async def test_users_are_made_once_even_if_asked_for_twice_at_the_same_time() -> None:
    async with guarded() as harness:
        made = await asyncio.gather(
            *(harness.administration.create_user(ADMIN, "ann", f"password {n}", []) for n in range(5)), return_exceptions=True
        )
        assert sum(isinstance(outcome, EntryExists) for outcome in made) == 4
        with pytest.raises(NoSuchEntry, match='role "clerk" not found'):
            await harness.administration.create_user(ADMIN, "bob", PASSWORD, ["clerk"])


async def test_there_is_always_a_user_who_can_administer() -> None:
    async with guarded() as harness:
        other = Caller(await harness.user("ann", "admin"))
        with pytest.raises(InvalidRequest, match="cannot delete your own account"):
            await harness.administration.delete_user(ADMIN, "admin")
        await harness.administration.update_user(other, "admin", ["admin"], enabled=False)
        for change in (
            harness.administration.update_user(other, "ann", ["admin"], enabled=False),
            harness.administration.update_user(other, "ann", ["producer"], enabled=True),
        ):
            with pytest.raises(InvalidRequest, match="last user who can administer"):
                await change
        await harness.administration.delete_user(other, "admin")
        with pytest.raises(InvalidRequest, match="never the broker or everything"):
            await harness.administration.add_rule(other, Rule("*", Effect.DENY, Grant(frozenset(Action), "*", Match.PREFIX, "")))
        with pytest.raises(InvalidRequest, match="built in"):
            await harness.administration.put_role(other, "admin", [], "")
        with pytest.raises(InvalidRequest, match="built in"):
            await harness.administration.delete_role(other, "admin")


async def test_one_changes_ones_own_password_with_the_old_one_and_others_by_right() -> None:
    async with guarded() as harness:
        ann = Caller(await harness.user("ann"))
        for name, old in (("ann", ""), ("admin", ADMIN_PASSWORD), ("admin", "")):
            with pytest.raises(NotAuthorized):
                await harness.administration.change_password(ann, name, "new password", old)
        with pytest.raises(LoginFailed):
            await harness.administration.change_password(ann, "ann", "new password", "wrong password")
        harness.clock.tick(1)
        await harness.administration.change_password(ann, "ann", "new password", PASSWORD)
        await harness.log_in("ann", "new password")
        with pytest.raises(NotAuthorized):
            await harness.administration.change_password(ann, "ann", PASSWORD, "")
        await harness.administration.change_password(ADMIN, "ann", PASSWORD, "")
        await harness.log_in("ann", PASSWORD)


async def test_a_user_s_rules_and_keys_go_with_it_and_a_successor_inherits_nothing() -> None:
    async with guarded() as harness:
        await harness.user("ann", "producer")
        await harness.administration.add_rule(ADMIN, ALLOW)
        await harness.administration.create_key(ADMIN, "ann", [])
        await harness.administration.delete_user(ADMIN, "ann")
        assert harness.administration.rules(ADMIN) == [] and harness.administration.keys(ADMIN) == []
        harness.clock.tick(1)
        who = await harness.user("ann")
        assert not harness.access.authorize(who, Action.READ, Resource("topic", "t"))


async def test_a_role_that_goes_takes_its_rules_with_it() -> None:
    async with guarded() as harness:
        await harness.administration.put_role(ADMIN, "clerk", [Grant(READ)], "")
        who = await harness.user("ann", "clerk")
        await harness.administration.add_rule(ADMIN, Rule("role:clerk", Effect.ALLOW, Grant(frozenset({Action.PUBLISH}), "topic")))
        assert harness.access.authorize(who, Action.PUBLISH, Resource("topic", "t"))
        await harness.administration.delete_role(ADMIN, "clerk")
        assert not any(harness.access.authorize(who, action, Resource("topic", "t")) for action in Action)
        assert harness.administration.user(ADMIN, "ann").roles == []


async def test_actions_of_a_rule_are_added_and_taken_away_one_by_one() -> None:
    async with guarded() as harness:
        write = Rule(ALLOW.subject, ALLOW.effect, Grant(frozenset({Action.PUBLISH}), "topic", Match.LITERAL, "t"))
        await harness.administration.add_rule(ADMIN, ALLOW)
        await harness.administration.add_rule(ADMIN, write)
        (rule,) = harness.administration.rules(ADMIN)
        assert rule.grant.actions == {Action.READ, Action.PUBLISH}
        await harness.administration.remove_rule(ADMIN, ALLOW)
        assert harness.administration.rules(ADMIN) == [write]
        with pytest.raises(NoSuchEntry):
            await harness.administration.remove_rule(ADMIN, ALLOW)
        await harness.administration.remove_rule(ADMIN, write)
        assert harness.administration.rules(ADMIN) == []


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
    async with guarded() as harness:
        with pytest.raises(InvalidRequest):
            await harness.administration.add_rule(ADMIN, rule)


async def test_a_key_has_a_greatest_number_of_scopes() -> None:
    async with guarded() as harness:
        await harness.administration.create_user(ADMIN, "ann", "", [])
        await harness.administration.create_key(ADMIN, "ann", [Grant(READ)] * SCOPES_PER_KEY_MAX)
        with pytest.raises(BrokerError, match="at most"):
            await harness.administration.create_key(ADMIN, "ann", [Grant(READ)] * (SCOPES_PER_KEY_MAX + 1))
        with pytest.raises(NoSuchEntry):
            await harness.administration.create_key(ADMIN, "bob", [])


async def test_the_acl_of_a_topic_is_a_view_of_its_rules() -> None:
    async with guarded() as harness:
        acl = TopicAcl("t", True, ["ann"], ["producer"])
        await harness.administration.set_topic_acl(ADMIN, acl)
        assert harness.administration.topic_acl(ADMIN, "t") == acl
        assert harness.access.authorize(Principal("anonymous", "figg"), Action.PUBLISH, Resource("topic", "t"))
        narrower = TopicAcl("t", False, ["bob"], [])
        await harness.administration.set_topic_acl(ADMIN, narrower)
        assert harness.administration.topic_acls(ADMIN) == [narrower]
        assert not harness.access.authorize(Principal("anonymous", "figg"), Action.PUBLISH, Resource("topic", "t"))
        await harness.administration.delete_topic_acl(ADMIN, "t")
        assert harness.administration.topic_acl(ADMIN, "t") is None
        with pytest.raises(NoSuchEntry):
            await harness.administration.delete_topic_acl(ADMIN, "t")
        with pytest.raises(InvalidTopicName):
            await harness.administration.set_topic_acl(ADMIN, TopicAcl("__audit", True, [], []))


async def test_where_access_is_open_everybody_administers_and_the_rules_can_be_tried() -> None:
    async with guarded(AccessSettings(Mode.OPEN)) as harness:
        anybody = Caller(Principal("anonymous", "flymq"))
        assert await harness.log_in("whoever", "whatever") == Principal("whoever", "flymq")
        await harness.administration.create_user(anybody, "ann", PASSWORD, ["consumer"])
        assert harness.administration.explain(anybody, "ann", Action.READ, Resource("topic", "t"))[0]
        assert not harness.administration.explain(anybody, "ann", Action.PUBLISH, Resource("topic", "t"))[0]
        assert harness.access.authorize(anybody.who, Action.PUBLISH, Resource("topic", "t"))


# The audit log.

SILENT = {"users", "user", "roles", "rules", "topic_acl", "topic_acls", "keys", "key", "explain", "audit"}
"""A request that only shows something is audited only if it is denied."""


async def test_every_change_has_its_line() -> None:
    async with guarded() as harness:
        administration = harness.administration
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
        lines = [noted.event for noted in await found(harness, limit=1000) if noted.event.user == "admin"]
        assert len(lines) == len(changing) == 14
        assert {(line.address, line.protocol, line.result) for line in lines} == {("10.0.0.1", "flymq", "success")}


async def test_a_change_and_its_line_are_one_append() -> None:
    async with guarded() as harness:
        before = harness.engine.appends
        await harness.administration.add_rule(ADMIN, ALLOW)
        assert harness.engine.appends == before + 1
        harness.engine.error = DiskFull("no room")
        with pytest.raises(DiskFull):
            await harness.administration.remove_rule(ADMIN, ALLOW)
        harness.engine.error = None
        assert harness.administration.rules(ADMIN) == [ALLOW]
        assert [noted.event.action for noted in await found(harness, types=["acl"])] == ["create"]


async def test_logins_denials_and_changes_of_topics_are_written_down() -> None:
    async with guarded() as harness:
        ann = await harness.user("ann")
        with pytest.raises(LoginFailed):
            await harness.log_in("ann", "wrong password", address="10.6.6.6")
        for _ in range(5):
            with pytest.raises(NotAuthorized):
                harness.broker.publish(ann, "t", RecordBatch([b"x"]))
        with pytest.raises(NotAuthorized):
            await harness.administration.delete_user(Caller(ann, "10.0.0.9"), "admin")
        await harness.broker.create_topic(ADMIN.who, "t")
        await harness.broker.delete_topic(ADMIN.who, "t")
        lines = [(n.event.type, n.event.action, n.event.user, n.event.resource, n.event.result) for n in await found(harness)][::-1]
        assert lines[2:] == [
            ("login", "login", "ann", "user:ann", "success"),
            ("login", "login", "ann", "user:ann", "failure"),
            ("denial", "publish", "ann", "topic:t", "denied"),
            ("user", "delete", "ann", "user:admin", "denied"),
            ("topic", "create", "admin", "topic:t", "allowed"),
            ("topic", "delete", "admin", "topic:t", "allowed"),
        ]


async def test_an_audited_decision_has_the_address_of_the_caller() -> None:
    async with guarded() as harness:
        await harness.user("ann")
        for address in ("10.1.1.1", "10.2.2.2"):
            ann = await harness.log_in("ann", address=address)
            with pytest.raises(NotAuthorized):
                harness.broker.publish(ann, "t", RecordBatch([b"x"]))
        root = await harness.log_in("admin", ADMIN_PASSWORD, address="10.3.3.3")
        await harness.broker.create_topic(root, "t")
        lines = [(n.event.type, n.event.address) for n in await found(harness, types=["denial", "topic"])][::-1]
        assert lines == [("denial", "10.1.1.1"), ("topic", "10.3.3.3")], "a denial is recorded once, from any address"


async def test_the_audit_log_cannot_be_read_written_or_deleted_as_a_topic() -> None:
    async with guarded() as harness:
        assert TOPIC in harness.engine.topics()
        for attempt in (
            lambda: harness.broker.delete_topic(ADMIN.who, TOPIC),
            lambda: harness.broker.alter_topic(ADMIN.who, TOPIC, partitions=2),
            lambda: harness.broker.fetch(ADMIN.who, TOPIC, 0, 0, bytes_max=100),
            lambda: harness.broker.publish(ADMIN.who, TOPIC, RecordBatch([b"x"])),
            lambda: harness.broker.cursor(ADMIN.who, TOPIC, 0, 0, lambda _: None, credit_bytes=1),
        ):
            with pytest.raises((NotAuthorized, UnknownTopic)):
                answer = attempt()
                if inspect.isawaitable(answer):
                    await answer
        ann = Caller(await harness.user("ann", "producer", "consumer"))
        with pytest.raises(NotAuthorized):
            await harness.administration.audit(ann, Query())


async def test_a_query_finds_the_newest_first_page_by_page() -> None:
    async with guarded() as harness:
        for number in range(25):
            harness.clock.tick(1_000)
            await harness.administration.add_rule(ADMIN, Rule(f"user:u{number}", Effect.ALLOW, Grant(READ, "topic")))
        names: list[str] = []
        for page in range(3):
            query = Query(types=["acl"], limit=10, skip=page * 10)
            answer: Found = await harness.administration.audit(ADMIN, query)
            assert answer.total == 25 and answer.has_more(query) is (page < 2)
            names += [noted.event.resource.split()[1] for noted in answer.events]
        assert names == [f"user:u{number}" for number in reversed(range(25))]
        middle = harness.clock.now - 4_500
        assert len(await found(harness, types=["acl"], start_ms=middle)) == 5
        assert len(await found(harness, types=["acl"], end_ms=middle)) == 20
        assert len(await found(harness, search="USER:U2")) == 6
        assert await found(harness, user="unknown") == []


@pytest.mark.parametrize(
    ("limit", "is_taken"), [(1, True), (AUDIT_QUERY_EVENTS_MAX, True), (AUDIT_QUERY_EVENTS_MAX + 1, False), (0, False)]
)
async def test_a_query_has_a_greatest_size(limit: int, is_taken: bool) -> None:
    async with guarded() as harness:
        if is_taken:
            await found(harness, limit=limit)
        else:
            with pytest.raises(InvalidRequest):
                await found(harness, limit=limit)


async def test_denials_beyond_what_the_disk_takes_are_counted() -> None:
    async with guarded() as harness:
        harness.engine.hold()
        for number in range(AUDIT_EVENTS_WAITING_MAX + 7):
            harness.access.record_decision(Principal("mallory", "figg"), Action.READ, "topic", f"t{number}", False)
        harness.engine.let_go()
        await turns()
        harness.access.record_decision(Principal("mallory", "figg"), Action.READ, "topic", "last", False)
        (noted,) = await found(harness, types=["audit"])
        assert noted.event.details == {"events": "7"}


async def test_audit_lines_are_kept_as_long_as_the_configuration_says() -> None:
    async with guarded(AccessSettings(Mode.ENFORCED, audit_retention_ms=123_000)) as harness:
        assert harness.engine.topics()[TOPIC].config.retention_ms == 123_000
        again = Guarded(AccessSettings(Mode.ENFORCED, audit_retention_ms=456_000), harness.engine, harness.clock)
        await again.access.open()
        assert harness.engine.topics()[TOPIC].config.retention_ms == 456_000
        await again.access.close()
