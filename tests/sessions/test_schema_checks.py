"""A record whose schema check leaves the event loop: every protocol waits for it, and later records keep their order."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from headrace.broker import Broker, Principal, SchemaType
from headrace.broker.groups.subscriptions import SubscriptionBook
from headrace.sessions.blipmq.session import BlipMqSession
from headrace.sessions.blipmq.settings import BlipMqSettings
from headrace.sessions.blipmq.subscriptions import Subscriptions
from headrace.sessions.figg.session import FiggSession
from headrace.sessions.flymq.session import FlyMqSession
from headrace.sessions.fujin.session import FujinSession
from headrace.sessions.fujin.writer import WriterIds
from headrace.sessions.rustlog.session import RustLogContext, RustLogSession
from headrace.wire import blipmq, figg, fujin
from headrace.wire.flymq import encode_request
from headrace.wire.flymq.messages import ProduceBatch
from tests.broker.harness import FragileEngine, HandClock
from tests.sessions.figg.peer import TestLink
from tests.sessions.fujin.support import StreamLink, cid
from tests.sessions.wire import Wire

WHO = Principal("ann")
WIDE = msgspec.json.encode({"items": {"anyOf": [{"const": f"word {number}"} for number in range(200)]}})
LARGE = msgspec.json.encode(["word 199"] * 1_000)
WRONG = msgspec.json.encode(["word 200"] * 1_000)
SMALL = b'["word 0"]'


def flymq(broker: Broker, values: list[bytes]) -> tuple[Any, bytes]:
    return FlyMqSession(Wire(), broker, WHO), b"".join(encode_request(ProduceBatch("t", [value])) for value in values)


def rustlog(broker: Broker, values: list[bytes]) -> tuple[Any, bytes]:
    session = RustLogSession(Wire(), broker, WHO, RustLogContext(ticks_ns=iter(range(1 << 30)).__next__))
    bodies = [b'{"Produce":{"topic":"t","partition":0,"records":[%s]}}' % msgspec.json.encode(list(value)) for value in values]
    return session, b"".join(len(body).to_bytes(4, "big") + body for body in bodies)


def blipmq_(broker: Broker, values: list[bytes]) -> tuple[Any, bytes]:
    clock = HandClock()
    book = SubscriptionBook(FragileEngine(clock=clock), "blipmq")
    subscriptions = Subscriptions(broker, book, clock=clock, settings=BlipMqSettings(), later=clock.later)
    session = BlipMqSession(Wire(), broker, subscriptions, verify_key=lambda key: WHO)
    login = blipmq.encoder.hello(1) + blipmq.encoder.auth(2, b"key")
    return session, login + blipmq.encoder.publishes(1, "t", range(3, 3 + len(values)), values)


def figg_(broker: Broker, values: list[bytes]) -> tuple[Any, bytes]:
    return FiggSession(broker, TestLink(), WHO), figg.encode.publish("t", range(1, 1 + len(values)), values)


def fujin_(broker: Broker, values: list[bytes]) -> tuple[Any, bytes]:
    session = FujinSession(broker, StreamLink(), WHO, WriterIds())
    writes = fujin.encode.writes("t", [cid(number) for number in range(len(values))], values)
    return session, fujin.encode.connect_writer(b"id") + writes


PROTOCOLS = [flymq, rustlog, blipmq_, figg_, fujin_]


async def published(
    open_session: Callable[[Broker, list[bytes]], tuple[Any, bytes]], values: list[bytes], count: int
) -> list[bytes | None]:
    """Return the values of the topic when it has this many."""
    clock = HandClock()
    broker = Broker(FragileEngine(clock=clock), clock=clock, later=clock.later)
    await broker.open()
    try:
        await broker.create_topic(WHO, "t")
        await broker.schemas.register(WHO, "s", SchemaType.JSON, WIDE)
        await broker.schemas.require(WHO, "t", "s")
        session, frames = open_session(broker, values)
        session.receive(frames)
        async with asyncio.timeout(300):
            while broker.bounds(WHO, "t", 0).end < count:  # noqa: ASYNC110  (it waits for a process)
                await asyncio.sleep(0.01)
        session.lost()
        fetched = await broker.fetch(WHO, "t", 0, 0, bytes_max=1 << 20)
        return [value for batch in fetched.batches for value in batch.values()]
    finally:
        await broker.close()


@pytest.mark.parametrize("open_session", PROTOCOLS)
async def test_a_record_that_is_checked_elsewhere_keeps_its_place(open_session: Callable[..., Any]) -> None:
    assert await published(open_session, [SMALL, LARGE, SMALL], 3) == [SMALL, LARGE, SMALL]


@pytest.mark.parametrize("open_session", [flymq, rustlog, blipmq_, fujin_])
async def test_a_record_that_does_not_fit_takes_no_other_down_with_it(open_session: Callable[..., Any]) -> None:
    assert await published(open_session, [LARGE, WRONG, SMALL], 2) == [LARGE, SMALL]
