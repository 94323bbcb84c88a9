"""The overview: each principal sees what it may see, and the counters are those of the traffic."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from headrace.access.access import AccessSettings, Mode
from headrace.broker.authorizer import ANONYMOUS, Principal
from headrace.broker.overview import overview, topic_counters
from headrace.overview import Overview, Traffic, Warning, rates, total
from headrace.records import RecordBatch
from tests.sessions.flymq.support import DEV, NOW, ListenerContext, running_server

ROOT = Principal("admin", "flymq")
DEAD_LETTERS_ADVICE = "headrace dlq list TOPIC shows the reasons; then replay or purge them"
FACTS = {"access": "enforced", "version": "1.2", "engine": "memory", "listeners": []}


async def filled(home: ListenerContext, who: Principal) -> None:
    await home.broker.create_topic(who, "t", partitions=2)
    await home.broker.publish(who, "t", RecordBatch([b"a", b"b", b"c"]), partition=1)
    await home.broker.commit(who, "g", {("t", 1): 1})
    await home.broker.move_to_dead_letters(who, "t", 1, 0)


async def seen(home: ListenerContext, who: Principal) -> Any:
    return await overview(home.broker, who, FACTS)


async def test_everything_is_in_one_reply() -> None:
    async with running_server() as home:
        await filled(home, DEV)
        home.now = NOW + 5_000
        found: dict[str, Any] = await overview(home.broker, DEV, {**FACTS, "access": "open"})
        assert found["topics"].pop("size_bytes") > 0
        assert found == {
            "principal": "dev",
            "access": "open",
            "version": "1.2",
            "uptime_ms": 5_000,
            "time_ms": NOW + 5_000,
            "started_at_ms": NOW,
            "health": {"state": "ok", "problems": []},
            "topics": {"count": 2, "partitions": 3, "records": 4},
            "groups": [{"group": "g", "topic": "t", "lag": 2}],
            "groups_count": 1,
            "lag": 2,
            "dead_letters": [{"topic": "t", "waiting": 1}],
            "delayed": 0,
            "traffic": {"flymq": Traffic(published_records=3, published_bytes=3)},
            "warnings": [Warning(name="dead_letters", text="1 dead letters wait in 1 topics", advice=DEAD_LETTERS_ADVICE)],
            "server": {"engine": "memory", "listeners": []},
        }


async def test_a_user_without_rights_sees_neither_the_server_nor_the_topics_of_others() -> None:
    async with running_server(access=AccessSettings(Mode.ENFORCED)) as home:
        await filled(home, ROOT)
        assert (await seen(home, ROOT))["server"] == {"engine": "memory", "listeners": []}
        ordinary = await seen(home, Principal("ann", "flymq"))
        assert (ordinary["version"], ordinary["server"]) == ("1.2", None)
        assert (ordinary["topics"]["count"], ordinary["groups"], ordinary["dead_letters"]) == (0, [], [])
        unknown = await seen(home, Principal(ANONYMOUS, "flymq"))
        assert (unknown["version"], unknown["uptime_ms"], unknown["server"]) == (None, None, None)


SERVER = {
    "pid": 1,
    "engine": "memory",
    "data": "",
    "disk": {"free_bytes": 100, "total_bytes": 1000, "headroom_bytes": 60},
    "listeners": [],
    "connections": {"open": 95, "max": 100, "by_protocol": {}},
    "activity": {"open_files": 5, "open_files_max": 10},
    "loop_lag": {"p50_ms": 0.1, "p99_ms": 0.2, "max_ms": 300.0, "recent_max_ms": 300.0},
}


async def read(home: ListenerContext, who: Principal) -> Overview:
    """Decode the reply as a client does."""
    found = await overview(home.broker, who, {"access": "open", "version": "1.2", **SERVER})
    return msgspec.json.decode(msgspec.json.encode(found), type=Overview)


async def test_rates_are_differences_of_two_readings() -> None:
    async with running_server() as home:
        await home.broker.create_topic(DEV, "t")
        await home.broker.publish(DEV, "t", RecordBatch([b"before"]))
        before = await read(home, DEV)
        home.now += 2_000
        await home.broker.publish(DEV, "t", RecordBatch([b"four", b"five"], keys=[b"k", b"k"]))
        await home.broker.fetch(Principal("dev", "flight"), "t", 0, 0, bytes_max=1 << 20)
        found = rates(before, await read(home, DEV))
        assert found is not None
        assert (found["flymq"].published_records, found["flymq"].published_bytes) == (1.0, 5.0)
        assert (found["flight"].delivered_records, found["flight"].delivered_bytes) == (1.5, 8.0)
        assert found["all"].published_records == 1.0 and found["all"].delivered_records == 1.5


async def test_readings_of_two_lives_of_a_broker_have_no_rate() -> None:
    async with running_server() as home:
        before = await read(home, DEV)
        home.now += 1_000
        after = await read(home, DEV)
        assert rates(before, after) is not None
        assert rates(before, msgspec.structs.replace(after, started_at_ms=after.started_at_ms + 1)) is None


async def test_totals_never_decrease_when_a_topic_is_deleted() -> None:
    async with running_server() as home:
        await home.broker.create_topic(DEV, "t")
        await home.broker.publish(DEV, "t", RecordBatch([b"abc"]))
        await home.broker.delete_topic(DEV, "t")
        assert total((await read(home, DEV)).traffic) == Traffic(published_records=1, published_bytes=3)
        assert await topic_counters(home.broker, DEV) == []


async def test_every_topic_has_its_size_and_its_traffic() -> None:
    async with running_server() as home:
        await home.broker.create_topic(DEV, "a", partitions=2)
        await home.broker.create_topic(DEV, "b")
        await home.broker.publish(DEV, "a", RecordBatch([b"1", b"22"], keys=[b"x", b"y"]))
        await home.broker.fetch(DEV, "b", 0, 0, bytes_max=1)
        (first, second) = await topic_counters(home.broker, DEV)
        assert (first.topic, first.partitions, first.records, first.published_records, first.published_bytes) == ("a", 2, 2, 2, 5)
        assert first.size_bytes > 0
        assert (second.topic, second.records, second.published_records, second.delivered_records) == ("b", 0, 0, 0)


async def test_the_traffic_of_hidden_topics_is_hidden() -> None:
    async with running_server(access=AccessSettings(Mode.ENFORCED)) as home:
        await filled(home, ROOT)
        assert (await seen(home, Principal("ann", "flymq")))["traffic"] == {}
        assert await topic_counters(home.broker, Principal("ann", "flymq")) == []


@pytest.mark.parametrize("name", ["disk_space", "connections", "loop_lag"])
async def test_a_warning_has_its_numbers_and_the_next_step(name: str) -> None:
    async with running_server() as home:
        (warning,) = [one for one in (await read(home, DEV)).warnings if one.name == name]
        assert any(character.isdigit() for character in warning.text) and warning.advice
