"""Every page and action over HTTP with open access, as a browser without JavaScript uses them."""

from __future__ import annotations

import json
import re
import time
from itertools import count
from typing import Any
from urllib.parse import unquote

import pytest

from headrace.clients.flymq.client import FlyMqClient
from tests.console.harness import WAIT_SECONDS, BrokerThread, Browser

_numbers = count()


@pytest.fixture
def topic(broker: BrokerThread) -> str:
    """A topic with 3 partitions and 120 records."""
    name = f"orders.{next(_numbers)}"
    broker.call("topic.create", topic=name, partitions=3)
    rows: list[dict[str, object]] = [
        {
            "key": f"customer-{number}",
            "value": json.dumps({"order": number, "note": f"note {number}"}),
            "headers": [("trace", f"t{number}")],
        }
        for number in range(120)
    ]
    broker.publish(name, *rows)
    return name


def places(text: str) -> list[str]:
    return re.findall(r'class="place">(\d+:\d+)<', text)


def test_the_overview_has_figures_charts_and_the_broker(browser: Browser, topic: str) -> None:
    page = browser.get("/")
    assert page.status == 200
    for words in ("Overview", "Records", "Last 5 minutes", "Published", "Lag of all groups", "embedded", "flymq", "headrace status"):
        assert words in page.words or words in page.text, words
    assert "<svg" in page.text


def test_the_overview_warns_of_dead_letters_and_says_what_to_do(browser: Browser, broker: BrokerThread) -> None:
    name = _with_dead_letters(broker, 1)
    page = browser.get("/")
    assert f"1 dead letter of {name}" in page.words and "replay or purge" in page.words


def test_the_overview_stream_sends_the_page_part(browser: Browser) -> None:
    browser.get("/")
    name, data = next(browser.events("/live"))
    assert name == "replace" and "Last 5 minutes" in data


def test_topics_are_filtered_sorted_and_paged(browser: Browser, broker: BrokerThread) -> None:
    for number in range(3):
        broker.call("topic.create", topic=f"list-{number}", partitions=number + 1)
    broker.call("topic.create", topic="another", partitions=1)
    page = browser.get("/topics", q="LIST-", sort="-partitions")
    assert re.findall(r">(list-\d)</a>", page.text) == ["list-2", "list-1", "list-0"]
    assert "3 of" in page.words
    part = browser.get("/topics", q="list-1", part=1)
    assert part.text.count("list-1</a>") == 1 and "<html" not in part.text
    assert "No topic contains “zzz”" in browser.get("/topics", q="zzz").words


def test_a_topic_is_created_altered_and_deleted(browser: Browser, broker: BrokerThread) -> None:
    reply = browser.post("/topics/new", {"name": "life", "partitions": "2", "retention_ms": "7d", "cleanup": "delete", "compress": "yes"})
    assert "Create topic life: done" in reply.words
    assert "headrace topic create life --partitions 2 --cleanup delete --retention 7d --compress" in reply.commands[0]
    described = broker.call("topic.describe", topic="life")
    assert len(described["partitions"]) == 2 and described["config"]["retention_ms"] == 7 * 24 * 3600 * 1000
    reply = browser.post("/topic/alter?name=life", {"partitions": "4", "ttl_ms": "1h"})
    assert reply.status == 200 and len(broker.call("topic.describe", topic="life")["partitions"]) == 4
    assert browser.post("/topic/delete?name=life", {"confirm": "lif"}).status == 400
    reply = browser.post("/topic/delete?name=life", {"confirm": "life"})
    assert "Delete topic life: done" in reply.words and "headrace topic delete life --yes" in reply.commands[0]
    assert browser.get("/topic", name="life").status == 404


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"name": "bad", "partitions": "x"}, "expected a number"),
        ({"name": "bad", "retention_ms": "soon"}, "Retention time"),
        ({"name": "bad", "cleanup": "burn"}, "expected one of delete, compact"),
        ({"name": "with space"}, "white space"),
    ],
)
def test_a_wrong_field_shows_the_form_again_with_the_reason(browser: Browser, fields: dict[str, object], error: str) -> None:
    reply = browser.post("/topics/new", fields)
    assert reply.status == 400 and error in reply.words
    assert f'value="{fields["name"]}"' in reply.text


def test_a_topic_shows_partitions_settings_and_groups(browser: Browser, broker: BrokerThread, topic: str) -> None:
    _commit(broker, topic, "billing", 0, 3)
    page = browser.get("/topic", name=topic)
    for words in ("First offset", "End offset", "retention_ms", "billing", "requires no schema"):
        assert words in page.words, words


def test_messages_are_shown_newest_first_and_continue_without_repeats(browser: Browser, topic: str) -> None:
    seen: list[str] = []
    page = browser.get("/messages", topic=topic, limit=50)
    for _ in range(3):
        seen += places(page.text)
        found = re.search(r'rel="next" href="([^"]+)"', page.text)
        if not found:
            break
        page = browser.get(found[1].replace("&amp;", "&"))
    assert len(seen) == len(set(seen)) == 120
    assert json.loads(browser.get("/messages/export", topic=topic, limit=1).text)["partition"] is not None


def test_messages_begin_at_the_start_an_offset_or_a_time(browser: Browser, topic: str) -> None:
    first = browser.get("/messages", topic=topic, start="earliest", partition=1, limit=5)
    assert places(first.text) == [f"1:{offset}" for offset in range(5)]
    later = browser.get("/messages", topic=topic, start="offset", at_value=7, partition=1, limit=2)
    assert places(later.text) == ["1:7", "1:8"]
    assert len(places(browser.get("/messages", topic=topic, start="time", at_value="2001-01-01", limit=500).text)) == 120
    assert places(browser.get("/messages", topic=topic, start="time", at_value="2999-01-01T00:00").text) == []
    assert browser.get("/messages", topic=topic, start="time", at_value="soon").status == 400
    assert browser.get("/messages", topic=topic, partition=9).status == 404


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ({"q": "customer-77", "in_key": 1}, 1),
        ({"q": "NOTE 77", "in_value": 1}, 1),
        ({"q": "t77", "in_headers": 1}, 1),
        ({"q": "t77", "in_key": 1}, 0),
        ({"q": "customer-1", "limit": 10}, 10),
    ],
)
def test_search_looks_in_key_value_and_headers(browser: Browser, topic: str, query: dict[str, Any], found: int) -> None:
    page = browser.get("/messages", topic=topic, **query)
    assert len(places(page.text)) == found


def test_a_streamed_search_sends_matches_progress_and_an_end(browser: Browser, topic: str) -> None:
    browser.get("/")
    events = list(browser.events("/messages/search", topic=topic, q="customer-11", in_key=1))
    names = [name for name, _ in events]
    assert names.count("row") == 11 and names[-1] == "done"
    counts = json.loads([data for name, data in events if name == "progress"][-1])
    assert counts == {"scanned": 120, "left": 0, "found": 11}


def test_a_streamed_search_ends_at_its_limit_and_offers_to_go_on(browser: Browser, topic: str) -> None:
    browser.get("/")
    query: dict[str, Any] = {"topic": topic, "q": "customer", "limit": 7}
    seen: list[str] = []
    while True:
        events = list(browser.events("/messages/search", **query))
        seen += [place for name, data in events if name == "row" for place in places(data)]
        more = re.search(r"[?&;]at=([0-9A-F%:,]+)", events[-1][1])
        if more is None:
            break
        assert [name for name, _ in events].count("row") == 7 and "Search on" in events[-1][1]
        query["at"] = unquote(more[1])
    assert "Every record was searched" in events[-1][1]
    assert len(seen) == len(set(seen)) == 120


def test_the_live_tail_sends_records_that_arrive(browser: Browser, broker: BrokerThread, topic: str) -> None:
    browser.get("/")
    events = browser.events("/messages/tail", topic=topic)
    assert next(events) == ("begin", "")
    broker.publish(topic, {"value": "fresh <b>", "key": "k"})
    name, data = next(events)
    assert name == "row" and "fresh &lt;b&gt;" in data
    events.close()


def test_a_message_is_shown_in_each_format_and_can_be_downloaded(browser: Browser, topic: str) -> None:
    place = {"topic": topic, "partition": 1, "offset": 2}
    page = browser.get("/message", **place)
    assert "shown as json" in page.words and "trace" in page.words
    for format, words in (("text", "shown as text"), ("hex", "00000000"), ("avro", "requires no avro schema")):
        assert words in browser.get("/message", **place, format=format).words, format
    reply = browser.get("/message/download", **place)
    assert json.loads(reply.text)["note"].startswith("note")
    assert reply.headers["content-type"] == "application/octet-stream" and "attachment" in reply.headers["content-disposition"]
    assert browser.get("/message", topic=topic, partition=1, offset=999).status == 404


@pytest.mark.parametrize(("format", "first"), [("jsonl", '{"topic":'), ("csv", "topic,partition,offset")])
def test_messages_are_exported(browser: Browser, topic: str, format: str, first: str) -> None:
    reply = browser.get("/messages/export", **{"topic": topic, "as": format, "limit": 1000, "start": "earliest"})
    assert reply.text.startswith(first) and len(reply.text.splitlines()) == 120 + (format == "csv")
    assert "attachment" in reply.headers["content-disposition"]


def test_an_exported_cell_is_never_a_formula(browser: Browser, broker: BrokerThread) -> None:
    broker.publish("formulas", {"value": "=cmd()", "key": "+1"})
    text = browser.get("/messages/export", **{"topic": "formulas", "as": "csv"}).text
    assert "'=cmd()" in text and "'+1" in text


def test_a_message_is_published_and_published_again(browser: Browser, broker: BrokerThread, topic: str) -> None:
    fields = {"topic": topic, "key": "k", "headers": "a: 1\nb: two: 3", "value": "hello\nworld", "encoding": "text", "key_encoding": "text"}
    reply = browser.post("/publish", {**fields, "partition": "2"}, page=f"/publish?topic={topic}")
    assert "partition 2, offset" in reply.words and "hello" in reply.words and "two: 3" in reply.words
    assert "headrace pub" in reply.commands[0] and "--header a=1" in reply.commands[0]
    offset = broker.call("topic.describe", topic=topic)["partitions"][2]["end"] - 1
    form = browser.get("/publish", topic=topic, partition=2, offset=offset)
    assert "hello\nworld</textarea>" in form.text and "b: two: 3" in form.text


def test_bytes_and_tombstones_are_published(browser: Browser, broker: BrokerThread) -> None:
    broker.call("topic.create", topic="raw", partitions=1)
    base = {"topic": "raw", "key": "a2V5", "key_encoding": "base64", "headers": ""}
    assert browser.post("/publish", {**base, "value": "//79", "encoding": "base64"}).status == 200
    assert browser.post("/publish", {**base, "value": "", "encoding": "tombstone"}).status == 200
    assert browser.post("/publish", {**base, "value": "!!", "encoding": "base64"}).status == 400
    assert "ff fe fd" in browser.get("/message", topic="raw", partition=0, offset=0).words
    assert "tombstone" in browser.get("/message", topic="raw", partition=0, offset=1).words
    assert 'value="a2V5"' not in browser.get("/publish", topic="raw", partition=0, offset=0).text  # the key is text


def test_a_value_of_five_megabytes_is_cut_and_can_be_downloaded(browser: Browser, broker: BrokerThread) -> None:
    value = b'{"a": "' + b"x" * (5 << 20) + b'"}'

    async def publish(client: FlyMqClient) -> None:
        await client.publish("large", value)

    broker.with_client(publish)
    assert len(browser.get("/messages", topic="large").body) < 200_000
    page = browser.get("/message", topic="large", partition=0, offset=0)
    assert len(page.body) < 200_000 and "Only the beginning is shown" in page.words
    assert browser.get("/message/download", topic="large", partition=0, offset=0).body == value
    assert browser.get("/publish", topic="large", partition=0, offset=0).status == 400


def _commit(broker: BrokerThread, topic: str, group: str, partition: int, offset: int) -> None:
    async def work(client: FlyMqClient) -> None:
        await client.commit(topic, offset, group=group, partition=partition)

    broker.with_client(work)


def test_a_group_shows_members_lag_and_is_reset_with_a_preview(browser: Browser, broker: BrokerThread, topic: str) -> None:
    group = f"group-{topic}"
    for partition in range(3):
        _commit(broker, topic, group, partition, 5)
    assert group in browser.get("/groups").words
    page = browser.get("/group", name=group)
    assert "No member is connected" in page.words and "lag 105" in page.words and "Lag" in page.text
    query = f"/group/reset?name={group}&topic={topic}&to=latest"
    preview = browser.get(query)
    rows = re.findall(r'name="offset" value="(\d+:\d+)"', preview.text)
    assert len(rows) == 3 and "Lag then" in preview.words
    reply = browser.post(query, {"offset": rows}, page=query)
    assert "lag 0" in reply.words and f"headrace group reset {group} {topic} --to-latest --yes" in reply.commands[0]
    back = f"/group/reset?name={group}&topic={topic}&to=offset&value=2&partition=1"
    reply = browser.post(back, {"offset": ["1:2"]}, page=back)
    assert "lag 0" not in reply.words
    assert browser.get("/group/reset", name=group, topic=topic, to="offset", value="x").status == 400
    reply = browser.post(f"/group/delete?name={group}", {"confirm": group})
    assert f"Delete group {group}: done" in reply.words and browser.get("/group", name=group).status == 404


def _with_dead_letters(broker: BrokerThread, count: int) -> str:
    """Return a topic with rejected records."""
    name = f"letters-{next(_numbers)}"

    async def work(client: FlyMqClient) -> None:
        await client.create_topic(name)
        await client.register_schema(f"{name}-schema", "json", b'{"type": "object"}')
        await client.require_schema(name, f"{name}-schema", on_invalid="dead_letter")
        for number in range(count):
            await client.publish(name, f"no object {number}".encode(), key=b"k")
        await client.release_schema(name)

    broker.with_client(work)
    return name


def test_dead_letters_are_replayed_and_purged_one_several_and_all(browser: Browser, broker: BrokerThread) -> None:
    name = _with_dead_letters(broker, 6)
    assert name in browser.get("/dead-letters").words
    page = browser.get("/dead-letters/of", topic=name)
    assert "6 waiting" in page.words and "rejected" in page.words and "never written to the topic" in page.words
    ids = re.findall(r'name="id" value="([^"]+)"', page.text)
    preview = browser.post("/dead-letters/preview", {"token": page.token, "topic": name, "what": "replay", "id": ids[:2]})
    assert "Replay 2 dead letters" in preview.words and "no object 0" in preview.words
    reply = browser.post("/dead-letters/do", {"token": page.token, "topic": name, "what": "replay", "id": ids[:2]})
    assert "4 waiting" in reply.words and f"headrace dlq replay {name} {ids[0]} {ids[1]}" in reply.commands[0]
    assert broker.call("topic.describe", topic=name)["partitions"][0]["end"] == 2
    browser.post("/dead-letters/preview", {"token": page.token, "topic": name, "what": "discard", "id": ids[2]})
    reply = browser.post("/dead-letters/do", {"token": page.token, "topic": name, "what": "discard", "id": ids[2]})
    assert "3 waiting" in reply.words and broker.call("topic.describe", topic=name)["partitions"][0]["end"] == 2
    preview = browser.post("/dead-letters/preview", {"token": page.token, "topic": name, "what": "replay-all"})
    assert "Replay 3 dead letters" in preview.words
    browser.post("/dead-letters/do", {"token": page.token, "topic": name, "what": "purge-all", "id": ids[3:]})
    assert "0 waiting" in browser.get("/dead-letters/of", topic=name).words
    again = browser.post("/dead-letters/do", {"token": page.token, "topic": name, "what": "replay", "id": ids[0]})
    assert "message not found" in again.words or ids[0] in again.words
    assert browser.post("/dead-letters/preview", {"token": page.token, "topic": name, "what": "burn", "id": ids[0]}).status == 400


def test_a_dead_letter_can_be_edited_and_published(browser: Browser, broker: BrokerThread) -> None:
    name = _with_dead_letters(broker, 1)
    form = browser.get("/publish", **{"topic": name, "from": f"{name}.dlq", "partition": 0, "offset": 0})
    assert "no object 0</textarea>" in form.text and f'value="{name}"' in form.text and "x-headrace-" not in form.text


def test_delayed_messages_are_listed_and_cancelled(browser: Browser, broker: BrokerThread) -> None:
    async def work(client: FlyMqClient) -> str:
        return (await client.publish_delayed("later", b"value", delay_ms=3_600_000, key=b"soon")).id

    id = broker.with_client(work)
    page = browser.get("/delayed")
    assert id in page.words and "later" in page.words and "soon" in page.words
    reply = browser.post("/delayed/cancel", {"token": page.token, "id": id, "topic": "later"})
    assert f"Cancel delayed message {id}: done" in reply.words and "No message waits" in reply.words
    assert browser.post("/delayed/cancel", {"token": page.token, "id": id, "topic": "later"}).words.count("not found") >= 1


def test_schemas_are_checked_registered_compared_and_deleted(browser: Browser) -> None:
    first = {
        "name": "person",
        "type": "json",
        "compatibility": "",
        "definition": '{"type": "object", "properties": {"a": {"type": "string"}}}',
    }
    checked = browser.post("/schemas/new", {**first, "do": "check"})
    assert "Compatible" in checked.words and browser.get("/schema", name="person").status == 404
    assert "version 1" in browser.post("/schemas/new", {**first, "do": "register"}).words
    worse = {**first, "definition": '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}'}
    refused = browser.post("/schemas/new", {**worse, "do": "register"})
    assert "Not compatible" in refused.words and "/a" in refused.words
    assert "version 2" in browser.post("/schemas/new", {**worse, "compatibility": "none", "do": "register"}).words
    page = browser.get("/schema", name="person")
    assert "Changes from version 1" in page.words and '<span class="added">' in page.text and '<span class="removed">' in page.text
    assert browser.post("/schemas/new", {**first, "definition": "{", "do": "check"}).status in (400, 200)
    reply = browser.post("/schema/delete?name=person", {"confirm": "person"})
    assert "Delete schema person: done" in reply.words


def test_a_topic_requires_a_schema_and_values_are_decoded_with_it(browser: Browser, broker: BrokerThread) -> None:
    definition = {"type": "record", "name": "Order", "fields": [{"name": "id", "type": "long"}, {"name": "who", "type": "string"}]}
    browser.post("/schemas/new", {"name": "order-avro", "type": "avro", "definition": json.dumps(definition), "do": "register"})
    broker.call("topic.create", topic="avro", partitions=1)
    page = browser.get("/topic", name="avro")
    reply = browser.post("/topic/schema", {"token": page.token, "topic": "avro", "schema": "order-avro", "on_invalid": "reject"})
    assert "Records must match order-avro" in reply.words
    broker.publish("avro", {"value": b"\x54\x06Ann"})
    shown = browser.get("/message", topic="avro", partition=0, offset=0)
    assert "shown as decoded" in shown.words and '"who": "Ann"' in shown.words and "42" in shown.words
    assert "shown as hex" in browser.get("/message", topic="avro", partition=0, offset=0, format="hex").words
    assert "requires no schema" in browser.post("/topic/schema", {"token": page.token, "topic": "avro", "schema": ""}).words


def test_protobuf_values_are_decoded(browser: Browser, broker: BrokerThread) -> None:
    definition = 'syntax = "proto3"; message Order { int64 id = 1; string who = 2; }'
    browser.post("/schemas/new", {"name": "order-proto", "type": "protobuf", "definition": definition, "do": "register"})
    broker.call("topic.create", topic="proto", partitions=1)
    token = browser.get("/topic", name="proto").token
    browser.post("/topic/schema", {"token": token, "topic": "proto", "schema": "order-proto"})
    broker.publish("proto", {"value": b"\x08\x2a\x12\x03Ann"})
    assert '"who": "Ann"' in browser.get("/message", topic="proto", partition=0, offset=0).words


def test_the_theme_is_kept_in_a_cookie(browser: Browser) -> None:
    reply = browser.post("/theme", {"token": "", "theme": "dark", "to": "/topics"})
    assert 'data-theme="dark"' in reply.text and "Topics" in reply.words


def test_hostile_names_and_contents_are_harmless_everywhere(browser: Browser, broker: BrokerThread) -> None:
    evil = "<img/src=x/onerror=alert(1)>"
    broker.call("topic.create", topic=evil, partitions=1)
    hostile: list[dict[str, object]] = [
        {"value": "<script>alert(1)</script>", "key": "<b>", "headers": [("<i>", "</dd>")]},
        {"value": json.dumps({"</span><script>": "<script>"}), "key": "\u202ertl"},
        {"value": b"\x1b]0;title\x07\xff\xfe", "key": "k" * 60_000},
    ]
    broker.publish(evil, *hostile)
    _commit(broker, evil, evil, 0, 1)
    pages = [
        browser.get("/"),
        browser.get("/topics"),
        browser.get("/topic", name=evil),
        browser.get("/messages", topic=evil),
        browser.get("/messages", topic=evil, q="<script>"),
        browser.get("/message", topic=evil, partition=0, offset=0),
        browser.get("/message", topic=evil, partition=0, offset=2),
        browser.get("/publish", topic=evil, partition=0, offset=1),
        browser.get("/groups"),
        browser.get("/group", name=evil),
        browser.get("/group/reset", name=evil, topic=evil),
        browser.get("/dead-letters/of", topic=evil),
        browser.get("/access/check", user=evil, action="read", kind="topic", resource=evil),
    ]
    for page in pages:
        assert page.status == 200
        assert "<img/" not in page.text and "<script>" not in page.text.replace('<script src="/static/console.js" defer></script>', "")
        assert "\u202e" not in page.text.replace('value="\u202e', "") and "\x1b" not in page.text
        assert len(page.body) < 300_000


def test_pages_say_when_the_broker_is_away_and_work_again_afterwards(browser: Browser, broker: BrokerThread, topic: str) -> None:
    assert browser.get("/topics").status == 200
    broker.stop()
    try:
        away = browser.get("/topic", name=topic)
        assert away.status == 503 and "loads again" in away.words and away.headers["retry-after"] == "3"
    finally:
        broker.open()
    deadline = time.monotonic() + WAIT_SECONDS
    while browser.get("/topic", name=topic).status != 200:
        assert time.monotonic() < deadline
