"""A topic that requires a schema requires it of every protocol."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import count

import pytest

from headrace.clients.flymq.client import FlyMqClient
from headrace.errors import HeadraceError
from tests.protocols.peers import DIALECTS, PEERS, QUIC, WAIT_SECONDS, Broker, Peer, serving

NAMES = count()
VOICES = PEERS + DIALECTS + QUIC
voices = pytest.mark.parametrize("writer", VOICES, ids=str)
REFUSED_WITHIN_SECONDS = 3.0


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with serving(tmp_path_factory.mktemp("schemas")) as broker:
        yield broker


async def required(client: FlyMqClient, on_invalid: str) -> str:
    topic = f"required-{next(NAMES)}"
    await client.create_topic(topic)
    await client.register_schema("number", "json", b'{"type":"integer"}')
    await client.require_schema(topic, "number", on_invalid=on_invalid)
    return topic


async def values(client: FlyMqClient, topic: str) -> list[bytes]:
    return [message.value for message in await client.fetch(topic, 0)]


@voices
async def test_what_does_not_fit_is_refused_and_what_fits_is_taken(broker: Broker, writer: Peer) -> None:
    async with asyncio.timeout(WAIT_SECONDS), broker.connect("flymq") as admin:
        assert isinstance(admin, FlyMqClient)
        topic = await required(admin, "reject")
        async with broker.connect(writer) as client:
            await client.publish(topic, b"1")
            await client.flush()
        with pytest.raises((HeadraceError, TimeoutError)):  # Figg can only close, and its client then reconnects indefinitely
            async with broker.connect(writer) as client:
                async with asyncio.timeout(REFUSED_WITHIN_SECONDS):
                    await client.publish(topic, b"x")
                    await client.flush()
        assert await values(admin, topic) == [b"1"]


@voices
async def test_what_does_not_fit_becomes_a_dead_letter(broker: Broker, writer: Peer) -> None:
    async with asyncio.timeout(WAIT_SECONDS), broker.connect("flymq") as admin:
        assert isinstance(admin, FlyMqClient)
        topic = await required(admin, "dead_letter")
        async with broker.connect(writer) as client:
            for value in (b"1", b"x", b"2"):
                await client.publish(topic, value)
            await client.flush()
        assert await values(admin, topic) == [b"1", b"2"]
        (letter,) = await admin.dead_letters(topic)
        assert letter.value == b"x" and letter.reason.startswith("rejected: invalid JSON message")
