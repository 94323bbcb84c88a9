"""The console with enforced access: login, two users with different rights, administration."""

from __future__ import annotations

import json
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from headrace.clients.flymq.client import FlyMqClient
from tests.console.harness import ADMIN_PASSWORD, WAIT_SECONDS, BrokerThread, Browser, ConsoleThread, running

PASSWORD = "a long user password"


@pytest.fixture(scope="module")
def site(enforced: tuple[BrokerThread, ConsoleThread]) -> ConsoleThread:
    """A console with an operator, who may not read messages, and a reader, who may."""
    broker, console = enforced

    async def prepare(client: FlyMqClient) -> None:
        await client.create_topic("secrets")
        await client.publish("secrets", b"a classified value", key=b"key")
        actions = ["describe", "create", "alter", "delete"]
        everything = {"kind": "topic", "match": "prefix", "name": ""}
        await client.manage("role.put", name="operator", grants=[{"actions": actions, **everything}], description="")
        await client.create_user("olga", PASSWORD, ["operator"])
        await client.create_user("rita", PASSWORD, ["consumer"])

    broker.with_client(prepare)
    return console


def _as(site: ConsoleThread, user: str, password: str = PASSWORD) -> Browser:
    browser = Browser(site.port)
    assert browser.log_in(user, password).status == 200
    return browser


def test_without_a_login_every_page_leads_to_the_login_and_back(site: ConsoleThread) -> None:
    browser = Browser(site.port)
    reply = browser.request("GET", "/topic?name=secrets")
    assert reply.status == 303 and reply.headers["location"] == "/login?to=/topic%3Fname%3Dsecrets"
    assert "set-cookie" not in reply.headers
    fields: dict[str, object] = {"token": "", "user": "rita", "password": PASSWORD, "to": "/topic?name=secrets"}
    assert "secrets" in browser.post("/login", fields).words
    for path in ("/messages/export?topic=secrets", "/message/download?topic=secrets", "/live", "/audit"):
        assert Browser(site.port).request("GET", path).status == 303, path


def test_a_wrong_password_is_refused_with_a_reason(site: ConsoleThread) -> None:
    browser = Browser(site.port)
    reply = browser.log_in("rita", "wrong")
    assert reply.status == 403 and "invalid username or password" in reply.words and not browser.cookies
    assert "wrong" not in reply.text


def test_the_broker_throttles_logins(site: ConsoleThread) -> None:
    browser = Browser(site.port)
    with ThreadPoolExecutor(8) as threads:  # at once, because the allowance grows again with time
        texts = list(threads.map(lambda number: browser.log_in("nobody", f"guess {number}").words, range(8)))
    assert any("try again" in text or "wait" in text for text in texts), texts[-1]


def test_an_operator_manages_a_topic_and_never_sees_a_message(site: ConsoleThread) -> None:
    olga = _as(site, "olga")
    assert "secrets" in olga.get("/topics").words and "End offset" in olga.get("/topic", name="secrets").words
    for path in (
        "/messages?topic=secrets",
        "/messages?topic=secrets&q=classified",
        "/message?topic=secrets&partition=0&offset=0",
        "/message/download?topic=secrets&partition=0&offset=0",
        "/messages/export?topic=secrets",
        "/publish?topic=secrets&partition=0&offset=0",
        "/dead-letters/of?topic=secrets",
    ):
        reply = olga.get(path)
        assert reply.status == 403 and "may not read" in reply.words and "a classified value" not in reply.text, path
    for path in ("/messages/tail", "/messages/search"):
        events = olga.events(path, topic="secrets", q="classified")
        name, text = next(event for event in events if event[0] in ("refused", "row"))
        assert name == "refused" and "may not read" in text
        events.close()
    assert "done" in olga.post("/topic/alter?name=secrets", {"retention_ms": "30d"}).words


def test_a_reader_sees_messages_and_may_not_change_the_topic(site: ConsoleThread) -> None:
    rita = _as(site, "rita")
    assert "a classified value" in rita.get("/messages", topic="secrets").words
    reply = rita.post("/topic/delete?name=secrets", {"confirm": "secrets"})
    assert reply.status == 400 and "rita may not delete" in reply.words
    assert rita.get("/audit").status == 403 and rita.get("/access/rules").status == 403
    assert rita.get("/pipelines").status == 403
    publish = rita.post("/publish", {"topic": "secrets", "value": "x", "encoding": "text"}, page="/publish?topic=secrets")
    assert "rita may not publish" in publish.words
    assert "need the right to describe the broker" in rita.get("/").words


def test_two_logins_do_not_share_tokens_or_notices(site: ConsoleThread) -> None:
    olga, rita = _as(site, "olga"), _as(site, "rita")
    assert olga.get("/topics/new").token != rita.get("/topics/new").token
    assert rita.post("/topics/new", {"token": olga.get("/topics/new").token, "name": "crossed"}).status == 400


def test_logging_out_ends_the_login(site: ConsoleThread) -> None:
    rita = _as(site, "rita")
    cookies = dict(rita.cookies)
    rita.post("/logout", {"token": rita.get("/topics").token})
    rita.cookies = cookies
    assert rita.request("GET", "/topics").status == 303


def test_users_are_created_altered_and_deleted(admin: Browser, site: ConsoleThread) -> None:
    token = admin.get("/access").token
    fields: dict[str, object] = {
        "token": token,
        "do": "create",
        "name": "tim",
        "role": ["consumer"],
        "password": PASSWORD,
        "again": PASSWORD,
    }
    reply = admin.post("/access/user", fields)
    assert "Create user tim: done" in reply.words and "headrace user create tim --role consumer" in reply.commands[0]
    assert PASSWORD not in reply.text
    assert "the passwords differ" in admin.post("/access/user", {**fields, "name": "tam", "again": "x"}).words
    reply = admin.post("/access/user", {"token": token, "do": "alter", "name": "tim", "enabled": "no"})
    assert "Alter user tim: done" in reply.words and "--no-roles --disable" in reply.commands[0]
    assert "disabled" in admin.get("/access/user", name="tim").words
    assert Browser(site.port).log_in("tim", PASSWORD).status == 403
    new = {"token": token, "do": "password", "name": "tim", "password": "another long password", "again": "another long password"}
    assert "Change the password of tim: done" in admin.post("/access/user", {**new}).words
    assert "does not match" in admin.post("/access/user", {"token": token, "do": "delete", "name": "tim", "confirm": "t"}).words
    assert "Delete user tim: done" in admin.post("/access/user", {"token": token, "do": "delete", "name": "tim", "confirm": "tim"}).words


def test_rules_and_roles_are_added_and_removed(admin: Browser, site: ConsoleThread) -> None:
    rule = {"do": "add", "effect": "deny", "whom": "user", "name": "rita", "action": ["read"], "kind": "topic", "resource": "hidden*"}
    reply = admin.post("/access/rules", dict(rule))
    assert "Add a rule for user:rita: done" in reply.words and "topic:hidden*" in reply.words
    assert "headrace acl create read 'topic:hidden*' --for-user rita --deny" in reply.commands[0]
    answer = admin.get("/access/check", user="rita", action="read", kind="topic", resource="hidden.1")
    assert "No: rita may not read" in answer.words and "a rule for user:rita denies it on topic:hidden*" in answer.words
    yes = admin.get("/access/check", user="rita", action="read", kind="topic", resource="other")
    assert "Yes: rita may read" in yes.words and "the role consumer grants it on topic:*" in yes.words
    fields = {"subject": "user:rita", "effect": "deny", "kind": "topic", "match": "prefix", "name": "hidden", "actions": "read"}
    assert "There is no rule" in admin.post("/access/rules", {"do": "remove", **fields}).words
    assert admin.post("/access/rules", {**rule, "action": []}).status == 400
    reply = admin.post("/access/roles", {"do": "put", "name": "auditors", "grants": "describe@topic:*\nread@topic:a", "description": "x"})
    assert "Put role auditors: done" in reply.words and "read@topic:a" in reply.words
    assert admin.post("/access/roles", {"do": "put", "name": "x", "grants": "fly@topic:a"}).status == 400
    assert "Delete role auditors: done" in admin.post("/access/roles", {"do": "delete", "name": "auditors"}).words


def test_a_key_is_shown_once_and_revoked(admin: Browser, site: ConsoleThread) -> None:
    reply = admin.post("/access/keys", {"do": "create", "owner": "rita", "scopes": "read@topic:secrets", "expires_in": "90d"})
    (key,) = re.findall(r"hr_[A-Za-z0-9_-]+", reply.commands[1])
    assert "read@topic:secrets" in reply.words
    again = admin.get("/access/keys")
    assert key not in again.text
    id = key.split("_")[1]
    assert f"Revoke key {id}: done" in admin.post("/access/keys", {"do": "revoke", "id": id}).words
    assert "revoked" in admin.get("/access/keys").words
    assert f"Delete key {id}: done" in admin.post("/access/keys", {"do": "delete", "id": id}).words
    assert admin.post("/access/keys", {"do": "create", "owner": "rita", "expires_in": "soon"}).status == 400


def test_the_audit_log_is_filtered(admin: Browser, site: ConsoleThread) -> None:
    _as(site, "olga").post("/topics/new", {"name": "audited"})
    page = admin.get("/audit", by="olga", type="topic")
    assert "topic:audited" in page.words and "topic:other" not in page.words
    assert "headrace audit list -n 200 --type topic --by olga" in page.commands[0]
    assert admin.get("/audit", **{"from": "yesterday"}).status == 400
    assert "topic:audited" not in admin.get("/audit", to="2001-01-01").words


def test_actions_in_the_console_are_kept_with_user_and_address(tmp_path: Path) -> None:
    file = tmp_path / "audit.jsonl"
    with running(tmp_path, is_enforced=True, audit_file=file) as (_, console):
        admin = _as(console, "admin", ADMIN_PASSWORD)
        admin.post("/topics/new", {"name": "noted"})
        admin.post("/topic/delete?name=noted", {"confirm": "noted"})
        page = admin.get("/audit/console")
        assert "Create topic noted" in page.words and "127.0.0.1" in page.words and "success" in page.words
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(row["user"], row["action"], row["result"]) for row in rows] == [
        ("admin", "Create topic noted", "success"),
        ("admin", "Delete topic noted", "success"),
    ]


def test_a_broker_that_begins_to_require_logins_ends_the_open_ones(tmp_path: Path) -> None:
    with running(tmp_path) as (broker, console):
        browser = Browser(console.port)
        assert browser.get("/topics").status == 200
        broker.stop()
        broker.is_enforced = True
        broker.open()
        deadline = time.monotonic() + WAIT_SECONDS
        while (reply := browser.request("GET", "/topics")).status != 303:
            assert time.monotonic() < deadline
            time.sleep(0.2)
        assert reply.headers["location"].startswith("/login")
        assert browser.log_in("admin", ADMIN_PASSWORD).status == 200
