"""The same session over the engine that keeps its promise on a disk."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from headrace.broker.broker import Broker
from headrace.engine.embedded import EmbeddedEngine
from headrace.sessions.flymq.session import FlyMqSession
from headrace.storage.files import DiskFiles
from headrace.storage.store import StoreOptions
from headrace.wire.flymq.messages import (
    Commit,
    CreateTopic,
    Fetch,
    Fetched,
    GetLag,
    LagReply,
    ListTopics,
    Mode,
    OffsetReply,
    ProduceBatch,
    SeekToTimestamp,
    Subscribe,
    TopicList,
)
from tests.sessions.flymq.support import DEV, NOW, Peer, placed
from tests.sessions.wire import Wire


@asynccontextmanager
async def on_disk(path: Path) -> AsyncIterator[Peer]:
    """A peer of a broker on this directory."""
    broker = Broker(EmbeddedEngine(DiskFiles(path), StoreOptions(), clock=lambda: NOW), clock=lambda: NOW)
    await broker.open()
    wire = Wire()
    peer = Peer(FlyMqSession(wire, broker, DEV), wire)
    try:
        yield peer
    finally:
        peer.session.lost()
        await broker.close()


async def test_records_topics_and_offsets_are_there_after_a_restart(tmp_path: Path) -> None:
    values = [b"%05d" % number for number in range(5_000)]
    keys: list[bytes | None] = [b"k%d" % (number % 3) if number % 2 else None for number in range(5_000)]
    async with on_disk(tmp_path) as peer:
        await peer.one(CreateTopic("orders", 3))
        replies = await peer.exchange(ProduceBatch("orders", values, keys), Commit("orders", "readers", 1, 7))
        places = [placed(reply) for reply in replies[:-1]]
        assert len(set(places)) == len(values)
    async with on_disk(tmp_path) as peer:
        assert await peer.one(ListTopics()) == TopicList(["orders"])
        found: dict[tuple[int, int], tuple[bytes | None, bytes]] = {}
        for partition in range(3):
            fetched = await peer.one(Fetch("orders", partition, 0, 10_000))
            assert isinstance(fetched, Fetched)
            rows = zip(fetched.offsets, fetched.keys or [None] * len(fetched.offsets), fetched.values, strict=True)
            found |= {(partition, offset): (key, value) for offset, key, value in rows}
        assert [found[place] for place in places] == list(zip(keys, values, strict=True))
        assert await peer.one(Subscribe("orders", "readers", 1, Mode("commit"))) == OffsetReply(7)
        end = 1 + max(offset for partition, offset in places if partition == 1)
        assert await peer.one(GetLag("orders", "readers", 1)) == LagReply(7, 7, end, end - 7)
        assert await peer.one(SeekToTimestamp("orders", 1, NOW)) == OffsetReply(0)
        assert await peer.one(SeekToTimestamp("orders", 1, NOW + 1)) == OffsetReply(end)
