"""The operation `status` of BROKER: each principal sees what it may see."""

from __future__ import annotations

from typing import Any

from headrace.access.access import AccessSettings, Mode
from headrace.broker.authorizer import ANONYMOUS, Principal
from headrace.records import RecordBatch
from headrace.sessions.flymq.status import status
from tests.sessions.flymq.support import DEV, NOW, ListenerContext, running_server

ROOT = Principal("admin", "flymq")
FACTS = {"access": "enforced", "version": "1.2", "engine": "memory", "listeners": []}


async def filled(home: ListenerContext, who: Principal) -> None:
    await home.broker.create_topic(who, "t", partitions=2)
    await home.broker.publish(who, "t", RecordBatch([b"a", b"b", b"c"]), partition=1)
    await home.broker.commit(who, "g", {("t", 1): 1})
    await home.broker.move_to_dead_letters(who, "t", 1, 0)


async def seen(home: ListenerContext, who: Principal) -> Any:
    return await status(home.broker, who, FACTS)


async def test_everything_is_in_one_reply() -> None:
    async with running_server() as home:
        await filled(home, DEV)
        home.now = NOW + 5_000
        found = await status(home.broker, DEV, {**FACTS, "access": "open"})
        assert isinstance(found, dict)
        assert found["topics"].pop("size_bytes") > 0
        assert found == {
            "principal": "dev",
            "access": "open",
            "version": "1.2",
            "uptime_ms": 5_000,
            "health": {"state": "ok", "problems": []},
            "topics": {"count": 2, "partitions": 3, "records": 4},
            "groups": [{"group": "g", "topic": "t", "lag": 2}],
            "groups_count": 1,
            "dead_letters": [{"topic": "t", "waiting": 1}],
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
