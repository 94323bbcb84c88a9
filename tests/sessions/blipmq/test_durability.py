"""The same session over the engine that keeps its promise on a disk."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from headrace.broker.broker import Broker
from headrace.broker.groups.subscriptions import SubscriptionBook
from headrace.engine.embedded import EmbeddedEngine
from headrace.errors import LimitExceeded
from headrace.limits import BLIPMQ_SUBSCRIPTIONS_MAX
from headrace.sessions.blipmq.session import BlipMqSession
from headrace.sessions.blipmq.settings import BlipMqSettings
from headrace.sessions.blipmq.subscriptions import Subscriptions
from headrace.storage.files import DiskFiles
from headrace.storage.store import StoreOptions
from headrace.wire.blipmq import Nack, Subscribe, encoder
from tests.sessions.blipmq.support import KEYS, Clockwork, Peer, running_server
from tests.sessions.wire import Wire

DEV = KEYS[b"dev-key"]


@asynccontextmanager
async def on_disk(path: Path) -> AsyncIterator[Peer]:
    """A logged-in peer of a broker on this directory."""
    clock = Clockwork()
    engine = EmbeddedEngine(DiskFiles(path), StoreOptions(), clock=clock)
    broker = Broker(engine, clock=clock)
    await broker.open()
    subscriptions = Subscriptions(broker, SubscriptionBook(engine, "blipmq"), clock=clock, settings=BlipMqSettings(retry_backoff_ms=60_000))
    await subscriptions.open()
    wire = Wire()
    peer = Peer(BlipMqSession(wire, broker, subscriptions, verify_key=KEYS.get), wire)
    try:
        yield await peer.login()
    finally:
        peer.session.lost()
        await subscriptions.close()
        await broker.close()


async def test_publish_ack_half_restart_and_every_message_without_an_ack_comes(tmp_path: Path) -> None:
    values = [b"%03d" % index for index in range(100)]
    async with on_disk(tmp_path) as peer:
        subscription = await peer.subscribe("demo")
        await peer.publish("demo", *values)
        tags = [tag for _, tag, _ in await peer.poll(subscription, 100)]
        assert await peer.exchange(encoder.acks(subscription, tags[::2])) == []
    async with on_disk(tmp_path) as peer:
        found = [value for _, _, value in await peer.poll(subscription, 200)]
        assert set(found) >= set(values[1::2])
        assert found == sorted(found)
        assert await peer.exchange(encoder.acks(subscription, range(1, len(found) + 1))) == []
    async with on_disk(tmp_path) as peer:
        assert await peer.poll(subscription, 200) == []


async def test_a_new_subscribe_after_a_restart_gets_the_backlog_from_disk(tmp_path: Path) -> None:
    async with on_disk(tmp_path) as peer:
        old = await peer.subscribe("demo")
        await peer.publish("demo", b"a", b"b", qos=1)
    async with on_disk(tmp_path) as peer:
        new = await peer.subscribe("demo")
        assert new > old
        assert [value for _, _, value in await peer.poll(new, 5)] == [b"a", b"b"]
    async with on_disk(tmp_path) as peer:
        assert await peer.exchange(encoder.polls(old, [5])) == [Nack(5, 404, "unknown subscription or delivery tag")]
        assert [value for _, _, value in await peer.poll(new, 5)] == [b"a", b"b"]


async def test_a_pong_means_that_another_process_would_find_the_records(tmp_path: Path) -> None:
    async with on_disk(tmp_path / "live") as peer:
        await peer.publish("demo", *[b"%d" % index for index in range(500)], qos=1)
        # What the files hold at this moment is what a crash would leave.
        await asyncio.to_thread(_copy, tmp_path / "live", tmp_path / "image")
    async with on_disk(tmp_path / "image") as peer:
        (reply,) = await peer.exchange(encoder.publishes(1, "demo", [1], [b"next"]) + encoder.polls(0, [2]))
        assert isinstance(reply, Nack)
        assert peer.session._broker.bounds(DEV, "demo", 0).end == 501


async def test_all_subscriptions_together_have_a_limit() -> None:
    async with running_server() as broker:
        for _ in range(BLIPMQ_SUBSCRIPTIONS_MAX):
            await broker.subscriptions.subscribe(DEV, Subscribe(1, "demo", 0))
        with pytest.raises(LimitExceeded, match="20000 subscriptions"):
            await broker.subscriptions.subscribe(DEV, Subscribe(1, "demo", 0))
        peer = await broker.client()
        (reply,) = await peer.exchange(encoder.subscribe(5, "demo", 1))
        assert isinstance(reply, Nack) and reply.code == 400


def _copy(source: Path, target: Path) -> None:
    target.mkdir()
    for path in sorted(source.rglob("*")):
        copy = target / path.relative_to(source)
        if path.is_dir():
            copy.mkdir()
        elif path.name != "lock":
            copy.write_bytes(path.read_bytes())
