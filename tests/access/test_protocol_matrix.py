"""The authorization matrix of the protocols beside FlyMQ; see `test_matrix.py`."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import get_args

import pytest

from headrace.broker import Principal
from headrace.broker.groups.subscriptions import SubscriptionBook
from headrace.sessions.blipmq.session import BlipMqSession
from headrace.sessions.blipmq.settings import BlipMqSettings
from headrace.sessions.blipmq.subscriptions import Subscriptions
from headrace.sessions.figg.session import FiggSession
from headrace.sessions.fujin.session import FujinSession
from headrace.sessions.fujin.writer import WriterIds
from headrace.sessions.rustlog.session import RustLogContext, RustLogSession
from headrace.wire import blipmq, fujin
from headrace.wire import figg as figg_wire
from headrace.wire.rustlog import Dialect as RustLogDialect
from headrace.wire.rustlog import messages as r
from tests.access.test_matrix import CREATES, SEES, SEES_AND_GROUP, Row, Tally, World, world
from tests.access.world import NAMES, PEOPLE, needed
from tests.broker.harness import turns
from tests.conftest import Proof
from tests.sessions.blipmq.support import Peer as BlipMqPeer
from tests.sessions.figg.peer import TestLink
from tests.sessions.fujin.support import StreamLink, cid
from tests.sessions.rustlog.support import Peer as RustLogPeer
from tests.sessions.wire import Wire

# RustLog.

RUSTLOG: dict[type, Row] = {
    r.Produce: Row(lambda n: r.Produce(n, 0, [b"x"]), "publish t"),
    r.Fetch: Row(lambda n: r.Fetch(n, 0, 0, 100), "read t", SEES),
    r.OffsetCommit: Row(lambda n: r.OffsetCommit(n, 0, n, 0), "commit g & read t"),
    r.OffsetFetch: Row(lambda n: r.OffsetFetch(n, 0, n), SEES_AND_GROUP),
    r.CreateTopic: Row(lambda n: r.CreateTopic(n, 1), CREATES),
    r.ListTopics: Row(lambda n: r.ListTopics(), ""),
    r.DescribeTopic: Row(lambda n: r.DescribeTopic(n), SEES),
    r.DescribePartition: Row(lambda n: r.DescribePartition(n, 0), SEES),
    r.MetricsFetch: Row(lambda n: r.MetricsFetch(), ""),
    r.Ping: Row(lambda n: r.Ping(), ""),
}


def test_every_rustlog_request_has_a_row() -> None:
    assert set(RUSTLOG) == set(get_args(r.Request))


@pytest.mark.parametrize("who", PEOPLE)
async def test_every_rustlog_request_is_answered_as_the_policy_says(who: str, proof: Proof) -> None:
    tally = Tally()
    async with world() as harness:
        wire = Wire()
        session = RustLogSession(wire, harness.broker, PEOPLE[who].at("rustlog"), RustLogContext(ticks_ns=iter(range(1 << 30)).__next__))
        peer = RustLogPeer(session, wire)
        for kind, row in RUSTLOG.items():
            for name in NAMES:
                reply = await peer.exchange(RustLogDialect.JSON, row.request(name))
                got = not (isinstance(reply, r.ErrorReply) and " may not " in str(reply))
                tally.add(f"{kind.__name__} {name}", got, needed(who, "rustlog", row.of(name), name))
                await harness.restore(name)
        session.lost()
    assert tally.wrong == []
    proof("authorization cases", tally.cases)


# BlipMQ.

BLIPMQ: dict[int, Row] = {
    blipmq.FrameType.PUBLISH: Row(lambda n: blipmq.encoder.publishes(1, n, [7], [b"x"]), "publish t", "publish t & create t"),
    blipmq.FrameType.SUBSCRIBE: Row(lambda n: blipmq.encoder.subscribe(7, n, 1), "read t", "create t & read t"),
    blipmq.FrameType.POLL: Row(lambda n: blipmq.encoder.polls(999, [7]), ""),
    blipmq.FrameType.PING: Row(lambda n: blipmq.encoder.ping(7), ""),
}
BLIPMQ_NO_REQUESTS = {"HELLO", "AUTH", "ACK", "NACK", "PONG"}
"""The login, and frames that settle or answer."""


def test_every_blipmq_request_has_a_row() -> None:
    assert {kind.name for kind in blipmq.FrameType} == {blipmq.FrameType(kind).name for kind in BLIPMQ} | BLIPMQ_NO_REQUESTS


@asynccontextmanager
async def blipmq_peer(harness: World, principal: Principal) -> AsyncIterator[BlipMqPeer]:
    """Return a peer that is logged in as this principal."""
    book = SubscriptionBook(harness.engine, "blipmq")
    subscriptions = Subscriptions(harness.broker, book, clock=harness.clock, settings=BlipMqSettings(), later=harness.clock.later)
    await subscriptions.open()
    wire = Wire()
    peer = BlipMqPeer(BlipMqSession(wire, harness.broker, subscriptions, verify_key=lambda key: principal), wire)
    await peer.login()
    yield peer
    peer.session.lost()
    await turns()
    await subscriptions.close()


@pytest.mark.parametrize("who", PEOPLE)
async def test_every_blipmq_request_is_answered_as_the_policy_says(who: str, proof: Proof) -> None:
    tally = Tally()
    async with world() as harness, blipmq_peer(harness, PEOPLE[who].at("blipmq")) as peer:
        for kind, row in BLIPMQ.items():
            for name in NAMES:
                replies = await peer.exchange(row.request(name))
                got = not any(isinstance(reply, blipmq.Nack) and reply.code == 401 for reply in replies)
                tally.add(f"{blipmq.FrameType(kind).name} {name}", got, needed(who, "blipmq", row.of(name), name))
                await harness.restore(name)
    assert tally.wrong == []
    proof("authorization cases", tally.cases)


# Figg and Fujin: a denied request ends the connection, so each request has its own.

FIGG = {
    "publish": Row(lambda n: figg_wire.encode.publish(n, [1], [b"x"]), "publish t", "publish t & create t"),
    "attach": Row(lambda n: figg_wire.encode.attach(n, 0), "read t", "create t & read t"),
    "detach": Row(lambda n: figg_wire.encode.detach(n), ""),
    "ping": Row(lambda n: figg_wire.encode.ping(1), ""),
}
FIGG_SERVER = {"attached", "detached", "data", "ack", "acks", "pong"}


def test_every_figg_request_has_a_row() -> None:
    own = inspect.getmembers(figg_wire.encode, lambda found: inspect.isroutine(found) and found.__module__ == figg_wire.encode.__name__)
    said = {name for name, _ in own if not name.startswith("_")}
    assert said == set(FIGG) | FIGG_SERVER


@pytest.mark.parametrize("who", PEOPLE)
async def test_every_figg_request_is_answered_as_the_policy_says(who: str, proof: Proof) -> None:
    tally = Tally()
    async with world() as harness:
        for kind, row in FIGG.items():
            for name in NAMES:
                link = TestLink()
                session = FiggSession(harness.broker, link, PEOPLE[who].at("figg"))
                session.receive(row.request(name))
                await turns()
                got = link.closed is None or " may not " not in link.closed[0]
                tally.add(f"{kind} {name}", got, needed(who, "figg", row.of(name), name))
                session.lost()
                await harness.restore(name)
    assert tally.wrong == []
    proof("authorization cases", tally.cases)


def fujin_writer(name: str, *steps: bytes) -> bytes:
    """Connect a writer whose id is also the name: it identifies the transaction."""
    return fujin.encode.connect_writer(name.encode()) + b"".join(steps)


def fujin_reader(name: str, kind: fujin.ReaderKind, *steps: bytes) -> bytes:
    return fujin.encode.connect_reader(kind, False, name) + b"".join(steps)


def fujin_write(name: str) -> bytes:
    return fujin.encode.writes(name, [cid(1)], [b"x"])


BEGIN, COMMIT, ROLLBACK = (
    fujin.encode.transact(step, cid(2)) for step in (fujin.Request.BEGIN, fujin.Request.COMMIT, fujin.Request.ROLLBACK)
)
PULL = fujin.ReaderKind.PULL
READS, READS_NEW = "read t & commit g", "create t & read t & commit g"
FUJIN = {
    fujin.Request.CONNECT_WRITER: Row(lambda n: fujin_writer(n), ""),
    fujin.Request.CONNECT_READER: Row(lambda n: fujin_reader(n, fujin.ReaderKind.PUSH), READS, READS_NEW),
    fujin.Request.WRITE: Row(lambda n: fujin_writer(n, fujin_write(n)), "publish t", "publish t & create t"),
    fujin.Request.BEGIN: Row(lambda n: fujin_writer(n, BEGIN), "publish i"),
    fujin.Request.COMMIT: Row(
        lambda n: fujin_writer(n, BEGIN, fujin_write(n), COMMIT), "publish i & publish t", "publish i & publish t & create t"
    ),
    fujin.Request.ROLLBACK: Row(lambda n: fujin_writer(n, BEGIN, ROLLBACK), "publish i"),
    fujin.Request.FETCH: Row(lambda n: fujin_reader(n, PULL, fujin.encode.fetch(cid(3), 1)), READS, READS_NEW),
    fujin.Request.ACK: Row(lambda n: fujin_reader(n, PULL, fujin.encode.settle(fujin.Request.ACK, cid(3), [b"?"])), READS, READS_NEW),
    fujin.Request.NACK: Row(lambda n: fujin_reader(n, PULL, fujin.encode.settle(fujin.Request.NACK, cid(3), [b"?"])), READS, READS_NEW),
    fujin.Request.DISCONNECT: Row(lambda n: fujin_writer(n, fujin.encode.DISCONNECT), ""),
    fujin.Request.PONG: Row(lambda n: fujin.encode.PONG, ""),
}


def test_every_fujin_request_has_a_row() -> None:
    assert set(FUJIN) == set(fujin.Request)


@pytest.mark.parametrize("who", PEOPLE)
async def test_every_fujin_request_is_answered_as_the_policy_says(who: str, proof: Proof) -> None:
    tally = Tally()
    async with world() as harness:
        for kind, row in FUJIN.items():
            for name in NAMES:
                link = StreamLink()
                session = FujinSession(harness.broker, link, PEOPLE[who].at("fujin"), WriterIds())
                session.receive(row.request(name))
                await turns()
                got = b" may not " not in bytes(link.sent)
                tally.add(f"{kind.name} {name}", got, needed(who, "fujin", row.of(name), name))
                session.lost()
                await turns()
                await harness.restore(name)
    assert tally.wrong == []
    proof("authorization cases", tally.cases)
