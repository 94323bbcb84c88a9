"""Log lines of requests name the ids that the client gave to them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from headrace.broker.settings import BrokerSettings
from headrace.errors import DiskFull
from headrace.sessions.request_ids import shown
from headrace.wire.blipmq import encoder
from headrace.wire.fujin import ReaderKind, Request, encode
from tests.sessions.blipmq.support import Disk, running_server
from tests.sessions.fujin.support import cid, fujin_protocol


@pytest.fixture
def lines() -> Iterator[list[tuple[str, str]]]:
    """Return protocol and ids, and the reason, of each line as it comes."""
    found: list[tuple[str, str]] = []

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            fields: dict[str, Any] = vars(record)
            assert record.getMessage() == "request refused" and fields["peer"]
            found.append((f"{fields['protocol']} {fields['request']}", fields["reason"]))

    logger, handler = logging.getLogger("headrace.sessions.request_ids"), Lines()
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    yield found
    logger.setLevel(logging.NOTSET)
    logger.removeHandler(handler)


async def test_refused_requests_of_blipmq_are_logged_with_their_ids(lines: list[tuple[str, str]]) -> None:
    async with running_server() as broker:
        peer = await broker.client()
        await peer.exchange(encoder.publishes(1, "", [70, 71], [b"a", b"b"]) + encoder.subscribe(72, "", 1) + encoder.polls(9, [73]))
        broker.engine.failure = DiskFull("no room")
        await peer.exchange(encoder.publishes(1, "t", [74], [b"a"]))
    assert [ids for ids, _ in lines] == ["blipmq 70,71", "blipmq 72", "blipmq 73", "blipmq 74"]
    assert lines[1][1] == "empty topic" and "no room" in lines[3][1]


async def test_refused_requests_of_fujin_are_logged_with_their_ids(lines: list[tuple[str, str]]) -> None:
    async with fujin_protocol(broker=BrokerSettings(auto_create=False)) as protocol:
        writer = await protocol.writer()
        writer.say(encode.writes("t", [cid(70), cid(71)], [b"a", b"b"]) + encode.transact(Request.COMMIT, cid(72)))
        await writer.hears()
    assert [ids for ids, _ in lines] == ["fujin 70,71", "fujin 72"]
    assert lines[0][1] == "writer not found"


async def test_a_failed_write_and_a_refused_fetch_of_fujin_are_logged_with_their_ids(lines: list[tuple[str, str]]) -> None:
    async with fujin_protocol() as protocol:
        writer = await protocol.writer()
        writer.say(encode.writes("t", [cid(1)], [b"a"]))
        await writer.hears()
        protocol.env.engine.topic, protocol.env.engine.error = "t", DiskFull("no room")
        writer.say(encode.writes("t", [cid(70)], [b"a"]))
        await writer.hears()
        reader = await protocol.reader("t", ReaderKind.PUSH)
        reader.say(encode.fetch(cid(71), 1))
        await reader.hears()
    assert [ids for ids, _ in lines] == ["fujin 70", "fujin 71"]


async def test_a_defect_names_the_request_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    contexts: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: contexts.append(context))
    async with running_server() as broker:
        peer = await broker.client()
        monkeypatch.setattr(Disk, "append", lambda *_, **__: 1 / 0)
        peer.session.receive(encoder.subscribe(77, "new", 1))
        await peer.closed()
        monkeypatch.undo()
    assert [(context["message"], context["request"]) for context in contexts] == [("a request failed", "77")]


def test_a_large_batch_shows_its_first_ids() -> None:
    assert shown(range(8)) == "0,1,2,3,4,5,6,7"
    assert shown(range(9)) == "0,1,2,3,4,5,6,7,…"
