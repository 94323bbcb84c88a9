"""Logins, users, ACLs, keys and the audit log through a FlyMQ connection."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from headrace.broker import Principal
from headrace.limits import SCOPES_PER_KEY_MAX
from headrace.wire.flymq import Dialect
from headrace.wire.flymq import access_messages as a
from headrace.wire.flymq.access_messages import AccessReply, AuditPage, AuthReply, Identity, UserEntry
from headrace.wire.flymq.messages import (
    CreateTopic,
    Done,
    Failure,
    Fetch,
    Fetched,
    ListTopics,
    ProduceBatch,
    RecordMetadataBatch,
    TopicList,
)
from tests.access.harness import ADMIN_PASSWORD, ENFORCED, PASSWORD
from tests.canaries import secret
from tests.sessions.flymq.support import ListenerContext, Peer, running_server

NOBODY = Principal("anonymous", "flymq")
WRONG = AuthReply(False, "invalid username or password")


@asynccontextmanager
async def running_server_with_access() -> AsyncIterator[tuple[ListenerContext, Peer]]:
    """Start a broker with enforced access and log in an administrator."""
    async with running_server(access=ENFORCED) as server:
        root = server.peer(who=NOBODY)
        assert await root.one(a.Auth("admin", ADMIN_PASSWORD)) == AuthReply(True, "", "admin", ["admin"])
        yield server, root


async def call(peer: Peer, operation: str, **body: object) -> object:
    reply = await peer.one(a.AccessCall(operation, json.dumps(body).encode()))
    assert isinstance(reply, AccessReply), reply
    return json.loads(reply.body)


async def logged_in(server: ListenerContext, name: str) -> Peer:
    peer = server.peer(who=NOBODY)
    reply = await peer.one(a.Auth(name, PASSWORD))
    assert isinstance(reply, AuthReply) and reply.success, reply
    return peer


async def test_a_login_changes_who_the_connection_is() -> None:
    async with running_server_with_access() as (server, root):
        await root.one(CreateTopic("t", 1))
        await root.one(a.UserCreate("ann", PASSWORD, "", ["producer"]))
        peer = server.peer(who=NOBODY)
        assert await peer.one(a.WhoAmI()) == Identity(False, "anonymous", [], [])
        assert "unauthorized" in await peer.refused(ProduceBatch("t", [b"x"]))
        assert await peer.one(a.Auth("ann", "wrong password")) == WRONG
        assert await peer.one(a.Auth("nobody", PASSWORD)) == WRONG
        assert "unauthorized" in await peer.refused(ProduceBatch("t", [b"x"]))
        assert await peer.one(a.Auth("ann", PASSWORD)) == AuthReply(True, "", "ann", ["producer"])
        assert await peer.one(a.WhoAmI()) == Identity(True, "ann", ["producer"], ["write"])
        assert isinstance(await peer.one(ProduceBatch("t", [b"x"])), RecordMetadataBatch)
        assert "unauthorized" in await peer.refused(Fetch("t", 0, 0, 1))


async def test_an_api_key_logs_in_as_its_owner_within_its_scopes_as_they_are() -> None:
    async with running_server_with_access() as (server, root):
        await root.exchange(CreateTopic("t", 1), CreateTopic("u", 1))
        await root.one(a.UserCreate("lorry", "", "", ["producer"]))
        made = await call(root, "key.create", owner="lorry", scopes=[{"actions": ["publish"], "kind": "topic", "name": "t"}])
        assert isinstance(made, dict)
        for user in ("", made["id"]):
            peer = server.peer(who=NOBODY)
            assert await peer.one(a.Auth(user, made["key"])) == AuthReply(True, "", "lorry", ["producer"])
            assert isinstance(await peer.one(ProduceBatch("t", [b"x"])), RecordMetadataBatch)
            assert "unauthorized" in await peer.refused(ProduceBatch("u", [b"x"]))
        await call(root, "key.alter", id=made["id"], scopes=[{"actions": ["publish"], "kind": "topic", "name": "u"}])
        assert "unauthorized" in await peer.refused(ProduceBatch("t", [b"x"])), "an open connection notices"
        assert isinstance(await peer.one(ProduceBatch("u", [b"x"])), RecordMetadataBatch)
        await call(root, "key.alter", id=made["id"], scopes=[])
        assert isinstance(await peer.one(ProduceBatch("t", [b"x"])), RecordMetadataBatch), "without scopes it may what its owner may"
        other = server.peer(who=NOBODY)
        for user, key in (("lorry", made["key"]), ("", made["key"][:-1]), (made["id"], made["key"] + "x"), ("", "hr_aaaaaaaaaaaa_no")):
            assert await other.one(a.Auth(user, key)) == WRONG
        await call(root, "key.revoke", id=made["id"])
        assert "unauthorized" in await peer.refused(ProduceBatch("t", [b"x"]))
        assert await other.one(a.Auth("", made["key"])) == WRONG


async def test_a_key_has_so_many_scopes_and_not_one_more() -> None:
    async with running_server_with_access() as (_, root):
        made = await call(root, "key.create", owner="admin")
        assert isinstance(made, dict)
        scopes = [{"actions": ["read"], "kind": "topic", "name": f"t{number}"} for number in range(SCOPES_PER_KEY_MAX + 1)]
        altered = await call(root, "key.alter", id=made["id"], scopes=scopes[1:])
        assert isinstance(altered, dict) and len(altered["scopes"]) == SCOPES_PER_KEY_MAX
        refused = await root.refused(a.AccessCall("key.alter", json.dumps({"id": made["id"], "scopes": scopes}).encode()))
        assert "at most" in refused


async def test_requests_behind_a_login_wait_for_it() -> None:
    async with running_server_with_access() as (server, root):
        await root.one(CreateTopic("t", 1))
        peer = server.peer(who=NOBODY)
        login, produced, fetched = await peer.exchange(a.Auth("admin", ADMIN_PASSWORD), ProduceBatch("t", [b"x"]), Fetch("t", 0, 0, 1))
        assert isinstance(login, AuthReply) and login.success
        assert isinstance(produced, RecordMetadataBatch)
        assert isinstance(fetched, Fetched) and fetched.values == [b"x"]


async def test_a_failed_login_leaves_the_connection_who_it_was() -> None:
    async with running_server_with_access() as (_, root):
        assert await root.one(a.Auth("admin", "wrong password")) == WRONG
        assert isinstance(await root.one(a.UserList()), a.UserEntries)


async def test_the_reply_to_a_login_has_opcode_71_and_the_layout_of_the_dialect() -> None:
    async with running_server_with_access() as (server, root):
        await root.one(a.UserCreate("old", PASSWORD, "", ["producer", "sdk"]))
        for dialect, name, expected in (
            (Dialect.SPEC, "admin", "01 0000 0005 61646d696e 00000001 0005 61646d696e"),
            (Dialect.SDK, "admin", "01 0005 61646d696e 00000001 05 61646d696e 0000"),
            (Dialect.SPEC, "old", "01 0003 6f6c64 00000002 08 70726f6475636572 03 73646b 0000"),
        ):
            peer = server.peer(dialect, NOBODY)
            peer.send(a.Auth(name, ADMIN_PASSWORD if name == "admin" else PASSWORD))
            await peer.replies(1, Dialect.SDK if name == "old" else dialect)
            payload = bytes.fromhex(expected)
            assert bytes(peer.wire.sent) == bytes.fromhex("af017101") + len(payload).to_bytes(4, "big") + payload
            failing = server.peer(dialect, NOBODY)
            assert await failing.one(a.Auth(name, "wrong password"), dialect) == WRONG


async def test_brute_force_over_connections_is_slowed_down() -> None:
    async with running_server_with_access() as (server, root):
        await root.one(a.UserCreate("ann", PASSWORD, "", []))
        texts = []
        for number in range(12):
            reply = await server.peer(who=NOBODY, address=f"10.0.0.1:{number}").one(a.Auth("ann", f"guess {number}"))
            assert isinstance(reply, AuthReply) and not reply.success
            texts.append(reply.error)
        assert texts[0] == "invalid username or password" and texts[-1].startswith("too many failed logins: try again in ")
        reply = await server.peer(who=NOBODY, address="10.0.0.1:99").one(a.Auth("ann", PASSWORD))
        assert isinstance(reply, AuthReply) and not reply.success, "within the pause not even the right one is looked at"
        reply = await server.peer(who=NOBODY, address="10.9.9.9:5").one(a.Auth("ann", PASSWORD))
        assert isinstance(reply, AuthReply) and reply.success, "whoever guesses locks nobody out who is elsewhere"


async def test_users_from_their_beginning_to_their_end() -> None:
    async with running_server_with_access() as (server, root):
        made = await root.one(a.UserCreate("ann", PASSWORD, "", ["consumer"]))
        assert made == UserEntry("ann", ["consumer"], ["read"], True, server.now // 1000, server.now // 1000)
        assert await root.refused(a.UserCreate("ann", PASSWORD, "", [])) == 'user "ann" already exists'
        assert await root.one(a.UserGet("ann")) == made
        assert await root.refused(a.UserGet("bob")) == 'user "bob" not found'
        assert await root.one(a.UserUpdate("ann", "", "", ["producer"], False)) == Done(True, "ann")
        listed = await root.one(a.UserList())
        assert isinstance(listed, a.UserEntries) and [(user.user, user.enabled) for user in listed.users] == [
            ("admin", True),
            ("ann", False),
        ]
        assert await root.one(a.UserUpdate("ann", "", "", ["producer"], True)) == Done(True, "ann")
        ann = await logged_in(server, "ann")
        assert await ann.one(a.PasswordChange("ann", "a new password", PASSWORD)) == Done(True, "password changed")
        assert await ann.one(a.Auth("ann", "a new password")) == AuthReply(True, "", "ann", ["producer"])
        assert await ann.refused(a.PasswordChange("ann", PASSWORD, "wrong")) == "invalid username or password"
        assert await root.refused(a.UserDelete("admin")) == "cannot delete your own account"
        assert await root.one(a.UserDelete("ann")) == Done(True, "ann")
        assert "unauthorized" in await ann.refused(ProduceBatch("t", [b"x"]))


async def test_an_acl_opens_a_topic_to_users_roles_and_everybody() -> None:
    async with running_server_with_access() as (server, root):
        await root.one(CreateTopic("t", 1))
        await root.one(a.UserCreate("ann", PASSWORD, "", ["guest"]))
        ann = await logged_in(server, "ann")
        anonymous = server.peer(who=NOBODY)
        assert await root.one(a.AclGet("t")) == a.AclEntry("t", False, False, False, [], [])
        for acl, allowed in (
            (a.AclSet("t", False, ["ann"], []), (True, False)),
            (a.AclSet("t", False, [], ["guest"]), (True, False)),
            (a.AclSet("t", True, [], []), (True, True)),
            (a.AclSet("t", False, [], ["producer"]), (False, False)),
        ):
            assert await root.one(acl) == a.AclDone(True, "t")
            assert (
                tuple([isinstance(await peer.one(ProduceBatch("t", [b"x"])), RecordMetadataBatch) for peer in (ann, anonymous)]) == allowed
            )
            assert tuple([await peer.one(ListTopics()) == TopicList(["t"]) for peer in (ann, anonymous)]) == allowed
        assert await root.one(a.AclList()) == a.AclEntries([a.AclRow("t", True, False, [], ["producer"])], False)
        assert await root.one(a.AclDelete("t")) == a.AclDone(True, "t")
        assert await root.refused(a.AclDelete("t")) == 'ACL "t" not found'


async def test_rules_roles_and_keys_are_managed_in_json() -> None:
    async with running_server_with_access() as (server, root):
        await root.one(a.UserCreate("ann", PASSWORD, "", []))
        rule = {"subject": "user:ann", "effect": "allow", "actions": ["read"], "kind": "topic", "match": "prefix", "name": "orders"}
        assert await call(root, "rule.add", **rule) == {}
        assert await call(root, "rule.list") == [rule]
        check = {"user": "ann", "action": "read", "kind": "topic"}
        assert (await call(root, "rule.check", **check, name="orders.eu"))["allowed"] is True
        assert (await call(root, "rule.check", **check, name="other"))["allowed"] is False
        await call(root, "rule.remove", **rule)
        await call(root, "role.put", name="clerk", grants=[{"actions": ["publish"], "kind": "topic", "name": "x"}], description="d")
        roles = await call(root, "role.list")
        assert isinstance(roles, list) and "clerk" in {role["name"] for role in roles}
        await call(root, "role.delete", name="clerk")
        made = await call(root, "key.create", owner="ann", description="lorry", expires_ms=server.now + 1000)
        assert isinstance(made, dict) and made["key"].startswith(f"hr_{made['id']}_")
        shown = await call(root, "key.get", id=made["id"])
        assert isinstance(shown, dict) and (shown["owner"], shown["in_force"], shown["description"]) == ("ann", True, "lorry")
        assert await call(root, "key.list") == [shown]
        assert made["key"] not in json.dumps(shown)
        altered = await call(root, "key.alter", id=made["id"], expires_ms=0)
        assert isinstance(altered, dict) and altered["expires_ms"] == 0
        await call(root, "key.revoke", id=made["id"])
        await call(root, "key.delete", id=made["id"])
        assert await call(root, "key.list") == []


@pytest.mark.parametrize(
    ("operation", "body", "words"),
    [
        ("key.steal", b"{}", "unknown operation"),
        ("key.create", b"{", "key.create"),
        ("key.create", b"[]", "Expected"),
        ("key.create", b'{"owner": 7}', "owner"),
        ("key.create", b'{"owner": "ann", "digest": "x"}', "unknown field"),
        ("rule.add", b'{"subject": "*", "actions": ["fly"], "kind": "topic", "name": "x"}', "fly"),
        ("key.get", b"[" * 100_000, "key.get"),
        ("key.get", b'{"id": "\xff"}', "key.get"),
    ],
)
async def test_json_that_cannot_be_understood_is_refused_and_the_connection_goes_on(operation: str, body: bytes, words: str) -> None:
    async with running_server_with_access() as (_, root):
        assert words in await root.refused(a.AccessCall(operation, body))
        assert await root.one(ListTopics()) == TopicList([])


async def test_the_audit_log_is_queried_and_exported() -> None:
    async with running_server_with_access() as (server, root):
        await root.one(a.UserCreate("=1+1", PASSWORD, "", []))
        page = await root.one(a.AuditQuery(types=["user"], search="=1+1"))
        assert isinstance(page, AuditPage) and (page.total, page.more) == (1, False)
        (event,) = page.events
        assert (event.user, event.action, event.resource, event.result, event.address) == (
            "admin",
            "create",
            "user:=1+1",
            "success",
            "test",
        )
        assert event.time == server.now and a.Detail("protocol", "flymq") in event.details
        assert await root.one(a.AuditQuerySdk(types=["user"], search="=1+1")) == page
        exported = await root.one(a.AuditExport(a.AuditQuery(types=["login"]), "json"))
        assert isinstance(exported, a.AuditFile)
        assert [entry["result"] for entry in json.loads(exported.content)] == ["success"]
        await server.peer(who=NOBODY).one(a.Auth("=cmd", "wrong password"))
        exported = await root.one(a.AuditExport(a.AuditQuery(user="=cmd"), "csv"))
        assert isinstance(exported, a.AuditFile)
        assert b",'=cmd," in exported.content
        assert await root.refused(a.AuditExport(a.AuditQuery(), "xml")) == "unknown format 'xml': expected json or csv"
        (last,) = [await root.one(a.AuditQuery(limit=1))]
        assert isinstance(last, AuditPage) and len(last.events) == 1 and last.more


async def test_where_access_is_open_a_login_succeeds_and_gives_nothing() -> None:
    async with running_server() as server:
        peer = server.peer()
        assert await peer.one(a.Auth("whoever", "x")) == AuthReply(True, "", "whoever", [])
        assert await peer.one(a.AclGet("t")) == a.AclEntry("t", False, False, True, [], [])
        assert isinstance(await peer.one(a.RoleList()), a.RoleEntries)


async def test_a_connection_of_a_certificate_is_that_user_without_a_login() -> None:
    async with running_server_with_access() as (server, root):
        await root.one(CreateTopic("t", 1))
        await root.one(a.UserCreate("billing.example", "", "", ["producer"]))
        peer = server.peer(who=Principal("billing.example", "flymq"))
        assert isinstance(await peer.one(ProduceBatch("t", [b"x"])), RecordMetadataBatch)
        assert await peer.one(a.Auth("billing.example", "")) == WRONG, "no password is no password that fits"


async def test_nothing_that_is_said_about_a_login_holds_its_password() -> None:
    canary = secret("password")
    async with running_server_with_access() as (_, root):
        for request in (a.Auth("ann", canary), a.UserCreate("ann", canary, canary), a.PasswordChange("ann", canary, canary)):
            assert canary not in repr(request)
        assert isinstance(await root.one(a.UserCreate("ann", canary, "", [])), UserEntry)
        assert isinstance(await root.one(a.UserCreate("ann", canary, "", [])), Failure)
        await root.one(a.Auth("ann", canary + "x"))
        assert canary.encode() not in bytes(root.wire.sent)


async def test_a_fetch_at_the_end_of_a_topic_needs_the_permission_to_read_it() -> None:
    async with running_server_with_access() as (server, root):
        await root.one(CreateTopic("t", 1))
        await root.one(a.UserCreate("ann", PASSWORD, "", ["producer"]))
        await root.one(a.UserCreate("bob", PASSWORD, "", ["consumer"]))
        ann, bob = await logged_in(server, "ann"), await logged_in(server, "bob")
        reply = await ann.one(Fetch("t", 0, 0, 10))
        assert isinstance(reply, Failure) and "may not read" in reply.message
        assert isinstance(await bob.one(Fetch("t", 0, 0, 10)), Fetched)
