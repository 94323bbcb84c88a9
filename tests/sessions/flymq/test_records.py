"""record.publish and record.details: headers, timestamps, and which record is refused."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from typing import Any

from headrace.broker import SchemaType
from headrace.limits import HEADERS_BYTES_MAX
from headrace.wire.flymq import advanced_messages as v
from headrace.wire.flymq.messages import Failure
from tests.sessions.flymq.support import DEV, NOW, ListenerContext, Peer, running_server


def b64(content: bytes) -> str:
    return base64.b64encode(content).decode()


async def call(peer: Peer, operation: str, **arguments: object) -> Any:
    reply = await peer.one(v.BrokerCall(operation, json.dumps(arguments).encode()))
    if isinstance(reply, Failure):
        return reply.message
    assert isinstance(reply, v.BrokerReply)
    return json.loads(reply.body)


async def publish(peer: Peer, *records: Mapping[str, object], topic: str = "t", **more: object) -> Any:
    return await call(peer, "record.publish", topic=topic, records=list(records), **more)


async def require_numbers(home: ListenerContext, topic: str = "t") -> None:
    await home.broker.ensure_topic(DEV, topic)
    await home.broker.schemas.register(DEV, "number", SchemaType.JSON, b'{"type": "number"}')
    await home.broker.schemas.require(DEV, topic, "number")


async def test_headers_keys_timestamps_and_tombstones_come_back() -> None:
    async with running_server() as home:
        peer = home.peer()
        placed = await publish(
            peer,
            {"value": b64(b"one"), "key": b64(b"k"), "headers": [["trace", b64(b"1")], ["trace", b64(b"\xff")]]},
            {"value": None, "key": b64(b"k")},
        )
        assert placed == {"placed": [[0, 0, NOW], [0, 1, NOW]], "refused": None}
        assert await call(peer, "record.details", topic="t", partition=0, offset=0, count=10) == [
            {"offset": 0, "timestamp": NOW, "headers": [["trace", b64(b"1")], ["trace", b64(b"\xff")]], "is_tombstone": False},
            {"offset": 1, "timestamp": NOW, "headers": [], "is_tombstone": True},
        ]
        assert [row["offset"] for row in await call(peer, "record.details", topic="t", partition=0, offset=1, count=1)] == [1]
        assert await call(peer, "record.details", topic="t", partition=0, offset=2, count=1) == []


async def test_records_before_a_refused_one_are_kept_and_none_after_it() -> None:
    async with running_server() as home:
        peer = home.peer()
        await require_numbers(home)
        outcome = await publish(peer, *({"value": b64(value)} for value in (b"1", b"2", b'"three"', b"4")))
        assert [place[1] for place in outcome["placed"]] == [0, 1]
        assert outcome["refused"].startswith("schema validation failed")
        assert home.broker.bounds(DEV, "t", 0).end == 2
        assert (await publish(peer, {"value": b64(b"x")})).startswith("schema validation failed")


async def test_a_record_beyond_a_limit_is_found_among_the_others() -> None:
    large = [["h", b64(bytes(HEADERS_BYTES_MAX))]]
    async with running_server() as home:
        peer = home.peer()
        records: list[dict[str, object]] = [{"value": b64(b"%d" % number)} for number in range(7)]
        records[5]["headers"] = large
        outcome = await publish(peer, *records)
        assert len(outcome["placed"]) == 5 and "exceed the limit" in outcome["refused"]
        assert home.broker.bounds(DEV, "t", 0).end == 5


async def test_an_unknown_partition_is_an_error_and_writes_nothing() -> None:
    async with running_server() as home:
        peer = home.peer()
        assert await publish(peer, {"value": b64(b"x")}, partition=7) == "partition 7 not found"
        assert home.broker.bounds(DEV, "t", 0).end == 0
